"""FP8 with a given scale and a running amax: against ml_dtypes, Transformer Engine's records and the reference."""

import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tejit import backend
from tejit.format_info import FP8_ELEMENTS
from tejit.kernels import fp8
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

HOW = ["kernels", "torch"]
CASTS = np.load(DATA / "casts.npz")
GOLDEN = np.load(DATA / "te_fp8_current.npz")
CASES = sorted(key.removesuffix("/row") for key in GOLDEN.files if key.endswith("/row"))


def quantize(how: str, x: torch.Tensor, code: int, scale: float, seen: float = 0.0):
    """Data, transpose, scale_inv and the amax afterwards."""
    state = torch.full((1,), scale, device=x.device), torch.full((1,), seen, device=x.device)
    with poisoned_memory(), backend(how):
        return *fp8.quantize_delayed(x, code, True, True, *state), state[1]


def agree(x: torch.Tensor, code: int, scale: float, seen: float = 0.0) -> None:
    got = quantize("kernels", x, code, scale, seen)
    want = quantize("torch", x.cpu(), code, scale, seen)
    for name, one, other in zip(("data", "transpose", "scale_inv", "amax"), got, want, strict=True):
        assert_bitwise_equal(one.cpu(), other, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("table", sorted(CASTS.files))
def test_every_half_precision_value(table: str, how: str, device: str, need_kernels) -> None:
    """Oracle: ml_dtypes, clamped first. The largest |x| of either table is inf: NaN does not enter."""
    if how == "kernels":
        need_kernels(device)
    source, target = table.split(".")
    dtype = torch.bfloat16 if source == "bf16" else torch.float16
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    row, col, scale_inv, amax = quantize(how, x, {"e4m3": 0, "e5m2": 1}[target], 1.0)
    want = torch.from_numpy(CASTS[table])
    assert_bitwise_equal(row.cpu(), want, "data")
    assert_bitwise_equal(col.cpu(), want, "transpose")
    assert scale_inv.item() == 1.0
    assert amax.item() == float("inf")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("code", [0, 1], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_the_product_rounds_to_float32_and_then_to_fp8(dtype, code: int, how: str, device: str, need_kernels) -> None:
    """Oracle: numpy's float32 product, ml_dtypes' cast of it after clamping."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if how == "kernels":
        need_kernels(device)
    x, scale = provoking("wide", (67, 130), dtype), np.float32(37.123)
    row, col, scale_inv, amax = quantize(how, x.to(device), code, float(scale))
    largest = np.float32(FP8_ELEMENTS[code].max)
    scaled = np.clip(x.float().numpy() * scale, -largest, largest)
    want = torch.from_numpy(scaled.astype([ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2][code]).view(np.uint8))
    assert_bitwise_equal(row.cpu(), want, "data")
    assert_bitwise_equal(col.cpu(), want.t().contiguous(), "transpose")
    assert scale_inv.item() == np.float32(1) / scale
    assert amax.item() == x.abs().max().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_records_of_current_scaling_with_their_scale_given(case: str, how: str, device: str, need_kernels) -> None:
    """Oracle: Transformer Engine 2.20.2 on an H200. With the scale that it found the bytes must be the same."""
    if how == "kernels":
        need_kernels(device)
    source, name = case.split("/")
    x = torch.from_numpy(GOLDEN[f"{source}/x"])
    x = x.view(torch.bfloat16) if source.split(".")[1] == "bf16" else x
    code = {"e4m3": 0, "e5m2": 1}[re.search("e4m3|e5m2", name)[0]]
    scale = GOLDEN[f"{case}/scale"].reshape(-1)
    row, col, scale_inv, amax = quantize(how, x.to(device), code, float(scale[0]))
    want = torch.from_numpy(GOLDEN[f"{case}/row"].reshape(tuple(x.shape)))
    assert_bitwise_equal(row.cpu(), want, "data")
    assert_bitwise_equal(col.cpu(), fp8.reference.transpose_bytes(want), "transpose")
    assert scale_inv.item() == GOLDEN[f"{case}/scale_inv"].reshape(-1)[0]
    assert amax.item() == GOLDEN[f"{case}/amax"].reshape(-1)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (), (7,), (3, 4, 5), (0, 4)], ids=short)
def test_kernel_equals_reference(shape, kind: str, dtype: torch.dtype, device: str, need_kernels) -> None:
    need_kernels(device)
    x = (torch.empty(shape, dtype=dtype) if 0 in shape else provoking(kind, shape, dtype)).to(device)
    for code, scale, seen in ((0, 3.7, 0.0), (1, 2.0**-20, 1.5), (0, 3e38, float("inf"))):
        agree(x, code, scale, seen)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    start=st.integers(0, 17),
    scale=st.floats(2.0**-126, 2.0**127, width=32),
    seen=st.floats(0, 2.0**100, width=32),
    dtype=st.sampled_from(DTYPES),
    code=st.integers(0, 1),
    special=st.sampled_from([None, 0.0, -0.0, float("inf"), -float("inf"), float("nan")]),
    seed=st.integers(0, 2**31),
)
def test_random_inputs(device, need_kernels, rows, columns, start, scale, seen, dtype, code, special, seed) -> None:
    """Any start in memory (pointers aligned to one element only), any scale, any special value."""
    need_kernels(device)
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(start + rows * columns, generator=generator).to(dtype)
    if special is not None:
        flat[torch.randint(0, flat.numel(), (3,), generator=generator)] = special
    agree(flat.to(device)[start:].view(rows, columns), code, scale, seen)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW)
def test_amax_runs(how: str, device: str, need_kernels) -> None:
    """Over several calls; each element of a tensor counts, wherever it stands. Oracle: Python's max."""
    if how == "kernels":
        need_kernels(device)
    scale, amax = torch.ones(1, device=device), torch.zeros(1, device=device)
    largest = 0.0
    with backend(how):
        for step, (size, at) in enumerate([(5, 4), (3000, 0), (3000, 2999), (3000, 1777), (1, 0), (9, 8)]):
            x = torch.full((size,), 0.5, dtype=torch.bfloat16, device=device)
            x[at] = -(1.0 + step) if step != 4 else 0.25  # not every tensor raises it
            if size == 9:
                x[0] = float("nan")
            largest = max(largest, *[abs(v) for v in x.float().tolist() if v == v])
            fp8.quantize_delayed(x, 0, True, False, scale, amax)
            assert amax.item() == largest
        fp8.quantize_delayed(torch.full((3, 3), float("nan"), device=device), 0, False, False, scale, amax)
        assert amax.item() == largest
        fp8.quantize_delayed(torch.full((3, 3), -float("inf"), device=device), 0, False, False, scale, amax)
        assert amax.item() == float("inf")
        amax.fill_(float("nan"))
        fp8.quantize_delayed(torch.ones(3, 3, device=device), 0, True, True, scale, amax)
        assert amax.isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW)
def test_noop_flag_leaves_amax_alone_too(how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    x = provoking("normal", (33, 50), torch.bfloat16).to(device)
    fresh = quantize(how, x, 0, 3.0, 0.25)
    for flag, skipped in ((1.0, True), (0.0, False), (0.5, False), (float("nan"), False)):
        data, transpose, scale_inv = [torch.full_like(t, 77) for t in fresh[:3]]
        scale, amax = torch.full((1,), 3.0, device=device), torch.full((1,), 0.25, device=device)
        with backend(how):
            noop = torch.full((1,), flag, device=device)
            fp8.quantize_delayed_out(x, 0, scale, amax, noop, data, transpose, scale_inv)
        for out, new in zip((data, transpose, scale_inv), fresh[:3], strict=True):
            assert_bitwise_equal(out, torch.full_like(new, 77) if skipped else new)
        assert amax.item() == (0.25 if skipped else fresh[3].item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW)
def test_unwanted_buffers_are_absent(how: str, device: str, need_kernels) -> None:
    if how == "kernels":
        need_kernels(device)
    x = provoking("normal", (5, 6), torch.float32).to(device)
    with backend(how):
        for data, transpose in ((True, False), (False, True), (False, False)):
            amax = torch.zeros(1, device=device)
            row, col, scale_inv = fp8.quantize_delayed(x, 0, data, transpose, torch.full_like(amax, 4.0), amax)
            assert row.shape == ((5, 6) if data else (0,))
            assert col.shape == ((6, 5) if transpose else (0,))
            assert scale_inv.tolist() == [0.25]
            assert amax.item() == x.abs().max().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", HOW)
def test_state_of_another_shape_or_dtype_is_refused(how: str, device: str, need_kernels) -> None:
    """vllm#30257: a per-tensor scale has shape (1,), not ()."""
    if how == "kernels":
        need_kernels(device)
    x, good = torch.ones(4, 6, device=device), torch.ones(1, device=device)
    for bad, words in (
        (torch.ones((), device=device), ["()", "(1,)"]),
        (torch.ones(2, device=device), ["(2,)", "(1,)"]),
        (torch.ones(1, device=device, dtype=torch.float64), ["float64", "float32"]),
    ):
        for name, state in (("scale", (bad, good)), ("amax", (good, bad))):
            with backend(how), pytest.raises(RuntimeError) as caught:
                fp8.quantize_delayed(x, 0, True, True, *state)
            for word in (name, *words):
                assert word in str(caught.value)


@pytest.mark.gpu
def test_captured_graph_replays_with_a_new_scale() -> None:
    x, noop = torch.randn(300, 700, device="cuda"), torch.zeros(1, device="cuda")
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    outputs = list(fp8.quantize_delayed(x, 0, True, True, scale, amax))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8.quantize_delayed_out(x, 0, scale, amax, noop, *outputs)
    for step in range(5):
        x.normal_().mul_(step + 1)
        scale.fill_(2.0**step)
        amax.fill_(0.0)
        noop.fill_(float(step == 3))
        before = [t.clone() for t in outputs]
        graph.replay()
        if step == 3:
            assert amax.item() == 0.0
            want = before
        else:
            *want, seen = quantize("torch", x, 0, 2.0**step)
            assert_bitwise_equal(amax, seen)
        for out, expected in zip(outputs, want, strict=True):
            assert_bitwise_equal(out, expected)


@pytest.mark.gpu
def test_one_launch() -> None:
    x = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    scale, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    fp8.quantize_delayed(x, 0, True, True, scale, amax)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fp8.quantize_delayed(x, 0, True, True, scale, amax)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels
