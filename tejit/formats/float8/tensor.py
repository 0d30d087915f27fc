"""FP8 with one scale per tensor: storage and tensor.

Buffers: ``_data`` (uint8, the logical shape), ``_transpose`` (uint8, last dimension first) and
``_scale_inv`` (float32, ``(1,)``). Devices whose FP8 GEMM reads every layout keep one copy of the bytes for
both directions; on all others columnwise use needs the transposed copy.
"""

import pickle
from typing import Annotated, Any

import torch
from torch import Tensor

from tejit.device import fp8_gemm_takes_every_layout
from tejit.format_info import FP8_TENSOR, fp8_element
from tejit.kernels import fp8
from tejit.tensor import InnerTensor, QuantizedTensor, QuantizedTensorStorage, Quantizer
from tejit.tensor.dispatch import aten, swaps_matrix
from tejit.tensor.quantized import make_wrapper
from tejit.tensor.serialization import allow


def usages(storage: Any) -> tuple[bool, bool]:
    """``(rowwise, columnwise)``: what the buffers of a storage or tensor can serve; traceable."""
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
        rowwise, columnwise = usages(self)
        return {"rowwise": rowwise, "columnwise": columnwise}

    def _rowwise_bytes(self) -> Tensor:
        if self._data is not None:
            return self._data
        assert self._transpose is not None  # _require_data
        return self._transpose.movedim(0, -1) if self._transpose.dim() > 1 else self._transpose

    def _transposed_bytes(self) -> Tensor:
        return self._transpose if self._transpose is not None else fp8.reference.transpose_bytes(self._rowwise_bytes())

    def _check_buffers(self) -> None:
        super()._check_buffers()
        if (self._scale_inv is None) != (self._data is None and self._transpose is None):
            raise pickle.UnpicklingError(f"this {type(self).__name__} has bytes without a scale, or a scale alone")

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
        if func is aten.view.default and (self.dim() == 0 or result.shape[-1] == self.shape[-1]):
            # Only leading dimensions changed, or there is one element.
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


allow(Float8Tensor, Float8TensorStorage)
