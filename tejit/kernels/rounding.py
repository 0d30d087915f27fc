"""Roundings that the numerics rest on: those that compiled graphs must not skip, and those of a fused multiply-add."""

from __future__ import annotations

import torch
from torch import Tensor


def as_rounded(x: Tensor) -> Tensor:
    """``x``; inside a compiled graph it is made sure to be a value of its dtype.

    When inductor fuses what computes ``x`` with what reads it, it goes on with the float32 intermediate
    and leaves the rounding to bfloat16 or float16 out; a quantizer would then see another tensor than in
    eager mode. Doing integer arithmetic on the bits (one that the compiler does not fold away) makes it
    round.
    """
    if torch.compiler.is_compiling() and x.dtype != torch.float32:
        return x.view(torch.int16).bitwise_and(-1).view(x.dtype)
    return x


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of float32 tensors, rounded once, as a fused multiply-add has it; torch has none.

    In float64 the product is exact, but a sum that is rounded to 53 bits and then to 24 is rounded twice. So an inexact
    sum is rounded to odd first: its last bit stands for all that was cut off, and the second rounding then errs no more
    than a single one (Boldo and Melquiond, *Emulation of FMA and correctly rounded sums*, 2008). What was cut off is
    Knuth's two-sum.
    """
    product, addend = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + addend
    part = total - product
    rest = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    even = (rest != 0) & torch.isfinite(total) & (bits.bitwise_and(1) == 0)
    away = torch.where((rest > 0) == (total > 0), 1, -1)
    return torch.where(even, bits + away, bits).view(torch.float64).to(torch.float32)
