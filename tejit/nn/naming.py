"""Names of modules: what the patterns of recipes match and ``CustomRecipe`` is told."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from tejit.nn.inputs import Whole

Root = TypeVar("Root", bound=nn.Module)


class Named(Whole):
    """Mixin of tejit's modules: they have a ``name``, None until somebody gives one."""

    name: str | None = None


def checked_name(name: Any) -> str | None:
    """Raises ``TypeError`` for a name that is no string."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is {name!r}; it must be a string or None")
    return name


def name_modules(root: Root) -> Root:
    """Give each of tejit's modules below ``root`` that has no name its qualified name there; returns ``root``.

    A module that stands in several places gets the first one's name; ``root`` itself, which has no qualified name,
    stays as it is.
    """
    for name, module in root.named_modules():
        if isinstance(module, Named) and module.name is None and name:
            module.name = name
    return root
