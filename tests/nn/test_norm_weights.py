"""Where the weights of modules with norms come from and their gradients go: everywhere as in `Linear`."""

import pytest
import torch
from torch import nn

import tejit
from tejit import LayerNormLinear, LayerNormMLP, TransformerLayer
from tejit.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.common import DEVICES
from tests.nn import twins
from tests.nn.bounds import relative_error
from tests.nn.twins import randomised, results

MODULES = {
    "linear": lambda **k: LayerNormLinear(64, 96, **k),
    "mlp": lambda **k: LayerNormMLP(64, 96, activation="swiglu", normalization="RMSNorm", **k),
    "transformer": lambda **k: TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, **k),
}
RECIPES = {
    "current": Float8CurrentScaling,
    "blocks": Float8BlockScaling,
    "MXFP8": MXFP8BlockScaling,
    "NVFP4": lambda **k: NVFP4BlockScaling(disable_stochastic_rounding=True, **k),
}


def inputs(module, device="cpu"):
    torch.manual_seed(1)
    x = torch.randn(2, 16, 64, device=device)
    return x, torch.randn_like(module(x))


def weights_of(module):
    return {name: p for name, p in module.named_parameters() if p.dim() == 2}


def quantize_weights(module, recipe) -> None:
    quantizer = recipe.linear.weight.both.replace(internal=False)
    for name, p in weights_of(module).items():
        owner, _, last = name.rpartition(".")
        with torch.no_grad():
            setattr(module.get_submodule(owner), last, nn.Parameter(quantizer(p.detach())))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("name", list(MODULES))
def test_quantized_parameters_and_workspaces_change_no_byte(name, recipe, device) -> None:
    """A weight quantized in the call, once for two microbatches, or before: the same output and gradients."""
    module, chosen = randomised(MODULES[name](device=device)), RECIPES[recipe]()
    x, grad = inputs(module, device)
    with tejit.autocast(recipe=chosen):
        want = results(module, module, x, grad)
        for first in (True, False, False):
            got = results(lambda x: module(x, is_first_microbatch=first), module, x, grad)  # noqa: B023 - called at once
            for what, value in want.items():
                assert torch.equal(got[what], value), what
        with torch.no_grad():
            next(iter(weights_of(module).values())).mul_(2)  # what the workspace has is not asked for again
        stale = module(x, is_first_microbatch=False)
        assert torch.equal(stale, want["y"])
        assert not torch.equal(module(x, is_first_microbatch=True), stale)
        with torch.no_grad():
            next(iter(weights_of(module).values())).div_(2)
        quantize_weights(module, chosen)
        got = results(module, module, x, grad)
    for what, value in want.items():
        assert torch.equal(got[what], value), what
        assert got[what].dtype == torch.float32


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_a_quantized_parameter_without_autocast_is_its_values(name) -> None:
    module = randomised(MODULES[name]())
    x, _ = inputs(module)
    quantize_weights(module, Float8CurrentScaling())
    got = module(x)
    with torch.no_grad():
        for weight, p in weights_of(module).items():
            setattr(module, weight, nn.Parameter(p.dequantize()))
    assert torch.equal(got, (twins.norm_linear if name == "linear" else twins.norm_mlp)(module, x))


def test_a_quantized_parameter_whose_product_stays_in_high_precision_gets_its_gradient() -> None:
    module = randomised(MODULES["mlp"](name="m"))
    x, grad = inputs(module)
    quantize_weights(module, Float8CurrentScaling())
    with tejit.autocast(recipe=Float8CurrentScaling(overrides=(("*.fc1", None),))):
        got = results(module, module, x, grad)
    with torch.no_grad():
        module.fc1_weight = nn.Parameter(module.fc1_weight.dequantize())
    with tejit.autocast(recipe=Float8CurrentScaling(overrides=(("*.fc1", None),))):
        want = results(module, module, x, grad)
    for what, value in want.items():
        assert torch.equal(got[what], value), what


@pytest.mark.parametrize("name", list(MODULES))
def test_main_grad_and_delayed_gradients_are_the_gradients(name) -> None:
    module = randomised(MODULES[name]())
    x, grad = inputs(module)
    with tejit.autocast():
        want = results(module, module, x, grad)
    fused = randomised(MODULES[name](fuse_wgrad_accumulation=True))
    delayed = randomised(MODULES[name](delay_wgrad_compute=True))
    both = randomised(MODULES[name](fuse_wgrad_accumulation=True, delay_wgrad_compute=True))
    for other in (fused, delayed, both):
        for p in weights_of(other).values():
            p.main_grad = torch.ones_like(p)
        with tejit.autocast():
            other(x).backward(grad)
        if other is not fused:
            assert all(p.grad is None and (p.main_grad == 1).all() for p in weights_of(other).values())
            other.backward_dw()
        for what, p in other.named_parameters():
            if p.dim() == 2 and other is not delayed:
                assert p.grad is None
                assert torch.equal(p.main_grad, want[what] + 1), what
            else:
                assert torch.equal(p.grad, want[what]), what


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("recipe", ["current", "MXFP8"])
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_backward_override_multiplies_in_high_precision(name, recipe, override) -> None:
    """`high_precision`: what backward multiplies are the values themselves, so that errors come from forward alone."""
    module = randomised(MODULES[name]())
    x, grad = inputs(module)
    twin = twins.norm_linear if name == "linear" else twins.norm_mlp
    want = results(lambda x: twin(module, x), module, x, grad)
    with tejit.autocast(recipe=RECIPES[recipe](backward_override=override)):
        got = results(module, module, x, grad)
    with tejit.autocast(recipe=RECIPES[recipe]()):
        quantized = results(module, module, x, grad)
    assert torch.equal(got["y"], quantized["y"])
    for what, value in want.items():
        if what != "y" and quantized[what].ne(value).any():
            error, other = relative_error(got[what], value), relative_error(quantized[what], value)
            assert error < (1e-5 if (name, override) == ("linear", "high_precision") else 0.9 * other), what


@pytest.mark.parametrize("name", list(MODULES))
def test_switches_are_bools(name) -> None:
    with pytest.raises(TypeError, match="fuse_wgrad_accumulation is 1; it must be True or False"):
        MODULES[name](fuse_wgrad_accumulation=1)


@pytest.mark.parametrize("name", list(MODULES))
def test_quantized_model_init(name) -> None:
    """The weights are born quantized, with the values that they would have; `reset_parameters` makes them anew."""
    torch.manual_seed(0)
    plain = MODULES[name]()
    torch.manual_seed(0)
    with tejit.quantized_model_init(recipe=Float8CurrentScaling(), preserve_high_precision_init_val=True):
        module = MODULES[name]()
    for what, p in weights_of(module).items():
        want = plain.get_parameter(what)
        assert isinstance(p, tejit.Float8Tensor), what
        assert torch.equal(p.get_high_precision_init_val(), want), what
    x, grad = inputs(plain)
    with tejit.autocast(recipe=Float8CurrentScaling()):
        got, want = results(module, module, x, grad), results(plain, plain, x, grad)
    for what, value in want.items():
        assert torch.equal(got[what], value), what
    first = module if name != "transformer" else module.layernorm_mlp
    before = {what: p.dequantize() for what, p in weights_of(first).items()}
    first.reset_parameters()
    for what, p in weights_of(first).items():
        assert isinstance(p, tejit.Float8Tensor)
        assert not torch.equal(p.dequantize(), before[what])


def test_quantized_model_init_of_one_product() -> None:
    recipe = Float8CurrentScaling(overrides=(("m.fc2", None),))
    with tejit.quantized_model_init(recipe=recipe):
        module = LayerNormMLP(64, 96, name="m")
        whole = LayerNormMLP(64, 96, name="n")
    assert isinstance(module.fc1_weight, tejit.Float8Tensor)
    assert type(module.fc2_weight) is nn.Parameter
    assert isinstance(whole.fc2_weight, tejit.Float8Tensor)
