"""Norms and activations of the modules, forward and backward, and their quantized output.

Every function computes in float32 and rounds once. ``normed`` and ``activated`` quantize in the kernel that computes,
where the quantizer has such a cast: FP8 with current scaling, in blocks of 1x128, MXFP8. For the others (NVFP4, 2D
blocks, Hybrid, recipes with delayed scaling, an amax that a group reduces) and where columns need padding they are
``norm`` or ``activate``, then ``products.quantized``. The bytes are the same either way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tejit.kernels import norm as norm_kernels
from tejit.kernels.activation import activation, activation_quantize
from tejit.kernels.fused import FUSED_CURRENT, Cast
from tejit.kernels.padding import known_zero
from tejit.nn import products
from tejit.nn.products import NO_STATE, Plan, State
from tejit.tensor import Quantizer
from tejit.tensor.quantizer import Inner

#: The kinds of norm, by the names that modules take as ``normalization``.
NORMS = ("LayerNorm", "RMSNorm")

#: The kinds of activation, by the names that modules take as ``activation``, each with the function that it is or,
#: where it is gated, that its first half goes through.
ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "srelu": "srelu",
    "qgelu": "qgelu",
    "geglu": "gelu",
    "reglu": "relu",
    "swiglu": "silu",
    "sreglu": "srelu",
    "qgeglu": "qgelu",
    "glu": "sigmoid",
}
#: Those with a gate: ``f(first half of the columns) * second half``.
GATED = ("geglu", "reglu", "swiglu", "sreglu", "qgeglu", "glu")

#: What quick GELU multiplies its input by, before the sigmoid.
QUICK = 1.702


def normed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: str,
    zero_centered_gamma: bool,
    quantizer: Quantizer,
    multiple: int,
    dtype: torch.dtype | None = None,
    plan: Plan | None = None,
    state: State = NO_STATE,
) -> tuple[Inner, Tensor | None, Tensor]:
    """:func:`norm`, quantized.

    Args:
        x, weight, bias, eps, kind, zero_centered_gamma, dtype: as in :func:`norm`.
        quantizer: makes the output; any directions.
        multiple: what both sizes of the output are padded to, with zeros.
        plan, state: of the product whose input this is, as in ``products.quantized``.

    Returns:
        The quantizer's buffers, and ``mean`` and ``rstd`` as in :func:`norm`.
    """
    cast = None if dtype is not None and dtype != x.dtype else _cast(quantizer, x, plan)
    if cast is None or not known_zero(-x.shape[1] % multiple):
        y, mean, rstd = norm(x, weight, bias, eps, kind, zero_centered_gamma, dtype)
        return products.quantized(quantizer, y, multiple, plan, state, products.INPUT), mean, rstd
    rms = kind == "RMSNorm"
    four, mean, rstd = norm_kernels.norm_quantize(x, weight, bias, eps, rms, zero_centered_gamma, multiple, cast)
    return quantizer.fused_inner(four), mean, rstd


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: str,
    zero_centered_gamma: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Normalise the rows of a matrix: ``(x - mean) * rstd * gamma + bias``; steps: ``kernels/norm/reference.py``.

    ``LayerNorm`` (Ba et al. 2016): ``rstd = 1 / sqrt(mean of (x - mean)^2 + eps)``. ``RMSNorm`` (Zhang and Sennrich
    2019) has no mean: ``rstd = 1 / sqrt(mean of x^2 + eps)``.

    Args:
        x: ``(M, K)`` in float32, bfloat16 or float16.
        weight: ``(K,)``, any of these; gamma is the weight, or one more where ``zero_centered_gamma``.
        bias: ``(K,)``, or None.
        eps: added to the mean square.
        kind: one of :data:`NORMS`.
        zero_centered_gamma: whether the weight holds ``gamma - 1``.
        dtype: of the output; None is ``x``'s.

    Returns:
        ``(M, K)`` in ``dtype``; the mean, ``(M, 1)`` float32, None for ``RMSNorm``; ``rstd``, ``(M, 1)`` float32.
    """
    wanted = x.dtype if dtype is None else dtype
    values = rounded(x, torch.float32) if wanted != x.dtype else x  # so that the only rounding is to what is wanted
    y, mean, rstd = norm_kernels.norm(values, weight, bias, eps, kind == "RMSNorm", zero_centered_gamma)
    return rounded(y, wanted), mean, rstd


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`norm`: of ``x`` in its dtype, of weight and bias in float32.

    With ``n = (x - mean) * rstd`` and ``g = grad * gamma``: ``rstd * (g - mean of g - n * mean of (g * n))`` over each
    row, the middle term for ``LayerNorm`` (``mean`` is given) only; ``grad * n`` and ``grad``, summed over the rows.
    """
    grad32, n = grad.float(), x.float()
    if mean is not None:
        n = n - mean
    n = n * rstd
    scaled = grad32 * _gamma(weight, zero_centered_gamma)
    dx = scaled - n * (scaled * n).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - scaled.mean(-1, keepdim=True)
    return rounded(dx * rstd, x.dtype), (grad32 * n).sum(0), grad32.sum(0)


def activated(
    x: Tensor, kind: str, quantizer: Quantizer, multiple: int, plan: Plan | None = None, state: State = NO_STATE
) -> Inner:
    """:func:`activate`, padded with zeros to multiples of ``multiple`` and quantized: the quantizer's buffers.

    ``plan`` and ``state`` are those of the product whose input this is, as in ``products.quantized``.
    """
    gated, cast = kind in GATED, _cast(quantizer, x, plan)
    columns = x.shape[1] // 2 if gated else x.shape[1]
    # Current scaling computes twice, and these are dear: the fused kernels took 270 us for 8192x8192 on an H200,
    # torch's GELU and our quantization after it 158.
    if cast is not None and cast.format == FUSED_CURRENT and ACTIVATIONS[kind] not in ("relu", "srelu"):
        cast = None
    if cast is None or not known_zero(-columns % multiple):
        return products.quantized(quantizer, activate(x, kind), multiple, plan, state, products.INPUT)
    return quantizer.fused_inner(activation_quantize(x, ACTIVATIONS[kind], gated, multiple, cast))


def _cast(quantizer: Quantizer, x: Tensor, plan: Plan | None) -> Cast | None:
    """How the kernel that computes is to quantize; None where it cannot: a format that it does not know, an amax that a
    group reduces, the state of a recipe with delayed scaling, which ``products.quantized`` finds the place of."""
    if plan is not None and (plan.quantizers.delayed is not None or plan.group is not None):
        return None
    return quantizer.fused_cast(x)


def activate(x: Tensor, kind: str) -> Tensor:
    """An activation of ``(M, F)``, in ``x``'s dtype, or a gated one of ``(M, 2 F)``: ``f(x[:, :F]) * x[:, F:]``.

    ``kind`` is one of :data:`ACTIVATIONS`: ``gelu`` is the approximation by tanh and ``qgelu`` the one by sigmoid,
    ``x * sigmoid(1.702 x)`` (Hendrycks and Gimpel 2016), ``silu`` is ``x * sigmoid(x)``, ``srelu`` is ``relu(x)^2`` (So
    et al. 2021). The gated ones are those of Shazeer (2020); the function of ``glu`` is ``sigmoid``.
    """
    return activation(x, ACTIVATIONS[kind], kind in GATED)


def activate_backward(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    """The gradient of :func:`activate` for its input, in ``x``'s shape and dtype."""
    grad32 = grad.float()
    if kind not in GATED:
        return rounded(_derivative(grad32, x.float(), kind), x.dtype)
    first, gate = _halves(x)
    function = ACTIVATIONS[kind]
    found = torch.cat([_derivative(grad32 * gate, first, function), grad32 * _function(first, function)], 1)
    return rounded(found, x.dtype)


def _function(x: Tensor, function: str) -> Tensor:
    if function == "gelu":
        return F.gelu(x, approximate="tanh")
    if function == "silu":
        return F.silu(x)
    if function == "qgelu":
        return x * torch.sigmoid(QUICK * x)
    if function == "sigmoid":
        return torch.sigmoid(x)
    positive = F.relu(x)
    return positive if function == "relu" else positive * positive


def _derivative(grad: Tensor, x: Tensor, function: str) -> Tensor:
    """``grad`` times the derivative of the function at ``x``."""
    if function == "gelu":
        return torch.ops.aten.gelu_backward.default(grad, x, approximate="tanh")
    if function == "silu":
        return torch.ops.aten.silu_backward.default(grad, x)
    if function == "qgelu":
        # x * sigmoid(a x) is silu(a x) / a, so the derivative is SiLU's at a x; that overflows where x does not
        largest = torch.finfo(torch.float32).max
        return torch.ops.aten.silu_backward.default(grad, (QUICK * x).clamp(-largest, largest))
    if function == "sigmoid":
        return torch.ops.aten.sigmoid_backward.default(grad, torch.sigmoid(x))
    if function == "relu":
        return torch.ops.aten.threshold_backward.default(grad, x, 0)
    return grad * F.relu(x) * 2  # in this order: twice the largest numbers is no number of float32


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[1] // 2
    return x[:, :half].float(), x[:, half:].float()


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` in ``dtype``; itself where it is: on torch 2.11 a cast of nothing at a function's end loses its
    gradient."""
    return value if value.dtype == dtype else value.to(dtype)
