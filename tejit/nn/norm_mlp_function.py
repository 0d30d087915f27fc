"""The autograd function of a norm, a linear layer, an activation and another linear layer: the outputs of norm and
activation exist in quantized form only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tejit import compat
from tejit.nn import asked, fused, gradients, products, weights
from tejit.nn.gradients import Late
from tejit.nn.module import Product
from tejit.nn.norm_linear_function import NormPlan, any_needs_grad, norm_gradients, quantized_norm
from tejit.nn.products import NO_STATE, Plan, State
from tejit.tensor.quantizer import Inner


def norm_mlp(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    norm: NormPlan,
    product1: Product,
    bias1: Tensor | None,
    activation: str,
    product2: Product,
    bias2: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """``fc2(activation(fc1(norm(x))))`` with quantized operands, forward and backward.

    Args:
        x: ``(M, K)`` in float32, bfloat16 or float16.
        norm_weight, norm_bias: ``(K,)``; the bias may be None.
        norm: what the norm does.
        product1, bias1: a weight of ``(F, K)``, or ``(2 F, K)`` where the activation is gated, and ``fc1``'s bias.
        activation: one of ``fused.ACTIVATIONS``.
        product2, bias2: a weight of ``(N, F)``, and ``fc2``'s bias.

    Returns:
        ``(M, N)`` in the norm's output dtype; and the norm's output, where it is wanted, else None.
    """
    parameters = (norm_weight, norm_bias, product1.weight, bias1, product2.weight, bias2)
    plans = (norm, activation, product1.plan, product2.plan)
    given = (*product1.given, *product2.given)
    # One module's, whichever of the products needs it: a graph changes no tensor that it is given twice.
    state = product2.state if product1.state.scale is None else product1.state
    if product2.state.anchor is not None:  # whatever needs a gradient is behind the second product or is its weight
        state = compat.replaced(state, anchor=product2.state.anchor)
    if not any_needs_grad(x, *parameters):
        out, y, _ = _forward(x, parameters, *plans, product1.given, product2.given, state)
        return out, y
    destinations = (product1.main_grad, product1.late, product2.main_grad, product2.late)
    found = compat.apply(_NormMLP, x, *parameters, *plans, *destinations, len(product1.given), *state, *given)
    return found if norm.returned else (found, None)


def _forward(
    x: Tensor,
    parameters: tuple[Any, ...],
    norm: NormPlan,
    activation: str,
    plan1: Plan,
    plan2: Plan,
    given1: Inner,
    given2: Inner,
    state: State,
) -> tuple[Tensor, Tensor | None, tuple[Any, ...]]:
    """The output, the norm's where it is wanted, and what is saved: of the input of ``fc1``, its weight, the input of
    ``fc2``, its weight, the activation and the norm."""
    norm_weight, norm_bias, weight1, bias1, weight2, bias2 = parameters
    rows = x.shape[0]
    normed = quantized_norm(x, norm_weight, norm_bias, norm, plan1, state)
    w1_inner = weights.operand(plan1, weight1, given1, state)
    h = products.fprop(plan1, normed.inner, w1_inner, bias1, norm.dtype, rows, weight1.shape[0])
    a = None
    quantizer, multiple = products.input_quantizer(plan2), plan2.quantizers.alignment
    if products.keeps_input(plan2):
        a = fused.activate(h, activation)
        a_inner = products.quantized(quantizer, a, multiple, plan2, state, products.INPUT)
    else:
        a_inner = fused.activated(h, activation, quantizer, multiple, plan2, state)
    w2_inner = weights.operand(plan2, weight2, given2, state)
    out = products.fprop(plan2, a_inner, w2_inner, bias2, norm.dtype, rows, weight2.shape[0])
    kept = (
        normed.kept,
        weights.kept(plan1, weight1, w1_inner, given1),
        products.kept_input(plan2, a, a_inner),
        weights.kept(plan2, weight2, w2_inner, given2),
        (h,) if plan2.needs_dgrad else (),
        (x, norm_weight, *normed.statistics) if plan1.needs_dgrad else (),
    )
    return out, normed.y, kept


class _NormMLP(torch.autograd.Function):
    """Saved for backward are the input, the statistics of its rows, the activation's input and the columnwise
    quantized operands."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        norm: NormPlan,
        activation: str,
        plan1: Plan,
        plan2: Plan,
        main_grad1: Tensor | None,
        late1: Late | None,
        main_grad2: Tensor | None,
        late2: Late | None,
        given1: int,
        *tensors: Tensor | None,
    ) -> Any:
        state, given = State(*tensors[: len(NO_STATE)]), tensors[len(NO_STATE) :]
        parameters = (norm_weight, norm_bias, weight1, bias1, weight2, bias2)
        plans = (plan1, plan2)
        out, y, kept = _forward(x, parameters, norm, activation, *plans, given[:given1], given[given1:], state)
        ctx.save_for_backward(*[tensor for group in kept for tensor in group])
        ctx.sizes = tuple([len(group) for group in kept])
        ctx.norm, ctx.activation, ctx.state = norm, activation, state
        ctx.plans, ctx.destinations = plans, (main_grad1, late1, main_grad2, late2)
        ctx.dtypes = tuple([None if t is None else t.dtype for t in parameters])
        ctx.columns = (x.shape[1], weight2.shape[1])
        ctx.given = len(given)
        return (out, y) if norm.returned else out

    @staticmethod
    @asked.first_derivative_only
    def backward(ctx: Any, grad_output: Tensor, grad_norm: Tensor | None = None) -> tuple[Tensor | None, ...]:
        saved, groups = ctx.saved_tensors, []
        for size in ctx.sizes:
            groups.append(saved[:size])
            saved = saved[size:]
        kept_y, kept_w1, kept_a, kept_w2, kept_h, kept_x = groups
        w1_dtype, b1_dtype, w2_dtype, b2_dtype = ctx.dtypes[2:]
        (features, ffn), dtype = ctx.columns, ctx.norm.dtype
        (plan1, plan2), (main1, late1, main2, late2) = ctx.plans, ctx.destinations
        arguments = ("x", *ctx.dtypes)
        needed = asked.of(ctx, arguments)
        behind1 = needed[0] or needed[1] or needed[2]
        behind2 = behind1 or needed[3] or needed[4]
        product1 = gradients.as_asked(ctx, arguments, 3, needed, behind1, plan1, main1, late1)
        product2 = gradients.as_asked(ctx, arguments, 5, needed, behind2, plan2, main2, late2)
        state = ctx.state
        dx = norm_wgrad = norm_bias_grad = wgrad1 = bias_grad1 = bias_grad2 = None
        if b2_dtype is not None and needed[6]:
            bias_grad2 = grad_output.sum(0).to(b2_dtype)
        dgrad, wgrad2 = gradients.product_gradients(
            *product2, state, grad_output, kept_a, kept_w2, ffn, dtype, w2_dtype
        )
        if dgrad is not None:
            dh = fused.activate_backward(dgrad, kept_h[0], ctx.activation)
            if b1_dtype is not None and needed[4]:
                bias_grad1 = dh.sum(0).to(b1_dtype)
            dgrad, wgrad1 = gradients.product_gradients(
                *product1, state, dh, kept_y, kept_w1, features, dtype, w1_dtype
            )
            if dgrad is not None:
                dx, norm_wgrad, norm_bias_grad = norm_gradients(dgrad, grad_norm, kept_x, ctx.norm, ctx.dtypes)
        found = (dx, norm_wgrad, norm_bias_grad, wgrad1, bias_grad1, wgrad2, bias_grad2)
        return (*found, *[None] * 9, *products.state_grads(state, grad_output), *[None] * ctx.given)
