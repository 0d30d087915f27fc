"""FP8 with one scale per tensor: quantizer (current scaling), storage and tensor.

Buffers: ``_data`` (uint8, the logical shape), ``_transpose`` (uint8, last dimension first) and
``_scale_inv`` (float32, ``(1,)``). Devices whose FP8 GEMM reads every layout keep one copy of the bytes for
both directions; on all others columnwise use needs the transposed copy.
"""

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from tejit.device import fp8_gemm_takes_every_layout, resolve_device
from tejit.dynamo import register_value_opaque_quantizer
from tejit.format_info import FP8_TENSOR, fp8_element
from tejit.kernels import fp8
from tejit.kernels.gemm import Operand
from tejit.tensor import InnerTensor, QuantizedTensor, QuantizedTensorStorage, Quantizer
from tejit.tensor.dispatch import aten, swaps_matrix
from tejit.tensor.quantized import make_wrapper
from tejit.tensor.quantizer import Inner, checked_epsilon
from tejit.tensor.serialization import allow


class Float8CurrentScalingQuantizer(Quantizer):
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

    fp8_dtype: torch.dtype
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

    def inner_tensor_specs(
        self, shape: tuple[int, ...], device: torch.device | str | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """``{attribute: (shape, dtype)}`` of the buffers, in the storage's order; any shape will do."""
        size = tuple(shape)
        data, transpose = self._wants(resolve_device(device))
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if data:
            specs["_data"] = (size, torch.uint8)
        if transpose:
            specs["_transpose"] = (fp8.transposed_shape(size), torch.uint8)
        specs["_scale_inv"] = ((1,), FP8_TENSOR.scale_dtype)
        return specs

    def _wants(self, device: torch.device) -> tuple[bool, bool]:
        """Which of ``(_data, _transpose)`` a tensor on ``device`` has."""
        every_layout = fp8_gemm_takes_every_layout(device)
        return self.rowwise_usage or every_layout, self.columnwise_usage and not every_layout

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """``{"cls", "nontensor_kwargs"}`` of the storage or tensor that this quantizer makes."""
        return {
            "cls": Float8TensorStorage if self.internal else Float8Tensor,
            "nontensor_kwargs": {
                "fp8_dtype": self.fp8_dtype,
                "quantizer": self,
                "fake_dtype": fake_dtype,
            },
        }

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
            self._reduced_amax(x, amax_reduction_group),
        )
        return codes if data else None, transposed if transpose else None, scale_inv

    def _reduced_amax(self, x: Tensor, group: Any) -> Tensor | None:
        if group is None:
            return None
        amax = fp8.amax(x)
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
        return amax

    def _quantize_into(
        self, x: Tensor, dst: QuantizedTensorStorage, noop_flag: Tensor | None, amax_reduction_group: Any
    ) -> None:
        if not isinstance(dst, Float8TensorStorage):
            raise TypeError(f"{type(self).__name__} cannot write into a {type(dst).__name__}")
        if dst._fp8_dtype != self.fp8_dtype:
            raise TypeError(
                f"the target holds {dst._fp8_dtype} and the quantizer makes {self.fp8_dtype};"
                " quantize into a new tensor instead"
            )
        if isinstance(dst, QuantizedTensor):
            dst._require_whole("quantizing into it")
        dst._require_data()
        fp8.quantize_current_out(
            x,
            fp8_element(self.fp8_dtype).code,
            self.force_pow_2_scales,
            self.amax_epsilon,
            self._reduced_amax(x, amax_reduction_group),
            noop_flag,
            dst._data,
            dst._transpose,
            dst._scale_inv,
        )

    def _allocate(self, shape: tuple[int, ...], device: torch.device, pin_memory: bool) -> Inner:
        data, transpose = self._wants(device)
        codes, transposed, scale_inv = fp8.make_empty(shape, data, transpose, device, pin_memory)
        return codes if data else None, transposed if transpose else None, scale_inv

    def usages_of(self, storage: Any) -> tuple[bool, bool]:
        """``(rowwise, columnwise)``: what the buffers of a storage or tensor can serve; traceable."""
        return _usages(storage)

    def rowwise_operand(self, inner: Inner) -> Operand:
        """The ``(M, K)`` operand."""
        data, _, scale_inv = inner
        return Operand(_matrix(data), scale_inv, fp8_element(self.fp8_dtype).code)

    def columnwise_operand(self, inner: Inner) -> Operand:
        """The ``(K, M)`` operand: the transposed bytes, or the bytes read transposed where the GEMM can."""
        data, transpose, scale_inv = inner
        if transpose is not None:
            codes = transpose.reshape(transpose.shape[0], math.prod(transpose.shape[1:]))
        else:
            codes = _matrix(data).t()
        return Operand(codes, scale_inv, fp8_element(self.fp8_dtype).code)

    def columnwise_inner(self, inner: Inner) -> Inner:
        """``inner`` less the rowwise bytes, where the transposed ones are there."""
        data, transpose, scale_inv = inner
        return (data if transpose is None else None), transpose, scale_inv


def _matrix(codes: Tensor) -> Tensor:
    return codes if codes.dim() == 2 else codes.reshape(math.prod(codes.shape[:-1]), codes.shape[-1])


def _usages(storage: Any) -> tuple[bool, bool]:
    rowwise = storage._data is not None
    columnwise = storage._transpose is not None or (rowwise and fp8_gemm_takes_every_layout(storage._data.device))
    return rowwise, columnwise


class Float8TensorStorage(QuantizedTensorStorage):
    """The buffers of an FP8 tensor with one scale.

    Args:
        data: uint8 of the logical shape ``(d1..dn)``, or None.
        data_transpose: uint8 ``(dn, d1..d(n-1))``, or None.
        fp8_scale_inv: float32 ``(1,)``: the values are ``float(code) * fp8_scale_inv``.
        fp8_dtype: element type of the codes.
        quantizer: what made it, or None.
        fake_dtype: nominal dtype; default float32.
    """

    _data: Annotated[Tensor | None, InnerTensor("data")]
    _transpose: Annotated[Tensor | None, InnerTensor("data_transpose")]
    _scale_inv: Annotated[Tensor | None, InnerTensor("fp8_scale_inv")]
    _STATE = (*QuantizedTensorStorage._STATE, "_fp8_dtype")

    _fp8_dtype: torch.dtype

    def __init__(
        self,
        *,
        data: Tensor | None = None,
        data_transpose: Tensor | None = None,
        fp8_scale_inv: Tensor | None = None,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        quantizer: Quantizer | None = None,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        self._fill(data, data_transpose, fp8_scale_inv, fp8_dtype, quantizer, fake_dtype or torch.float32)
        if data is not None:
            self._known_shape, self._known_device = data.shape, data.device
        elif data_transpose is not None:
            shape = data_transpose.shape
            self._known_shape = torch.Size((*shape[1:], *shape[:1]))
            self._known_device = data_transpose.device

    def _fill(
        self,
        data: Tensor | None,
        transpose: Tensor | None,
        scale_inv: Tensor | None,
        fp8_dtype: torch.dtype,
        quantizer: Quantizer | None,
        dtype: torch.dtype,
    ) -> None:
        self._data = data
        self._transpose = transpose
        self._scale_inv = scale_inv
        self._fp8_dtype = fp8_dtype
        self._quantizer = quantizer
        self._dtype = dtype

    def _nontensor_kwargs(self) -> dict[str, Any]:
        return {"fp8_dtype": self._fp8_dtype, "quantizer": self._quantizer, "fake_dtype": self._dtype}

    def _format_name(self) -> str:
        return f"{FP8_TENSOR.name} {fp8_element(self._fp8_dtype).name}"

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        code = fp8_element(self._fp8_dtype).code
        return fp8.dequantize(self._rowwise_bytes().contiguous(), self._scale_inv, code, dtype)

    def get_usages(self) -> dict[str, bool]:
        """``{"rowwise": bool, "columnwise": bool}``: what the buffers can serve."""
        rowwise, columnwise = _usages(self)
        return {"rowwise": rowwise, "columnwise": columnwise}

    def _rowwise_bytes(self) -> Tensor:
        if self._data is not None:
            return self._data
        assert self._transpose is not None  # _require_data
        return self._transpose.movedim(0, -1) if self._transpose.dim() > 1 else self._transpose

    def _transposed_bytes(self) -> Tensor:
        return self._transpose if self._transpose is not None else fp8.reference.transpose_bytes(self._rowwise_bytes())

    def _buffer_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "_data": (tuple(self.shape), torch.uint8),
            "_transpose": (fp8.transposed_shape(tuple(self.shape)), torch.uint8),
            "_scale_inv": ((1,), FP8_TENSOR.scale_dtype),
        }

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a direction, or make the transposed bytes from the others. None leaves a direction alone.

        Raises ``RuntimeError``, before anything is changed, where rowwise bytes are asked for and only
        transposed ones are there, or no direction would stay.
        """
        now = self.get_usages()
        rowwise = now["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise = now["columnwise"] if columnwise_usage is None else columnwise_usage
        if not (rowwise or columnwise):
            raise RuntimeError(f"update_usage would leave this {type(self).__name__} without any direction")
        if self._data is None and rowwise:
            raise RuntimeError(
                f"this {type(self).__name__} has only transposed bytes; rowwise ones cannot be made from them."
                " Quantize again with rowwise usage."
            )
        if self._data is not None and fp8_gemm_takes_every_layout(self._data.device):
            return  # one copy of the bytes serves both directions
        if (rowwise, columnwise) == (now["rowwise"], now["columnwise"]):
            return
        data, transpose = self._data, self._transposed_bytes() if columnwise else None
        self._unshare((data if rowwise else None, transpose, self._scale_inv))


class Float8Tensor(QuantizedTensor, Float8TensorStorage):
    """An FP8 tensor with one scale that behaves as a tensor of its nominal dtype.

    Args:
        shape: the logical shape.
        dtype: the nominal dtype.
        data, data_transpose, fp8_scale_inv, fp8_dtype, quantizer: as in :class:`Float8TensorStorage`.
        requires_grad, device, stride: of the tensor; ``device`` None means the buffers' own.
    """

    @staticmethod
    def __new__(
        cls: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        data: Tensor | None = None,
        data_transpose: Tensor | None = None,
        fp8_scale_inv: Tensor | None = None,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> Any:
        if device is None:
            device = next((b.device for b in (data, data_transpose, fp8_scale_inv) if b is not None), None)
        return make_wrapper(cls, shape, dtype, requires_grad, device, stride)

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        data: Tensor | None = None,
        data_transpose: Tensor | None = None,
        fp8_scale_inv: Tensor | None = None,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> None:
        self._fill(data, data_transpose, fp8_scale_inv, fp8_dtype, quantizer, dtype)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._data is None:
            return NotImplemented
        result = func(self._data, *args, **kwargs)
        if isinstance(result, Tensor):
            return self._over(result, self._transposed_view(func, args, result))
        return type(result)([self._over(part, None) for part in result])

    def _transposed_view(self, func: Any, args: tuple[Any, ...], result: Tensor) -> Tensor | None:
        """The transposed bytes of a view, where the buffers hold them already."""
        if self._transpose is None or result.dim() == 0:
            return None
        if func is aten.view.default and result.shape[-1] == self.shape[-1]:  # only leading dimensions changed
            return self._transpose.view(fp8.transposed_shape(tuple(result.shape)))
        return self._data if swaps_matrix(func, args, self.dim()) else None

    def _over(self, data: Tensor, transpose: Tensor | None) -> Any:
        """A view over ``data``; it shares the scale with this tensor."""
        view = type(self)(
            tuple(data.shape),
            self._dtype,
            data=data,
            data_transpose=transpose,
            fp8_scale_inv=self._scale_inv,
            fp8_dtype=self._fp8_dtype,
            quantizer=self._quantizer,
            device=data.device,
            stride=data.stride(),
        )
        view._shares_scale = True
        return view

    def _copy_buffers(self, source: Any) -> bool:
        if not isinstance(source, Float8Tensor) or source._fp8_dtype != self._fp8_dtype:
            return False
        if source.shape != self.shape or not any(source.get_usages().values()):
            return False
        if self._data is not None:
            self._data.copy_(source._rowwise_bytes())
        if self._transpose is not None:
            self._transpose.copy_(source._transposed_bytes())
        assert self._scale_inv is not None  # it is always there where bytes are
        self._scale_inv.copy_(source._scale_inv)
        return True


register_value_opaque_quantizer(Float8CurrentScalingQuantizer)
allow(Float8Tensor, Float8TensorStorage)
