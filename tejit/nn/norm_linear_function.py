"""The autograd function of a norm and the linear layer behind it: the norm's output exists in quantized form only."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tejit import compat
from tejit.nn import asked, fused, gradients, products, weights
from tejit.nn.gradients import Late
from tejit.nn.module import Product
from tejit.nn.products import NO_STATE, Plan, State
from tejit.tensor.quantizer import Inner


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


class Normed(NamedTuple):
    """A norm's output and what its gradient needs.

    Attributes:
        inner: the output, quantized.
        y: the output in the input's dtype, where it is returned; else None.
        kept: what is saved of the output for wgrad.
        statistics: ``rstd`` and the mean (None for ``RMSNorm``), of each row.
    """

    inner: Inner
    y: Tensor | None
    kept: Inner
    statistics: tuple[Tensor, Tensor | None]


def norm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, norm: NormPlan, product: Product, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """``norm(x) @ weight.T + bias`` with quantized operands, forward and backward.

    Args:
        x: ``(M, K)`` in float32, bfloat16 or float16.
        norm_weight, norm_bias: ``(K,)``; the bias may be None.
        norm: what the norm does.
        product: the weight ``(N, K)`` and how it is multiplied.
        bias: ``(N,)`` or None.

    Returns:
        ``(M, N)`` in the norm's output dtype; and the norm's output, where it is wanted, else None.
    """
    plan, weight, main_grad, late, given, state = product
    parameters = (norm_weight, norm_bias, weight, bias)
    if not any_needs_grad(x, *parameters):
        out, normed, _ = _forward(x, *parameters, norm, plan, given, state)
        return out, normed.y
    found = compat.apply(_NormLinear, x, *parameters, norm, plan, main_grad, late, *state, *given)
    return found if norm.returned else (found, None)


def _forward(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    norm: NormPlan,
    plan: Plan,
    given: Inner,
    state: State,
) -> tuple[Tensor, Normed, Inner]:
    """The output, what the norm gave, and the weight's buffers."""
    normed = quantized_norm(x, norm_weight, norm_bias, norm, plan, state)
    w_inner = weights.operand(plan, weight, given, state)
    out = products.fprop(plan, normed.inner, w_inner, bias, norm.dtype, x.shape[0], weight.shape[0])
    return out, normed, w_inner


class _NormLinear(torch.autograd.Function):
    """Saved for backward are the input, the statistics of its rows and the columnwise quantized operands."""

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
        main_grad: Tensor | None,
        late: Late | None,
        *tensors: Tensor | None,
    ) -> Any:
        state, given = State(*tensors[: len(NO_STATE)]), tensors[len(NO_STATE) :]
        parameters = (norm_weight, norm_bias, weight, bias)
        out, normed, w_inner = _forward(x, *parameters, norm, plan, given, state)
        kept_w = weights.kept(plan, weight, w_inner, given)
        kept_x = (x, norm_weight, *normed.statistics) if plan.needs_dgrad else ()
        ctx.save_for_backward(*normed.kept, *kept_w, *kept_x)
        ctx.plan, ctx.norm, ctx.state = plan, norm, state
        ctx.main_grad, ctx.late = main_grad, late
        ctx.buffers = (len(normed.kept), len(kept_w))
        ctx.dtypes = tuple([None if t is None else t.dtype for t in parameters])
        ctx.columns = x.shape[1]
        ctx.given = len(given)
        return (out, normed.y) if norm.returned else out

    @staticmethod
    @asked.first_derivative_only
    def backward(ctx: Any, grad_output: Tensor, grad_norm: Tensor | None = None) -> tuple[Tensor | None, ...]:
        arguments = ("x", *ctx.dtypes)
        needed = asked.of(ctx, arguments)
        behind = needed[0] or needed[1] or needed[2]
        product = gradients.as_asked(ctx, arguments, 3, needed, behind, ctx.plan, ctx.main_grad, ctx.late)
        saved, (y_buffers, w_buffers) = ctx.saved_tensors, ctx.buffers
        kept_y, kept_w = saved[:y_buffers], saved[y_buffers : y_buffers + w_buffers]
        bias_dtype = ctx.dtypes[3]
        bias_grad = None
        if bias_dtype is not None and needed[4]:
            bias_grad = grad_output.sum(0).to(bias_dtype)
        dtypes = (ctx.norm.dtype, ctx.dtypes[2])
        dgrad, wgrad = gradients.product_gradients(
            *product, ctx.state, grad_output, kept_y, kept_w, ctx.columns, *dtypes
        )
        dx = norm_wgrad = norm_bias_grad = None
        if dgrad is not None:
            kept_x = saved[y_buffers + w_buffers :]
            dx, norm_wgrad, norm_bias_grad = norm_gradients(dgrad, grad_norm, kept_x, ctx.norm, ctx.dtypes)
        found = (dx, norm_wgrad, norm_bias_grad, wgrad, bias_grad, None, None, None, None)
        return (*found, *products.state_grads(ctx.state, grad_output), *[None] * ctx.given)


def any_needs_grad(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors that are there requires a gradient, and gradients are computed."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def quantized_norm(x: Tensor, weight: Tensor, bias: Tensor | None, norm: NormPlan, plan: Plan, state: State) -> Normed:
    """The norm of ``x`` as the input of a product."""
    quantizer, multiple = products.input_quantizer(plan), plan.quantizers.alignment
    arguments = (x, weight, bias, norm.eps, norm.kind, norm.zero_centered_gamma)
    y = low = None
    if norm.returned or products.keeps_input(plan):
        # Two dtypes are two roundings of one float32 value: what is multiplied does not depend on what is returned.
        y, mean, rstd = fused.norm(*arguments, x.dtype if x.dtype == norm.dtype else torch.float32)
        low = fused.rounded(y, norm.dtype)
        inner = products.quantized(quantizer, low, multiple, plan, state, products.INPUT)
    else:
        inner, mean, rstd = fused.normed(*arguments, quantizer, multiple, norm.dtype, plan, state)
    returned = fused.rounded(y, x.dtype) if norm.returned else None
    return Normed(inner, returned, products.kept_input(plan, low, inner), (rstd, mean))


def norm_gradients(
    dgrad: Tensor,
    grad_norm: Tensor | None,
    saved: tuple[Any, ...],
    norm: NormPlan,
    dtypes: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of input, weight and bias of a norm whose output went into a product and, perhaps, out.

    Args:
        dgrad: the product's gradient of its input.
        grad_norm: the gradient of the output that was returned; None where it was not.
        saved: input, weight, ``rstd`` and mean.
        norm: what the norm did.
        dtypes: of weight and bias, and more.
    """
    if grad_norm is not None:
        dgrad = dgrad.float() + grad_norm.float()
    x, weight, rstd, mean = saved
    dx, wgrad, bias_grad = fused.norm_backward(dgrad, x, weight, mean, rstd, norm.zero_centered_gamma)
    return dx, wgrad.to(dtypes[0]), None if dtypes[1] is None else bias_grad.to(dtypes[1])
