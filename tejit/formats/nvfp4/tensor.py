"""What NVFP4's quantizer makes: the storage and the tensor."""

from typing import Annotated, Any

import torch
from torch import Tensor

from tejit.format_info import E4M3, NVFP4, NVFP4_SIGN_MASK
from tejit.kernels import fp8_block, nvfp4
from tejit.tensor import InnerTensor, QuantizedTensor, QuantizedTensorStorage, Quantizer
from tejit.tensor.dispatch import aten, swaps_matrix
from tejit.tensor.quantized import make_wrapper
from tejit.tensor.quantizer import Inner
from tejit.tensor.serialization import allow

#: The one element type of the format, as ``fp4_dtype`` names it.
FP4_DTYPE = "e2m1"
_DEFAULT_E4M3_MAX = int(E4M3.max)


class NVFP4TensorStorage(QuantizedTensorStorage):
    """The buffers of an NVFP4 tensor. With ``M`` all leading dimensions together and ``K`` the last:

    Args:
        rowwise_data: uint8 ``(d1..d(n-1), K/2)``, the element of the even index in the low half; or None.
        rowwise_scale_inv: uint8 (E4M3 bits) ``(up(M, 128), up(K/16, 4))``.
        columnwise_data: uint8 ``(K, M/2)``, the packed transpose; or None.
        columnwise_scale_inv: uint8 ``(up(K, 128), up(M/16, 4))``.
        amax_rowwise: float32 ``(1,)``, row-scaled ``(M,)``.
        amax_columnwise: float32 ``(1,)``, row-scaled ``(K,)``.
        fp4_dtype: the element type, ``"e2m1"``.
        quantizer: what made it, or None. It alone tells that columnwise data is of the transformed values (RHT).
        with_gemm_swizzled_scales: whether scales lie in the order in which a GEMM reads them.
        row_scaled_nvfp4: whether each row has an amax of its own.
        nvfp4_use_4over6: whether blocks chose between two scales.
        nvfp4_e4m3_max: the scale of the block that holds the amax.
        fake_dtype: nominal dtype; default float32.

    A value is its code times ``float(scale) * amax / (6 * nvfp4_e4m3_max)``; ``up`` rounds up to a multiple.
    """

    _rowwise_data: Annotated[Tensor | None, InnerTensor("rowwise_data")]
    _rowwise_scale_inv: Annotated[Tensor | None, InnerTensor("rowwise_scale_inv")]
    _columnwise_data: Annotated[Tensor | None, InnerTensor("columnwise_data")]
    _columnwise_scale_inv: Annotated[Tensor | None, InnerTensor("columnwise_scale_inv")]
    _amax_rowwise: Annotated[Tensor | None, InnerTensor("amax_rowwise")]
    _amax_columnwise: Annotated[Tensor | None, InnerTensor("amax_columnwise")]
    _TOGETHER = (
        ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"),
        ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"),
    )
    _STATE = (
        *QuantizedTensorStorage._STATE,
        "_fp4_dtype",
        "_with_gemm_swizzled_scales",
        "_row_scaled_nvfp4",
        "_nvfp4_use_4over6",
        "_nvfp4_e4m3_max",
    )

    _fp4_dtype: str
    _with_gemm_swizzled_scales: bool
    _row_scaled_nvfp4: bool
    _nvfp4_use_4over6: bool
    _nvfp4_e4m3_max: int

    def __init__(
        self,
        *,
        rowwise_data: Tensor | None = None,
        rowwise_scale_inv: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        amax_rowwise: Tensor | None = None,
        amax_columnwise: Tensor | None = None,
        fp4_dtype: str = FP4_DTYPE,
        quantizer: Quantizer | None = None,
        with_gemm_swizzled_scales: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = _DEFAULT_E4M3_MAX,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        self._fill(
            (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, amax_rowwise, amax_columnwise),
            (fp4_dtype, with_gemm_swizzled_scales, row_scaled_nvfp4, nvfp4_use_4over6, nvfp4_e4m3_max),
            quantizer,
            fake_dtype or torch.float32,
        )
        if rowwise_data is not None:
            self._known_shape = torch.Size((*rowwise_data.shape[:-1], rowwise_data.shape[-1] * 2))
            self._known_device = rowwise_data.device
        elif columnwise_data is not None:
            self._known_shape = torch.Size((columnwise_data.shape[1] * 2, columnwise_data.shape[0]))
            self._known_device = columnwise_data.device

    def _fill(
        self,
        inner: Inner,
        mode: tuple[str, bool, bool, bool, int],
        quantizer: Quantizer | None,
        dtype: torch.dtype,
    ) -> None:
        self._rowwise_data, self._rowwise_scale_inv, self._columnwise_data, self._columnwise_scale_inv = inner[:4]
        self._amax_rowwise, self._amax_columnwise = inner[4:]
        self._fp4_dtype, self._with_gemm_swizzled_scales, self._row_scaled_nvfp4 = mode[:3]
        self._nvfp4_use_4over6, self._nvfp4_e4m3_max = mode[3:]
        if self._fp4_dtype != FP4_DTYPE:
            raise ValueError(f"fp4_dtype is {self._fp4_dtype!r}; it must be {FP4_DTYPE!r}")
        if self._nvfp4_e4m3_max not in nvfp4.E4M3_MAXIMA:
            raise ValueError(f"nvfp4_e4m3_max is {self._nvfp4_e4m3_max!r}; it must be 448 or 256")
        self._quantizer = quantizer
        self._dtype = dtype

    def _nontensor_kwargs(self) -> dict[str, Any]:
        return {
            "fp4_dtype": self._fp4_dtype,
            "quantizer": self._quantizer,
            "with_gemm_swizzled_scales": self._with_gemm_swizzled_scales,
            "row_scaled_nvfp4": self._row_scaled_nvfp4,
            "nvfp4_use_4over6": self._nvfp4_use_4over6,
            "nvfp4_e4m3_max": self._nvfp4_e4m3_max,
            "fake_dtype": self._dtype,
        }

    def _format_name(self) -> str:
        quantizer: Any = self._quantizer
        block = f"{NVFP4.block}x{NVFP4.block}" if self._is_2d() else f"1x{NVFP4.block}"
        words = [NVFP4.name, block]
        words += ["row-scaled"] * self._row_scaled_nvfp4 + ["4over6"] * self._nvfp4_use_4over6
        words += ["RHT"] * (self._rotation() is not None)
        words += ["stochastic"] * (quantizer is not None and quantizer.stochastic_rounding)
        return " ".join(words)

    def _is_2d(self) -> bool:
        quantizer: Any = self._quantizer
        return quantizer is not None and quantizer.with_2d_quantization

    def _keeps_tiles_of(self, quantizer: Any) -> bool:
        """Whether what ``quantizer`` makes may take the place of these tiles, of which transposes and
        ``update_usage`` believe what this tensor's own quantizer says."""
        own: Any = self._quantizer
        usages = self.get_usages()
        alone = usages["rowwise"] != usages["columnwise"]
        return quantizer.with_2d_quantization and (
            alone or own.stochastic_rounding or not quantizer.stochastic_rounding
        )

    def _turns_exactly(self) -> bool:
        """Whether columnwise data is the transpose of rowwise data: tiles whose elements were rounded alike."""
        quantizer: Any = self._quantizer
        return self._is_2d() and not quantizer.stochastic_rounding and not self._nvfp4_use_4over6

    def _rotation(self) -> int | None:
        """The sign mask of the transform that columnwise data went through; None where it did not."""
        quantizer: Any = self._quantizer
        if quantizer is None or not quantizer.with_rht:
            return None
        return NVFP4_SIGN_MASK if quantizer.with_random_sign_mask else 0

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        e4m3_max, swizzled = self._nvfp4_e4m3_max, self._with_gemm_swizzled_scales
        if self._rowwise_data is not None:
            assert self._rowwise_scale_inv is not None
            assert self._amax_rowwise is not None
            return nvfp4.dequantize_row(
                self._rowwise_data, self._rowwise_scale_inv, self._amax_rowwise, e4m3_max, swizzled, dtype
            )
        assert self._columnwise_data is not None  # _require_data
        assert self._columnwise_scale_inv is not None
        assert self._amax_columnwise is not None
        mask = self._rotation()
        return nvfp4.dequantize_col(
            self._columnwise_data,
            self._columnwise_scale_inv,
            self._amax_columnwise,
            e4m3_max,
            swizzled,
            tuple(self.shape),
            mask is not None,
            mask or 0,
            dtype,
        )

    def get_usages(self) -> dict[str, bool]:
        """``{"rowwise": bool, "columnwise": bool}``: what the buffers can serve."""
        return {"rowwise": self._rowwise_data is not None, "columnwise": self._columnwise_data is not None}

    def _buffer_shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        size = tuple(self.shape)
        usages = self.get_usages()
        shapes = nvfp4.buffer_shapes(size, usages["rowwise"], usages["columnwise"], self._row_scaled_nvfp4)
        dtypes = (*[torch.uint8, NVFP4.scale_dtype] * 2, torch.float32, torch.float32)
        return dict(zip(self._INNER_TENSORS, zip(shapes, dtypes, strict=True), strict=True))

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a direction or, with 16x16 blocks, make the columnwise one from the rowwise one, exactly. None leaves a
        direction alone.

        Raises ``RuntimeError``, before anything is changed, where an absent direction cannot be made (rowwise from
        columnwise; any with 1x16 blocks, which differ by direction, or with RHT), or no direction would stay.
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
        made: Inner = (None, None, None)
        if columnwise and not now["columnwise"]:
            if not self._is_2d() or self._rotation() is not None:
                why = "is of the transformed values (RHT)" if self._is_2d() else "differs in blocks of 1x16"
                raise RuntimeError(
                    f"columnwise data of this {name} {why} and cannot be made from rowwise data."
                    " Quantize again with columnwise usage."
                )
            assert self._rowwise_data is not None
            assert self._rowwise_scale_inv is not None
            assert self._amax_rowwise is not None
            swizzled = self._with_gemm_swizzled_scales
            pair = nvfp4.transpose_squares(self._rowwise_data, self._rowwise_scale_inv, swizzled)
            made = (*pair, self._amax_rowwise.clone())
        elif (rowwise, columnwise) == (now["rowwise"], now["columnwise"]):
            return
        elif columnwise:
            made = (self._columnwise_data, self._columnwise_scale_inv, self._amax_columnwise)
        kept: Inner = (None, None, None)
        if rowwise:
            kept = (self._rowwise_data, self._rowwise_scale_inv, self._amax_rowwise)
        self._unshare((*kept[:2], *made[:2], kept[2], made[2]))


class NVFP4Tensor(QuantizedTensor, NVFP4TensorStorage):
    """An NVFP4 tensor that behaves as a tensor of its nominal dtype.

    Args:
        shape: the logical shape.
        dtype: the nominal dtype.
        rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, amax_rowwise, amax_columnwise,
            fp4_dtype, quantizer, with_gemm_swizzled_scales, row_scaled_nvfp4, nvfp4_use_4over6, nvfp4_e4m3_max: as in
            :class:`NVFP4TensorStorage`.
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
        amax_rowwise: Tensor | None = None,
        amax_columnwise: Tensor | None = None,
        fp4_dtype: str = FP4_DTYPE,
        quantizer: Quantizer | None = None,
        with_gemm_swizzled_scales: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = _DEFAULT_E4M3_MAX,
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
        amax_rowwise: Tensor | None = None,
        amax_columnwise: Tensor | None = None,
        fp4_dtype: str = FP4_DTYPE,
        quantizer: Quantizer | None = None,
        with_gemm_swizzled_scales: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = _DEFAULT_E4M3_MAX,
        requires_grad: bool = False,
        device: torch.device | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> None:
        self._fill(
            (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv, amax_rowwise, amax_columnwise),
            (fp4_dtype, with_gemm_swizzled_scales, row_scaled_nvfp4, nvfp4_use_4over6, nvfp4_e4m3_max),
            quantizer,
            dtype,
        )

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row, row_scale_inv, col, col_scale_inv, amax_row, amax_col = self._inner()
        if swaps_matrix(func, args, self.dim()):  # what was scaled along the rows now is along the columns
            if not self._can_turn():
                return NotImplemented
            swapped = (col, col_scale_inv, row, row_scale_inv, amax_col, amax_row)
            return self._over(swapped, (self.shape[1], self.shape[0]), (self.stride(1), self.stride(0)))
        if func not in _RESHAPES or self.dim() == 0:
            return NotImplemented
        # Blocks stay whole where only leading dimensions change. The operation itself, on a tensor without
        # memory, knows the shape and torch's own errors.
        shape = tuple(func(torch.empty(self.shape, device="meta"), *args, **kwargs).shape)
        if len(shape) == 0 or fp8_block.matrix_shape(shape) != fp8_block.matrix_shape(tuple(self.shape)):
            return NotImplemented
        if row is not None:
            row = row.view(*shape[:-1], row.shape[-1])
        return self._over((row, row_scale_inv, col, col_scale_inv, amax_row, amax_col), shape, None)

    def _can_turn(self) -> bool:
        """Whether the transpose of this matrix is the same buffers with their directions swapped.

        No quantizer makes rotated rowwise data, or row-scaled tensors without it. And where both directions are
        there, they hold the same values only if they share tiles and rounded alike; else values would change.
        """
        usages = self.get_usages()
        if self._rotation() is not None or (self._row_scaled_nvfp4 and not usages["columnwise"]):
            return False
        return self._turns_exactly() or usages["rowwise"] != usages["columnwise"]

    def _over(self, inner: Inner, shape: tuple[int, ...], stride: tuple[int, ...] | None) -> Any:
        """A view of the whole tensor: it has all blocks, and may be written to."""
        buffers = dict(zip(self._INNER_TENSORS.values(), inner, strict=True))
        return type(self)._construct(buffers, self._nontensor_kwargs(), shape, self.device, stride=stride)

    def _copy_buffers(self, source: Any) -> bool:
        if not isinstance(source, NVFP4Tensor):
            return False
        mine, theirs = self._nontensor_kwargs(), source._nontensor_kwargs()
        if any(mine[name] != theirs[name] for name in _LAYOUT):
            return False
        if self._columnwise_data is not None and self._rotation() != source._rotation():
            return False
        if self._is_2d() and (source._quantizer is None or not self._keeps_tiles_of(source._quantizer)):
            return False
        return self._copy_inner(source)


#: Keywords that say how buffers are to be read.
_LAYOUT = ("with_gemm_swizzled_scales", "row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max")

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

allow(NVFP4Tensor, NVFP4TensorStorage)
