"""The PyTorch APIs that differ between the supported releases (2.11 to 2.14), each behind one name.

Nothing else in the package asks for torch's version.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch._library import opaque_object as _opaque

# 2.14 renamed the metaclass and the registration; its old names still work but log a warning on every
# use, so the new one is tried first.
try:
    from torch._custom_class_base import CustomClassBaseMeta as _OpaqueMeta
except ImportError:
    from torch._opaque_base import OpaqueBaseMeta as _OpaqueMeta

_major, _minor = torch.__version__.split(".")[:2]
TORCH_VERSION = (int(_major), int(_minor))

F = TypeVar("F", bound=Callable[..., Any])


class ValueMeta(_OpaqueMeta, abc.ABCMeta):
    """Metaclass of classes whose instances torch.compile treats as constants.

    torch 2.11 demands its own metaclass for such classes; later releases accept it.
    """


def register_constant_class(cls: type, *, fields: Iterable[str], methods: Iterable[str]) -> None:
    """Tell torch.compile that instances of ``cls`` are constants compared by ``==``.

    ``fields`` and ``methods`` are what code inside a compiled region may use. torch 2.11 wants them
    listed (fields read from the real object, methods inlined); from 2.12 everything is reachable.

    Raises ``TypeError`` or ``RuntimeError`` (torch's own) where torch refuses the class.
    """
    if is_constant_class(cls):
        return
    if hasattr(_opaque, "register_custom_class"):
        _opaque.register_custom_class(cls, typ="constant")
        return
    members = None
    if TORCH_VERSION < (2, 12):
        members = dict.fromkeys(fields, _opaque.MemberType.USE_REAL)
        members.update(dict.fromkeys(methods, _opaque.MemberType.INLINED))
    _opaque.register_opaque_type(cls, typ="value", members=members)


def is_constant_class(cls: type) -> bool:
    """Whether ``cls`` itself was registered with :func:`register_constant_class`."""
    return cls in _opaque._OPAQUE_TYPES


def constant_result(function: F) -> F:
    """Decorator: inside a compiled region the call is made once, while tracing, with its real arguments.

    The same as ``torch.compiler.assume_constant_result``, which would import all of TorchDynamo (over a
    second) just to set this mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


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


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass: there a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1
