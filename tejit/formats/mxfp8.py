"""MXFP8: quantizer, storage and tensor.

Buffers: ``_rowwise_data`` (uint8, the logical shape) with ``_rowwise_scale_inv``, scaled along the last dimension;
``_columnwise_data`` (uint8, the logical shape too: it is not transposed) with ``_columnwise_scale_inv``, scaled along
the others. 32 elements share a power of two, stored as one byte; with ``with_2d_quantization`` a tile of 32x32 does.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from tejit.dynamo import register_value_opaque_quantizer
from tejit.format_info import MXFP8, fp8_element
from tejit.kernels import mxfp8
from tejit.kernels.fused import FUSED_MXFP8, Cast
from tejit.kernels.gemm import Operand
from tejit.tensor import InnerTensor, QuantizedTensor, QuantizedTensorStorage, Quantizer
from tejit.tensor.dispatch import aten
from tejit.tensor.quantized import make_wrapper
from tejit.tensor.quantizer import Inner
from tejit.tensor.serialization import allow


class MXFP8Quantizer(Quantizer):
    """FP8 with a power of two for each block of 32 elements, or of 32x32.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise: produce the operand of ``x @ w.T``-like GEMMs.
        columnwise: produce the operand of the transposed GEMM.
        with_2d_quantization: one power for each 32x32 instead of each 1x32 (columnwise 32x1).
        internal: make bare storages instead of tensors.
        optimize_for_gemm: lay scales out as the GEMM reads them (``kernels.swizzle``).

    With ``M`` all leading dimensions together and ``K`` the last one, rowwise data needs K to be a multiple of 32,
    columnwise data M, and ``with_2d_quantization`` both: whatever makes a tensor raises ``ValueError`` otherwise.

    Raises ``TypeError`` for another ``fp8_dtype`` or a flag that is no bool.
    """

    fp8_dtype: torch.dtype
    with_2d_quantization: bool

    def __init__(
        self,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
        internal: bool = False,
        optimize_for_gemm: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise, internal=internal, optimize_for_gemm=optimize_for_gemm)
        fp8_element(fp8_dtype)
        self._init_flags(with_2d_quantization=with_2d_quantization)
        self._init_fields(fp8_dtype=fp8_dtype)

    def inner_tensor_specs(
        self, shape: tuple[int, ...], device: torch.device | str | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """``{attribute: (shape, dtype)}`` of the buffers, in the storage's order.

        Raises ``ValueError`` for a size that is no multiple of 32.
        """
        size = tuple(shape)
        self._check_shape(size)
        row_scales, col_scales = mxfp8.scale_shapes(*mxfp8.matrix_shape(size))
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.rowwise_usage:
            specs["_rowwise_data"] = (size, torch.uint8)
            specs["_rowwise_scale_inv"] = (row_scales, MXFP8.scale_dtype)
        if self.columnwise_usage:
            specs["_columnwise_data"] = (size, torch.uint8)
            specs["_columnwise_scale_inv"] = (col_scales, MXFP8.scale_dtype)
        return specs

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        mxfp8.check_shape(shape, self.rowwise_usage, self.columnwise_usage, self.with_2d_quantization)

    def is_quantizable(self, x: Tensor) -> bool:
        """Whether ``x`` can be quantized as it is: a high-precision dtype, and blocks of 32 cut its shape evenly."""
        rows, columns = mxfp8.matrix_shape(tuple(x.shape))
        both = self.with_2d_quantization
        along_rows = self.rowwise_usage or (both and self.columnwise_usage)
        along_columns = self.columnwise_usage or (both and self.rowwise_usage)
        fits = not (along_rows and columns % mxfp8.BLOCK) and not (along_columns and rows % mxfp8.BLOCK)
        return super().is_quantizable(x) and fits

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """``{"cls", "nontensor_kwargs"}`` of the storage or tensor that this quantizer makes."""
        return {
            "cls": MXFP8TensorStorage if self.internal else MXFP8Tensor,
            "nontensor_kwargs": {
                "fp8_dtype": self.fp8_dtype,
                "quantizer": self,
                "with_gemm_swizzled_scales": self.optimize_for_gemm,
                "fake_dtype": fake_dtype,
            },
        }

    def quantize_inner(self, x: Tensor, amax_reduction_group: Any = None) -> Inner:
        """Bytes and scales of both directions, rowwise first, None for absent ones.

        There is no amax of the whole tensor, so ``amax_reduction_group`` has nothing to reduce.
        """
        four = mxfp8.quantize(
            x,
            fp8_element(self.fp8_dtype).code,
            self.rowwise_usage,
            self.columnwise_usage,
            self.with_2d_quantization,
            self.optimize_for_gemm,
        )
        return self._present(four)

    def fused_cast(self, x: Tensor) -> Cast | None:
        if self.with_2d_quantization:
            return None
        code, usage = fp8_element(self.fp8_dtype).code, (self.rowwise_usage, self.columnwise_usage)
        return Cast(FUSED_MXFP8, code, *usage, self.optimize_for_gemm)

    def fused_inner(self, four: mxfp8.Four) -> Inner:
        return self._present(four)

    def _present(self, four: mxfp8.Four) -> Inner:
        row, row_scale_inv, col, col_scale_inv = four
        return (
            row if self.rowwise_usage else None,
            row_scale_inv if self.rowwise_usage else None,
            col if self.columnwise_usage else None,
            col_scale_inv if self.columnwise_usage else None,
        )

    def _check_target(self, dst: QuantizedTensorStorage) -> None:
        if not isinstance(dst, MXFP8TensorStorage):
            raise TypeError(f"{type(self).__name__} cannot write into a {type(dst).__name__}")
        if dst._fp8_dtype != self.fp8_dtype:
            raise TypeError(
                f"the target holds {dst._fp8_dtype} and the quantizer makes {self.fp8_dtype};"
                " quantize into a new tensor instead"
            )
        dst._require_data()

    def _quantize_into(
        self, x: Tensor, dst: QuantizedTensorStorage, noop_flag: Tensor | None, amax_reduction_group: Any
    ) -> None:
        self._check_target(dst)
        assert isinstance(dst, MXFP8TensorStorage)  # checked
        mxfp8.quantize_out(
            x,
            fp8_element(self.fp8_dtype).code,
            self.with_2d_quantization,
            dst._with_gemm_swizzled_scales,  # the target says how its scales lie
            noop_flag,
            dst._rowwise_data,
            dst._rowwise_scale_inv,
            dst._columnwise_data,
            dst._columnwise_scale_inv,
        )

    def _allocate(self, shape: tuple[int, ...], device: torch.device, pin_memory: bool) -> Inner:
        self._check_shape(shape)
        four = mxfp8.make_empty(shape, self.rowwise_usage, self.columnwise_usage, device, pin_memory)
        return self._present(four)

    def alignment(self) -> int:
        """The multiple of which M and K must be, as far as they are scaled along."""
        return MXFP8.alignment

    def usages_of(self, storage: Any) -> tuple[bool, bool]:
        """``(rowwise, columnwise)``: what the buffers of a storage or tensor can serve; traceable."""
        return storage._rowwise_data is not None, storage._columnwise_data is not None

    def rowwise_operand(self, inner: Inner) -> Operand:
        """The ``(M, K)`` operand, scales indexed ``[m, k/32]``."""
        row, scale_inv, _, _ = inner
        assert row is not None
        assert scale_inv is not None
        return self._operand(row.reshape(mxfp8.matrix_shape(tuple(row.shape))), scale_inv)

    def columnwise_operand(self, inner: Inner) -> Operand:
        """The ``(K, M)`` operand: views of the buffers' transposes, scales indexed ``[k, m/32]`` or as they lie."""
        _, _, col, scale_inv = inner
        assert col is not None
        assert scale_inv is not None
        matrix = col.reshape(mxfp8.matrix_shape(tuple(col.shape)))
        return self._operand(matrix.t(), scale_inv if self.optimize_for_gemm else scale_inv.t())

    def _operand(self, codes: Tensor, scale_inv: Tensor) -> Operand:
        code = fp8_element(self.fp8_dtype).code
        return Operand(codes, scale_inv, code, kind="mxfp8", swizzled=self.optimize_for_gemm)

    def columnwise_inner(self, inner: Inner) -> Inner:
        """``inner`` less the rowwise buffers."""
        _, _, col, scale_inv = inner
        return None, None, col, scale_inv


class MXFP8TensorStorage(QuantizedTensorStorage):
    """The buffers of an MXFP8 tensor. With ``M`` all leading dimensions together and ``K`` the last:

    Args:
        rowwise_data: uint8 of the logical shape ``(d1..dn)``, or None.
        rowwise_scale_inv: uint8 ``(up(M, 128), up(K/32, 4))``, entry ``[m, k/32]``.
        columnwise_data: uint8 of the logical shape, or None.
        columnwise_scale_inv: uint8 ``(up(M/32, 4), up(K, 128))``, entry ``[m/32, k]``.
        fp8_dtype: element type of the codes.
        quantizer: what made it, or None.
        with_gemm_swizzled_scales: whether the scales lie in the GEMM's order (``kernels.swizzle``) instead.
        fake_dtype: nominal dtype; default float32.

    A value is its code times 2 to the power of its block's scale less 127; ``up`` rounds up to a multiple, with zeros.
    """

    _rowwise_data: Annotated[Tensor | None, InnerTensor("rowwise_data")]
    _rowwise_scale_inv: Annotated[Tensor | None, InnerTensor("rowwise_scale_inv")]
    _columnwise_data: Annotated[Tensor | None, InnerTensor("columnwise_data")]
    _columnwise_scale_inv: Annotated[Tensor | None, InnerTensor("columnwise_scale_inv")]
    _TOGETHER = (("_rowwise_data", "_rowwise_scale_inv"), ("_columnwise_data", "_columnwise_scale_inv"))
    _STATE = (*QuantizedTensorStorage._STATE, "_fp8_dtype", "_with_gemm_swizzled_scales")

    _fp8_dtype: torch.dtype
    _with_gemm_swizzled_scales: bool

    def __init__(
        self,
        *,
        rowwise_data: Tensor | None = None,
        rowwise_scale_inv: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        quantizer: Quantizer | None = None,
        with_gemm_swizzled_scales: bool = False,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        inner = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        self._fill(inner, fp8_dtype, quantizer, with_gemm_swizzled_scales, fake_dtype or torch.float32)
        data = rowwise_data if rowwise_data is not None else columnwise_data
        if data is not None:
            self._known_shape, self._known_device = data.shape, data.device

    def _fill(
        self,
        inner: Inner,
        fp8_dtype: torch.dtype,
        quantizer: Quantizer | None,
        with_gemm_swizzled_scales: bool,
        dtype: torch.dtype,
    ) -> None:
        self._rowwise_data, self._rowwise_scale_inv, self._columnwise_data, self._columnwise_scale_inv = inner
        self._fp8_dtype = fp8_dtype
        self._quantizer = quantizer
        self._with_gemm_swizzled_scales = with_gemm_swizzled_scales
        self._dtype = dtype

    def _nontensor_kwargs(self) -> dict[str, Any]:
        return {
            "fp8_dtype": self._fp8_dtype,
            "quantizer": self._quantizer,
            "with_gemm_swizzled_scales": self._with_gemm_swizzled_scales,
            "fake_dtype": self._dtype,
        }

    def _format_name(self) -> str:
        order = ", scales swizzled" if self._with_gemm_swizzled_scales else ""
        return f"{MXFP8.name} {fp8_element(self._fp8_dtype).name}{order}"

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        code, swizzled = fp8_element(self._fp8_dtype).code, self._with_gemm_swizzled_scales
        if self._rowwise_data is not None:
            assert self._rowwise_scale_inv is not None
            return mxfp8.dequantize_row(self._rowwise_data, self._rowwise_scale_inv, code, swizzled, dtype)
        assert self._columnwise_data is not None  # _require_data
        assert self._columnwise_scale_inv is not None
        return mxfp8.dequantize_col(self._columnwise_data, self._columnwise_scale_inv, code, swizzled, dtype)

    def get_usages(self) -> dict[str, bool]:
        """``{"rowwise": bool, "columnwise": bool}``: what the buffers can serve."""
        return {"rowwise": self._rowwise_data is not None, "columnwise": self._columnwise_data is not None}

    def _buffer_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        usages = self.get_usages()
        held = MXFP8Quantizer(self._fp8_dtype, rowwise=usages["rowwise"], columnwise=usages["columnwise"])
        return held.inner_tensor_specs(tuple(self.shape), "cpu")

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a direction. None leaves a direction alone.

        Raises ``RuntimeError``, before anything is changed, where an absent direction is asked for (the other one's
        bytes were rounded with other scales) or no direction would stay.
        """
        now = self.get_usages()
        rowwise = now["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise = now["columnwise"] if columnwise_usage is None else columnwise_usage
        name = type(self).__name__
        if not (rowwise or columnwise):
            raise RuntimeError(f"update_usage would leave this {name} without any direction")
        for direction, wanted in (("rowwise", rowwise), ("columnwise", columnwise)):
            if wanted and not now[direction]:
                raise RuntimeError(
                    f"this {name} has no {direction} data, and none can be made from the other direction's."
                    f" Quantize again with {direction} usage."
                )
        if (rowwise, columnwise) == (now["rowwise"], now["columnwise"]):
            return
        row = (self._rowwise_data, self._rowwise_scale_inv) if rowwise else (None, None)
        col = (self._columnwise_data, self._columnwise_scale_inv) if columnwise else (None, None)
        self._unshare((*row, *col))


class MXFP8Tensor(QuantizedTensor, MXFP8TensorStorage):
    """An MXFP8 tensor that behaves as a tensor of its nominal dtype.

    Args:
        shape: the logical shape.
        dtype: the nominal dtype.
        rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, quantizer,
            with_gemm_swizzled_scales: as in :class:`MXFP8TensorStorage`.
        requires_grad, device, stride: of the tensor; ``device`` None means the buffers' own.
    """

    @staticmethod
    def __new__(
        cls: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rowwise_data: Tensor | None = None,
        rowwise_scale_inv: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        quantizer: Quantizer | None = None,
        with_gemm_swizzled_scales: bool = False,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> Any:
        if device is None:
            device = next((b.device for b in (rowwise_data, columnwise_data) if b is not None), None)
        return make_wrapper(cls, shape, dtype, requires_grad, device, stride)

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rowwise_data: Tensor | None = None,
        rowwise_scale_inv: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        quantizer: Quantizer | None = None,
        with_gemm_swizzled_scales: bool = False,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> None:
        inner = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        self._fill(inner, fp8_dtype, quantizer, with_gemm_swizzled_scales, dtype)

    # -- views: whole blocks and whole pieces of the scale buffers, so that they may be written to ---------------
    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _RESHAPES:
            return self._reshaped(func, args, kwargs)
        if func in _PARTS:
            return self._parts(func, args, kwargs)
        return NotImplemented

    def _reshaped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Blocks stay whole where only leading dimensions change. The operation itself, on a tensor without
        # memory, knows the shape and torch's own errors.
        if self.dim() == 0:
            return NotImplemented
        shape = tuple(func(torch.empty(self.shape, device="meta"), *args, **kwargs).shape)
        if len(shape) == 0 or mxfp8.matrix_shape(shape) != mxfp8.matrix_shape(tuple(self.shape)):
            return NotImplemented
        return self._over(shape, 0, mxfp8.matrix_shape(shape)[0])

    def _parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Whole rows whose scales are whole pieces of 128 rows: neither is then shared with the rest."""
        rows, columns = mxfp8.matrix_shape(tuple(self.shape))
        made = func(torch.empty(self.shape, device="meta"), *args, **kwargs)
        several = isinstance(made, (list, tuple))
        views = []
        for part in made if several else (made,):
            if part.numel() == 0 or part.dim() == 0 or part.shape[-1] != columns or not part.is_contiguous():
                return NotImplemented
            first = part.storage_offset() // columns
            last = first + part.numel() // columns
            pieces = first % MXFP8.scale_row_alignment == 0 and (last == rows or last % MXFP8.scale_row_alignment == 0)
            # In the GEMM's order columnwise scales run along M innermost: those of a part do not lie together.
            scattered = self._with_gemm_swizzled_scales and self._columnwise_data is not None
            if part.storage_offset() % columns or not pieces or (scattered and last - first < rows):
                return NotImplemented
            views.append(self._over(tuple(part.shape), first, last))
        return type(made)(views) if several else views[0]

    def _over(self, shape: tuple[int, ...], first: int, last: int) -> Any:
        """A view of rows ``first`` to ``last`` of the matrix, in another shape."""
        rows, columns = mxfp8.matrix_shape(tuple(self.shape))
        high = MXFP8.scale_row_alignment
        end = -(-last // high) * high
        row, row_scale_inv, col, col_scale_inv = self._inner()
        if (first, last) != (0, rows):
            row, col = (None if data is None else data.view(rows, columns)[first:last] for data in (row, col))
            row_scale_inv = None if row_scale_inv is None else row_scale_inv[first:end]
            block = mxfp8.BLOCK
            col_scale_inv = None if col_scale_inv is None else col_scale_inv[first // block : end // block]
        row, col = (None if data is None else data.view(shape) for data in (row, col))
        inner = (row, row_scale_inv, col, col_scale_inv)
        buffers = dict(zip(self._INNER_TENSORS.values(), inner, strict=True))
        return type(self)._construct(buffers, self._nontensor_kwargs(), shape, self.device)

    def _copy_buffers(self, source: Any) -> bool:
        if not isinstance(source, MXFP8Tensor) or source._fp8_dtype != self._fp8_dtype:
            return False
        if source._with_gemm_swizzled_scales != self._with_gemm_swizzled_scales:
            return False
        return self._copy_inner(source)


#: View operations that can leave rows whole.
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)

#: View operations whose results can be whole rows.
_PARTS = frozenset(
    {
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
    }
)

register_value_opaque_quantizer(MXFP8Quantizer)
allow(MXFP8Tensor, MXFP8TensorStorage)
