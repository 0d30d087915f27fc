"""The autograd function of a quantized linear layer: eager and compiled code take this one path."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tejit.nn import gradients, products, weights
from tejit.nn.gradients import Late
from tejit.nn.module import Product
from tejit.nn.products import Plan
from tejit.tensor.quantizer import Inner


def quantized_linear(x: Tensor, product: Product, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` with quantized operands, forward and backward.

    Args:
        x: ``(..., K)`` in float32, bfloat16 or float16.
        product: the weight ``(N, K)`` and how it is multiplied.
        bias: ``(N,)`` or None.

    Returns:
        ``(..., N)`` of ``x``'s dtype.
    """
    plan, weight, main_grad, late, given = product
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    needs_bias_grad = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    if plan.needs_dgrad or plan.needs_wgrad or needs_bias_grad:
        out = _Linear.apply(flat, weight, bias, plan, main_grad, late, *given)
    else:
        out = _forward(flat, weight, bias, plan, given)[0]
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], weight.shape[0])


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, given: Inner) -> tuple[Tensor, Inner, Inner]:
    """The output, and the buffers of input and weight that it was made from."""
    x_inner = products.input_inner(plan, x)
    w_inner = weights.operand(plan, weight, given)
    return products.fprop(plan, x_inner, w_inner, bias, x.dtype, x.shape[0], weight.shape[0]), x_inner, w_inner


class _Linear(torch.autograd.Function):
    """Saved for backward are the columnwise (transposed) quantized operands, never the high-precision input unless
    the plan says so."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        main_grad: Tensor | None,
        late: Late | None,
        *given: Tensor | None,
    ) -> Tensor:
        out, x_inner, w_inner = _forward(x, weight, bias, plan, given)
        kept_x = products.kept_input(plan, x, x_inner)
        kept_w = weights.kept(plan, weight, w_inner, given)
        ctx.save_for_backward(*kept_x, *kept_w)
        ctx.plan = plan
        ctx.main_grad, ctx.late = main_grad, late
        ctx.x_buffers = len(kept_x)
        ctx.has_bias = bias is not None
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.columns = x.shape[1]
        ctx.given = len(given)
        return out

    @staticmethod
    @once_differentiable  # a second derivative would see the quantized operands as constants and be wrong
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        saved = ctx.saved_tensors
        kept_x, kept_w = saved[: ctx.x_buffers], saved[ctx.x_buffers :]
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        rows, columns = grad_output.shape
        dgrad = wgrad = bias_grad = None
        if plan.needs_dgrad or plan.needs_wgrad:
            inner = products.grad_inner(plan, grad_output)
            if plan.needs_dgrad:
                w_inner = weights.for_dgrad(plan, kept_w, columns, ctx.columns, x_dtype)
                dgrad = products.dgrad(plan, inner, w_inner, x_dtype, rows, ctx.columns)
            if plan.needs_wgrad:
                x_inner = products.input_for_wgrad(plan, kept_x, rows, ctx.columns, x_dtype)
                wgrad = gradients.weight_gradient(
                    plan, ctx.main_grad, ctx.late, inner, x_inner, weight_dtype, columns, ctx.columns
                )
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_grad = grad_output.sum(0).to(bias_dtype)
        return (dgrad, wgrad, bias_grad, None, None, None, *[None] * ctx.given)
