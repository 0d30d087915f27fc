"""MXFP8 in plain torch: the readable specification, and what runs without a compiler.

A tensor is the matrix ``(M, K)`` of its last dimension against all others. 32 elements of a row (rowwise) or of a
column (columnwise) share a power of two, stored as its exponent in one byte (E8M0); ``square`` gives a tile of 32x32
one exponent in both directions. Neither direction's bytes are transposed. The format is that of the OCP Microscaling
specification 1.0; the exponent is the one that makes the largest element fit (cuBLAS's rule, torchao's RCEIL).
"""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from tejit.format_info import E8M0_BIAS, E8M0_NAN, FP8_ELEMENTS, MXFP8, checked_alignment
from tejit.kernels.fp8.reference import cast, values_of, write_unless
from tejit.kernels.fp8_block.reference import Four, amax_of_blocks, matrix_shape, spread
from tejit.kernels.gather import block_of_each
from tejit.kernels.rounding import as_rounded
from tejit.kernels.swizzle import place, swizzle

BLOCK = MXFP8.block or 0

#: Bits of float32: of the mantissa, of the smallest normal number, of 2^-127.
_MANTISSA = 23
_MIN_NORMAL = 1 << _MANTISSA
_SMALLEST_SCALE = 1 << (_MANTISSA - 1)
_NAN = 0x7FC00000
_LARGEST_BYTE = E8M0_NAN - 1
#: 1 / max of each element type, rounded to float32.
_INVERSE_MAX = tuple(struct.unpack("f", struct.pack("f", 1.0 / element.max))[0] for element in FP8_ELEMENTS)


def scale_shapes(rows: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The scale buffers of a matrix ``(rows, columns)``: rowwise ``[m, k/32]``, columnwise ``[m/32, k]``."""
    high, wide = MXFP8.scale_row_alignment, MXFP8.scale_alignment

    def up(size: int, multiple: int) -> int:
        return -(-size // multiple) * multiple

    return (up(rows, high), up(columns // BLOCK, wide)), (up(rows // BLOCK, wide), up(columns, high))


def check_shape(shape: tuple[int, ...], rowwise: bool, columnwise: bool, square: bool = False) -> None:
    """Raises ``ValueError`` where blocks (or, with ``square``, tiles) of 32 do not cut ``shape`` evenly."""
    checked_alignment(MXFP8, shape, rowwise or (square and columnwise), columnwise or (square and rowwise))


def exponent_bytes(amax: Tensor, fp8: int) -> Tensor:
    """The E8M0 byte of each block: the exponent of ``amax / max``, rounded up to a power of two; inf gives 254."""
    bits = (amax * torch.full_like(amax, _INVERSE_MAX[fp8])).view(torch.int32)
    # What is added carries into the exponent where the number is above its power of two; a subnormal one's is 2^-127.
    rounded = torch.where(bits < _MIN_NORMAL, bits + (_SMALLEST_SCALE - 1), bits + (_MIN_NORMAL - 1))
    return (rounded >> _MANTISSA).clamp(max=_LARGEST_BYTE).to(torch.uint8)


def multipliers(exponents: Tensor) -> Tensor:
    """``2^(127 - byte)`` as float32."""
    bits = (2 * E8M0_BIAS - exponents.to(torch.int32)) << _MANTISSA
    return torch.where(bits == 0, _SMALLEST_SCALE, bits).view(torch.float32)


def factors(exponents: Tensor) -> Tensor:
    """``2^(byte - 127)`` as float32; 255 is NaN."""
    bits = exponents.to(torch.int32) << _MANTISSA
    bits = torch.where(exponents == 0, _SMALLEST_SCALE, bits)
    return torch.where(exponents == E8M0_NAN, _NAN, bits).view(torch.float32)


def quantize(x: Tensor, fp8: int, rowwise: bool, columnwise: bool, square: bool, swizzled: bool) -> Four:
    shape = tuple(x.shape)
    check_shape(shape, rowwise, columnwise, square)
    rows, columns = matrix_shape(shape)
    matrix = as_rounded(x).reshape(rows, columns)
    none = x.new_empty((0,), dtype=torch.uint8)
    row_shape, col_shape = scale_shapes(rows, columns)

    def coded(block_rows: int, block_columns: int) -> tuple[Tensor, Tensor]:
        exponents = exponent_bytes(amax_of_blocks(matrix, block_rows, block_columns), fp8)
        each = spread(multipliers(exponents), rows, columns, block_rows, block_columns)
        return cast(matrix, each, fp8).reshape(shape), exponents

    def laid_out(exponents: Tensor, size: tuple[int, int], transposed: bool) -> Tensor:
        scales = F.pad(exponents, (0, size[1] - exponents.shape[1], 0, size[0] - exponents.shape[0]))
        if swizzled:
            scales = swizzle(scales.t() if transposed else scales).reshape(size)
        return scales.contiguous()

    row, row_scale_inv, col, col_scale_inv = none, none, none, none
    if rowwise:
        row, exponents = coded(BLOCK if square else 1, BLOCK)
        exponents = spread(exponents, rows, columns // BLOCK, BLOCK, 1) if square else exponents
        row_scale_inv = laid_out(exponents, row_shape, False)
    if columnwise:
        col, exponents = coded(BLOCK, BLOCK if square else 1)
        exponents = spread(exponents, rows // BLOCK, columns, 1, BLOCK) if square else exponents
        col_scale_inv = laid_out(exponents, col_shape, True)
    return row, row_scale_inv, col, col_scale_inv


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
    fresh = quantize(x, fp8, row is not None, col is not None, square, swizzled)
    write_unless((row, row_scale_inv, col, col_scale_inv), fresh, noop)


def values(
    codes: Tensor, scale_inv: Tensor, fp8: int, swizzled: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``float(q) * 2^(byte - 127)`` of an operand ``(rows, contracted)``, rounded once to ``dtype``.

    ``scale_inv`` holds entry ``[row, contracted / 32]``: columnwise buffers come as ``.t()`` of both. Swizzled scales
    come as they lie, of either direction.
    """
    rows, contracted = codes.shape
    row = torch.arange(rows, device=codes.device)
    block = block_of_each(contracted, BLOCK, codes.device)
    if swizzled:
        lying = scale_inv.reshape(-1)[place(row[:, None], block, scale_shapes(rows, contracted)[0][1])]
        return (values_of(codes, fp8) * factors(lying)).to(dtype)
    # One gather and no slice: whether a slice of a padded buffer is contiguous would be a guard on the size.
    return (values_of(codes, fp8) * factors(scale_inv[row[:, None], block])).to(dtype)


def dequantize_row(row: Tensor, scale_inv: Tensor, fp8: int, swizzled: bool, dtype: torch.dtype) -> Tensor:
    """The tensor from its rowwise buffers; ``row`` uint8 of the logical shape."""
    matrix = row.reshape(matrix_shape(tuple(row.shape)))
    return values(matrix, scale_inv, fp8, swizzled, dtype).reshape(row.shape)


def dequantize_col(col: Tensor, scale_inv: Tensor, fp8: int, swizzled: bool, dtype: torch.dtype) -> Tensor:
    """The tensor from its columnwise buffers; ``col`` uint8 of the logical shape."""
    matrix = col.reshape(matrix_shape(tuple(col.shape))).t()
    scales = scale_inv if swizzled else scale_inv.t()
    return values(matrix, scales, fp8, swizzled, dtype).t().contiguous().reshape(col.shape)


def make_empty(shape: list[int], rowwise: bool, columnwise: bool, device: torch.device, pin_memory: bool) -> Four:
    size = tuple(shape)
    check_shape(size, rowwise, columnwise)
    row_shape, col_shape = scale_shapes(*matrix_shape(size))

    def buffer(present: bool, size: tuple[int, ...]) -> Tensor:
        return torch.empty(size if present else (0,), dtype=torch.uint8, device=device, pin_memory=pin_memory)

    return buffer(rowwise, size), buffer(rowwise, row_shape), buffer(columnwise, size), buffer(columnwise, col_shape)
