"""The autograd function of a quantized linear layer: of compiled code, and of eager calls that are not ``ready``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tejit import compat
from tejit.nn import asked, gradients, products, weights
from tejit.nn.gradients import Late
from tejit.nn.module import Product
from tejit.nn.products import NO_STATE, Plan, State
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
    plan, weight, main_grad, late, given, state = product
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    needs_bias_grad = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    if plan.needs_dgrad or plan.needs_wgrad or needs_bias_grad:
        out = compat.apply(_Linear, flat, weight, bias, plan, main_grad, late, *state, *given)
    else:
        out = _forward(flat, weight, bias, plan, given, state)[0]
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], weight.shape[0])


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, given: Inner, state: State
) -> tuple[Tensor, Inner, Inner]:
    """The output, and what to save of input and weight."""
    x_inner = products.input_inner(plan, x, state)
    w_inner = weights.operand(plan, weight, given, state)
    out = products.fprop(plan, x_inner, w_inner, bias, x.dtype, x.shape[0], weight.shape[0])
    return out, products.kept_input(plan, x, x_inner), weights.kept(plan, weight, w_inner, given)


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
        *tensors: Tensor | None,
    ) -> Tensor:
        state, given = State(*tensors[: len(NO_STATE)]), tensors[len(NO_STATE) :]
        out, kept_x, kept_w = _forward(x, weight, bias, plan, given, state)
        ctx.save_for_backward(*kept_x, *kept_w)
        ctx.call = (plan, main_grad, late, len(kept_x), len(given))
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.features = x.shape[1]
        ctx.state = state
        return out

    @staticmethod
    @asked.first_derivative_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan, main_grad, late, x_buffers, given = ctx.call
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        needed = asked.of(ctx, ctx.dtypes)
        product = gradients.as_asked(ctx, ctx.dtypes, 1, needed, needed[0], plan, main_grad, late)
        saved = ctx.saved_tensors
        kept_x, kept_w = saved[:x_buffers], saved[x_buffers:]
        dgrad, wgrad = gradients.product_gradients(
            *product, ctx.state, grad_output, kept_x, kept_w, ctx.features, x_dtype, weight_dtype
        )
        bias_grad = None
        if bias_dtype is not None and needed[2]:
            bias_grad = grad_output.sum(0).to(bias_dtype)
        rest = (*products.state_grads(ctx.state, grad_output), *[None] * given)
        return (dgrad, wgrad, bias_grad, None, None, None, *rest)
