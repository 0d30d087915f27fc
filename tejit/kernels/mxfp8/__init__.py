"""MXFP8: what the rest of the package calls.

Each function goes through the compiled op where there is one and through the pure-torch reference
elsewhere (see ``kernels.backend``); the bytes are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.kernels import backend
from tejit.kernels.arguments import QUANTIZES, refuse_gradients
from tejit.kernels.fp8_block.reference import Four, matrix_shape
from tejit.kernels.mxfp8 import reference
from tejit.kernels.mxfp8.reference import (
    BLOCK,
    check_shape,
    dequantize_col,
    dequantize_row,
    scale_shapes,
    values,
)

__all__ = [
    "BLOCK",
    "Four",
    "check_shape",
    "dequantize_col",
    "dequantize_row",
    "make_empty",
    "matrix_shape",
    "quantize",
    "quantize_out",
    "scale_shapes",
    "values",
]


def quantize(x: Tensor, fp8: int, rowwise: bool, columnwise: bool, square: bool, swizzled: bool) -> Four:
    """Quantize with one power of two for each block of 32.

    Args:
        x: float32, bfloat16 or float16, any strides. With ``M`` all leading dimensions together and ``K`` the last
            one, K must be a multiple of 32 for rowwise and M for columnwise data; both for ``square``.
        fp8: ``ElementInfo.code`` of the element type.
        rowwise: whether bytes scaled along K are wanted.
        columnwise: whether bytes scaled along M are wanted; they lie as ``x`` does, not transposed.
        square: one power for a tile of 32x32 instead of 1x32 (rowwise) and 32x1 (columnwise).
        swizzled: scales in the order that the GEMM reads (``kernels.swizzle``) instead of by row and column.

    Returns:
        ``(row, row_scale_inv, col, col_scale_inv)``: uint8 of ``x.shape``, uint8 of ``scale_shapes(M, K)[0]``,
        uint8 of ``x.shape``, uint8 of ``scale_shapes(M, K)[1]``; unwanted buffers have shape ``(0,)``. A scale is
        the exponent of its factor plus 127.

    Raises ``ValueError`` for a size that is no multiple of 32.
    """
    refuse_gradients("kernels.mxfp8.quantize", QUANTIZES, x=x)
    check_shape(tuple(x.shape), rowwise, columnwise, square)
    if backend.use_ops(x.device):
        return torch.ops.tejit.mxfp8_quantize.default(x, fp8, rowwise, columnwise, square, swizzled)
    return reference.quantize(x, fp8, rowwise, columnwise, square, swizzled)


def quantize_out(
    x: Tensor,
    fp8: int,
    square: bool,
    swizzled: bool,
    noop: Tensor | None,
    row: Tensor | None,
    row_scale_inv: Tensor | None,
    col: Tensor | None,
    col_scale_inv: Tensor | None,
) -> None:
    """:func:`quantize` into given buffers (a direction's two, or None for both); ``noop`` (float32, one element)
    equal to 1.0 leaves them as they are."""
    refuse_gradients("kernels.mxfp8.quantize_out", QUANTIZES, x=x)
    check_shape(tuple(x.shape), row is not None, col is not None, square)
    arguments = (x, fp8, square, swizzled, noop, row, row_scale_inv, col, col_scale_inv)
    if backend.use_ops(x.device):
        torch.ops.tejit.mxfp8_quantize_out.default(*arguments)
    else:
        reference.quantize_out(*arguments)


def make_empty(shape: tuple[int, ...], rowwise: bool, columnwise: bool, device: torch.device, pin_memory: bool) -> Four:
    """Uninitialised buffers of a tensor of ``shape``, in one call of the extension.

    Raises ``ValueError`` for a size that is no multiple of 32.
    """
    check_shape(shape, rowwise, columnwise)
    return torch.ops.tejit.mxfp8_make_empty.default(shape, rowwise, columnwise, device, pin_memory)
