"""The fused multiply-add that torch does not have, against the C library's ``fmaf``."""

from __future__ import annotations

import ctypes
import ctypes.util

import pytest
import torch

from tejit.kernels.rounding import multiply_add
from tests.common import assert_bitwise_equal

COUNT = 2000


def numbers(kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "any bits":
        return torch.randint(-(2**31), 2**31, (COUNT,), generator=generator).to(torch.int32).view(torch.float32)
    exponent = torch.randint(-30, 30, (COUNT,), generator=generator).float()
    if kind == "few bits":  # whose products and sums are often ties
        return torch.exp2(exponent) * (1 + torch.randint(0, 4, (COUNT,), generator=generator) * 2.0**-23)
    if kind == "subnormal products":
        return torch.exp2(exponent - 60) * torch.randint(1, 4096, (COUNT,), generator=generator)
    return torch.randn(COUNT, generator=generator)


KINDS = ["normal", "any bits", "few bits", "subnormal products"]


@pytest.mark.parametrize("addend", [*KINDS, "cancels"])
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_rounds_once(first: str, second: str, addend: str) -> None:
    library = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
    library.fmaf.restype, library.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    a, b = numbers(first, 1), numbers(second, 2)
    c = -(a * b) * (1 + 2.0**-23) if addend == "cancels" else numbers(addend, 3)
    want = torch.tensor([library.fmaf(*row) for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)])
    got = multiply_add(a, b, c)
    assert_bitwise_equal(torch.where(got == got, got, torch.nan), torch.where(want == want, want, torch.nan))


def test_differs_from_two_roundings() -> None:
    """The product, rounded, is 1: nothing is left of it."""
    a, b, c = (torch.tensor([value]) for value in (1 + 2.0**-13, 1 - 2.0**-13, -1.0))
    assert multiply_add(a, b, c).item() == -(2.0**-26)
    assert (a * b + c).item() == 0
