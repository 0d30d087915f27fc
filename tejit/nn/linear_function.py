"""The autograd function of a quantized linear layer: eager and compiled code take this one path."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tejit.kernels.gemm import gemm
from tejit.kernels.padding import cut, padded
from tejit.recipe import LinearQuantizers


def quantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None, quantizers: LinearQuantizers) -> Tensor:
    """``x @ weight.T + bias`` with quantized operands, forward and backward.

    Args:
        x: ``(..., K)`` in float32, bfloat16 or float16.
        weight: ``(N, K)``, the dtype of ``x``.
        bias: ``(N,)`` or None.
        quantizers: how the operands of the three GEMMs are quantized.

    Returns:
        ``(..., N)`` of ``x``'s dtype.
    """
    grad = torch.is_grad_enabled()
    needs_dgrad = grad and x.requires_grad
    needs_wgrad = grad and weight.requires_grad
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = _Linear.apply(flat, weight, bias, quantizers, needs_dgrad, needs_wgrad)
    return out.reshape(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """fprop ``y = x w^T``, dgrad ``dx = dy w``, wgrad ``dw = dy^T x``; all operands quantized.

    Saved for backward are the columnwise (transposed) quantized operands, never the high-precision input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        quantizers: LinearQuantizers,
        needs_dgrad: bool,
        needs_wgrad: bool,
    ) -> Tensor:
        # Zeros up to whole blocks add nothing to any of the three products.
        multiple = quantizers.alignment
        input_quantizer = quantizers.input.needing(True, needs_wgrad)
        weight_quantizer = quantizers.weight.needing(True, needs_dgrad)
        x_inner = input_quantizer.quantize_inner(padded(x, multiple, multiple))
        w_inner = weight_quantizer.quantize_inner(padded(weight, multiple, multiple))
        out = gemm(
            input_quantizer.rowwise_operand(x_inner),
            weight_quantizer.rowwise_operand(w_inner),
            x.dtype,
            None if bias is None else padded(bias.reshape(1, -1), 1, multiple).reshape(-1),
            quantizers.fast_accum_fprop,
        )
        kept_x = input_quantizer.columnwise_inner(x_inner) if needs_wgrad else ()
        kept_w = weight_quantizer.columnwise_inner(w_inner) if needs_dgrad else ()
        ctx.save_for_backward(*kept_x, *kept_w)
        ctx.quantizers = quantizers
        ctx.x_buffers = len(kept_x)
        ctx.needs = (needs_dgrad, needs_wgrad, bias is not None)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.columns = x.shape[1]
        return cut(out, x.shape[0], weight.shape[0])

    @staticmethod
    @once_differentiable  # a second derivative would see the quantized operands as constants and be wrong
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        quantizers: LinearQuantizers = ctx.quantizers
        needs_dgrad, needs_wgrad, has_bias = ctx.needs
        saved = ctx.saved_tensors
        x_inner, w_inner = saved[: ctx.x_buffers], saved[ctx.x_buffers :]
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        dgrad = wgrad = bias_grad = None
        if needs_dgrad or needs_wgrad:
            quantizer = quantizers.grad_output.needing(needs_dgrad, needs_wgrad)
            multiple = quantizers.alignment
            inner = quantizer.quantize_inner(padded(grad_output, multiple, multiple))
            if needs_dgrad:
                dgrad = gemm(
                    quantizer.rowwise_operand(inner),
                    quantizers.weight.columnwise.columnwise_operand(w_inner),
                    x_dtype,
                    None,
                    quantizers.fast_accum_dgrad,
                )
                dgrad = cut(dgrad, grad_output.shape[0], ctx.columns)
            if needs_wgrad:
                wgrad = gemm(
                    quantizer.columnwise_operand(inner),
                    quantizers.input.columnwise.columnwise_operand(x_inner),
                    weight_dtype,
                    None,
                    quantizers.fast_accum_wgrad,
                )
                wgrad = cut(wgrad, grad_output.shape[1], ctx.columns)
        if has_bias and ctx.needs_input_grad[2]:
            bias_grad = grad_output.sum(0).to(bias_dtype)
        return dgrad, wgrad, bias_grad, None, None, None
