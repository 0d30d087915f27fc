"""The three products of a linear layer over quantized operands, as plain functions for the autograd functions of
the modules to call: fprop ``y = x w^T``, dgrad ``dx = dy w``, wgrad ``dw = dy^T x``.

An autograd function calls, in forward: :func:`input_inner`, ``weights.operand``, :func:`fprop`, and saves
:func:`kept_input` and ``weights.kept``; in backward: :func:`grad_inner`, :func:`dgrad` with ``weights.for_dgrad``, and
``gradients.weight_gradient`` with :func:`input_for_wgrad`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tejit import compat
from tejit.formats import IdentityQuantizer
from tejit.kernels.gemm import Operand, gemm
from tejit.kernels.padding import cut, cut_out, padded
from tejit.nn import asked
from tejit.recipe import DelayedState, LinearQuantizers
from tejit.tensor import Quantizer
from tejit.tensor.quantizer import Inner

#: Places of a product's tensors in a module's state of delayed scaling, counted from the product's first.
INPUT, WEIGHT, GRAD_OUTPUT = 0, 1, 2
SLOTS = 3

#: What reads operands in high precision.
_PLAIN = IdentityQuantizer(internal=True)


class Plan(NamedTuple):
    """How one linear product runs; known before it runs, hence a constant of a graph.

    Attributes:
        quantizers: how the operands of the three GEMMs are quantized, or read where they came quantized.
        needs_dgrad, needs_wgrad: which gradients backward will be asked for.
        first_slot: place of the product's first tensor in the module's state of delayed scaling.
        weight_source: where the weight's buffers come from (``weights``).
        weight_usages: ``(rowwise, columnwise)``: the directions in which a weight came quantized.
        save_original_input: save the input itself and quantize it again in backward.
        accumulate: a weight's gradient is added to ``main_grad``, rather than overwriting it.
        group: the process group over which amax is reduced when a tensor is quantized, or None.
        delayed: whom an eager backward tells that it wrote to the state; None in a graph, whose backward has the
            state's anchor for that.
    """

    quantizers: LinearQuantizers
    needs_dgrad: bool
    needs_wgrad: bool
    first_slot: int = 0
    weight_source: str = "call"
    weight_usages: tuple[bool, bool] = (True, True)
    save_original_input: bool = False
    accumulate: bool = True
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
        anchor: float32 ``(0,)`` in a graph, also without such a state; its gradient (:func:`state_grads`) tells of a
            compiled backward. None in eager code.
    """

    scale: Tensor | None = None
    history: Tensor | None = None
    grad_scale: Tensor | None = None
    grad_history: Tensor | None = None
    anchor: Tensor | None = None


NO_STATE = State()


class GradOutput(NamedTuple):
    """``grad_output`` ``(M, N)`` as dgrad and wgrad read it.

    Attributes:
        inner: its buffers.
        rows, columns: ``(M,)`` and ``(N,)``: 1, or NaN where an entry of the row or column is infinite or NaN; None
            where nobody has to be told.
    """

    inner: Inner
    rows: Tensor | None = None
    columns: Tensor | None = None


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
    if not torch.compiler.is_compiling() and compat.in_selective_checkpoint():
        # A policy that saves views would have a recomputation use those of the forward: of the scale, which has rolled
        # since, and of the history, which would collect once more.
        with compat.without_dispatch_modes():
            return scale[at : at + 1], history[0, at : at + 1]
    return scale[at : at + 1], history[0, at : at + 1]


def state_grads(state: State, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """What backward returns for the state: nothing but the anchor's gradient."""
    return (None, None, None, None, None if state.anchor is None else asked.anchor_grad(state.anchor, grad_output))


def values(
    quantizer: Quantizer, bare: Quantizer, inner: Inner, rows: int, columns: int, multiple: int, dtype: torch.dtype
) -> Tensor:
    """``(rows, columns)``: what the buffers of a quantized matrix, padded to ``multiple``, stand for.

    ``quantizer`` reads the buffers; ``bare`` is one of the same format that makes bare storages.
    """
    first = next(buffer for buffer in inner if buffer is not None)
    cls = bare.storage_metadata(dtype)["cls"]
    keywords = quantizer.storage_metadata(dtype)["nontensor_kwargs"]
    buffers = dict(zip(cls._keywords_of(keywords).values(), inner, strict=True))
    shape = (rows + -rows % multiple, columns + -columns % multiple)
    return cut(cls._construct(buffers, keywords, shape, first.device)._dequantize(dtype), rows, columns)


def input_quantizer(plan: Plan) -> Quantizer:
    """What makes the input's buffers: rowwise for fprop, and columnwise where they are saved for wgrad."""
    quantizers = plan.quantizers
    columnwise = plan.needs_wgrad and quantizers.backward_override is None and not plan.save_original_input
    return quantizers.input.needing(True, columnwise)


def input_inner(plan: Plan, x: Tensor, state: State) -> Inner:
    """The input's buffers, of :func:`input_quantizer`."""
    return quantized(input_quantizer(plan), x, plan.quantizers.alignment, plan, state, INPUT)


def kept_input(plan: Plan, x: Tensor | None, inner: Inner) -> Inner:
    """What to save of the input for wgrad; ``x``, the input in high precision, is asked for only by
    ``save_original_input`` and the override ``high_precision`` (:func:`keeps_input`)."""
    if not plan.needs_wgrad:
        return ()
    if keeps_input(plan):
        return (x,)
    if plan.quantizers.backward_override is not None:
        return inner
    return plan.quantizers.input.both.columnwise_inner(inner)


def keeps_input(plan: Plan) -> bool:
    """Whether the input itself is saved, in high precision."""
    return plan.needs_wgrad and (plan.save_original_input or plan.quantizers.backward_override == "high_precision")


def input_for_wgrad(plan: Plan, kept: Inner, rows: int, columns: int, dtype: torch.dtype) -> Inner:
    """The buffers that :func:`wgrad` reads, from what :func:`kept_input` gave for a ``(rows, columns)`` input."""
    quantizers = plan.quantizers
    override = quantizers.backward_override
    if override is None:
        if not plan.save_original_input:
            return kept
        (x,) = kept
        assert x is not None
        return quantized(quantizers.input.columnwise, x, quantizers.alignment, plan)
    if override == "high_precision":
        return kept
    if plan.save_original_input:
        (x,) = kept
        assert x is not None
        kept = quantized(quantizers.input.rowwise, x, quantizers.alignment, plan)
    reader = quantizers.input.rowwise
    return (values(reader, reader, kept, rows, columns, quantizers.alignment, dtype),)


def grad_inner(plan: Plan, grad_output: Tensor, state: State) -> GradOutput:
    """``grad_output`` for the products that backward needs (at least one).

    Casts saturate, so an infinity would go into them as the format's largest value, and come out finite. Scaled
    training in float16 lives on seeing it (``torch.amp.GradScaler`` skips the step), so there each product is told:
    where ``nn.Linear``'s gradients are not finite, ours are not.
    """
    quantizers = plan.quantizers
    if quantizers.backward_override is not None:
        return GradOutput((grad_output,))
    quantizer = quantizers.grad_output.needing(plan.needs_dgrad, plan.needs_wgrad)
    inner = quantized(quantizer, grad_output, quantizers.alignment, plan, state, GRAD_OUTPUT)
    if grad_output.dtype is not torch.float16:
        return GradOutput(inner)
    # Zeros, and NaN for what is not finite: on the device, where no branch has to wait for it. Not times 0, which
    # inductor up to torch 2.13 takes for 0.
    zeros = grad_output - grad_output
    rows = zeros.sum(1).add_(1) if plan.needs_dgrad else None
    columns = zeros.sum(0).add_(1) if plan.needs_wgrad else None
    return GradOutput(inner, rows, columns)


def fprop(
    plan: Plan, x_inner: Inner, w_inner: Inner, bias: Tensor | None, dtype: torch.dtype, rows: int, columns: int
) -> Tensor:
    """``x w^T + bias`` of ``(rows, columns)``, from rowwise operands."""
    quantizers = plan.quantizers
    multiple = quantizers.alignment
    if bias is not None and multiple != 1:
        bias = padded(bias.reshape(1, -1), 1, multiple).reshape(-1)
    a = quantizers.input.rowwise.rowwise_operand(x_inner)
    b = quantizers.weight.rowwise.rowwise_operand(w_inner)
    return _cut_gemm(quantizers, a, b, dtype, bias, quantizers.fast_accum_fprop, rows, columns)


def dgrad(plan: Plan, grad: GradOutput, w_inner: Inner, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """``dy w`` of ``(rows, columns)``, from ``grad_output`` rowwise and the weight columnwise."""
    quantizers = plan.quantizers
    if quantizers.backward_override is not None:
        return gemm(_PLAIN.rowwise_operand(grad.inner), _PLAIN.columnwise_operand(w_inner), dtype)
    a = quantizers.grad_output.rowwise.rowwise_operand(grad.inner)
    b = quantizers.weight.columnwise.columnwise_operand(w_inner)
    out = _cut_gemm(quantizers, a, b, dtype, None, quantizers.fast_accum_dgrad, rows, columns)
    return _told(out, grad.rows)


def wgrad(plan: Plan, grad: GradOutput, x_inner: Inner, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """``dy^T x`` of ``(rows, columns)``, from columnwise operands."""
    quantizers = plan.quantizers
    if quantizers.backward_override is not None:
        return gemm(_PLAIN.columnwise_operand(grad.inner), _PLAIN.columnwise_operand(x_inner), dtype)
    a = quantizers.grad_output.columnwise.columnwise_operand(grad.inner)
    b = quantizers.input.columnwise.columnwise_operand(x_inner)
    out = _cut_gemm(quantizers, a, b, dtype, None, quantizers.fast_accum_wgrad, rows, columns)
    return _told(out, grad.columns)


def _told(product: Tensor, factors: Tensor | None) -> Tensor:
    """A product, in place, times a factor of 1 or NaN a row: not a bit of the other rows changes."""
    return product if factors is None else product.mul_(factors[:, None])


def _cut_gemm(
    quantizers: LinearQuantizers,
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    bias: Tensor | None,
    fast_accum: bool,
    rows: int,
    columns: int,
) -> Tensor:
    """``a @ b.T + bias`` without what the operands were padded by."""
    out = gemm(a, b, dtype, bias, fast_accum)
    return out if quantizers.alignment == 1 else cut_out(out, rows, columns)
