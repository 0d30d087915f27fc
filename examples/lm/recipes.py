"""What can be compared: one row a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tejit
from tejit.recipe import Recipe


@dataclass(frozen=True)
class Row:
    """`label` stands in the table and the picture; `make` makes the recipe, None for plain bf16."""

    label: str
    make: Callable[..., Recipe] | None


RECIPES: dict[str, Row] = {
    "none": Row("bf16", None),
    "current": Row("FP8 current scaling", tejit.recipe.Float8CurrentScaling),
    "delayed": Row("FP8 delayed scaling", tejit.recipe.DelayedScaling),
    "block": Row("FP8 in blocks of 128", tejit.recipe.Float8BlockScaling),
    "mxfp8": Row("MXFP8", tejit.recipe.MXFP8BlockScaling),
    "nvfp4": Row("NVFP4", tejit.recipe.NVFP4BlockScaling),
}
# What the others are measured against.
BASELINE = "none"
# What runs unless asked otherwise: a few minutes on two cores, which all of them would not be.
DEFAULT = (BASELINE, "current")


@dataclass(frozen=True)
class Options:
    """What a recipe is varied by: keep the first and the last block in bf16, let the weights live quantized."""

    high_precision_ends: bool = False
    quantized_params: bool = False

    def recipe(self, name: str, layers: int) -> Recipe | None:
        """The recipe of a model with that many blocks; None for plain bf16."""
        make = RECIPES[name].make
        if make is None:
            return None
        ends = sorted({0, layers - 1}) if self.high_precision_ends else []
        return make(overrides=tuple((f"blocks.{index}.*", None) for index in ends))

    def label(self, name: str) -> str:
        """The recipe's label with what it is varied by."""
        if RECIPES[name].make is None:
            return RECIPES[name].label
        ends = ", first and last block in bf16" if self.high_precision_ends else ""
        return RECIPES[name].label + ends + (", quantized weights" if self.quantized_params else "")
