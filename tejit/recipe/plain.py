"""Recipes as plain data (dicts, lists, strings, numbers), for JSON, YAML and files of ``torch.save``."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import pickle
from typing import Any, TypeVar

from tejit.tensor.serialization import allow

Self = TypeVar("Self", bound="PlainForm")

#: Of the form that :meth:`PlainForm.to_dict` writes.
VERSION = 1
_CLASS, _VERSION = "recipe", "version"

#: Where the recipes are that can be made from plain data alone: the modules are loaded when one is needed.
_BUILT_IN = {
    "DelayedScaling": "tejit.recipe.delayed",
    "Float8BlockScaling": "tejit.recipe.blocks",
    "Float8CurrentScaling": "tejit.recipe.recipes",
    "MXFP8BlockScaling": "tejit.recipe.blocks",
    "NVFP4BlockScaling": "tejit.recipe.blocks",
}


class PlainForm:
    """Mixin of recipes: a form of plain data, and pickles that ``torch.load(weights_only=True)`` reads."""

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data that JSON and YAML hold: ``recipe`` is the name of its class, ``version`` that of
        this form, and each argument stands under its own name: a ``Format`` as its name, ``overrides`` as a list of
        pairs of a pattern and another such dict or None. :meth:`from_dict` makes an equal recipe of it.

        Raises ``TypeError`` for a ``CustomRecipe``, here or among the overrides: what it does is code.
        """
        if not _is_plain(self):
            raise TypeError(
                f"{type(self).__name__} has no plain form: what it does is code. Store the arguments of the function"
                " that makes it, and make it again"
            )
        values = {name: _plain(getattr(self, name)) for name in _arguments(type(self))}
        return {_CLASS: type(self).__name__, _VERSION: VERSION, **values}

    @classmethod
    def from_dict(cls: type[Self], plain: dict[str, Any]) -> Self:
        """The recipe that :meth:`to_dict` of one like it gave, or that was written by hand in that form. Arguments that
        are left out have their defaults, and ``version`` is 1.

        Args:
            plain: as :meth:`to_dict` describes; lists and tuples are alike.

        Raises:
            TypeError: ``plain`` is no dict, or an argument is of another type than the recipe takes.
            ValueError: a key or the name of the recipe is unknown, it is another recipe than the class that is asked,
                the version is another one, or the recipe refuses a value.
        """
        if not isinstance(plain, dict):
            raise TypeError(f"a recipe's plain form is {plain!r}; it must be a dict, as recipe.to_dict() gives")
        version = plain.get(_VERSION, VERSION)
        if isinstance(version, bool) or version != VERSION:
            raise ValueError(f"version of the recipe's plain form is {version!r}; this tejit reads {VERSION}")
        found = _class_of(plain.get(_CLASS))
        if not issubclass(found, cls):
            raise ValueError(
                f"{_CLASS} is {plain[_CLASS]!r}, and {cls.__name__} was asked to make it; use Recipe.from_dict"
            )
        arguments = _arguments(found)
        values = {}
        for name, value in plain.items():
            if name in (_CLASS, _VERSION):
                continue
            if name not in arguments:
                raise ValueError(
                    f"{found.__name__} has no {name!r}; its plain form may have"
                    f" {', '.join((_CLASS, _VERSION, *arguments))}"
                )
            values[name] = _read(name, value, arguments[name])
        made: Any = found(**values)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (load_recipe, (self.to_dict(),)) if _is_plain(self) else super().__reduce_ex__(protocol)


def load_recipe(plain: Any) -> Any:
    """The recipe of a pickle, which may come from anywhere: only what the recipe's own constructor takes.

    Raises ``pickle.UnpicklingError`` for anything else.
    """
    try:
        return _recipe_class().from_dict(plain)
    except Exception as error:
        raise pickle.UnpicklingError(f"the file holds no recipe: {error}") from error


def _recipe_class() -> Any:
    return importlib.import_module("tejit.recipe.recipes").Recipe


def _class_of(name: Any) -> Any:
    if not isinstance(name, str) or name not in _BUILT_IN:
        raise ValueError(f"{_CLASS} is {name!r}; it must be one of {', '.join(_BUILT_IN)}")
    return getattr(importlib.import_module(_BUILT_IN[name]), name)


def _is_plain(recipe: Any) -> bool:
    """Whether the recipe, and all among its overrides, are built-in ones."""
    cls = type(recipe)
    others = [other for _, other in recipe.overrides if other is not None]
    return _BUILT_IN.get(cls.__name__) == cls.__module__ and all(_is_plain(other) for other in others)


def _arguments(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.to_dict() if isinstance(value, PlainForm) else value


def _read(name: str, value: Any, field: dataclasses.Field[Any]) -> Any:
    """An argument of the recipe from its plain form; what is of no such form goes to the recipe, which names it."""
    if isinstance(field.default, enum.Enum):
        kind = type(field.default)
        if not isinstance(value, str) or value not in kind.__members__:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, kind.__members__))}")
        return kind[value]
    if name == "overrides" and isinstance(value, (list, tuple)):
        return [_read_pair(pair) for pair in value]
    return value


def _read_pair(pair: Any) -> Any:
    if isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[1], dict):
        return pair[0], _recipe_class().from_dict(pair[1])
    return pair


allow(load_recipe)
