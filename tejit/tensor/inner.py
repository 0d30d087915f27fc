"""Which attributes of a storage hold tensors, in which order, and under which constructor keyword."""

from __future__ import annotations

import inspect
import weakref
from typing import Annotated, Any, get_args, get_origin


class InnerTensor:
    """Marks a field of a storage as an inner tensor: ``_data: Annotated[torch.Tensor, InnerTensor("data")]``.

    ``keyword`` is the constructor argument that fills the field.
    """

    __slots__ = ("keyword",)

    def __init__(self, keyword: str) -> None:
        self.keyword = keyword


#: Attribute names that torch.Tensor itself uses; a wrapper subclass cannot hold data under them.
_TAKEN = frozenset({"_cdata", "_base", "_version", "_grad", "_grad_fn", "_backward_hooks"})


def collect_inner_tensors(cls: type) -> dict[str, str]:
    """``{attribute: keyword}`` of ``cls``, in the order of declaration, base classes first.

    A subclass that declares a field again keeps its place (and may give it another keyword).

    Raises ``TypeError`` where two fields share a keyword or a field has a name that torch.Tensor uses.
    """
    fields: dict[str, str] = {}
    for klass in reversed(cls.__mro__):
        fields.update(_declared(klass))
    _check(cls, fields)
    return fields


#: What each class declares itself: to evaluate annotations takes long, and a class has many subclasses.
_own: weakref.WeakKeyDictionary[type, dict[str, str]] = weakref.WeakKeyDictionary()


def _declared(cls: type) -> dict[str, str]:
    if cls.__module__.partition(".")[0] in ("builtins", "torch"):
        return {}
    own = _own.get(cls)
    if own is None:
        hints = inspect.get_annotations(cls, eval_str=True)
        own = {name: marker.keyword for name, hint in hints.items() if (marker := _marker(hint)) is not None}
        _own[cls] = own
    return own


def _marker(hint: Any) -> InnerTensor | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, InnerTensor)), None)


def _check(cls: type, fields: dict[str, str]) -> None:
    seen: dict[str, str] = {}
    for name, keyword in fields.items():
        if name in _TAKEN:
            raise TypeError(f"{cls.__qualname__}.{name}: torch.Tensor uses this name; choose another one")
        if keyword in seen:
            raise TypeError(
                f"{cls.__qualname__}: the fields {seen[keyword]} and {name} have one keyword, {keyword!r};"
                " each InnerTensor needs its own"
            )
        seen[keyword] = name
