"""What only a GPU can show of FP8 in blocks: streams, captured graphs, large tensors, launches, a second device."""

import pytest
import torch

import tejit
from tejit.kernels import fp8_block
from tests.common import assert_bitwise_equal, provoking, two_gpus

pytestmark = pytest.mark.gpu
both_dims = pytest.mark.parametrize("dim", [1, 2], ids=["1x128", "128x128"])


@both_dims
def test_side_stream(dim) -> None:
    x = provoking("normal", (512, 520), torch.bfloat16).cuda()
    want = fp8_block.quantize(x * 2, 0, dim, True, True, False, 0.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # work on the default stream would run before it
        x.mul_(2)
        got = fp8_block.quantize(x, 0, dim, True, True, False, 0.0)
    stream.synchronize()
    for one, other in zip(got, want, strict=True):
        assert_bitwise_equal(one, other)


@both_dims
def test_captured_graph_replays_with_new_data_and_obeys_noop(dim) -> None:
    x, noop = torch.randn(300, 700, device="cuda"), torch.zeros(1, device="cuda")
    q = tejit.Float8BlockQuantizer(block_scaling_dim=dim)
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
        before = [buffer.clone() for buffer in t._inner()]
        graph.replay()
        want = q(x)._inner()
        for replayed, kept, old, new in zip(fresh._inner(), t._inner(), before, want, strict=True):
            assert_bitwise_equal(replayed, new)
            assert_bitwise_equal(kept, old if step == 3 else new)


@pytest.mark.full
@both_dims
@pytest.mark.parametrize("columns", [65536, 65521])
def test_more_than_2_31_elements(columns, dim) -> None:
    rows = (2**31 // columns + 300) // 128 * 128
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    row, row_scale_inv, col, col_scale_inv = fp8_block.quantize(x, 0, dim, True, True, False, 0.0)
    for first in (0, rows // 256 * 128, rows - 128):
        part = slice(first, first + 128)
        want = fp8_block.quantize(x[part].contiguous(), 0, dim, True, True, False, 0.0)
        assert_bitwise_equal(row[part], want[0])
        assert_bitwise_equal(col[:, part].contiguous(), want[2])
        i = first // 128
        if dim == 1:
            assert_bitwise_equal(row_scale_inv[:, part].contiguous(), want[1])
            assert_bitwise_equal(col_scale_inv[i : i + 1], want[3])
        else:
            assert_bitwise_equal(row_scale_inv[i : i + 1], want[1])
            assert_bitwise_equal(col_scale_inv[:, i].contiguous(), want[3][:, 0].contiguous())


@two_gpus
@both_dims
def test_second_device_while_the_first_is_current(dim) -> None:
    x = provoking("normal", (100, 200), torch.bfloat16)
    want = fp8_block.quantize(x, 0, dim, True, True, False, 0.0)
    with torch.cuda.device(0):
        got = fp8_block.quantize(x.to("cuda:1"), 0, dim, True, True, False, 0.0)
        assert torch.cuda.current_device() == 0
    for one, other in zip(got, want, strict=True):
        assert one.device.index == 1
        assert_bitwise_equal(one.cpu(), other)


@both_dims
def test_both_directions_are_one_kernel_without_a_synchronisation(dim) -> None:
    x = torch.randn(1000, 1000, device="cuda", dtype=torch.bfloat16)
    fp8_block.quantize(x, 0, dim, True, True, False, 0.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            fp8_block.quantize(x, 0, dim, True, True, False, 0.0)
            fp8_block.quantize(x[:0], 0, dim, True, True, False, 0.0)  # nothing to launch
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in kernels if "tejit" in name]) == 1
    assert not [name for name in kernels if "memset" in name.lower() or "memcpy" in name.lower()]
