"""Activations, plain and with quantized output: what the rest of the package calls.

Each function goes through the compiled op where there is one and through the pure-torch reference elsewhere (see
``kernels.backend``); the bytes are the same. On a GPU the kernels are tuned for bfloat16 (output columns a multiple of
8, an aligned address); anything else writes the activation to memory and quantizes that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.kernels import backend
from tejit.kernels.activation import reference
from tejit.kernels.activation.reference import KINDS
from tejit.kernels.arguments import refuse_gradients
from tejit.kernels.fused import Cast, Four

__all__ = ["KINDS", "activation", "activation_quantize"]

_TRAINS = "tejit.LayerNormMLP and TransformerLayer train"


def activation(x: Tensor, kind: str, gated: bool) -> Tensor:
    """``f(x)``, or ``f(x[:, :F]) * x[:, F:]`` where ``gated``, computed in float32 and rounded once.

    Args:
        x: ``(M, F)``, or ``(M, 2 F)`` where ``gated``; float32, bfloat16 or float16, any strides.
        kind: one of :data:`KINDS`: GELU by tanh, ReLU, SiLU, squared ReLU, quick GELU, sigmoid.

    Returns:
        ``(M, F)`` in ``x``'s dtype.

    Raises ``ValueError`` for another ``kind``, ``RuntimeError`` for an ``x`` that is no matrix or has no halves,
    and in grad mode for one that requires grad: it has no derivative.
    """
    refuse_gradients("kernels.activation.activation", _TRAINS, x=x)
    run = torch.ops.tejit.activation.default if backend.use_ops(x.device) else reference.activation
    return run(x, _number(kind), gated)


def activation_quantize(x: Tensor, kind: str, gated: bool, multiple: int, cast: Cast) -> Four:
    """:func:`activation`, rows of zeros added up to a multiple, and quantized: the bytes that the format makes of it.

    Args:
        x, kind, gated: as in :func:`activation`.
        multiple: of the number of rows of the output.
        cast: the format, see :class:`~tejit.kernels.fused.Cast`; ``amax`` of delayed scaling is updated.

    Raises as :func:`activation` and as the format's own op.
    """
    refuse_gradients("kernels.activation.activation_quantize", _TRAINS, x=x)
    arguments = (x, _number(kind), gated, multiple, *cast)
    run = torch.ops.tejit.activation_quantize.default if backend.use_ops(x.device) else reference.activation_quantize
    row, row_scale_inv, col, col_scale_inv = run(*arguments)
    return row, row_scale_inv, col, col_scale_inv


def _number(kind: str) -> int:
    if kind not in KINDS:
        raise ValueError(f"the kind of activation is {kind!r}, but one of {', '.join(KINDS)} is needed")
    return KINDS.index(kind)
