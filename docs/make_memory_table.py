"""Writes the table of `docs/memory.md` from the code: `python docs/make_memory_table.py`, `--check` only compares."""

from __future__ import annotations

import contextlib
import sys
import warnings

import torch
from table_page import main
from torch import Tensor, nn

import tejit
from tejit import recipe

#: What is measured: a layer and its input in bfloat16, large enough for what is there once not to count.
OUT, IN, ROWS = 1024, 2048, 512

RECIPES = {
    "FP8, current scaling": recipe.Float8CurrentScaling(),
    "FP8 blocks of 128": recipe.Float8BlockScaling(),
    "MXFP8": recipe.MXFP8BlockScaling(),
    "NVFP4": recipe.NVFP4BlockScaling(),
}


def layer(chosen: recipe.Recipe | None, quantized: bool) -> nn.Linear:
    if chosen is None:
        return nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    with tejit.quantized_model_init(quantized, recipe=chosen):
        return tejit.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)


def memory_of(tensor: Tensor) -> dict[int, int]:
    """Bytes by the address of the memory, of a plain tensor or of each buffer of a quantized one."""
    parts = [tensor]
    if isinstance(tensor, tejit.QuantizedTensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}


def saved(chosen: recipe.Recipe | None, quantized: bool, *, for_input: bool) -> int:
    """Bytes that a forward saves for backward and that no parameter holds: of the input (for wgrad) or of the weight
    (for dgrad), each alone since the other one needs no gradient."""
    module = layer(chosen, quantized)
    module.requires_grad_(for_input)
    x = torch.randn(ROWS, IN, dtype=torch.bfloat16, requires_grad=not for_input)
    held = memory_of(module.weight)
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found.update(memory_of(tensor))
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        tejit.autocast(chosen is not None, recipe=chosen),
    ):
        out = module(x)
    assert out.requires_grad
    return sum(size for address, size in found.items() if address not in held)


def row(name: str, chosen: recipe.Recipe | None, quantized: bool) -> str:
    module = layer(chosen, quantized)
    frozen = contextlib.nullcontext() if chosen is None else torch.no_grad()
    with frozen:
        inference = layer(chosen, quantized)
    per_weight, per_input = OUT * IN, ROWS * IN
    numbers = (
        module.weight.nbytes / per_weight,
        inference.weight.nbytes / per_weight,
        saved(chosen, quantized, for_input=False) / per_weight,
        saved(chosen, quantized, for_input=True) / per_input,
    )
    kind = "quantized" if quantized else "bfloat16"
    return f"| {name} | {kind} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |"


def table() -> str:
    warnings.simplefilter("ignore")
    lines = [
        "| recipe | parameters | weight | weight, rowwise only | saved of the weight | saved of the input |",
        "|---|---|---|---|---|---|",
        row("none (`nn.Linear`)", None, False),
    ]
    for name, chosen in RECIPES.items():
        lines += [row(name, chosen, False), row(name, chosen, True)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main("memory.md", "make_memory_table.py", table, __doc__))
