"""Every format in every mode, by name: what the tests of this folder run over.

Numbers of the formats stand here a second time on purpose: they come from the published layouts, and a fault in
`tejit.format_info` must not pass because the tests read it too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tejit

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
USAGES = [(True, True), (True, False), (False, True)]


@dataclass(frozen=True)
class Case:
    """One way to quantize.

    Attributes:
        name: of the case, and its test id.
        make: the quantizer on a device, for usages and ``internal``.
        row: K must be a multiple of this where rowwise data is made.
        column: M must be a multiple of this where columnwise data is made.
        error: bound of the root mean square error on normal data, relative to that of the data.
        kept: of an element's neighbours, how many share its scale: a whole block; None for the whole tensor.
        square: whether 2D blocks make both multiples necessary in either direction.
        dependent: whether columnwise data is made from rowwise data, which must be possible then.
        stochastic: whether two calls may differ.
        live: whether calls change the quantizer's tensors.
        rowwise_needed: whether a quantizer without rowwise usage is an error.
    """

    name: str
    make: Callable[..., Any]
    row: int = 1
    column: int = 1
    error: float = 0.04
    kept: int | None = None
    square: bool = False
    dependent: bool = False
    stochastic: bool = False
    live: bool = False
    rowwise_needed: bool = False

    def quantizer(self, usage: tuple[bool, bool] = (True, True), internal: bool = False, device: str = "cpu") -> Any:
        return self.make(device, rowwise=usage[0], columnwise=usage[1], internal=internal)

    def fits(self, shape: tuple[int, ...], usage: tuple[bool, bool]) -> bool:
        rows = 1
        for size in shape[:-1]:
            rows *= size
        columns = shape[-1] if shape else 1
        rowwise, columnwise = (True, True) if self.square else (usage[0] or self.dependent, usage[1])
        return not ((rowwise and columns % self.row) or (columnwise and rows % self.column))

    def usages(self) -> list[tuple[bool, bool]]:
        return [usage for usage in USAGES if usage[0] or not self.rowwise_needed]


def _plainly(cls: Any, *arguments: Any, **fixed: Any) -> Callable[..., Any]:
    return lambda device, **usage: cls(*arguments, **fixed, **usage)


def _delayed(device: str, **usage: Any) -> Any:
    scale, amax = torch.full((1,), 64.0, device=device), torch.zeros(1, device=device)
    return tejit.Float8Quantizer(E4M3, scale=scale, amax=amax, **usage)


def _hybrid(row: Callable[[str], Any], column: Callable[[str], Any], **fixed: Any) -> Callable[..., Any]:
    return lambda device, **usage: tejit.HybridQuantizer(
        rowwise_quantizer=row(device), columnwise_quantizer=column(device), **fixed, **usage
    )


_current = _plainly(tejit.Float8CurrentScalingQuantizer)
_block1 = _plainly(tejit.Float8BlockQuantizer, block_scaling_dim=1)
_block2 = _plainly(tejit.Float8BlockQuantizer, E5M2)
_mxfp8 = _plainly(tejit.MXFP8Quantizer)
_nvfp4 = _plainly(tejit.NVFP4Quantizer)
_identity = _plainly(tejit.IdentityQuantizer)

CASES = [
    Case("fp8", _current),
    Case("fp8 e5m2 pow2", _plainly(tejit.Float8CurrentScalingQuantizer, E5M2, force_pow_2_scales=True), error=0.08),
    Case("fp8 delayed", _delayed, live=True),
    Case("blocks 1x128", _block1, kept=128),
    Case("blocks 128x128", _block2, error=0.08, kept=128),
    Case("mxfp8", _mxfp8, 32, 32, kept=32),
    Case("mxfp8 e5m2", _plainly(tejit.MXFP8Quantizer, E5M2), 32, 32, error=0.08, kept=32),
    Case("mxfp8 32x32", _plainly(tejit.MXFP8Quantizer, with_2d_quantization=True), 32, 32, kept=32, square=True),
    Case("mxfp8 swizzled", _plainly(tejit.MXFP8Quantizer, optimize_for_gemm=True), 32, 32, kept=32),
    Case("nvfp4", _nvfp4, 16, 16, error=0.12),
    Case("nvfp4 rht", _plainly(tejit.NVFP4Quantizer, with_rht=True, with_post_rht_amax=True), 16, 16, error=0.12),
    Case("nvfp4 16x16", _plainly(tejit.NVFP4Quantizer, with_2d_quantization=True), 16, 16, error=0.15, square=True),
    Case(
        "nvfp4 stochastic",
        _plainly(tejit.NVFP4Quantizer, stochastic_rounding=True),
        16,
        16,
        error=0.2,
        stochastic=True,
    ),
    Case(
        "nvfp4 row-scaled",
        _plainly(tejit.NVFP4Quantizer, row_scaled_nvfp4=True),
        16,
        16,
        error=0.12,
        rowwise_needed=True,
    ),
    Case("nvfp4 4over6", _plainly(tejit.NVFP4Quantizer, nvfp4_use_4over6=True, nvfp4_e4m3_max=256), 16, 16, error=0.12),
    Case("nvfp4 swizzled", _plainly(tejit.NVFP4Quantizer, optimize_for_gemm=True), 16, 16, error=0.12),
    Case("hybrid fp8 blocks", _hybrid(_current, _block1)),
    Case("hybrid mxfp8 nvfp4", _hybrid(_mxfp8, _nvfp4), 32, 16, error=0.12),
    Case(
        "hybrid nvfp4 mxfp8",
        _hybrid(_nvfp4, _mxfp8, columnwise_source="rowwise_dequantized"),
        16,
        32,
        error=0.13,
        dependent=True,
    ),
    Case("hybrid identity blocks", _hybrid(_identity, _block2), error=0.08),
    Case("hybrid delayed fp8", _hybrid(_delayed, _current), live=True),
    Case("identity", _identity, error=0.0),
    Case("identity bf16", _plainly(tejit.IdentityQuantizer, dtype=torch.bfloat16), error=0.003),
]


def each_case(*, usages: bool = False, only: Callable[[Case], bool] = lambda case: True) -> Any:
    """Parametrises ``case``, with ``usages`` also ``usage``."""
    chosen = [case for case in CASES if only(case)]
    if not usages:
        return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name.replace(" ", "-"))
    pairs = [(case, usage) for case in chosen for usage in case.usages()]
    ids = [f"{case.name.replace(' ', '-')}-{'row' * usage[0]}{'col' * usage[1]}" for case, usage in pairs]
    return pytest.mark.parametrize(("case", "usage"), pairs, ids=ids)


def quantized(q: Any, x: torch.Tensor, **arguments: Any) -> Any:
    """``q(x)``; a stochastic format gives the same bytes each time."""
    torch.manual_seed(11)
    return q.quantize(x, **arguments)


def buffers(t: Any) -> dict[str, torch.Tensor]:
    """The inner tensors that are there, by attribute."""
    names, _ = t.__tensor_flatten__()
    return {name: getattr(t, name) for name in names}


def described(t: Any) -> tuple[Any, ...]:
    """Class, context, and each buffer's name, shape, dtype, device and strides."""
    _, context = t.__tensor_flatten__()
    inner = [(n, tuple(b.shape), b.dtype, b.device.type, b.stride()) for n, b in buffers(t).items()]
    return type(t), context, inner, tuple(t.shape), t.dtype, t.device.type


def product_of(sizes: tuple[int, ...]) -> int:
    return list(itertools.accumulate(sizes, lambda a, b: a * b, initial=1))[-1]
