"""Inputs of modules that are no plain tensors: what a tracer follows, and nested tensors.

A tracer sees a module of tejit's as one call, which quantizes or not when it runs. Of a jagged nested tensor the values
are multiplied, which are those of all its parts one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tejit import compat, refusals

#: What :func:`other_forward` returns for an input that has no other forward.
PLAIN: Any = object()

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_WAY_OUT = (
    "have the tracer take it for a leaf (a torch.fx.Tracer whose is_leaf_module returns True for it), or use"
    " torch.compile or torch.export"
)


def other_forward(
    forward: Callable[..., Any],
    module: nn.Module,
    x: Any,
    *arguments: Any,
    quantizes: bool = True,
    through: bool = False,
    **keywords: Any,
) -> Any:
    """What a module's forward returns for an input ``x`` that takes another way, else :data:`PLAIN`.

    - A proxy of a tracer (``torch.fx``): a proxy of a call of the module, as of torch's own modules.
    - A jagged nested tensor, for modules that quantize: ``forward`` of its values, put together again. One with gaps
      between its parts, whose values there would count, or with ragged features is left to torch.

    Args:
        forward: the class's own forward, which calls this.
        module: the module.
        x, arguments, keywords: what ``forward`` was called with.
        quantizes: whether the class itself multiplies quantized operands.
        through: whether a tracer that cannot record the call may as well trace through the module.

    Raises:
        RuntimeError: a tracer is at work that cannot record the call; ``torch.jit.trace``, where it ``quantizes``.
    """
    if torch.compiler.is_compiling():
        return _of_nested(forward, module, x, arguments, keywords) if quantizes and x.is_nested else PLAIN
    if type(x) is Tensor and x.layout is torch.strided and not (compat.jit_is_tracing() or compat.fx_is_tracing()):
        return PLAIN
    traced = _proxy(module, (x, *arguments, *keywords.values()))
    if traced is not None:
        try:
            return _recorded(forward, module, traced, (x, *arguments), keywords)
        except _NotRecorded as error:
            if through:
                return PLAIN
            raise RuntimeError(str(error)) from None
    if quantizes and compat.jit_is_tracing():
        _refuse_jit(f"tejit.{forward.__qualname__.partition('.')[0]}")
    if quantizes and isinstance(x, Tensor) and x.layout is torch.jagged:
        return _of_nested(forward, module, x, arguments, keywords)
    return PLAIN


# -- torch.fx -----------------------------------------------------------------------------------------------
class _NotRecorded(Exception):
    """A tracer cannot record a call; the text says why, and what to do."""


class Whole:
    """Mixin of tejit's modules: ``torch.jit.script``, which would compile their Python, refuses them by name."""

    def __prepare_scriptable__(self) -> NoReturn:
        _refuse_jit(f"a {type(self).__name__}")


def _refuse_jit(what: str) -> NoReturn:
    refusals.refuse_jit(
        f"{what}, which quantizes or not by what tejit.autocast says when it is called; tejit.convert(model,"
        ' recipe="none") turns modules back into torch\'s own'
    )


def _proxy(module: nn.Module, given: tuple[Any, ...]) -> Any:
    """The argument, or the parameter, that a tracer follows; None where there is none."""
    for value in given:
        if compat.is_proxy(value):
            return value
    if not compat.fx_is_tracing():
        return None
    # Of an input that is a constant to the tracer the parameters are what it follows.
    parameters = (getattr(module, name) for name in module._parameters)
    return next((parameter for parameter in parameters if compat.is_proxy(parameter)), None)


def _recorded(
    forward: Callable[..., Any],
    module: nn.Module,
    traced: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """A proxy of the call ``module(*arguments, **keywords)``."""
    while arguments and arguments[-1] is None:
        arguments = arguments[:-1]
    given = {name: value for name, value in keywords.items() if value is not None}
    path = _path(forward, module, traced.tracer)
    return traced.tracer.create_proxy("call_module", path, arguments, given)


def _path(forward: Callable[..., Any], module: nn.Module, tracer: Any) -> str:
    """The name by which a graph calls the module.

    Raises :class:`_NotRecorded` where a call would do more than what was called here, or the graph has no name for it.
    """
    what = type(module).__name__
    if "forward" in vars(module) or type(module).forward is not forward:
        raise _NotRecorded(
            f"torch.fx traces a {what} that does more than {forward.__qualname__}, which a graph calls as a whole: "
            + _WAY_OUT
        )
    if any(vars(module).get(hooks) for hooks in _HOOKS) or torch_module._has_any_global_hook():
        raise _NotRecorded(
            f"torch.fx traces a {what} with hooks, which the tracer has run already and the graph's call of the module"
            f" would run again: {_WAY_OUT}; or trace first and register the hooks afterwards"
        )
    try:
        path = tracer.path_of_module(module)
    except (AttributeError, NameError):
        raise _NotRecorded(
            f"torch.fx traces a {what} that is no submodule of what is traced, so that the graph could not call it."
            " Make it one, or use torch.compile or torch.export"
        ) from None
    if not path:
        raise _NotRecorded(
            f"torch.fx traces a {what} by itself, of which a graph can only be a caller: trace"
            f" torch.nn.Sequential(module), or use torch.compile or torch.export"
        )
    return str(path)


# -- nested tensors -----------------------------------------------------------------------------------------
def _of_nested(
    forward: Callable[..., Any], module: nn.Module, x: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    if x._lengths is not None or x._ragged_idx == x.dim() - 1:
        return PLAIN
    values = x.values()
    found = forward(module, values, *arguments, **keywords)

    def nested(value: Any) -> Any:
        # A bias comes as it is: it has one dimension, and values have two or more.
        if not isinstance(value, Tensor) or value.dim() != values.dim():
            return value
        return nested_like(x, value)

    return tuple([nested(value) for value in found]) if isinstance(found, tuple) else nested(found)


def nested_like(x: Any, values: Tensor) -> Any:
    """The nested tensor of ``values`` whose parts lie as those of the jagged ``x`` do."""
    return torch.nested.nested_tensor_from_jagged(
        values, x.offsets(), jagged_dim=x._ragged_idx, min_seqlen=x._maybe_min_seqlen, max_seqlen=x._maybe_max_seqlen
    )
