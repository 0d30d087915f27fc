"""Recipes (which tensor of a layer is quantized how), and ``autocast``, which switches quantization on."""

from typing import TYPE_CHECKING

from tejit import compat
from tejit.recipe.context import (
    autocast,
    current_group,
    current_pass,
    current_recipe,
    default_recipe,
    entered_in_this_backward,
    in_force,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    observed_recipe,
)
from tejit.recipe.recipes import (
    DelayedRule,
    Float8CurrentScaling,
    Format,
    LinearQuantizers,
    Recipe,
    Variants,
    delayed_rules,
)
from tejit.recipe.state import DelayedBuffers, DelayedState

if TYPE_CHECKING:
    from tejit.recipe.blocks import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
    from tejit.recipe.custom import CustomRecipe, QuantizerRole
    from tejit.recipe.delayed import DelayedScaling
    from tejit.recipe.model_init import quantized_model_init

__all__ = [
    "CustomRecipe",
    "DelayedBuffers",
    "DelayedRule",
    "DelayedScaling",
    "DelayedState",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "LinearQuantizers",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QuantizerRole",
    "Recipe",
    "Variants",
    "autocast",
    "current_group",
    "current_pass",
    "current_recipe",
    "default_recipe",
    "delayed_rules",
    "entered_in_this_backward",
    "in_force",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "observed_recipe",
    "quantized_model_init",
]

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__ = compat.late_names(
        __name__,
        {
            "CustomRecipe": "tejit.recipe.custom",
            "DelayedScaling": "tejit.recipe.delayed",
            "Float8BlockScaling": "tejit.recipe.blocks",
            "MXFP8BlockScaling": "tejit.recipe.blocks",
            "NVFP4BlockScaling": "tejit.recipe.blocks",
            "QuantizerRole": "tejit.recipe.custom",
            "quantized_model_init": "tejit.recipe.model_init",
        },
    )
