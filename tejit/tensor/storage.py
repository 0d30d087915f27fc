"""``QuantizedTensorStorage``: the buffers of a quantized tensor, without being a ``torch.Tensor``."""

from __future__ import annotations

import math
import pickle
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from tejit import compat, refusals
from tejit.tensor import serialization
from tejit.tensor.inner import collect_inner_tensors
from tejit.tensor.quantizer import Inner, Quantizer

Self = TypeVar("Self", bound="QuantizedTensorStorage")


class QuantizedTensorStorage:
    """Base of all storages, and (behind ``QuantizedTensor``) of all quantized tensors.

    A subclass declares its buffers as ``InnerTensor`` fields and gives its other constructor keywords by
    ``_nontensor_kwargs``; both together are what it is made from.
    """

    #: ``{attribute: constructor keyword}`` of the buffers, in order; collected when the class is made.
    _INNER_TENSORS: ClassVar[dict[str, str]] = {}

    #: Buffers of which none is there without the others; in the order of declaration.
    _TOGETHER: ClassVar[tuple[tuple[str, ...], ...]] = ()

    #: Attributes beside the buffers that make up the object.
    _STATE: ClassVar[tuple[str, ...]] = ("_quantizer", "_dtype", "_shares_scale", "_known_shape", "_known_device")

    #: Whether the scale belongs to a larger tensor too, of which this one is a view (set on instances).
    _shares_scale: bool = False

    _quantizer: Quantizer | None
    _dtype: torch.dtype
    _known_shape: torch.Size
    _known_device: torch.device

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._INNER_TENSORS = collect_inner_tensors(cls)

    # -- what a format defines ----------------------------------------------------------------------------
    def _nontensor_kwargs(self) -> dict[str, Any]:
        """The constructor keywords that are not tensors, with their values."""
        return {"quantizer": self._quantizer, "fake_dtype": self._dtype}

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define _dequantize")

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a direction, or make it from the other one where the format can. None leaves a direction alone.

        Raises ``RuntimeError``, before anything is changed, for a request that cannot be met.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define update_usage")

    def get_usages(self) -> dict[str, bool]:
        """``{"rowwise": bool, "columnwise": bool}``: what the buffers can serve."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_usages")

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of ``dtype`` (default: the nominal dtype), from whichever direction is there.

        Raises ``RuntimeError`` where the buffers were given away.
        """
        refusals.refuse_jit_tracing("what a quantized tensor stands for")
        self._require_data()
        return self._dequantize(self._dtype if dtype is None else dtype)

    # -- description --------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        """Where the buffers are (or were, after they were given away)."""
        for tensor in self._inner():
            if tensor is not None:
                return tensor.device
        return self._known_device

    @property
    def shape(self) -> torch.Size:
        """The logical shape."""
        return self._known_shape

    @property
    def dtype(self) -> torch.dtype:
        """The nominal dtype: what the tensor stands for and dequantizes to."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """Bytes in all buffers that are there."""
        return sum(tensor.nbytes for tensor in self._inner() if tensor is not None)

    def size(self, dim: int | None = None) -> Any:
        """The logical shape, or one entry of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        usages = "+".join(name for name, used in self.get_usages().items() if used) or "no data"
        return (
            f"{type(self).__name__}({self._format_name()}, shape={tuple(self.shape)}, dtype={self.dtype},"
            f" device={self.device}, {usages}, {self._size_text()})"
        )

    def _size_text(self) -> str:
        shapes = [self.shape, *(tensor.shape for tensor in self._inner() if tensor is not None)]
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            return "symbolic size"  # a tracer prints tensors too
        plain = math.prod(self.shape) * self.dtype.itemsize
        ratio = f"{self.nbytes / plain:.2f}" if plain else "-"
        return f"{self.nbytes} bytes, {ratio} of the plain tensor's"

    def _format_name(self) -> str:
        return type(self).__name__.removesuffix("Storage").removesuffix("Tensor")

    def _own_state(self) -> tuple[str, ...]:
        """Attributes that make up the object; everything else in ``__dict__`` was attached from outside."""
        return (*self._buffer_keywords(), *self._STATE)

    @classmethod
    def _keywords_of(cls, others: dict[str, Any]) -> dict[str, str]:
        """``{attribute: constructor keyword}`` of the buffers of an instance with these other keywords.

        The declared fields; a class whose fields depend on its quantizer overrides this and
        :meth:`_buffer_keywords`.
        """
        return cls._INNER_TENSORS

    def _buffer_keywords(self) -> dict[str, str]:
        """``{attribute: constructor keyword}`` of this object's buffers, in order."""
        return self._INNER_TENSORS

    def _buffer_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """``{attribute: (shape, dtype)}`` that each buffer has where it is there."""
        raise NotImplementedError(f"{type(self).__name__} does not define _buffer_shapes")

    def _check_buffers(self) -> None:
        """Raises ``pickle.UnpicklingError`` where a buffer does not fit the logical shape, or one of several that go
        together is missing."""
        for names in self._TOGETHER:
            if len({getattr(self, name) is None for name in names}) > 1:
                raise pickle.UnpicklingError(f"of {', '.join(names)} of this {type(self).__name__} only some are there")
        for name, (shape, dtype) in self._buffer_shapes().items():
            buffer = getattr(self, name)
            if buffer is not None and (tuple(buffer.shape) != shape or buffer.dtype != dtype):
                raise pickle.UnpicklingError(
                    f"{name} is {buffer.dtype} of shape {tuple(buffer.shape)}; a {type(self).__name__} of shape"
                    f" {tuple(self.shape)} has {dtype} of shape {shape}"
                )

    def _unshare(self, inner: Inner) -> None:
        """Take ``inner`` as buffers, copied where they were the buffers before.

        They may be shared with another tensor (a Parameter made from this one, a detached alias) that keeps its
        directions; a later write here would leave its other bytes behind.
        """
        before = self._inner()
        for name, buffer in zip(self._buffer_keywords(), inner, strict=True):
            shared = buffer is not None and any(buffer is old for old in before)
            setattr(self, name, buffer.clone() if shared and buffer is not None else buffer)

    # -- buffers ------------------------------------------------------------------------------------------
    def _inner(self) -> Inner:
        return tuple([getattr(self, name) for name in self._buffer_keywords()])

    def _require_data(self) -> None:
        if not any(self.get_usages().values()):
            raise RuntimeError(
                f"this {type(self).__name__} has no data: its buffers were given away by prepare_for_saving;"
                " call restore_from_saved first"
            )

    def get_metadata(self) -> dict[str, Any]:
        """Every constructor keyword with its value: ``type(self)(**self.get_metadata(), ...)`` shares the buffers."""
        buffers = {keyword: getattr(self, name) for name, keyword in self._buffer_keywords().items()}
        return {**buffers, **self._nontensor_kwargs()}

    def prepare_for_saving(self: Self) -> tuple[list[Tensor | None], Self]:
        """Give the buffers away: ``(buffers in order, self without them)``, for ``ctx.save_for_backward``."""
        buffers = list(self._inner())
        self._known_device = self.device
        for name in self._buffer_keywords():
            setattr(self, name, None)
        return buffers, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take the buffers back from the front of ``tensors``; returns the rest."""
        for name, tensor in zip(self._buffer_keywords(), tensors, strict=False):
            setattr(self, name, tensor)
        return tensors[len(self._buffer_keywords()) :]

    # -- copies -------------------------------------------------------------------------------------------
    def _like(self: Self, inner: Inner, **changes: Any) -> Self:
        """The same kind of object over other buffers of the same shape."""
        keywords = {**self._nontensor_kwargs(), **changes}
        buffers = dict(zip(self._buffer_keywords().values(), inner, strict=True))
        device = next((tensor.device for tensor in inner if tensor is not None), self.device)
        return type(self)._construct(buffers, keywords, tuple(self.shape), device)

    def clone(self: Self) -> Self:
        """A copy that shares nothing with ``self``."""
        return self._like(tuple([None if t is None else t.clone() for t in self._inner()]))

    def detach(self: Self) -> Self:
        """Another object over the same buffers."""
        return self._like(self._inner())

    def quantize_(self: Self, x: Tensor, *, noop_flag: Tensor | None = None) -> Self:
        """Quantize ``x`` into these buffers, in place.

        Raises what ``Quantizer.update_quantized`` raises, and ``RuntimeError`` where the quantizer is unknown.
        """
        self._known_quantizer().update_quantized(x, self, noop_flag=noop_flag)
        return self

    def _known_quantizer(self) -> Quantizer:
        if self._quantizer is None:
            raise RuntimeError(
                f"this {type(self).__name__} does not know its quantizer; use quantizer.update_quantized(x, tensor)"
            )
        return self._quantizer

    def __reduce__(self) -> Any:
        return serialization.reduce_storage(self)

    # -- construction, flatten protocol -------------------------------------------------------------------
    @classmethod
    def _construct(
        cls: type[Self],
        buffers: dict[str, Tensor | None],
        keywords: dict[str, Any],
        shape: tuple[int, ...],
        device: torch.device,
        requires_grad: bool = False,
        stride: tuple[int, ...] | None = None,
    ) -> Self:
        """Make an instance from buffers by keyword; a wrapper class adds what torch.Tensor needs."""
        instance = cls(**buffers, **keywords)
        instance._known_shape = torch.Size(shape)
        instance._known_device = device
        return instance

    @classmethod
    def _from_inner(
        cls: type[Self],
        inner: Inner,
        metadata: dict[str, Any],
        shape: tuple[int, ...],
        device: torch.device,
        stride: tuple[int, ...] | None = None,
    ) -> Self:
        """Make an instance from all buffers in order (None for an absent one) and a flatten context."""
        others = metadata["nontensor_kwargs"]
        buffers = dict(zip(cls._keywords_of(others).values(), inner, strict=True))
        made = cls._construct(buffers, others, shape, device, metadata["requires_grad"], stride)
        if metadata["shares_scale"]:
            made._shares_scale = True
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        present = [name for name in self._buffer_keywords() if getattr(self, name) is not None]
        context = {
            "cls": type(self),
            "is_tensor": isinstance(self, Tensor),
            "requires_grad": False,
            "shares_scale": self._shares_scale,
            "nontensor_kwargs": self._nontensor_kwargs(),
        }
        return present, context

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor],
        context: dict[str, Any],
        outer_size: Any,
        outer_stride: Any,
    ) -> Any:
        cls = context["cls"]
        inner = tuple([inner_tensors.get(name) for name in cls._keywords_of(context["nontensor_kwargs"])])
        device = next(tensor.device for tensor in inner if tensor is not None)
        stride = None if outer_stride is None else tuple(outer_stride)
        if not compat.OUTER_STRIDES_ARE_RIGHT and stride is not None:
            stride = _stride_from(inner, tuple(outer_size), stride)
        return cls._from_inner(inner, context, tuple(outer_size), device, stride)


def _stride_from(inner: Inner, size: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a tensor over ``inner``, where ``given`` ones may be wrong; None means contiguous.

    A buffer of the logical shape lies as the tensor does. Without one the tensor is contiguous, or a contiguous
    matrix transposed. While tracing (symbolic numbers) the given ones are right.
    """
    if not all(isinstance(number, int) for number in (*size, *given)):
        return given
    for buffer in inner:
        if buffer is not None and tuple(buffer.shape) == size:
            return tuple(buffer.stride())
    return given if len(size) == 2 and given == (1, size[0]) else None
