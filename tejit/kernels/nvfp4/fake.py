"""What the ops of NVFP4 return, without data: shapes, dtypes, devices and strides of their outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.format_info import NVFP4
from tejit.kernels.fp8_block.reference import matrix_shape
from tejit.kernels.nvfp4.reference import Six, amax_shape, buffer_shapes, check, check_mode
from tejit.kernels.nvfp4.reference import make_empty as make_empty  # allocation is its own description


def quantize(
    x: Tensor,
    rowwise: bool,
    columnwise: bool,
    rht: bool,
    sign_mask: int,
    square: bool,
    row_scaled: bool,
    four_over_six: int,
    e4m3_max: int,
    swizzled: bool,
    seed: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
) -> Six:
    shape = tuple(x.shape)
    check(shape, rowwise, columnwise, square)
    check_mode(rht, square, row_scaled, four_over_six, e4m3_max, seed is not None)
    row, row_scales, col, col_scales, amax_row, amax_col = buffer_shapes(shape, rowwise, columnwise, row_scaled)
    return (
        x.new_empty(row, dtype=torch.uint8),
        x.new_empty(row_scales, dtype=NVFP4.scale_dtype),
        x.new_empty(col, dtype=torch.uint8),
        x.new_empty(col_scales, dtype=NVFP4.scale_dtype),
        x.new_empty(amax_row, dtype=torch.float32),
        x.new_empty(amax_col, dtype=torch.float32),
    )


def quantize_out(
    x: Tensor,
    rht: bool,
    sign_mask: int,
    square: bool,
    row_scaled: bool,
    four_over_six: int,
    e4m3_max: int,
    swizzled: bool,
    seed: Tensor | None,
    row_amax: Tensor | None,
    col_amax: Tensor | None,
    noop: Tensor | None,
    row: Tensor | None,
    row_scale_inv: Tensor | None,
    col: Tensor | None,
    col_scale_inv: Tensor | None,
    amax_row: Tensor | None,
    amax_col: Tensor | None,
) -> None:
    return None


def amax(
    x: Tensor, rowwise: bool, columnwise: bool, rht: bool, sign_mask: int, row_scaled: bool
) -> tuple[Tensor, Tensor]:
    shape = tuple(x.shape)
    check(shape, False, columnwise and rht, False)
    rows, columns = matrix_shape(shape)
    return (
        x.new_empty(amax_shape(rows, row_scaled) if rowwise else (0,), dtype=torch.float32),
        x.new_empty(amax_shape(columns, row_scaled) if columnwise else (0,), dtype=torch.float32),
    )
