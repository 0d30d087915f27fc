"""Activation checkpointing: what is computed again is under the autocast of the forward that it repeats, whatever
autocast backward is called in; the oracle is the same pass without checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tejit
from tejit.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from tests.nn.recipes import context

CURRENT, MX = Float8CurrentScaling(), MXFP8BlockScaling()

MODULES = {
    "Linear": lambda: tejit.Linear(64, 64),
    "LayerNormLinear": lambda: tejit.LayerNormLinear(64, 64),
    "LayerNormMLP": lambda: tejit.LayerNormMLP(64, 96, activation="swiglu"),
    "checkpoint=True": lambda: tejit.LayerNormMLP(64, 96, checkpoint=True),
    "GroupedLinear": lambda: Experts(),
}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = tejit.GroupedLinear(3, 64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, [3, 0, 5])


def gradients(module: nn.Module, run, forward: Recipe | None, backward: Recipe | None, between=lambda: None):
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(8, 64, generator=generator) for _ in range(2))
    x.requires_grad_()
    with context(forward):
        y = run(x)
    between()
    with context(backward):
        found = torch.autograd.grad(y, [x, *module.parameters()], grad, allow_unused=True)
    return [y.detach(), *[torch.zeros(1) if t is None else t for t in found]]


@pytest.mark.parametrize(("forward", "backward"), [(CURRENT, MX), (None, CURRENT), (MX, None)])
@pytest.mark.parametrize("kind", MODULES)
def test_the_autocast_around_backward_does_not_count(kind, forward, backward) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()
    if kind == "checkpoint=True":
        module.checkpoint = False
    want = gradients(module, module, forward, None)
    if kind == "checkpoint=True":
        module.checkpoint = True
        got = gradients(module, module, forward, backward)
    else:
        got = gradients(module, lambda x: checkpoint(module, x, use_reentrant=False), forward, backward)
    for mine, others in zip(got, want, strict=True):
        assert torch.equal(mine, others)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [None, MX])
def test_an_autocast_inside_the_region_counts(inside, reentrant) -> None:
    """Also one that switches quantization off; and the module's last forward was under another one."""
    torch.manual_seed(0)
    module = tejit.Linear(64, 64)

    def region(x: torch.Tensor) -> torch.Tensor:
        with tejit.autocast(enabled=inside is not None, recipe=inside):
            return module(x)

    def another() -> None:
        with tejit.autocast(recipe=CURRENT):
            module(torch.ones(8, 64))

    def both(function) -> list[torch.Tensor]:
        module.zero_grad()
        x = torch.linspace(-1, 1, 512).reshape(8, 64).requires_grad_()
        with tejit.autocast(recipe=CURRENT):
            y = function(x)
        another()
        with tejit.autocast(recipe=DelayedScaling()):
            y.square().sum().backward()
        return [y.detach(), x.grad, module.weight.grad.clone()]

    want = both(region)
    for mine, others in zip(both(lambda x: checkpoint(region, x, use_reentrant=reentrant)), want, strict=True):
        assert torch.equal(mine, others)


def test_amax_is_reduced_over_the_group_of_the_forward(monkeypatch) -> None:
    """The group is a mark that quantizers are handed: what the recomputation hands them is what the forward did."""
    group, seen = object(), []
    original = tejit.Float8CurrentScalingQuantizer.quantize_inner
    monkeypatch.setattr(
        tejit.Float8CurrentScalingQuantizer,
        "quantize_inner",
        lambda self, x, group=None: seen.append(group) or original(self, x),
    )
    module = tejit.Linear(64, 64)
    with tejit.autocast(recipe=CURRENT, amax_reduction_group=group):
        y = checkpoint(module, torch.randn(8, 64, requires_grad=True), use_reentrant=False)
    y.sum().backward()
    assert seen == [group] * 5, "input and weight twice, grad_output once"


RETURN_BIAS = {
    "Linear": lambda: tejit.Linear(64, 64, return_bias=True),
    "LayerNormLinear": lambda: tejit.LayerNormLinear(64, 64, return_bias=True),
    "LayerNormMLP": lambda: tejit.LayerNormMLP(64, 96, return_bias=True),
    "MultiheadAttention": lambda: tejit.MultiheadAttention(64, 2, return_bias=True, attention_dropout=0.0),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", [None, CURRENT])
@pytest.mark.parametrize("kind", RETURN_BIAS)
def test_a_bias_that_leaves_a_reentrant_region_stays_a_parameter(kind, recipe, compiled) -> None:
    """Torch gives what a reentrant region returns the region's history: backward of a parameter that had it did not
    end, and without gradients of the input the parameter lost its own."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = RETURN_BIAS[kind]()
    run = torch.compile(module, backend="aot_eager") if compiled else module
    inputs = [torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    found = []
    for reentrant in (None, False, True):
        x = inputs[0].clone().requires_grad_()
        module.zero_grad()
        with context(recipe):
            out, bias = module(x) if reentrant is None else checkpoint(run, x, use_reentrant=reentrant)
            assert all(p.is_leaf for p in module.parameters())
            (out + bias).backward(inputs[1])
        found.append([out.detach(), bias.detach(), x.grad, *[p.grad for p in module.parameters()]])
        assert found[-1][-1] is not None
    for other in found[1:]:
        for mine, want in zip(other, found[0], strict=True):
            assert torch.equal(mine, want)
    with context(recipe):
        checkpoint(run, inputs[0], use_reentrant=True)
        assert all(p.is_leaf and p.requires_grad for p in module.parameters())
        with torch.no_grad():
            parameters = [id(p) for p in module.parameters()]
            assert id(module(inputs[0])[1]) in parameters
            with torch.inference_mode():
                assert id(module(inputs[0])[1]) in parameters
