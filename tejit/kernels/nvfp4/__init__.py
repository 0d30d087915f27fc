"""NVFP4: what the rest of the package calls.

Each function goes through the compiled op where there is one and through the pure-torch reference
elsewhere (see ``kernels.backend``); the bytes are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.kernels import backend
from tejit.kernels.arguments import QUANTIZES, refuse_gradients
from tejit.kernels.nvfp4 import reference
from tejit.kernels.nvfp4.reference import (
    BLOCK,
    E4M3_MAXIMA,
    MAE,
    MSE,
    NONE,
    Six,
    buffer_shapes,
    check,
    check_mode,
    dequantize_col,
    dequantize_row,
    global_factor,
    scale_shape,
    transpose_squares,
    values,
)

__all__ = [
    "BLOCK",
    "E4M3_MAXIMA",
    "MAE",
    "MSE",
    "NONE",
    "Six",
    "amax",
    "buffer_shapes",
    "check",
    "check_mode",
    "dequantize_col",
    "dequantize_row",
    "global_factor",
    "make_empty",
    "new_seed",
    "quantize",
    "quantize_out",
    "scale_shape",
    "transpose_squares",
    "values",
]


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
    """Quantize to E2M1 codes with an E4M3 scale for each block of 16 and an amax above them.

    Args:
        x: float32, bfloat16 or float16, any strides; with M all leading dimensions together and K the last one.
        rowwise: whether codes in the order of ``x`` are wanted, scaled along K, a multiple of 16.
        columnwise: whether codes of the transpose are wanted, scaled along M, a multiple of 16.
        rht: rotate before columnwise quantization (``nvfp4.hadamard``).
        sign_mask: bit i set where element i of a block changes its sign first.
        square: one scale for each 16x16; both M and K are multiples of 16 then.
        row_scaled: an amax for each row (columnwise: for each column) instead of one.
        four_over_six: 0; 1 or 2: the better of two scales by the sum of absolute or squared errors.
        e4m3_max: E, the scale of the block that holds the amax: 448 or 256.
        swizzled: scales in the order of the GEMM (``kernels.swizzle``).
        seed: None rounds to nearest; int64 ``(2,)``, seed and offset, rounds stochastically.
        row_amax, col_amax: float32 as the outputs ``amax_row``, ``amax_col``, to use instead of ``x``'s own; or None.

    Returns:
        ``(row, row_scale_inv, col, col_scale_inv, amax_row, amax_col)``: uint8 ``(d1..d(n-1), K/2)``, uint8
        :func:`scale_shape` ``(M, K)``, uint8 ``(K, M/2)``, uint8 :func:`scale_shape` ``(K, M)``, float32 ``(1,)`` or
        ``(M,)``, float32 ``(1,)`` or ``(K,)``; unwanted buffers have shape ``(0,)``.

    Raises ``ValueError`` for a shape that does not fit and for modes that exclude each other.
    """
    refuse_gradients("kernels.nvfp4.quantize", QUANTIZES, x=x)
    check(tuple(x.shape), rowwise, columnwise, square)
    check_mode(rht, square, row_scaled, four_over_six, e4m3_max, seed is not None)
    mode = (rht, sign_mask, square, row_scaled, four_over_six, e4m3_max, swizzled, seed, row_amax, col_amax)
    if backend.use_ops(x.device):
        return torch.ops.tejit.nvfp4_quantize.default(x, rowwise, columnwise, *mode)
    return reference.quantize(x, rowwise, columnwise, *mode)


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
    """:func:`quantize` into given buffers (a direction's three, or None for all); ``noop`` (float32, one element)
    equal to 1.0 leaves them as they are."""
    refuse_gradients("kernels.nvfp4.quantize_out", QUANTIZES, x=x)
    check(tuple(x.shape), row is not None, col is not None, square)
    check_mode(rht, square, row_scaled, four_over_six, e4m3_max, seed is not None)
    mode = (rht, sign_mask, square, row_scaled, four_over_six, e4m3_max, swizzled, seed, row_amax, col_amax)
    buffers = (row, row_scale_inv, col, col_scale_inv, amax_row, amax_col)
    if backend.use_ops(x.device):
        torch.ops.tejit.nvfp4_quantize_out.default(x, *mode, noop, *buffers)
    else:
        reference.quantize_out(x, *mode, noop, *buffers)


def amax(
    x: Tensor, rowwise: bool, columnwise: bool, rht: bool, sign_mask: int, row_scaled: bool
) -> tuple[Tensor, Tensor]:
    """The amaxes that :func:`quantize` would find, before an infinite one is replaced: to reduce over a group first.

    Returns float32 ``(1,)``, with ``row_scaled`` ``(M,)`` and ``(K,)``; ``(0,)`` for a direction that is not wanted.
    Raises ``ValueError`` where columnwise data is to be rotated and M is no multiple of 16.
    """
    refuse_gradients("kernels.nvfp4.amax", QUANTIZES, x=x)
    check(tuple(x.shape), False, columnwise and rht, False)
    if backend.use_ops(x.device):
        return torch.ops.tejit.nvfp4_amax.default(x, rowwise, columnwise, rht, sign_mask, row_scaled)
    return reference.amax(x, rowwise, columnwise, rht, sign_mask, row_scaled)


def make_empty(
    shape: tuple[int, ...],
    rowwise: bool,
    columnwise: bool,
    square: bool,
    row_scaled: bool,
    device: torch.device,
    pin_memory: bool,
) -> Six:
    """Uninitialised buffers of a tensor of ``shape``, in one call of the extension.

    Raises ``ValueError`` for a shape that does not fit.
    """
    check(shape, rowwise, columnwise, square)
    return torch.ops.tejit.nvfp4_make_empty.default(shape, rowwise, columnwise, row_scaled, device, pin_memory)


def new_seed(device: torch.device) -> Tensor:
    """A seed and an offset for one call, int64 ``(2,)``, from torch's own generator of the device.

    ``torch.manual_seed`` repeats it, and each replay of a captured graph draws another one.
    """
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
