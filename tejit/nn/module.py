"""``QuantizedModule``: what tejit's modules with products have in common."""

from __future__ import annotations

import torch
from torch import nn

from tejit import compat
from tejit.nn.naming import Named
from tejit.recipe import Recipe, current_recipe


class QuantizedModule(Named, nn.Module):
    """Base of the modules that quantize under ``tejit.autocast``."""

    _forward_recipe: Recipe | None = None

    def _recipe(self) -> Recipe | None:
        if torch.compiler.is_compiling():
            return current_recipe()
        if compat.in_backward():
            return current_recipe() or self._forward_recipe
        self._forward_recipe = current_recipe()
        return self._forward_recipe
