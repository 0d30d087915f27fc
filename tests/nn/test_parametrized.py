"""Parameters that are computed (``torch.nn.utils.parametrize``): once in each call, as by torch's own layers."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import tejit
from tejit.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

MODULES = {
    "Linear": lambda: tejit.Linear(32, 48),
    "LayerNormLinear": lambda: tejit.LayerNormLinear(32, 48),
    "LayerNormMLP": lambda: tejit.LayerNormMLP(32, 64),
    "GroupedLinear": lambda: tejit.GroupedLinear(2, 32, 48),
}
RECIPES = {
    "none": None,
    "calibrating": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "MXFP8": MXFP8BlockScaling(),
}


class Noisy(nn.Module):
    """A parameter that is another one each time that it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.read += 1
        return values + torch.randn_like(values)


def noisy(module: nn.Module) -> dict[str, Noisy]:
    names = [name for name, _ in module.named_parameters(recurse=False)]
    for name in names:
        # `unsafe`: it would be read to compare shapes.
        parametrize.register_parametrization(module, name, Noisy(), unsafe=True)
    return {name: module.parametrizations[name][0] for name in names}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_a_call_computes_each_parameter_once(kind, recipe) -> None:
    """Else a call multiplies by one weight and asks another for what it needs to know of it."""
    torch.manual_seed(0)
    module, x = MODULES[kind](), torch.randn(6, 32, requires_grad=True)
    read = noisy(module)
    splits = ([2, 4],) if kind == "GroupedLinear" else ()
    for options in ({}, {"is_first_microbatch": True}, {"is_first_microbatch": False}):
        for each in read.values():
            each.read = 0
        enabled = RECIPES[recipe] is not None and recipe != "calibrating"
        with tejit.autocast(enabled, recipe=RECIPES[recipe], calibrating=recipe == "calibrating"):
            y = module(x, *splits, **options)
        assert {name: each.read for name, each in read.items()} == dict.fromkeys(read, 1), options
        y.sum().backward()
        assert all(p.grad is not None for p in module.parameters())
