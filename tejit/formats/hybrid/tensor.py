"""The storage and the tensor of a hybrid. They know their quantizer by what it does: it stands above them."""

import pickle
from typing import Any

import torch
from torch import Tensor

from tejit.formats.hybrid.children import declared_keywords, nested_storage, prefixed, present
from tejit.tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer
from tejit.tensor.quantized import make_wrapper
from tejit.tensor.quantizer import Inner
from tejit.tensor.serialization import allow


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """The buffers of two storages, one a direction.

    Args:
        quantizer: the ``HybridQuantizer`` that says which storages these are.
        fake_dtype: nominal dtype; default float32.
        buffers: the children's buffers, each under ``rowwise_`` or ``columnwise_`` and the child's own keyword
            (``HybridQuantizer.buffer_keywords`` lists them); an absent direction's are left out.

    Raises ``TypeError`` for a quantizer of another class or a keyword that no child has.
    """

    def __init__(self, *, quantizer: Any, fake_dtype: torch.dtype | None = None, **buffers: Tensor | None) -> None:
        self._fill(buffers, quantizer, fake_dtype or torch.float32)
        children = (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer)
        for child, inner in zip(children, quantizer._split(self._inner()), strict=True):
            if present(inner):  # the child's own constructor knows the shape from the buffers
                metadata = child.storage_metadata(self._dtype)
                nested = metadata["cls"](
                    **dict(zip(declared_keywords(child).values(), inner, strict=True)), **metadata["nontensor_kwargs"]
                )
                self._known_shape, self._known_device = nested.shape, nested.device
                break

    def _fill(self, buffers: dict[str, Tensor | None], quantizer: Any, dtype: torch.dtype) -> None:
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

    def _hybrid(self) -> Any:
        """The HybridQuantizer, which the constructor checked."""
        return self._quantizer

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
        return nested_storage(child, inner, tuple(self.shape), self._dtype, self.device) if present(inner) else None

    # -- what every format defines ------------------------------------------------------------------------
    def _format_name(self) -> str:
        quantizer = self._hybrid()
        row, column = [
            nested_storage(child, (None,) * len(declared_keywords(child)), (), self._dtype, self.device)._format_name()
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
                shapes.update(prefixed(direction, nested._buffer_shapes()))
        return shapes

    def _check_buffers(self) -> None:
        super()._check_buffers()
        for nested in (self.rowwise_storage, self.columnwise_storage):
            if nested is None:
                continue
            nested._check_buffers()
            if not any(nested.get_usages().values()):
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
    # Not while tracing: torch 2.11 knows too little of constant objects.
    if not torch.compiler.is_compiling() and not hasattr(quantizer, "buffer_keywords"):
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
        quantizer: Any,
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
        quantizer: Any,
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
            if not present(inner):
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


allow(HybridQuantizedTensor, HybridQuantizedTensorStorage)
