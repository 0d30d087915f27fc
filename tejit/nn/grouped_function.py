"""The autograd function of a grouped linear layer: eager and compiled code take this one path."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tejit import compat
from tejit.formats import IdentityQuantizer
from tejit.nn import asked, gradients, products, weights
from tejit.nn.gradients import Late
from tejit.nn.module import Product
from tejit.nn.norm_linear_function import any_needs_grad
from tejit.nn.products import NO_STATE, GradOutput, Plan, State
from tejit.recipe import LinearQuantizers
from tejit.recipe.recipes import linear_quantizers
from tejit.tensor.quantizer import Inner

#: A group without rows has nothing to quantize: its weight's gradient, zeros, is a product of plain operands.
_NO_ROWS: LinearQuantizers = linear_quantizers(IdentityQuantizer(), IdentityQuantizer(), IdentityQuantizer())


class _Groups(NamedTuple):
    """What is known of the groups before they run.

    Attributes:
        plans: how each group's product runs.
        lates: what eager backward does beside computing each weight's gradient.
        given: number of each weight's buffers that came quantized.
        empty: which groups have no rows and are left out; asked before, since torch 2.11 takes no comparison of sizes
            in an autograd function. Where amax is reduced over processes none is left out: another may have rows.
    """

    plans: tuple[Plan, ...]
    lates: tuple[Late | None, ...]
    given: tuple[int, ...]
    empty: tuple[bool, ...]


def quantized_grouped_linear(
    x: Tensor, splits: tuple[int, ...], found: list[Product], biases: list[Tensor | None]
) -> Tensor:
    """``x[rows of a group] @ weight.T + bias`` for each group, with quantized operands, forward and backward.

    Args:
        x: ``(M, K)`` in float32, bfloat16 or float16.
        splits: rows of each group; their sum is M.
        found: each group's weight ``(N, K)`` and how it is multiplied.
        biases: each ``(N,)`` or None.

    Returns:
        ``(M, N)`` of ``x``'s dtype.
    """
    pairs = list(zip(splits, found, strict=True))
    groups = _Groups(
        tuple([product.plan for product in found]),
        tuple([product.late for product in found]),
        tuple([len(product.given) for product in found]),
        # Not `not split`, which would stay symbolic.
        tuple([False if split or product.plan.group is not None else True for split, product in pairs]),  # noqa: SIM211
    )
    all_weights = [product.weight for product in found]
    given: list[Tensor | None] = []
    for product in found:
        given.extend(product.given)
    # One module's, whichever of the products needs it: a graph changes no tensor that it is given twice.
    state = next((product.state for product in found if product.state.anchor is not None), found[0].state)
    if not any_needs_grad(x, *all_weights, *biases):
        return _forward(x, splits, groups, all_weights, biases, given, state)[0]
    main_grads = [product.main_grad for product in found]
    return compat.apply(_GroupedLinear, x, splits, groups, *state, *all_weights, *biases, *main_grads, *given)


def _forward(
    x: Tensor, splits: tuple[int, ...], groups: _Groups, all_weights: Any, biases: Any, given: Any, state: State
) -> tuple[Tensor, list[Inner]]:
    """The output, and what to save of each group's input and weight."""
    features = all_weights[0].shape[0]
    buffers = _pieces(given, groups.given)
    outs: list[Tensor] = []
    kept: list[Inner] = []
    for i, rows in enumerate(x.split(splits)):
        if groups.empty[i]:
            kept.extend([(), ()])
            continue
        plan, weight = groups.plans[i], all_weights[i]
        x_inner = products.input_inner(plan, rows, state)
        w_inner = weights.operand(plan, weight, buffers[i], state)
        outs.append(products.fprop(plan, x_inner, w_inner, biases[i], x.dtype, splits[i], features))
        kept.append(products.kept_input(plan, rows, x_inner))
        kept.append(weights.kept(plan, weight, w_inner, buffers[i]))
    return _joined(outs, features, x.dtype, x.device), kept


class _GroupedLinear(torch.autograd.Function):
    """Saved for backward are each group's columnwise (transposed) quantized operands, as ``_Linear`` saves them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: tuple[int, ...], groups: _Groups, *tensors: Any) -> Tensor:
        count = len(splits)
        state, tensors = State(*tensors[: len(NO_STATE)]), tensors[len(NO_STATE) :]
        all_weights, biases, main_grads, given = _pieces(tensors, (count, count, count, sum(groups.given)))
        out, kept = _forward(x, splits, groups, all_weights, biases, given, state)
        saved: list[Tensor | None] = []
        for inner in kept:
            saved.extend(inner)
        ctx.save_for_backward(*saved)
        ctx.call = (splits, groups, main_grads, tuple([len(inner) for inner in kept]))
        ctx.x_dtype = x.dtype
        ctx.weight_dtypes = tuple([weight.dtype for weight in all_weights])
        ctx.bias_dtypes = tuple([None if bias is None else bias.dtype for bias in biases])
        ctx.columns = x.shape[1]
        ctx.state = state
        return out

    @staticmethod
    @asked.first_derivative_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        splits, groups, main_grads, sizes = ctx.call
        columns, x_dtype = ctx.columns, ctx.x_dtype
        kept = _pieces(ctx.saved_tensors, sizes)
        count, features = len(splits), grad_output.shape[1]
        first = 3 + len(NO_STATE)
        arguments = ("x", None, None, *ctx.state, *ctx.weight_dtypes, *ctx.bias_dtypes)
        needed = asked.of(ctx, arguments)
        dgrads: list[Tensor] = []
        wgrads: list[Tensor | None] = [None] * count
        bias_grads: list[Tensor | None] = [None] * count
        for i, rows in enumerate(grad_output.split(splits)):
            kept_x, kept_w = kept[2 * i], kept[2 * i + 1]
            plan, main_grad, late = gradients.as_asked(
                ctx, arguments, first + i, needed, needed[0], groups.plans[i], main_grads[i], groups.lates[i]
            )
            grad = GradOutput(())
            x_inner: Inner = ()
            if groups.empty[i]:
                plan = compat.replaced(plan, quantizers=_NO_ROWS, needs_dgrad=False)
                grad, x_inner = GradOutput((rows,)), (rows.new_empty((0, columns)),)
            elif plan.needs_dgrad or plan.needs_wgrad:
                grad = products.grad_inner(plan, rows, ctx.state)
            if plan.needs_dgrad:
                w_inner = weights.for_dgrad(plan, kept_w, features, columns, x_dtype)
                dgrads.append(products.dgrad(plan, grad, w_inner, x_dtype, splits[i], columns))
            if plan.needs_wgrad:
                if not groups.empty[i]:
                    x_inner = products.input_for_wgrad(plan, kept_x, splits[i], columns, x_dtype)
                wgrads[i] = gradients.weight_gradient(
                    plan, main_grad, late, grad, x_inner, ctx.weight_dtypes[i], features, columns
                )
            if needed[first + count + i]:
                bias_grads[i] = rows.sum(0).to(ctx.bias_dtypes[i])
        dgrad = None
        if needed[0]:
            dgrad = _joined(dgrads, columns, x_dtype, grad_output.device)
        others = [None] * (count + sum(groups.given))
        return (dgrad, None, None, *products.state_grads(ctx.state, grad_output), *wgrads, *bias_grads, *others)


def _pieces(tensors: Any, sizes: tuple[int, ...]) -> list[Any]:
    """``tensors`` cut into runs of these lengths."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tensors[start : start + size])
        start += size
    return pieces


def _joined(parts: list[Tensor], columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rows of all parts; none where there are no parts."""
    if not parts:
        return torch.empty((0, columns), dtype=dtype, device=device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
