"""FP8 in blocks of 128 in plain torch: the readable specification, and what runs without a compiler.

A tensor is the matrix ``(M, K)`` of its last dimension against all others. ``dim`` 1: one scale for 128
elements in a row (rowwise) or in a column (columnwise); ``dim`` 2: one for a tile of 128x128, in both
directions. Missing elements of a block at an edge count as 0. The rules are those of Transformer Engine's
kernels, whose recorded outputs the tests compare with, except that the padding of scales is always 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tejit.format_info import FP8_BLOCK, FP8_ELEMENTS
from tejit.kernels.fp8.reference import (
    cast,
    divide,
    scale_from_amax,
    transpose_bytes,
    transposed_shape,
    values_of,
    write_unless,
)
from tejit.kernels.gather import block_of_each
from tejit.kernels.rounding import as_rounded

BLOCK = FP8_BLOCK.block or 0
#: Bytes and scales of both directions: ``(row, row_scale_inv, col, col_scale_inv)``.
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """``(M, K)``: all leading dimensions together, and the last one; ``(1, 1)`` for a scalar."""
    return math.prod(shape[:-1]), shape[-1] if len(shape) else 1


def blocks(size: int) -> int:
    """How many blocks of 128 cover ``size`` elements."""
    return -(-size // BLOCK)


def aligned(size: int) -> int:
    """``size`` up to a multiple of 4, what a row of a scale buffer is padded to."""
    return -(-size // FP8_BLOCK.scale_alignment) * FP8_BLOCK.scale_alignment


def scale_shape(rows: int, contracted: int, dim: int) -> tuple[int, int]:
    """The scale buffer of an operand ``(rows, contracted)``: the rowwise one for (M, K), the columnwise for (K, M)."""
    if dim == 1:
        return blocks(contracted), aligned(rows)
    return blocks(rows), aligned(blocks(contracted))


def amax_of_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """max|x| of each block of ``rows`` by ``columns``, float32 ``(cd(M, rows), cd(K, columns))``; without NaN."""
    magnitude = x.abs()
    magnitude = torch.where(x == x, magnitude, torch.zeros_like(magnitude))
    magnitude = F.pad(magnitude, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    down, across = magnitude.shape[0] // rows, magnitude.shape[1] // columns
    return magnitude.reshape(down, rows, across, columns).amax((1, 3)).to(torch.float32)


def spread(scales: Tensor, rows: int, columns: int, block_rows: int, block_columns: int) -> Tensor:
    """The scale of each element of a ``(rows, columns)`` matrix from those of its blocks.

    A gather: what inductor makes of repeat-and-slice loses the end of a row that is no multiple of the block, and
    what it makes of ``arange // block`` too (see :func:`block_of_each`).
    """
    if block_rows > 1:
        scales = scales[block_of_each(rows, block_rows, scales.device)]
    if block_columns > 1:
        scales = scales[:, block_of_each(columns, block_columns, scales.device)]
    return scales


def padded(scales: Tensor) -> Tensor:
    return F.pad(scales, (0, aligned(scales.shape[1]) - scales.shape[1])).contiguous()


def quantize(x: Tensor, fp8: int, dim: int, rowwise: bool, columnwise: bool, pow2: bool, eps: float) -> Four:
    shape = tuple(x.shape)
    rows, columns = matrix_shape(shape)
    matrix = as_rounded(x).reshape(rows, columns)
    limit = torch.finfo(x.dtype).max

    def coded(block_rows: int, block_columns: int) -> tuple[Tensor, Tensor]:
        amax = amax_of_blocks(matrix, block_rows, block_columns)
        multiplier = scale_from_amax(amax, FP8_ELEMENTS[fp8].max, pow2, eps, limit)
        scale_inv = divide(torch.ones_like(multiplier), multiplier)
        codes = cast(matrix, spread(multiplier, rows, columns, block_rows, block_columns), fp8)
        return codes.reshape(shape), scale_inv

    row = col = x.new_empty((0,), dtype=torch.uint8)
    row_scale_inv = col_scale_inv = x.new_empty((0,), dtype=torch.float32)
    if dim == 2 and (rowwise or columnwise):
        codes, scale_inv = coded(BLOCK, BLOCK)
        if rowwise:
            row, row_scale_inv = codes, padded(scale_inv)
        if columnwise:
            col, col_scale_inv = transpose_bytes(codes), padded(scale_inv.t())
    if dim == 1 and rowwise:
        row, scale_inv = coded(1, BLOCK)
        row_scale_inv = padded(scale_inv.t())
    if dim == 1 and columnwise:
        codes, scale_inv = coded(BLOCK, 1)
        col, col_scale_inv = transpose_bytes(codes), padded(scale_inv)
    return row, row_scale_inv, col, col_scale_inv


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
    fresh = quantize(x, fp8, dim, row is not None, col is not None, pow2, eps)
    write_unless((row, row_scale_inv, col, col_scale_inv), fresh, noop)


def values(codes: Tensor, scale_inv: Tensor, fp8: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """``float(q) * scale_inv`` of an operand ``(rows, contracted)``, rounded once to ``dtype``."""
    rows, contracted = codes.shape
    block = block_of_each(contracted, BLOCK, codes.device)
    row = torch.arange(rows, device=codes.device) if dim == 1 else block_of_each(rows, BLOCK, codes.device)
    # One gather and no slice: whether a slice of a padded buffer is contiguous would be a guard on the size.
    factors = scale_inv[block, row[:, None]] if dim == 1 else scale_inv[row[:, None], block]
    return (values_of(codes, fp8) * factors).to(dtype)


def dequantize_row(row: Tensor, scale_inv: Tensor, fp8: int, dim: int, dtype: torch.dtype) -> Tensor:
    """The tensor from its rowwise buffers; ``row`` uint8 of the logical shape."""
    return values(row.reshape(matrix_shape(tuple(row.shape))), scale_inv, fp8, dim, dtype).reshape(row.shape)


def dequantize_col(col: Tensor, scale_inv: Tensor, fp8: int, dim: int, dtype: torch.dtype) -> Tensor:
    """The tensor from its columnwise buffers; ``col`` uint8, the last dimension first."""
    shape = (*col.shape[1:], *col.shape[:1])
    rows, columns = matrix_shape(shape)
    return values(col.reshape(columns, rows), scale_inv, fp8, dim, dtype).t().contiguous().reshape(shape)


def transpose_squares(row: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """The columnwise buffers of a tensor in 128x128 blocks from its rowwise ones: the same bytes and scales."""
    across = blocks(matrix_shape(tuple(row.shape))[1])
    return transpose_bytes(row), padded(scale_inv[:, :across].t())


def make_empty(
    shape: list[int], dim: int, rowwise: bool, columnwise: bool, device: torch.device, pin_memory: bool
) -> Four:
    size = tuple(shape)
    rows, columns = matrix_shape(size)

    def buffer(present: bool, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size if present else (0,), dtype=dtype, device=device, pin_memory=pin_memory)

    return (
        buffer(rowwise, size, torch.uint8),
        buffer(rowwise, scale_shape(rows, columns, dim), FP8_BLOCK.scale_dtype),
        buffer(columnwise, transposed_shape(size), torch.uint8),
        buffer(columnwise, scale_shape(columns, rows, dim), FP8_BLOCK.scale_dtype),
    )
