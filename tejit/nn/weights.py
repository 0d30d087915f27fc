"""Where a product's weight operand comes from: quantized in the call, a quantized parameter, or the workspace of a
module that quantizes its weight once for several microbatches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tejit import compat
from tejit.formats.float8 import Float8TensorStorage
from tejit.nn import products
from tejit.nn.products import Plan, State
from tejit.recipe import LinearQuantizers, Variants
from tejit.tensor import QuantizedTensor, Quantizer
from tejit.tensor.quantizer import Inner

#: Values of ``Plan.weight_source``.
CALL, WORKSPACE, PARAMETER = "call", "workspace", "parameter"

#: Keywords of a storage that do not say what its buffers mean to a product.
_NOT_FORMAT = ("quantizer", "fake_dtype", "with_gemm_swizzled_scales")


# -- before the product ---------------------------------------------------------------------------------------
def is_quantized(weight: Any) -> bool:
    """Whether a weight is a quantized tensor."""
    return isinstance(weight, QuantizedTensor)


def values(weight: Any) -> Tensor:
    """A weight for a product in high precision: a quantized one is dequantized to its nominal dtype."""
    return weight.dequantize() if is_quantized(weight) else weight


def reading(quantizers: LinearQuantizers, weight: Any, name: str) -> tuple[LinearQuantizers, tuple[bool, bool], Inner]:
    """The quantizers that read a quantized weight, the directions ``(rowwise, columnwise)`` that it has, its buffers.

    A direction that it lacks stays the recipe's: the values are quantized once more there (:func:`operand`,
    :func:`for_dgrad`).

    Raises ``RuntimeError``, with both formats, where the weight's is not the one that the recipe asks for, where its
    quantizer is not known, or its sizes are no multiples of what the recipe's other operands are padded to.
    """
    own = quantizers.weight
    _check_fit(own.both, weight, name, quantizers.alignment)
    # FP8 with one scale is read alike whatever made it; its quantizer may hold live state, no constant of a graph.
    reader = own.both if isinstance(weight, Float8TensorStorage) else weight._quantizer
    if reader is None:
        raise RuntimeError(f"'{name}' is a {type(weight).__name__} that does not know its quantizer; quantize it again")
    rowwise, columnwise = reader.usages_of(weight)
    weight_variants = Variants(
        rowwise=reader if rowwise else own.rowwise, columnwise=reader if columnwise else own.columnwise, both=own.both
    )
    metadata = reader.storage_metadata(weight.dtype)
    names = metadata["cls"]._keywords_of(metadata["nontensor_kwargs"])
    inner = tuple([getattr(weight, attribute) for attribute in names])
    return compat.replaced(quantizers, weight=weight_variants), (rowwise, columnwise), inner


def _check_fit(quantizer: Quantizer, weight: Any, name: str, multiple: int) -> None:
    wanted = quantizer.storage_metadata(weight.dtype)
    found = {}
    fits = isinstance(weight, wanted["cls"])
    if fits:
        found = wanted["cls"]._nontensor_kwargs(weight)  # a graph calls no method of a tensor that is no torch.Tensor's
        for keyword, value in wanted["nontensor_kwargs"].items():
            if keyword not in _NOT_FORMAT and found[keyword] != value:
                fits = False
    if not fits:
        fields = {keyword: value for keyword, value in found.items() if keyword not in _NOT_FORMAT}
        what = f"{type(weight).__name__} {fields}" if fields else type(weight).__name__
        raise RuntimeError(
            f"Recipe mismatch for '{name}': the parameter is a {what}, and the recipe"
            f" quantizes weights by {quantizer!r}. Use the recipe that the parameter was made under, or dequantize the"
            " parameter."
        )
    if weight.shape[0] % multiple or weight.shape[1] % multiple:
        raise RuntimeError(
            f"Recipe mismatch for '{name}': the quantized parameter has shape {tuple(weight.shape)}, and the recipe's"
            f" other operands are padded to multiples of {multiple}. Keep this parameter in high precision."
        )


def quantizer(plan: Plan) -> Quantizer:
    """What makes a weight's buffers in the call: rowwise for fprop, and columnwise where they are saved for dgrad."""
    return plan.quantizers.weight.needing(True, plan.needs_dgrad and plan.quantizers.backward_override is None)


# -- in an autograd function ----------------------------------------------------------------------------------
def operand(plan: Plan, weight: Tensor, given: Inner, state: State) -> Inner:
    """The weight's buffers for fprop; ``given`` are those that came quantized, empty where the call quantizes."""
    quantizers = plan.quantizers
    if plan.weight_source == CALL:
        return products.quantized(quantizer(plan), weight, quantizers.alignment, plan, state, products.WEIGHT)
    if plan.weight_usages[0]:
        return given
    rows, columns = weight.shape
    made = _values(plan, quantizers.weight.columnwise, given, rows, columns, weight.dtype)
    return products.quantized(quantizers.weight.rowwise, made, quantizers.alignment, plan, state, products.WEIGHT)


def kept(plan: Plan, weight: Tensor, inner: Inner, given: Inner) -> Inner:
    """What to save of the weight for dgrad; ``inner`` is what :func:`operand` gave."""
    if not plan.needs_dgrad:
        return ()
    override = plan.quantizers.backward_override
    if override == "high_precision" and plan.weight_source != PARAMETER:
        return (weight,)
    if plan.weight_source == PARAMETER:
        columnwise = override is None and plan.weight_usages[1]
        return plan.quantizers.weight.columnwise.columnwise_inner(given) if columnwise else given
    return inner if override is not None else plan.quantizers.weight.both.columnwise_inner(inner)


def for_dgrad(plan: Plan, saved: Inner, rows: int, columns: int, dtype: torch.dtype) -> Inner:
    """The buffers that ``products.dgrad`` reads, from what :func:`kept` gave for a ``(rows, columns)`` weight.

    The columnwise data of a parameter that has none are made from the rowwise ones: exactly where the format can
    (FP8 with one scale, tiles of 128x128 or 16x16), else by quantizing its values once more.
    """
    quantizers = plan.quantizers
    override = quantizers.backward_override
    if override == "high_precision" and plan.weight_source != PARAMETER:
        return saved
    if override is None and (plan.weight_source != PARAMETER or plan.weight_usages[1]):
        return saved
    reader = quantizers.weight.rowwise if plan.weight_usages[0] else quantizers.weight.columnwise
    if override is not None:
        return (_values(plan, reader, saved, rows, columns, dtype),)
    if plan.weight_usages[0]:
        made = reader.columnwise_from_rowwise(saved)
        if made is not None:
            return made
    again = _values(plan, reader, saved, rows, columns, dtype)
    return products.quantized(quantizers.weight.columnwise, again, quantizers.alignment, plan)


def _values(plan: Plan, reader: Quantizer, inner: Inner, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    quantizers = plan.quantizers
    return products.values(reader, quantizers.weight.both, inner, rows, columns, quantizers.alignment, dtype)
