"""Where a weight's gradient goes: returned to autograd, added into ``main_grad``, or put off until ``backward_dw``."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from tejit import compat
from tejit.nn import products
from tejit.nn.products import Plan
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
    """A weight's gradient that is still to be computed, from operands that are held until then.

    ``backward`` is the number of the backward pass that put it off.
    """

    def __init__(self, weight: Tensor, main_grad: Tensor | None, arguments: tuple[Any, ...]) -> None:
        self.weight = weight
        self.main_grad = main_grad
        self.arguments = arguments
        self.backward = compat.backward_number()

    def compute(self) -> None:
        """Compute it and add it to ``main_grad`` or to ``weight.grad``."""
        with torch.no_grad():
            plan, g_inner, x_inner, dtype, rows, columns = self.arguments
            wanted = dtype if self.main_grad is None else self.main_grad.dtype
            wgrad = products.wgrad(plan, g_inner, x_inner, wanted, rows, columns)
            if self.main_grad is not None:
                _add(self.main_grad, wgrad, plan.accumulate)
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
    g_inner: Inner,
    x_inner: Inner,
    dtype: torch.dtype,
    rows: int,
    columns: int,
) -> Tensor | None:
    """What backward returns for the weight: its ``(rows, columns)`` gradient in ``dtype``, or None where that went
    elsewhere. A weight with the attribute ``grad_added_to_main_grad``, by which somebody waits for its hooks, gets a
    gradient whose values mean nothing (zeros where ``zero_out_wgrad`` is set on it)."""
    if late is not None and late.queue is not None:
        late.queue.append(PutOff(late.weight, main_grad, (plan, g_inner, x_inner, dtype, rows, columns)))
        return None
    if main_grad is None:
        return products.wgrad(plan, g_inner, x_inner, dtype, rows, columns)
    _add(main_grad, products.wgrad(plan, g_inner, x_inner, main_grad.dtype, rows, columns), plan.accumulate)
    if late is None or not hasattr(late.weight, "grad_added_to_main_grad"):
        return None
    mark(late.weight)
    make = torch.zeros if getattr(late.weight, "zero_out_wgrad", False) else torch.empty
    return make((rows, columns), dtype=dtype, device=main_grad.device)


def _add(main_grad: Tensor, wgrad: Tensor, accumulate: bool) -> None:
    if accumulate:
        main_grad.add_(wgrad)
    else:
        main_grad.copy_(wgrad)
