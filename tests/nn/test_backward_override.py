"""``backward_override``: backward's products in high precision, of the original or of the dequantized operands."""

import dataclasses
import itertools

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import tejit
from tejit import Float8CurrentScalingQuantizer, NVFP4Quantizer
from tejit.recipe import CustomRecipe, Float8CurrentScaling, MXFP8BlockScaling
from tests.common import DEVICES, DTYPES, short
from tests.nn.bounds import STATELESS
from tests.nn.test_linear_bounds import made
from tests.nn.test_quantized_weights import RECIPES, assert_same, quantizer_of, step

torch._dynamo.config.cache_size_limit = 64
OVERRIDES = ("high_precision", "dequantized")


def layer(i, o, dtype=torch.float32, device="cpu", **arguments) -> tejit.Linear:
    torch.manual_seed(0)
    return tejit.Linear(i, o, device=device, dtype=dtype, **arguments)


def rowwise_values(quantizer, tensor, multiple):
    """What fprop's operand of a matrix stands for, zeros added and cut off again."""
    rows, columns = tensor.shape
    whole = nn.functional.pad(tensor, (0, -columns % multiple, 0, -rows % multiple))
    return quantizer.replace(internal=False)(whole).dequantize()[:rows, :columns]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_backward_multiplies_what_it_says(dtype, name, override, device) -> None:
    recipe = made(name)
    module = layer(61, 45, dtype, device)
    x, grad = torch.randn(2, 19, 61, device=device, dtype=dtype), torch.randn(2, 19, 45, device=device, dtype=dtype)
    with tejit.autocast(recipe=recipe):
        forward = module(x)
    with tejit.autocast(recipe=dataclasses.replace(recipe, backward_override=override)):
        got = step(module, module, x, grad)
    assert torch.equal(got["y"], forward)  # forward is the recipe's own
    left, right, flat = x.reshape(-1, 61), module.weight.detach(), grad.reshape(-1, 45)
    if override == "dequantized":
        linear = recipe.linear
        left = rowwise_values(linear.input.rowwise, left, linear.alignment)
        right = rowwise_values(linear.weight.rowwise, right, linear.alignment)
    want = {"dgrad": (flat.double() @ right.double()).reshape(x.shape), "weight": flat.double().t() @ left.double()}
    for product, value in want.items():
        assert got[product].dtype == dtype
        error = (got[product].double() - value).norm() / value.norm()
        assert error < 2 * torch.finfo(dtype).eps, f"{product}: {error}"


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", list(RECIPES))
def test_a_quantized_weight_is_dequantized(name, override) -> None:
    recipe = dataclasses.replace(RECIPES[name], backward_override=override)
    module = layer(64, 96)
    module.weight = nn.Parameter(quantizer_of(recipe)(module.weight.detach()))
    x, grad = torch.randn(33, 64), torch.randn(33, 96)
    with tejit.autocast(recipe=recipe):
        got = step(module, module, x, grad)
    torch.testing.assert_close(got["dgrad"], grad @ module.weight.dequantize())


@pytest.mark.parametrize("override", OVERRIDES)
def test_with_microbatches_main_grad_and_the_original_input(override) -> None:
    recipe = Float8CurrentScaling(backward_override=override)
    plain, saving = layer(61, 45), layer(61, 45, save_original_input=True, fuse_wgrad_accumulation=True)
    saving.weight.main_grad = torch.zeros(45, 61)
    with tejit.autocast(recipe=recipe):
        for first in (True, False):
            x, grad = torch.randn(7, 61), torch.randn(7, 45)
            want = step(plain, plain, x, grad)
            saving.weight.main_grad.zero_()
            got = step(saving, saving, x, grad, is_first_microbatch=first)
            assert torch.equal(saving.weight.main_grad, want.pop("weight"))
            got.pop("weight")
            assert_same(got, want)


def test_what_is_saved() -> None:
    """The original operands, or one byte an element as without the override."""
    module, x = layer(64, 96, torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    sizes = {}
    for override in (None, *OVERRIDES):
        saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.nbytes) or t, lambda t: t
        )
        with hooks, tejit.autocast(recipe=Float8CurrentScaling(backward_override=override)):
            module(x)
        sizes[override] = sum(saved)
    assert sizes == {
        None: 32 * 64 + 96 * 64 + 8,
        "dequantized": 32 * 64 + 96 * 64 + 8,
        "high_precision": 2 * (32 * 64 + 96 * 64),
    }


def test_every_recipe_takes_it_and_checks_it() -> None:
    for name in STATELESS:
        with pytest.raises(ValueError, match="backward_override is 'low'"):
            dataclasses.replace(made(name), backward_override="low")
    recipe = CustomRecipe(lambda role: NVFP4Quantizer(), backward_override="dequantized")
    assert recipe.for_linear(None).backward_override == "dequantized"
    inner = Float8CurrentScaling(overrides=(("head", MXFP8BlockScaling(backward_override="high_precision")),))
    assert inner.for_linear("head").backward_override == "high_precision"
    assert inner.for_linear("other").backward_override is None
    assert Float8CurrentScaling() != Float8CurrentScaling(backward_override="dequantized")
    unquantized = CustomRecipe(
        lambda role: Float8CurrentScalingQuantizer() if role.tensor_type == "grad_output" else None,
        backward_override="dequantized",
    )
    module, x = layer(8, 8), torch.randn(4, 8)
    with tejit.autocast(recipe=unquantized):
        got = step(module, module, x, torch.ones(4, 8))
    torch.testing.assert_close(got["dgrad"], torch.ones(4, 8) @ module.weight.detach())


@pytest.mark.parametrize(
    ("name", "override"),
    [
        pytest.param(*case, marks=() if case == ("MXFP8", "dequantized") else pytest.mark.full)
        for case in itertools.product(RECIPES, OVERRIDES)
    ],
)
def test_one_graph_and_eager_s_result(name, override) -> None:
    recipe, module = dataclasses.replace(RECIPES[name], backward_override=override), layer(61, 45)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with tejit.autocast(recipe=recipe):
        for rows in (19, 40, 64, 19):
            x, grad = torch.randn(rows, 61), torch.randn(rows, 45)
            assert_same(step(compiled, module, x, grad), step(module, module, x, grad))
    assert counter.frame_count == 1
