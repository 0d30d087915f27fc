"""FP8 with one scale per tensor in plain torch: the readable specification, and what runs without a compiler.

The rules are those of Transformer Engine's kernels, whose recorded outputs the tests compare with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.format_info import FLT_MAX, FP8_ELEMENTS
from tejit.kernels.rounding import as_rounded

_EXPONENT_MASK = -0x800000  # sign and exponent of a float32 (0xFF800000 as int32)


def amax(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    magnitude = x.abs()
    return torch.where(x == x, magnitude, torch.zeros_like(magnitude)).amax().to(torch.float32).reshape(1)


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The correctly rounded float32 quotient, elementwise, whatever compiles it.

    ``number / tensor`` in torch multiplies by the reciprocal, and Triton divides float32 approximately; both
    are off by an ulp at times. A float64 quotient of float32 values rounds to the right float32.
    """
    return torch.div(numerator.to(torch.float64), denominator.to(torch.float64)).to(torch.float32)


def scale_from_amax(amax: Tensor, fp8_max: float, pow2: bool, eps: float, limit: float) -> Tensor:
    """The multiplier of ``x``: about ``fp8_max / amax``; float32, elementwise over ``amax``.

    ``limit`` replaces a quotient that overflows (FLT_MAX for per-tensor scaling).
    """
    amax = torch.where(amax < eps, torch.full_like(amax, eps), amax)
    quotient = divide(torch.full_like(amax, fp8_max), amax)
    quotient = torch.where(torch.isinf(quotient), torch.full_like(quotient, limit), quotient)
    if pow2:
        quotient = (quotient.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    usable = torch.isfinite(amax) & (amax != 0)
    return torch.where(usable, quotient, torch.ones_like(quotient))


def scale(amax: Tensor, fp8: int, pow2: bool, eps: float) -> tuple[Tensor, Tensor]:
    multiplier = scale_from_amax(amax.reshape(1), FP8_ELEMENTS[fp8].max, pow2, eps, FLT_MAX)
    return multiplier, divide(torch.ones_like(multiplier), multiplier)


def cast(x: Tensor, multiplier: Tensor, fp8: int) -> Tensor:
    """``sat(float(x) * multiplier)`` as bytes (uint8) of ``x``'s shape; a NaN is ``ElementInfo.nan_byte``.

    ``multiplier`` broadcasts against ``x``.
    """
    element = FP8_ELEMENTS[fp8]
    scaled = x.to(torch.float32) * multiplier
    # What `.to(float8)` does beyond the largest value differs between torch releases: clamp first.
    codes = scaled.clamp(-element.max, element.max).to(element.dtype).view(torch.uint8)
    return torch.where(scaled == scaled, codes, torch.full_like(codes, element.nan_byte))


def transposed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the transposed bytes: the last dimension first; 0-d stays 0-d."""
    return (*shape[-1:], *shape[:-1])


def transpose_bytes(codes: Tensor) -> Tensor:
    """The contiguous transpose of the matrix whose rows are the last dimension of ``codes``."""
    if codes.dim() < 2:
        return codes.clone()
    return codes.movedim(-1, 0).contiguous()


def quantize_current(
    x: Tensor, fp8: int, data: bool, transpose: bool, pow2: bool, eps: float, given_amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    x = as_rounded(x)
    multiplier, scale_inv = scale(amax(x) if given_amax is None else given_amax, fp8, pow2, eps)
    if x.numel() == 0:
        # No element asks for a scale; 1 keeps a later product with this operand finite.
        multiplier, scale_inv = torch.ones_like(multiplier), torch.ones_like(scale_inv)
    codes = cast(x.contiguous(), multiplier.reshape(()), fp8)
    absent = codes.new_empty((0,))
    return codes if data else absent, transpose_bytes(codes) if transpose else absent, scale_inv


def quantize_current_out(
    x: Tensor,
    fp8: int,
    pow2: bool,
    eps: float,
    given_amax: Tensor | None,
    noop: Tensor | None,
    data: Tensor | None,
    transpose: Tensor | None,
    scale_inv: Tensor,
) -> None:
    fresh = quantize_current(x, fp8, data is not None, transpose is not None, pow2, eps, given_amax)
    write_unless((data, transpose, scale_inv), fresh, noop)


def quantize_delayed(
    x: Tensor, fp8: int, data: bool, transpose: bool, scale: Tensor, amax_seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    codes, transposed, scale_inv, largest = _delayed(x, fp8, data, transpose, scale, amax_seen)
    amax_seen.copy_(largest)
    return codes, transposed, scale_inv


def quantize_delayed_out(
    x: Tensor,
    fp8: int,
    scale: Tensor,
    amax_seen: Tensor,
    noop: Tensor | None,
    data: Tensor | None,
    transpose: Tensor | None,
    scale_inv: Tensor,
) -> None:
    fresh = _delayed(x, fp8, data is not None, transpose is not None, scale, amax_seen)
    write_unless((data, transpose, scale_inv, amax_seen), fresh, noop)


def _delayed(
    x: Tensor, fp8: int, data: bool, transpose: bool, scale: Tensor, amax_seen: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Data, transpose, scale_inv, and the new running amax."""
    for name, value in (("scale", scale), ("amax", amax_seen)):
        if value.dtype != torch.float32 or tuple(value.shape) != (1,) or value.device != x.device:
            raise RuntimeError(
                f"tejit: {name} has dtype {value.dtype} and shape {tuple(value.shape)} on {value.device}, but float32"
                f" and shape (1,) are needed on {x.device}"
            )
    x = as_rounded(x)
    codes = cast(x.contiguous(), scale.reshape(()), fp8)
    absent = codes.new_empty((0,))
    return (
        codes if data else absent,
        transpose_bytes(codes) if transpose else absent,
        divide(torch.ones_like(scale), scale),
        torch.maximum(amax_seen, amax(x)),
    )


def write_unless(old: tuple[Tensor | None, ...], new: tuple[Tensor, ...], noop: Tensor | None) -> None:
    """Copy ``new`` into ``old`` (None: not wanted), except where ``noop`` is 1.0.

    Raises ``RuntimeError``, before anything is written, for a buffer of another dtype, shape or device, as kernels do.
    """
    for mine, fresh in zip(old, new, strict=True):
        # Not the shape while compiling: it would be a guard on the size.
        shape_differs = mine is not None and not torch.compiler.is_compiling() and mine.shape != fresh.shape
        if mine is not None and (mine.dtype != fresh.dtype or mine.device != fresh.device or shape_differs):
            raise RuntimeError(
                f"tejit: a buffer to write has dtype {mine.dtype} and shape {tuple(mine.shape)} on {mine.device}, but"
                f" {fresh.dtype} and shape {tuple(fresh.shape)} on {fresh.device} are needed for this x; allocate it"
                " with make_empty"
            )
    for mine, fresh in zip(old, new, strict=True):
        if mine is not None:
            # `where` rather than `if`: the flag is read on the device, so a captured graph obeys it too.
            mine.copy_(fresh if noop is None else torch.where(noop.reshape(()) == 1.0, mine, fresh))


def values_of(codes: Tensor, fp8: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The FP8 values of ``codes`` (uint8), exact in every ``dtype`` that holds them."""
    return codes.view(FP8_ELEMENTS[fp8].dtype).to(dtype)


def dequantize(codes: Tensor, scale_inv: Tensor, fp8: int, dtype: torch.dtype) -> Tensor:
    """``float(q) * scale_inv`` rounded once to ``dtype``; ``codes`` uint8 of any shape."""
    return (values_of(codes, fp8) * scale_inv.reshape(())).to(dtype)


def make_empty(
    shape: list[int], data: bool, transpose: bool, device: torch.device, pin_memory: bool
) -> tuple[Tensor, Tensor, Tensor]:
    def buffer(present: bool, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size if present else (0,), dtype=dtype, device=device, pin_memory=pin_memory)

    size = tuple(shape)
    return (
        buffer(data, size, torch.uint8),
        buffer(transpose, transposed_shape(size), torch.uint8),
        buffer(True, (1,), torch.float32),
    )
