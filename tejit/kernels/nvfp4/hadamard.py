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


def _signs(sign_mask: int, device: torch.device) -> Tensor:
    """float32 ``(16, 1)``: -1 where the mask's bit is set."""
    bits = (sign_mask >> torch.arange(SIZE, device=device)) & 1
    return (1 - 2 * bits).to(torch.float32)[:, None]


def _butterflies(blocks: Tensor) -> Tensor:
    """``4 H`` along dimension 1 of ``(n, 16, K)``: radix-2 steps of strides 1, 2, 4, 8 in this order."""
    index = torch.arange(SIZE, device=blocks.device)
    for stride in (1, 2, 4, 8):
        own = (1 - 2 * ((index & stride) != 0).to(torch.int64)).to(torch.float32)[:, None]
        blocks = blocks[:, index ^ stride] + blocks * own  # a + b where the bit is clear, a - b where it is set
    return blocks


def rotate(x: Tensor, sign_mask: int) -> Tensor:
    """The transform of ``x`` ``(M, K)``, M a multiple of 16: bfloat16 ``(M, K)``, computed in float32."""
    rows, columns = x.shape
    blocks = x.to(torch.float32).reshape(rows // SIZE, SIZE, columns) * _signs(sign_mask, x.device)
    return as_rounded((_butterflies(blocks) * _FACTOR).to(torch.bfloat16)).reshape(rows, columns)


def rotate_back(y: Tensor, sign_mask: int) -> Tensor:
    """The inverse transform of float32 ``y`` ``(M, K)``, in float32."""
    rows, columns = y.shape
    blocks = _butterflies(y.reshape(rows // SIZE, SIZE, columns)) * _FACTOR
    return (blocks * _signs(sign_mask, y.device)).reshape(rows, columns)
