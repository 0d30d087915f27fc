"""FP8 in blocks of 128: quantizer, storage and tensor.

Buffers: ``_rowwise_data`` (uint8, the logical shape) with ``_rowwise_scale_inv``, scaled along the last
dimension; ``_columnwise_data`` (uint8, last dimension first) with ``_columnwise_scale_inv``, scaled along the
others. With ``block_scaling_dim`` 1 a scale serves 128 elements of a row (of a column), with 2 a tile of
128x128, which is the same in both directions.
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from tejit.dynamo import register_value_opaque_quantizer
from tejit.format_info import FP8_BLOCK, fp8_element
from tejit.kernels import fp8, fp8_block
from tejit.kernels.gemm import Operand
from tejit.tensor import InnerTensor, QuantizedTensor, QuantizedTensorStorage, Quantizer
from tejit.tensor.dispatch import aten, swaps_matrix
from tejit.tensor.quantized import make_wrapper
from tejit.tensor.quantizer import Inner, checked_epsilon
from tejit.tensor.serialization import allow


class Float8BlockQuantizer(Quantizer):
    """FP8 with a scale for each block of 128 elements, or of 128x128.

    Args:
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rowwise: produce the operand of ``x @ w.T``-like GEMMs.
        columnwise: produce the operand of the transposed GEMM.
        amax_epsilon: lower bound of each block's amax, at least 0.
        force_pow_2_scales: round scales down to powers of two.
        block_scaling_dim: 1 for blocks of 1x128 (columnwise 128x1), 2 for tiles of 128x128.
        internal: make bare storages instead of tensors.
        optimize_for_gemm: accepted as in every format; scales always lie as the GEMM reads them.

    Any shape will do: elements that a block at an edge lacks count as 0.

    Raises ``TypeError`` for another ``fp8_dtype`` or a flag that is no bool, ``ValueError`` for an
    ``amax_epsilon`` that is negative, NaN or beyond float32, or another ``block_scaling_dim``.
    """

    fp8_dtype: torch.dtype
    amax_epsilon: float
    force_pow_2_scales: bool
    block_scaling_dim: int

    def __init__(
        self,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
        internal: bool = False,
        optimize_for_gemm: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise, internal=internal, optimize_for_gemm=optimize_for_gemm)
        fp8_element(fp8_dtype)
        if isinstance(block_scaling_dim, bool) or block_scaling_dim not in (1, 2):
            raise ValueError(f"block_scaling_dim is {block_scaling_dim!r}; it must be 1 (1x128) or 2 (128x128)")
        self._init_flags(force_pow_2_scales=force_pow_2_scales)
        self._init_fields(
            fp8_dtype=fp8_dtype,
            amax_epsilon=checked_epsilon(amax_epsilon),
            block_scaling_dim=int(block_scaling_dim),
        )

    def inner_tensor_specs(
        self, shape: tuple[int, ...], device: torch.device | str | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """``{attribute: (shape, dtype)}`` of the buffers, in the storage's order; any shape will do."""
        size = tuple(shape)
        rows, columns = fp8_block.matrix_shape(size)
        dim = self.block_scaling_dim
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.rowwise_usage:
            specs["_rowwise_data"] = (size, torch.uint8)
            specs["_rowwise_scale_inv"] = (fp8_block.scale_shape(rows, columns, dim), FP8_BLOCK.scale_dtype)
        if self.columnwise_usage:
            specs["_columnwise_data"] = (fp8.transposed_shape(size), torch.uint8)
            specs["_columnwise_scale_inv"] = (fp8_block.scale_shape(columns, rows, dim), FP8_BLOCK.scale_dtype)
        return specs

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """``{"cls", "nontensor_kwargs"}`` of the storage or tensor that this quantizer makes."""
        return {
            "cls": Float8BlockwiseQTensorStorage if self.internal else Float8BlockwiseQTensor,
            "nontensor_kwargs": {
                "fp8_dtype": self.fp8_dtype,
                "quantizer": self,
                "is_2D_scaled": self.block_scaling_dim == 2,
                "fake_dtype": fake_dtype,
            },
        }

    def quantize_inner(self, x: Tensor, amax_reduction_group: Any = None) -> Inner:
        """Bytes and scales of both directions, rowwise first, None for absent ones.

        There is no amax of the whole tensor, so ``amax_reduction_group`` has nothing to reduce.
        """
        four = fp8_block.quantize(
            x,
            fp8_element(self.fp8_dtype).code,
            self.block_scaling_dim,
            self.rowwise_usage,
            self.columnwise_usage,
            self.force_pow_2_scales,
            self.amax_epsilon,
        )
        return self._present(four)

    def _present(self, four: fp8_block.Four) -> Inner:
        row, row_scale_inv, col, col_scale_inv = four
        return (
            row if self.rowwise_usage else None,
            row_scale_inv if self.rowwise_usage else None,
            col if self.columnwise_usage else None,
            col_scale_inv if self.columnwise_usage else None,
        )

    def _check_target(self, dst: QuantizedTensorStorage) -> None:
        if not isinstance(dst, Float8BlockwiseQTensorStorage):
            raise TypeError(f"{type(self).__name__} cannot write into a {type(dst).__name__}")
        if dst._fp8_dtype != self.fp8_dtype:
            raise TypeError(
                f"the target holds {dst._fp8_dtype} and the quantizer makes {self.fp8_dtype};"
                " quantize into a new tensor instead"
            )
        if dst._block_scaling_dim() != self.block_scaling_dim:
            raise TypeError(
                f"the target has blocks of dimension {dst._block_scaling_dim()} and the quantizer makes those of"
                f" dimension {self.block_scaling_dim}; quantize into a new tensor instead"
            )
        if isinstance(dst, QuantizedTensor):
            dst._require_whole("quantizing into it")
        dst._require_data()

    def _quantize_into(
        self, x: Tensor, dst: QuantizedTensorStorage, noop_flag: Tensor | None, amax_reduction_group: Any
    ) -> None:
        self._check_target(dst)
        assert isinstance(dst, Float8BlockwiseQTensorStorage)  # checked
        fp8_block.quantize_out(
            x,
            fp8_element(self.fp8_dtype).code,
            self.block_scaling_dim,
            self.force_pow_2_scales,
            self.amax_epsilon,
            noop_flag,
            dst._rowwise_data,
            dst._rowwise_scale_inv,
            dst._columnwise_data,
            dst._columnwise_scale_inv,
        )

    def _allocate(self, shape: tuple[int, ...], device: torch.device, pin_memory: bool) -> Inner:
        four = fp8_block.make_empty(
            shape, self.block_scaling_dim, self.rowwise_usage, self.columnwise_usage, device, pin_memory
        )
        return self._present(four)

    def usages_of(self, storage: Any) -> tuple[bool, bool]:
        """``(rowwise, columnwise)``: what the buffers of a storage or tensor can serve; traceable."""
        return storage._rowwise_data is not None, storage._columnwise_data is not None

    def rowwise_operand(self, inner: Inner) -> Operand:
        """The ``(M, K)`` operand."""
        row, scale_inv, _, _ = inner
        assert row is not None
        return self._operand(row.reshape(fp8_block.matrix_shape(tuple(row.shape))), scale_inv)

    def columnwise_operand(self, inner: Inner) -> Operand:
        """The ``(K, M)`` operand."""
        _, _, col, scale_inv = inner
        assert col is not None
        shape = tuple(col.shape)
        rows, columns = fp8_block.matrix_shape((*shape[1:], *shape[:1]))
        return self._operand(col.reshape(columns, rows), scale_inv)

    def _operand(self, codes: Tensor, scale_inv: Tensor | None) -> Operand:
        assert scale_inv is not None
        code = fp8_element(self.fp8_dtype).code
        return Operand(codes, scale_inv, code, self.block_scaling_dim, self.force_pow_2_scales)

    def columnwise_from_rowwise(self, inner: Inner) -> Inner | None:
        """The same tiles transposed; None with blocks of 1x128, which differ by direction."""
        row, scale_inv, _, _ = inner
        if self.block_scaling_dim != 2:
            return None
        assert row is not None
        assert scale_inv is not None
        return None, None, *fp8_block.transpose_squares(row, scale_inv)

    def columnwise_inner(self, inner: Inner) -> Inner:
        """``inner`` less the rowwise buffers."""
        _, _, col, scale_inv = inner
        return None, None, col, scale_inv


class Float8BlockwiseQTensorStorage(QuantizedTensorStorage):
    """The buffers of an FP8 tensor in blocks of 128. With ``M`` all leading dimensions together and ``K`` the last:

    Args:
        rowwise_data: uint8 of the logical shape ``(d1..dn)``, or None.
        rowwise_scale_inv: float32; 1D ``(cd(K, 128), up(M, 4))``, 2D ``(cd(M, 128), up(cd(K, 128), 4))``.
        columnwise_data: uint8 ``(dn, d1..d(n-1))``, or None.
        columnwise_scale_inv: float32; 1D ``(cd(M, 128), up(K, 4))``, 2D ``(cd(K, 128), up(cd(M, 128), 4))``.
        fp8_dtype: element type of the codes.
        quantizer: what made it, or None.
        is_2D_scaled: whether a block is 128x128.
        fake_dtype: nominal dtype; default float32.

    A value is its code times its block's ``scale_inv``; ``cd`` is ceiling division, ``up`` rounds up to a multiple.
    """

    _rowwise_data: Annotated[Tensor | None, InnerTensor("rowwise_data")]
    _rowwise_scale_inv: Annotated[Tensor | None, InnerTensor("rowwise_scale_inv")]
    _columnwise_data: Annotated[Tensor | None, InnerTensor("columnwise_data")]
    _columnwise_scale_inv: Annotated[Tensor | None, InnerTensor("columnwise_scale_inv")]
    _TOGETHER = (("_rowwise_data", "_rowwise_scale_inv"), ("_columnwise_data", "_columnwise_scale_inv"))
    _STATE = (*QuantizedTensorStorage._STATE, "_fp8_dtype", "_is_2D_scaled")

    _fp8_dtype: torch.dtype
    _is_2D_scaled: bool

    def __init__(
        self,
        *,
        rowwise_data: Tensor | None = None,
        rowwise_scale_inv: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
        quantizer: Quantizer | None = None,
        is_2D_scaled: bool = True,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        inner = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        self._fill(inner, fp8_dtype, quantizer, is_2D_scaled, fake_dtype or torch.float32)
        if rowwise_data is not None:
            self._known_shape, self._known_device = rowwise_data.shape, rowwise_data.device
        elif columnwise_data is not None:
            shape = columnwise_data.shape
            self._known_shape = torch.Size((*shape[1:], *shape[:1]))
            self._known_device = columnwise_data.device

    def _fill(
        self,
        inner: Inner,
        fp8_dtype: torch.dtype,
        quantizer: Quantizer | None,
        is_2D_scaled: bool,
        dtype: torch.dtype,
    ) -> None:
        self._rowwise_data, self._rowwise_scale_inv, self._columnwise_data, self._columnwise_scale_inv = inner
        self._fp8_dtype = fp8_dtype
        self._quantizer = quantizer
        self._is_2D_scaled = is_2D_scaled
        self._dtype = dtype

    def _nontensor_kwargs(self) -> dict[str, Any]:
        return {
            "fp8_dtype": self._fp8_dtype,
            "quantizer": self._quantizer,
            "is_2D_scaled": self._is_2D_scaled,
            "fake_dtype": self._dtype,
        }

    def _format_name(self) -> str:
        block = FP8_BLOCK.block
        shape = f"{block}x{block}" if self._is_2D_scaled else f"1x{block}"
        return f"{FP8_BLOCK.name} {shape} {fp8_element(self._fp8_dtype).name}"

    def _block_scaling_dim(self) -> int:
        return 2 if self._is_2D_scaled else 1

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        code, dim = fp8_element(self._fp8_dtype).code, self._block_scaling_dim()
        if self._rowwise_data is not None:
            assert self._rowwise_scale_inv is not None
            return fp8_block.dequantize_row(self._rowwise_data, self._rowwise_scale_inv, code, dim, dtype)
        assert self._columnwise_data is not None  # _require_data
        assert self._columnwise_scale_inv is not None
        return fp8_block.dequantize_col(self._columnwise_data, self._columnwise_scale_inv, code, dim, dtype)

    def get_usages(self) -> dict[str, bool]:
        """``{"rowwise": bool, "columnwise": bool}``: what the buffers can serve."""
        return {"rowwise": self._rowwise_data is not None, "columnwise": self._columnwise_data is not None}

    def _buffer_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        whole = Float8BlockQuantizer(self._fp8_dtype, block_scaling_dim=self._block_scaling_dim())
        return whole.inner_tensor_specs(tuple(self.shape), "cpu")

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a direction or, with 128x128 blocks, make the columnwise one from the rowwise one, exactly. None
        leaves a direction alone.

        Raises ``RuntimeError``, before anything is changed, where an absent direction cannot be made (rowwise from
        columnwise; any with 1x128 blocks, which differ by direction), or no direction would stay.
        """
        now = self.get_usages()
        rowwise = now["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise = now["columnwise"] if columnwise_usage is None else columnwise_usage
        name = type(self).__name__
        if not (rowwise or columnwise):
            raise RuntimeError(f"update_usage would leave this {name} without any direction")
        if rowwise and not now["rowwise"]:
            raise RuntimeError(
                f"this {name} has only columnwise data; rowwise data cannot be made from it."
                " Quantize again with rowwise usage."
            )
        if columnwise and not now["columnwise"]:
            if not self._is_2D_scaled:
                raise RuntimeError(
                    f"this {name} has blocks of 1x{FP8_BLOCK.block}, whose columnwise data cannot be made from rowwise"
                    " data. Quantize again with columnwise usage."
                )
            assert self._rowwise_data is not None
            assert self._rowwise_scale_inv is not None
            made = fp8_block.transpose_squares(self._rowwise_data, self._rowwise_scale_inv)
        elif (rowwise, columnwise) == (now["rowwise"], now["columnwise"]):
            return
        else:
            made = (self._columnwise_data, self._columnwise_scale_inv) if columnwise else (None, None)
        kept = (self._rowwise_data, self._rowwise_scale_inv) if rowwise else (None, None)
        self._unshare((*kept, *made))


class Float8BlockwiseQTensor(QuantizedTensor, Float8BlockwiseQTensorStorage):
    """An FP8 tensor in blocks of 128 that behaves as a tensor of its nominal dtype.

    Args:
        shape: the logical shape.
        dtype: the nominal dtype.
        rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, fp8_dtype, quantizer,
            is_2D_scaled: as in :class:`Float8BlockwiseQTensorStorage`.
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
        is_2D_scaled: bool = True,
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
        is_2D_scaled: bool = True,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> None:
        inner = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        self._fill(inner, fp8_dtype, quantizer, is_2D_scaled, dtype)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row, row_scale_inv, col, col_scale_inv = self._inner()
        if swaps_matrix(func, args, self.dim()):  # what was scaled along the rows now is along the columns
            if not self._is_2D_scaled and row is not None and col is not None:
                return (
                    NotImplemented  # with blocks of 1x128 both directions hold values of their own: they would change
                )
            shape = (self.shape[1], self.shape[0])
            return self._over((col, col_scale_inv, row, row_scale_inv), shape, (self.stride(1), self.stride(0)))
        if func not in _RESHAPES or self.dim() == 0:
            return NotImplemented
        # Blocks stay whole where only leading dimensions change. The operation itself, on a tensor without
        # memory, knows the shape and torch's own errors.
        shape = tuple(func(torch.empty(self.shape, device="meta"), *args, **kwargs).shape)
        if len(shape) == 0 or fp8_block.matrix_shape(shape) != fp8_block.matrix_shape(tuple(self.shape)):
            return NotImplemented
        row = None if row is None else row.view(shape)
        col = None if col is None else col.view(fp8.transposed_shape(shape))
        return self._over((row, row_scale_inv, col, col_scale_inv), shape, None)

    def _over(self, inner: Inner, shape: tuple[int, ...], stride: tuple[int, ...] | None) -> Any:
        """A view of the whole tensor: it has all blocks, and may be written to."""
        buffers = dict(zip(self._INNER_TENSORS.values(), inner, strict=True))
        return type(self)._construct(buffers, self._nontensor_kwargs(), shape, self.device, stride=stride)

    def _copy_buffers(self, source: Any) -> bool:
        if not isinstance(source, Float8BlockwiseQTensor):
            return False
        if (source._fp8_dtype, source._is_2D_scaled) != (self._fp8_dtype, self._is_2D_scaled):
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

register_value_opaque_quantizer(Float8BlockQuantizer)
allow(Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage)
