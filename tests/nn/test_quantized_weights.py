"""Linear over a weight that is a quantized tensor."""

import itertools

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import tejit
from tejit import Float8BlockQuantizer, Float8CurrentScalingQuantizer, HybridQuantizer, MXFP8Quantizer, NVFP4Quantizer
from tejit.recipe import CustomRecipe, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.common import DEVICES
from tests.nn.test_compile import close

torch._dynamo.config.cache_size_limit = 64

RECIPES = {
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "MXFP8": MXFP8BlockScaling(),
    "MXFP8 2D": MXFP8BlockScaling(enable_2d_quantization=True),
    "NVFP4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "NVFP4 1D": NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=True),
}


def quantizer_of(recipe):
    return recipe.linear.weight.both.replace(internal=False)


def layer(quantizer=None, device="cpu", **arguments) -> tejit.Linear:
    torch.manual_seed(0)
    module = tejit.Linear(64, 96, device=device, **arguments)
    if quantizer is not None:
        module.weight = nn.Parameter(quantizer(module.weight.detach()))
    return module


def step(function, module, x, grad, **arguments):
    x = x.clone().requires_grad_()
    torch._dynamo.mark_dynamic(x, 0)
    module.zero_grad()
    y = function(x, **arguments)
    y.backward(grad)
    return {"y": y.detach(), "dgrad": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def assert_same(got, want) -> None:
    for name in want:
        assert (got[name] is None) == (want[name] is None), name
        if want[name] is not None:
            assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(RECIPES))
def test_it_equals_the_weight_quantized_in_the_call(name, device) -> None:
    recipe = RECIPES[name]
    plain, ours = layer(device=device), layer(quantizer_of(recipe), device)
    x, grad = torch.randn(3, 11, 64, device=device), torch.randn(3, 11, 96, device=device)
    with tejit.autocast(recipe=recipe):
        want, got = step(plain, plain, x, grad), step(ours, ours, x, grad)
    assert_same(got, want)
    assert type(got["weight"]) is torch.Tensor


def test_the_gradient_has_the_nominal_dtype() -> None:
    module = layer(Float8CurrentScalingQuantizer(), dtype=torch.bfloat16)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with tejit.autocast():
        module(x).sum().backward()
    assert module.weight.grad.dtype == torch.bfloat16
    other = layer(Float8CurrentScalingQuantizer())
    with torch.autocast("cpu", torch.bfloat16), tejit.autocast():
        y = other(torch.randn(4, 64))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert other.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("name", list(RECIPES))
def test_its_gradient_goes_wherever_a_weight_s_gradient_can(name) -> None:
    recipe = RECIPES[name]
    x, grad = torch.randn(19, 64), torch.randn(19, 96)
    plain = layer(quantizer_of(recipe))
    with tejit.autocast(recipe=recipe):
        want = step(plain, plain, x, grad)
        for arguments in (
            {"fuse_wgrad_accumulation": True},
            {"delay_wgrad_compute": True},
            {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, "save_original_input": True},
        ):
            module = layer(quantizer_of(recipe), **arguments)
            module.weight.main_grad = torch.zeros(96, 64)
            for first in (True, False):  # the weight is quantized already; only main_grad hears of it
                got = step(module, module, x, grad, is_first_microbatch=first)
                assert got["weight"] is None
                assert torch.equal(got["dgrad"], want["dgrad"])
                module.backward_dw()
                times = 1 if first or "fuse_wgrad_accumulation" not in arguments else 2
                found = module.weight.main_grad if "fuse_wgrad_accumulation" in arguments else module.weight.grad
                assert torch.equal(found, times * want["weight"])


#: What turns into columnwise data exactly, and so gives the gradient of a weight that has both directions.
EXACT = {"current", "block", "NVFP4"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", list(RECIPES))
def test_a_frozen_weight_in_one_direction_passes_the_gradient_on(name, direction, device) -> None:
    """LLaMA-Factory#9500: a layer of weights made for inference stands between trained ones."""
    recipe = RECIPES[name]
    quantizer = quantizer_of(recipe).with_usage(rowwise=direction == "rowwise", columnwise=direction == "columnwise")
    first = tejit.Linear(32, 64, device=device)
    both, one = layer(quantizer_of(recipe), device), layer(quantizer, device)
    x = torch.randn(16, 32, device=device)
    gradients = []
    for module in (both, one):
        module.weight.requires_grad_(False)
        first.zero_grad()
        with tejit.autocast(recipe=recipe):
            y = module(first(x))
        y.sum().backward()
        assert module.weight.grad is None
        gradients.append((first.weight.grad.clone(), y.detach()))
    # The other direction of 1-D blocks was rounded along the other dimension: once more within the format's error.
    grad_error, y_error = [(b - a).norm() / a.norm() for a, b in zip(*gradients, strict=True)]
    limit = 0.3 if name.startswith("NVFP4") else 0.06
    if direction == "rowwise":
        assert y_error == 0
        assert grad_error == 0 if name in EXACT else grad_error < limit
    else:
        assert grad_error < limit
        assert y_error < limit
    assert gradients[1][0].abs().sum() > 0


def test_recipes_that_do_not_fit_are_errors_that_name_both() -> None:
    x = torch.randn(4, 64)
    for quantizer, recipe, named in [
        (MXFP8Quantizer(), Float8CurrentScaling(), "MXFP8Tensor"),
        (Float8CurrentScalingQuantizer(torch.float8_e5m2), Float8CurrentScaling(), "float8_e5m2"),
        (Float8BlockQuantizer(block_scaling_dim=1), Float8BlockScaling(), "is_2D_scaled"),
        (NVFP4Quantizer(nvfp4_use_4over6=True), NVFP4BlockScaling(), "nvfp4_use_4over6"),
    ]:
        module = layer(quantizer)
        with (
            tejit.autocast(recipe=recipe),
            pytest.raises(RuntimeError, match=r"Recipe mismatch for 'weight'") as error,
        ):
            module(x)
        assert named in str(error.value)
        assert "Quantizer(" in str(error.value)
        assert " ," not in str(error.value)


def test_sizes_that_the_other_operands_pad_are_an_error() -> None:
    module = tejit.Linear(40, 96)
    module.weight = nn.Parameter(Float8CurrentScalingQuantizer()(module.weight.detach()))
    mixed = CustomRecipe(
        lambda role: Float8CurrentScalingQuantizer() if role.tensor_type == "weight" else MXFP8Quantizer()
    )
    with tejit.autocast(recipe=mixed), pytest.raises(RuntimeError, match=r"\(96, 40\).*multiples of 32"):
        module(torch.randn(4, 40))


def test_hybrid_and_unquantized_weights() -> None:
    """Whatever a CustomRecipe makes of weights works as a parameter too."""

    def hybrid(role):
        return HybridQuantizer(
            rowwise_quantizer=Float8CurrentScalingQuantizer(), columnwise_quantizer=MXFP8Quantizer(torch.float8_e4m3fn)
        )

    def identity(role):
        return tejit.IdentityQuantizer() if role.tensor_type == "weight" else Float8CurrentScalingQuantizer()

    x, grad = torch.randn(32, 64), torch.randn(32, 96)
    for factory in (hybrid, identity):
        recipe = CustomRecipe(factory)
        quantizer = recipe.for_linear(None).weight.both.replace(internal=False)
        plain, ours = layer(), layer(quantizer)
        with tejit.autocast(recipe=recipe):
            assert_same(step(ours, ours, x, grad), step(plain, plain, x, grad))


@pytest.mark.parametrize("name", list(RECIPES))
def test_without_autocast_the_values_are_multiplied(name) -> None:
    ours = layer(quantizer_of(RECIPES[name]))
    x, grad = torch.randn(8, 64), torch.randn(8, 96)
    twin = nn.Linear(64, 96)
    with torch.no_grad():
        twin.weight.copy_(ours.weight.dequantize())
        twin.bias.copy_(ours.bias)
    got, want = step(ours, ours, x, grad), step(twin, twin, x, grad)
    for product in want:
        assert torch.allclose(got[product], want[product], rtol=1e-6, atol=1e-6), product


def test_new_values_are_seen() -> None:
    """Copied into, replaced, less a direction: eager remembers checks, never buffers."""
    recipe = RECIPES["current"]
    module = layer(quantizer_of(recipe))
    x = torch.randn(8, 64)
    with tejit.autocast(recipe=recipe), torch.no_grad():
        first = module(x)
        module.weight.copy_(2 * module.weight.dequantize())
        assert torch.allclose(module(x) - module.bias, 2 * (first - module.bias), rtol=1e-5, atol=1e-5)
        module.weight.data = quantizer_of(recipe)(torch.zeros(96, 64))
        assert torch.equal(module(x), module.bias.expand(8, 96))
        module.weight = nn.Parameter(MXFP8Quantizer()(torch.zeros(96, 64)))
        with pytest.raises(RuntimeError, match="Recipe mismatch"):
            module(x)


FAST = [("current", "both", "aot_eager"), ("MXFP8", "frozen rowwise", "aot_eager")]
GRAPHS = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.full)
    for case in itertools.product(RECIPES, ("both", "frozen rowwise", "columnwise"), ("aot_eager", "inductor"))
]


@pytest.mark.parametrize(("name", "directions", "compiler"), GRAPHS)
def test_one_graph_and_eager_s_result(name, directions, compiler) -> None:
    recipe = RECIPES[name]
    quantizer = quantizer_of(recipe).with_usage(
        rowwise=directions != "columnwise", columnwise=directions != "frozen rowwise"
    )
    module = layer(quantizer)
    module.weight.requires_grad_(directions != "frozen rowwise")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with tejit.autocast(recipe=recipe):
        for rows in (32, 64, 40, 32):
            x, grad = torch.randn(rows, 64), torch.randn(rows, 96)
            want, got = step(module, module, x, grad), step(compiled, module, x, grad)
            for product, value in want.items():
                assert (got[product] is None) == (value is None)
                assert value is None or close(got[product], value, compiler == "aot_eager"), product
            with torch.no_grad():  # an optimizer's step
                module.weight.copy_(module.weight.dequantize() + 0.01 * torch.randn(96, 64))
    assert counter.frame_count == 1


@pytest.mark.full
@pytest.mark.parametrize("amp", [False, True], ids=["no autocast", "torch.autocast"])
def test_one_graph_with_either_context_alone(amp) -> None:
    """Dequantized without ``tejit.autocast``; inside ``torch.autocast`` the nominal dtype does not count."""
    module = layer(Float8CurrentScalingQuantizer())
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    x, grad = torch.randn(8, 64), torch.randn(8, 96, dtype=torch.bfloat16 if amp else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp), tejit.autocast(enabled=amp):
        got, want = step(compiled, module, x, grad), step(module, module, x, grad)
    assert_same(got, want)
    assert got["weight"].dtype == torch.float32
    assert counter.frame_count == 1
