"""Which attributes of a storage hold tensors, in which order, and under which constructor keyword."""

from __future__ import annotations

import inspect
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
        if klass.__module__.split(".")[0] in ("builtins", "torch"):
            continue
        for name, hint in inspect.get_annotations(klass, eval_str=True).items():
            marker = _marker(hint)
            if marker is not None:
                fields[name] = marker.keyword
    _check(cls, fields)
    return fields


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
