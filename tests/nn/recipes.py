"""Every recipe of the library, by name, for tests that run under each of them; and the context of one."""

import contextlib

import tejit
from tejit.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "current E4M3": Float8CurrentScaling(fp8_format=Format.E4M3),
    "current pow2": Float8CurrentScaling(force_pow_2_scales=True),
    "delayed": DelayedScaling(amax_history_len=4),
    "delayed recent": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", margin=1),
    "delayed E4M3": DelayedScaling(fp8_format=Format.E4M3),
    "block": Float8BlockScaling(),
    "block 1D": Float8BlockScaling(w_block_scaling_dim=1),
    "block any scale": Float8BlockScaling(force_pow_2_scales=False),
    "MXFP8": MXFP8BlockScaling(),
    "MXFP8 2D": MXFP8BlockScaling(enable_2d_quantization=True),
    "NVFP4": NVFP4BlockScaling(),
    "NVFP4 nearest": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "NVFP4 plain": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    "NVFP4 4over6": NVFP4BlockScaling(disable_stochastic_rounding=True, four_over_six="all"),
    "NVFP4 row-scaled": NVFP4BlockScaling(disable_stochastic_rounding=True, row_scaled_activation=True),
}

#: One recipe a format, none of which draws random numbers.
ONE_A_FORMAT: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}


def context(recipe: Recipe | None) -> contextlib.AbstractContextManager:
    """``tejit.autocast`` with the recipe; nothing where there is none."""
    return contextlib.nullcontext() if recipe is None else tejit.autocast(recipe=recipe)
