"""Recipes of the formats with a scale for each block: FP8 blocks of 128, MXFP8 (32 elements a scale), NVFP4 (16)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tejit import compat
from tejit.formats import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from tejit.kernels.nvfp4 import E4M3_MAXIMA
from tejit.recipe.recipes import Format, LinearQuantizers, Recipe, check_switches, checked_format, linear_quantizers
from tejit.tensor import Quantizer


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
    _linear: ClassVar[LinearQuantizers]  # each instance has its own; no field, which asdict would show

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_format(self.fp8_format)

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
            backward_override=self.backward_override,
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
    _linear: ClassVar[LinearQuantizers]  # each instance has its own; no field, which asdict would show

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_format(self.fp8_format)
        check_switches(self, "enable_2d_quantization")
        if self.fp8_format is Format.HYBRID:
            compat.warn(
                "MXFP8BlockScaling(fp8_format=Format.HYBRID): gradients in E5M2 are known to make training with MXFP8"
                " diverge; Format.E4M3, the default, has enough range in blocks of 32"
            )
        forward, backward = self.fp8_format.forward_dtype, self.fp8_format.backward_dtype
        quantizers = linear_quantizers(
            input=MXFP8Quantizer(forward),
            weight=MXFP8Quantizer(forward, with_2d_quantization=self.enable_2d_quantization),
            grad_output=MXFP8Quantizer(backward),
            backward_override=self.backward_override,
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
    _linear: ClassVar[LinearQuantizers]  # each instance has its own; no field, which asdict would show

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switches(
            self, "disable_rht", "disable_stochastic_rounding", "disable_2d_quantization", "row_scaled_activation"
        )
        if self.four_over_six not in _FOUR_OVER_SIX:
            raise ValueError(
                f"four_over_six is {self.four_over_six!r}; it must be None, 'weights', 'activations' or 'all'"
            )
        activations = self.four_over_six in ("activations", "all")
        rht = not (self.disable_rht or activations or self.row_scaled_activation)
        quantizers = linear_quantizers(
            input=NVFP4Quantizer(
                with_rht=rht, row_scaled_nvfp4=self.row_scaled_activation, **_four_over_six(activations)
            ),
            weight=NVFP4Quantizer(
                with_2d_quantization=not self.disable_2d_quantization,
                **_four_over_six(self.four_over_six in ("weights", "all")),
            ),
            grad_output=NVFP4Quantizer(with_rht=rht, stochastic_rounding=not self.disable_stochastic_rounding),
            backward_override=self.backward_override,
        )
        object.__setattr__(self, "_linear", quantizers)

    @property
    def linear(self) -> LinearQuantizers:
        """The quantizers of a linear layer under this recipe."""
        return self._linear


def _four_over_six(used: bool) -> dict[str, Any]:
    return {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": min(E4M3_MAXIMA)} if used else {}
