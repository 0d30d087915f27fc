"""Checks of arguments that the modules share."""

from __future__ import annotations

import torch


def one_dtype(dtype: torch.dtype | None, params_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of the parameters, which has two names.

    Raises ``ValueError`` where both are given and differ.
    """
    if dtype is not None and params_dtype is not None and dtype != params_dtype:
        raise ValueError(
            f"dtype is {dtype} and params_dtype is {params_dtype}: they are two names of one argument; give one"
        )
    return dtype if dtype is not None else params_dtype


def one_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    """``value``, where it is one of ``choices``.

    Raises ``ValueError`` where it is not.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value
