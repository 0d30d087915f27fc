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
}
# What the others are measured against.
BASELINE = "none"
