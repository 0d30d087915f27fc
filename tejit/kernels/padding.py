"""Padding as arithmetic: zeros up to a multiple, in one graph for every size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """``matrix`` with zeros below and on the right, up to the given multiples.

    Inside a graph the padding is unconditional arithmetic, so that one graph serves every size; it is
    left out only where it is known to be nothing.
    """
    if rows == columns == 1:
        return matrix
    height, width = matrix.shape
    below, right = -height % rows, -width % columns
    if torch.compiler.is_compiling():
        nothing = known_zero(below) and known_zero(right)
    else:
        nothing = not (below or right)
    if nothing:
        return matrix
    return F.pad(matrix, (0, right, 0, below))


def cut(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The first ``rows`` and ``columns`` of a matrix, contiguous; itself where it is known to have no more.

    Whoever gets it is not to notice that it was padded: ``view`` works, and torch's attention was seen to give wrong
    gradients for a ``grad_output`` whose rows lie further apart than they are long.
    """
    if not known_zero(matrix.shape[0] - rows):
        matrix = matrix[:rows]
    if not known_zero(matrix.shape[1] - columns):
        matrix = matrix[:, :columns].contiguous()
    return matrix


def cut_out(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """:func:`cut` as a tensor of its own, which shares no memory with what was cut off: what leaves a product.

    A view would keep all of it alive and in files, and autograd takes no in-place operation on an output that is one.
    """
    if known_zero(matrix.shape[0] - rows) and known_zero(matrix.shape[1] - columns):
        return matrix
    if torch.compiler.is_compiling():
        # Not a clone, which inductor takes out again: it looks at sizes and strides, not at what lies behind them.
        return F.pad(matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0]))
    return matrix[:rows, :columns].clone(memory_format=torch.contiguous_format)


def known_zero(amount: int) -> bool:
    """Whether an amount is 0; while compiling, whether it is for every size that the graph serves."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(amount == 0)
    return amount == 0
