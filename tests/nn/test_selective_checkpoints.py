"""Row 86: selective activation checkpointing. A recomputation runs the operations of its forward, whatever the policy
saves of them; the oracle is the same training without checkpointing, to the bit."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import tejit
from tejit.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Recipe,
)
from tests.nn.recipes import ONE_A_FORMAT

RECIPES = {
    **ONE_A_FORMAT,
    "delayed, dequantized": DelayedScaling(backward_override="dequantized"),
    "delayed for one": Float8CurrentScaling(overrides=(("*fc1", DelayedScaling()), ("first", DelayedScaling()))),
}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = tejit.GroupedLinear(2, 32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, [4, 12])


MODULES = {
    "Linear": lambda: nn.Sequential(tejit.Linear(32, 32, name="first"), nn.GELU(), tejit.Linear(32, 32, name="second")),
    "LayerNormLinear": lambda: tejit.LayerNormLinear(32, 32, name="first"),
    "LayerNormMLP": lambda: tejit.LayerNormMLP(32, 48, name="mlp"),
    "GroupedLinear": lambda: Experts(),
    "TransformerLayer": lambda: tejit.TransformerLayer(
        32, 48, 2, hidden_dropout=0.0, attention_dropout=0.0, name="layer"
    ),
}
SAVED = {
    "nothing": lambda name: False,
    "everything": lambda name: True,
    "products": lambda name: "mm" in name,
    "quantizing": lambda name: name.startswith("tejit."),
    "all but quantizing": lambda name: not name.startswith("tejit."),
    "views": lambda name: "slice" in name or "select" in name,
}


def policy(saved: str):
    def decide(context, op, *arguments, **keywords) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if SAVED[saved](str(op)) else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, decide)


def trained(module: nn.Module, recipe: Recipe, call) -> list[Tensor]:
    """Outputs, gradients and delayed state of two steps, the second of which needs what the first left."""
    found = []
    for step in range(2):
        module.zero_grad()
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with tejit.autocast(recipe=recipe):
            y = call(module, x)
        y.square().sum().backward()
        found += [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]
    return found + [b for m in module.modules() for name, b in m._buffers.items() if name.startswith("_delayed")]


CASES = [
    *[("delayed", saved, early_stop) for saved in SAVED for early_stop in (True, False)],
    *[(recipe, "products", True) for recipe in RECIPES if recipe != "delayed"],
    *[(recipe, "views", False) for recipe in RECIPES if "delayed " in recipe],
]


@pytest.mark.parametrize(("recipe", "saved", "early_stop"), CASES)
@pytest.mark.parametrize("kind", MODULES)
def test_86_selective_checkpoints_change_no_bit(kind, recipe, saved, early_stop) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()
    other = copy.deepcopy(module)

    def call(module: nn.Module, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(early_stop):
            return checkpoint(module, x, use_reentrant=False, context_fn=policy(saved))

    want = trained(module, RECIPES[recipe], lambda module, x: module(x))
    for number, (mine, others) in enumerate(zip(trained(other, RECIPES[recipe], call), want, strict=True)):
        assert torch.equal(mine, others), number


@pytest.mark.parametrize("saved", ["nothing", "products"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_86_compiled_regions_with_selective_checkpoints_change_no_bit(recipe, saved) -> None:
    """In one graph, but for delayed scaling: what it notes in a module is a side effect, where TorchDynamo breaks."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = MODULES["LayerNormMLP"]()
    other = copy.deepcopy(module)
    compiled = torch.compile(
        lambda x: checkpoint(other, x, use_reentrant=False, context_fn=policy(saved)),
        backend="aot_eager",
        fullgraph="delayed" not in recipe,
    )
    want = trained(module, RECIPES[recipe], lambda module, x: module(x))
    for mine, others in zip(trained(other, RECIPES[recipe], lambda _, x: compiled(x)), want, strict=True):
        assert torch.equal(mine, others)
