"""What only a GPU can show of MXFP8: streams, captured graphs, large tensors, launches, a second device."""

import pytest
import torch

import tejit
from tejit.kernels import mxfp8
from tests.common import assert_bitwise_equal, provoking, two_gpus

pytestmark = pytest.mark.gpu
both_blocks = pytest.mark.parametrize("square", [False, True], ids=["1x32", "32x32"])


@both_blocks
def test_side_stream(square) -> None:
    x = provoking("normal", (512, 544), torch.bfloat16).cuda()
    want = mxfp8.quantize(x * 2, 0, True, True, square, False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # work on the default stream would run before it
        x.mul_(2)
        got = mxfp8.quantize(x, 0, True, True, square, False)
    stream.synchronize()
    for one, other in zip(got, want, strict=True):
        assert_bitwise_equal(one, other)


@both_blocks
def test_captured_graph_replays_with_new_data_and_obeys_noop(square) -> None:
    x, noop = torch.randn(320, 704, device="cuda"), torch.zeros(1, device="cuda")
    q = tejit.MXFP8Quantizer(with_2d_quantization=square)
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_more_than_2_31_elements(dtype) -> None:
    """Of bfloat16 through the tuned kernel, of float16 through the other one."""
    columns = 65536
    rows = (2**31 // columns + 300) // 128 * 128
    x = torch.randn(rows, columns, device="cuda", dtype=dtype)
    row, row_scale_inv, col, col_scale_inv = mxfp8.quantize(x, 0, True, True, False, False)
    for first in (0, rows // 256 * 128, rows - 128):
        part, blocks = slice(first, first + 128), slice(first // 32, first // 32 + 4)
        want = mxfp8.quantize(x[part].contiguous(), 0, True, True, False, False)
        assert_bitwise_equal(row[part], want[0])
        assert_bitwise_equal(row_scale_inv[part], want[1])
        assert_bitwise_equal(col[part], want[2])
        assert_bitwise_equal(col_scale_inv[blocks], want[3])


@pytest.mark.full
def test_more_than_2_31_elements_in_columns_that_no_vector_divides() -> None:
    columns = 65521
    rows = (2**31 // columns + 300) // 128 * 128
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    _, _, col, col_scale_inv = mxfp8.quantize(x, 0, False, True, False, False)
    for first in (0, rows // 256 * 128, rows - 128):
        want = mxfp8.quantize(x[first : first + 128].contiguous(), 0, False, True, False, False)
        assert_bitwise_equal(col[first : first + 128], want[2])
        assert_bitwise_equal(col_scale_inv[first // 32 : first // 32 + 4], want[3])


@two_gpus
@both_blocks
def test_second_device_while_the_first_is_current(square) -> None:
    x = provoking("normal", (96, 224), torch.bfloat16)
    want = mxfp8.quantize(x, 0, True, True, square, False)
    with torch.cuda.device(0):
        got = mxfp8.quantize(x.to("cuda:1"), 0, True, True, square, False)
        assert torch.cuda.current_device() == 0
    for one, other in zip(got, want, strict=True):
        assert one.device.index == 1
        assert_bitwise_equal(one.cpu(), other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@both_blocks
def test_both_directions_are_one_kernel_without_a_synchronisation(square, dtype) -> None:
    """Neither padding nor swizzling takes another launch."""
    x = torch.randn(1024, 1056, device="cuda", dtype=dtype)
    mxfp8.quantize(x, 0, True, True, square, True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            mxfp8.quantize(x, 0, True, True, square, True)
            mxfp8.quantize(x[:0], 0, True, True, square, True)  # nothing to launch
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in kernels if "tejit" in name]) == 1
    assert not [name for name in kernels if "memset" in name.lower() or "memcpy" in name.lower()]
