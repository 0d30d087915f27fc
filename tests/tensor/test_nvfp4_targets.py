"""What is written into an NVFP4 tensor must be what its quantizer says of it: update_usage and t() rely on that."""

import pytest
import torch

import tejit
from tejit import NVFP4Quantizer
from tejit.kernels.nvfp4 import reference
from tests.common import DEVICES, assert_bitwise_equal

TILES = NVFP4Quantizer(with_2d_quantization=True)
OTHERS = {
    "1x16": NVFP4Quantizer(),
    "stochastic tiles": TILES.replace(stochastic_rounding=True),
    "stochastic 1x16": NVFP4Quantizer(stochastic_rounding=True),
}


def assert_directions_agree(t) -> None:
    """The columnwise data, made again from the rowwise data and turned, hold the same values."""
    values = t.dequantize()
    assert_bitwise_equal(t.t().dequantize(), values.t().contiguous())
    t.update_usage(columnwise_usage=False)
    t.update_usage(columnwise_usage=True)
    t.update_usage(rowwise_usage=False)
    assert_bitwise_equal(t.dequantize(), values)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])
def test_tiles_do_not_take_what_is_no_tiles(other, internal) -> None:
    x = torch.randn(64, 96)
    target = TILES.replace(internal=internal)(x)
    before = target.dequantize()
    with pytest.raises(TypeError, match=r"tiles of 16x16"):
        OTHERS[other].update_quantized(x * 2, target)
    assert_bitwise_equal(target.dequantize(), before)


@pytest.mark.parametrize("other", OTHERS)
def test_copying_into_tiles_makes_tiles(other) -> None:
    target = TILES(torch.randn(64, 96))
    source = OTHERS[other](torch.randn(64, 96))
    target.copy_(source)
    assert (target.dequantize() - source.dequantize()).norm() < 0.15 * source.dequantize().norm()
    assert_directions_agree(target)


def test_loading_blocks_of_1x16_into_tiles_makes_tiles() -> None:
    module, saved = torch.nn.Module(), torch.nn.Module()
    module.weight = torch.nn.Parameter(TILES(torch.randn(64, 96)))
    saved.weight = torch.nn.Parameter(NVFP4Quantizer()(torch.randn(64, 96)))
    module.load_state_dict(saved.state_dict())
    assert_directions_agree(module.weight.detach())


def test_blocks_of_1x16_take_the_bytes_of_tiles() -> None:
    target, source = NVFP4Quantizer()(torch.randn(64, 96)), TILES(torch.randn(64, 96))
    target.copy_(source)
    assert_bitwise_equal(target.dequantize(), source.dequantize())


@pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
def test_a_direction_that_was_made_again_can_be_written(swizzled) -> None:
    q = TILES.replace(optimize_for_gemm=swizzled)
    t, y = q(torch.randn(32, 96)), torch.randn(32, 96)
    t.update_usage(columnwise_usage=False)
    t.update_usage(columnwise_usage=True)
    assert all(buffer.is_contiguous() for buffer in t._inner())
    t.quantize_(y)
    for mine, fresh in zip(t._inner(), q(y)._inner(), strict=True):
        assert_bitwise_equal(mine, fresh)


@pytest.mark.parametrize("shape", [(16, 48), (64, 64), (2, 32, 80)])
def test_buffers_of_the_torch_backend_lie_as_the_kernels(shape) -> None:
    x = torch.randn(shape)
    for mode in ({}, {"with_rht": True}, {"with_2d_quantization": True}, {"nvfp4_use_4over6": True}):
        q = NVFP4Quantizer(**mode)
        with tejit.backend("torch"):
            t = q(x)
        assert [b.stride() for b in t._inner()] == [b.stride() for b in q(x)._inner()]
        t.quantize_(x)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
@pytest.mark.parametrize("row_scaled", [False, True], ids=["tensor", "rows"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_amax_of_an_empty_tensor(shape, row_scaled, device) -> None:
    """A flag of 1.0 keeps it; an infinite one that is given is stored as 6 E (formats.md sections 1 and 6)."""
    x = torch.empty(shape, device=device)
    rows, columns = shape if row_scaled else (1, 1)
    for given, stored in ((float("inf"), 6.0 * 256), (3.0, 3.0), (None, 0.0)):
        amaxes = [None if given is None else torch.full((n,), given, device=device) for n in (rows, columns)]
        mode = (False, 0, False, row_scaled, 0, 256, False, None, *amaxes)
        made = torch.ops.tejit.nvfp4_quantize.default(x, True, True, *mode)
        expected = reference.quantize(x.cpu(), True, True, *mode[:8], *[a if a is None else a.cpu() for a in amaxes])
        for got, want in zip(made, expected, strict=True):
            assert_bitwise_equal(got.cpu(), want)
        assert made[4].tolist() == [stored] * rows
        for flag, amax in ((1.0, 7.0), (0.0, stored)):
            out = [torch.full(b.shape, 7, dtype=b.dtype, device=device) for b in made]
            torch.ops.tejit.nvfp4_quantize_out.default(x, *mode, torch.full((), flag, device=device), *out)
            assert out[4].tolist() == [amax] * rows
            assert out[5].tolist() == [amax] * columns
