"""FP8 kernels: every half-precision value against ml_dtypes, kernels against the reference, all to the bit."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tejit import backend
from tejit.format_info import FLT_MAX, FP8_ELEMENTS
from tejit.kernels import fp8
from tejit.kernels.fp8 import reference
from tests.common import (
    DATA,
    DEVICES,
    DTYPES,
    KINDS,
    SHAPES,
    assert_bitwise_equal,
    poisoned_memory,
    provoking,
    short,
)

CASTS = np.load(DATA / "casts.npz")


def quantize(how: str, x: torch.Tensor, code: int, pow2: bool = False, eps: float = 0.0, amax=None):
    with poisoned_memory(), backend(how):
        return fp8.quantize_current(x, code, True, True, pow2, eps, amax)


def agree(x: torch.Tensor, code: int, pow2: bool, eps: float, amax=None) -> None:
    got = quantize("kernels", x, code, pow2, eps, amax)
    want = quantize("torch", x.cpu(), code, pow2, eps, None if amax is None else amax.cpu())
    for name, one, other in zip(("data", "transpose", "scale_inv"), got, want, strict=True):
        assert_bitwise_equal(one.cpu(), other, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("table", sorted(CASTS.files))
def test_every_half_precision_value(table: str, how: str, device: str, need_kernels) -> None:
    """Oracle: ml_dtypes, clamped first. A given amax that makes the scale 1 leaves the bare cast."""
    if how == "kernels":
        need_kernels(device)
    source, target = table.split(".")
    dtype = torch.bfloat16 if source == "bf16" else torch.float16
    code = {"e4m3": 0, "e5m2": 1}[target]
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    amax = torch.full((1,), FP8_ELEMENTS[code].max, device=device)
    for size in (1 << 16, 65521):  # the whole table, and a length that is no multiple of anything
        row, col, scale_inv = quantize(how, x[:size], code, amax=amax)
        want = torch.from_numpy(CASTS[table][:size])
        assert scale_inv.item() == 1.0
        assert_bitwise_equal(row.cpu(), want, "data")
        assert_bitwise_equal(col.cpu(), want, "transpose")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("code", [0, 1], ids=["e4m3", "e5m2"])
def test_float32_around_every_boundary(code: int, device: str, need_kernels) -> None:
    """Every value and midpoint of the format, one float32 ulp to both sides. Oracle: the reference, which
    the table of ml_dtypes covers at 16 bits."""
    need_kernels(device)
    element = FP8_ELEMENTS[code]
    codes = torch.arange(256, dtype=torch.uint8).view(element.dtype).float()
    codes = codes[codes.isfinite()].sort().values
    points = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([float("inf"), FLT_MAX, element.max * 1.1])])
    points = torch.cat([points, torch.nextafter(points, -points * 2), torch.nextafter(points, points * 2)])
    agree(points.to(device), code, False, 0.0, torch.full((1,), element.max, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=short)
def test_kernel_equals_reference(shape, kind: str, dtype: torch.dtype, device: str, need_kernels) -> None:
    need_kernels(device)
    x = provoking(kind, shape, dtype).to(device)
    for code, pow2, eps in ((0, False, 0.0), (1, True, 1e-3)):
        agree(x, code, pow2, eps)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    start=st.integers(0, 17),
    spread=st.integers(0, 140),
    dtype=st.sampled_from(DTYPES),
    code=st.integers(0, 1),
    pow2=st.booleans(),
    special=st.sampled_from([None, 0.0, -0.0, float("inf"), -float("inf"), float("nan")]),
    seed=st.integers(0, 2**31),
)
def test_random_inputs(
    device: str, need_kernels, rows, columns, start, spread, dtype, code, pow2, special, seed
) -> None:
    """Any exponents, any start in memory (pointers aligned to one element only), any special value."""
    need_kernels(device)
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(start + rows * columns, generator=generator)
    flat = (flat * torch.exp2(torch.randint(-spread, spread + 1, flat.shape, generator=generator).float())).to(dtype)
    if special is not None:
        flat[torch.randint(0, flat.numel(), (3,), generator=generator)] = special
    agree(flat.to(device)[start:].view(rows, columns), code, pow2, 0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 8:],
        lambda x: x[0].expand(7, -1),
        lambda x: x.view(2, 4, 4, 8).contiguous(memory_format=torch.channels_last),
        lambda x: x.view(4, 2, 32).movedim(1, 0),
        lambda x: x[:0],
        lambda x: x[3, 5],
        lambda x: x[3],
    ],
    ids=["t", "stride2", "corner", "expand", "channels_last", "movedim", "empty", "0d", "1d"],
)
def test_strided_inputs_give_the_bytes_of_their_contiguous_copy(view, device: str, need_kernels) -> None:
    need_kernels(device)
    x = view(provoking("normal", (8, 32), torch.bfloat16).to(device))
    data, transpose, scale_inv = quantize("kernels", x, 0)
    agree(x.contiguous(), 0, False, 0.0)
    again = quantize("kernels", x.contiguous(), 0)
    assert_bitwise_equal(data, again[0], "data")
    assert_bitwise_equal(transpose, again[1], "transpose")
    assert_bitwise_equal(scale_inv, again[2], "scale_inv")
    assert data.shape == x.shape
    assert transpose.shape == fp8.transposed_shape(tuple(x.shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
def test_unwanted_buffers_are_absent(how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    x = provoking("normal", (5, 6), torch.float32).to(device)
    with backend(how):
        for data, transpose in ((True, False), (False, True), (False, False)):
            row, col, scale_inv = fp8.quantize_current(x, 0, data, transpose, False, 0.0)
            assert row.shape == ((5, 6) if data else (0,))
            assert col.shape == ((6, 5) if transpose else (0,))
            assert scale_inv.shape == (1,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
def test_noop_flag(how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    x = provoking("normal", (33, 50), torch.bfloat16).to(device)
    fresh = quantize(how, x, 0)
    for flag, skipped in ((1.0, True), (0.0, False), (0.5, False), (float("nan"), False)):
        outputs = [torch.full_like(t, 77) for t in fresh]
        with backend(how):
            noop = torch.full((1,), flag, device=device)
            fp8.quantize_current_out(x, 0, False, 0.0, None, noop, outputs[0], outputs[1], outputs[2])
        for out, new in zip(outputs, fresh, strict=True):
            assert_bitwise_equal(out, torch.full_like(new, 77) if skipped else new)


@pytest.mark.parametrize("device", DEVICES)
def test_scale_rule_at_its_edges(device: str, need_kernels) -> None:
    """Zero, inf, NaN and amax so small that 448 / amax overflows. Oracle: the rule of formats, written out."""
    need_kernels(device)
    finite = [1.0, 448.0, 3.0, 1e-30, 1e30]
    for amax, want in [(0.0, 1.0), (float("inf"), 1.0), (float("nan"), 1.0), (1e-45, FLT_MAX)] + [
        (a, float(np.float32(448.0) / np.float32(a))) for a in finite
    ]:
        scale, scale_inv = torch.ops.tejit.fp8_scale(torch.full((1,), amax, device=device), 0, False, 0.0)
        assert scale.item() == np.float32(want)
        assert scale_inv.item() == np.float32(1.0) / np.float32(want)
    scale, _ = torch.ops.tejit.fp8_scale(torch.full((1,), 1e-9, device=device), 0, True, 3.0)
    assert scale.item() == 128.0  # eps is the larger one: 448 / 3 = 149.3, floored to a power of two


def test_dividing_is_not_multiplying_by_the_reciprocal() -> None:
    """TransformerEngine#2639: the scale is the correctly rounded quotient for every amax."""
    amax = torch.rand(20000, generator=torch.Generator().manual_seed(1)) * 100 + 1e-3
    got = reference.scale_from_amax(amax, 448.0, False, 0.0, FLT_MAX)
    want = torch.from_numpy((np.float32(448.0) / amax.numpy()).astype(np.float32))
    assert_bitwise_equal(got, want)
    assert (got != amax.reciprocal() * 448.0).any()


@pytest.mark.parametrize("device", DEVICES)
def test_flushing_denormals_in_the_caller_changes_nothing(device: str, need_kernels) -> None:
    need_kernels(device)
    x = provoking("subnormal", (40, 70), torch.float32).to(device)
    want = quantize("kernels", x, 0)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = quantize("kernels", x, 0)
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip(got, want, strict=True):
        assert_bitwise_equal(one, other)
