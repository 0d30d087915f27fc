"""What the ops of activations return, without data: shapes, dtypes, devices and strides of their outputs."""

from __future__ import annotations

from torch import Tensor

from tejit.kernels.activation import reference
from tejit.kernels.arguments import require_multiple
from tejit.kernels.fused import Cast, described


def activation(x: Tensor, kind: int, gated: bool) -> Tensor:
    reference.check(x, kind, gated)
    rows, columns = x.shape
    return x.new_empty((rows, columns // 2 if gated else columns))


def activation_quantize(x: Tensor, kind: int, gated: bool, multiple: int, *cast: object) -> tuple[Tensor, ...]:
    require_multiple(multiple)
    y = activation(x, kind, gated)
    padded = y.new_empty((-(-y.shape[0] // multiple) * multiple, y.shape[1]))
    return described(padded, Cast(*cast))  # type: ignore[arg-type]
