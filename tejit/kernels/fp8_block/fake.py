"""What the ops of FP8 in blocks return, without data: shapes, dtypes, devices and strides of their outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.format_info import FP8_BLOCK
from tejit.kernels.fp8.reference import transposed_shape
from tejit.kernels.fp8_block.reference import Four, matrix_shape, scale_shape
from tejit.kernels.fp8_block.reference import make_empty as make_empty  # allocation is its own description


def quantize(x: Tensor, fp8: int, dim: int, rowwise: bool, columnwise: bool, pow2: bool, eps: float) -> Four:
    shape = tuple(x.shape)
    rows, columns = matrix_shape(shape)
    scales = FP8_BLOCK.scale_dtype
    return (
        x.new_empty(shape if rowwise else (0,), dtype=torch.uint8),
        x.new_empty(scale_shape(rows, columns, dim) if rowwise else (0,), dtype=scales),
        x.new_empty(transposed_shape(shape) if columnwise else (0,), dtype=torch.uint8),
        x.new_empty(scale_shape(columns, rows, dim) if columnwise else (0,), dtype=scales),
    )


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
    return None
