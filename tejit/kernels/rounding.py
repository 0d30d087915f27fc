"""Keeps compiled graphs from skipping a rounding that the numerics rest on."""

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
