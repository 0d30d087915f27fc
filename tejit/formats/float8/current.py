"""FP8 with one scale per tensor, taken from the tensor itself (current scaling)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tejit import compat
from tejit.dynamo import register_value_opaque_quantizer
from tejit.format_info import fp8_element
from tejit.formats.float8.quantizer import Float8TensorQuantizer
from tejit.kernels import fp8
from tejit.kernels.fused import FUSED_CURRENT, Cast
from tejit.tensor import QuantizedTensorStorage
from tejit.tensor.quantizer import Inner, checked_epsilon


class Float8CurrentScalingQuantizer(Float8TensorQuantizer):
    """FP8, scaled by the amax of the very tensor that is quantized.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise: produce the operand of ``x @ w.T``-like GEMMs.
        columnwise: produce the operand of the transposed GEMM.
        force_pow_2_scales: round the scale down to a power of two.
        amax_epsilon: lower bound of amax, at least 0.
        internal: make bare storages instead of tensors.
        optimize_for_gemm: accepted as in every format; per-tensor scales have one layout only.

    Raises ``TypeError`` for another ``fp8_dtype`` or a flag that is no bool, ``ValueError`` for an
    ``amax_epsilon`` that is negative, NaN or beyond float32.
    """

    force_pow_2_scales: bool
    amax_epsilon: float

    def __init__(
        self,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        internal: bool = False,
        optimize_for_gemm: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise, internal=internal, optimize_for_gemm=optimize_for_gemm)
        fp8_element(fp8_dtype)
        self._init_flags(force_pow_2_scales=force_pow_2_scales)
        self._init_fields(fp8_dtype=fp8_dtype, amax_epsilon=checked_epsilon(amax_epsilon))

    def quantize_inner(self, x: Tensor, amax_reduction_group: Any = None) -> Inner:
        """``(_data, _transpose, _scale_inv)`` of quantized ``x``, None for an absent one."""
        data, transpose = self._wants(x.device)
        codes, transposed, scale_inv = fp8.quantize_current(
            x,
            fp8_element(self.fp8_dtype).code,
            data,
            transpose,
            self.force_pow_2_scales,
            self.amax_epsilon,
            None if amax_reduction_group is None else self._reduced_amax(x, amax_reduction_group),
        )
        return codes if data else None, transposed if transpose else None, scale_inv

    def caster(self, device: torch.device) -> Callable[[Tensor], Inner]:
        """:meth:`quantize_inner` of tensors on ``device`` for eager code, by the compiled op, with nothing left to
        decide."""
        data, transpose = self._wants(device)
        op = compat.bound(torch.ops.tejit.fp8_quantize_current.default)
        code = fp8_element(self.fp8_dtype).code
        pow2, eps = self.force_pow_2_scales, self.amax_epsilon

        def cast(x: Tensor) -> Inner:
            codes, transposed, scale_inv = op(x, code, data, transpose, pow2, eps, None)
            return codes if data else None, transposed if transpose else None, scale_inv

        return cast

    def fused_cast(self, x: Tensor) -> Cast | None:
        code, usage = fp8_element(self.fp8_dtype).code, self._wants(x.device)
        return Cast(FUSED_CURRENT, code, *usage, self.force_pow_2_scales, self.amax_epsilon)

    def _reduced_amax(self, x: Tensor, group: Any) -> Tensor | None:
        if group is None:
            return None
        amax = fp8.amax(x)
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
        return amax

    def _quantize_into(
        self, x: Tensor, dst: QuantizedTensorStorage, noop_flag: Tensor | None, amax_reduction_group: Any
    ) -> None:
        target = self._target(dst)
        fp8.quantize_current_out(
            x,
            fp8_element(self.fp8_dtype).code,
            self.force_pow_2_scales,
            self.amax_epsilon,
            self._reduced_amax(x, amax_reduction_group),
            noop_flag,
            target._data,
            target._transpose,
            target._scale_inv,
        )


register_value_opaque_quantizer(Float8CurrentScalingQuantizer)
