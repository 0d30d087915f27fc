"""Checks of arguments that the modules share."""

from __future__ import annotations


def one_of(name: str, value: object, choices: tuple[str, ...]) -> str:
    """``value``, where it is one of ``choices``.

    Raises ``ValueError`` where it is not.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return value
