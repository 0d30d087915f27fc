"""Casts to the two element types of NVFP4: E2M1 codes (nearest or stochastic) and E4M3 scale bytes."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tejit.format_info import E2M1, E2M1_VALUES, E4M3

#: Where the code goes up by one, and whether the boundary itself goes up (ties go to the even code).
_BOUNDARIES = tuple(
    [((low + high) / 2, code % 2 == 1) for code, (low, high) in enumerate(itertools.pairwise(E2M1_VALUES))]
)
SIGN_CODE = 8


def e2m1_codes(scaled: Tensor, negative: Tensor) -> Tensor:
    """The codes (uint8, 0 to 15) nearest to ``scaled``, saturating; ``negative`` sets the sign bit, of zeros too."""
    magnitude = scaled.abs()
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    for boundary, inclusive in _BOUNDARIES:
        code = code + (magnitude >= boundary if inclusive else magnitude > boundary).to(torch.uint8)
    return code + negative.to(torch.uint8) * SIGN_CODE


def e2m1_stochastic_codes(scaled: Tensor, negative: Tensor, random: Tensor) -> Tensor:
    """The codes of ``scaled`` rounded to one of its two neighbours; ``random`` from 0 to 255 decides."""

    def steps(magnitude: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(magnitude)
        below_2, below_4 = magnitude < 2, magnitude < 4
        step = torch.where(below_2, 0.5 * one, torch.where(below_4, one, 2 * one))
        return step, torch.where(below_2, 2 * one, torch.where(below_4, one, 0.5 * one))

    magnitude = scaled.abs()
    u = (random.to(torch.float32) + 0.5) * (1 / 256)
    raised = magnitude + u * steps(magnitude)[0]
    step, inverse = steps(raised)
    return e2m1_codes(((raised * inverse).floor() * step).clamp(max=E2M1.max), negative)


def e2m1_values(codes: Tensor) -> Tensor:
    """float32 values of codes 0 to 15: a sign, two bits of exponent, one of mantissa."""
    # Computed on the device: a table from the host would make every GEMM wait, and no CUDA graph could hold it.
    code = torch.arange(2 * SIGN_CODE, device=codes.device)
    exponent, mantissa = code % SIGN_CODE // 2, code % 2
    doubled = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(min=0))
    value = doubled.to(torch.float32) * 0.5
    return torch.where(code < SIGN_CODE, value, -value)[codes.to(torch.int64)]


def pack(codes: Tensor) -> Tensor:
    """``(R, C)`` codes to contiguous ``(R, C/2)`` bytes, the element of the even index in the low half."""
    pairs = codes.contiguous().reshape(codes.shape[0], codes.shape[1] // 2, 2)  # torch keeps a transpose's strides
    return pairs[:, :, 0] + pairs[:, :, 1] * 16


def unpack(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack`."""
    pairs = torch.stack((packed & 15, packed >> 4), -1)
    return pairs.reshape(packed.shape[0], packed.shape[1] * 2)


def e4m3_bytes(value: Tensor) -> Tensor:
    """E4M3 bytes (uint8) of float32 ``value`` >= 0, saturating at 448."""
    return value.clamp(max=E4M3.max).to(E4M3.dtype).view(torch.uint8)


def e4m3_values(scales: Tensor) -> Tensor:
    return scales.view(E4M3.dtype).to(torch.float32)
