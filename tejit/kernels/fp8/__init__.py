"""FP8 with one scale per tensor: what the rest of the package calls.

Each function goes through the compiled op where there is one and through the pure-torch reference
elsewhere (see ``kernels.backend``); the bytes are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.kernels import backend
from tejit.kernels.arguments import QUANTIZES, refuse_gradients
from tejit.kernels.fp8 import reference
from tejit.kernels.fp8.reference import dequantize, transposed_shape

__all__ = [
    "amax",
    "delayed_update_",
    "dequantize",
    "make_empty",
    "quantize_current",
    "quantize_current_out",
    "quantize_delayed",
    "quantize_delayed_out",
    "transposed_shape",
]


def amax(x: Tensor) -> Tensor:
    """max|x| as float32 ``(1,)``; NaN elements do not enter, inf does, an empty tensor gives 0."""
    refuse_gradients("kernels.fp8.amax", QUANTIZES, x=x)
    if backend.use_ops(x.device):
        return torch.ops.tejit.fp8_amax.default(x)
    return reference.amax(x)


def quantize_current(
    x: Tensor, fp8: int, data: bool, transpose: bool, pow2: bool, eps: float, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with a scale taken from ``x`` itself (or from ``amax``, float32 ``(1,)``, where given).

    Args:
        x: float32, bfloat16 or float16, any shape and strides.
        fp8: ``ElementInfo.code`` of the element type.
        data: whether bytes in the order of ``x`` are wanted.
        transpose: whether bytes of the transpose are wanted, see :func:`transposed_shape`.
        pow2: round the scale down to a power of two.
        eps: lower bound of amax.

    Returns:
        ``(data, transpose, scale_inv)``: uint8 of ``x.shape``, uint8 transposed, float32 ``(1,)``; an
        unwanted buffer is uint8 of shape ``(0,)``.
    """
    refuse_gradients("kernels.fp8.quantize_current", QUANTIZES, x=x, amax=amax)
    if backend.use_ops(x.device):
        return torch.ops.tejit.fp8_quantize_current.default(x, fp8, data, transpose, pow2, eps, amax)
    return reference.quantize_current(x, fp8, data, transpose, pow2, eps, amax)


def quantize_current_out(
    x: Tensor,
    fp8: int,
    pow2: bool,
    eps: float,
    amax: Tensor | None,
    noop: Tensor | None,
    data: Tensor | None,
    transpose: Tensor | None,
    scale_inv: Tensor,
) -> None:
    """:func:`quantize_current` into given buffers; ``noop`` (float32, one element) equal to 1.0 leaves them as
    they are."""
    refuse_gradients("kernels.fp8.quantize_current_out", QUANTIZES, x=x, amax=amax)
    if backend.use_ops(x.device):
        torch.ops.tejit.fp8_quantize_current_out.default(x, fp8, pow2, eps, amax, noop, data, transpose, scale_inv)
    else:
        reference.quantize_current_out(x, fp8, pow2, eps, amax, noop, data, transpose, scale_inv)


def quantize_delayed(
    x: Tensor, fp8: int, data: bool, transpose: bool, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize with the given ``scale``, and take the elements of ``x`` into the running ``amax``.

    Args:
        x, fp8, data, transpose: as in :func:`quantize_current`.
        scale: float32 ``(1,)`` on ``x``'s device: the multiplier of ``x``.
        amax: float32 ``(1,)`` on ``x``'s device; becomes ``max(amax, max|x|)``. NaN elements of ``x`` do not
            enter, inf does; a NaN that is there already stays.

    Returns:
        ``(data, transpose, scale_inv)`` as in :func:`quantize_current`; ``scale_inv`` is ``1 / scale``.

    Raises ``RuntimeError`` for a ``scale`` or ``amax`` of another dtype, shape or device.
    """
    refuse_gradients("kernels.fp8.quantize_delayed", QUANTIZES, x=x, scale=scale)
    if backend.use_ops(x.device):
        return torch.ops.tejit.fp8_quantize_delayed.default(x, fp8, data, transpose, scale, amax)
    return reference.quantize_delayed(x, fp8, data, transpose, scale, amax)


def quantize_delayed_out(
    x: Tensor,
    fp8: int,
    scale: Tensor,
    amax: Tensor,
    noop: Tensor | None,
    data: Tensor | None,
    transpose: Tensor | None,
    scale_inv: Tensor,
) -> None:
    """:func:`quantize_delayed` into given buffers; ``noop`` (float32, one element) equal to 1.0 leaves them, and
    ``amax``, as they are."""
    refuse_gradients("kernels.fp8.quantize_delayed_out", QUANTIZES, x=x, scale=scale)
    if backend.use_ops(x.device):
        torch.ops.tejit.fp8_quantize_delayed_out.default(x, fp8, scale, amax, noop, data, transpose, scale_inv)
    else:
        reference.quantize_delayed_out(x, fp8, scale, amax, noop, data, transpose, scale_inv)


def delayed_update_(
    histories: list[Tensor],
    scales: list[Tensor],
    previous: list[Tensor],
    fp8_max: float,
    length: int,
    margin: int,
    algo: str,
) -> None:
    """``delayed.update_in_place`` as an op: one mutation to a graph, with eager's bits whatever compiles it."""
    torch.ops.tejit.fp8_delayed_update_.default(histories, scales, previous, fp8_max, length, margin, algo)


def make_empty(
    shape: tuple[int, ...], data: bool, transpose: bool, device: torch.device, pin_memory: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised buffers of a per-tensor FP8 tensor of ``shape``, in one call of the extension."""
    return torch.ops.tejit.fp8_make_empty.default(shape, data, transpose, device, pin_memory)
