"""What quantizers with one FP8 scale per tensor share."""

import math
from typing import Any

import torch
from torch import Tensor

from tejit.device import fp8_gemm_takes_every_layout, resolve_device
from tejit.format_info import FP8_TENSOR, fp8_element
from tejit.formats.float8.tensor import Float8Tensor, Float8TensorStorage, usages
from tejit.kernels import fp8
from tejit.kernels.gemm import Operand
from tejit.tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer
from tejit.tensor.quantizer import Inner


class Float8TensorQuantizer(Quantizer):
    """What quantizers with one FP8 scale a tensor share: buffers, allocation, GEMM operands."""

    fp8_dtype: torch.dtype

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

    def _check_target(self, dst: Any) -> None:
        self._target(dst)

    def _target(self, dst: QuantizedTensorStorage) -> Float8TensorStorage:
        """``dst``, if this quantizer can write into it."""
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
        return dst

    def _allocate(self, shape: tuple[int, ...], device: torch.device, pin_memory: bool) -> Inner:
        data, transpose = self._wants(device)
        codes, transposed, scale_inv = fp8.make_empty(shape, data, transpose, device, pin_memory)
        return codes if data else None, transposed if transpose else None, scale_inv

    def usages_of(self, storage: Any) -> tuple[bool, bool]:
        """``(rowwise, columnwise)``: what the buffers of a storage or tensor can serve; traceable."""
        return usages(storage)

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

    def columnwise_from_rowwise(self, inner: Inner) -> Inner | None:
        """The transposed bytes, with the same scale."""
        data, _, scale_inv = inner
        assert data is not None
        return None, fp8.reference.transpose_bytes(data), scale_inv

    def columnwise_inner(self, inner: Inner) -> Inner:
        """``inner`` less the rowwise bytes, where the transposed ones are there."""
        data, transpose, scale_inv = inner
        return (data if transpose is None else None), transpose, scale_inv


def _matrix(codes: Tensor) -> Tensor:
    return codes if codes.dim() == 2 else codes.reshape(math.prod(codes.shape[:-1]), codes.shape[-1])
