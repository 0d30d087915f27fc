"""Modules by key: a graph can hold a string, and find by it the module that it was made for."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

_numbers = itertools.count()
_modules: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class Keyed:
    """Mixin of modules that have a key, each its own."""

    _key: str

    def _take_key(self) -> None:
        self._key = f"module {next(_numbers)}"
        _modules[self._key] = self


def module_of(key: str) -> Any:
    """The module with this key."""
    return _modules[key]
