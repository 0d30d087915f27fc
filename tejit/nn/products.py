"""The three products of a linear layer over quantized operands, as plain functions for the autograd functions of
the modules to call: fprop ``y = x w^T``, dgrad ``dx = dy w``, wgrad ``dw = dy^T x``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tejit.kernels.gemm import gemm
from tejit.kernels.padding import cut, padded
from tejit.recipe import LinearQuantizers
from tejit.tensor import Quantizer
from tejit.tensor.quantizer import Inner

#: Places of a product's tensors in a module's state of delayed scaling, counted from the product's first.
INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2
SLOTS = 3


class Plan(NamedTuple):
    """How one linear product runs; known before it runs, hence a constant of a graph.

    Attributes:
        quantizers: how the operands of the three GEMMs are quantized.
        needs_dgrad, needs_wgrad: which gradients backward will be asked for.
        first_slot: place of the product's first tensor in the module's state of delayed scaling.
    """

    quantizers: LinearQuantizers
    needs_dgrad: bool
    needs_wgrad: bool
    first_slot: int = 0


def quantized(quantizer: Quantizer, matrix: Tensor, multiple: int) -> Inner:
    """Quantize a matrix, padded with zeros up to whole blocks: they add nothing to any of the three products."""
    return quantizer.quantize_inner(padded(matrix, multiple, multiple))


def fprop(
    plan: Plan, x_inner: Inner, w_inner: Inner, bias: Tensor | None, dtype: torch.dtype, rows: int, columns: int
) -> Tensor:
    """``x w^T + bias`` of ``(rows, columns)``, from rowwise operands."""
    quantizers = plan.quantizers
    out = gemm(
        quantizers.input.rowwise.rowwise_operand(x_inner),
        quantizers.weight.rowwise.rowwise_operand(w_inner),
        dtype,
        None if bias is None else padded(bias.reshape(1, -1), 1, quantizers.alignment).reshape(-1),
        quantizers.fast_accum_fprop,
    )
    return cut(out, rows, columns)


def dgrad(plan: Plan, g_inner: Inner, w_inner: Inner, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """``dy w`` of ``(rows, columns)``, from ``grad_output`` rowwise and the weight columnwise."""
    quantizers = plan.quantizers
    out = gemm(
        quantizers.grad_output.rowwise.rowwise_operand(g_inner),
        quantizers.weight.columnwise.columnwise_operand(w_inner),
        dtype,
        None,
        quantizers.fast_accum_dgrad,
    )
    return cut(out, rows, columns)


def wgrad(plan: Plan, g_inner: Inner, x_inner: Inner, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """``dy^T x`` of ``(rows, columns)``, from columnwise operands."""
    quantizers = plan.quantizers
    out = gemm(
        quantizers.grad_output.columnwise.columnwise_operand(g_inner),
        quantizers.input.columnwise.columnwise_operand(x_inner),
        dtype,
        None,
        quantizers.fast_accum_wgrad,
    )
    return cut(out, rows, columns)
