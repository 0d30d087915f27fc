"""What TorchDynamo gets wrong of quantizers in a graph, and what is done about it: torch 2.11 to 2.15.

Quantizers are constants to torch (``torch._library.opaque_object``). Three things go wrong with such constants there:

- Their numbers do not count as constants. A field that is read is an input of the graph: under ``dynamic=True``, or
  when another value is met, a symbol. A float then stops TorchDynamo (an AssertionError of its own), or is compiled
  twice.
- ``q(x)``. Up to 2.14 TorchDynamo loses where the object's class comes from, asserts that it knows, and stops. 2.15
  knows, but hands the call to the graph as it is, which takes tensors only: a quantizer that makes bare storages
  (``internal``) stops it. So do other methods, of objects that do not come from outside of the graph.
- On 2.11 an object's stand-in answers for the object: ``isinstance(q, Quantizer)`` is False, ``{q: 1}[r]`` finds
  nothing where ``r == q``, and of a quantizer made in the graph no method is traced. Most of that is silent.

The remedy is a few methods on the one class with which TorchDynamo traces such objects. They act for classes whose
metaclass is marked (:data:`MARK`) and leave the rest to torch. TorchDynamo takes more than a second to import, so
nothing here imports it: torch itself says when it is there, see :class:`Kind`.

The end: :data:`LAST` is the last release that needs it. A later one is left alone.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import torch

_major, _minor = torch.__version__.split(".")[:2]
TORCH_VERSION = (int(_major), int(_minor))

#: The last release of torch that is mended.
LAST = (2, 15)

#: True on a metaclass whose classes' instances are traced by the rules of this file. A name, so that it also holds
#: for classes that were made before a module was reloaded.
MARK = "_tejit_traced_constants"

#: Fields that are read as constants, and tuples of them.
_PLAIN = (bool, int, float, str, torch.dtype, type(None))

#: Methods of which the real object's are called, not traced.
_REAL = ("__eq__", "__ne__", "__hash__")

_ABSENT = object()

_TRACER = "torch._dynamo.variables.script_object"
_HANDLERS = ("CustomClassObjectVariable", "TorchScriptObjectVariable")  # 2.14 renamed it


class Kind(str):
    """The word for "constant" with which a class is registered. Torch compares it whenever it meets one of the class's
    objects: before TorchDynamo traces anything of it, hence the time to mend what it traces it with.

    (An import hook would say so too. It would stand in everybody's way, and miss a module that is loaded already.)
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        _mend()
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _mend() -> None:
    """Give TorchDynamo's class the methods of this file, where it is loaded and has not got them."""
    tracer = sys.modules.get(_TRACER)
    handler = next((vars(tracer)[name] for name in _HANDLERS if name in vars(tracer)), None) if tracer else None
    if handler is None or TORCH_VERSION > LAST or MARK in vars(handler):
        return
    look_up = "tp_getattro_impl" if hasattr(handler, "tp_getattro_impl") else "var_getattr"
    _mend_reads_and_calls(handler, look_up)
    if TORCH_VERSION < (2, 12):
        _mend_stand_ins(handler)
    setattr(handler, MARK, True)  # last: another thread that comes in between does it once more, to the same end


def _real(variable: Any) -> Any:
    """The object that is traced: on torch 2.11 behind a stand-in."""
    return getattr(variable.value, "real_obj", variable.value)


def _is_ours(value: Any) -> bool:
    return getattr(type(type(value)), MARK, False)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(isinstance(item, _PLAIN) for item in value))


def _tracker(tx: Any, value: Any, source: Any = None) -> Any:
    return sys.modules["torch._dynamo.variables.base"].VariableTracker.build(tx, value, source)


def _mend_reads_and_calls(handler: Any, look_up: str) -> None:
    """Read plain fields as constants: the graph is guarded by the equality of the whole object already. Trace ``q(x)``
    as ``q.__call__(x)``, which works where the method is looked up."""
    their_call, their_method, their_look_up = handler.call_function, handler.call_method, getattr(handler, look_up)

    def attribute(self: Any, tx: Any, name: str) -> Any:
        value = _real(self)
        if _is_ours(value):
            found = inspect.getattr_static(value, name, _ABSENT)
            if _is_plain(found):
                return _tracker(tx, found)
        return their_look_up(self, tx, name)

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not _is_ours(_real(self)):
            return their_call(self, tx, args, kwargs)
        return getattr(self, look_up)(tx, "__call__").call_function(tx, list(args), kwargs)

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = inspect.getattr_static(type(_real(self)), name, None)
        if name in _REAL or not isinstance(found, types.FunctionType) or not _is_ours(_real(self)):
            return their_method(self, tx, name, args, kwargs)
        functions = sys.modules["torch._dynamo.variables.functions"]
        return functions.UserFunctionVariable(found).call_function(tx, [self, *args], kwargs)

    setattr(handler, look_up, attribute)
    handler.call_function = call_function
    handler.call_method = call_method


# -- torch 2.11 -------------------------------------------------------------------------------------------------
def _mend_stand_ins(handler: Any) -> None:
    """Have the object's own type, hash and equality count, and its methods traced as those of other objects are."""
    python_type, get_hash, equal, look_up = (
        handler.python_type,
        handler.get_python_hash,
        handler.is_python_equal,
        handler.var_getattr,
    )

    def type_of(self: Any) -> Any:
        value = _real(self)
        return type(value) if _is_ours(value) else python_type(self)

    def hash_of(self: Any) -> int:
        value = _real(self)
        return hash(value) if _is_ours(value) else get_hash(self)

    def is_equal(self: Any, other: Any) -> bool:
        value = _real(self)
        if not _is_ours(value):
            return equal(self, other)
        return isinstance(other, handler) and bool(value == _real(other))

    def attribute(self: Any, tx: Any, name: str) -> Any:
        value = _real(self)
        if not _is_ours(value):
            return look_up(self, tx, name)
        return _attribute_of(self, tx, value, name, look_up)

    handler.python_type = type_of
    handler.get_python_hash = hash_of
    handler.is_python_equal = is_equal
    handler.var_getattr = attribute
    _mend_class(sys.modules[_TRACER].OpaqueObjectClassVariable)
    _mend_builtins(sys.modules["torch._dynamo.variables.builtin"].BuiltinVariable, handler)


def _attribute_of(variable: Any, tx: Any, value: Any, name: str, look_up: Any) -> Any:
    source = variable.source and sys.modules["torch._dynamo.source"].AttrSource(variable.source, name)
    found = inspect.getattr_static(value, name, _ABSENT)
    if _is_plain(found):
        return _tracker(tx, found)
    if name in _REAL:  # calls of the real object's, with constants
        return look_up(variable, tx, name)
    if isinstance(found, types.FunctionType):
        return sys.modules["torch._dynamo.variables.functions"].UserMethodVariable(found, variable)
    if isinstance(found, (staticmethod, classmethod)):
        return look_up(variable, tx, name)
    if isinstance(found, property):
        return _tracker(tx, found.fget).call_function(tx, [variable], {})
    if found is _ABSENT and not hasattr(value, name):
        sys.modules["torch._dynamo.exc"].raise_observed_exception(AttributeError, tx)
    return _tracker(tx, getattr(value, name), source)


def _mend_class(handler: Any) -> None:
    """A class's functions and what every class has, such as ``__name__``."""
    look_up = handler.var_getattr

    def attribute(self: Any, tx: Any, name: str) -> Any:
        if getattr(type(self.value), MARK, False):
            found = inspect.getattr_static(self.value, name, None)
            if isinstance(found, types.FunctionType):
                return sys.modules["torch._dynamo.variables.functions"].UserFunctionVariable(found)
            if isinstance(getattr(self.value, name, None), str):
                return _tracker(tx, getattr(self.value, name))
        return look_up(self, tx, name)

    handler.var_getattr = attribute


def _mend_builtins(handler: Any, objects: Any) -> None:
    """``callable(q)`` and ``hash(q)``."""
    theirs = handler.call_callable

    def call_callable(self: Any, tx: Any, arg: Any) -> Any:
        return _tracker(tx, True) if isinstance(arg, objects) and _is_ours(_real(arg)) else theirs(self, tx, arg)

    def call_hash(self: Any, tx: Any, arg: Any) -> Any:
        return _tracker(tx, hash(_real(arg))) if isinstance(arg, objects) and _is_ours(_real(arg)) else None

    handler.call_callable = call_callable
    handler.call_hash = call_hash
