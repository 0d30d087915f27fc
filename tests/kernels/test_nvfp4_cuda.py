"""What only a GPU can show of NVFP4: streams, captured graphs, large tensors, launches, a second device."""

import pytest
import torch

import tejit
from tejit.kernels import nvfp4
from tests.common import assert_bitwise_equal, provoking, two_gpus
from tests.kernels.nvfp4_modes import MODES, Mode, each_mode

pytestmark = pytest.mark.gpu


def quantize(x: torch.Tensor, mode: Mode, row: bool = True, col: bool = True, given=(None, None)):
    return nvfp4.quantize(x, row, col, *mode.arguments(x.device), *given)


@each_mode
def test_side_stream(mode: Mode) -> None:
    x = provoking("normal", (512, 528), torch.bfloat16).cuda()
    want = quantize(x * 2, mode)
    arguments = mode.arguments(x.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # work on the default stream would run before it
        x.mul_(2)
        got = nvfp4.quantize(x, True, True, *arguments, None, None)
    stream.synchronize()
    for one, other in zip(got, want, strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"with_2d_quantization": True},
        {"with_rht": True},
        {"row_scaled_nvfp4": True},
        {"nvfp4_use_4over6": True},
        {"optimize_for_gemm": True},
    ],
    ids=str,
)
def test_captured_graph_replays_with_new_data_and_obeys_noop(fields) -> None:
    x, noop = torch.randn(304, 704, device="cuda"), torch.zeros(1, device="cuda")
    q = tejit.NVFP4Quantizer(**fields)
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


@pytest.mark.parametrize("rht", [False, True], ids=["plain", "rht"])
def test_replays_of_stochastic_rounding_differ_and_a_seed_repeats_them(rht) -> None:
    """pytorch/ao#3384: two replays of one graph."""
    q = tejit.NVFP4Quantizer(stochastic_rounding=True, with_rht=rht)
    x, noop = torch.randn(256, 256, device="cuda"), torch.zeros(1, device="cuda")
    t = q(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.update_quantized(x, t, noop_flag=noop)

    def replays() -> list[torch.Tensor]:
        torch.cuda.manual_seed(3)
        codes = []
        for _ in range(3):
            graph.replay()
            codes.append(torch.cat((t._rowwise_data.flatten(), t._columnwise_data.flatten())))
        return codes

    first, again = replays(), replays()
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    for one, other in zip(first, again, strict=True):
        assert_bitwise_equal(one, other)
    noop.fill_(1.0)
    graph.replay()
    assert_bitwise_equal(torch.cat((t._rowwise_data.flatten(), t._columnwise_data.flatten())), first[2])


@pytest.mark.full
@pytest.mark.parametrize("name", ["1x16", "16x16", "rht", "sr", "4over6 mae"])
def test_more_than_2_31_elements(name: str) -> None:
    """TE#3136. Rows of the middle and the last ones, as their own tensors with the whole one's amax give them."""
    columns = 65536
    rows = 2**31 // columns + 256
    mode = MODES[name]
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    row, row_scales, col, col_scales, amax_row, amax_col = quantize(x, mode)
    for first in (0, rows // 256 * 128, rows - 128):
        part = slice(first, first + 128)
        want = quantize(x[part].contiguous(), mode, given=(amax_row, amax_col))
        assert_bitwise_equal(row_scales[part], want[1])
        assert_bitwise_equal(col_scales[:, first // 16 : first // 16 + 8].contiguous(), want[3])
        if mode.seed is None:  # the random bits are those of the index in the whole tensor
            assert_bitwise_equal(row[part], want[0])
            assert_bitwise_equal(col[:, first // 2 : first // 2 + 64].contiguous(), want[2])
        elif first == 0:
            assert_bitwise_equal(row[part], want[0])


@two_gpus
@each_mode
def test_second_device_while_the_first_is_current(mode: Mode) -> None:
    x = provoking("normal", (112, 208), torch.bfloat16)
    want = quantize(x, mode)
    with torch.cuda.device(0):
        got = quantize(x.to("cuda:1"), mode)
        assert torch.cuda.current_device() == 0
    for one, other in zip(got, want, strict=True):
        assert one.device.index == 1
        assert_bitwise_equal(one.cpu(), other)


@two_gpus
def test_everything_moves_to_another_device() -> None:
    """diffusers#10798: every tensor that can be reached, and the moved one is quantized again there."""
    q = tejit.NVFP4Quantizer(with_rht=True, stochastic_rounding=True)
    moved = q(torch.randn(64, 64, device="cuda:0")).to("cuda:1")
    assert all(buffer.device.index == 1 for buffer in moved._inner())
    moved.copy_(torch.randn(64, 64, device="cuda:0"))
    assert moved.dequantize().device.index == 1


def test_no_synchronisation_and_nothing_launched_for_an_empty_tensor() -> None:
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    for mode in MODES.values():
        arguments = mode.arguments(x.device)
        nvfp4.quantize(x, True, True, *arguments, None, None)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            nvfp4.quantize(x, True, True, *arguments, None, None)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                nvfp4.quantize(x[:0], True, True, *arguments, None, None)
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert not [name for name in kernels if "tejit" in name]
