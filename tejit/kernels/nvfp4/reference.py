"""NVFP4 in plain torch: the readable specification, and what runs without a compiler.

A tensor is the matrix ``(M, K)`` of its last dimension against all others. Each 16 elements along K (rowwise) or M
(columnwise) share an E4M3 scale, or each 16x16 (``square``), and all share a float32 amax ``A`` (``row_scaled``: one a
row). The rules are those of Transformer Engine's pure-torch reference, which the tests compare with, except for zero
padding, NaN and inf.
"""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from tejit import compat
from tejit.format_info import E2M1, E4M3, FLT_MAX, NVFP4, checked_alignment
from tejit.kernels.fp8.reference import divide, write_unless
from tejit.kernels.fp8_block.reference import matrix_shape
from tejit.kernels.gather import block_of_each
from tejit.kernels.nvfp4.elements import (
    e2m1_codes,
    e2m1_stochastic_codes,
    e2m1_values,
    e4m3_bytes,
    e4m3_values,
    pack,
    unpack,
)
from tejit.kernels.nvfp4.hadamard import rotate, rotate_back
from tejit.kernels.nvfp4.philox import random_bytes
from tejit.kernels.rounding import as_rounded
from tejit.kernels.swizzle import place, swizzle, unswizzle

BLOCK = NVFP4.block or 0
NONE, MAE, MSE = 0, 1, 2  # what `four_over_six` may be
#: Bytes and scales of both directions, then the two amaxes.
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

_SIXTH = struct.unpack("f", struct.pack("f", 1 / E2M1.max))[0]  # float32(1/6), without a tensor at import


# -- shapes -----------------------------------------------------------------------------------------------------
def scale_shape(rows: int, contracted: int) -> tuple[int, int]:
    """The scale buffer of an operand ``(rows, contracted)``: the rowwise one for (M, K), the columnwise for (K, M)."""
    high, wide = NVFP4.scale_row_alignment, NVFP4.scale_alignment
    return -(-rows // high) * high, -(-(contracted // BLOCK) // wide) * wide


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The rowwise bytes of a tensor of ``shape``: two elements a byte."""
    return (*shape[:-1], shape[-1] // 2)


def buffer_shapes(
    shape: tuple[int, ...], rowwise: bool, columnwise: bool, row_scaled: bool
) -> tuple[tuple[int, ...], ...]:
    """The shapes of :data:`Six`; ``(0,)`` for what is not wanted."""
    rows, columns = matrix_shape(shape)
    none = (0,)
    return (
        packed_shape(shape) if rowwise else none,
        scale_shape(rows, columns) if rowwise else none,
        (columns, rows // 2) if columnwise else none,
        scale_shape(columns, rows) if columnwise else none,
        amax_shape(rows, row_scaled) if rowwise else none,
        amax_shape(columns, row_scaled) if columnwise else none,
    )


def amax_shape(rows: int, row_scaled: bool) -> tuple[int]:
    return (rows if row_scaled else 1,)


def check(shape: tuple[int, ...], rowwise: bool, columnwise: bool, square: bool) -> None:
    """Raises ``ValueError`` for a shape that cannot be cut into blocks; tiles need both dimensions."""
    wanted = rowwise or columnwise
    checked_alignment(NVFP4, shape, rowwise or (square and wanted), columnwise or (square and wanted))


def check_mode(rht: bool, square: bool, row_scaled: bool, four_over_six: int, e4m3_max: int, stochastic: bool) -> None:
    """Raises ``ValueError`` for modes that do not go together."""
    for name, excluded in (
        ("row-scaled NVFP4", ((rht, "RHT"), (square, "2D"), (stochastic, "stochastic rounding")) if row_scaled else ()),
        ("4over6", ((rht, "RHT"), (stochastic, "stochastic rounding")) if four_over_six else ()),
    ):
        for present, other in excluded:
            if present:
                raise ValueError(f"{name} does not go with {other}; switch one of them off")
    if four_over_six not in (NONE, MAE, MSE):
        raise ValueError(f"four_over_six is {four_over_six}; it must be 0 (none), 1 (MAE) or 2 (MSE)")
    if e4m3_max not in E4M3_MAXIMA:
        raise ValueError(f"e4m3_max is {e4m3_max}; it must be 448 or 256")


#: What ``nvfp4_e4m3_max`` may be: the largest scale, or less, which leaves 4over6 room for scales 1.5 times as large.
E4M3_MAXIMA = (int(E4M3.max), 256)


# -- scales -----------------------------------------------------------------------------------------------------
def amax_rows(matrix: Tensor, row_scaled: bool) -> Tensor:
    """max|x| of the matrix ``(1,)``, or of each row ``(R,)``; float32 from 0, without NaN."""
    rows, columns = matrix.shape
    if not row_scaled:
        matrix = matrix.reshape(1, rows * columns)
    if matrix.numel() == 0:
        return torch.zeros(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    magnitude = matrix.abs()
    return torch.where(matrix == matrix, magnitude, torch.zeros_like(magnitude)).amax(1).to(torch.float32)


def amax(
    x: Tensor, rowwise: bool, columnwise: bool, rht: bool, sign_mask: int, row_scaled: bool
) -> tuple[Tensor, Tensor]:
    shape = tuple(x.shape)
    check(shape, False, columnwise and rht, False)
    matrix = as_rounded(x).reshape(matrix_shape(shape))
    none = x.new_empty((0,), dtype=torch.float32)
    row = amax_rows(matrix, row_scaled) if rowwise else none
    if not columnwise:
        return row, none
    return row, amax_rows(rotate(matrix, sign_mask).t() if rht else matrix.t(), row_scaled)


@compat.constant_result
def _largest(e4m3_max: int) -> float:
    """``6 E``: the largest value that codes times their block's scale say."""
    return E2M1.max * e4m3_max


def global_scales(amax: Tensor, e4m3_max: int) -> tuple[Tensor, Tensor]:
    """``(S_enc, S_dec)`` of each A: about ``6 E / A`` and its inverse; 1 where A is 0 or not finite."""
    quotient = divide(torch.full_like(amax, _largest(e4m3_max)), amax).clamp(max=FLT_MAX)
    usable = torch.isfinite(amax) & (amax > 0)
    encode = torch.where(usable, quotient, torch.ones_like(quotient))
    return encode, divide(torch.ones_like(encode), encode)


def stored_amax(amax: Tensor, e4m3_max: int) -> Tensor:
    """What the amax buffer holds: for an infinite A, the A that ``S_enc = 1`` means."""
    return torch.where(torch.isinf(amax), torch.full_like(amax, _largest(e4m3_max)), amax)


def multiplier(scales: Tensor, decode: Tensor) -> Tensor:
    """``t`` of step 4: what a block's values are multiplied with, from its scale bytes."""
    product = e4m3_values(scales) * decode
    return divide(torch.ones_like(product), product).clamp(max=FLT_MAX)


def _over_tile(per_row: Tensor, reduced: Tensor) -> Tensor:
    """A tile's number for each of its rows: ``reduced`` ``(R/16, n)`` to the shape of ``per_row`` ``(R, n)``."""
    return reduced[block_of_each(per_row.shape[0], BLOCK, per_row.device)]


def _tiles(per_row: Tensor) -> Tensor:
    return per_row.reshape(per_row.shape[0] // BLOCK, BLOCK, per_row.shape[1])


# -- one direction ----------------------------------------------------------------------------------------------
def encode(
    matrix: Tensor, amax: Tensor, square: bool, four_over_six: int, e4m3_max: int, seed: Tensor | None, columnwise: bool
) -> tuple[Tensor, Tensor]:
    """Packed codes ``(R, C/2)`` and scale bytes ``(R, C/16)`` of a matrix ``(R, C)``, contracted dimension last.

    ``amax`` is ``(1,)`` or ``(R,)``.
    """
    rows, columns = matrix.shape
    x = matrix.to(torch.float32).reshape(rows, columns // BLOCK, BLOCK)
    magnitude = x.abs()
    b = torch.where(x == x, magnitude, torch.zeros_like(magnitude)).amax(2)
    is_nan = (x != x).any(2)
    if square:
        b, is_nan = _over_tile(b, _tiles(b).amax(1)), _over_tile(is_nan, _tiles(is_nan).any(1))
    encode, decode = (scale[:, None] for scale in global_scales(amax, e4m3_max))
    negative = torch.signbit(x)
    if four_over_six:
        codes, scales = _four_over_six(
            x, negative, b, stored_amax(amax, e4m3_max)[:, None], encode, decode, square, four_over_six, e4m3_max
        )
    else:
        scales = e4m3_bytes((b * (encode * _SIXTH)).clamp(max=FLT_MAX))
        scaled = x * multiplier(scales, decode)[:, :, None]
        if seed is None:
            codes = e2m1_codes(scaled, negative)
        else:
            block = torch.arange(rows * (columns // BLOCK), device=x.device).reshape(rows, columns // BLOCK)
            codes = e2m1_stochastic_codes(scaled, negative, random_bytes(block, seed, columnwise))
    codes = torch.where(is_nan[:, :, None], torch.zeros_like(codes), codes)
    scales = torch.where(is_nan, torch.full_like(scales, E4M3.nan_byte), scales)
    return pack(codes.reshape(rows, columns)), scales


def _four_over_six(
    x: Tensor,
    negative: Tensor,
    b: Tensor,
    amax: Tensor,
    encode: Tensor,
    decode: Tensor,
    square: bool,
    mode: int,
    e4m3_max: int,
) -> tuple[Tensor, Tensor]:
    """Codes and scales with the block's maximum at 6 or, where the summed error is strictly less, at 4."""
    base = divide(b, torch.full_like(b, E2M1.max)) * encode
    full = torch.full_like(b, _largest(e4m3_max))

    def candidate(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scales = e4m3_bytes(value)
        codes = e2m1_codes(x * multiplier(scales, decode)[:, :, None], negative)
        factor = e4m3_values(scales)
        error = torch.zeros_like(b)
        for i in range(BLOCK):
            difference = divide(e2m1_values(codes[:, :, i]) * factor * amax, full) - x[:, :, i]
            if mode == MSE:  # an exact product in float64: no compiler may then fuse it with the sum
                wide = difference.to(torch.float64)
                error = error + (wide * wide).to(torch.float32)
            else:
                error = error + difference.abs()
        if square:
            tree = _tiles(error)
            for half in (8, 4, 2, 1):
                tree = tree[:, :half] + tree[:, half : 2 * half]
            error = _over_tile(error, tree[:, 0])
        return codes, scales, error

    codes_6, scales_6, error_6 = candidate(base)
    codes_4, scales_4, error_4 = candidate(base * 1.5)
    take_4 = error_4 < error_6
    return torch.where(take_4[:, :, None], codes_4, codes_6), torch.where(take_4, scales_4, scales_6)


def padded(scales: Tensor, swizzled: bool) -> Tensor:
    """Scale bytes ``(R, n)`` in their buffer: zeros up to multiples of 128 and 4, then the order of the GEMM."""
    rows, columns = scales.shape
    high, wide = NVFP4.scale_row_alignment, NVFP4.scale_alignment
    whole = F.pad(scales, (0, -columns % wide, 0, -rows % high)).contiguous()
    return swizzle(whole) if swizzled else whole


# -- the ops ----------------------------------------------------------------------------------------------------
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
    rows, columns = matrix_shape(shape)
    for name, given, dtype, size in (
        ("seed", seed, torch.int64, (2,)),
        ("row_amax", row_amax, torch.float32, amax_shape(rows, row_scaled)),
        ("col_amax", col_amax, torch.float32, amax_shape(columns, row_scaled)),
    ):
        # Not the shape while compiling: it would be a guard on the size.
        shape_differs = given is not None and not torch.compiler.is_compiling() and tuple(given.shape) != size
        if given is not None and (given.dtype != dtype or shape_differs):
            raise RuntimeError(
                f"tejit: {name} has dtype {given.dtype} and shape {tuple(given.shape)},"
                f" but {dtype} and shape {size} are needed"
            )
    matrix = as_rounded(x).reshape(rows, columns)
    row = row_scales = col = col_scales = x.new_empty((0,), dtype=torch.uint8)
    amax_row = amax_col = x.new_empty((0,), dtype=torch.float32)
    if rowwise:
        a = amax_rows(matrix, row_scaled) if row_amax is None else row_amax
        row, scales = encode(matrix, a, square, four_over_six, e4m3_max, seed, False)
        row, row_scales, amax_row = row.reshape(packed_shape(shape)), padded(scales, swizzled), stored_amax(a, e4m3_max)
    if columnwise:
        turned = (rotate(matrix, sign_mask) if rht else matrix).t()
        a = amax_rows(turned, row_scaled) if col_amax is None else col_amax
        col, scales = encode(turned, a, square, four_over_six, e4m3_max, seed, True)
        col_scales, amax_col = padded(scales, swizzled), stored_amax(a, e4m3_max)
    return row, row_scales, col, col_scales, amax_row, amax_col


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
    rowwise, columnwise = row is not None, col is not None
    mode = (rht, sign_mask, square, row_scaled, four_over_six, e4m3_max, swizzled)
    fresh = quantize(x, rowwise, columnwise, *mode, seed, row_amax, col_amax)
    write_unless((row, row_scale_inv, col, col_scale_inv, amax_row, amax_col), fresh, noop)


def make_empty(
    shape: list[int], rowwise: bool, columnwise: bool, row_scaled: bool, device: torch.device, pin_memory: bool
) -> Six:
    size = tuple(shape)
    check(size, rowwise, columnwise, False)
    row, row_scales, col, col_scales, amax_row, amax_col = buffer_shapes(size, rowwise, columnwise, row_scaled)

    def buffer(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device, pin_memory=pin_memory)

    return (
        buffer(row, torch.uint8),
        buffer(row_scales, NVFP4.scale_dtype),
        buffer(col, torch.uint8),
        buffer(col_scales, NVFP4.scale_dtype),
        buffer(amax_row, torch.float32),
        buffer(amax_col, torch.float32),
    )


# -- values -----------------------------------------------------------------------------------------------------
def values(
    codes: Tensor,
    scale_inv: Tensor,
    amax: Tensor | None,
    e4m3_max: int,
    swizzled: bool,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``fp4 * (float(s) * A * float32(1/(6 E)))`` of an operand, rounded once to ``dtype``.

    Args:
        codes: uint8 ``(rows, C/2)``.
        scale_inv: uint8 :func:`scale_shape` ``(rows, C)``.
        amax: float32 ``(1,)`` or ``(rows,)``; None leaves :func:`global_factor` out: ``fp4 * float(s)``, which is
            exact in bfloat16.
        e4m3_max: E.
        swizzled: the scales lie in the GEMM's order.
        dtype: of the result.

    Returns:
        ``(rows, C)``; NaN in blocks whose scale is NaN.
    """
    rows, contracted = codes.shape[0], codes.shape[1] * 2
    row = torch.arange(rows, device=codes.device)[:, None]
    block = block_of_each(contracted, BLOCK, codes.device)
    # One gather and no slice: whether a slice of a padded buffer is contiguous would be a guard on the size.
    if swizzled:
        scales = scale_inv.reshape(-1)[place(row, block, scale_shape(rows, contracted)[1])]
    else:
        scales = scale_inv[row, block]
    factor = e4m3_values(scales)
    if amax is not None:
        large = amax > _LARGE  # 448 A may overflow where the value itself does not: the same bits, 2^-16 as large
        constant = torch.full_like(amax, 1 / _largest(e4m3_max))
        factor = factor * torch.where(large, amax * 2.0**-16, amax)[:, None]
        factor = factor * torch.where(large, constant * 2.0**16, constant)[:, None]
    return (e2m1_values(unpack(codes)) * factor).to(dtype)


_LARGE = 2.0**64


def global_factor(amax: Tensor, e4m3_max: int) -> Tensor:
    """What :func:`values` without an amax leaves out: ``A * float32(1/(6 E))``."""
    return amax * torch.full_like(amax, 1 / _largest(e4m3_max))


def dequantize_row(
    row: Tensor, scale_inv: Tensor, amax: Tensor, e4m3_max: int, swizzled: bool, dtype: torch.dtype
) -> Tensor:
    """The tensor from its rowwise buffers; ``row`` uint8 ``(d1..d(n-1), K/2)``."""
    flat = row.reshape(matrix_shape(tuple(row.shape)))
    return values(flat, scale_inv, amax, e4m3_max, swizzled, dtype).reshape(*row.shape[:-1], row.shape[-1] * 2)


def dequantize_col(
    col: Tensor,
    scale_inv: Tensor,
    amax: Tensor,
    e4m3_max: int,
    swizzled: bool,
    shape: tuple[int, ...],
    rht: bool,
    sign_mask: int,
    dtype: torch.dtype,
) -> Tensor:
    """The tensor of ``shape`` from its columnwise buffers, rotated back with ``rht``."""
    if not rht:
        return values(col, scale_inv, amax, e4m3_max, swizzled, dtype).t().contiguous().reshape(shape)
    rotated = values(col, scale_inv, amax, e4m3_max, swizzled).t().contiguous()
    return rotate_back(rotated, sign_mask).to(dtype).reshape(shape)


def transpose_squares(row: Tensor, scale_inv: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    """The columnwise bytes and scales of a tensor in 16x16 tiles from its rowwise ones: the same codes and scales."""
    flat = row.reshape(matrix_shape(tuple(row.shape)))
    rows, columns = flat.shape[0], flat.shape[1] * 2
    scales = unswizzle(scale_inv) if swizzled else scale_inv
    tile = torch.arange(rows // BLOCK, device=row.device) * BLOCK
    column = block_of_each(columns, BLOCK, row.device)
    return pack(unpack(flat).t()), padded(scales[tile[None, :], column[:, None]], swizzled)
