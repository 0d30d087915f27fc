"""A graph that breaks inside a context of tejit's: what runs between the graphs is in that context too.

TorchDynamo drops what it saw written to a ``threading.local`` where a graph breaks; layers then computed in high
precision without a word. The oracle is the same code in eager mode.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tejit
from tejit import recipe as recipes
from tejit.kernels import backend

RECIPES = {
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=3),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True),
}


class TwoLayers(nn.Module):
    """With the context inside, and a break in it."""

    def __init__(self, recipe: recipes.Recipe) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = tejit.Linear(128, 128), tejit.Linear(128, 128)
        self.recipe = recipe

    def forward(self, x: Tensor) -> Tensor:
        with tejit.autocast(recipe=self.recipe):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)


def steps(module: nn.Module, run, count: int = 3) -> list[Tensor]:
    found = []
    for number in range(count):
        x = torch.randn(32, 128, generator=torch.Generator().manual_seed(number)).requires_grad_()
        y = run(x)
        module.zero_grad()
        y.square().mean().backward()
        found += [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_break_inside_of_autocast_keeps_the_recipe(name: str) -> None:
    torch._dynamo.reset()
    eager = TwoLayers(RECIPES[name])
    broken = copy.deepcopy(eager)
    want = steps(eager, eager)
    got = steps(broken, torch.compile(broken, backend="eager"))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    for key, value in eager.state_dict().items():
        assert torch.equal(broken.state_dict()[key], value), key
    assert recipes.current_recipe() is None
    plain = steps(eager, lambda x: eager.second(eager.first(x)))
    assert not torch.equal(plain[0], want[0])


def test_code_between_the_graphs_sees_the_contexts() -> None:
    torch._dynamo.reset()
    recipe, seen = RECIPES["current"], []

    @torch._dynamo.disable
    def look() -> None:
        seen.append((recipes.current_recipe(), backend.current()))

    def function(x: Tensor) -> Tensor:
        with tejit.autocast(recipe=recipe):
            with backend.backend("torch"):
                look()
                x = x + 1
            look()
            with tejit.autocast(enabled=False):
                look()
                x = x + 1
        look()
        return x

    outside = backend.current()
    for _ in range(2):
        seen.clear()
        torch.compile(function, backend="eager")(torch.ones(2))
        assert seen == [(recipe, "torch"), (recipe, outside), (None, outside), (None, outside)]


def test_forward_mode_around_a_quantized_layer_that_it_does_not_reach() -> None:
    """In one graph as in eager code; a tangent that would be lost is refused in both (tests of transforms)."""
    torch._dynamo.reset()
    layer, x = tejit.Linear(32, 32).requires_grad_(False), torch.randn(32, 32)

    def function(z: Tensor) -> Tensor:
        def product(t: Tensor) -> Tensor:
            with tejit.autocast(recipe=RECIPES["current"]):
                return t * layer(x) + layer(t.detach())

        return torch.func.jvp(product, (z,), (z,))[1]

    z = torch.ones(32, 32)
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(z), function(z))
    assert not torch.equal(function(z), layer(x))
