"""What the FP8 ops return, without data: shapes, dtypes, devices and strides of their outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.kernels.fp8.reference import make_empty as make_empty  # allocation is its own description
from tejit.kernels.fp8.reference import transposed_shape


def _one(like: Tensor) -> Tensor:
    return like.new_empty((1,), dtype=torch.float32)


def amax(x: Tensor) -> Tensor:
    return _one(x)


def scale(amax: Tensor, fp8: int, pow2: bool, eps: float) -> tuple[Tensor, Tensor]:
    return _one(amax), _one(amax)


def quantize_current(
    x: Tensor, fp8: int, data: bool, transpose: bool, pow2: bool, eps: float, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    shape = tuple(x.shape)
    return (
        x.new_empty(shape if data else (0,), dtype=torch.uint8),
        x.new_empty(transposed_shape(shape) if transpose else (0,), dtype=torch.uint8),
        _one(x),
    )


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
    return None


def quantize_delayed(
    x: Tensor, fp8: int, data: bool, transpose: bool, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return quantize_current(x, fp8, data, transpose, False, 0.0, None)


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
    return None


def delayed_update_(
    histories: list[Tensor],
    scales: list[Tensor],
    previous: list[Tensor],
    fp8_max: float,
    length: int,
    margin: int,
    algo: str,
) -> None:
    """Nothing is returned."""
