"""Where a weight's gradient goes: returned to autograd, added into ``main_grad``, or put off until ``backward_dw``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tejit import compat
from tejit.nn import asked, products, weights
from tejit.nn.products import GradOutput, Plan, State
from tejit.tensor.quantizer import Inner


class Late:
    """What eager backward does beside computing a weight's gradient; a graph has none.

    Args:
        weight: the parameter.
        queue: where gradients are put off to; None computes them in backward.
    """

    def __init__(self, weight: Tensor, queue: deque[PutOff] | None) -> None:
        self.weight = weight
        self.queue = queue


class PutOff:
    """A weight's gradient that is still to be added where it belongs.

    Args:
        weight: the parameter.
        main_grad: what it goes into, or None.
        accumulate: whether it is added to ``main_grad``, rather than overwriting it.
        dtype: of the gradient without ``main_grad``.
        wgrad: computes it in a dtype, from operands that it holds until then.

    ``backward`` is the number of the backward pass that put it off.
    """

    def __init__(
        self,
        weight: Tensor,
        main_grad: Tensor | None,
        accumulate: bool,
        dtype: torch.dtype,
        wgrad: Callable[[torch.dtype], Tensor],
    ) -> None:
        self.weight = weight
        self.main_grad = main_grad
        self.accumulate = accumulate
        self.dtype = dtype
        self.wgrad = wgrad
        self.backward = compat.backward_number()

    def compute(self) -> None:
        """Compute it and add it to ``main_grad`` or to ``weight.grad``."""
        with torch.no_grad():
            wgrad = self.wgrad(self.dtype if self.main_grad is None else self.main_grad.dtype)
            if self.main_grad is not None:
                _add(self.main_grad, wgrad, self.accumulate)
                mark(self.weight)
            elif self.weight.grad is None:
                self.weight.grad = wgrad.to(self.weight.dtype)
            else:
                self.weight.grad.add_(wgrad)


def main_grad_of(weight: Any, name: str) -> Tensor:
    """The tensor into which a weight's gradient is accumulated: what ``get_main_grad()`` of a parameter that is
    marked ``__fsdp_param__`` returns, else ``main_grad``.

    Raises ``RuntimeError`` where there is none or its shape or device is not the weight's.
    """
    if hasattr(weight, "__fsdp_param__") and hasattr(weight, "get_main_grad"):
        main_grad = weight.get_main_grad()
    else:
        main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            f"fuse_wgrad_accumulation=True needs {name}.main_grad, a tensor of the weight's shape in float32 or the"
            " weight's dtype, before forward; attach one, or use fuse_wgrad_accumulation=False"
        )
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise RuntimeError(
            f"{name}.main_grad has shape {tuple(main_grad.shape)} on {main_grad.device}, and the weight has shape"
            f" {tuple(weight.shape)} on {weight.device}; they must be alike"
        )
    return main_grad


def accumulates(weight: Any, is_first_microbatch: bool | None) -> bool:
    """Whether a gradient is added to ``main_grad``: not in the first microbatch, whose gradient overwrites it, and
    never where ``overwrite_main_grad`` is set on the weight."""
    return not is_first_microbatch and not getattr(weight, "overwrite_main_grad", False)


def mark(weight: Any) -> None:
    """Tell whoever set ``grad_added_to_main_grad`` on the weight that the gradient is in ``main_grad``."""
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True


def weight_gradient(
    plan: Plan,
    main_grad: Tensor | None,
    late: Late | None,
    grad: GradOutput,
    x_inner: Inner,
    dtype: torch.dtype,
    rows: int,
    columns: int,
) -> Tensor | None:
    """What backward returns for the weight: its ``(rows, columns)`` gradient in ``dtype``, or None where that went
    elsewhere. A weight with the attribute ``grad_added_to_main_grad``, by which somebody waits for its hooks, gets a
    gradient whose values mean nothing (zeros where ``zero_out_wgrad`` is set on it)."""
    if late is not None and late.queue is not None:

        def wgrad(wanted: torch.dtype) -> Tensor:
            return products.wgrad(plan, grad, x_inner, wanted, rows, columns)

        late.queue.append(PutOff(late.weight, main_grad, plan.accumulate, dtype, wgrad))
        return None
    if main_grad is None:
        return products.wgrad(plan, grad, x_inner, dtype, rows, columns)
    _add(main_grad, products.wgrad(plan, grad, x_inner, main_grad.dtype, rows, columns), plan.accumulate)
    return _in_its_place(late, (rows, columns), dtype, main_grad.device)


def narrowed(plan: Plan, dgrad: int, wgrad: int) -> Plan:
    """The plan of a backward that is asked (``asked.of``) for these gradients at most."""
    if (dgrad or not plan.needs_dgrad) and (wgrad or not plan.needs_wgrad):
        return plan
    return compat.replaced(plan, needs_dgrad=plan.needs_dgrad and dgrad > 0, needs_wgrad=plan.needs_wgrad and wgrad > 0)


def as_asked(
    ctx: Any,
    arguments: Sequence[Any],
    weight: int,
    needed: Sequence[int],
    dgrad: int,
    plan: Plan,
    main_grad: Tensor | None,
    late: Late | None,
) -> tuple[Plan, Tensor | None, Late | None]:
    """What the backward that runs makes of a product's plan, and of where the weight's gradient goes.

    A backward that does not ask for the weight leaves ``main_grad`` and the queue alone; so does one that returns the
    gradient to whoever called ``torch.autograd.grad``.

    Args:
        ctx, arguments: of the autograd function, as in ``asked.of``.
        weight: the weight's place among ``arguments``.
        needed: what ``asked.of`` found.
        dgrad: whether the product's input needs a gradient.
        plan, main_grad, late: as in :func:`weight_gradient`.
    """
    if torch.compiler.is_compiling():
        return plan, main_grad, late
    plan = narrowed(plan, dgrad, needed[weight])
    if late is not None and plan.needs_wgrad and asked.returned(ctx, arguments, weight):
        main_grad = late = None
    return plan, main_grad, late


def product_gradients(
    plan: Plan,
    main_grad: Tensor | None,
    late: Late | None,
    state: State,
    grad_output: Tensor,
    kept_x: Inner,
    kept_w: Inner,
    features: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a product's input, ``(rows, features)`` in ``dtype``, and weight, as far as they are needed."""
    rows, columns = grad_output.shape
    dgrad = wgrad = None
    if plan.needs_dgrad or plan.needs_wgrad:
        grad = products.grad_inner(plan, grad_output, state)
        if plan.needs_dgrad:
            w_inner = weights.for_dgrad(plan, kept_w, columns, features, dtype)
            dgrad = products.dgrad(plan, grad, w_inner, dtype, rows, features)
        if plan.needs_wgrad:
            x_inner = products.input_for_wgrad(plan, kept_x, rows, features, dtype)
            wgrad = weight_gradient(plan, main_grad, late, grad, x_inner, weight_dtype, columns, features)
    return dgrad, wgrad


def sent(weight: Tensor, main_grad: Tensor | None, late: Late | None, accumulate: bool) -> Tensor:
    """A weight for a product of torch's own, whose gradient goes where :func:`weight_gradient` would send it."""
    return _Sent.apply(weight, main_grad, late, accumulate)


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor | None, late: Late | None, accumulate: bool) -> Tensor:
        ctx.call = (main_grad, late, accumulate)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling():
            if asked.returned(ctx, ("weight",), 0):
                return grad, None, None, None
            if torch.is_grad_enabled():
                raise NotImplementedError(
                    "a backward with create_graph=True reached a weight whose gradient goes into main_grad or is put"
                    " off until backward_dw, where no second derivative follows it: use torch.autograd.grad, a backward"
                    " that does not ask for this weight (inputs=...), or a module without fuse_wgrad_accumulation and"
                    " delay_wgrad_compute"
                )
        main_grad, late, accumulate = ctx.call
        if late is not None and late.queue is not None:
            late.queue.append(PutOff(late.weight, main_grad, accumulate, grad.dtype, grad.to))
            return None, None, None, None
        _add(main_grad, grad, accumulate)
        return _in_its_place(late, tuple(grad.shape), grad.dtype, grad.device), None, None, None


def _in_its_place(late: Late | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What autograd gets for a gradient that went into ``main_grad``."""
    if late is None or not hasattr(late.weight, "grad_added_to_main_grad"):
        return None
    mark(late.weight)
    # Deterministic algorithms fill what torch.empty gives with NaN, or let it be what it happens to be.
    zeros = getattr(late.weight, "zero_out_wgrad", False) or torch.are_deterministic_algorithms_enabled()
    return (torch.zeros if zeros else torch.empty)(shape, dtype=dtype, device=device)


def _add(main_grad: Tensor, wgrad: Tensor, accumulate: bool) -> None:
    if torch.compiler.is_compiling():  # the graph's backward is one, whatever it is asked for
        wanted = asked.main_grad_is_asked(main_grad, wgrad)
        main_grad.copy_(torch.where(wanted, main_grad + wgrad if accumulate else wgrad, main_grad))
    elif accumulate:
        main_grad.add_(wgrad)
    else:
        main_grad.copy_(wgrad)
