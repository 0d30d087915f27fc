"""What a backward of a quantized product is asked for: first derivatives only, and the gradients of which inputs.

``ctx.needs_input_grad`` says which inputs required a gradient in forward, whatever this backward was called for
(``backward(inputs=[x])``, ``torch.autograd.grad(y, x)``). Only the engine knows, and it answers by nodes.

A graph's backward computes all gradients and runs as one node. What it must know at run time it asks by two ops:
whether it is to be differentiated again, and whether a weight's gradient is to be added into ``main_grad``.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from tejit import compat
from tejit.kernels.library import register_fake

F = TypeVar("F", bound=Callable[..., Any])

#: Answers of :func:`of`. A gradient is accumulated (``backward``) or handed to the caller (``torch.autograd.grad``).
NO, ACCUMULATED, RETURNED = 0, 1, 2

#: A weight is behind its cast, its transposition, its dequantization, but not behind a whole model.
_STEPS_TO_A_PARAMETER = 4

_library = torch.library.Library("tejit", "FRAGMENT")
_will_execute = torch._C._will_engine_execute_node
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


# -- first derivatives only -------------------------------------------------------------------------------------
def first_derivative_only(backward: F) -> F:
    """Decorator of a ``backward``: raises ``NotImplementedError`` where autograd records it to differentiate it again.

    ``torch.autograd.function.once_differentiable`` complains only where a ``grad_output`` requires grad: that of
    ``y.sum()`` does not, and all that depends on quantized operands would be a constant.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise _second_derivative()
        return backward(ctx, *grads)

    return cast(F, checked)


def _second_derivative() -> NotImplementedError:
    return NotImplementedError(
        "a backward with create_graph=True reached a quantized module, which has a first derivative only: autograd"
        " takes quantized operands for constants, so second derivatives (a gradient penalty, a Hessian, hvp,"
        " torch.autograd.functional.jvp) would be wrong. Leave this call out of tejit.autocast, or make it under"
        " tejit.autocast(enabled=False)"
    )


# -- which gradients --------------------------------------------------------------------------------------------
def of(ctx: Any, arguments: Sequence[Any]) -> Sequence[int]:
    """For each of an autograd function's first arguments, whether the backward that runs asks for its gradient.

    ``arguments`` has None for those that are no tensors. In a graph ``ctx.needs_input_grad``: its backward computes
    what may be asked for.
    """
    if torch.compiler.is_compiling():
        needs: Sequence[int] = ctx.needs_input_grad
        return needs
    edges, found, tensors = ctx.next_functions, [], 0
    for argument in arguments:
        if argument is None:
            found.append(NO)
        else:
            found.append(_asked(edges[tensors][0]))
            tensors += 1
    return found


def _asked(node: Any) -> int:
    if node is None:
        return NO
    try:
        return ACCUMULATED if _will_execute(node) else NO
    except RuntimeError:
        # The node of a leaf that torch.autograd.grad was called for; or no backward runs, and somebody calls ours.
        return RETURNED if compat.in_backward() else ACCUMULATED


def returned(ctx: Any, arguments: Sequence[Any], place: int) -> bool:
    """Whether the gradient of ``arguments[place]``, which this backward asks for, is for ``torch.autograd.grad`` to
    return. Where the argument was made of a parameter in the call (cast, transposed), the parameter says it."""
    node = ctx.next_functions[sum([argument is not None for argument in arguments[:place]])][0]
    for _ in range(_STEPS_TO_A_PARAMETER):
        edges = node.next_functions
        if len(edges) != 1 or edges[0][0] is None:
            break
        node = edges[0][0]
    return _asked(node) == RETURNED


# -- in a graph -------------------------------------------------------------------------------------------------
class _Anchors:
    """One tensor for each device: float32 ``(0,)`` that requires a gradient, under the device's name."""


_anchors = _Anchors()


def anchor(device: torch.device) -> Tensor | None:
    """An input for a graph, on whose gradient hangs the op that refuses second derivatives; None for
    ``torch.export``, whose program has no backward of its own."""
    name = _anchor_name(device)
    return None if name is None else getattr(_anchors, name)


@compat.constant_result
def _anchor_name(device: torch.device) -> str | None:
    if torch.compiler.is_exporting():  # not where it is traced: torch 2.11 answers yes there to whoever asks
        return None
    name = f"{device.type}_{0 if device.index is None else device.index}"
    if not hasattr(_anchors, name):
        with torch.inference_mode(False):
            setattr(_anchors, name, torch.zeros(0, dtype=torch.float32, device=device, requires_grad=True))
    return name


def anchor_grad(anchor: Tensor, grad_output: Tensor) -> Tensor:
    """The gradient of an anchor: nothing, of an op that raises where the graph's backward is to be differentiated."""
    # Depends on grad_output, so that the op is part of backward, and not on its values, which need not be in memory.
    return torch.ops.tejit.first_derivative_only.default(grad_output[:0], anchor)


def _first_derivative_only(grad_output: Tensor, anchor: Tensor) -> Tensor:
    if torch.is_grad_enabled() or (_keeps_graph() and _in_double_backward()):
        raise _second_derivative()
    written = getattr(anchor, "gradient_written", None)
    if written is not None and compat.in_backward():
        written()
    return torch.empty(anchor.shape, dtype=anchor.dtype, device=anchor.device)


def _in_double_backward() -> bool:
    """Whether AOTAutograd runs a backward as the forward of another function, where gradients are off: that is how it
    refuses a second derivative, once somebody asks for one."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_double_backward":
            return True
        frame = frame.f_back
    return False


def main_grad_is_asked(main_grad: Tensor, wgrad: Tensor) -> Tensor:
    """Bool ``()``, found when the graph's backward runs: whether it is asked for the gradient of the parameter with
    this ``main_grad``, to accumulate it. True where no parameter of the graph has it."""
    return torch.ops.tejit.main_grad_is_asked.default(main_grad, wgrad[:0])


def _main_grad_is_asked(main_grad: Tensor, wgrad: Tensor) -> Tensor:
    node = torch._C._current_autograd_node()
    asked = True
    for edge, _ in () if node is None else node.next_functions:
        parameter = getattr(edge, "variable", None)
        if parameter is not None and _has_main_grad(parameter, main_grad):
            asked = _asked(edge) == ACCUMULATED
            break
    return torch.full((), asked, dtype=torch.bool, device=main_grad.device)


def _has_main_grad(parameter: Any, main_grad: Tensor) -> bool:
    own = getattr(parameter, "main_grad", None)
    if own is None and hasattr(parameter, "__fsdp_param__") and hasattr(parameter, "get_main_grad"):
        own = parameter.get_main_grad()
    return own is not None and own.data_ptr() == main_grad.data_ptr() and own.shape == main_grad.shape


def _define(name: str, signature: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An op that no derivative goes through."""
    compat.define_op(_library, f"{name}{signature}")
    op = getattr(torch.ops.tejit, name).default

    def below_autograd(keyset: Any, *arguments: Any) -> Any:
        # In the caller's grad mode: the implementation asks for it.
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    _library.impl(name, below_autograd, "Autograd", with_keyset=True)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    register_fake(f"tejit::{name}", fake, _library)


_define(
    "first_derivative_only",
    "(Tensor grad_output, Tensor anchor) -> Tensor",
    _first_derivative_only,
    lambda grad_output, anchor: torch.empty(anchor.shape, dtype=anchor.dtype, device=anchor.device),
)
_define(
    "main_grad_is_asked",
    "(Tensor main_grad, Tensor wgrad) -> Tensor",
    _main_grad_is_asked,
    lambda main_grad, wgrad: torch.empty((), dtype=torch.bool, device=main_grad.device),
)
