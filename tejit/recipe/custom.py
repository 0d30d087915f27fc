"""``CustomRecipe``: a function decides, for each tensor of each module, how it is quantized."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tejit import compat
from tejit.formats import IdentityQuantizer
from tejit.recipe.recipes import LinearQuantizers, Recipe, linear_quantizers
from tejit.tensor import Quantizer


@dataclass(frozen=True)
class QuantizerRole:
    """Which tensor a quantizer is wanted for.

    Attributes:
        module_type: ``linear`` or ``grouped_linear``.
        tensor_type: ``input``, ``weight`` or ``grad_output`` (``output`` and ``grad_input`` where a module quantizes
            them).
        name: the module's name; None where it has none (``Linear(name=...)``, ``tejit.name_modules(root)``).
    """

    module_type: str
    tensor_type: str
    name: str | None = None


_numbers = itertools.count()
#: Recipes by key. Compiled code finds one by its key, a string, which guards that it is this very one.
_recipes: weakref.WeakValueDictionary[str, CustomRecipe] = weakref.WeakValueDictionary()


class _Made:
    """What a recipe said, by attribute. A graph guards the attributes that it reads and no other, whereas of a
    dictionary it guards all keys, and the next module's entry would recompile it."""


@dataclass(frozen=True, eq=False)
class CustomRecipe(Recipe):
    """What ``qfactory`` says.

    Attributes:
        qfactory: called with a :class:`QuantizerRole`, returns a quantizer, or None for high precision. It is asked
            once for each role, outside of any graph, and must give the same answer every time; its quantizers' usages
            do not matter, a module takes the directions it needs.

    Two recipes are equal only where they are one object: what was made for one is never used for another. Make them
    once, outside of the training loop and of compiled regions; each is a graph of its own to ``torch.compile``.

    Raises ``TypeError`` where ``qfactory`` cannot be called or, when a module asks, returns something else.
    """

    qfactory: Callable[[QuantizerRole], Quantizer | None]
    _key: ClassVar[str]  # each instance has its own
    _made: ClassVar[_Made]

    # eq=False alone would leave what the base compares: its own fields.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "a CustomRecipe cannot be made inside of a compiled region: each one is a recipe of its own, and the"
                " graph would make another with each call. Make it once, outside of the region"
            )
        if not callable(self.qfactory):
            raise TypeError(f"qfactory is {self.qfactory!r}; it must be a function of a QuantizerRole")
        self._begin()

    def _begin(self) -> None:
        object.__setattr__(self, "_key", f"custom recipe {next(_numbers)}")
        object.__setattr__(self, "_made", _Made())
        _recipes[self._key] = self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_key", "_made")}

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy has a state of its own
        self.__dict__.update(state)
        self._begin()

    def _linear_of(self, name: str | None, module_type: str) -> LinearQuantizers | None:
        return getattr(self._made, _slot(self._key, module_type, name))

    def _make(self, module_type: str, name: str | None) -> LinearQuantizers | None:
        found: dict[str, Quantizer | None] = {}
        for tensor_type in ("input", "weight", "grad_output"):
            role = QuantizerRole(module_type, tensor_type, name)
            quantizer = self.qfactory(role)
            if quantizer is not None and not isinstance(quantizer, Quantizer):
                raise TypeError(f"qfactory returned {quantizer!r} for {role}; it must be a quantizer or None")
            found[tensor_type] = quantizer
        if not any(found.values()):
            return None
        chosen = {role: IdentityQuantizer() if q is None else q for role, q in found.items()}
        made = linear_quantizers(
            chosen["input"], chosen["weight"], chosen["grad_output"], backward_override=self.backward_override
        )
        return made._replace(weight_is_left=found["weight"] is None)


@compat.constant_result
def _slot(key: str, module_type: str, name: str | None) -> str:
    """The attribute of the recipe's ``_made`` that holds what it says of a module, made at the first call."""
    recipe = _recipes[key]
    slot = f"{module_type} {name!r}".encode().hex()  # torch 2.14 traces no attribute with a dot in its name
    if not hasattr(recipe._made, slot):
        setattr(recipe._made, slot, recipe._make(module_type, name))
    return slot
