"""What the tests of ops that compute a tensor and quantize it at once share."""

from __future__ import annotations

import torch

from tejit.kernels import fp8, fp8_block, mxfp8
from tejit.kernels.fused import FUSED_BLOCKS, FUSED_CURRENT, FUSED_DELAYED, FUSED_MXFP8, Cast

USAGES = {"both": (True, True), "rowwise": (True, False), "columnwise": (False, True)}
FORMATS = {"current": FUSED_CURRENT, "delayed": FUSED_DELAYED, "blocks": FUSED_BLOCKS, "mxfp8": FUSED_MXFP8}
#: Of what such an op returns.
NAMES = ("row", "row_scale_inv", "col", "col_scale_inv")


def plainly_quantized(y: torch.Tensor, cast: Cast) -> tuple[torch.Tensor, ...]:
    """The format's own op, whose bytes other tests hold against oracles that are not ours."""
    usage = cast.rowwise, cast.columnwise
    if cast.format == FUSED_BLOCKS:
        return fp8_block.quantize(y, cast.fp8, 1, *usage, cast.flag, cast.floor)
    if cast.format == FUSED_MXFP8:
        return mxfp8.quantize(y, cast.fp8, *usage, False, cast.flag)
    if cast.scale is not None and cast.amax is not None:
        data, transpose, scale_inv = fp8.quantize_delayed(y, cast.fp8, *usage, cast.scale, cast.amax)
    else:
        data, transpose, scale_inv = fp8.quantize_current(y, cast.fp8, *usage, cast.flag, cast.floor)
    return data, scale_inv, transpose, scale_inv[:0]


def cast_of(kind: int, rowwise: bool, columnwise: bool, device: str, seed: int = 0) -> Cast:
    """A cast whose other arguments follow from ``seed``."""
    code, flag = seed % 2, bool(seed // 2 % 2)
    if kind == FUSED_DELAYED:
        scale, amax = torch.tensor([[0.37], [1.5]], device=device)
        return Cast(kind, code, rowwise, columnwise, scale=scale, amax=amax)
    return Cast(kind, code, rowwise, columnwise, flag, 0.0 if kind == FUSED_MXFP8 else 1e-3 * (seed % 3))
