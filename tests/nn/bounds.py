"""How far a quantized linear product may be from the one in high precision: one table, by the name of the recipe.

An error is relative: the Frobenius norm of the difference over that of the exact result, on data from N(0, 1).

**One operand.** An element type with ``m`` mantissa bits has steps of ``2^-m`` of a binade's first value, so rounding
to nearest is off by at most half a step, uniformly: the root mean square is ``2^-m / 2 / sqrt(3)`` of a value at the
start of its binade, and less everywhere else. That bounds the operand's relative error in the Frobenius norm:
0.036 for E4M3 (m = 3), 0.072 for E5M2 (m = 2), 0.144 for E2M1 (m = 1). Scales add nothing that counts: with one scale
for the tensor or one that is a power of two they move values within their binades, subnormal codes are reached only
by values far below the root mean square of N(0, 1), and E2M1's subnormal half step, 0.25, is that of its first binade.
Rounding at random, to a neighbour with the probability that makes it right on average, has twice the variance.

**A product** sums K terms ``a b`` whose two relative errors are independent of each other and of the other terms'. Then
variances add: ``sqrt(e_a^2 + e_b^2)``, whatever K is. The exact result and ours are each rounded once to the output's
dtype, which adds ``2 u^2`` under the root, where ``u`` is that dtype's own bound by the formula above.

**Three products.** y multiplies input and weight, dgrad ``grad_output`` and weight, wgrad ``grad_output`` and input.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tejit.format_info import E4M3, E5M2
from tejit.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)


def rounding(step: float, at_random: bool = False) -> float:
    """Root mean square of the relative error of one rounding; ``step`` is ``2^-m``."""
    return step / 2 / math.sqrt(3) * (math.sqrt(2) if at_random else 1)


class Errors(NamedTuple):
    """Relative errors of the three operands of a layer."""

    input: float
    weight: float
    grad_output: float


_E4M3, _E5M2 = (rounding(torch.finfo(element.dtype).eps) for element in (E4M3, E5M2))
_E2M1_STEP = 0.5  # E2M1 has one mantissa bit: 1, 1.5, 2, 3, 4, 6
_E2M1, _E2M1_AT_RANDOM = rounding(_E2M1_STEP), rounding(_E2M1_STEP, at_random=True)

_ONE_KIND = Errors(_E4M3, _E4M3, _E4M3)
_HYBRID = Errors(_E4M3, _E4M3, _E5M2)
_FOUR_BITS = Errors(_E2M1, _E2M1, _E2M1)
_FOUR_BITS_AT_RANDOM = Errors(_E2M1, _E2M1, _E2M1_AT_RANDOM)

#: Errors of the operands by recipe. Delayed scaling is of these once its scale fits the data.
ERRORS: dict[str, Errors] = {
    "current": _HYBRID,
    "current E4M3": _ONE_KIND,
    "current pow2": _HYBRID,
    "delayed": _HYBRID,
    "delayed E4M3": _ONE_KIND,
    "block": _ONE_KIND,
    "block HYBRID": _HYBRID,
    "MXFP8": _ONE_KIND,
    "MXFP8 HYBRID": _HYBRID,
    "MXFP8 2D": _ONE_KIND,
    "NVFP4": _FOUR_BITS_AT_RANDOM,
    "NVFP4 plain": _FOUR_BITS,
    "NVFP4 rows": _FOUR_BITS_AT_RANDOM,
    "NVFP4 4over6": _FOUR_BITS_AT_RANDOM,
}


def recipe(name: str) -> Recipe:
    """The recipe of a name in :data:`STATELESS`."""
    return {
        "current": lambda: Float8CurrentScaling(),
        "current E4M3": lambda: Float8CurrentScaling(fp8_format=Format.E4M3),
        "current pow2": lambda: Float8CurrentScaling(force_pow_2_scales=True),
        "block": lambda: Float8BlockScaling(),
        "block HYBRID": lambda: Float8BlockScaling(fp8_format=Format.HYBRID),
        "MXFP8": lambda: MXFP8BlockScaling(),
        "MXFP8 HYBRID": lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID),
        "MXFP8 2D": lambda: MXFP8BlockScaling(enable_2d_quantization=True),
        "NVFP4": lambda: NVFP4BlockScaling(),
        "NVFP4 plain": lambda: NVFP4BlockScaling(True, True, True),
        "NVFP4 rows": lambda: NVFP4BlockScaling(row_scaled_activation=True),
        "NVFP4 4over6": lambda: NVFP4BlockScaling(four_over_six="all"),
    }[name]()


#: Names of the recipes without state, which :func:`recipe` makes.
STATELESS = [name for name in ERRORS if not name.startswith("delayed")]


def bounds(name: str, dtype: torch.dtype) -> dict[str, float]:
    """``{"y", "dgrad", "wgrad"}``: the relative error that each may have under a recipe, in a dtype."""
    errors = ERRORS[name]
    output = 2 * rounding(torch.finfo(dtype).eps) ** 2
    return {
        "y": math.sqrt(errors.input**2 + errors.weight**2 + output),
        "dgrad": math.sqrt(errors.grad_output**2 + errors.weight**2 + output),
        "wgrad": math.sqrt(errors.grad_output**2 + errors.input**2 + output),
    }


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
