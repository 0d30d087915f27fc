"""LayerNorm and RMSNorm, and either with quantized output: what the rest of the package calls.

Each function goes through the compiled op where there is one and through the pure-torch reference elsewhere (see
``kernels.backend``); the bytes are the same. On a GPU the kernels are tuned for bfloat16 (K a multiple of 8, aligned
addresses, parameters in bfloat16 or float32); anything else writes the norm to memory and quantizes that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.kernels import backend
from tejit.kernels.arguments import refuse_gradients
from tejit.kernels.fused import Cast, Four
from tejit.kernels.norm import reference

__all__ = ["norm", "norm_quantize"]

_TRAINS = "tejit.LayerNorm, RMSNorm and LayerNormLinear train"


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, zero_centered: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Normalise the rows of a matrix.

    Args:
        x: ``(M, K)`` in float32, bfloat16 or float16, any strides.
        weight: gamma, ``(K,)``, any of these dtypes, or None for 1.
        bias: beta, ``(K,)``, or None.
        eps: added to the mean square, at least 0.
        rms: RMSNorm (Zhang and Sennrich 2019); else LayerNorm (Ba et al. 2016).
        zero_centered: whether the weight holds ``gamma - 1``.

    Returns:
        ``(y, mean, rstd)``: ``x``'s shape and dtype; float32 ``(M, 1)``, None for RMSNorm; float32 ``(M, 1)``.

    Raises ``RuntimeError`` for an ``x`` that is no matrix, parameters of another shape, an ``eps`` below 0, and in grad
    mode for tensors that require grad: it has no derivative.
    """
    refuse_gradients("kernels.norm.norm", _TRAINS, x=x, weight=weight, bias=bias)
    arguments = (x, weight, bias, eps, rms, zero_centered)
    run = torch.ops.tejit.norm.default if backend.use_ops(x.device) else reference.norm
    y, mean, rstd = run(*arguments)
    return y, None if rms else mean, rstd


def norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    zero_centered: bool,
    multiple: int,
    cast: Cast,
) -> tuple[Four, Tensor | None, Tensor]:
    """:func:`norm`, rows of zeros added up to a multiple, and quantized: the bytes that the format makes of ``y``.

    Args:
        x, weight, bias, eps, rms, zero_centered: as in :func:`norm`.
        multiple: of the number of rows of the output.
        cast: the format, see :class:`~tejit.kernels.fused.Cast`; ``amax`` of delayed scaling is updated.

    Returns:
        The buffers, as :data:`~tejit.kernels.fused.Four` says, then ``mean`` and ``rstd`` as in :func:`norm`.

    Raises as :func:`norm` and as the format's own op.
    """
    refuse_gradients("kernels.norm.norm_quantize", _TRAINS, x=x, weight=weight, bias=bias)
    arguments = (x, weight, bias, eps, rms, zero_centered, multiple, *cast)
    run = torch.ops.tejit.norm_quantize.default if backend.use_ops(x.device) else reference.norm_quantize
    row, row_scale_inv, col, col_scale_inv, mean, rstd = run(*arguments)
    return (row, row_scale_inv, col, col_scale_inv), None if rms else mean, rstd
