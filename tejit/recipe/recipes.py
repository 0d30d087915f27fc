"""Recipes: frozen dataclasses that say how the three GEMMs of a linear layer are quantized."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tejit.format_info import E4M3, E5M2
from tejit.formats import Float8BlockQuantizer, Float8CurrentScalingQuantizer
from tejit.tensor import Quantizer


class Format(enum.Enum):
    """Element types of a recipe."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    #: E4M3 for inputs and weights, E5M2 (more range, fewer bits) for gradients.
    HYBRID = "HYBRID"

    @property
    def forward_dtype(self) -> torch.dtype:
        """Element type of inputs and weights."""
        return (E5M2 if self is Format.E5M2 else E4M3).dtype

    @property
    def backward_dtype(self) -> torch.dtype:
        """Element type of gradients."""
        return (E4M3 if self is Format.E4M3 else E5M2).dtype


class Variants(NamedTuple):
    """One quantizer for each set of directions a layer may need; made beforehand, since quantizers never change."""

    rowwise: Quantizer
    columnwise: Quantizer
    both: Quantizer

    def needing(self, rowwise: bool, columnwise: bool) -> Quantizer:
        """The variant that makes what is needed (at least one direction)."""
        if rowwise and columnwise:
            return self.both
        return self.rowwise if rowwise else self.columnwise


def variants(quantizer: Quantizer) -> Variants:
    """The :class:`Variants` of a quantizer, making bare storages."""
    bare = quantizer.replace(internal=True)
    return Variants(
        bare.with_usage(rowwise=True, columnwise=False),
        bare.with_usage(rowwise=False, columnwise=True),
        bare.with_usage(rowwise=True, columnwise=True),
    )


class LinearQuantizers(NamedTuple):
    """What a linear layer quantizes: ``y = input @ weight.T`` and the two products with ``grad_output``.

    ``alignment`` is what all sizes of the operands are padded to; the last three say whether a GEMM may accumulate
    in fewer bits than float32 has.
    """

    input: Variants
    weight: Variants
    grad_output: Variants
    alignment: int
    fast_accum_fprop: bool
    fast_accum_dgrad: bool
    fast_accum_wgrad: bool


def linear_quantizers(
    input: Quantizer,
    weight: Quantizer,
    grad_output: Quantizer,
    *,
    fast_accum_fprop: bool = False,
    fast_accum_dgrad: bool = False,
    fast_accum_wgrad: bool = False,
) -> LinearQuantizers:
    """:class:`LinearQuantizers` from one quantizer an operand."""
    return LinearQuantizers(
        input=variants(input),
        weight=variants(weight),
        grad_output=variants(grad_output),
        alignment=math.lcm(*(quantizer.alignment() for quantizer in (input, weight, grad_output))),
        fast_accum_fprop=fast_accum_fprop,
        fast_accum_dgrad=fast_accum_dgrad,
        fast_accum_wgrad=fast_accum_wgrad,
    )


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes. Recipes are immutable and compared by value; unknown arguments are errors."""

    @property
    def linear(self) -> LinearQuantizers:
        """The quantizers of a linear layer under this recipe."""
        raise NotImplementedError(f"{type(self).__name__} does not define linear")


def _checked(fp8_format: Format) -> Format:
    if not isinstance(fp8_format, Format):
        raise TypeError(f"fp8_format is {fp8_format!r}; it must be a tejit.recipe.Format")
    if fp8_format is Format.E5M2:
        raise ValueError(
            "fp8_format is E5M2 for both passes, but no tensor core multiplies E5M2 by E5M2;"
            " use Format.HYBRID (E5M2 for gradients only) or Format.E4M3"
        )
    return fp8_format


def _check_switches(recipe: Recipe, *names: str) -> None:
    for name in names:
        value = getattr(recipe, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be True or False")


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, taken from the tensor itself each time.

    Attributes:
        fp8_format: element types, forward and backward.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: lower bound of amax.
        fast_accum_fprop, fast_accum_dgrad, fast_accum_wgrad: let the tensor cores accumulate that GEMM in
            fewer bits, which is faster.

    Raises ``TypeError`` for a ``fp8_format`` that is no :class:`Format` or a switch that is no bool, and
    ``ValueError`` for pure E5M2 (two E5M2 operands have no GEMM) or a negative ``amax_epsilon``.
    """

    fp8_format: Format = Format.HYBRID
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0
    fast_accum_fprop: bool = True
    fast_accum_dgrad: bool = False
    fast_accum_wgrad: bool = False
    # Made once, outside any graph: a compiled region then only reads it.
    _linear: LinearQuantizers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _checked(self.fp8_format)
        _check_switches(self, "force_pow_2_scales", "fast_accum_fprop", "fast_accum_dgrad", "fast_accum_wgrad")

        def quantizer(dtype: torch.dtype) -> Quantizer:
            return Float8CurrentScalingQuantizer(
                dtype, force_pow_2_scales=self.force_pow_2_scales, amax_epsilon=self.amax_epsilon
            )

        forward = quantizer(self.fp8_format.forward_dtype)
        quantizers = linear_quantizers(
            forward,
            forward,
            quantizer(self.fp8_format.backward_dtype),
            fast_accum_fprop=self.fast_accum_fprop,
            fast_accum_dgrad=self.fast_accum_dgrad,
            fast_accum_wgrad=self.fast_accum_wgrad,
        )
        object.__setattr__(self, "_linear", quantizers)

    @property
    def linear(self) -> LinearQuantizers:
        """The quantizers of a linear layer under this recipe."""
        return self._linear


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with a scale for each block: of 1x128 (dimension 1) or 128x128 (dimension 2).

    Attributes:
        fp8_format: element types, forward and backward.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: blocks of input, weight and
            grad_output. The tensor cores multiply 1x128 by 1x128 or 128x128, so other choices are emulated.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: lower bound of each block's amax.

    Raises ``TypeError`` for a ``fp8_format`` that is no :class:`Format`, and ``ValueError`` for pure E5M2
    (two E5M2 operands have no GEMM), a block dimension other than 1 and 2, or a negative ``amax_epsilon``.
    """

    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0
    _linear: LinearQuantizers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _checked(self.fp8_format)

        def quantizer(dtype: torch.dtype, dim: int) -> Quantizer:
            return Float8BlockQuantizer(
                dtype,
                block_scaling_dim=dim,
                force_pow_2_scales=self.force_pow_2_scales,
                amax_epsilon=self.amax_epsilon,
            )

        # With scales of blocks the tensor cores always accumulate in float32: no fast accumulation.
        quantizers = linear_quantizers(
            quantizer(self.fp8_format.forward_dtype, self.x_block_scaling_dim),
            quantizer(self.fp8_format.forward_dtype, self.w_block_scaling_dim),
            quantizer(self.fp8_format.backward_dtype, self.grad_block_scaling_dim),
        )
        object.__setattr__(self, "_linear", quantizers)

    @property
    def linear(self) -> LinearQuantizers:
        """The quantizers of a linear layer under this recipe."""
        return self._linear
