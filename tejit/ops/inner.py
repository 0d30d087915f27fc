"""The ops as functions: quantized tensors as lists of plain inner tensors, which any op and any graph takes.

Quantizing into given tensors is ``Quantizer.update_quantized``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tejit import refusals
from tejit.ops import library
from tejit.tensor import Quantizer

_WHAT = "an op that takes a quantizer"


def _check(x: Any) -> None:
    """Raises for what torch would refuse before the op is asked."""
    refusals.refuse_jit_tracing(_WHAT)
    if isinstance(x, Tensor):
        refusals.refuse_to_quantize(x)


def quantize(x: Tensor, q: Quantizer) -> list[Tensor]:
    """The inner tensors of quantized ``x``, in the order of ``TensorSpec(...).inner_names()``; without derivative.

    Args:
        x: float32, bfloat16 or float16, any strides.
        q: a quantizer of a registered class.

    Raises:
        TypeError: ``x`` has another dtype, or ``q``'s class is not registered.
        ValueError: ``q`` has no usage, or its format cannot hold the shape.
    """
    _check(x)
    return library.quantize_op(x, q)


def quantize_split(x: Tensor, sections: Sequence[int], quantizers: Sequence[Quantizer]) -> list[list[Tensor]]:
    """``x`` split along its first dimension, each section quantized by its own quantizer.

    Args:
        x: as in :func:`quantize`.
        sections: rows of each section; they add up to ``x.shape[0]``.
        quantizers: one a section.

    Returns:
        The inner tensors of each section.
    """
    _check(x)
    flat = iter(library.quantize_split_op(x, list(sections), list(quantizers)))
    rest = tuple(x.shape[1:])
    groups = []
    for rows, quantizer in zip(sections, quantizers, strict=True):
        names = quantizer.inner_tensor_specs((rows, *rest), x.device)
        groups.append([next(flat) for _ in names])
    return groups


def dequantize(
    inner: Sequence[Tensor],
    shape: Sequence[int],
    q: Quantizer,
    dtype: torch.dtype,
    *,
    nominal: torch.dtype | None = None,
) -> Tensor:
    """The values of a quantized tensor, given as inner tensors; without derivative.

    Args:
        inner: as :func:`quantize` returned them.
        shape: of the tensor.
        q: what quantized it.
        dtype: of the result.
        nominal: of the tensor that was quantized, where that is another dtype; it matters to formats whose buffers
            have it (Identity).

    Raises ``ValueError`` where ``inner`` are not the inner tensors of such a tensor.
    """
    refusals.refuse_jit_tracing(_WHAT)
    return library.dequantize_op(list(inner), list(shape), q, dtype if nominal is None else nominal, dtype)


def fake_quantize(x: Tensor, q: Quantizer | None) -> Tensor:
    """``x`` rounded to what ``q``'s format can hold, in ``x``'s dtype; a copy of ``x`` where ``q`` is None.

    Differentiable: the gradient goes straight through.
    """
    _check(x)
    return library.fake_quantize_op(x, q)
