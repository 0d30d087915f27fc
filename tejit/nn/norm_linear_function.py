"""The autograd function of a norm and the linear layer behind it: the norm's output exists in quantized form only."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tejit.nn import fused, products
from tejit.nn.products import Plan


class NormPlan(NamedTuple):
    """What a norm does; a constant of a graph.

    Attributes:
        kind: one of ``fused.NORMS``.
        eps: added to the mean square.
        zero_centered_gamma: whether the weight holds ``gamma - 1``.
        dtype: of the output, as the product behind the norm takes it.
        returned: whether the output itself is wanted too, in the input's dtype.
    """

    kind: str
    eps: float
    zero_centered_gamma: bool
    dtype: torch.dtype
    returned: bool


class NormLinear(torch.autograd.Function):
    """Saved for backward are the input, the statistics of its rows and the columnwise quantized operands.

    ``x`` is ``(M, K)``, the norm's weight and bias ``(K,)``, ``weight`` ``(N, K)`` and ``bias`` ``(N,)``; returns
    ``(M, N)`` in the norm's output dtype and, where it is wanted, the norm's output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        norm: NormPlan,
        plan: Plan,
    ) -> Any:
        quantizers = plan.quantizers
        y_quantizer = quantizers.input.needing(True, plan.needs_wgrad)
        w_quantizer = quantizers.weight.needing(True, plan.needs_dgrad)
        y_inner, y, mean, rstd = quantized_norm(x, norm_weight, norm_bias, norm, y_quantizer, quantizers.alignment)
        w_inner = products.quantized(w_quantizer, weight, quantizers.alignment)
        out = products.fprop(plan, y_inner, w_inner, bias, norm.dtype, x.shape[0], weight.shape[0])
        kept_y = y_quantizer.columnwise_inner(y_inner) if plan.needs_wgrad else ()
        kept_w = w_quantizer.columnwise_inner(w_inner) if plan.needs_dgrad else ()
        kept_x = (x, norm_weight, rstd, mean) if plan.needs_dgrad else ()
        ctx.save_for_backward(*kept_y, *kept_w, *kept_x)
        ctx.plan, ctx.norm = plan, norm
        ctx.buffers = (len(kept_y), len(kept_w))
        ctx.dtypes = tuple([None if t is None else t.dtype for t in (norm_weight, norm_bias, weight, bias)])
        ctx.columns = x.shape[1]
        return (out, y) if norm.returned else out

    @staticmethod
    @once_differentiable  # a second derivative would see the quantized operands as constants and be wrong
    def backward(ctx: Any, grad_output: Tensor, grad_norm: Tensor | None = None) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        saved, (y_buffers, w_buffers) = ctx.saved_tensors, ctx.buffers
        y_inner, w_inner = saved[:y_buffers], saved[y_buffers : y_buffers + w_buffers]
        weight_dtype, bias_dtype = ctx.dtypes[2:]
        rows, columns = grad_output.shape
        dx = norm_wgrad = norm_bias_grad = wgrad = bias_grad = None
        if plan.needs_dgrad or plan.needs_wgrad:
            quantizer = plan.quantizers.grad_output.needing(plan.needs_dgrad, plan.needs_wgrad)
            inner = products.quantized(quantizer, grad_output, plan.quantizers.alignment)
            if plan.needs_wgrad:
                wgrad = products.wgrad(plan, inner, y_inner, weight_dtype, columns, ctx.columns)
            if plan.needs_dgrad:
                dgrad = products.dgrad(plan, inner, w_inner, ctx.norm.dtype, rows, ctx.columns)
                kept = saved[y_buffers + w_buffers :]
                dx, norm_wgrad, norm_bias_grad = norm_gradients(dgrad, grad_norm, kept, ctx.norm, ctx.dtypes)
        if bias_dtype is not None and ctx.needs_input_grad[4]:
            bias_grad = grad_output.sum(0).to(bias_dtype)
        return dx, norm_wgrad, norm_bias_grad, wgrad, bias_grad, None, None


def quantized_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: NormPlan, quantizer: Any, multiple: int
) -> tuple[Any, Tensor | None, Tensor | None, Tensor]:
    """The norm's output, quantized and, where it is wanted, as it is in ``x``'s dtype; ``mean`` and ``rstd``."""
    arguments = (x, weight, bias, norm.eps, norm.kind, norm.zero_centered_gamma)
    if not norm.returned:
        inner, mean, rstd = fused.normed(*arguments, quantizer, multiple, norm.dtype)
        return inner, None, mean, rstd
    y, mean, rstd = fused.norm(*arguments)
    low = y if y.dtype == norm.dtype else y.to(norm.dtype)
    return products.quantized(quantizer, low, multiple), y, mean, rstd


def norm_gradients(
    dgrad: Tensor,
    grad_norm: Tensor | None,
    saved: tuple[Any, ...],
    norm: NormPlan,
    dtypes: tuple[torch.dtype | None, ...],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of input, weight and bias of a norm whose output went into a product and, perhaps, out.

    Args:
        dgrad: the product's gradient of its input.
        grad_norm: the gradient of the output that was returned; None where it was not.
        saved: input, weight, ``rstd`` and ``mean``.
        dtypes: of weight and bias, and more.
    """
    if grad_norm is not None:
        dgrad = dgrad.float() + grad_norm.float()
    x, weight, rstd, mean = saved
    dx, wgrad, bias_grad = fused.norm_backward(dgrad, x, weight, mean, rstd, norm.zero_centered_gamma)
    return dx, wgrad.to(dtypes[0]), None if dtypes[1] is None else bias_grad.to(dtypes[1])
