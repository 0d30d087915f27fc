"""Hybrid: one format for the rowwise direction, another one for the columnwise direction.

The buffers are those of two nested storages, one a direction, under the children's own names with a prefix:
``_rowwise_data`` is the ``_data`` of a per-tensor FP8 child, ``_rowwise_rowwise_data`` the ``_rowwise_data`` of
one in blocks.
"""

import pickle
from typing import Any, cast

import torch
from torch import Tensor

from tejit.device import resolve_device
from tejit.dynamo import is_value_opaque_quantizer, register_value_opaque_quantizer
from tejit.kernels.gemm import Operand
from tejit.tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer
from tejit.tensor.quantized import make_wrapper
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
            **_prefixed("rowwise", _declared(self.rowwise_quantizer)),
            **_prefixed("columnwise", _declared(self.columnwise_quantizer)),
        }

    def _split(self, inner: Inner) -> tuple[Inner, Inner]:
        """The buffers of the rowwise child and those of the columnwise one."""
        count = len(_declared(self.rowwise_quantizer))
        return tuple(inner[:count]), tuple(inner[count:])

    def _join(self, rowwise: Inner | None, columnwise: Inner | None) -> Inner:
        if rowwise is None:
            rowwise = (None,) * len(_declared(self.rowwise_quantizer))
        if columnwise is None:
            columnwise = (None,) * len(_declared(self.columnwise_quantizer))
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
        if self.rowwise_usage:
            specs.update(_prefixed("rowwise", self.rowwise_quantizer.specs_as(shape, device, nominal)))
        if self.columnwise_usage:
            specs.update(_prefixed("columnwise", self.columnwise_quantizer.specs_as(shape, device, nominal)))
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
        dependent = self.columnwise_source == "rowwise_dequantized"
        if self.rowwise_usage or dependent:
            row = self.rowwise_quantizer.quantize_inner(x, amax_reduction_group)
        if self.columnwise_usage:
            source = self._rowwise_values(row, x) if dependent and row is not None else x
            column = self.columnwise_quantizer.quantize_inner(source, amax_reduction_group)
        return self._join(row if self.rowwise_usage else None, column)

    def _rowwise_values(self, row: Inner, x: Tensor) -> Tensor:
        """What rowwise data made from ``x`` stand for, in ``x``'s dtype."""
        return _storage(self.rowwise_quantizer, row, tuple(x.shape), x.dtype, x.device)._dequantize(x.dtype)

    def _owned(self, inner: Inner, x: Tensor) -> Inner:
        row, column = self._split(inner)
        return self._join(
            self.rowwise_quantizer._owned(row, x) if self.rowwise_usage else None,
            self.columnwise_quantizer._owned(column, x) if self.columnwise_usage else None,
        )

    def _quantize_into(
        self, x: Tensor, dst: QuantizedTensorStorage, noop_flag: Tensor | None, amax_reduction_group: Any
    ) -> None:
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
        row, column = dst.rowwise_storage, dst.columnwise_storage
        dependent = self.columnwise_source == "rowwise_dequantized"
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
        return self._join(
            row._allocate_as(shape, device, pin_memory, nominal) if self.rowwise_usage else None,
            column._allocate_as(shape, device, pin_memory, nominal) if self.columnwise_usage else None,
        )

    def usages_of(self, storage: Any) -> tuple[bool, bool]:
        """``(rowwise, columnwise)``: which child's buffers are there; traceable."""
        row, column = self._split(tuple([getattr(storage, name) for name in self.buffer_keywords()]))
        return _any(row), _any(column)

    def is_quantizable(self, x: Tensor) -> bool:
        """Whether both children can quantize ``x``, as far as their directions are made."""
        return (not self.rowwise_usage or self.rowwise_quantizer.is_quantizable(x)) and (
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
    """A hybrid with a child that has identity semantics: it has them too, and is no constant to a graph."""


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


def _declared(child: Quantizer) -> dict[str, str]:
    """``{attribute: constructor keyword}`` of the storages that a child makes."""
    metadata = child.storage_metadata(torch.float32)
    return metadata["cls"]._keywords_of(metadata["nontensor_kwargs"])


def _prefixed(direction: str, fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` under a hybrid's names: ``_rowwise`` + attribute, and ``rowwise_`` + keyword where it is a name."""
    return {
        f"_{direction}{name}": f"{direction}_{value}" if isinstance(value, str) else value
        for name, value in fields.items()
    }


def _any(inner: Inner) -> bool:
    return any(tensor is not None for tensor in inner)


def _storage(child: Quantizer, inner: Inner, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
    """The nested storage over a child's buffers."""
    metadata = child.storage_metadata(dtype)
    keywords = metadata["nontensor_kwargs"]
    buffers = dict(zip(metadata["cls"]._keywords_of(keywords).values(), inner, strict=True))
    return metadata["cls"]._construct(buffers, keywords, shape, device)


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """The buffers of two storages, one a direction.

    Args:
        quantizer: the :class:`HybridQuantizer` that says which storages these are.
        fake_dtype: nominal dtype; default float32.
        buffers: the children's buffers, each under ``rowwise_`` or ``columnwise_`` and the child's own keyword
            (``HybridQuantizer.buffer_keywords`` lists them); an absent direction's are left out.

    Raises ``TypeError`` for a quantizer of another class or a keyword that no child has.
    """

    def __init__(
        self, *, quantizer: HybridQuantizer, fake_dtype: torch.dtype | None = None, **buffers: Tensor | None
    ) -> None:
        self._fill(buffers, quantizer, fake_dtype or torch.float32)
        children = (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer)
        for child, inner in zip(children, quantizer._split(self._inner()), strict=True):
            if _any(inner):  # the child's own constructor knows the shape from the buffers
                metadata = child.storage_metadata(self._dtype)
                nested = metadata["cls"](
                    **dict(zip(_declared(child).values(), inner, strict=True)), **metadata["nontensor_kwargs"]
                )
                self._known_shape, self._known_device = nested.shape, nested.device
                break

    def _fill(self, buffers: dict[str, Tensor | None], quantizer: HybridQuantizer, dtype: torch.dtype) -> None:
        keywords = _hybrid_keywords(quantizer)
        for name, keyword in keywords.items():
            setattr(self, name, buffers.get(keyword))
        for keyword in buffers:
            if keyword not in keywords.values():
                raise TypeError(f"{keyword!r} is no buffer of this hybrid; they are {', '.join(keywords.values())}")
        self._quantizer = quantizer
        self._dtype = dtype

    @classmethod
    def _keywords_of(cls, others: dict[str, Any]) -> dict[str, str]:
        return _hybrid_keywords(others["quantizer"])

    def _buffer_keywords(self) -> dict[str, str]:
        return _hybrid_keywords(self._quantizer)

    def _hybrid(self) -> HybridQuantizer:
        return cast(HybridQuantizer, self._quantizer)  # checked by the constructor

    # -- nested storages ----------------------------------------------------------------------------------
    @property
    def rowwise_storage(self) -> Any:
        """The rowwise child's storage, over the same buffers; None where that direction is not there."""
        quantizer = self._hybrid()
        return self._nested(quantizer.rowwise_quantizer, quantizer._split(self._inner())[0])

    @property
    def columnwise_storage(self) -> Any:
        """The columnwise child's storage, over the same buffers; None where that direction is not there."""
        quantizer = self._hybrid()
        return self._nested(quantizer.columnwise_quantizer, quantizer._split(self._inner())[1])

    def _nested(self, child: Quantizer, inner: Inner) -> Any:
        return _storage(child, inner, tuple(self.shape), self._dtype, self.device) if _any(inner) else None

    # -- what every format defines ------------------------------------------------------------------------
    def _format_name(self) -> str:
        quantizer = self._hybrid()
        row, column = [
            _storage(child, (None,) * len(_declared(child)), (), self._dtype, self.device)._format_name()
            for child in (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer)
        ]
        return f"{row} rowwise, {column} columnwise"

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        row = self.rowwise_storage
        return (self.columnwise_storage if row is None else row)._dequantize(dtype)

    def get_usages(self) -> dict[str, bool]:
        """``{"rowwise": bool, "columnwise": bool}``: which child's buffers are there."""
        rowwise, columnwise = self._hybrid().usages_of(self)
        return {"rowwise": rowwise, "columnwise": columnwise}

    def _buffer_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for direction, nested in (("rowwise", self.rowwise_storage), ("columnwise", self.columnwise_storage)):
            if nested is not None:
                shapes.update(_prefixed(direction, nested._buffer_shapes()))
        return shapes

    def _check_buffers(self) -> None:
        super()._check_buffers()
        for nested in (self.rowwise_storage, self.columnwise_storage):
            if nested is not None and not any(nested.get_usages().values()):
                raise pickle.UnpicklingError(f"a direction of this {type(self).__name__} has scales and no data")

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a direction. None leaves a direction alone.

        Raises ``RuntimeError``, before anything is changed, where an absent direction is asked for (the other
        one has another format), or no direction would stay.
        """
        now = self.get_usages()
        rowwise = now["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise = now["columnwise"] if columnwise_usage is None else columnwise_usage
        name = type(self).__name__
        if not (rowwise or columnwise):
            raise RuntimeError(f"update_usage would leave this {name} without any direction")
        for wanted, direction in ((rowwise, "rowwise"), (columnwise, "columnwise")):
            if wanted and not now[direction]:
                raise RuntimeError(
                    f"this {name} has no {direction} data, and its directions are of two formats: one cannot be made"
                    f" from the other. Quantize again with {direction} usage."
                )
        if (rowwise, columnwise) == (now["rowwise"], now["columnwise"]):
            return
        quantizer = self._hybrid()
        row, column = quantizer._split(self._inner())
        self._unshare(quantizer._join(row if rowwise else None, column if columnwise else None))


def _hybrid_keywords(quantizer: Any) -> dict[str, str]:
    # Not while tracing: to torch 2.11 a constant object is of no class.
    if not torch.compiler.is_compiling() and not isinstance(quantizer, HybridQuantizer):
        raise TypeError(f"quantizer is {quantizer!r}; a hybrid storage needs its HybridQuantizer")
    return quantizer.buffer_keywords()


class HybridQuantizedTensor(QuantizedTensor, HybridQuantizedTensorStorage):
    """A tensor with a format for each direction that behaves as a tensor of its nominal dtype.

    Args:
        shape: the logical shape.
        dtype: the nominal dtype.
        quantizer, buffers: as in :class:`HybridQuantizedTensorStorage`.
        requires_grad, device, stride: of the tensor; ``device`` None means the buffers' own.
    """

    @staticmethod
    def __new__(
        cls: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        quantizer: HybridQuantizer,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: tuple[int, ...] | None = None,
        **buffers: Tensor | None,
    ) -> Any:
        if device is None:
            device = next((b.device for b in buffers.values() if b is not None), None)
        return make_wrapper(cls, shape, dtype, requires_grad, device, stride)

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        quantizer: HybridQuantizer,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: tuple[int, ...] | None = None,
        **buffers: Tensor | None,
    ) -> None:
        self._fill(buffers, quantizer, dtype)

    def _nested_tensors(self) -> tuple[Any, Any]:
        """The children as tensors over the same buffers; None for an absent direction."""
        quantizer = self._hybrid()
        made: list[Any] = []
        for child, inner in zip(
            (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer), quantizer._split(self._inner()), strict=True
        ):
            if not _any(inner):
                made.append(None)
                continue
            metadata = child.replace(internal=False).create_metadata(tuple(self.shape), dtype=self._dtype)
            tensor = metadata["cls"]._from_inner(inner, metadata, tuple(self.shape), self.device, self.stride())
            if self._shares_scale:
                tensor._shares_scale = True
            made.append(tensor)
        return made[0], made[1]

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A view where both children can follow, each in its own direction."""
        results = []
        for nested in self._nested_tensors():
            result = None if nested is None else nested._view(func, args, kwargs)
            if result is NotImplemented:
                return NotImplemented
            for part in result if isinstance(result, (list, tuple)) else [result]:
                if part is not None and (nested is None or part.get_usages() != nested.get_usages()):
                    return NotImplemented  # a transpose swaps directions, and a direction has one format
            results.append(result)
        row, column = results
        first = row if row is not None else column
        if not isinstance(first, (list, tuple)):
            return self._over(row, column)
        rows = row if row is not None else [None] * len(first)
        columns = column if column is not None else [None] * len(first)
        return type(first)([self._over(*pair) for pair in zip(rows, columns, strict=True)])

    def _over(self, row: Any, column: Any) -> Any:
        """The hybrid of two nested tensors of one shape."""
        inner = self._hybrid()._join(None if row is None else row._inner(), None if column is None else column._inner())
        either = row if row is not None else column
        buffers = dict(zip(self._buffer_keywords().values(), inner, strict=True))
        view = type(self)._construct(
            buffers, self._nontensor_kwargs(), tuple(either.shape), self.device, stride=either.stride()
        )
        if any(nested is not None and nested._shares_scale for nested in (row, column)):
            view._shares_scale = True
        return view

    def _copy_buffers(self, source: Any) -> bool:
        if not isinstance(source, HybridQuantizedTensor) or source.shape != self.shape:
            return False
        pairs = list(zip(self._nested_tensors(), source._nested_tensors(), strict=True))
        if any(mine is not None and (theirs is None or type(mine) is not type(theirs)) for mine, theirs in pairs):
            return False
        # Where one child refuses, the caller quantizes all anew.
        return all(mine is None or mine._copy_buffers(theirs) for mine, theirs in pairs)


register_value_opaque_quantizer(HybridQuantizer)
allow(HybridQuantizedTensor, HybridQuantizedTensorStorage)
