"""Identity: a tensor in high precision behind the contract of quantizers, for layers or directions that stay so.

One buffer, ``_hp_data``, of the logical shape; it serves both directions.
"""

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from tejit.device import resolve_device
from tejit.dynamo import register_value_opaque_quantizer
from tejit.format_info import HIGH_PRECISION_DTYPES
from tejit.kernels.fp8.reference import write_unless
from tejit.kernels.gemm import Operand
from tejit.kernels.rounding import as_rounded
from tejit.tensor import InnerTensor, QuantizedTensor, QuantizedTensorStorage, Quantizer
from tejit.tensor.quantized import make_wrapper
from tejit.tensor.quantizer import Inner
from tejit.tensor.serialization import allow


class IdentityQuantizer(Quantizer):
    """No quantization: the values themselves, cast to ``dtype`` or kept.

    Args:
        dtype: float32, bfloat16 or float16; None keeps the input's (``make_empty`` then takes the nominal one).
        rowwise, columnwise: as in every format; the one buffer serves both directions.
        internal: make bare storages instead of tensors.
        optimize_for_gemm: accepted as in every format; there are no scales.

    Raises ``TypeError`` for another ``dtype`` or a flag that is no bool.
    """

    dtype: torch.dtype | None

    def __init__(
        self,
        *,
        dtype: torch.dtype | None = None,
        rowwise: bool = True,
        columnwise: bool = True,
        internal: bool = False,
        optimize_for_gemm: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise, internal=internal, optimize_for_gemm=optimize_for_gemm)
        if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"dtype is {dtype!r}; it must be torch.float32, torch.bfloat16, torch.float16 or None")
        self._init_fields(dtype=dtype)

    def inner_tensor_specs(
        self, shape: tuple[int, ...], device: torch.device | str | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """``{"_hp_data": (shape, dtype)}``; where ``dtype`` is None that of a nominally float32 tensor."""
        return self.specs_as(shape, resolve_device(device), torch.float32)

    def specs_as(
        self, shape: tuple[int, ...], device: torch.device, nominal: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """``{"_hp_data": (shape, dtype)}``; where ``dtype`` is None the nominal one."""
        return {"_hp_data": (tuple(shape), nominal if self.dtype is None else self.dtype)}

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """``{"cls", "nontensor_kwargs"}`` of the storage or tensor that this quantizer makes."""
        return {
            "cls": IdentityTensorStorage if self.internal else IdentityTensor,
            "nontensor_kwargs": {"quantizer": self, "fake_dtype": fake_dtype},
        }

    def quantize_inner(self, x: Tensor, amax_reduction_group: Any = None) -> Inner:
        """``x`` in ``dtype``: ``x`` itself where nothing is to be cast. There is no amax to reduce."""
        return (x if self.dtype is None or self.dtype == x.dtype else _cast(x, self.dtype),)

    def _owned(self, inner: Inner, x: Tensor) -> Inner:
        (data,) = inner
        assert data is not None
        if data.dtype == x.dtype:  # nothing was cast, so it is `x`
            return (data.clone(memory_format=torch.contiguous_format),)
        return (data.contiguous(),)

    def _check_target(self, dst: QuantizedTensorStorage) -> None:
        if not isinstance(dst, IdentityTensorStorage):
            raise TypeError(f"{type(self).__name__} cannot write into a {type(dst).__name__}")
        dst._require_data()
        assert dst._hp_data is not None
        if self.dtype is not None and self.dtype != dst._hp_data.dtype:
            raise TypeError(
                f"the target holds {dst._hp_data.dtype} and the quantizer makes {self.dtype};"
                " quantize into a new tensor instead"
            )

    def _quantize_into(
        self, x: Tensor, dst: QuantizedTensorStorage, noop_flag: Tensor | None, amax_reduction_group: Any
    ) -> None:
        self._check_target(dst)
        assert isinstance(dst, IdentityTensorStorage)  # checked
        assert dst._hp_data is not None
        write_unless((dst._hp_data,), (_cast(x, dst._hp_data.dtype),), noop_flag)

    def _allocate_as(
        self, shape: tuple[int, ...], device: torch.device, pin_memory: bool, nominal: torch.dtype
    ) -> Inner:
        return (torch.empty(shape, dtype=self.dtype or nominal, device=device, pin_memory=pin_memory),)

    def usages_of(self, storage: Any) -> tuple[bool, bool]:
        """``(rowwise, columnwise)``: the one buffer serves both; traceable."""
        return storage._hp_data is not None, storage._hp_data is not None

    def rowwise_operand(self, inner: Inner) -> Operand:
        """The ``(M, K)`` operand."""
        (data,) = inner
        return Operand(_matrix(data), None, kind="plain")

    def columnwise_operand(self, inner: Inner) -> Operand:
        """The ``(K, M)`` operand, a transposed view."""
        (data,) = inner
        return Operand(_matrix(data).t(), None, kind="plain")

    def columnwise_inner(self, inner: Inner) -> Inner:
        """``inner``: the one buffer is read in both directions."""
        return inner


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, rounded to it inside a compiled graph too."""
    return x if x.dtype == dtype else as_rounded(as_rounded(x).to(dtype))


def _matrix(data: Tensor | None) -> Tensor:
    assert data is not None
    if data.dim() == 2:
        return data
    return data.reshape(math.prod(data.shape[:-1]), data.shape[-1] if data.dim() else 1)


class IdentityTensorStorage(QuantizedTensorStorage):
    """The buffer of a tensor that stays in high precision.

    Args:
        hp_data: float32, bfloat16 or float16 of the logical shape.
        quantizer: what made it, or None.
        fake_dtype: nominal dtype; default that of ``hp_data``.
    """

    _hp_data: Annotated[Tensor | None, InnerTensor("hp_data")]

    def __init__(
        self,
        *,
        hp_data: Tensor | None = None,
        quantizer: Quantizer | None = None,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        kept = torch.float32 if hp_data is None else hp_data.dtype
        self._fill(hp_data, quantizer, fake_dtype or kept)
        if hp_data is not None:
            self._known_shape, self._known_device = hp_data.shape, hp_data.device

    def _fill(self, hp_data: Tensor | None, quantizer: Quantizer | None, dtype: torch.dtype) -> None:
        self._hp_data = hp_data
        self._quantizer = quantizer
        self._dtype = dtype

    def _format_name(self) -> str:
        return "no quantization"

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        assert self._hp_data is not None  # _require_data
        # A copy always, as every format's: writing to it must not reach this tensor.
        return self._hp_data.to(dtype, copy=True)

    def get_usages(self) -> dict[str, bool]:
        """``{"rowwise": bool, "columnwise": bool}``: the one buffer serves both."""
        return {"rowwise": self._hp_data is not None, "columnwise": self._hp_data is not None}

    def _buffer_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        dtype = self._dtype if self._hp_data is None else self._hp_data.dtype
        wanted = dtype if dtype in HIGH_PRECISION_DTYPES else self._dtype
        return {"_hp_data": (tuple(self.shape), wanted)}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Nothing to change: the one buffer serves both directions.

        Raises ``RuntimeError`` where no direction would stay.
        """
        if rowwise_usage is False and columnwise_usage is False:
            raise RuntimeError(f"update_usage would leave this {type(self).__name__} without any direction")


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):
    """A tensor in high precision that follows the contract of quantized tensors.

    Args:
        shape: the logical shape.
        dtype: the nominal dtype.
        hp_data, quantizer: as in :class:`IdentityTensorStorage`.
        requires_grad, device, stride: of the tensor; ``device`` None means the buffer's own.
    """

    @staticmethod
    def __new__(
        cls: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        hp_data: Tensor | None = None,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> Any:
        if device is None and hp_data is not None:
            device = hp_data.device
        return make_wrapper(cls, shape, dtype, requires_grad, device, stride)

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        hp_data: Tensor | None = None,
        quantizer: Quantizer | None = None,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> None:
        self._fill(hp_data, quantizer, dtype)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(self._hp_data, *args, **kwargs)
        if isinstance(result, Tensor):
            return self._over(result)
        return type(result)([self._over(part) for part in result])

    def _over(self, data: Tensor) -> Any:
        """A view over ``data``, to which writing is allowed: there is no scale to share."""
        return type(self)(
            tuple(data.shape),
            self._dtype,
            hp_data=data,
            quantizer=self._quantizer,
            device=data.device,
            stride=data.stride(),
        )

    def _copy_buffers(self, source: Any) -> bool:
        return isinstance(source, IdentityTensor) and self._copy_inner(source)


register_value_opaque_quantizer(IdentityQuantizer)
allow(IdentityTensor, IdentityTensorStorage)
