"""Parameters that get other values, or another shape, or are made anew by their class (row 79 of the field cases)."""

import numpy as np
import pytest
import torch
from torch import nn

import tejit
from tejit.tensor import QuantizedTensor

QUANTIZERS = {
    "current": tejit.Float8CurrentScalingQuantizer(torch.float8_e4m3fn),
    "current E5M2": tejit.Float8CurrentScalingQuantizer(torch.float8_e5m2),
    "block": tejit.Float8BlockQuantizer(torch.float8_e4m3fn),
    "MXFP8": tejit.MXFP8Quantizer(torch.float8_e4m3fn),
    "NVFP4": tejit.NVFP4Quantizer(),
    "identity": tejit.IdentityQuantizer(dtype=torch.bfloat16),
    "hybrid": tejit.HybridQuantizer(
        rowwise_quantizer=tejit.MXFP8Quantizer(torch.float8_e4m3fn),
        columnwise_quantizer=tejit.Float8CurrentScalingQuantizer(torch.float8_e5m2),
    ),
}
FITTING = [name for name in QUANTIZERS if name in ("MXFP8", "NVFP4", "hybrid")]

pytestmark = pytest.mark.filterwarnings("ignore:tejit")


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameter(name: str) -> nn.Parameter:
    return nn.Parameter(QUANTIZERS[name](values(64, 128)))


def assert_same(got: QuantizedTensor, want: QuantizedTensor) -> None:
    assert type(got) is type(want)
    assert got.shape == want.shape
    for mine, theirs in zip(got._inner(), want._inner(), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_79_the_class_of_a_parameter_makes_a_parameter_over_the_same_buffers(name, wanted) -> None:
    w = parameter(name)
    for made in (
        type(w)(w.detach(), requires_grad=wanted),
        type(w)(w.detach(), wanted),
        type(w)(data=w.detach(), requires_grad=wanted),
        type(w)(w, requires_grad=wanted),
        type(w)(QUANTIZERS[name](values(64, 128)), requires_grad=wanted),
    ):
        assert made is not w
        assert isinstance(made, nn.Parameter)
        assert made.requires_grad is wanted
        assert made.is_leaf
        assert_same(made, w)
    made = type(w)(w.detach())
    assert made.requires_grad  # as of nn.Parameter
    with torch.no_grad():
        made.copy_(values(64, 128, seed=1))
    assert_same(w, QUANTIZERS[name](values(64, 128, seed=1)))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_79_with_the_dictionary_of_the_old_parameter_any_values_become_one(name) -> None:
    """As transformers does: ``type(old)(new, requires_grad=old.requires_grad, **old.__dict__)``."""
    w = parameter(name)
    w.flag = [1]
    w.describe = (lambda self: self).__get__(w)
    new = values(128, 64, seed=1)
    for data in (new, QUANTIZERS[name](new), nn.Parameter(new)):
        made = type(w)(data, requires_grad=False, **w.__dict__)
        assert_same(made, QUANTIZERS[name](new))
        assert isinstance(made, nn.Parameter)
        assert not made.requires_grad
        assert made.flag is w.flag
        assert made.describe() is made
    assert_same(w, QUANTIZERS[name](values(64, 128)))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_79_plain_values_alone_raise_and_the_error_says_how(name) -> None:
    w = parameter(name)
    other = tejit.Float8CurrentScalingQuantizer(torch.float8_e4m3fn) if name != "current" else QUANTIZERS["MXFP8"]
    given = [values(64, 128)] + ([] if type(w) is tejit.Float8Tensor else [other(values(64, 128))])
    for data in given:
        with pytest.raises(TypeError, match=r"shape \(64, 128\).*quantizer\(values\).*copy_"):
            type(w)(data, requires_grad=False)
    with pytest.raises(TypeError, match="require_grad"):
        type(w)(w.detach(), require_grad=False)
    with pytest.raises(TypeError, match=r"torch.int64"):
        type(w)(torch.ones(64, 128, dtype=torch.int64), requires_grad=False, **w.__dict__)


@pytest.mark.parametrize("name", FITTING)
def test_79_values_of_a_shape_that_does_not_fit_raise(name) -> None:
    w = parameter(name)
    before = w.detach().clone()
    multiple = "16" if name == "NVFP4" else "32"
    for write in (
        lambda: type(w)(values(3, 5), requires_grad=False, **w.__dict__),
        lambda: setattr(w, "data", values(3, 5)),
    ):
        with pytest.raises(ValueError, match=rf"\(3, 5\).*multiples of {multiple}.*Pad"):
            write()
    assert_same(w, before)


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (256, 32), (2, 32, 64)])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_79_data_takes_other_values_and_another_shape(name, shape) -> None:
    new = values(*shape, seed=1)
    want = QUANTIZERS[name](new)
    for data in (new, QUANTIZERS[name](new), new.movedim(-1, 0).contiguous().movedim(0, -1)):
        w = parameter(name)
        same = w
        w.data = data
        assert w is same
        assert isinstance(w, nn.Parameter)
        assert w.requires_grad
        assert_same(w, want)
        assert torch.equal(w.dequantize(), want.dequantize())
        assert w.stride() == want.stride()
        (w * 2).sum().backward()
        assert w.grad.shape == shape


def test_79_data_of_another_class_is_quantized() -> None:
    w = parameter("MXFP8")
    other = QUANTIZERS["current"](values(128, 64, seed=1))
    w.data = other
    assert_same(w, QUANTIZERS["MXFP8"](other.dequantize()))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_79_data_on_the_other_side_of_meta_raises(name) -> None:
    w = parameter(name)
    bare = nn.Parameter(w.detach().to("meta"))
    for target, data in ((bare, values(64, 128)), (bare, w.detach()), (w, values(64, 128).to("meta"))):
        with pytest.raises(ValueError, match=r"no memory.*Parameter"):
            target.data = data
    assert_same(w, QUANTIZERS[name](values(64, 128)))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_79_a_layer_computes_with_the_values_of_another_shape(name) -> None:
    """What it kept ready of the values before is forgotten."""
    layer = tejit.Linear(128, 64, bias=False)
    layer.weight = parameter(name)
    x = values(32, 128).to(layer.weight.dtype)
    with torch.no_grad():
        layer(x)
        layer.weight.data = values(128, 128, seed=1)
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight.dequantize()))
        layer._parameters["weight"] = type(layer.weight)(QUANTIZERS[name](values(32, 128)), requires_grad=False)
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight.dequantize()))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_79_the_address_tells_tensors_apart(name) -> None:
    """accelerate takes parameters with one address for tied ones."""
    a, b = parameter(name), parameter(name)
    assert a.data_ptr() != b.data_ptr()
    assert a.data_ptr() == a.detach().data_ptr() == a.data.data_ptr()
    assert a.detach().to("meta").data_ptr() == 0


def test_79_numpy_raises_and_names_the_way_out() -> None:
    for call in (lambda w: w.detach().numpy(), lambda w: w.numpy(force=True), lambda w: np.asarray(w.detach())):
        with pytest.raises(RuntimeError, match=r"dequantize\(\).numpy\(\)"):
            call(parameter("current"))
