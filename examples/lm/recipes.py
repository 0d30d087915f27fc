"""What can be compared: one row a recipe, with the Linear class its model is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import tejit


@dataclass(frozen=True)
class Row:
    """`label` stands in the table and the picture; `recipe` makes the recipe, None for plain bf16."""

    label: str
    linear: type[nn.Module]
    recipe: Callable[[], Any] | None


RECIPES: dict[str, Row] = {
    "none": Row("bf16", nn.Linear, None),
    "current": Row("FP8 current scaling", tejit.Linear, tejit.recipe.Float8CurrentScaling),
    "block": Row("FP8 in blocks of 128", tejit.Linear, tejit.recipe.Float8BlockScaling),
    "mxfp8": Row("MXFP8", tejit.Linear, tejit.recipe.MXFP8BlockScaling),
    "nvfp4": Row("NVFP4", tejit.Linear, tejit.recipe.NVFP4BlockScaling),
}
# What the others are measured against.
BASELINE = "none"
# What runs unless asked otherwise: a few minutes on two cores, which all of them would not be.
DEFAULT = (BASELINE, "current")
