"""The PyTorch APIs that differ between the supported releases (2.11 to 2.14), each behind one name.

Nothing else in the package asks for torch's version.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import importlib
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch._functorch import pyfunctorch as _functorch
from torch._library import opaque_object as _opaque
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as _fx_tracing
from torch.fx.proxy import Proxy as _Proxy
from torch.utils import _python_dispatch

from tejit import traced_constants

# Python 3.14 evaluates annotations when they are asked for, and can be asked not to.
try:
    import annotationlib as _annotationlib
except ImportError:
    _annotationlib = None

# 2.14 renamed the metaclass and the registration; its old names still work but log a warning on every
# use, so the new one is tried first.
try:
    from torch._custom_class_base import CustomClassBaseMeta as _OpaqueMeta
except ImportError:
    from torch._opaque_base import OpaqueBaseMeta as _OpaqueMeta

# Asked in every call of a ready layer, where a look-up costs as much as the answer.
_any_autocast = torch._C._is_any_autocast_enabled
_any_transform = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_backward_number = torch._C._current_graph_task_id
_jit_tracing_state = torch._C._get_tracing_state

TORCH_VERSION = traced_constants.TORCH_VERSION

#: torch 2.11 hands the sizes of a subclass that leaves a graph as its strides too, where those are symbolic.
OUTER_STRIDES_ARE_RIGHT = TORCH_VERSION >= (2, 13)

#: From torch 2.12 on an object leaves a graph only if it came in or was made in it, not as a function's constant
#: result; on 2.11 only if it was not made in it.
CONSTANTS_MUST_BE_MADE_TO_LEAVE = TORCH_VERSION >= (2, 12)
#: torch 2.11 and 2.13 cannot take a subclass apart that has memory, and shares it with a tensor inside of it.
INNER_TENSORS_MAY_SHARE = TORCH_VERSION >= (2, 14)

F = TypeVar("F", bound=Callable[..., Any])
NamedTupleT = TypeVar("NamedTupleT", bound=tuple[Any, ...])


class ValueMeta(_OpaqueMeta, abc.ABCMeta):
    """Metaclass of classes whose instances torch.compile treats as constants.

    torch 2.11 demands its own metaclass for such classes; later releases accept it. They are traced by the rules of
    ``traced_constants``.
    """


setattr(ValueMeta, traced_constants.MARK, True)


def register_constant_class(cls: type, *, fields: Iterable[str], methods: Iterable[str]) -> None:
    """Tell torch.compile that instances of ``cls`` are constants compared by ``==``.

    ``fields`` and ``methods`` are what code inside a compiled region may use. torch 2.11 wants them
    listed (fields read from the real object, methods inlined); from 2.12 everything is reachable.

    A class of the same module and name that was registered before (a notebook's cell runs again) gives way.

    Raises ``TypeError`` or ``RuntimeError`` (torch's own) where torch refuses the class.
    """
    if is_constant_class(cls):
        return
    name = f"{cls.__module__}.{cls.__qualname__}"
    if torch._C._is_opaque_type_registered(name):
        torch._C._unregister_opaque_type(name)
    if hasattr(_opaque, "register_custom_class"):
        _opaque.register_custom_class(cls, typ=traced_constants.Kind("constant"))
        return
    members = None
    if TORCH_VERSION < (2, 12):
        members = dict.fromkeys(fields, _opaque.MemberType.USE_REAL)
        members.update(dict.fromkeys((*methods, "__call__"), _opaque.MemberType.INLINED))
        members.update(dict.fromkeys(("__eq__", "__ne__", "__hash__"), _opaque.MemberType.USE_REAL))
    _opaque.register_opaque_type(cls, typ=traced_constants.Kind("value"), members=members)


def is_constant_class(cls: type) -> bool:
    """Whether ``cls`` itself was registered with :func:`register_constant_class`."""
    return cls in _opaque._OPAQUE_TYPES


def own_annotations(cls: type) -> dict[str, Any]:
    """``{name: annotation}`` of the class itself, as far as they are evaluated; forward references stay strings or
    ``ForwardRef``."""
    if _annotationlib is not None:
        return dict(_annotationlib.get_annotations(cls, format=_annotationlib.Format.FORWARDREF))
    return inspect.get_annotations(cls)


def evaluated_annotation(cls: type, hint: Any) -> Any:
    """An annotation of ``cls`` with its forward references looked up in the class's module, and the class itself
    under its name.

    Raises ``NameError`` (or what else the expression raises) where that fails.
    """
    names = {**vars(sys.modules.get(cls.__module__, types)), cls.__name__: cls}
    if isinstance(hint, str):
        return eval(hint, names, dict(vars(cls)))
    text = getattr(hint, "__forward_arg__", None)
    if text is None:
        return hint
    if hasattr(hint, "evaluate"):  # Python 3.14: it knows the scope that it was written in
        return hint.evaluate(globals=names, owner=cls)
    return eval(text, names, dict(vars(cls)))


def define_op(library: torch.library.Library, schema: str) -> None:
    """Define a new op, ``name[.overload]`` and signature, whose outputs its fake describes.

    ``Library.define`` asks first whether the op is there already, and with that makes Python's view of it, which the
    next overload has made again: two thirds of the time that it takes to define all of ours.
    """
    library.m.define(schema, "", (torch.Tag.pt2_compliant_tag,))


def constant_result(function: F) -> F:
    """Decorator: inside a compiled region the call is made once, while tracing, with its real arguments.

    The same as ``torch.compiler.assume_constant_result``, which would import all of TorchDynamo (over a
    second) just to set this mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply(*arguments)``, in eager code without what it does in Python for transforms of functions, a third
    of its time.

    Raises ``NotImplementedError`` under such a transform, for which our functions have no rules.
    """
    if torch.compiler.is_compiling():
        return function.apply(*arguments)
    if _any_transform():
        raise NotImplementedError(
            "gradients of a module that quantizes cannot be taken inside torch.func (grad, vmap, jvp, ...): call"
            " backward(), or leave this call out of tejit.autocast"
        )
    return direct_apply(function)(*arguments)


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for eager code outside of transforms of functions."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return apply


def replaced(value: NamedTupleT, **changes: Any) -> NamedTupleT:
    """A named tuple with other values in some fields: ``value._replace(**changes)``.

    Where a graph broke, TorchDynamo of torch 2.11 traces a part of that by itself, uses up the iterator which it was
    called with, and an empty tuple comes out.
    """
    fields: Any = value
    return type(value)(**{name: changes.get(name, old) for name, old in zip(fields._fields, fields, strict=True)})


def bound(op: Any) -> Callable[..., Any]:
    """What calling an op's overload calls, for eager code: without a Python function between, where torch lets it."""
    return getattr(op, "_op", op)


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether forward-mode differentiation is after one of these. In a graph that is inside several transforms of
    functions the answer is yes for all: only the innermost one would tell."""
    if torch.compiler.is_compiling():
        levels = _levels_around_forward_mode()
        if levels != 1:
            return levels > 1
        return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
    if forward_ad._current_level < 0:
        return False
    return any(tensor is not None and _is_dual(tensor) for tensor in tensors)


@constant_result
def _levels_around_forward_mode() -> int:
    """0 where the code that is traced is not inside forward-mode differentiation, else how many transforms it is in.
    Torch guards these, so a graph may keep the answer."""
    if forward_ad._current_level < 0:
        return 0
    return max(1, len(torch._C._functorch.get_interpreter_stack() or ()))


def _is_dual(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a tangent at any level of nested transforms of functions (``grad`` or ``vmap`` in ``jvp``).

    Each level wraps the tensors of the one outside it, and torch answers for the innermost one only.
    """
    level = torch._C._functorch.peek_interpreter_stack()
    if level is None:
        return forward_ad.unpack_dual(tensor).tangent is not None
    if level.key() == torch._C._functorch.TransformType.Jvp and forward_ad.unpack_dual(tensor).tangent is not None:
        return True
    with _functorch.temporarily_pop_interpreter_stack():
        if torch._C._functorch.maybe_get_level(tensor) == level.level():
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return _is_dual(tensor)


def refuse_tangents(*tensors: torch.Tensor | None) -> None:
    """Raises ``NotImplementedError`` where forward-mode differentiation is after one of the tensors that go into a
    quantized function, which has no rule for it. Where no gradient is to be computed nothing else would notice."""
    if has_tangent(*tensors):
        raise NotImplementedError(
            "forward-mode differentiation (torch.func.jvp, forward_ad) does not go through quantizers and quantized"
            " products: the tangent would be lost. Leave this call out of tejit.autocast, or quantize what"
            " is not differentiated"
        )


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """No garbage collection inside. An import makes many objects that stay, and each collection on the way looks at
    all of torch's: a tenth of the time that importing this package takes.

    Afterwards they count as old, so that the next collection of young ones does not go through all of them either.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if gc.get_freeze_count() == 0:  # else somebody has frozen theirs, which are to stay so
                gc.freeze()
                gc.unfreeze()  # to the oldest generation
            gc.enable()


def late_names(package: str, places: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__`` for names whose modules are loaded when somebody asks:
    ``{name: module}``. Every process pays for an import of the package, few use all of its names. The package's own
    modules are its attributes too, as if they had been loaded."""

    def getattr_(name: str) -> Any:
        if name in places:
            value = getattr(importlib.import_module(places[name]), name)
        elif not name.startswith("_") and name.isidentifier() and importlib.util.find_spec(f"{package}.{name}"):
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        modules = [module.rpartition(".") for module in places.values()]
        return sorted({*vars(sys.modules[package]), *places, *(last for above, _, last in modules if above == package)})

    return getattr_, dir_


@constant_result  # guarded by torch: a graph is made anew where somebody chooses another device
def default_device() -> torch.device | None:
    """The device chosen by ``torch.set_default_device`` or ``with torch.device(...)``, None where none was."""
    device = torch.get_default_device()
    return device if device.type != "cpu" or _device_was_chosen() else None


@constant_result
def _device_was_chosen() -> bool:
    """Whether somebody chose cpu, rather than nobody anything."""
    import torch.overrides
    from torch.utils._device import DeviceContext

    if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None:
        return True
    return any(isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack())


def autocast_enabled(kind: str) -> bool:
    """Whether ``torch.autocast`` is on for devices of a kind; False for kinds it does not know (meta)."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def plainly_eager() -> bool:
    """Whether nothing of torch's changes what a call means: no ``torch.autocast`` for any kind of device, no backward
    pass that this thread runs inside, no forward-mode differentiation, no transform of functions, no dispatch mode, no
    ``torch.jit.trace``."""
    return (
        forward_ad._current_level < 0
        and _backward_number() == -1
        and not _any_autocast()
        and not _any_transform()
        and _dispatch_modes() == 0
        and _jit_tracing_state() is None
    )


def in_mode_or_transform() -> bool:
    """Whether a dispatch mode (``FakeTensorMode``) or a transform of functions changes what tensors are here."""
    return _dispatch_modes() > 0 or _any_transform()


def is_batched(x: torch.Tensor) -> bool:
    """Whether ``torch.func.vmap`` shows one example of this tensor, which holds all."""
    functorch = torch._C._functorch
    return _any_transform() and functorch.is_batchedtensor(x)


def in_selective_checkpoint() -> bool:
    """Whether this thread runs a region under selective activation checkpointing, its forward or its recomputation,
    and nothing else that sees each operation."""
    if _dispatch_modes() == 0:
        return False
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    checkpointing = torch.utils.checkpoint
    kinds = (checkpointing._CachingTorchDispatchMode, checkpointing._CachedTorchDispatchMode)
    others = (getattr(mode, "_mode_key", None) for mode in modes)
    return any(isinstance(mode, kinds) for mode in modes) and all(key is None for key in others)


def without_dispatch_modes() -> contextlib.AbstractContextManager[object]:
    """Context in which no dispatch mode sees the operations."""
    return _python_dispatch._disable_current_modes()


def jit_is_tracing() -> bool:
    """Whether this thread runs inside ``torch.jit.trace``, which records operations of C++ and none of Python."""
    return _jit_tracing_state() is not None


def is_proxy(value: Any) -> bool:
    """Whether this stands for a value that a tracer of ``torch.fx`` follows."""
    return isinstance(value, _Proxy)


def fx_is_tracing() -> bool:
    """Whether a tracer of ``torch.fx`` may be at work; until torch 2.13 one of another thread counts too."""
    if hasattr(_fx_tracing, "_get_is_fx_tracing"):  # torch's public question logs a warning
        return _fx_tracing._get_is_fx_tracing()
    return _fx_tracing._is_fx_tracing_flag


def symbolic_tracer() -> Any:
    """The tracer of ``torch.fx`` that follows what this thread calls; None where there is none, or where it records the
    operations that reach the dispatcher (``make_fx``, ``torch.export``), which loses nothing."""
    if not fx_is_tracing():
        return None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        # Known by its place and name: TorchDynamo puts a function of its own around it.
        if frame.f_code.co_name == "trace" and frame.f_globals is vars(_fx_tracing):
            tracer = frame.f_locals.get("self")
            below = sys.modules.get("torch.fx.experimental.proxy_tensor")
            return None if below is not None and isinstance(tracer, below.PythonKeyTracer) else tracer
        frame = frame.f_back
    return None


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass: there a forward is a recomputation."""
    return backward_number() != -1


def backward_number() -> int:
    """The number of the backward pass that this thread runs inside; a backward inside a backward (reentrant
    activation checkpointing) has a number of its own. -1 outside."""
    return _backward_number()


def after_backward(callback: Callable[[], object]) -> None:
    """Have ``callback`` called at the end of the backward pass that this thread runs inside; never, if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_recomputed_region() -> bool:
    """Whether this thread runs the first forward of a region that an ``autograd.Function`` runs without gradients and
    whose backward computes it again: reentrant activation checkpointing, torch's and that of others.

    Only the stack tells it from an evaluation: there is the context of a function that will have a backward. One none
    of whose inputs requires a gradient, or that is called where gradients are off, has none and is an evaluation.
    """
    if not in_function_forward():
        return False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # Until Python 3.13 looking at a frame's variables holds what they are, so only where a context may be.
        if code.co_name == "forward" and code.co_argcount > 0 and code.co_varnames[0] != "self":
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, torch.autograd.function.BackwardCFunction) and context.next_functions:
                return True
        frame = frame.f_back
    return False


def in_function_forward() -> bool:
    """Whether the code may run inside the forward of an ``autograd.Function`` (reentrant activation checkpointing is
    one), which makes what it returns its own: of a parameter returned as it is, torch replaces the history by the
    function's, or takes ``requires_grad`` away where no input requires grad. In a graph without gradients always."""
    if torch.is_grad_enabled():
        return False
    return torch.compiler.is_compiling() or not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


@constant_result  # in a graph: once, while it is traced
def warn(text: str) -> None:
    """``UserWarning`` that points to the line of the user's, however deep in tejit or torch it comes from: to the first
    frame outside of both. (``warnings.warn`` can skip files since Python 3.12.)"""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("tejit", "torch"):
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry)
