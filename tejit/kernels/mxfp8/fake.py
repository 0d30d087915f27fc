"""What the ops of MXFP8 return, without data: shapes, dtypes, devices and strides of their outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.kernels.fp8_block.reference import Four, matrix_shape
from tejit.kernels.mxfp8.reference import check_shape, scale_shapes
from tejit.kernels.mxfp8.reference import make_empty as make_empty  # allocation is its own description


def quantize(x: Tensor, fp8: int, rowwise: bool, columnwise: bool, square: bool, swizzled: bool) -> Four:
    shape = tuple(x.shape)
    check_shape(shape, rowwise, columnwise, square)
    row_shape, col_shape = scale_shapes(*matrix_shape(shape))
    return (
        x.new_empty(shape if rowwise else (0,), dtype=torch.uint8),
        x.new_empty(row_shape if rowwise else (0,), dtype=torch.uint8),
        x.new_empty(shape if columnwise else (0,), dtype=torch.uint8),
        x.new_empty(col_shape if columnwise else (0,), dtype=torch.uint8),
    )


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
    return None
