"""Recipes that are made, or changed, inside of a compiled region: one graph, and what eager code computes."""

import copy
import dataclasses

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import tejit
from tejit.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

OUTSIDE, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=4)

MAKERS = {
    "current": lambda: Float8CurrentScaling(),
    "current E4M3": lambda: Float8CurrentScaling(fp8_format=Format.E4M3),
    "current switches": lambda: Float8CurrentScaling(amax_epsilon=1e-3, force_pow_2_scales=True, fast_accum_dgrad=True),
    "current dequantized": lambda: Float8CurrentScaling(backward_override="dequantized"),
    "delayed": lambda: DelayedScaling(),
    "delayed short": lambda: DelayedScaling(amax_history_len=4, margin=1, amax_compute_algo="most_recent"),
    "delayed high precision": lambda: DelayedScaling(backward_override="high_precision"),
    "block": lambda: Float8BlockScaling(),
    "block 1D": lambda: Float8BlockScaling(w_block_scaling_dim=1, force_pow_2_scales=False, amax_epsilon=1e-3),
    "MXFP8": lambda: MXFP8BlockScaling(),
    "MXFP8 2D": lambda: MXFP8BlockScaling(enable_2d_quantization=True, backward_override="dequantized"),
    "NVFP4": lambda: NVFP4BlockScaling(),
    "NVFP4 4over6": lambda: NVFP4BlockScaling(four_over_six="all", disable_stochastic_rounding=True),
    "NVFP4 row-scaled": lambda: NVFP4BlockScaling(row_scaled_activation=True),
    "overrides": lambda: Float8CurrentScaling(overrides=(("b.1", MXFP8BlockScaling()), ("b.0", None))),
    "overridden by delayed": lambda: MXFP8BlockScaling(overrides=[("b.*1", DelayedScaling(amax_history_len=4))]),
    "none": lambda: None,
    "default": lambda: tejit.recipe.default_recipe(),
    "replaced": lambda: dataclasses.replace(OUTSIDE, amax_epsilon=1e-3),
    "replaced delayed": lambda: dataclasses.replace(DELAYED, margin=1),
}
FAST = ("current switches", "delayed short", "block 1D", "MXFP8 2D", "NVFP4", "overrides", "none", "replaced")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[tejit.Linear(64, 64, name=f"b.{i}") for i in range(2)])


def in_region(module, make):
    def function(x):
        with tejit.autocast(recipe=make()):
            return module(x)

    return function


def step(function, module, number):
    torch.manual_seed(number)
    x = (torch.randn(32, 64) * (number + 1)).requires_grad_()
    y = function(x)
    module.zero_grad()
    y.square().mean().backward()
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.full) for n in MAKERS])
def test_a_recipe_that_is_made_in_a_region_is_one_graph_and_eager_s_result(name) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, make = layers(), MAKERS[name]
    module = copy.deepcopy(eager)
    compiled = torch.compile(in_region(module, make), backend="aot_eager", fullgraph=True)
    for number in range(3):
        want = step(in_region(eager, make), eager, number)
        for got, other in zip(step(compiled, module, number), want, strict=True):
            assert torch.equal(got, other)
    for key, value in eager.state_dict().items():  # of delayed scaling too
        assert torch.equal(module.state_dict()[key], value), key
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


REFUSED = {
    "pure E5M2": (lambda: Float8CurrentScaling(fp8_format=Format.E5M2), "no tensor core multiplies"),
    "margin": (lambda: DelayedScaling(margin=1.5), "margin is 1.5"),
    "custom": (lambda: CustomRecipe(lambda role: None), "cannot be made inside of a compiled region"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_recipe_refuses_it_refuses_in_a_region(name) -> None:
    torch._dynamo.reset()
    make, message = REFUSED[name]
    with pytest.raises(Exception, match=message):
        torch.compile(in_region(layers(), make), backend="eager", fullgraph=True)(torch.randn(32, 64))


def test_a_custom_recipe_in_a_region_that_may_break_is_made_outside_of_the_graph() -> None:
    torch._dynamo.reset()
    module = layers()
    function = in_region(module, lambda: CustomRecipe(lambda role: tejit.MXFP8Quantizer()))
    x = torch.randn(32, 64)
    assert torch.equal(torch.compile(function, backend="eager")(x), function(x))


CHANGES = {
    "current": [Float8CurrentScaling(amax_epsilon=e) for e in (0.0, 1e-4, 1e-4, 1e-3, 0.0, 1e-2)],
    "block": [Float8BlockScaling(amax_epsilon=e) for e in (0.0, 1e-4, 1e-4, 1e-3, 0.0, 1e-2)],
    "block dimensions": [Float8BlockScaling(x_block_scaling_dim=d) for d in (1, 2, 2)],
    "margin": [DelayedScaling(margin=m) for m in (0, 1, 1, 2, 0, 3)],
    "length": [DelayedScaling(amax_history_len=n) for n in (4, 5, 5, 6, 4, 7)],
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_number_of_a_recipe_compiles_once(name) -> None:
    torch._dynamo.reset()
    module = layers()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for recipe, graphs in zip(CHANGES[name], (1, 2, 2, 3, 3, 4), strict=False):
        with tejit.autocast(recipe=recipe), torch.no_grad():
            x = torch.randn(32, 64)
            assert torch.equal(compiled(x), module(x))
        assert counter.frame_count == graphs, recipe


# -- compiled autograd -----------------------------------------------------------------------------------------------
RECIPES = {"current": OUTSIDE, "block": Float8BlockScaling(), "MXFP8": MXFP8BlockScaling()}


def backward(loss: torch.Tensor, fullgraph: bool) -> None:
    torch._dynamo.compiled_autograd.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=fullgraph)):
        loss.backward()


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "compiles",
    [
        False,
        # It raises, but an IndexError of compiled autograd's, since the gradient of the anchor is an op's.
        pytest.param(True, marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason="the error has no name")),
    ],
)
def test_93_delayed_scaling_refuses_compiled_autograd_by_name(compiles, fullgraph) -> None:
    torch._dynamo.reset()
    module = layers()
    run = torch.compile(module, backend="aot_eager") if compiles else module
    with tejit.autocast(recipe=DELAYED):
        y = run(torch.randn(32, 64, requires_grad=True))
    with pytest.raises(Exception, match="DelayedScaling does not work under compiled autograd"):
        backward(y.sum(), fullgraph)


@pytest.mark.parametrize("name", ["current", *[pytest.param(n, marks=pytest.mark.full) for n in ("block", "MXFP8")]])
def test_93_other_recipes_have_eager_s_gradients_under_compiled_autograd(name) -> None:
    torch._dynamo.reset()
    module, x = layers(), torch.randn(32, 64)
    found = []
    for fullgraph in (None, False, True):
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        with tejit.autocast(recipe=RECIPES[name]):
            loss = module(leaf).square().mean()
        loss.backward() if fullgraph is None else backward(loss, fullgraph)
        found.append([leaf.grad, *[p.grad.clone() for p in module.parameters()]])
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            assert torch.equal(got, want)
