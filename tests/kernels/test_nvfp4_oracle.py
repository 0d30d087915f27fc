"""NVFP4 against Transformer Engine 2.20.2's pure-torch reference, and its casts against torchao and ml_dtypes."""

import functools

import numpy as np
import pytest
import torch

from tejit.format_info import E2M1_VALUES, NVFP4_SIGN_MASK
from tejit.kernels.nvfp4 import elements, hadamard, reference
from tests.common import DEVICES, DTYPES, assert_bitwise_equal, provoking, short
from tests.kernels.nvfp4_modes import MODES, Mode, quantize, transformer_engine_reference

ORACLE_MODES = {
    name: mode
    for name, mode in MODES.items()
    if mode.seed is None and not mode.rht and not mode.swizzled  # RHT: below, on data whose sums are exact
}
SHAPES = [(16, 16), (32, 80), (144, 336)]
oracle = functools.cache(transformer_engine_reference)


def expected(x: torch.Tensor, mode: Mode):
    quantizer = oracle().NVFP4QuantizerRef(
        dtype="e2m1",
        quant_tile_shape=(16, 16) if mode.square else (1, 16),
        row_scaled_nvfp4=mode.row_scaled,
        nvfp4_use_4over6=mode.four_over_six != 0,
        nvfp4_e4m3_max=mode.e4m3_max,
        nvfp4_4over6_err_mode="MSE" if mode.four_over_six == reference.MSE else "MAE",
        with_rht=mode.rht,
        with_random_sign_mask=mode.sign_mask != 0,
    )
    return quantizer.quantize(x)


def assert_equals_oracle(got, want, shape) -> None:
    """Codes, scales and amax of both directions; a zero's sign, which the oracle drops, is not compared."""
    row, row_scales, col, col_scales, amax_row, amax_col = (t.cpu() for t in got)
    rows, columns = shape
    for name, codes, scales, amax, (want_codes, want_scales, want_amax), (high, wide) in (
        ("row", row, row_scales, amax_row, (want.data, want.scale, want.global_amax_row), (rows, columns)),
        ("col", col, col_scales, amax_col, (want.data_t, want.scale_t, want.global_amax_col), (columns, rows)),
    ):
        mine, theirs = elements.unpack(codes), elements.unpack(want_codes)
        mine = torch.where((mine == 8) & (theirs == 0), theirs, mine)
        assert_bitwise_equal(mine, theirs, name)
        assert_bitwise_equal(scales[:high, : wide // 16].contiguous(), want_scales.view(torch.uint8), f"{name} scales")
        assert_bitwise_equal(amax, want_amax.reshape(-1), f"{name} amax")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("mode", ORACLE_MODES.values(), ids=ORACLE_MODES.keys())
def test_every_mode_equals_the_oracle(mode: Mode, dtype: torch.dtype, how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    for shape in SHAPES:
        for kind in ("normal", "wide", "zeros", "subnormal", "huge"):
            x = provoking(kind, shape, dtype, seed=shape[0])
            x[0] = 0
            assert_equals_oracle(quantize(how, x.to(device), mode), expected(x, mode), shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("sign_mask", [NVFP4_SIGN_MASK, 0], ids=["signs", "no signs"])
def test_rht_equals_the_oracle_where_sums_are_exact(sign_mask: int, how: str, device: str, need_kernels) -> None:
    """Small integers times powers of two: no order of additions rounds. The oracle multiplies matrices instead."""
    if how == "kernels":
        need_kernels(device)
    mode = Mode(rht=True, sign_mask=sign_mask)
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(shape[1])
        x = torch.randint(-15, 16, shape, generator=generator).float()
        x = (x * torch.exp2(torch.randint(-9, 9, (1, shape[1]), generator=generator).float())).to(torch.bfloat16)
        assert_equals_oracle(quantize(how, x.to(device), mode), expected(x, mode), shape)


@pytest.mark.parametrize("sign_mask", [NVFP4_SIGN_MASK, 0], ids=["signs", "no signs"])
def test_rht_of_any_values_is_within_an_ulp_of_the_oracle(sign_mask: int) -> None:
    x = provoking("wide", (64, 512), torch.bfloat16)
    quantizer = oracle().NVFP4QuantizerRef(dtype="e2m1", with_rht=True, with_random_sign_mask=sign_mask != 0)
    want = quantizer._apply_rht(x.t().contiguous()).t()
    got = hadamard.rotate(x, sign_mask)
    exact = x.double().reshape(4, 16, 512)
    signs = torch.tensor([-1.0 if sign_mask >> i & 1 else 1.0 for i in range(16)], dtype=torch.float64)
    matrix = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)]).double() / 4
    exact = torch.einsum("gik,i,ij->gjk", exact, signs, matrix).reshape(64, 512)
    # float32 sums of 16 bfloat16 values lose at most 16 units of their largest term.
    slack = x.double().abs().reshape(4, 16, 512).amax(1).repeat_interleave(16, 0) * 2.0**-19
    for other in (want, exact.to(torch.bfloat16)):
        ulp = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-30))) - 7)
        assert ((got.double() - other.double()).abs() <= ulp + slack).all()
    assert (got == exact.to(torch.bfloat16)).double().mean() > 0.99
    back = hadamard.rotate_back(got.float(), sign_mask)
    assert (back - x.float()).abs().amax() <= x.float().abs().amax() * 2.0**-6


def test_e2m1_codes_equal_ml_dtypes_and_torchao_on_every_16_bit_number() -> None:
    """Oracles: ml_dtypes' float4_e2m1fn (after the clamp that makes it saturate) and torchao's cast."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = bits.view(dtype).float()
        x = x[~x.isnan()]
        got = elements.e2m1_codes(x, torch.signbit(x))
        want = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
        assert_bitwise_equal(got, torch.from_numpy(want))
        kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels") if _has_torchao() else None
        if kernels is not None:
            assert_bitwise_equal(got, kernels.f32_to_f4_unpacked(x.clamp(-6, 6)).view(torch.uint8))


def _has_torchao() -> bool:
    import importlib.util

    return importlib.util.find_spec("torchao") is not None


def test_e2m1_boundaries() -> None:
    """One float32 step on either side of every boundary, and the boundary itself: ties go to the even code."""
    values = torch.tensor(E2M1_VALUES)
    middle = (values[1:] + values[:-1]) / 2
    for sign in (1.0, -1.0):
        for x, code in (
            (middle, torch.tensor([0, 2, 2, 4, 4, 6, 6])),
            (torch.nextafter(middle, torch.tensor(torch.inf)), torch.arange(1, 8)),
            (torch.nextafter(middle, torch.tensor(0.0)), torch.arange(7)),
        ):
            got = elements.e2m1_codes(sign * x, torch.signbit(sign * x))
            assert_bitwise_equal(got, (code + (8 if sign < 0 else 0)).to(torch.uint8))
    assert_bitwise_equal(elements.e2m1_values(torch.arange(16)).abs(), values.repeat(2))


def test_e4m3_bytes_equal_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = (torch.arange(2**15, dtype=torch.int32) << 16).view(torch.float32)
    x = x[~x.isnan()]
    x = torch.cat((x, torch.nextafter(x, torch.tensor(torch.inf))))
    want = x.clamp(max=448).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert_bitwise_equal(elements.e4m3_bytes(x), torch.from_numpy(want))
