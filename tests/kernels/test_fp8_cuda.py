"""What only a GPU can show: streams, captured graphs, large tensors, launches, a second device."""

import os
import subprocess
import sys

import pytest
import torch

import tejit
from tejit.kernels import fp8
from tests.common import assert_bitwise_equal, provoking, two_gpus

pytestmark = pytest.mark.gpu


def test_side_stream() -> None:
    x = provoking("normal", (512, 512), torch.bfloat16).cuda()
    want = fp8.quantize_current(x, 0, True, True, False, 0.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # work on the default stream would run before it
        x.mul_(2)
        got = fp8.quantize_current(x, 0, True, True, False, 0.0)
    stream.synchronize()
    assert_bitwise_equal(got[0], want[0])
    assert_bitwise_equal(got[2], want[2] * 2)


def test_captured_graph_replays_with_new_data_and_obeys_noop() -> None:
    x, noop = torch.randn(300, 700, device="cuda"), torch.zeros(1, device="cuda")
    q = tejit.Float8CurrentScalingQuantizer()
    t = q.make_empty(x.shape, device="cuda")
    q.update_quantized(x, t, noop_flag=noop)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.update_quantized(x, t, noop_flag=noop)
        fresh = q(x)
    for step in range(5):
        x.normal_().mul_(step + 1)
        noop.fill_(float(step == 3))
        before = t.dequantize()
        graph.replay()
        want = q(x)
        assert_bitwise_equal(fresh._data, want._data)
        assert_bitwise_equal(fresh._transpose, want._transpose)
        assert_bitwise_equal(t.dequantize(), before if step == 3 else want.dequantize())


@pytest.mark.full
@pytest.mark.parametrize("columns", [65536, 65521])
def test_more_than_2_31_elements(columns) -> None:
    rows = 2**31 // columns + 40
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-1, -5:] = 3000.0
    data, transpose, scale_inv = fp8.quantize_current(x, 0, True, True, False, 0.0)
    assert scale_inv.item() == torch.tensor(3008.0 / 448.0).item()  # 3000 in bfloat16 is 3008
    for part in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(rows - 3, rows)):
        piece = x[part].contiguous()
        want = fp8.quantize_current(piece, 0, True, False, False, 0.0, torch.full((1,), 3008.0, device="cuda"))[0]
        assert_bitwise_equal(data[part], want)
        assert_bitwise_equal(transpose[:, part].t().contiguous(), want)


@two_gpus
def test_second_device_while_the_first_is_current() -> None:
    x = provoking("normal", (100, 200), torch.bfloat16)
    want = fp8.quantize_current(x, 0, True, True, False, 0.0)
    with torch.cuda.device(0):
        got = fp8.quantize_current(x.to("cuda:1"), 0, True, True, False, 0.0)
        assert torch.cuda.current_device() == 0
    for one, other in zip(got, want, strict=True):
        assert one.device.index == 1
        assert_bitwise_equal(one.cpu(), other)


def test_import_makes_no_context_and_a_forked_child_computes() -> None:
    code = """
import os, torch, tejit
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    x = torch.randn(64, 64, device="cuda")
    with tejit.backend("kernels"):
        t = tejit.Float8CurrentScalingQuantizer()(x)
    os._exit(0 if torch.equal(t._data.cpu(), tejit.Float8CurrentScalingQuantizer()(x.cpu())._data) else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=120)


def test_quantize_launches_two_kernels_and_does_not_synchronise() -> None:
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    fp8.quantize_current(x, 0, True, True, False, 0.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            fp8.quantize_current(x, 0, True, True, False, 0.0)
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in kernels if "tejit" in name]) == 2
    assert not [name for name in kernels if "memset" in name.lower() or "memcpy" in name.lower()]
