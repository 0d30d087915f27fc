"""Recipes: frozen dataclasses that say how the three GEMMs of a linear layer are quantized."""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tejit.format_info import E4M3, E5M2
from tejit.formats import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer
from tejit.kernels.nvfp4 import E4M3_MAXIMA
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
    both = bare.with_usage(rowwise=True, columnwise=True)
    return Variants(
        rowwise=bare.with_usage(rowwise=True, columnwise=False),
        # Where rowwise data cannot be left out, the variant makes too much; what a layer keeps is the same.
        columnwise=both if bare.needs_rowwise() else bare.with_usage(rowwise=False, columnwise=True),
        both=both,
    )


class LinearQuantizers(NamedTuple):
    """What a linear layer quantizes: ``y = input @ weight.T`` and the two products with ``grad_output``.

    The last three say whether a GEMM may accumulate in fewer bits than float32 has.
    """

    input: Variants
    weight: Variants
    grad_output: Variants
    fast_accum_fprop: bool
    fast_accum_dgrad: bool
    fast_accum_wgrad: bool


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

        def quantizer(dtype: torch.dtype) -> Variants:
            return variants(
                Float8CurrentScalingQuantizer(
                    dtype, force_pow_2_scales=self.force_pow_2_scales, amax_epsilon=self.amax_epsilon
                )
            )

        forward = quantizer(self.fp8_format.forward_dtype)
        backward = quantizer(self.fp8_format.backward_dtype)
        quantizers = LinearQuantizers(
            input=forward,
            weight=forward,
            grad_output=backward,
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

        def quantizer(dtype: torch.dtype, dim: int) -> Variants:
            return variants(
                Float8BlockQuantizer(
                    dtype,
                    block_scaling_dim=dim,
                    force_pow_2_scales=self.force_pow_2_scales,
                    amax_epsilon=self.amax_epsilon,
                )
            )

        quantizers = LinearQuantizers(
            input=quantizer(self.fp8_format.forward_dtype, self.x_block_scaling_dim),
            weight=quantizer(self.fp8_format.forward_dtype, self.w_block_scaling_dim),
            grad_output=quantizer(self.fp8_format.backward_dtype, self.grad_block_scaling_dim),
            # With scales of blocks the tensor cores always accumulate in float32.
            fast_accum_fprop=False,
            fast_accum_dgrad=False,
            fast_accum_wgrad=False,
        )
        object.__setattr__(self, "_linear", quantizers)

    @property
    def linear(self) -> LinearQuantizers:
        """The quantizers of a linear layer under this recipe."""
        return self._linear


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: a power of two for each 32 elements along the contracted dimension.

    Attributes:
        fp8_format: element types, forward and backward. ``HYBRID`` warns: gradients in E5M2 lose a bit that blocks
            of 32 do not need for range, and training with them was reported to diverge.
        enable_2d_quantization: quantize the weight in tiles of 32x32, so that forward and backward see the same one.

    Any size of a layer works: operands are padded with zeros to multiples of 32.

    Raises ``TypeError`` for a ``fp8_format`` that is no :class:`Format` or a switch that is no bool, and
    ``ValueError`` for pure E5M2 (two E5M2 operands have no GEMM).
    """

    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    _linear: LinearQuantizers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _checked(self.fp8_format)
        _check_switches(self, "enable_2d_quantization")
        if self.fp8_format is Format.HYBRID:
            warnings.warn(
                "MXFP8BlockScaling(fp8_format=Format.HYBRID): gradients in E5M2 are known to make training with MXFP8"
                " diverge; Format.E4M3, the default, has enough range in blocks of 32",
                stacklevel=3,
            )
        forward, backward = self.fp8_format.forward_dtype, self.fp8_format.backward_dtype
        quantizers = LinearQuantizers(
            input=variants(MXFP8Quantizer(forward)),
            weight=variants(MXFP8Quantizer(forward, with_2d_quantization=self.enable_2d_quantization)),
            grad_output=variants(MXFP8Quantizer(backward)),
            fast_accum_fprop=False,
            fast_accum_dgrad=False,
            fast_accum_wgrad=False,
        )
        object.__setattr__(self, "_linear", quantizers)

    @property
    def linear(self) -> LinearQuantizers:
        """The quantizers of a linear layer under this recipe."""
        return self._linear


#: Where NVFP4 takes the better of two scales.
_FOUR_OVER_SIX = (None, "weights", "activations", "all")


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: four bits, a scale for each 16 elements along the contracted dimension and one amax above them.

    Attributes:
        disable_rht: no random Hadamard transform of what the product for the weight's gradient contracts.
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: no tiles of 16x16 for the weight, whose transpose is then rounded otherwise.
        row_scaled_activation: an amax for each row of the input.
        four_over_six: ``weights``, ``activations`` or ``all``: take the better of two scales for each block there,
            by the sum of absolute errors, with scales up to 256. Never for gradients.

    The transform serves a product, and only where both of its operands are turned: row-scaled or 4over6 activations
    cannot be, so these switches turn it off. Any size of a layer works: operands are padded with zeros to multiples
    of 16.

    Raises ``TypeError`` for a switch that is no bool and ``ValueError`` for another ``four_over_six``.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    four_over_six: str | None = None
    _linear: LinearQuantizers = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_switches(
            self, "disable_rht", "disable_stochastic_rounding", "disable_2d_quantization", "row_scaled_activation"
        )
        if self.four_over_six not in _FOUR_OVER_SIX:
            raise ValueError(
                f"four_over_six is {self.four_over_six!r}; it must be None, 'weights', 'activations' or 'all'"
            )
        activations = self.four_over_six in ("activations", "all")
        rht = not (self.disable_rht or activations or self.row_scaled_activation)
        quantizers = LinearQuantizers(
            input=variants(
                NVFP4Quantizer(with_rht=rht, row_scaled_nvfp4=self.row_scaled_activation, **_four_over_six(activations))
            ),
            weight=variants(
                NVFP4Quantizer(
                    with_2d_quantization=not self.disable_2d_quantization,
                    **_four_over_six(self.four_over_six in ("weights", "all")),
                )
            ),
            grad_output=variants(
                NVFP4Quantizer(with_rht=rht, stochastic_rounding=not self.disable_stochastic_rounding)
            ),
            fast_accum_fprop=False,
            fast_accum_dgrad=False,
            fast_accum_wgrad=False,
        )
        object.__setattr__(self, "_linear", quantizers)

    @property
    def linear(self) -> LinearQuantizers:
        """The quantizers of a linear layer under this recipe."""
        return self._linear


def _four_over_six(used: bool) -> dict[str, Any]:
    return {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": min(E4M3_MAXIMA)} if used else {}
