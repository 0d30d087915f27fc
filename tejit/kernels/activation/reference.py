"""Activations in plain torch: the readable specification, and what runs without a compiler.

Everything is float32 sums, products and reciprocals, each rounded on its own, and no function of the platform's libm:
so the kernels for CPU and GPU find the same bits. GELU by tanh (Hendrycks and Gimpel 2016) is ``x * sigmoid(2 u)`` with
``u = sqrt(2 / pi) * (x + 0.044715 x^3)``, quick GELU, of the same paper, ``x * sigmoid(1.702 x)``, SiLU ``x *
sigmoid(x)``, squared ReLU ``relu(x)^2`` (So et al. 2021). Where its argument is below -87, a sigmoid is 0. A gated
activation (Shazeer 2020) is ``f(x[:, :F]) * x[:, F:]``. The result is rounded to ``x``'s dtype once. Inductor for a GPU
may contract a product and a sum: there, and only there, a compiled graph of this file differs in last bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tejit.format_info import FLT_MAX
from tejit.kernels.arguments import require_matrix, require_multiple
from tejit.kernels.fp8.reference import divide
from tejit.kernels.fused import Cast, quantized
from tejit.kernels.norm.reference import padded_rows
from tejit.kernels.rounding import as_rounded

#: The ungated functions, by the number that the ops take.
KINDS = ("gelu", "relu", "silu", "srelu", "qgelu", "sigmoid")

_TWO_ROOT = 2 * math.sqrt(2 / math.pi)
_CUBIC = _TWO_ROOT * 0.044715
_QUICK = 1.702
_LOG2E = math.log2(math.e)
_LN2_HIGH = 0.693359375  # so few bits that its product with an exponent is exact
_LN2_LOW = math.log(2) - _LN2_HIGH
_ROUNDER = 1.5 * 2**23  # what is added to it is rounded to a whole number, in the sum's lower bits
_LOWEST, _HIGHEST = -80.0, 87.0  # 1 + exp is 1; the reciprocal of 1 + exp is a normal number
_TERMS = [1 / math.factorial(n) for n in range(6, -1, -1)]


def _exp(t: Tensor) -> Tensor:
    """exp of float32 numbers from ``_LOWEST`` to ``_HIGHEST``, within 2 units in the last place."""
    shifted = t * _LOG2E + _ROUNDER
    n = shifted - _ROUNDER
    r = t - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    power = torch.full_like(r, _TERMS[0])
    for term in _TERMS[1:]:
        power = power * r + term
    return (power.view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)


def _times_sigmoid(x: Tensor, z: Tensor) -> Tensor:
    negative = -z
    t = torch.where(negative > _LOWEST, negative, _LOWEST)  # a NaN comes back with x
    inside = t < _HIGHEST
    power = _exp(torch.where(inside, t, _HIGHEST))
    sigmoid = divide(torch.ones_like(power), power + 1)
    return x * torch.where(inside, sigmoid, 0.0)


def function(x: Tensor, kind: int) -> Tensor:
    """One of :data:`KINDS` of float32 numbers."""
    name = KINDS[kind]
    if name == "silu":
        return _times_sigmoid(x, x)
    if name == "qgelu":
        return _times_sigmoid(x, x * _QUICK)
    if name == "sigmoid":
        return _times_sigmoid(torch.where(x.isnan(), x, 1.0), x)
    if name == "gelu":
        square = x * x
        square = torch.where(square < FLT_MAX, square, FLT_MAX)
        return _times_sigmoid(x, x * (square * _CUBIC + _TWO_ROOT))
    positive = torch.where(x <= 0, 0.0, x)
    return positive if name == "relu" else positive * positive


def activation(x: Tensor, kind: int, gated: bool) -> Tensor:
    check(x, kind, gated)
    values = as_rounded(x).to(torch.float32)
    if not gated:
        return as_rounded(function(values, kind).to(x.dtype).contiguous())
    half = x.shape[1] // 2
    return as_rounded((function(values[:, :half], kind) * values[:, half:]).to(x.dtype).contiguous())


def activation_quantize(x: Tensor, kind: int, gated: bool, multiple: int, *cast: object) -> tuple[Tensor, ...]:
    require_multiple(multiple)
    return quantized(padded_rows(activation(x, kind, gated), multiple), Cast(*cast))  # type: ignore[arg-type]


def check(x: Tensor, kind: int, gated: bool) -> None:
    """Raises ``RuntimeError`` for arguments that no activation can be computed of."""
    require_matrix(x)
    if not 0 <= kind < len(KINDS):
        raise RuntimeError(f"tejit: kind is {kind}, but 0 to {len(KINDS) - 1} is needed, of {', '.join(KINDS)}")
    if gated and x.shape[1] % 2:
        raise RuntimeError(
            f"tejit: x has {x.shape[1]} columns, but a gated activation needs two halves; pass an even number"
        )
