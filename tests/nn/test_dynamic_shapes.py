"""80: ``torch.compile(module, dynamic=True)``: one graph for all batch sizes, and what eager code computes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import tejit
from tejit import recipe as recipes

RECIPES = {
    "current": recipes.Float8CurrentScaling(),
    "current epsilon": recipes.Float8CurrentScaling(amax_epsilon=1e-3),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "block": recipes.Float8BlockScaling(),
    "MXFP8": recipes.MXFP8BlockScaling(),
    "NVFP4": recipes.NVFP4BlockScaling(),
}


class Halves(tejit.GroupedLinear):
    def forward(self, x: Tensor) -> Tensor:
        first = x.shape[0] // 2
        return super().forward(x, [first, x.shape[0] - first])


MODULES = {
    "Linear": lambda: nn.Sequential(tejit.Linear(64, 96), tejit.Linear(96, 64)),
    "LayerNorm": lambda: nn.Sequential(tejit.LayerNorm(64), tejit.Linear(64, 64)),
    "RMSNorm": lambda: nn.Sequential(tejit.RMSNorm(64), tejit.Linear(64, 64)),
    "LayerNormLinear": lambda: tejit.LayerNormLinear(64, 64),
    "LayerNormMLP": lambda: tejit.LayerNormMLP(64, 128),
    "GroupedLinear": lambda: Halves(2, 64, 64),
    "MultiheadAttention": lambda: tejit.MultiheadAttention(64, 4),
    "TransformerLayer": lambda: tejit.TransformerLayer(64, 128, 4),
}
#: None of the sizes is one of the features, which torch would take for the same symbol; one block of 128 rows is a
#: dimension of size 1, which it specialises: another graph.
SIZES = (144, 160, 176)


def sequence(rows: int) -> tuple[int, ...]:
    return (rows // 16, 24, 64)


def check(module: nn.Module, recipe: recipes.Recipe, shapes, dynamic=True, marked=(), inside=False, **call) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    twin = copy.deepcopy(module)

    def run(which: nn.Module, x: Tensor) -> Tensor:
        if not inside:
            return which(x, **call)
        with tejit.autocast(recipe=recipe):
            return which(x, **call)

    compiled = torch.compile(lambda x: run(twin, x), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for number, shape in enumerate(shapes):
        found = []
        for function, which in ((lambda x: run(module, x), module), (compiled, twin)):
            torch.manual_seed(number)
            x = torch.randn(shape).requires_grad_()
            for dim in marked:
                torch._dynamo.mark_dynamic(x, dim)
            with tejit.autocast(recipe=recipe):
                y = function(x)
            which.zero_grad()
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *[p.grad for p in which.parameters() if p.grad is not None]])
        for want, got in zip(*found, strict=True):
            assert torch.equal(want, got)
    # torch compiles a float that is an operation's argument, such as a norm's eps, anew before it counts as a graph.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


FAST = [("Linear", "current"), ("Linear", "NVFP4"), ("Linear", "block"), ("LayerNormMLP", "delayed")]


@pytest.mark.parametrize(
    ("module", "recipe"),
    [
        pytest.param(m, r, marks=() if (m, r) in FAST else pytest.mark.full, id=f"{m}-{r}")
        for m in MODULES
        for r in RECIPES
    ],
)
def test_80_dynamic_is_one_graph_for_every_module_and_recipe(module, recipe) -> None:
    torch.manual_seed(0)
    three = module in ("MultiheadAttention", "TransformerLayer")
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        check(MODULES[module](), RECIPES[recipe], [sequence(rows) if three else (rows, 64) for rows in SIZES])
    finally:
        torch.use_deterministic_algorithms(deterministic)


WAYS = {
    "inside": {"inside": True},
    "three dimensions": {"shapes": [sequence(rows) for rows in SIZES]},
    "marked": {"dynamic": None, "marked": (0,)},
    "two marked": {"dynamic": None, "marked": (0, 1), "shapes": [(9, 24, 64), (10, 17, 64), (7, 40, 64)]},
    "first microbatch": {"is_first_microbatch": True},
}


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_80_dynamic_sizes_in_every_way(way, recipe) -> None:
    torch.manual_seed(0)
    arguments = {"shapes": [(rows, 64) for rows in SIZES], **WAYS[way]}
    check(tejit.Linear(64, 48), RECIPES[recipe], arguments.pop("shapes"), **arguments)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_80_dynamic_sizes_with_quantized_weights(recipe) -> None:
    torch.manual_seed(0)
    with tejit.quantized_model_init(recipe=RECIPES[recipe]):
        module = nn.Sequential(tejit.Linear(64, 128), tejit.Linear(128, 64))
    check(module, RECIPES[recipe], [(rows, 64) for rows in SIZES])
