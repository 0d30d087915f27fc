"""How an op that computes a tensor and quantizes it at once is told what to make, and what it makes.

Such an op never writes the tensor itself to memory on the GPU; its bytes are those that the format's own op makes of
the tensor rounded to the input's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tejit.kernels.fp8 import fake as fp8_fake
from tejit.kernels.fp8 import reference as fp8_reference
from tejit.kernels.fp8_block import fake as fp8_block_fake
from tejit.kernels.fp8_block import reference as fp8_block_reference
from tejit.kernels.mxfp8 import fake as mxfp8_fake
from tejit.kernels.mxfp8 import reference as mxfp8_reference

#: ``(row, row_scale_inv, col, col_scale_inv)``. FP8 per tensor: data, scale_inv, transpose, and an empty one.
Four = tuple[Tensor, Tensor, Tensor, Tensor]


#: The formats that fused ops know, by the number that an op takes: FP8 with current and with delayed scaling, in blocks
#: of 1x128 and 128x1, MXFP8. Plain ints, which every version of torch traces.
FUSED_CURRENT, FUSED_DELAYED, FUSED_BLOCKS, FUSED_MXFP8 = range(4)


class Cast(NamedTuple):
    """The last arguments of every fused op.

    Attributes:
        format: ``FUSED_CURRENT`` and so on.
        fp8: ``ElementInfo.code`` of the element type.
        rowwise, columnwise: which directions are wanted.
        flag: FP8: round scales down to powers of two; MXFP8: scales in the order of the GEMM.
        floor: lower bound of each amax (FP8).
        scale, amax: of delayed scaling, float32 ``(1,)``: the multiplier, and the running maximum.
    """

    format: int
    fp8: int
    rowwise: bool
    columnwise: bool
    flag: bool = False
    floor: float = 0.0
    scale: Tensor | None = None
    amax: Tensor | None = None


def quantized(y: Tensor, cast: Cast) -> Four:
    """``y`` quantized, in plain torch. Raises ``RuntimeError`` for a cast that no format has."""
    usage = cast.rowwise, cast.columnwise
    _check(cast)
    if cast.format == FUSED_BLOCKS:
        return fp8_block_reference.quantize(y, cast.fp8, 1, *usage, cast.flag, cast.floor)
    if cast.format == FUSED_MXFP8:
        return mxfp8_reference.quantize(y, cast.fp8, *usage, False, cast.flag)
    if cast.scale is not None and cast.amax is not None:
        three = fp8_reference.quantize_delayed(y, cast.fp8, *usage, cast.scale, cast.amax)
    else:
        three = fp8_reference.quantize_current(y, cast.fp8, *usage, cast.flag, cast.floor, None)
    return three[0], three[2], three[1], three[2].new_empty((0,))


def described(y: Tensor, cast: Cast) -> Four:
    """:func:`quantized` without data."""
    usage = cast.rowwise, cast.columnwise
    _check(cast)
    if cast.format == FUSED_BLOCKS:
        return fp8_block_fake.quantize(y, cast.fp8, 1, *usage, cast.flag, cast.floor)
    if cast.format == FUSED_MXFP8:
        return mxfp8_fake.quantize(y, cast.fp8, *usage, False, cast.flag)
    three = fp8_fake.quantize_current(y, cast.fp8, *usage, cast.flag, cast.floor, None)
    return three[0], three[2], three[1], three[2].new_empty((0,))


def _check(cast: Cast) -> None:
    if not FUSED_CURRENT <= cast.format <= FUSED_MXFP8:
        raise RuntimeError(f"tejit: format is {cast.format}, but {FUSED_CURRENT} to {FUSED_MXFP8} is needed")
    delayed = cast.format == FUSED_DELAYED
    if (cast.scale is None, cast.amax is None) != (not delayed, not delayed):
        raise RuntimeError(
            f"tejit: format {cast.format} needs scale and amax {'both' if delayed else 'not to be given'}; they belong"
            " to delayed scaling"
        )
