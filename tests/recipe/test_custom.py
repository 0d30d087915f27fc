"""CustomRecipe, roles, names, overrides."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tejit
from tejit import Float8BlockQuantizer, Float8CurrentScalingQuantizer, IdentityQuantizer
from tejit.recipe import CustomRecipe, Float8BlockScaling, Float8CurrentScaling, Format, QuantizerRole, recipes


def as_current_scaling(role: QuantizerRole) -> Float8CurrentScalingQuantizer:
    dtype = torch.float8_e5m2 if role.tensor_type == "grad_output" else torch.float8_e4m3fn
    return Float8CurrentScalingQuantizer(dtype)


def results(module, x, grad, recipe):
    x = x.clone().requires_grad_()
    module.zero_grad()
    with tejit.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.backward(grad)
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]


def assert_equal(got, want) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_qfactory_is_asked_once_for_each_role() -> None:
    asked = []
    recipe = CustomRecipe(lambda role: asked.append(role))  # None for each: high precision
    named, unnamed = tejit.Linear(16, 8, name="blocks.0.fc"), tejit.Linear(16, 8)
    for _ in range(2):
        for layer in (named, unnamed):
            results(layer, torch.randn(4, 16), torch.randn(4, 8), recipe)
    tensors = ("input", "weight", "grad_output")
    assert asked == [QuantizerRole("linear", tensor, name) for name in ("blocks.0.fc", None) for tensor in tensors]


def test_it_equals_the_recipe_that_it_imitates() -> None:
    layer, x, grad = tejit.Linear(48, 40), torch.randn(6, 48), torch.randn(6, 40)
    custom, built_in = CustomRecipe(as_current_scaling), Float8CurrentScaling(fast_accum_fprop=False)
    assert_equal(results(layer, x, grad, custom), results(layer, x, grad, built_in))


def test_none_everywhere_is_high_precision() -> None:
    layer, x, grad = tejit.Linear(48, 40), torch.randn(6, 48), torch.randn(6, 40)
    assert_equal(results(layer, x, grad, CustomRecipe(lambda role: None)), results(layer, x, grad, None))


@pytest.mark.parametrize("quantized", ["input", "weight", "grad_output"])
def test_each_role_reaches_its_operand_and_no_other(quantized) -> None:
    """Against plain products of the dequantized operand and the untouched others, in float64."""
    layer, x, grad = tejit.Linear(64, 32, bias=False), torch.randn(16, 64), torch.randn(16, 32)
    q = Float8CurrentScalingQuantizer()
    recipe = CustomRecipe(lambda role: q if role.tensor_type == quantized else None)
    y, dx, dw = results(layer, x, grad, recipe)
    operands = {"input": x, "weight": layer.weight.detach(), "grad_output": grad}
    operands[quantized] = q.quantize(operands[quantized]).dequantize()
    a, w, g = (operands[name].double() for name in ("input", "weight", "grad_output"))
    for got, want in ((y, a @ w.t()), (dx, g @ w), (dw, g.t() @ a)):
        assert (got.double() - want).abs().max() <= 1e-5 * want.abs().max()


def test_state_belongs_to_the_instance_and_dies_with_it() -> None:
    """Two recipes of one type with different answers for one role never mix (field case of TransformerEngine)."""
    layer, x, grad = tejit.Linear(64, 32, name="fc"), torch.randn(16, 64), torch.randn(16, 32)
    first = CustomRecipe(as_current_scaling)
    second = CustomRecipe(lambda role: Float8BlockQuantizer(block_scaling_dim=1))
    alone = [results(layer, x, grad, recipe) for recipe in (first, second)]
    assert not torch.equal(alone[0][0], alone[1][0])
    for _ in range(2):
        for recipe, want in zip((first, second), alone, strict=True):
            assert_equal(results(layer, x, grad, recipe), want)
    assert first != second
    assert first != CustomRecipe(as_current_scaling)
    reference = weakref.ref(second)
    del second, recipe
    layer._forward_context = (None, None)
    gc.collect()
    assert reference() is None
    for twin in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert twin != first
        assert_equal(results(layer, x, grad, twin), alone[0])


def test_wrong_factories_are_named() -> None:
    with pytest.raises(TypeError, match="qfactory is 3"):
        CustomRecipe(3)
    layer = tejit.Linear(16, 16, name="fc")
    with (
        pytest.raises(TypeError, match=r"returned 'fp8' for QuantizerRole\(module_type='linear', tensor_type="),
        tejit.autocast(recipe=CustomRecipe(lambda role: "fp8")),
    ):
        layer(torch.randn(2, 16))


def test_names() -> None:
    with pytest.raises(TypeError, match="name is 3"):
        tejit.Linear(4, 4, name=3)
    shared = tejit.Linear(4, 4)
    root = nn.ModuleDict(
        {"a": nn.Sequential(shared, nn.Linear(4, 4), tejit.Linear(4, 4, name="mine")), "b": nn.ModuleList([shared])}
    )
    assert tejit.name_modules(root) is root
    assert shared.name == "a.0"
    assert root["a"][2].name == "mine"
    assert not hasattr(root["a"][1], "name")
    assert tejit.name_modules(tejit.Linear(4, 4)).name is None
    assert "name" not in "".join(shared.state_dict())
    assert copy.deepcopy(shared).name == "a.0"


def test_overrides_choose_by_name() -> None:
    q = Float8BlockQuantizer()
    block, custom = Float8BlockScaling(), CustomRecipe(lambda role: q if role.name == "blocks.1.fc1" else None)
    recipe = Float8CurrentScaling(
        overrides=(("blocks.0.*", block), ("head", None), ("blocks.1.fc?", custom), ("*.fc1", None))
    )
    x, grad = torch.randn(6, 128), torch.randn(6, 128)
    for name, want in (
        ("blocks.0.fc1", block),
        ("head", None),
        ("blocks.1.fc1", custom),
        ("blocks.1.fc2", custom),
        ("blocks.2.fc1", None),
        ("Head", Float8CurrentScaling()),
        ("blocks.2.fc2", Float8CurrentScaling()),
    ):
        layer = tejit.Linear(128, 128, name=name)
        assert_equal(results(layer, x, grad, recipe), results(layer, x, grad, want))


def test_a_pattern_that_cannot_match_warns_once() -> None:
    recipes._warn_of_no_name.cache_clear()
    recipe, layer = Float8CurrentScaling(overrides=(("head.of.this.test", None),)), tejit.Linear(16, 16)
    with tejit.autocast(recipe=recipe):
        with pytest.warns(UserWarning, match=r"head\.of\.this\.test.*tejit\.name_modules"):
            layer(torch.randn(2, 16))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(torch.randn(2, 16))
            tejit.Linear(16, 16, name="other")(torch.randn(2, 16))


def test_overrides_are_part_of_the_value_and_checked() -> None:
    recipe = Float8CurrentScaling(Format.E4M3, overrides=[["head", None]])
    assert recipe == Float8CurrentScaling(Format.E4M3, overrides=(("head", None),)) != Float8CurrentScaling(Format.E4M3)
    assert hash(recipe) == hash(pickle.loads(pickle.dumps(recipe)))
    for wrong in ("head", (("head",),), ((1, None),), ((("head", "x"), None),), (("head", "fp8"),)):
        with pytest.raises(TypeError, match="overrides"):
            Float8BlockScaling(overrides=wrong)
    with pytest.raises(ValueError, match="'head' has overrides itself"):
        Float8BlockScaling(overrides=(("head", recipe),))


def test_high_precision_in_one_direction_only() -> None:
    """An identity quantizer with a dtype of its own rounds its operand to it."""
    layer, x = tejit.Linear(32, 16, bias=False), torch.randn(4, 32)
    bf16 = IdentityQuantizer(dtype=torch.bfloat16)
    with tejit.autocast(recipe=CustomRecipe(lambda role: bf16 if role.tensor_type == "input" else None)):
        y = layer(x)
    want = F.linear(x.bfloat16().double(), layer.weight.detach().double())
    assert (y.double() - want).abs().max() <= 1e-5 * want.abs().max()
