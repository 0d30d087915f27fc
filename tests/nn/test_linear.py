"""Linear against torch.nn.Linear and against its three products written out."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn

import tejit
from tejit import Float8BlockQuantizer, Float8CurrentScalingQuantizer
from tejit.recipe import Float8BlockScaling, Float8CurrentScaling, Format
from tests.common import DEVICES, DTYPES, short
from tests.nn.bounds import STATELESS
from tests.nn.bounds import recipe as named_recipe


def pair(i: int, o: int, bias: bool, dtype: torch.dtype, device: str) -> tuple[nn.Linear, tejit.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(i, o, bias, device=device, dtype=dtype)
    ours = tejit.Linear(i, o, bias, device=device, dtype=dtype)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def run(module, x, grad):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    result = {"y": y.detach(), "dgrad": x.grad, "wgrad": module.weight.grad}
    if module.bias is not None:
        result["bias_grad"] = module.bias.grad
    module.zero_grad()
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_without_autocast_it_is_nn_linear(dtype, device) -> None:
    plain, ours = pair(31, 17, True, dtype, device)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert isinstance(ours, nn.Linear)
    x, grad = torch.randn(2, 5, 31, device=device, dtype=dtype), torch.randn(2, 5, 17, device=device, dtype=dtype)
    got, want = run(ours, x, grad), run(plain, x, grad)
    with tejit.autocast(), tejit.autocast(enabled=False):
        nested = run(ours, x, grad)
    for name in want:
        assert torch.equal(got[name], want[name]), name
        assert torch.equal(nested[name], want[name]), name


@pytest.mark.parametrize("name", [name for name in STATELESS if name[:2] in ("MX", "NV")])
def test_padding_changes_no_result(name) -> None:
    """A layer of sizes that fit equals the same layer with one row and column less, where those are zeros."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXFP8 with HYBRID warns
        recipe = named_recipe(name)
    if name.startswith("NVFP4"):
        recipe = dataclasses.replace(recipe, disable_stochastic_rounding=True)
    _, whole = pair(64, 96, False, torch.float32, "cpu")
    _, part = pair(63, 95, False, torch.float32, "cpu")
    with torch.no_grad():
        whole.weight[95:] = 0
        whole.weight[:, 63:] = 0
        part.weight.copy_(whole.weight[:95, :63])
    x, grad = torch.randn(32, 64), torch.randn(32, 96)
    x[31:], x[:, 63:], grad[31:], grad[:, 95:] = 0, 0, 0, 0
    with tejit.autocast(recipe=recipe):
        want = run(whole, x, grad)
        got = run(part, x[:31, :63].contiguous(), grad[:31, :95].contiguous())
    torch.testing.assert_close(got["y"], want["y"][:31, :95])
    torch.testing.assert_close(got["dgrad"], want["dgrad"][:31, :63])
    torch.testing.assert_close(got["wgrad"], want["wgrad"][:95, :63])


def test_the_three_products_written_out() -> None:
    """fprop, dgrad and wgrad multiply exactly the operands that the quantizers of the recipe make."""
    _, layer = pair(24, 40, True, torch.float32, "cpu")
    x, grad = torch.randn(16, 24), torch.randn(16, 40)
    with tejit.autocast(recipe=Float8CurrentScaling()):
        got = run(layer, x, grad)
    e4m3, e5m2 = Float8CurrentScalingQuantizer(), Float8CurrentScalingQuantizer(torch.float8_e5m2)
    qx, qw, qg = (q(t).dequantize().double() for q, t in ((e4m3, x), (e4m3, layer.weight.detach()), (e5m2, grad)))
    want = {"y": qx @ qw.t() + layer.bias.double(), "dgrad": qg @ qw, "wgrad": qg.t() @ qx, "bias_grad": grad.sum(0)}
    for name, value in want.items():
        assert torch.allclose(got[name].double(), value.double(), rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("device", DEVICES)
def test_the_three_products_of_blocks_written_out(device) -> None:
    """x and grad_output in 1x128, each along the dimension that is contracted, the weight in 128x128."""
    _, layer = pair(200, 140, True, torch.float32, device)
    x, grad = torch.randn(150, 200, device=device), torch.randn(150, 140, device=device)
    with tejit.autocast(recipe=Float8BlockScaling()):
        got = run(layer, x, grad)
    vectors, squares = Float8BlockQuantizer(block_scaling_dim=1), Float8BlockQuantizer()

    def values(quantizer: Float8BlockQuantizer, tensor: torch.Tensor) -> torch.Tensor:
        return quantizer(tensor).dequantize().double()

    rowwise, columnwise = vectors.with_usage(columnwise=False), vectors.with_usage(rowwise=False)
    weight = values(squares, layer.weight.detach())
    want = {
        "y": values(rowwise, x) @ weight.t() + layer.bias.detach().double(),
        "dgrad": values(rowwise, grad) @ weight,
        "wgrad": values(columnwise, grad).t() @ values(columnwise, x),
        "bias_grad": grad.sum(0),
    }
    tolerance = 1e-3 if device == "cuda" else 1e-5  # tensor cores keep fewer bits of a product
    for name, value in want.items():
        error = (got[name].double() - value).norm() / value.double().norm()
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("recipe", "scales"), [(Float8CurrentScaling(), 2), (Float8BlockScaling(), 64 + 4)], ids=["current", "blocks"]
)
def test_saved_for_backward_is_the_quantized_operand(recipe, scales, device) -> None:
    layer = tejit.Linear(64, 96, device=device, dtype=torch.bfloat16)
    x = torch.randn(32, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    saved = []

    def pack(tensor):
        saved.append((tensor.dtype, tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), tejit.autocast(recipe=recipe):
        y = layer(x)
    assert sum(n * d.itemsize for d, n in saved) == 32 * 64 + 64 * 96 + scales * 4
    assert all(dtype in (torch.uint8, torch.float32) for dtype, _ in saved)
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), tejit.autocast(recipe=recipe), torch.no_grad():
        layer(x)
    assert saved == []
    y.sum().backward()


def test_frozen_weight_and_frozen_input() -> None:
    """A frozen layer still passes gradient on; only what is needed is computed and saved."""
    layer = tejit.Linear(32, 16)
    x = torch.randn(8, 32, requires_grad=True)
    with tejit.autocast():
        layer(x).sum().backward()
        full_x, full_w = x.grad.clone(), layer.weight.grad.clone()
        x.grad = layer.weight.grad = layer.bias.grad = None
        layer.weight.requires_grad_(False)
        layer(x).sum().backward()
        assert torch.equal(x.grad, full_x)
        assert layer.weight.grad is None
        layer.weight.requires_grad_(True)
        layer(x.detach()).sum().backward()
    assert torch.equal(layer.weight.grad, full_w)


def test_backward_does_not_read_the_context() -> None:
    layer = tejit.Linear(32, 16)
    x = torch.randn(8, 32, requires_grad=True)
    gradients = []
    for inside in (False, True):
        with tejit.autocast():
            y = layer(x)
            if inside:
                with tejit.autocast(recipe=Float8CurrentScaling(fp8_format=Format.E4M3)):
                    y.pow(2).sum().backward()
        if not inside:
            y.pow(2).sum().backward()
        gradients.append(x.grad.clone())
        x.grad = None
    assert torch.equal(*gradients)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 32), (3, 0, 32)], ids=short)
def test_empty_batches(shape, device) -> None:
    layer = tejit.Linear(32, 16, device=device)
    x = torch.randn(shape, device=device, requires_grad=True)
    with tejit.autocast():
        y = layer(x)
    assert y.shape == (*shape[:-1], 16)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert (layer.weight.grad == 0).all()
    assert (layer.bias.grad == 0).all()


def test_two_layers_in_sequence_both_get_gradients() -> None:
    """TransformerEngine#3172."""
    model = nn.Sequential(tejit.Linear(16, 32), tejit.Linear(32, 8))
    with tejit.autocast():
        model(torch.randn(4, 16)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_inside_torch_autocast_it_takes_the_amp_dtype(device) -> None:
    plain, ours = pair(32, 16, True, torch.float32, device)
    x = torch.randn(8, 32, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16), tejit.autocast():
        y, want = ours(x), plain(x)
    assert y.dtype == want.dtype == torch.bfloat16
    y.float().sum().backward()
    assert ours.weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.float32
    low = tejit.Linear(32, 16, device=device, dtype=torch.bfloat16)
    low.load_state_dict(ours.state_dict())
    with tejit.autocast():
        assert torch.equal(y, low(x.to(torch.bfloat16)))


def test_arguments() -> None:
    assert tejit.Linear(4, 4, params_dtype=torch.float16).weight.dtype == torch.float16
    assert tejit.Linear(4, 4, dtype=torch.float16, params_dtype=torch.float16).weight.dtype == torch.float16
    with pytest.raises(ValueError, match=r"torch\.float16.*torch\.bfloat16"):
        tejit.Linear(4, 4, dtype=torch.float16, params_dtype=torch.bfloat16)
    assert (tejit.Linear(4, 4, init_method=nn.init.zeros_).weight == 0).all()
    assert tejit.Linear(4, 4, bias=False).bias is None
    layer = tejit.Linear(4, 6, return_bias=True)
    x = torch.randn(3, 4)
    for context in (tejit.autocast(enabled=False), tejit.autocast()):
        with context:
            y, bias = layer(x)
        assert bias is layer.bias
        assert torch.allclose(y + bias, nn.functional.linear(x, layer.weight, layer.bias), atol=0.3)
    with pytest.raises(ValueError, match="needs bias=True"):
        tejit.Linear(4, 4, bias=False, return_bias=True)
    with torch.device("meta"):
        assert tejit.Linear(4, 4).weight.device.type == "meta"


def test_errors_name_the_value() -> None:
    layer = tejit.Linear(4, 4)
    with tejit.autocast():
        with pytest.raises(ValueError, match=r"\(3, 5\).*in_features = 4"):
            layer(torch.randn(3, 5))
        with pytest.raises(TypeError, match=r"torch\.bfloat16 and the weight torch\.float32"):
            layer(torch.randn(3, 4, dtype=torch.bfloat16))
        with pytest.raises(TypeError, match=r"torch\.float64; it must be"):
            layer.double()(torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["autocast in the function", "autocast around the checkpoint"])
def test_activation_checkpointing_is_bit_equal(inside, reentrant) -> None:
    """Backward runs outside of autocast, as it usually does; the recomputation repeats the forward's recipe."""
    model = nn.Sequential(tejit.Linear(16, 32), nn.GELU(), tejit.Linear(32, 16))
    x = torch.randn(8, 16, requires_grad=True)
    with tejit.autocast():
        y = model(x)
    y.pow(2).sum().backward()
    want = [x.grad.clone()] + [p.grad.clone() for p in model.parameters()]
    x.grad = None
    model.zero_grad()

    def run(value):
        with tejit.autocast():
            return model(value)

    with tejit.autocast(enabled=not inside):
        y = torch.utils.checkpoint.checkpoint(run if inside else model, x, use_reentrant=reentrant)
    y.pow(2).sum().backward()
    for got, expected in zip([x.grad] + [p.grad for p in model.parameters()], want, strict=True):
        assert torch.equal(got, expected)
    with torch.no_grad():
        assert torch.equal(model(x), nn.Sequential(*model)(x))  # and plain again afterwards


def test_checkpointing_without_autocast_stays_unquantized() -> None:
    layer = tejit.Linear(16, 16)
    x = torch.randn(8, 16, requires_grad=True)
    with tejit.autocast():
        layer(x)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True).sum().backward()
    got = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x).sum().backward()
    assert torch.equal(got, layer.weight.grad)


def test_second_derivatives_are_refused() -> None:
    layer, head = tejit.Linear(16, 16), tejit.Linear(16, 1)
    x = torch.randn(4, 16, requires_grad=True)
    with tejit.autocast():
        y = head(torch.tanh(layer(x)))
    with pytest.raises(NotImplementedError, match="first derivative only"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize(("i", "o"), [(0, 4), (4, 0)])
def test_no_features(i, o) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about initialising nothing
        layer, plain = tejit.Linear(i, o), nn.Linear(i, o)
    x = torch.randn(3, i, requires_grad=True)
    with tejit.autocast():
        y = layer(x)
    y.sum().backward()
    assert y.shape == plain(x).shape
    assert layer.weight.grad.shape == layer.weight.shape


def test_meta_and_mixed_devices() -> None:
    layer = tejit.Linear(16, 8, device="meta")
    with tejit.autocast():
        assert layer(torch.randn(4, 16, device="meta")).shape == (4, 8)
        with pytest.raises(ValueError, match="input is on cpu and the weight on meta"):
            layer(torch.randn(4, 16))


def test_torch_autocast_leaves_float64_and_integers_alone() -> None:
    layer = tejit.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16), tejit.autocast():
        for x in (torch.randn(2, 8, dtype=torch.float64), torch.ones(2, 8, dtype=torch.int64)):
            with pytest.raises(TypeError, match=f"input is {x.dtype}"):
                layer(x)
