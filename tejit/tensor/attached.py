"""What others attach to a tensor (``main_grad``, flags, methods), and how it follows the tensor to another object."""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

from torch import Tensor

#: Set by torch on a Parameter of a subclass: it is the object's own kind, and no attachment.
PARAMETER_MARK = "_is_param"


def attached(tensor: Any) -> dict[str, Any]:
    """What others attached to a tensor, by attribute: everything but a quantized tensor's declared state."""
    own = set(tensor._own_state()) if hasattr(tensor, "_own_state") else ()
    return {name: value for name, value in tensor.__dict__.items() if name not in own}


def carry(old: Tensor, new: Any) -> None:
    """Attach to ``new`` what is attached to ``old``; what refers to ``old`` (itself, methods bound to it, partial
    functions over it) refers to ``new`` there."""
    for name, value in attached(old).items():
        if name != PARAMETER_MARK:
            setattr(new, name, rebound(value, old, new))


def rebound(value: Any, old: Any, new: Any) -> Any:
    """``value`` with ``new`` in place of ``old``: also inside bound methods, ``functools.partial``, lists, tuples and
    dictionaries. What does not refer to ``old`` is returned as it is."""
    return _mapped(value, lambda item: new if item is old else item, types.MethodType)


def _mapped(value: Any, change: Any, make_method: Any) -> Any:
    """``value`` with ``change`` applied to all that it consists of; the same object where that changes nothing."""

    def inner(item: Any) -> Any:
        return _mapped(item, change, make_method)

    changed = change(value)
    if changed is not value:
        return changed
    if isinstance(value, types.MethodType):
        owner = change(value.__self__)
        return value if owner is value.__self__ else make_method(value.__func__, owner)
    if type(value) is functools.partial:
        parts = (value.func, value.args, value.keywords)
        function, arguments, keywords = (inner(part) for part in parts)
        same = all(a is b for a, b in zip(parts, (function, arguments, keywords), strict=True))
        return value if same else functools.partial(function, *arguments, **keywords)
    if type(value) in (list, tuple):
        items = [inner(item) for item in value]
        return value if all(a is b for a, b in zip(value, items, strict=True)) else type(value)(items)
    if type(value) is dict:
        entries = {key: inner(item) for key, item in value.items()}
        return value if all(value[key] is entries[key] for key in value) else entries
    return value


class Itself(NamedTuple):
    """Stands in a file for the tensor that an attribute refers to."""


class MethodOf(NamedTuple):
    """Stands in a file for a method bound to the tensor that it is attached to."""

    function: Any


def for_file(tensor: Any) -> dict[str, Any]:
    """:func:`attached` in a form that can be pickled with the tensor: references to itself would never end."""

    def change(item: Any) -> Any:
        return Itself() if item is tensor else item

    found = attached(tensor)
    return {name: _mapped(value, change, lambda function, _: MethodOf(function)) for name, value in found.items()}


def from_file(value: Any, tensor: Any) -> Any:
    """Inverse of :func:`for_file`, of one attribute."""

    def change(item: Any) -> Any:
        if isinstance(item, Itself):
            return tensor
        return types.MethodType(item.function, tensor) if isinstance(item, MethodOf) else item

    return _mapped(value, change, types.MethodType)
