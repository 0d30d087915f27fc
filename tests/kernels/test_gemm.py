"""GEMM on FP8 operands. Oracle: the dequantized operands multiplied in float64."""

import pytest
import torch

from tejit.kernels import fp8
from tejit.kernels.gemm import Operand, gemm
from tests.common import DEVICES, provoking, short


def operand(shape: tuple[int, int], code: int, device: str, seed: int) -> tuple[Operand, torch.Tensor]:
    x = provoking("normal", shape, torch.float32, seed).to(device)
    codes, _, scale_inv = fp8.quantize_current(x, code, True, False, False, 0.0)
    return Operand(codes, scale_inv, code), fp8.dequantize(codes, scale_inv, code, torch.float32).double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codes", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=lambda c: f"{c[0]}x{c[1]}")
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("size", [(64, 48, 32), (1, 1, 1), (5, 7, 3), (33, 17, 250), (128, 1000, 16), (2, 16, 5461)])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_against_float64(size, out_dtype, codes, with_bias, device) -> None:
    m, n, k = size
    a, a_values = operand((m, k), codes[0], device, 1)
    b, b_values = operand((n, k), codes[1], device, 2)
    bias = provoking("normal", (n,), out_dtype, 3).to(device) if with_bias else None
    got = gemm(a, b, out_dtype, bias)
    exact = a_values @ b_values.t() + (0 if bias is None else bias.double())
    assert got.dtype == out_dtype
    assert got.shape == (m, n)
    # One rounding to the output dtype, and accumulation: float32 over K (worst case K units in the last place),
    # but Hopper's tensor cores align the products of one instruction to about 13 bits below their largest.
    magnitude = a_values.abs() @ b_values.abs().t() + (0 if bias is None else bias.double().abs())
    accumulation = 2**-12 if device == "cuda" else 2 * k * torch.finfo(torch.float32).eps
    bound = exact.abs() * torch.finfo(out_dtype).eps + magnitude * accumulation
    assert ((got.double() - exact).abs() <= bound + 1e-30).all()


@pytest.mark.parametrize("device", DEVICES)
def test_empty_operands(device) -> None:
    for m, n, k in ((0, 4, 8), (4, 0, 8), (4, 5, 0)):
        a, _ = operand((m, k), 0, device, 1)
        b, _ = operand((n, k), 0, device, 2)
        bias = torch.ones(n, device=device)
        out = gemm(a, b, torch.float32, bias)
        assert out.shape == (m, n)
        assert (out == 1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_very_different_scales_leave_the_range_only_where_the_result_does(device) -> None:
    big, small = torch.full((8, 16), 3e38, device=device), torch.full((8, 16), 1e-38, device=device)
    quantized = [fp8.quantize_current(x, 0, True, False, False, 0.0) for x in (big, small)]
    a, b = (Operand(codes, scale_inv, 0) for codes, _, scale_inv in quantized)
    out = gemm(a, b, torch.float32)
    assert torch.allclose(out, torch.full_like(out, 16 * 3.0), rtol=0.1)


@pytest.mark.parametrize("kind", ["cpu"])
def test_torch_autocast_does_not_reach_the_product(kind: str) -> None:
    a, _ = operand((16, 64), 0, kind, 1)
    b, _ = operand((8, 64), 0, kind, 2)
    want = gemm(a, b, torch.float32)
    with torch.autocast(kind, torch.bfloat16):
        got = gemm(a, b, torch.float32)
    assert torch.equal(got, want)
