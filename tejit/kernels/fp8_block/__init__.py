"""FP8 in blocks of 128: what the rest of the package calls.

Each function goes through the compiled op where there is one and through the pure-torch reference
elsewhere (see ``kernels.backend``); the bytes are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.kernels import backend
from tejit.kernels.arguments import QUANTIZES, refuse_gradients
from tejit.kernels.fp8_block import reference
from tejit.kernels.fp8_block.reference import (
    BLOCK,
    Four,
    dequantize_col,
    dequantize_row,
    matrix_shape,
    scale_shape,
    transpose_squares,
    values,
)

__all__ = [
    "BLOCK",
    "Four",
    "dequantize_col",
    "dequantize_row",
    "make_empty",
    "matrix_shape",
    "quantize",
    "quantize_out",
    "scale_shape",
    "transpose_squares",
    "values",
]


def quantize(x: Tensor, fp8: int, dim: int, rowwise: bool, columnwise: bool, pow2: bool, eps: float) -> Four:
    """Quantize with one scale for each block of 128.

    Args:
        x: float32, bfloat16 or float16, any shape and strides.
        fp8: ``ElementInfo.code`` of the element type.
        dim: 1 for blocks of 1x128 (rowwise) and 128x1 (columnwise), 2 for tiles of 128x128.
        rowwise: whether bytes in the order of ``x`` are wanted, scaled along K.
        columnwise: whether bytes of the transpose are wanted, scaled along M.
        pow2: round scales down to powers of two.
        eps: lower bound of each amax.

    Returns:
        ``(row, row_scale_inv, col, col_scale_inv)``: uint8 of ``x.shape``, float32 of
        :func:`scale_shape` ``(M, K)``, uint8 transposed, float32 of :func:`scale_shape` ``(K, M)``; unwanted
        buffers have shape ``(0,)``.
    """
    refuse_gradients("kernels.fp8_block.quantize", QUANTIZES, x=x)
    if backend.use_ops(x.device):
        return torch.ops.tejit.fp8_block_quantize.default(x, fp8, dim, rowwise, columnwise, pow2, eps)
    return reference.quantize(x, fp8, dim, rowwise, columnwise, pow2, eps)


def quantize_out(
    x: Tensor,
    fp8: int,
    dim: int,
    pow2: bool,
    eps: float,
    noop: Tensor | None,
    row: Tensor | None,
    row_scale_inv: Tensor | None,
    col: Tensor | None,
    col_scale_inv: Tensor | None,
) -> None:
    """:func:`quantize` into given buffers (a direction's two, or None for both); ``noop`` (float32, one element)
    equal to 1.0 leaves them as they are."""
    refuse_gradients("kernels.fp8_block.quantize_out", QUANTIZES, x=x)
    arguments = (x, fp8, dim, pow2, eps, noop, row, row_scale_inv, col, col_scale_inv)
    if backend.use_ops(x.device):
        torch.ops.tejit.fp8_block_quantize_out.default(*arguments)
    else:
        reference.quantize_out(*arguments)


def make_empty(
    shape: tuple[int, ...], dim: int, rowwise: bool, columnwise: bool, device: torch.device, pin_memory: bool
) -> Four:
    """Uninitialised buffers of a tensor of ``shape``, in one call of the extension."""
    return torch.ops.tejit.fp8_block_make_empty.default(shape, dim, rowwise, columnwise, device, pin_memory)
