"""``QuantizedTensor``: a storage that is also a ``torch.Tensor``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tejit import compat, refusals
from tejit.tensor import serialization
from tejit.tensor.attached import attached
from tejit.tensor.dispatch import dispatch
from tejit.tensor.kept import note_write
from tejit.tensor.parameter import QuantizedTensorMeta, quantized_for
from tejit.tensor.storage import QuantizedTensorStorage
from tejit.tensor.swapping import SwappedState

Self = TypeVar("Self", bound="QuantizedTensor")


def make_wrapper(
    cls: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    device: torch.device | None,
    stride: tuple[int, ...] | None,
) -> Any:
    """The ``torch.Tensor`` side of a quantized tensor; only for a class's own ``__new__``.

    ``stride`` None means contiguous (torch's own helper for that does not trace on 2.11).
    """
    if stride is None:
        steps = [1]
        for size in reversed(shape[1:]):
            steps.append(steps[-1] * size)
        stride = tuple(reversed(steps)) if shape else ()
    return Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
    )


if TYPE_CHECKING:  # what every concrete class also is; torch.Tensor comes first in the order of look-up
    _Mixed = QuantizedTensorStorage
else:
    _Mixed = object


class QuantizedTensor(Tensor, _Mixed, metaclass=QuantizedTensorMeta):
    """Base of all quantized tensors: ``class Float8Tensor(QuantizedTensor, Float8TensorStorage)``.

    It behaves as a tensor of its nominal dtype. Operations that the format can follow keep it
    (``tejit.tensor.dispatch`` lists them), all others dequantize.

    A class called with a tensor makes a parameter of it, as ``nn.Parameter(data, requires_grad)`` does
    (``tejit.tensor.parameter.make_parameter``).
    """

    @staticmethod
    def __new__(
        cls: type[Self],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: tuple[int, ...] | None = None,
        **buffers: Any,
    ) -> Self:
        return make_wrapper(cls, shape, dtype, requires_grad, device, stride)

    __torch_function__ = torch._C._disabled_torch_function_impl
    __dict__ = SwappedState()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    # -- what torch.Tensor would answer differently -------------------------------------------------------
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of ``dtype`` (default: the nominal dtype); differentiable straight through.

        Raises ``RuntimeError`` where the buffers were given away.
        """
        refusals.refuse_jit_tracing("what a quantized tensor stands for")
        self._require_data()
        nominal = self._dtype if dtype is None else dtype
        followed = torch.is_grad_enabled() and self.requires_grad
        if followed or (not torch.compiler.is_compiling() and compat.has_tangent(self)):
            return _Dequantize.apply(self, nominal)
        return self._dequantize(nominal)

    @property
    def nbytes(self) -> int:
        """Bytes in all buffers that are there."""
        return sum(tensor.nbytes for tensor in self._inner() if tensor is not None)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return QuantizedTensorStorage.__repr__(self)

    @property
    def data(self) -> Any:
        """The tensor without its autograd history, over the same buffers.

        Assigning a quantized tensor of the same class, dtype and device takes its buffers over; assigning other values
        quantizes them. A parameter takes their shape over too, as loaders that resize a model need it. torch's own
        setter would leave the inner tensors as they were, silently. Raises ``ValueError`` for another dtype or device,
        for a shape that the format cannot hold, and for another shape where this is no parameter; ``TypeError`` for
        values in no floating dtype.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        values: Tensor | None = None
        if value.shape != self.shape and not isinstance(self, torch.nn.Parameter):
            raise ValueError(
                f"cannot assign data of shape {tuple(value.shape)} to a {type(self).__name__} of shape"
                f" {tuple(self.shape)}, which is no parameter; make another tensor: quantizer(values)"
            )
        if value.is_meta != self.is_meta:
            raise ValueError(
                f"cannot assign data of {value.dtype} on {value.device} to a {type(self).__name__} on {self.device}:"
                " one of them has no memory. Assign another parameter, module.weight ="
                " torch.nn.Parameter(values), or give the module memory first with"
                ' module.to_empty(device="...")'
            )
        if type(value) is not type(self):
            values = value.detach().to(self.device)
            value = quantized_for(type(self), self._known_quantizer(), values, self._dtype)
        if value.dtype != self.dtype or value.device != self.device:
            raise ValueError(
                f"cannot assign data of {value.dtype} on {value.device} to a {type(self).__name__} of {self.dtype} on"
                f" {self.device}; convert it first: parameter.data = value.to(parameter)"
            )
        value._require_data()
        if value.shape == self.shape:
            self._take_state(value)
        else:
            self._require_whole("data")
            self._become(value.detach())
        note_write(self, values)

    def _become(self, value: QuantizedTensor) -> None:
        """Take over the nominal dtype, device and buffers of ``value``, of the same class, in place: the object, its
        hooks, and whoever holds it know nothing of it.

        Raises ``RuntimeError`` (torch's own) where one of them is on the meta device and the other is not.
        """
        Tensor.data.__set__(self, value)
        self._take_state(value)

    def _take_state(self, value: QuantizedTensor) -> None:
        for name in value._own_state():
            if hasattr(value, name):
                setattr(self, name, getattr(value, name))

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
        others = {name: value for name, value in keywords.items() if name != "fake_dtype"}
        return cls(
            shape,
            keywords["fake_dtype"],
            requires_grad=requires_grad,
            device=device,
            stride=stride,
            **buffers,
            **others,
        )

    # -- what the operations of tejit.tensor.dispatch ask for ------------------------------------------------
    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a view operation, or ``NotImplemented`` where the format cannot follow it."""
        return NotImplemented

    def _copy_buffers(self, source: QuantizedTensor) -> bool:
        """Copy ``source``'s buffers into one's own where both have the same ones; False where they do not."""
        return False

    def _copy_inner(self, source: QuantizedTensor) -> bool:
        """:meth:`_copy_buffers` for a ``source`` of the same format, buffer by buffer."""
        pairs = list(zip(self._inner(), source._inner(), strict=True))
        if source.shape != self.shape or any(mine is not None and theirs is None for mine, theirs in pairs):
            return False
        for mine, theirs in pairs:
            if mine is not None:
                mine.copy_(theirs)
        return True

    def _alias(self: Self) -> Self:
        present, context = self.__tensor_flatten__()
        return self.__tensor_unflatten__(
            {name: getattr(self, name) for name in present}, context, self.shape, self.stride()
        )

    def _map(self: Self, function: Callable[[Tensor], Tensor], **changes: Any) -> Self:
        """The tensor over ``function`` of each buffer; ``changes`` replace other constructor keywords."""
        return self._like(tuple([None if b is None else function(b) for b in self._inner()]), **changes)

    def _require_whole(self, operation: str) -> None:
        """Raises ``RuntimeError`` for a view: new values need a new scale, and the scale is not the view's alone."""
        if self._shares_scale:
            raise RuntimeError(
                f"{operation} would write to a view of a {type(self).__name__}, whose scale belongs to the whole"
                " tensor. Write to the whole tensor, or work on view.dequantize()."
            )

    # -- copies -------------------------------------------------------------------------------------------
    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        if not self.is_leaf:
            raise RuntimeError(
                f"only a leaf {type(self).__name__} can be deep-copied; this one has a history: detach() it first"
            )
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            twin = self.clone()
        twin.requires_grad_(self.requires_grad)
        memo[id(self)] = twin
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        for name, value in attached(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return serialization.reduce_tensor(self)

    # -- ways around the buffers, on which torch reads memory that a wrapper does not have ---------------------
    def share_memory_(self: Self) -> Self:
        """Move the buffers into shared memory, for other processes to use; returns the tensor itself."""
        for name in self._buffer_keywords():
            buffer = getattr(self, name)
            if buffer is not None:
                buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all buffers are in shared memory."""
        return all(buffer.is_shared() for buffer in self._inner() if buffer is not None)

    def storage(self) -> Any:
        """Raises ``RuntimeError``: there is no one memory, but several buffers. safetensors asks for it, and would then
        write nothing. (``untyped_storage`` answers as torch does for tensors without memory: compilers and checkpoints
        ask for it, and know what it means.)"""
        raise RuntimeError(
            f"a {type(self).__name__} has no storage of its own. To write it where plain tensors are needed, such as"
            " safetensors, save tensor.dequantize(), and of a module tejit.plain_state_dict(module):"
            " save_file(tejit.plain_state_dict(model), path), or"
            " model.save_pretrained(path, state_dict=tejit.plain_state_dict(model)). torch.save keeps it quantized."
        )

    def data_ptr(self) -> int:
        """The address of the first buffer, by which loaders tell tied parameters; 0 where there is no memory."""
        buffer = next((buffer for buffer in self._inner() if buffer is not None), None)
        if buffer is None or type(buffer) is not Tensor or buffer.is_meta:
            return 0  # a tracer's buffers have no address
        return buffer.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """Raises ``RuntimeError``: numpy knows no quantized tensors. Use ``dequantize().numpy()``."""
        raise RuntimeError(
            f"a {type(self).__name__} of shape {tuple(self.shape)} has no form in numpy; use"
            " tensor.dequantize().numpy(). Offload to disk writes plain values: before disk_offload or dispatch_model,"
            " write them with accelerate.utils.offload_state_dict(folder, tejit.plain_state_dict(model)), whose folder"
            " is then used; or offload to the CPU, which keeps parameters quantized"
        )

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ``BufferError``: DLPack knows no quantized tensors. Export ``dequantize()`` or a buffer instead."""
        raise BufferError(f"a {type(self).__name__} cannot be exported; use tensor.dequantize(), or one of its buffers")


class _Dequantize(torch.autograd.Function):
    """Straight-through: the gradient of the values is the gradient of the quantized tensor."""

    @staticmethod
    def forward(x: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        return x._dequantize(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Its own, which transforms of functions (``torch.func``) ask for."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent.clone()  # no view of what came in: the values are none

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Any, dtype: torch.dtype) -> tuple[Tensor, int | None]:
        return _Dequantize.apply(x, dtype), in_dims[0]
