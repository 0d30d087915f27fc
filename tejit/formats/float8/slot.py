"""FP8 with one scale per tensor that the caller brings (delayed scaling inside modules)."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from tejit.dynamo import register_value_opaque_quantizer
from tejit.format_info import fp8_element
from tejit.formats.float8.quantizer import Float8TensorQuantizer
from tejit.kernels import fp8
from tejit.tensor.quantizer import Inner


@register_value_opaque_quantizer
class Float8SlotQuantizer(Float8TensorQuantizer):
    """FP8, scaled by what :meth:`quantize_slot` is given: a :class:`Float8Quantizer` less its two tensors.

    A value, hence a constant of graphs, where the tensors are inputs: modules keep them and choose them by the place
    of the operand.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        internal: bool = False,
        optimize_for_gemm: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise, internal=internal, optimize_for_gemm=optimize_for_gemm)
        fp8_element(fp8_dtype)
        self._init_fields(fp8_dtype=fp8_dtype)

    def quantize_slot(self, x: Tensor, scale: Tensor, amax: Tensor) -> Inner:
        """``(_data, _transpose, _scale_inv)`` of ``x``, None for an absent one.

        ``scale`` and ``amax`` are float32 ``(1,)``: the multiplier, and what becomes ``max(amax, max|x|)``.
        """
        data, transpose = self._wants(x.device)
        code = fp8_element(self.fp8_dtype).code
        codes, transposed, scale_inv = fp8.quantize_delayed(x, code, data, transpose, scale, amax)
        return codes if data else None, transposed if transpose else None, scale_inv

    def quantize_inner(self, x: Tensor, amax_reduction_group: Any = None) -> NoReturn:
        """Not available: raises ``TypeError`` that tells who can."""
        raise TypeError(
            "DelayedScaling's quantizers have no scale of their own: a module with delayed state quantizes with them."
            " Outside of modules use tejit.Float8Quantizer(scale=..., amax=...)."
        )
