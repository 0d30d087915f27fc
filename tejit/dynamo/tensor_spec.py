"""``TensorSpec``: a tensor, plain or quantized, described without its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tejit import compat
from tejit import device as hardware
from tejit.tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer


@dataclass
class TensorSpec:
    """What a tensor is, compared by value.

    Attributes:
        shape: the logical shape; sizes may be symbolic.
        dtype: the dtype, nominal where it is quantized.
        quantizer: how it is quantized; None for a plain tensor.
        requires_grad: of the tensor.
        device: where it is; decides the layout. None means torch's default where one was set, else cuda if
            there is one, else cpu.

    Raises ``TypeError`` for a ``quantizer`` that is none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    quantizer: Quantizer | None = None
    requires_grad: bool = False
    device: torch.device | None = None

    def __post_init__(self) -> None:
        self.shape = tuple(self.shape)
        # Not while tracing: torch 2.11 knows too little of constant objects.
        if not (torch.compiler.is_compiling() or self.quantizer is None or isinstance(self.quantizer, Quantizer)):
            raise TypeError(f"quantizer is {self.quantizer!r}; it must be a quantizer, or None for a plain tensor")
        if self.device is not None:
            self.device = hardware.resolve_device(self.device)

    @property
    def is_quantized(self) -> bool:
        """Whether the description is of a quantized tensor."""
        return self.quantizer is not None

    def update_usage(self, *, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Describe other directions, in place: the spec takes another quantizer, the old one is untouched.

        Raises ``ValueError`` for a plain tensor's spec.
        """
        if self.quantizer is None:
            raise ValueError("update_usage on the spec of a plain tensor; only quantized tensors have usages")
        self.quantizer = self.quantizer.with_usage(rowwise=rowwise_usage, columnwise=columnwise_usage)

    def inner_names(self) -> tuple[str, ...]:
        """Attributes of the buffers, in the storage's order; ``("data",)`` for a plain tensor.

        Raises ``RuntimeError`` where the quantizer names them in another order than its storage.
        """
        if self.quantizer is None:
            return ("data",)
        names = tuple(self.quantizer.inner_tensor_specs(self.shape, self.device))
        metadata = self.quantizer.storage_metadata(self.dtype)
        declared = tuple(metadata["cls"]._keywords_of(metadata["nontensor_kwargs"]))
        expected = tuple([name for name in declared if name in names])
        if names != expected:
            raise RuntimeError(
                f"{type(self.quantizer).__name__}.inner_tensor_specs names {names}, but {metadata['cls'].__name__}"
                f" declares {declared}: the specs must follow the storage's order"
            )
        return names

    def create_metadata(self) -> dict[str, Any] | None:
        """The flatten context; None for a plain tensor."""
        if self.quantizer is None:
            return None
        return self.quantizer.create_metadata(self.shape, dtype=self.dtype, requires_grad=self.requires_grad)

    def create_inner_tensors(self) -> list[Tensor]:
        """Uninitialised plain tensors in the order of :meth:`inner_names`."""
        where = hardware.resolve_device(self.device)
        if self.quantizer is None:
            return [torch.empty(self.shape, dtype=self.dtype, device=where)]
        names = self.inner_names()
        tensors = self.quantizer.alloc_tensors(self.shape, device=where, dtype=self.dtype)
        return [tensors[name] for name in names]

    def assemble(self, inner: list[Tensor] | tuple[Tensor, ...]) -> Any:
        """The tensor (or storage) over ``inner``, which is in the order of :meth:`inner_names`.

        Raises ``ValueError`` where the number of tensors differs.
        """
        names = self.inner_names()
        if len(inner) != len(names):
            raise ValueError(f"{len(inner)} inner tensors were given; this spec has {len(names)}: {names}")
        metadata = self.create_metadata()
        if metadata is None:
            return inner[0].requires_grad_() if self.requires_grad else inner[0]
        by_name = dict(zip(names, inner, strict=True))
        declared = metadata["cls"]._keywords_of(metadata["nontensor_kwargs"])
        buffers = tuple([by_name.get(name) for name in declared])
        return metadata["cls"]._from_inner(buffers, metadata, self.shape, inner[0].device)

    def create_tensor(self) -> Any:
        """An uninitialised tensor (or storage) of this description."""
        return self.assemble(self.create_inner_tensors())


def to_tensor_spec(tensor: Any) -> TensorSpec:
    """The spec of a plain tensor, a storage or a quantized tensor; its usages are those the buffers serve.

    Raises ``TypeError`` for anything else and for a quantized tensor that does not know its quantizer.
    """
    if torch.compiler.is_compiling() and isinstance(tensor, QuantizedTensor):
        # Of a tensor that was made in the graph TorchDynamo knows what torch.Tensor has, and no attribute of ours.
        (quantizer,) = _quantizer_while_tracing(tensor)
        if compat.CONSTANTS_MUST_BE_MADE_TO_LEAVE:
            quantizer = quantizer._from_fields(quantizer._constructor_arguments())
        return TensorSpec(tuple(tensor.shape), tensor.dtype, quantizer, tensor.requires_grad, tensor.device)
    if isinstance(tensor, QuantizedTensorStorage):
        requires_grad = isinstance(tensor, Tensor) and tensor.requires_grad
        return TensorSpec(tuple(tensor.shape), tensor._dtype, _quantizer_of(tensor), requires_grad, tensor.device)
    if isinstance(tensor, Tensor):
        return TensorSpec(tuple(tensor.shape), tensor.dtype, None, tensor.requires_grad, tensor.device)
    raise TypeError(f"{type(tensor).__name__} is neither a tensor nor a quantized storage")


def _quantizer_of(tensor: QuantizedTensorStorage) -> Quantizer:
    """The quantizer that would make this tensor, with the usages that its buffers serve."""
    if tensor._quantizer is None:
        raise TypeError(f"this {type(tensor).__name__} does not know its quantizer; it has no spec")
    bare = not isinstance(tensor, Tensor)
    quantizer: Quantizer = getattr(
        tensor._quantizer, "real_obj", tensor._quantizer
    )  # a tensor of a tracer's has a stand-in
    rowwise, columnwise = quantizer.usages_of(tensor)
    known = (quantizer.rowwise_usage, quantizer.columnwise_usage, quantizer.internal)
    if known == (rowwise, columnwise, bare):
        return quantizer
    return quantizer.replace(rowwise_usage=rowwise, columnwise_usage=columnwise, internal=bare)


@compat.constant_result  # it sees the tensor itself, which is computed for that where the graph makes it
def _quantizer_while_tracing(tensor: QuantizedTensorStorage) -> tuple[Quantizer]:
    return (_quantizer_of(tensor),)  # alone it would be taken for an attribute of a module
