"""Which linear layers are too small to gain time from low precision, whatever the number of tokens.

A layer ``K -> N`` over ``M`` tokens saves time in its three GEMMs, ``6 M K N`` operations, and pays for quantizing
input, weight and ``grad_output``, ``M K + K N + M N`` elements. It can gain only where

    6 M K N (1 / bf16 - 1 / low)  >  (M K + K N + M N) bytes / copy

with the rates below, that is where ``1 / M + 1 / K + 1 / N`` is below a bound of the format. With tokens without end
``1 / M`` is 0: a layer that does not gain then never does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tejit.formats import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from tejit.formats.float8.slot import Float8SlotQuantizer
from tejit.recipe.recipes import LinearQuantizers
from tejit.tensor import Quantizer

#: Measured on one H200, in operations and bytes a second: GEMMs of 8192x8192x8192, and a device's copy.
BF16_GEMM, FP8_GEMM, FP8_BLOCK_GEMM, COPY = 711e12, 1356e12, 1175e12, 4.1e12


class Cost(NamedTuple):
    """What a format's products cost.

    Attributes:
        gemm: operations a second.
        bytes: that quantizing an element in bfloat16 moves: read once (twice where the scale depends on the whole
            tensor), written in both directions.
    """

    gemm: float
    bytes: float

    @property
    def bound(self) -> float:
        """The largest ``1 / K + 1 / N`` of a layer that can gain."""
        return 6 * (1 / BF16_GEMM - 1 / self.gemm) * COPY / self.bytes


#: MXFP8's and NVFP4's own GEMMs were not measured: they count as FP8's, which errs towards converting.
COSTS: dict[type[Quantizer], Cost] = {
    Float8SlotQuantizer: Cost(FP8_GEMM, 2 + 2 * 1),
    Float8CurrentScalingQuantizer: Cost(FP8_GEMM, 2 * 2 + 2 * 1),
    Float8BlockQuantizer: Cost(FP8_BLOCK_GEMM, 2 + 2 * 1),
    MXFP8Quantizer: Cost(FP8_GEMM, 2 + 2 * 1),
    NVFP4Quantizer: Cost(FP8_GEMM, 2 * 2 + 2 * 0.5),
}


def smallest_square(quantizers: LinearQuantizers) -> float:
    """Width of the smallest square layer that can gain.

    Formats without an entry in :data:`COSTS`, and layers whose operands differ in theirs, count as the cheapest.
    """
    kinds = {type(operand.rowwise) for operand in (quantizers.input, quantizers.weight, quantizers.grad_output)}
    known = [COSTS[kind] for kind in kinds if kind in COSTS]
    costs = known if len(kinds) == 1 and known else COSTS.values()
    return 2 / max(cost.bound for cost in costs)


def too_small_to_gain(quantizers: LinearQuantizers | None, in_features: int, out_features: int) -> str | None:
    """Why a linear layer of this size gains no time with ``quantizers``; None where it can, and for None: high
    precision."""
    if quantizers is None:
        return None
    width = smallest_square(quantizers)
    if in_features and out_features and 1 / in_features + 1 / out_features <= 2 / width:
        return None
    return f"too small to gain: {in_features} -> {out_features}, and a square layer starts at {math.ceil(width)}"
