"""FP8 with one scale per tensor that is live state of somebody else (delayed scaling)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor

from tejit.format_info import FP8_TENSOR, fp8_element
from tejit.formats.float8.quantizer import Float8TensorQuantizer
from tejit.kernels import fp8
from tejit.kernels.fused import FUSED_DELAYED, Cast
from tejit.tensor import QuantizedTensorStorage
from tejit.tensor.quantizer import Inner
from tejit.tensor.serialization import allow


class Float8Quantizer(Float8TensorQuantizer):
    """FP8, scaled by ``scale`` as it stands when a tensor is quantized; ``amax`` collects what was seen.

    Both tensors are live: whoever owns them (a recipe's state) changes ``scale`` between steps from the history of
    ``amax``, see ``tejit.kernels.fp8.delayed.update``. Hence a quantizer is equal to itself only.
    :meth:`replace` and :meth:`with_usage` return another one over the very same two tensors, as ``copy.copy`` does;
    ``copy.deepcopy`` and pickle give one over tensors of its own with their values, and within one deep copy or
    one file quantizers that shared a tensor share its copy. A deep copy of a quantized tensor keeps its quantizer.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scale: float32 ``(1,)``: the multiplier of what is quantized.
        amax: float32 ``(1,)`` on the same device: becomes ``max(amax, max|x|)`` with every tensor that is quantized.
            With ``amax_reduction_group`` it is then reduced (MAX) over the group; ``scale`` is that of the call.
        rowwise, columnwise, internal, optimize_for_gemm: as in :class:`Float8CurrentScalingQuantizer`.

    Raises ``TypeError`` for another ``fp8_dtype``, a flag that is no bool, or state that is no float32 tensor,
    ``ValueError`` for state of another shape, on two devices or in one tensor. A tensor on another device than the
    state cannot be quantized: ``ValueError``.
    """

    scale: Tensor
    amax: Tensor

    def __init__(
        self,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        *,
        scale: Tensor,
        amax: Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        internal: bool = False,
        optimize_for_gemm: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise, internal=internal, optimize_for_gemm=optimize_for_gemm)
        fp8_element(fp8_dtype)
        _check_state("scale", scale)
        _check_state("amax", amax)
        if scale is amax:
            raise ValueError("scale and amax are one tensor; what is seen would overwrite the scale: give two")
        if scale.device != amax.device:
            raise ValueError(f"scale is on {scale.device} and amax on {amax.device}; both must be on one device")
        self._init_fields(fp8_dtype=fp8_dtype, scale=scale, amax=amax)

    def quantize_inner(self, x: Tensor, amax_reduction_group: Any = None) -> Inner:
        """``(_data, _transpose, _scale_inv)`` of quantized ``x``, None for an absent one."""
        data, transpose = self._wants(x.device)
        self._check_device(x)
        code = fp8_element(self.fp8_dtype).code
        codes, transposed, scale_inv = fp8.quantize_delayed(x, code, data, transpose, self.scale, self.amax)
        self._reduce_amax(amax_reduction_group)
        return codes if data else None, transposed if transpose else None, scale_inv

    def fused_cast(self, x: Tensor) -> Cast | None:
        self._check_device(x)
        code, usage = fp8_element(self.fp8_dtype).code, self._wants(x.device)
        return Cast(FUSED_DELAYED, code, *usage, scale=self.scale, amax=self.amax)

    def _quantize_into(
        self, x: Tensor, dst: QuantizedTensorStorage, noop_flag: Tensor | None, amax_reduction_group: Any
    ) -> None:
        target = self._target(dst)
        self._check_device(x)
        fp8.quantize_delayed_out(
            x,
            fp8_element(self.fp8_dtype).code,
            self.scale,
            self.amax,
            noop_flag,
            target._data,
            target._transpose,
            target._scale_inv,
        )
        self._reduce_amax(amax_reduction_group)

    def _check_device(self, x: Tensor) -> None:
        if x.device != self.scale.device:
            raise ValueError(
                f"x is on {x.device} and the scale and amax of this Float8Quantizer on {self.scale.device};"
                " make a quantizer over state on x's device"
            )

    def _reduce_amax(self, group: Any) -> None:
        if group is not None:
            torch.distributed.all_reduce(self.amax, op=torch.distributed.ReduceOp.MAX, group=group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Quantizer:
        twin = self.replace(scale=copy.deepcopy(self.scale, memo), amax=copy.deepcopy(self.amax, memo))
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_float8_quantizer, (type(self), self._constructor_arguments())


def rebuild_float8_quantizer(cls: Any, fields: dict[str, Any]) -> Float8Quantizer:
    """Inverse of pickling a :class:`Float8Quantizer`.

    Raises ``pickle.UnpicklingError`` for another class or another field; values are checked by the constructor.
    """
    if not (isinstance(cls, type) and issubclass(cls, Float8Quantizer)):
        raise pickle.UnpicklingError(f"{cls!r} is no Float8Quantizer")
    unknown = [name for name in fields if name not in cls._fields]
    if unknown:
        raise pickle.UnpicklingError(f"{cls.__qualname__} has no field {unknown[0]!r}")
    return cls._from_fields(cls.__new__(cls), fields)


def _check_state(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dtype != FP8_TENSOR.scale_dtype:
        what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{name} is {what}; it must be a {FP8_TENSOR.scale_dtype} tensor of shape (1,)")
    if tuple(value.shape) != (1,):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; there is one for the whole tensor: give it shape (1,), for"
            f" example {name}.reshape(1) or a slice of the recipe's state"
        )


allow(Float8Quantizer, rebuild_float8_quantizer)
