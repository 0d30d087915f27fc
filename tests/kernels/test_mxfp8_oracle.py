"""MXFP8 against what others compute: torchao's RCEIL cast, NumPy's exponents over every mantissa, ml_dtypes' casts."""

import numpy as np
import pytest
import torch

from tejit import backend
from tejit.format_info import FP8_ELEMENTS
from tejit.kernels import mxfp8
from tejit.kernels.mxfp8 import reference
from tests.common import DATA, DEVICES, assert_bitwise_equal, poisoned_memory, provoking, short

both_ways = pytest.mark.parametrize("how", ["kernels", "torch"])
elements = pytest.mark.parametrize("code", [0, 1], ids=["e4m3", "e5m2"])


def quantize(how: str, x: torch.Tensor, code: int, row=True, col=True, square=False, swizzled=False):
    with poisoned_memory(), backend(how):
        return mxfp8.quantize(x, code, row, col, square, swizzled)


def torchao_cast(x: torch.Tensor, code: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes and bytes of a contiguous float32 or bfloat16 matrix, scaled along its rows."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    scales, codes = mx.to_mx(x, FP8_ELEMENTS[code].dtype, 32, mx.ScaleCalculationMode.RCEIL)
    return scales.view(torch.uint8), codes.view(torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
@both_ways
@elements
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("shape", [(32, 32), (160, 288), (64, 1024)], ids=short)
def test_against_torchao(shape, dtype, code, how, device, need_kernels) -> None:
    """Oracle: torchao 0.18 `to_mx` with RCEIL, of x and of its transpose; in blocks whose scale byte is not 0 (torchao
    does not divide by 2^-127)."""
    if how == "kernels":
        need_kernels(device)
    for kind, seed in (("normal", 0), ("wide", 1), ("huge", 2), ("negative_zero", 3)):
        x = provoking(kind, shape, dtype, seed)
        if kind == "wide":
            x = (x.float() * torch.exp2(torch.arange(shape[0]).remainder(200) - 100.0)[:, None]).to(dtype)
        row, row_scale_inv, col, col_scale_inv = (t.cpu() for t in quantize(how, x.to(device), code))
        scales, codes = torchao_cast(x, code)
        assert (scales != 0).all()
        assert_bitwise_equal(row_scale_inv[: shape[0], : shape[1] // 32].contiguous(), scales, kind)
        assert_bitwise_equal(row, codes, kind)
        scales, codes = torchao_cast(x.t().contiguous(), code)
        assert (scales != 0).all()
        assert_bitwise_equal(col_scale_inv[: shape[0] // 32, : shape[1]].t().contiguous(), scales, kind)
        assert_bitwise_equal(col.t().contiguous(), codes, kind)


def exponent_by_numpy(amax: np.ndarray, code: int) -> np.ndarray:
    """The byte by NumPy's own taking apart of floats: the power of two at or above amax * float32(1 / max)."""
    with np.errstate(all="ignore"):
        v = (amax * (np.float32(1) / np.float32(FP8_ELEMENTS[code].max))).astype(np.float64)
    mantissa, exponent = np.frexp(np.where(np.isfinite(v), v, 1.0))
    byte = np.clip(exponent - (mantissa == 0.5) + 127, 0, 254)
    return np.where(v == 0, 0, np.where(np.isinf(v), 254, byte)).astype(np.uint8)


@elements
def test_the_exponent_of_every_mantissa(code: int) -> None:
    """All 2^23 mantissas in the reference, against NumPy. torchao takes a logarithm in eager mode, which is wrong just
    above a power of two and nowhere else."""
    amax, largest = every_mantissa(), FP8_ELEMENTS[code].max
    got = reference.exponent_bytes(amax, code)
    assert_bitwise_equal(got, torch.from_numpy(exponent_by_numpy(amax.numpy(), code)))
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    other = mx._to_mx_rceil(amax, amax, largest)[0].view(torch.uint8)
    above = amax[got != other].double() / (largest * 2.0 ** (got[got != other].double() - 128))
    assert len(above) < 16
    assert ((above > 1) & (above < 1 + 2.0**-19)).all()


def every_mantissa() -> torch.Tensor:
    return torch.from_numpy((np.arange(1 << 23, dtype=np.int32) + (119 << 23)).view(np.float32))


@pytest.mark.parametrize("device", DEVICES)
@elements
def test_the_exponent_of_every_mantissa_in_the_kernels(code: int, device: str, need_kernels) -> None:
    need_kernels(device)
    every, step = every_mantissa(), 1 << 18
    wanted = torch.from_numpy(exponent_by_numpy(every.numpy(), code))
    for turn, first in enumerate(range(0, len(every), step)):
        amax, want = every[first : first + step].to(device), wanted[first : first + step]
        x = torch.zeros(step, 32, device=device)
        x[:, turn] = -amax
        assert_bitwise_equal(quantize("kernels", x, code, True, False)[1][:, 0].cpu(), want)
        x = torch.zeros(32, step, device=device)
        x[turn] = -amax
        assert_bitwise_equal(quantize("kernels", x, code, False, True)[3][0].cpu(), want)


@pytest.mark.parametrize("device", DEVICES)
@both_ways
@elements
def test_the_exponent_of_every_order_of_magnitude(code: int, how: str, device: str, need_kernels) -> None:
    """Both sides of every power of two and of every max * 2^n, subnormal numbers and inf included."""
    if how == "kernels":
        need_kernels(device)
    exponents = np.arange(256, dtype=np.uint32)[:, None] << 23
    mantissas = np.uint32([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])[None]
    bits = (exponents | mantissas).reshape(-1)
    subnormal = np.concatenate([np.uint32(1) << np.arange(23, dtype=np.uint32) + d for d in (0, 1)]) - np.uint32(1)
    bits = np.concatenate([bits[bits <= 0x7F800000], subnormal, subnormal + np.uint32(2)]).astype(np.uint32)
    bits = np.pad(bits, (0, -len(bits) % 32))
    amax = torch.from_numpy(bits.view(np.float32))
    want = torch.from_numpy(exponent_by_numpy(amax.numpy(), code))
    x = torch.zeros(len(bits), 32, device=device)
    x[:, 7] = amax.to(device)
    assert_bitwise_equal(quantize(how, x, code)[1][: len(bits), 0].contiguous().cpu(), want)
    assert_bitwise_equal(quantize(how, x.t().contiguous(), code)[3][0, : len(bits)].contiguous().cpu(), want)


@pytest.mark.parametrize("device", DEVICES)
@both_ways
@pytest.mark.parametrize("table", ["bf16.e4m3", "bf16.e5m2", "f16.e4m3", "f16.e5m2"])
def test_every_sixteen_bit_value_casts_as_ml_dtypes_does(table: str, how: str, device: str, need_kernels) -> None:
    """Oracle: ml_dtypes (recorded). A block that holds max itself has scale 1, so values up to max go as they are."""
    if how == "kernels":
        need_kernels(device)
    source, element = table.split(".")
    code = {"e4m3": 0, "e5m2": 1}[element]
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[source]
    casts = torch.from_numpy(np.load(DATA / "casts.npz")[table])
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    largest = FP8_ELEMENTS[code].max
    fits = ~(values.abs() > largest)  # a NaN does, in any block
    values, casts = values[fits], casts[fits]
    whole = len(values) // 31 * 31
    for part in (slice(0, whole), slice(len(values) - whole, None)):
        x = torch.cat([torch.full((whole // 31, 1), largest, dtype=dtype), values[part].view(-1, 31)], 1).to(device)
        row, scales, _, _ = quantize(how, x, code, True, False)
        assert (scales[: x.shape[0], 0] == 127).all()
        assert_bitwise_equal(row[:, 1:].contiguous().cpu().view(-1), casts[part].contiguous())
        columns = x.t().contiguous()
        _, _, col, scales = quantize(how, columns, code, False, True)
        assert (scales[0, : x.shape[0]] == 127).all()
        assert_bitwise_equal(col[1:].t().contiguous().cpu().view(-1), casts[part].contiguous())


@pytest.mark.parametrize("device", DEVICES)
@both_ways
def test_what_reports_found_wrong_elsewhere(how: str, device: str, need_kernels) -> None:
    """Field cases 10, 11 and 12: subnormal blocks; beyond the largest value; inf and NaN."""
    if how == "kernels":
        need_kernels(device)

    def block(*values: float, code: int = 0) -> tuple[int, list[int]]:
        x = torch.zeros(1, 32, device=device)
        x[0, : len(values)] = torch.tensor(values)
        row, scales, _, _ = quantize(how, x, code, True, False)
        return int(scales[0, 0]), row[0, : len(values)].tolist()

    assert block(*[2.0**-133] * 32) == (0, [0x08] * 32)
    assert block(2.0**-126, 2.0**-133, -(2.0**-149)) == (0, [0x40, 0x08, 0x80])
    assert block(2.0**-149) == (0, [0x00])
    assert block(449.0) == (128, [0x76])
    assert block(448.0) == (127, [0x7E])
    assert block(500.0, 1e6) == (139, [0x20, 0x77])
    nan, inf = float("nan"), float("inf")
    for code, largest in ((0, 0x7E), (1, 0x7B)):
        assert block(inf, -inf, 1.0, nan, code=code) == (254, [largest, largest | 0x80, 0x00, 0x7F])
    assert block(nan, -nan, 448.0, -1.0) == (127, [0x7F, 0x7F, 0x7E, 0xB8])
    assert block(nan, nan) == (0, [0x7F, 0x7F])
    assert block(-0.0, 0.0) == (0, [0x80, 0x00])


def test_dequantizing_the_ends_of_the_scale() -> None:
    """By the specification of E8M0: 0 is 2^-127, 254 is 2^127, 255 is NaN."""
    codes = torch.full((3, 32), 0x38, dtype=torch.uint8)  # 1.0
    scales = torch.zeros(128, 4, dtype=torch.uint8)
    scales[:3, 0] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    got = mxfp8.values(codes, scales, 0)[:, 0]
    assert got[0].item() == 2.0**-127
    assert got[1].item() == 2.0**127
    assert got[2].isnan()
