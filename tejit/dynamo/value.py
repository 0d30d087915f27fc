"""Quantizers as values: equal by class and fields, constants to ``torch.compile``, rebuilt from an expression."""

from __future__ import annotations

import copyreg
import enum
import functools
import importlib
import pickle
import types
import typing
from typing import Any, TypeVar

import torch

from tejit import compat
from tejit.tensor.quantizer import Quantizer, is_value_class
from tejit.tensor.serialization import allow

Q = TypeVar("Q", bound=type[Quantizer])

#: Registered classes by (module, qualified name), so that local classes can be rebuilt too.
_registered: dict[tuple[str, str], type[Quantizer]] = {}

_PLAIN = (bool, int, float, str, torch.dtype, type(None))


def register_value_opaque_quantizer(cls: Q) -> Q:
    """Make a quantizer class a value class; also usable as a decorator.

    Its fields are the annotated attributes of the class and its bases, less class variables and names that begin
    with an underscore; the constructor takes each by its name. Instances become equal by class and fields and
    hashable, are constants in compiled graphs (an equal quantizer never recompiles, a changed one does), and
    survive pickle. What the constructor derives from the fields is no part of the value: it is made again.
    Registering a class anew under the module and name of an earlier one (a notebook's cell runs again) puts it in
    the earlier one's place.

    Raises ``TypeError`` for a field that is not int, bool, float, str, ``torch.dtype``, None, an Enum or
    another quantizer, naming the field; and what torch raises where it refuses the class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Quantizer)):
        raise TypeError(f"{cls!r} is not a subclass of tejit.Quantizer")
    if is_value_opaque_quantizer(cls):
        return cls
    fields = _checked_fields(cls)
    methods = {
        name
        for klass in cls.__mro__
        if issubclass(klass, Quantizer)
        for name, member in vars(klass).items()
        if isinstance(member, types.FunctionType) and not name.startswith("__")
    }
    replaced = {name: cls.__dict__.get(name) for name in _METHODS}
    for name, method in _METHODS.items():
        setattr(cls, name, method)
    try:
        compat.register_constant_class(cls, fields=(*fields, "_fields"), methods=sorted(methods))
    except Exception:  # refused: leave the class as it was
        for name, before in replaced.items():
            delattr(cls, name) if before is None else setattr(cls, name, before)
        raise
    cls._value_fields = fields
    _registered[cls.__module__, cls.__qualname__] = cls
    allow(cls)
    return cls


def is_value_opaque_quantizer(cls_or_quantizer: Any) -> bool:
    """Whether this class (or this quantizer's class) itself was registered; a subclass of a registered one is not."""
    return is_value_class(cls_or_quantizer if isinstance(cls_or_quantizer, type) else type(cls_or_quantizer))


@functools.cache
def _field_types(cls: type[Quantizer]) -> dict[str, tuple[Any, ...]]:
    """``{field: the types its annotation allows}``, base classes first; evaluated once a class."""
    types_of: dict[str, tuple[Any, ...]] = {}
    for klass in reversed(cls.__mro__):
        if issubclass(klass, Quantizer):
            for name, hint in compat.own_annotations(klass).items():
                if name in cls._fields:
                    types_of[name] = _options(klass, name, hint)
    return types_of


def _checked_fields(cls: type[Quantizer]) -> tuple[str, ...]:
    for name, options in _field_types(cls).items():
        for option in options:
            _check_type(cls, name, option)
    return cls._fields


def _options(cls: type, name: str, hint: Any) -> tuple[Any, ...]:
    """The members of a union, the types of a ``Literal``'s values, what ``Annotated`` and ``Final`` hold, or the
    type itself."""
    try:
        hint = compat.evaluated_annotation(cls, hint)
    except Exception as error:
        raise TypeError(
            f"{cls.__qualname__}.{name} is annotated {hint!r}, which cannot be evaluated in {cls.__module__} ({error});"
            " import or define its types in that module, outside of functions and TYPE_CHECKING"
        ) from error
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple([option for member in inside for option in _options(cls, name, member)])
    if origin is typing.Literal:
        return tuple([type(value) for value in inside])
    if origin in (typing.Annotated, typing.Final):
        return _options(cls, name, inside[0])
    return (hint,)


def _check_type(cls: type, name: str, hint: Any) -> None:
    allowed = hint is None or any(hint is plain for plain in _PLAIN)
    if not allowed and isinstance(hint, type):
        allowed = issubclass(hint, (enum.Enum, Quantizer))
    if not allowed:
        raise TypeError(
            f"{cls.__qualname__}.{name} is annotated {hint!r}; a value quantizer's fields are int, bool, float, str,"
            " torch.dtype, None, an Enum or another quantizer. Keep other state out of the annotations, or do not"
            " register the class (it then has identity semantics)."
        )


# -- values as literals ---------------------------------------------------------------------------------------
def encode(quantizer: Quantizer) -> tuple[Any, ...]:
    """A quantizer as nested tuples of strings: ``(module, qualname, ((field, kind, text), ...))``.

    Comparable, hashable, and a valid expression: inf and nan survive, and no module or class object is held.

    Raises ``TypeError`` for a field whose value is of no allowed type, naming it.
    """
    cls = type(quantizer)
    assert cls._value_fields is not None
    _require_current(cls)
    fields = tuple([(name, *_encode_value(cls, name, getattr(quantizer, name))) for name in cls._value_fields])
    return cls.__module__, cls.__qualname__, fields


def _require_current(cls: type) -> None:
    """Raises ``TypeError`` where ``cls`` was not registered itself, and where a later class took its name: the
    expression would make one of that."""
    if not is_value_class(cls):
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__} is compared by identity, so a compiled graph can hold none of it:"
            " register the class with tejit.dynamo.register_value_opaque_quantizer, or let the quantizer make bare"
            " storages, quantizer.replace(internal=True)"
        )
    if _registered[cls.__module__, cls.__qualname__] is not cls:
        raise TypeError(
            f"another class was registered as {cls.__module__}.{cls.__qualname__} after the class of this quantizer;"
            " make the quantizer again, or give one of the classes another name"
        )


def _encode_value(cls: type, name: str, value: Any) -> tuple[str, Any]:
    if value is None:
        return "none", ""
    if isinstance(value, enum.Enum):
        return "enum", _encode_enum(cls, name, value)
    if isinstance(value, bool):
        return "bool", str(value)
    if isinstance(value, int):
        return "int", int.__repr__(value)
    if isinstance(value, float):
        return "float", float.hex(value)
    if isinstance(value, str):
        return "str", str.__str__(value)
    if isinstance(value, torch.dtype):
        return "dtype", str(value).removeprefix("torch.")
    if isinstance(value, Quantizer) and is_value_opaque_quantizer(value):
        return "quantizer", encode(value)
    if isinstance(value, Quantizer):
        raise TypeError(
            f"{cls.__qualname__}.{name} is a {type(value).__name__}, which is compared by identity and so cannot be"
            " part of a value; register its class with tejit.dynamo.register_value_opaque_quantizer"
        )
    raise TypeError(
        f"{cls.__qualname__}.{name} is {value!r} of type {type(value).__name__}, which cannot be part of a value."
        " A process group is passed with each call (amax_reduction_group=...), never kept in a quantizer."
    )


def _encode_enum(cls: type, name: str, value: enum.Enum) -> tuple[str, str, Any]:
    """``(module, qualname, member)``: the type decides, not the field, which may allow several. Combined flags,
    which have no name of their own, are numbers."""
    kind = type(value)
    if kind not in _enums_of(cls, name):
        allowed = ", ".join(option.__qualname__ for option in _enums_of(cls, name)) or "no Enum"
        raise TypeError(f"{cls.__qualname__}.{name} is {value!r} of type {kind.__qualname__}; it may be: {allowed}")
    return kind.__module__, kind.__qualname__, value.value if isinstance(value, enum.Flag) else value.name


def _enums_of(cls: type, name: str) -> list[Any]:
    return [option for option in _field_types(cls)[name] if isinstance(option, enum.EnumMeta)]


def _decode_enum(cls: type[Quantizer], name: str, encoded: tuple[str, str, Any]) -> enum.Enum:
    module, qualname, member = encoded
    for kind in _enums_of(cls, name):
        if (kind.__module__, kind.__qualname__) == (module, qualname):
            return kind(member) if issubclass(kind, enum.Flag) else kind.__members__[member]
    raise pickle.UnpicklingError(f"{cls.__qualname__}.{name} cannot be a {module}.{qualname}")


def _decode_value(cls: type[Quantizer], field: str, kind: str, text: Any) -> Any:
    if kind == "none":
        return None
    if kind == "enum":
        return _decode_enum(cls, field, text)
    if kind == "dtype":
        dtype = getattr(torch, text)
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"torch.{text} is no dtype")
        return dtype
    if kind == "quantizer":
        return load_quantizer(text)
    if kind == "float":
        return float.fromhex(text)
    if kind == "bool":
        return text == "True"
    return int(text) if kind == "int" else text


def rebuild_quantizer(encoded: tuple[Any, ...]) -> Quantizer:
    """Inverse of :func:`encode` for compiled graphs: imports the class's module where that was not done yet."""
    module, qualname, _ = encoded
    if (module, qualname) not in _registered:
        importlib.import_module(module)
    return load_quantizer(encoded)


def load_quantizer(encoded: tuple[Any, ...]) -> Quantizer:
    """Inverse of :func:`encode` for pickles, which may come from anywhere: it imports nothing and makes nothing
    but registered quantizers from their own fields. Derived state is rebuilt by the constructor.

    Raises ``pickle.UnpicklingError`` for a class that is not registered in this process, or another field.
    """
    module, qualname, fields = encoded
    cls = _registered.get((module, qualname))
    if cls is None:
        raise pickle.UnpicklingError(
            f"{module}.{qualname} is no registered quantizer; import the module that registers it"
            " (tejit.dynamo.register_value_opaque_quantizer) first"
        )
    values = {}
    for name, kind, text in fields:
        if name not in (cls._value_fields or ()):
            raise pickle.UnpicklingError(f"{module}.{qualname} has no field {name!r}")
        values[name] = _decode_value(cls, name, kind, text)
    return Quantizer._from_fields(cls.__new__(cls), values)


# -- the methods a registered class gets ------------------------------------------------------------------------
def _key(quantizer: Quantizer) -> tuple[Any, ...]:
    key = quantizer.__dict__.get("_encoded")
    if key is None:
        key = encode(quantizer)
        object.__setattr__(quantizer, "_encoded", key)
    return key


def _equal(self: Quantizer, other: object) -> Any:
    if not is_value_opaque_quantizer(self):  # a subclass that was not registered itself
        return self is other
    if self is other:
        _key(self)  # a value that cannot be compared must say so even against itself
        return True
    if type(self) is not type(other):
        return NotImplemented
    return _key(self) == _key(typing.cast(Quantizer, other))


def _not_equal(self: Quantizer, other: object) -> Any:
    # Python would derive it; torch 2.11 does not in a graph.
    equal = _equal(self, other)
    return equal if equal is NotImplemented else not equal


def _hash(self: Quantizer) -> int:
    return hash(_key(self)) if is_value_opaque_quantizer(self) else object.__hash__(self)


def _fx_repr(self: Quantizer) -> tuple[str, dict[str, Any]]:
    _require_current(type(self))
    return f"_tejit_rebuild_quantizer({_key(self)!r})", {"_tejit_rebuild_quantizer": rebuild_quantizer}


def _reduce(self: Quantizer) -> tuple[Any, ...]:
    if not is_value_opaque_quantizer(self):  # a subclass that was not registered itself: an ordinary object
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]
    _require_current(type(self))
    return load_quantizer, (_key(self),)


_METHODS = {
    "__eq__": _equal,
    "__ne__": _not_equal,
    "__hash__": _hash,
    "__fx_repr__": _fx_repr,
    "__reduce__": _reduce,
}

allow(load_quantizer)
