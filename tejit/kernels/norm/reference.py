"""LayerNorm and RMSNorm in plain torch: the readable specification, and what runs without a compiler.

``y = (x * rstd + shift) * gamma + beta`` in float32, each product and the sum after it rounded once (a fused
multiply-add), then rounded to ``x``'s dtype. ``mean`` is the sum of a row over K; ``rstd`` is ``1 / sqrt(mean square of
x - mean, plus eps)``, with IEEE's division and square root; ``shift`` is ``-(mean * rstd)``, rounded, and -0
for a mean of 0. RMSNorm has no mean: 0 takes its place.

The sums have one order, which the kernels have too, so that all find the same bits: element ``i`` is added to sum
``i % 2048``, in order, a square by a fused multiply-add; the 2048 become one by trees within eight neighbours (strides
4, 2, 1), within 32 of these (16, 8, 4, 2, 1) and over the last eight (4, 2, 1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tejit.kernels.arguments import require_dtype, require_matrix, require_multiple, require_same_device
from tejit.kernels.fp8.reference import divide
from tejit.kernels.fused import Cast, Four, quantized
from tejit.kernels.rounding import as_rounded, multiply_add

_NEIGHBOURS, _LANES, _WARPS = 8, 32, 8
_SUMS = _NEIGHBOURS * _LANES * _WARPS


def _halved(sums: Tensor) -> Tensor:
    """The last dimension, a power of two, summed by a tree whose strides begin with the largest."""
    while (half := sums.shape[-1] // 2) > 0:
        sums = sums[..., :half] + sums[..., half:]
    return sums


def sum_of_rows(x: Tensor, squared: bool = False) -> Tensor:
    """The sums over the rows of a float32 matrix or of its squares, ``(M, 1)``, in the fixed order."""
    rows, columns = x.shape
    chunks = -(-columns // _SUMS)
    x = F.pad(x, (0, chunks * _SUMS - columns)).reshape(rows, chunks, _SUMS)
    sums = x.new_zeros((rows, _SUMS))
    for chunk in range(chunks):
        values = x[:, chunk]
        sums = multiply_add(values, values, sums) if squared else sums + values
    sums = _halved(sums.reshape(rows, _WARPS * _LANES, _NEIGHBOURS))
    return _halved(_halved(sums.reshape(rows, _WARPS, _LANES)).reshape(rows, _WARPS))


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    check(x, weight, bias, eps)
    values = as_rounded(x).to(torch.float32)
    count = values.new_full((1, 1), values.shape[1])
    mean = x.new_empty((0,), dtype=torch.float32)
    if not rms:
        mean = divide(sum_of_rows(values), count)
    variance = divide(sum_of_rows(values if rms else values - mean, squared=True), count)
    # float64's root of a float32 number rounds to the right float32.
    root = torch.sqrt((variance + torch.full_like(variance, eps)).to(torch.float64)).to(torch.float32)
    rstd = divide(torch.ones_like(root), root)
    y = values * rstd if rms else multiply_add(values, rstd, torch.where(mean == 0, -0.0, -(mean * rstd)))
    gamma = beta = None
    if weight is not None:
        gamma = weight.to(torch.float32) + 1 if zero_centered else weight.to(torch.float32)
    if bias is not None:
        beta = bias.to(torch.float32)
    if gamma is not None:
        y = y * gamma if beta is None else multiply_add(y, gamma, beta)
    elif beta is not None:
        y = y + beta
    return as_rounded(y.to(x.dtype).contiguous()), mean, rstd


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
    four: Four = quantized(padded_rows(y, multiple), Cast(*cast))  # type: ignore[arg-type]
    return *four, mean, rstd


def padded_rows(y: Tensor, multiple: int) -> Tensor:
    return F.pad(y, (0, 0, 0, -y.shape[0] % multiple)) if multiple > 1 else y


def check(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    """Raises ``RuntimeError`` for arguments that no norm can be computed of."""
    require_matrix(x)
    require_same_device(x, weight=weight, bias=bias)
    if not eps >= 0:
        raise RuntimeError(f"tejit: eps is {eps}, but a number >= 0 is needed")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        if tuple(value.shape) != (x.shape[1],):
            raise RuntimeError(
                f"tejit: {name} has shape {tuple(value.shape)}, but ({x.shape[1]},) is needed: one number for each"
                " column of x"
            )
        require_dtype(name, value)
