"""Checks of arguments that the modules share."""

from __future__ import annotations

import math
import numbers


def one_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    """``value``, where it is one of ``choices``.

    Raises ``ValueError`` where it is not.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value


def checked_eps(eps: float, name: str = "eps") -> float:
    """What a norm adds to the mean square, where it is a number to add: below zero a root has no value.

    Raises ``TypeError`` where it is no number, ``ValueError`` where it is below zero, infinite or NaN.
    """
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        raise TypeError(f"{name} is {eps!r}; it must be a number, such as 1e-5")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"{name} is {eps!r}; it must be a finite number of 0 or more, such as 1e-5")
    return float(eps)
