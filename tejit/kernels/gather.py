"""Which block each element of a dimension lies in: by this index the references gather each element's scale."""

from __future__ import annotations

import torch
from torch import Tensor


def block_of_each(size: int, block: int, device: torch.device) -> Tensor:
    """``i // block`` for ``i`` from 0 to ``size`` - 1; int64 ``(size,)``.

    Where a loop's index is divided by a number, inductor's CPU backend may cut the loop into ``size // block`` runs of
    ``block`` (``CppScheduling.try_loop_split``, torch 2.11 to 2.14) and never computes what lies behind the last whole
    one: the codes of the last columns stayed 0. It does so for the bare index alone, and ``(2 i + 1) // (2 block)``
    is the same number.
    """
    return (2 * torch.arange(size, device=device) + 1) // (2 * block)
