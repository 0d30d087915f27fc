"""The random Hadamard transform along the rows of a matrix: spreads an outlier over the 16 elements of its block.

``y = x . diag(signs) . H`` for 16 consecutive elements of a column, ``H`` Sylvester's matrix over 4. ``H`` is its own
inverse, and of two operands that were rotated alike the product is that of the originals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.format_info import NVFP4
from tejit.kernels.rounding import as_rounded

SIZE = NVFP4.block or 0
_FACTOR = SIZE**-0.5


def _signs(row: Tensor, sign_mask: int) -> Tensor:
    """float32 ``(M, 1)``: -1 where the mask's bit of a row's place in its block is set."""
    return (1 - 2 * ((sign_mask >> (row % SIZE)) & 1)).to(torch.float32)[:, None]


def _butterflies(x: Tensor, row: Tensor) -> Tensor:
    """``4 H`` along each 16 rows of ``(M, K)``: radix-2 steps of strides 1, 2, 4, 8 in this order."""
    # Rows are gathered, not reshaped to (M / 16, 16, K): a graph of 16 rows would be another one than of more.
    for stride in (1, 2, 4, 8):
        own = (1 - 2 * ((row & stride) != 0).to(torch.int64)).to(torch.float32)[:, None]
        x = x[row ^ stride] + x * own  # a + b where the bit is clear, a - b where it is set
    return x


def rotate(x: Tensor, sign_mask: int) -> Tensor:
    """The transform of ``x`` ``(M, K)``, M a multiple of 16: bfloat16 ``(M, K)``, computed in float32."""
    row = torch.arange(x.shape[0], device=x.device)
    signed = x.to(torch.float32) * _signs(row, sign_mask)
    return as_rounded((_butterflies(signed, row) * _FACTOR).to(torch.bfloat16))


def rotate_back(y: Tensor, sign_mask: int) -> Tensor:
    """The inverse transform of float32 ``y`` ``(M, K)``, in float32."""
    row = torch.arange(y.shape[0], device=y.device)
    return (_butterflies(y, row) * _FACTOR) * _signs(row, sign_mask)
