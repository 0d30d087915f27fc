"""LayerNorm and RMSNorm in plain torch: the readable specification, and what runs without a compiler.

``y = ((x - mean) * rstd) * gamma + beta`` in float32, each operation rounded on its own (no fused multiply-add), then
rounded to ``x``'s dtype. ``mean`` is the sum of a row over K; ``rstd`` is ``1 / sqrt(mean square of x - mean, plus
eps)``, with IEEE's division and square root. RMSNorm has no mean: 0 takes its place.

The sums have one order, which the kernels have too, so that all find the same bits: element ``i`` is added to sum
``i % 2048``, in order; the 2048 become one by trees within eight neighbours (strides 4, 2, 1), within 32 of these
(16, 8, 4, 2, 1) and over the last eight (4, 2, 1). Inductor for a GPU may contract a product and a sum: there, and only
there, a compiled graph of this file differs from the kernels in last bits (see ``TEJIT_BACKEND``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tejit.kernels.fp8.reference import divide
from tejit.kernels.fused import Cast, Four, quantized
from tejit.kernels.rounding import as_rounded

_NEIGHBOURS, _LANES, _WARPS = 8, 32, 8
_SUMS = _NEIGHBOURS * _LANES * _WARPS


def _halved(sums: Tensor) -> Tensor:
    """The last dimension, a power of two, summed by a tree whose strides begin with the largest."""
    while (half := sums.shape[-1] // 2) > 0:
        sums = sums[..., :half] + sums[..., half:]
    return sums


def sum_of_rows(x: Tensor) -> Tensor:
    """The sums over the rows of a float32 matrix, ``(M, 1)``, in the fixed order."""
    rows, columns = x.shape
    chunks = -(-columns // _SUMS)
    x = F.pad(x, (0, chunks * _SUMS - columns)).reshape(rows, chunks, _SUMS)
    sums = x.new_zeros((rows, _SUMS))
    for chunk in range(chunks):
        sums = sums + x[:, chunk]
    sums = _halved(sums.reshape(rows, _WARPS * _LANES, _NEIGHBOURS))
    return _halved(_halved(sums.reshape(rows, _WARPS, _LANES)).reshape(rows, _WARPS))


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, bias, eps)
    values = as_rounded(x).to(torch.float32)
    count = values.new_full((1, 1), values.shape[1])
    mean = x.new_empty((0,), dtype=torch.float32)
    if not rms:
        mean = divide(sum_of_rows(values), count)
        values = values - mean
    variance = divide(sum_of_rows(values * values), count)
    # float64's root of a float32 number rounds to the right float32.
    root = torch.sqrt((variance + torch.full_like(variance, eps)).to(torch.float64)).to(torch.float32)
    rstd = divide(torch.ones_like(root), root)
    y = values * rstd
    if weight is not None:
        gamma = weight.to(torch.float32)
        y = y * (gamma + 1 if zero_centered else gamma)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return as_rounded(y.to(x.dtype)), mean, rstd


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
    y, mean, rstd = norm(x, weight, bias, eps, rms, zero_centered)
    four: Four = quantized(padded_rows(y, multiple), Cast(*cast))  # type: ignore[arg-type]
    return *four, mean, rstd


def padded_rows(y: Tensor, multiple: int) -> Tensor:
    return F.pad(y, (0, 0, 0, -y.shape[0] % multiple)) if multiple > 1 else y


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    if x.dim() != 2:
        raise RuntimeError(f"tejit: x has shape {tuple(x.shape)}, but a matrix (rows, columns) is needed; reshape it")
    if not eps >= 0:
        raise RuntimeError(f"tejit: eps is {eps}, but a number >= 0 is needed")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and tuple(value.shape) != (x.shape[1],):
            raise RuntimeError(
                f"tejit: {name} has shape {tuple(value.shape)}, but ({x.shape[1]},) is needed: one number for each"
                " column of x"
            )
