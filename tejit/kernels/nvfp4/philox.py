"""Philox4x32-10, the counter-based generator behind stochastic rounding (Salmon et al., SC 2011), in plain torch.

A block's 16 bytes depend on the seed and on where the block lies in its own output, never on how the work is
shared out, so every implementation gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_TOP_BIT = 0x80000000


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """(upper, lower) 32 bits of ``factor * word``. In halves: the whole product does not fit int64."""
    low, high = factor * (word & 0xFFFF), factor * (word >> 16)
    rest = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (rest >> 32), rest & _WORD


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Ten rounds on four counter words and two key words (int64 tensors of 32-bit numbers that broadcast)."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(_ROUNDS):
        (high_a, low_a), (high_c, low_c) = _product(_MULTIPLIERS[0], a), _product(_MULTIPLIERS[1], c)
        a, b, c, d = high_c ^ b ^ k, low_c, high_a ^ d ^ m, low_a
        k, m = (k + _KEY_STEPS[0]) & _WORD, (m + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def random_bytes(block: Tensor, seed: Tensor, columnwise: bool) -> Tensor:
    """16 random numbers from 0 to 255 for each block; int64 ``(*block.shape, 16)``.

    Args:
        block: int64, the linear index of each block of 16 elements in its output.
        seed: int64 ``(2,)``: the key, and an offset that fills the counter's upper half.
        columnwise: add 2^63 to the offset, so that a tensor's two directions round independently.
    """
    low, high = seed & _WORD, (seed >> 32) & _WORD
    offset_high = high[1] ^ _TOP_BIT if columnwise else high[1]
    words = philox((block & _WORD, (block >> 32) & _WORD, low[1], offset_high), (low[0], high[0]))
    shifts = torch.arange(0, 32, 8, device=block.device)
    pieces = (torch.stack(torch.broadcast_tensors(*words), -1)[..., None] >> shifts) & 0xFF
    return pieces.reshape(*block.shape, 16)
