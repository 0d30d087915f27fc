"""The autograd function of a quantized linear layer: eager and compiled code take this one path."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tejit.nn import products
from tejit.nn.products import GRAD_OUTPUT, INPUT, NO_STATE, WEIGHT, Plan, State
from tejit.recipe import DelayedState, LinearQuantizers, current_group


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    quantizers: LinearQuantizers,
    state: State = NO_STATE,
    delayed: DelayedState | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` with quantized operands, forward and backward.

    Args:
        x: ``(..., K)`` in float32, bfloat16 or float16.
        weight: ``(N, K)``, the dtype of ``x``.
        bias: ``(N,)`` or None.
        quantizers: how the operands of the three GEMMs are quantized.
        state, delayed: the module's state of delayed scaling, and whom an eager backward tells that it wrote to it.

    Returns:
        ``(..., N)`` of ``x``'s dtype.
    """
    grad = torch.is_grad_enabled()
    plan = Plan(
        quantizers,
        grad and x.requires_grad,
        grad and weight.requires_grad,
        group=current_group(),
        delayed=delayed,
    )
    if not (plan.needs_dgrad or plan.needs_wgrad):
        state = state._replace(anchor=None)  # it would make the output require a gradient
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = _Linear.apply(flat, weight, bias, plan, *state)
    return out.reshape(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """Saved for backward are the columnwise (transposed) quantized operands, never the high-precision input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, *tensors: Tensor | None
    ) -> Tensor:
        quantizers, state = plan.quantizers, State(*tensors)
        x_quantizer = quantizers.input.needing(True, plan.needs_wgrad)
        w_quantizer = quantizers.weight.needing(True, plan.needs_dgrad)
        x_inner = products.quantized(x_quantizer, x, quantizers.alignment, plan, state, INPUT)
        w_inner = products.quantized(w_quantizer, weight, quantizers.alignment, plan, state, WEIGHT)
        out = products.fprop(plan, x_inner, w_inner, bias, x.dtype, x.shape[0], weight.shape[0])
        kept_x = x_quantizer.columnwise_inner(x_inner) if plan.needs_wgrad else ()
        kept_w = w_quantizer.columnwise_inner(w_inner) if plan.needs_dgrad else ()
        ctx.save_for_backward(*kept_x, *kept_w)
        ctx.plan = plan
        ctx.state = state
        ctx.x_buffers = len(kept_x)
        ctx.has_bias = bias is not None
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.columns = x.shape[1]
        return out

    @staticmethod
    @once_differentiable  # a second derivative would see the quantized operands as constants and be wrong
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        saved = ctx.saved_tensors
        x_inner, w_inner = saved[: ctx.x_buffers], saved[ctx.x_buffers :]
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        rows, columns = grad_output.shape
        dgrad = wgrad = bias_grad = None
        if plan.needs_dgrad or plan.needs_wgrad:
            quantizer = plan.quantizers.grad_output.needing(plan.needs_dgrad, plan.needs_wgrad)
            alignment = plan.quantizers.alignment
            inner = products.quantized(quantizer, grad_output, alignment, plan, ctx.state, GRAD_OUTPUT)
            if plan.needs_dgrad:
                dgrad = products.dgrad(plan, inner, w_inner, x_dtype, rows, ctx.columns)
            if plan.needs_wgrad:
                wgrad = products.wgrad(plan, inner, x_inner, weight_dtype, columns, ctx.columns)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_grad = grad_output.sum(0).to(bias_dtype)
        return dgrad, wgrad, bias_grad, None, None, None, None, None, products.anchor_grad(ctx.state)
