"""GEMM on FP8 operands. Oracle: the dequantized operands multiplied in float64."""

import pytest
import torch

from tejit.kernels import fp8, fp8_block
from tejit.kernels.gemm import Operand, gemm, is_native
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


def block_operand(shape, code, dim, device, seed, pow2=False, kind="normal") -> tuple[Operand, torch.Tensor]:
    x = provoking(kind, shape, torch.float32, seed).to(device)
    if dim == 0:
        return operand(shape, code, device, seed)
    codes, scale_inv, _, _ = fp8_block.quantize(x, code, dim, True, False, pow2, 0.0)
    values = fp8_block.dequantize_row(codes, scale_inv, code, dim, torch.float32)
    return Operand(codes, scale_inv, code, dim, pow2), values.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(1, 1), (1, 2), (2, 1), (2, 2), (1, 0), (0, 2)], ids=lambda d: f"{d[0]}by{d[1]}")
@pytest.mark.parametrize("codes", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=lambda c: f"{c[0]}x{c[1]}")
@pytest.mark.parametrize("pow2", [False, True], ids=["", "pow2"])
@pytest.mark.parametrize(
    "size", [(128, 256, 512), (1, 1, 1), (5, 7, 3), (130, 140, 300), (257, 16, 129), (4, 144, 1000)]
)
def test_blocks_against_float64(size, pow2, codes, dims, device) -> None:
    m, n, k = size
    a, a_values = block_operand((m, k), codes[0], dims[0], device, 1, pow2, "wide")
    b, b_values = block_operand((n, k), codes[1], dims[1], device, 2, pow2, "wide")
    for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for bias in (None, provoking("normal", (n,), out_dtype, 3).to(device)):
            got = gemm(a, b, out_dtype, bias)
            extra = 0 if bias is None else bias.double()
            exact = a_values @ b_values.t() + extra
            magnitude = a_values.abs() @ b_values.abs().t() + abs(extra)
            assert got.dtype == out_dtype
            assert got.shape == (m, n)
            # As above; where one product is far larger than the others, each of the 31 beside it in an instruction
            # may lose all below 13 bits of it, always towards zero: 31 * 2^-13 of the largest.
            accumulation = 2 * k * torch.finfo(torch.float32).eps
            if device == "cuda":
                accumulation = 2**-8 if is_native(a, b) else 2**-12
            bound = exact.abs() * torch.finfo(out_dtype).eps + magnitude * accumulation + torch.finfo(out_dtype).tiny
            holds = exact.abs() + bound < torch.finfo(out_dtype).max  # float16 cannot hold all of these
            excess = ((got.double() - exact).abs() / bound)[holds]
            assert excess.numel() == 0 or excess.max() <= 1, (out_dtype, excess.max().item())


@pytest.mark.gpu
def test_which_pairs_of_blocks_are_native() -> None:
    capable = torch.cuda.get_device_capability() == (9, 0)
    for codes in ((0, 0), (0, 1), (1, 1)):
        for dims in ((1, 1), (1, 2), (2, 1), (2, 2), (0, 1)):
            a, _ = block_operand((16, 128), codes[0], dims[0], "cuda", 1)
            b, _ = block_operand((16, 128), codes[1], dims[1], "cuda", 2)
            assert is_native(a, b) == (capable and codes == (0, 0) and dims in ((1, 1), (1, 2)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", [(1, 1), (1, 2), (2, 2)], ids=lambda d: f"{d[0]}by{d[1]}")
def test_blocks_with_empty_operands(dims, device) -> None:
    for m, n, k in ((0, 4, 8), (4, 0, 8), (4, 5, 0)):
        a, _ = block_operand((m, k), 0, dims[0], device, 1)
        b, _ = block_operand((n, k), 0, dims[1], device, 2)
        out = gemm(a, b, torch.float32, torch.ones(n, device=device))
        assert out.shape == (m, n)
        assert (out == 1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_quantizer_s_operands_are_those_of_all_three_products(device) -> None:
    """Forward, dgrad and wgrad of a layer, from buffers of any shape. Oracle: dequantized, in float64."""
    from tejit import Float8BlockQuantizer

    vectors, squares = Float8BlockQuantizer(block_scaling_dim=1), Float8BlockQuantizer()
    x = provoking("normal", (2, 75, 200), torch.bfloat16, 1).to(device)
    w = provoking("normal", (140, 200), torch.bfloat16, 2).to(device)
    dy = provoking("normal", (2, 75, 140), torch.bfloat16, 3).to(device)
    tensors = {name: q(t) for name, q, t in (("x", vectors, x), ("w", squares, w), ("dy", vectors, dy))}

    def row(name):
        tensor = tensors[name]
        flat = vectors.with_usage(columnwise=False)(x if name == "x" else dy) if name != "w" else tensor
        return tensor._quantizer.rowwise_operand(tensor._inner()), flat.dequantize(torch.float32).flatten(
            0, -2
        ).double()

    def column(name):
        tensor = tensors[name]
        quantizer = tensor._quantizer
        kept = quantizer.columnwise_inner(tensor._inner())
        alone = quantizer.with_usage(rowwise=False)({"x": x, "w": w, "dy": dy}[name])
        return quantizer.columnwise_operand(kept), alone.dequantize(torch.float32).flatten(0, -2).double().t()

    for (a, a_values), (b, b_values), shape in (
        (row("x"), row("w"), (150, 140)),
        (row("dy"), column("w"), (150, 200)),
        (column("dy"), column("x"), (140, 200)),
    ):
        got = gemm(a, b, torch.float32)
        assert got.shape == shape
        exact, magnitude = a_values @ b_values.t(), a_values.abs() @ b_values.abs().t()
        assert ((got.double() - exact).abs() <= magnitude * (2**-11 if device == "cuda" else 2**-16)).all()
