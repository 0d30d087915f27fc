"""What the ops of norms return, without data: shapes, dtypes, devices and strides of their outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.kernels.arguments import require_multiple
from tejit.kernels.fused import Cast, described
from tejit.kernels.norm import reference


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    reference.check(x, weight, bias, eps)
    rows, columns = x.shape
    return (
        x.new_empty((rows, columns)),
        x.new_empty((0,) if rms else (rows, 1), dtype=torch.float32),
        x.new_empty((rows, 1), dtype=torch.float32),
    )


def norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    zero_centered: bool,
    multiple: int,
    *cast: object,
) -> tuple[Tensor, ...]:
    require_multiple(multiple)
    y, mean, rstd = norm(x, weight, bias, eps, rms, zero_centered)
    rows, columns = y.shape
    padded = x.new_empty((-(-rows // multiple) * multiple, columns))
    return *described(padded, Cast(*cast)), mean, rstd  # type: ignore[arg-type]
