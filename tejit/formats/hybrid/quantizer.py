"""``HybridQuantizer``: two quantizers, one a direction."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor

from tejit.device import resolve_device
from tejit.dynamo import is_value_opaque_quantizer, register_value_opaque_quantizer
from tejit.formats.hybrid.children import declared_keywords, nested_storage, prefixed, present
from tejit.formats.hybrid.tensor import HybridQuantizedTensor, HybridQuantizedTensorStorage
from tejit.kernels.gemm import Operand
from tejit.tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer
from tejit.tensor.quantizer import Inner
from tejit.tensor.serialization import allow

#: Where the columnwise child takes its values from.
SOURCES = ("original", "rowwise_dequantized")


class HybridQuantizer(Quantizer):
    """Two quantizers, one a direction.

    Args:
        rowwise_quantizer: makes rowwise data; its usages become (True, False).
        columnwise_quantizer: makes columnwise data; its usages become (False, True).
        columnwise_source: ``original`` quantizes the input itself in both directions, ``rowwise_dequantized``
            quantizes columnwise what the rowwise data stand for, so that both directions hold the same values
            up to the columnwise format's own rounding.
        rowwise, columnwise: which directions are made.
        internal: make bare storages instead of tensors.
        optimize_for_gemm: set on both children; False leaves them as they are.

    Raises ``TypeError`` for a child that is no quantizer or is a hybrid itself, or a flag that is no bool;
    ``ValueError`` for one instance given twice or another ``columnwise_source``.

    A value (``register_value_opaque_quantizer``) where both children are; with a child that has identity
    semantics it has them too.
    """

    rowwise_quantizer: Quantizer
    columnwise_quantizer: Quantizer

    _tensors_need_it = True
    columnwise_source: str

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        # Registration makes a whole class a class of values, so what holds live tensors is of another class.
        children = (keywords.get("rowwise_quantizer"), keywords.get("columnwise_quantizer"))
        if cls is HybridQuantizer and any(isinstance(q, Quantizer) and not _is_value(q) for q in children):
            return object.__new__(_LiveHybridQuantizer)
        return object.__new__(cls)

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: str = "original",
        rowwise: bool = True,
        columnwise: bool = True,
        internal: bool = False,
        optimize_for_gemm: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise, internal=internal, optimize_for_gemm=optimize_for_gemm)
        for name, child in (("rowwise_quantizer", rowwise_quantizer), ("columnwise_quantizer", columnwise_quantizer)):
            if not isinstance(child, Quantizer):
                raise TypeError(f"{name} is {child!r}; it must be a quantizer")
            if isinstance(child, HybridQuantizer):
                raise TypeError(f"{name} is a hybrid itself; give the quantizer of the direction that is meant")
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError(
                f"rowwise_quantizer and columnwise_quantizer are one instance, {rowwise_quantizer!r}; each direction"
                " needs its own. For one format in both directions use that quantizer alone."
            )
        if columnwise_source not in SOURCES:
            raise ValueError(f"columnwise_source is {columnwise_source!r}; it must be one of {', '.join(SOURCES)}")
        self._init_fields(
            rowwise_quantizer=_pinned(rowwise_quantizer, True, optimize_for_gemm),
            columnwise_quantizer=_pinned(columnwise_quantizer, False, optimize_for_gemm),
            columnwise_source=columnwise_source,
        )

    def _from_fields(self, fields: dict[str, Any]) -> Any:
        renamed = {"rowwise_usage": "rowwise", "columnwise_usage": "columnwise"}
        return HybridQuantizer(**{renamed.get(name, name): value for name, value in fields.items()})

    # -- buffers ------------------------------------------------------------------------------------------
    def buffer_keywords(self) -> dict[str, str]:
        """``{attribute: constructor keyword}`` of all buffers, the rowwise child's first."""
        return {
            **prefixed("rowwise", declared_keywords(self.rowwise_quantizer)),
            **prefixed("columnwise", declared_keywords(self.columnwise_quantizer)),
        }

    def _split(self, inner: Inner) -> tuple[Inner, Inner]:
        """The buffers of the rowwise child and those of the columnwise one."""
        count = len(declared_keywords(self.rowwise_quantizer))
        return tuple(inner[:count]), tuple(inner[count:])

    def _join(self, rowwise: Inner | None, columnwise: Inner | None) -> Inner:
        if rowwise is None:
            rowwise = (None,) * len(declared_keywords(self.rowwise_quantizer))
        if columnwise is None:
            columnwise = (None,) * len(declared_keywords(self.columnwise_quantizer))
        return (*rowwise, *columnwise)

    def inner_tensor_specs(
        self, shape: tuple[int, ...], device: torch.device | str | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """``{attribute: (shape, dtype)}`` of the buffers, the rowwise child's first.

        Raises what the children raise for a shape that they cannot hold.
        """
        return self.specs_as(shape, resolve_device(device), torch.float32)

    def specs_as(
        self, shape: tuple[int, ...], device: torch.device, nominal: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """:meth:`inner_tensor_specs` of a tensor whose nominal dtype is known."""
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.rowwise_usage or self._is_dependent():  # what cannot be made rowwise has no columnwise source either
            rowwise = self.rowwise_quantizer.specs_as(shape, device, nominal)
            if self.rowwise_usage:
                specs.update(prefixed("rowwise", rowwise))
        if self.columnwise_usage:
            specs.update(prefixed("columnwise", self.columnwise_quantizer.specs_as(shape, device, nominal)))
        return specs

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """``{"cls", "nontensor_kwargs"}`` of the storage or tensor that this quantizer makes."""
        return {
            "cls": HybridQuantizedTensorStorage if self.internal else HybridQuantizedTensor,
            "nontensor_kwargs": {"quantizer": self, "fake_dtype": fake_dtype},
        }

    # -- quantizing ---------------------------------------------------------------------------------------
    def quantize_inner(self, x: Tensor, amax_reduction_group: Any = None) -> Inner:
        """The children's buffers, the rowwise ones first, None for absent ones."""
        row = column = None
        dependent = self._is_dependent()
        if self.rowwise_usage or dependent:
            row = self.rowwise_quantizer.quantize_inner(x, amax_reduction_group)
        if self.columnwise_usage:
            source = self._rowwise_values(row, x) if dependent and row is not None else x
            column = self.columnwise_quantizer.quantize_inner(source, amax_reduction_group)
        return self._join(row if self.rowwise_usage else None, column)

    def _is_dependent(self) -> bool:
        return self.columnwise_source == "rowwise_dequantized"

    def _rowwise_values(self, row: Inner, x: Tensor) -> Tensor:
        """What rowwise data made from ``x`` stand for, in ``x``'s dtype."""
        return nested_storage(self.rowwise_quantizer, row, tuple(x.shape), x.dtype, x.device)._dequantize(x.dtype)

    def _owned(self, inner: Inner, x: Tensor) -> Inner:
        row, column = self._split(inner)
        return self._join(
            self.rowwise_quantizer._owned(row, x) if self.rowwise_usage else None,
            self.columnwise_quantizer._owned(column, x) if self.columnwise_usage else None,
        )

    def _check_target(self, dst: QuantizedTensorStorage) -> None:
        if not isinstance(dst, HybridQuantizedTensorStorage):
            raise TypeError(f"{type(self).__name__} cannot write into a {type(dst).__name__}")
        for mine, theirs in (
            (self.rowwise_quantizer, dst._hybrid().rowwise_quantizer),
            (self.columnwise_quantizer, dst._hybrid().columnwise_quantizer),
        ):
            if type(mine) is not type(theirs):
                raise TypeError(
                    f"the target was made by a {type(theirs).__name__} in one direction and this hybrid has a"
                    f" {type(mine).__name__} there; quantize into a new tensor instead"
                )
        if isinstance(dst, QuantizedTensor):
            dst._require_whole("quantizing into it")
        dst._require_data()
        for child, nested in (
            (self.rowwise_quantizer, dst.rowwise_storage),
            (self.columnwise_quantizer, dst.columnwise_storage),
        ):
            if nested is not None:  # both before either is written
                child._check_target(nested)

    def _quantize_into(
        self, x: Tensor, dst: QuantizedTensorStorage, noop_flag: Tensor | None, amax_reduction_group: Any
    ) -> None:
        self._check_target(dst)
        assert isinstance(dst, HybridQuantizedTensorStorage)  # checked
        row, column = dst.rowwise_storage, dst.columnwise_storage
        dependent = self._is_dependent()
        if row is not None:
            self.rowwise_quantizer._quantize_into(x, row, noop_flag, amax_reduction_group)
        if column is not None:
            source = x
            if dependent and row is not None:
                source = row._dequantize(x.dtype)
            elif dependent:
                source = self._rowwise_values(self.rowwise_quantizer.quantize_inner(x, amax_reduction_group), x)
            self.columnwise_quantizer._quantize_into(source, column, noop_flag, amax_reduction_group)

    def _allocate_as(
        self, shape: tuple[int, ...], device: torch.device, pin_memory: bool, nominal: torch.dtype
    ) -> Inner:
        row, column = self.rowwise_quantizer, self.columnwise_quantizer
        if self._is_dependent():
            row.specs_as(shape, device, nominal)  # its errors
        return self._join(
            row._allocate_as(shape, device, pin_memory, nominal) if self.rowwise_usage else None,
            column._allocate_as(shape, device, pin_memory, nominal) if self.columnwise_usage else None,
        )

    def usages_of(self, storage: Any) -> tuple[bool, bool]:
        """``(rowwise, columnwise)``: which child's buffers are there; traceable."""
        row, column = self._split(tuple([getattr(storage, name) for name in self.buffer_keywords()]))
        return present(row), present(column)

    def alignment(self) -> int:
        """The larger one of the children's: each divides the other."""
        return max(self.rowwise_quantizer.alignment(), self.columnwise_quantizer.alignment())

    def is_quantizable(self, x: Tensor) -> bool:
        """Whether both children can quantize ``x``, as far as their directions are made or read."""
        return (not (self.rowwise_usage or self._is_dependent()) or self.rowwise_quantizer.is_quantizable(x)) and (
            not self.columnwise_usage or self.columnwise_quantizer.is_quantizable(x)
        )

    # -- operands -----------------------------------------------------------------------------------------
    def rowwise_operand(self, inner: Inner) -> Operand:
        """The ``(M, K)`` operand: the rowwise child's."""
        return self.rowwise_quantizer.rowwise_operand(self._split(inner)[0])

    def columnwise_operand(self, inner: Inner) -> Operand:
        """The ``(K, M)`` operand: the columnwise child's."""
        return self.columnwise_quantizer.columnwise_operand(self._split(inner)[1])

    def columnwise_inner(self, inner: Inner) -> Inner:
        """``inner`` less the rowwise child's buffers."""
        return self._join(None, self.columnwise_quantizer.columnwise_inner(self._split(inner)[1]))


class _LiveHybridQuantizer(HybridQuantizer):
    """A hybrid with a child that has identity semantics: it has them too, and is no constant to a graph.

    ``copy.deepcopy`` and pickle do with it what they do with its children.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        fields = {name: copy.deepcopy(value, memo) for name, value in self._constructor_arguments().items()}
        memo[id(self)] = twin = self._from_fields(fields)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_hybrid_quantizer, (self._constructor_arguments(),)


def rebuild_hybrid_quantizer(fields: dict[str, Any]) -> HybridQuantizer:
    """Inverse of pickling a hybrid whose children are no values; the constructor checks what it is given.

    Raises ``pickle.UnpicklingError`` for a field that a hybrid has not.
    """
    unknown = [name for name in fields if name not in HybridQuantizer._fields]
    if unknown:
        raise pickle.UnpicklingError(f"HybridQuantizer has no field {unknown[0]!r}")
    return HybridQuantizer._from_fields(HybridQuantizer.__new__(HybridQuantizer), fields)


def _is_value(quantizer: Quantizer) -> bool:
    return is_value_opaque_quantizer(quantizer)


def _pinned(child: Quantizer, rowwise: bool, optimize_for_gemm: bool) -> Quantizer:
    """``child`` for one direction, making the bare storages that a hybrid nests."""
    return child.replace(
        rowwise_usage=rowwise,
        columnwise_usage=not rowwise,
        internal=True,
        optimize_for_gemm=optimize_for_gemm or child.optimize_for_gemm,
    )


register_value_opaque_quantizer(HybridQuantizer)
allow(rebuild_hybrid_quantizer)
