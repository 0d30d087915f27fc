"""The three products of a linear layer over quantized operands, as plain functions for the autograd functions of
the modules to call: fprop ``y = x w^T``, dgrad ``dx = dy w``, wgrad ``dw = dy^T x``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tejit.kernels.gemm import gemm
from tejit.kernels.padding import cut, padded
from tejit.recipe import DelayedState, LinearQuantizers
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
        group: the process group over which amax is reduced when a tensor is quantized, or None.
        delayed: whom an eager backward tells that it wrote to the state; None in a graph, whose backward has the
            state's anchor for that.
    """

    quantizers: LinearQuantizers
    needs_dgrad: bool
    needs_wgrad: bool
    first_slot: int = 0
    group: Any = None
    delayed: DelayedState | None = None


class State(NamedTuple):
    """A module's state of delayed scaling, as the arguments of its autograd function: tensors, which graphs may then
    change. All None where the recipe has no such state.

    A backward reads them as they are by then, so they go into an attribute of the context and not through
    ``save_for_backward``, which refuses what has changed. A graph makes the same difference, but for whole buffers
    only: hence histories and not their first rows.

    Attributes:
        scale, history: float32 ``(2 * products,)`` and ``(rows, 2 * products)``, of input and weight of each product.
        grad_scale, grad_history: float32 ``(products,)`` and ``(rows, products)``.
        anchor: float32 ``(0,)``, whose gradient (:func:`anchor_grad`) tells of a compiled backward; else None.
    """

    scale: Tensor | None = None
    history: Tensor | None = None
    grad_scale: Tensor | None = None
    grad_history: Tensor | None = None
    anchor: Tensor | None = None


NO_STATE = State()


def quantized(
    quantizer: Quantizer,
    matrix: Tensor,
    multiple: int,
    plan: Plan | None = None,
    state: State | None = None,
    operand: int = INPUT,
) -> Inner:
    """Quantize a matrix, padded with zeros up to whole blocks: they add nothing to any of the three products.

    ``plan`` and ``state`` say of which product and module ``matrix`` is the ``operand``: ``INPUT``, ``WEIGHT`` or
    ``GRAD_OUTPUT``. A quantizer of delayed scaling needs them, and the group of the plan is heeded.
    """
    matrix = padded(matrix, multiple, multiple)
    if plan is not None and plan.quantizers.delayed is not None:
        scale, amax = _slot(plan, state, operand)
        if operand == GRAD_OUTPUT and plan.delayed is not None:
            plan.delayed.gradient_written()
        by_slot: Any = quantizer  # a Float8SlotQuantizer, which torch 2.11 would deny of it in a graph
        return by_slot.quantize_slot(matrix, scale, amax)
    return quantizer.quantize_inner(matrix, None if plan is None else plan.group)


def _slot(plan: Plan, state: State | None, operand: int) -> tuple[Tensor, Tensor]:
    """``(scale, amax)`` of an operand, each ``(1,)``."""
    assert state is not None  # whoever takes a recipe with state asks the module for it
    product = plan.first_slot // SLOTS
    if operand == GRAD_OUTPUT:
        scale, history, at = state.grad_scale, state.grad_history, product
    else:
        scale, history, at = state.scale, state.history, GRAD_OUTPUT * product + operand
    assert scale is not None
    assert history is not None
    return scale[at : at + 1], history[0, at : at + 1]


def anchor_grad(state: State) -> Tensor | None:
    """What backward returns as the anchor's gradient; all other gradients of the state are None."""
    return None if state.anchor is None else torch.zeros_like(state.anchor)


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
