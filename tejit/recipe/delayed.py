"""``DelayedScaling``: FP8 whose scales come from the amax of earlier steps."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tejit.format_info import FLT_MAX, fp8_element
from tejit.formats.float8.slot import Float8SlotQuantizer
from tejit.kernels.fp8.delayed import ALGORITHMS
from tejit.recipe.recipes import (
    DelayedRule,
    Format,
    LinearQuantizers,
    Recipe,
    check_switches,
    checked_format,
    linear_quantizers,
)

#: Smallest normal number of float32, below which a scale would lose bits.
_FLT_MIN = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, computed from the amax of earlier steps: one pass over the data, no look ahead.

    Attributes:
        margin: binary orders of magnitude kept free above amax: ``scale = fp8_max * 2**-margin / amax``.
        fp8_format: element types, forward and backward.
        amax_history_len: steps that are looked back on. Modules keep 1024; a longer history needs them built (or
            converted) under the recipe.
        amax_compute_algo: ``max`` of the history, or the ``most_recent`` step's.
        reduce_amax: reduce amax (MAX) over ``autocast``'s ``amax_reduction_group``, where one is given.

    The state lives in the modules (``tejit.nn.delayed_state`` says in which buffers and when it rolls), and the rule
    of the update is Transformer Engine's (``tejit.kernels.fp8.delayed.update``).

    Raises ``TypeError`` for a ``margin`` or ``amax_history_len`` that is no int, a ``fp8_format`` that is no
    :class:`Format` or a ``reduce_amax`` that is no bool; ``ValueError`` for pure E5M2 (two E5M2 operands have no
    GEMM), a length below 1, another ``amax_compute_algo`` or a ``margin`` with which ``fp8_max * 2**-margin`` leaves
    the range of float32.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    _linear: ClassVar[LinearQuantizers]  # each instance has its own; no field, which asdict would show

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_format(self.fp8_format)
        check_switches(self, "reduce_amax")
        for name in ("margin", "amax_history_len"):
            _check_int(name, getattr(self, name))
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len is {self.amax_history_len}; it must be at least 1")
        if self.amax_compute_algo not in ALGORITHMS:
            raise ValueError(
                f"amax_compute_algo is {self.amax_compute_algo!r}; it must be one of {', '.join(ALGORITHMS)}"
            )
        forward, backward = self.fp8_format.forward_dtype, self.fp8_format.backward_dtype
        maxima = float(fp8_element(forward).max), float(fp8_element(backward).max)
        for largest in maxima:
            if not _in_range(largest, self.margin):
                raise ValueError(
                    f"margin is {self.margin}: {largest:g} * 2**-margin leaves the range of float32; choose one nearer"
                    " to 0"
                )
        quantizers = linear_quantizers(
            Float8SlotQuantizer(forward),
            Float8SlotQuantizer(forward),
            Float8SlotQuantizer(backward),
            fast_accum_fprop=True,
            backward_override=self.backward_override,
            delayed=DelayedRule(*maxima, self.margin, self.amax_history_len, self.amax_compute_algo, self.reduce_amax),
        )
        object.__setattr__(self, "_linear", quantizers)

    @property
    def linear(self) -> LinearQuantizers:
        """The quantizers of a linear layer under this recipe."""
        return self._linear

    def delayed_rule(self) -> DelayedRule | None:
        """How the state rolls."""
        return self._linear.delayed


def _check_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be an int")


def _in_range(largest: float, margin: int) -> bool:
    # A power beyond float64 would raise; nothing near it is in range.
    return abs(margin) < sys.float_info.max_exp // 2 and _FLT_MIN <= largest * 2.0**-margin <= FLT_MAX
