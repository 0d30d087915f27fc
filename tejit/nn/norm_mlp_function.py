"""The autograd function of a norm, a linear layer, an activation and another linear layer: the outputs of norm and
activation exist in quantized form only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tejit.nn import fused, products
from tejit.nn.norm_linear_function import NormPlan, norm_gradients, quantized_norm
from tejit.nn.products import Plan


class NormMLP(torch.autograd.Function):
    """Saved for backward are the input, the statistics of its rows, the activation's input and the columnwise
    quantized operands.

    ``x`` is ``(M, K)``, the norm's weight and bias ``(K,)``, ``fc1_weight`` ``(F, K)`` or ``(2 F, K)`` where the
    activation is gated, ``fc2_weight`` ``(N, F)``; returns ``(M, N)`` in the norm's output dtype and, where it is
    wanted, the norm's output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        fc1_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_weight: Tensor,
        fc2_bias: Tensor | None,
        norm: NormPlan,
        activation: str,
        plan1: Plan,
        plan2: Plan,
    ) -> Any:
        rows, (one, two) = x.shape[0], (plan1.quantizers, plan2.quantizers)
        y_quantizer = one.input.needing(True, plan1.needs_wgrad)
        w1_quantizer = one.weight.needing(True, plan1.needs_dgrad)
        y_inner, y, mean, rstd = quantized_norm(x, norm_weight, norm_bias, norm, y_quantizer, one.alignment)
        w1_inner = products.quantized(w1_quantizer, fc1_weight, one.alignment)
        h = products.fprop(plan1, y_inner, w1_inner, fc1_bias, norm.dtype, rows, fc1_weight.shape[0])
        a_quantizer = two.input.needing(True, plan2.needs_wgrad)
        w2_quantizer = two.weight.needing(True, plan2.needs_dgrad)
        a_inner = fused.activated(h, activation, a_quantizer, two.alignment)
        w2_inner = products.quantized(w2_quantizer, fc2_weight, two.alignment)
        out = products.fprop(plan2, a_inner, w2_inner, fc2_bias, norm.dtype, rows, fc2_weight.shape[0])
        kept = (
            y_quantizer.columnwise_inner(y_inner) if plan1.needs_wgrad else (),
            w1_quantizer.columnwise_inner(w1_inner) if plan1.needs_dgrad else (),
            a_quantizer.columnwise_inner(a_inner) if plan2.needs_wgrad else (),
            w2_quantizer.columnwise_inner(w2_inner) if plan2.needs_dgrad else (),
            (h,) if plan2.needs_dgrad else (),
            (x, norm_weight, rstd, mean) if plan1.needs_dgrad else (),
        )
        ctx.save_for_backward(*[tensor for group in kept for tensor in group])
        ctx.sizes = tuple([len(group) for group in kept])
        ctx.norm, ctx.activation, ctx.plan1, ctx.plan2 = norm, activation, plan1, plan2
        parameters = (norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
        ctx.dtypes = tuple([None if t is None else t.dtype for t in parameters])
        ctx.columns = (x.shape[1], fc1_weight.shape[0], fc2_weight.shape[1])
        return (out, y) if norm.returned else out

    @staticmethod
    @once_differentiable  # a second derivative would see the quantized operands as constants and be wrong
    def backward(ctx: Any, grad_output: Tensor, grad_norm: Tensor | None = None) -> tuple[Tensor | None, ...]:
        plan1, plan2, norm = ctx.plan1, ctx.plan2, ctx.norm
        saved, groups = ctx.saved_tensors, []
        for size in ctx.sizes:
            groups.append(saved[:size])
            saved = saved[size:]
        y_inner, w1_inner, a_inner, w2_inner, activation_input, norm_input = groups
        w1_dtype, b1_dtype, w2_dtype, b2_dtype = ctx.dtypes[2:]
        features, fc1_rows, ffn = ctx.columns
        rows, out_features = grad_output.shape
        dx = norm_wgrad = norm_bias_grad = wgrad1 = bias_grad1 = wgrad2 = bias_grad2 = None
        if b2_dtype is not None and ctx.needs_input_grad[6]:
            bias_grad2 = grad_output.sum(0).to(b2_dtype)
        if plan2.needs_dgrad or plan2.needs_wgrad:
            quantizer = plan2.quantizers.grad_output.needing(plan2.needs_dgrad, plan2.needs_wgrad)
            inner = products.quantized(quantizer, grad_output, plan2.quantizers.alignment)
            if plan2.needs_wgrad:
                wgrad2 = products.wgrad(plan2, inner, a_inner, w2_dtype, out_features, ffn)
        if plan2.needs_dgrad:
            dgrad = products.dgrad(plan2, inner, w2_inner, norm.dtype, rows, ffn)
            (h,) = activation_input
            dh = fused.activate_backward(dgrad, h, ctx.activation)
            if b1_dtype is not None and ctx.needs_input_grad[4]:
                bias_grad1 = dh.sum(0).to(b1_dtype)
            if plan1.needs_dgrad or plan1.needs_wgrad:
                quantizer = plan1.quantizers.grad_output.needing(plan1.needs_dgrad, plan1.needs_wgrad)
                inner = products.quantized(quantizer, dh, plan1.quantizers.alignment)
                if plan1.needs_wgrad:
                    wgrad1 = products.wgrad(plan1, inner, y_inner, w1_dtype, fc1_rows, features)
            if plan1.needs_dgrad:
                dgrad = products.dgrad(plan1, inner, w1_inner, norm.dtype, rows, features)
                dx, norm_wgrad, norm_bias_grad = norm_gradients(dgrad, grad_norm, norm_input, norm, ctx.dtypes)
        return dx, norm_wgrad, norm_bias_grad, wgrad1, bias_grad1, wgrad2, bias_grad2, None, None, None, None
