"""How a tensor is quantized to NVFP4."""

from typing import Any

import torch
from torch import Tensor

from tejit.dynamo import register_value_opaque_quantizer
from tejit.format_info import E2M1, NVFP4, NVFP4_SIGN_MASK
from tejit.formats.nvfp4.tensor import FP4_DTYPE, NVFP4Tensor, NVFP4TensorStorage
from tejit.kernels import fp8_block, nvfp4
from tejit.kernels.gemm import Operand
from tejit.tensor import QuantizedTensorStorage, Quantizer
from tejit.tensor.quantizer import Inner

_ERR_MODES = {"MAE": nvfp4.MAE, "MSE": nvfp4.MSE}


class NVFP4Quantizer(Quantizer):
    """NVFP4: E2M1 codes, an E4M3 scale for 16 of them, and a float32 amax above the scales.

    Args:
        rowwise: produce the operand of ``x @ w.T``-like GEMMs; needs K, the last dimension, to be a multiple of 16.
        columnwise: produce the operand of the transposed GEMM; needs M, all other dimensions together, to be one.
        with_rht: spread outliers of columnwise data by a random Hadamard transform over 16 rows. A GEMM of two operands
            transformed alike needs no inverse; ``dequantize`` applies it.
        with_post_rht_amax: implied by ``with_rht``: the columnwise amax is that of the transformed values.
        with_2d_quantization: one scale for each 16x16, in both directions; needs M and K to be multiples of 16.
        stochastic_rounding: round to a neighbour at random, right on average. The seed comes from torch's generator of
            the input's device: ``torch.manual_seed`` repeats it.
        row_scaled_nvfp4: an amax for each row (columnwise: for each column).
        nvfp4_use_4over6: for each block the better of two scales, which put its largest value at 6 or at 4.
        nvfp4_e4m3_max: the scale of the block that holds the amax, 448 or 256; 4over6 may use up to 1.5 times as much.
        nvfp4_4over6_err_mode: what better means: the sum of absolute (``"MAE"``) or of squared (``"MSE"``) errors.
        with_random_sign_mask: change the sign of some of the 16 rows before the transform, always the same ones.
        internal: make bare storages instead of tensors.
        optimize_for_gemm: scales in the order in which a GEMM reads them.

    Raises ``TypeError`` for a flag that is no bool or a number that is no int; ``ValueError`` for another number or
    mode, and for what excludes each other: ``row_scaled_nvfp4`` needs rowwise usage and goes neither with RHT, 2D nor
    stochastic rounding; 4over6 neither with RHT nor stochastic rounding; ``with_post_rht_amax`` is of RHT.
    """

    with_rht: bool
    with_post_rht_amax: bool
    with_2d_quantization: bool
    stochastic_rounding: bool
    row_scaled_nvfp4: bool
    nvfp4_use_4over6: bool
    nvfp4_e4m3_max: int
    nvfp4_4over6_err_mode: str
    with_random_sign_mask: bool

    def __init__(
        self,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
        internal: bool = False,
        optimize_for_gemm: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise, internal=internal, optimize_for_gemm=optimize_for_gemm)
        self._init_flags(
            with_rht=with_rht,
            with_post_rht_amax=with_post_rht_amax,
            with_2d_quantization=with_2d_quantization,
            stochastic_rounding=stochastic_rounding,
            row_scaled_nvfp4=row_scaled_nvfp4,
            nvfp4_use_4over6=nvfp4_use_4over6,
            with_random_sign_mask=with_random_sign_mask,
        )
        _check_choice("nvfp4_e4m3_max", nvfp4_e4m3_max, int, nvfp4.E4M3_MAXIMA)
        _check_choice("nvfp4_4over6_err_mode", nvfp4_4over6_err_mode, str, tuple(_ERR_MODES))
        if with_post_rht_amax and not with_rht:
            raise ValueError("with_post_rht_amax=True is the amax after a transform, but with_rht is False")
        if row_scaled_nvfp4 and not rowwise:
            raise ValueError(
                "row_scaled_nvfp4=True needs rowwise usage; take rowwise=True, or one amax with row_scaled_nvfp4=False"
            )
        self._init_fields(
            with_post_rht_amax=with_rht,
            nvfp4_e4m3_max=nvfp4_e4m3_max,
            nvfp4_4over6_err_mode=nvfp4_4over6_err_mode,
        )
        nvfp4.check_mode(
            with_rht,
            with_2d_quantization,
            row_scaled_nvfp4,
            self._four_over_six(),
            nvfp4_e4m3_max,
            stochastic_rounding,
        )

    def replace(self, **fields: Any) -> "NVFP4Quantizer":
        """As in every quantizer; ``with_post_rht_amax`` follows ``with_rht`` where only that is given."""
        if "with_rht" in fields:
            fields.setdefault("with_post_rht_amax", fields["with_rht"])
        return super().replace(**fields)

    def _four_over_six(self) -> int:
        return _ERR_MODES[self.nvfp4_4over6_err_mode] if self.nvfp4_use_4over6 else nvfp4.NONE

    def _sign_mask(self) -> int:
        return NVFP4_SIGN_MASK if self.with_random_sign_mask else 0

    def is_quantizable(self, x: Tensor) -> bool:
        """Whether ``x`` can be quantized as it is: its dtype, and dimensions that are multiples of 16."""
        rows, columns = fp8_block.matrix_shape(tuple(x.shape))
        both = self.with_2d_quantization
        return (
            super().is_quantizable(x)
            and (columns % NVFP4.alignment == 0 or not (self.rowwise_usage or both))
            and (rows % NVFP4.alignment == 0 or not (self.columnwise_usage or both))
        )

    def inner_tensor_specs(
        self, shape: tuple[int, ...], device: torch.device | str | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """``{attribute: (shape, dtype)}`` of the buffers, in the storage's order.

        Raises ``ValueError`` for a shape that cannot be cut into blocks of 16.
        """
        size = tuple(shape)
        nvfp4.check(size, self.rowwise_usage, self.columnwise_usage, self.with_2d_quantization)
        shapes = nvfp4.buffer_shapes(size, self.rowwise_usage, self.columnwise_usage, self.row_scaled_nvfp4)
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.rowwise_usage:
            specs["_rowwise_data"] = (shapes[0], torch.uint8)
            specs["_rowwise_scale_inv"] = (shapes[1], NVFP4.scale_dtype)
        if self.columnwise_usage:
            specs["_columnwise_data"] = (shapes[2], torch.uint8)
            specs["_columnwise_scale_inv"] = (shapes[3], NVFP4.scale_dtype)
        if self.rowwise_usage:
            specs["_amax_rowwise"] = (shapes[4], torch.float32)
        if self.columnwise_usage:
            specs["_amax_columnwise"] = (shapes[5], torch.float32)
        return specs

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """``{"cls", "nontensor_kwargs"}`` of the storage or tensor that this quantizer makes."""
        return {
            "cls": NVFP4TensorStorage if self.internal else NVFP4Tensor,
            "nontensor_kwargs": {
                "fp4_dtype": FP4_DTYPE,
                "quantizer": self,
                "with_gemm_swizzled_scales": self.optimize_for_gemm,
                "row_scaled_nvfp4": self.row_scaled_nvfp4,
                "nvfp4_use_4over6": self.nvfp4_use_4over6,
                "nvfp4_e4m3_max": self.nvfp4_e4m3_max,
                "fake_dtype": fake_dtype,
            },
        }

    def quantize_inner(self, x: Tensor, amax_reduction_group: Any = None) -> Inner:
        """Codes and scales of both directions, then their amaxes, None for absent ones.

        With ``amax_reduction_group`` both amaxes are reduced (MAX) over the group first.

        Raises ``ValueError`` for a shape that cannot be cut into blocks of 16, and for a group with row-scaled
        tensors, whose rows have nothing in common between processes.
        """
        nvfp4.check(tuple(x.shape), self.rowwise_usage, self.columnwise_usage, self.with_2d_quantization)
        row_amax, col_amax = self._reduced_amax(x, self.rowwise_usage, self.columnwise_usage, amax_reduction_group)
        six = nvfp4.quantize(
            x,
            self.rowwise_usage,
            self.columnwise_usage,
            self.with_rht,
            self._sign_mask(),
            self.with_2d_quantization,
            self.row_scaled_nvfp4,
            self._four_over_six(),
            self.nvfp4_e4m3_max,
            self.optimize_for_gemm,
            nvfp4.new_seed(x.device) if self.stochastic_rounding else None,
            row_amax,
            col_amax,
        )
        return self._present(six)

    def _reduced_amax(
        self, x: Tensor, rowwise: bool, columnwise: bool, group: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        if group is None:
            return None, None
        if self.row_scaled_nvfp4:
            raise ValueError(
                "amax_reduction_group was given with row_scaled_nvfp4=True: each row has an amax of its own, and"
                " there is none to reduce. Leave the group out, or use row_scaled_nvfp4=False."
            )
        row, col = nvfp4.amax(x, rowwise, columnwise, self.with_rht, self._sign_mask(), False)
        both = torch.cat((row, col))
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=group)
        return (both[:1].clone() if rowwise else None), (both[-1:].clone() if columnwise else None)

    def _present(self, six: nvfp4.Six) -> Inner:
        row, row_scale_inv, col, col_scale_inv, amax_row, amax_col = six
        return (
            row if self.rowwise_usage else None,
            row_scale_inv if self.rowwise_usage else None,
            col if self.columnwise_usage else None,
            col_scale_inv if self.columnwise_usage else None,
            amax_row if self.rowwise_usage else None,
            amax_col if self.columnwise_usage else None,
        )

    def _check_target(self, dst: QuantizedTensorStorage) -> None:
        if not isinstance(dst, NVFP4TensorStorage):
            raise TypeError(f"{type(self).__name__} cannot write into a {type(dst).__name__}")
        dst._require_data()
        for name, theirs, mine in (
            ("row_scaled_nvfp4", dst._row_scaled_nvfp4, self.row_scaled_nvfp4),
            ("nvfp4_use_4over6", dst._nvfp4_use_4over6, self.nvfp4_use_4over6),
            ("nvfp4_e4m3_max", dst._nvfp4_e4m3_max, self.nvfp4_e4m3_max),
        ):
            if theirs != mine:
                raise TypeError(
                    f"the target has {name}={theirs!r} and the quantizer {name}={mine!r}; quantize into a new tensor"
                    " instead"
                )
        if dst._is_2d() and not dst._keeps_tiles_of(self):
            raise TypeError(
                "the target holds tiles of 16x16 whose directions have the same values, and the quantizer (see"
                " with_2d_quantization, stochastic_rounding) would not make such; quantize into a new tensor instead"
            )
        if dst._columnwise_data is not None and dst._rotation() != (self._sign_mask() if self.with_rht else None):
            raise TypeError(
                "the target's columnwise data and the quantizer's differ in with_rht or with_random_sign_mask;"
                " quantize into a new tensor instead"
            )

    def _quantize_into(
        self, x: Tensor, dst: QuantizedTensorStorage, noop_flag: Tensor | None, amax_reduction_group: Any
    ) -> None:
        self._check_target(dst)
        assert isinstance(dst, NVFP4TensorStorage)  # checked
        rowwise, columnwise = dst._rowwise_data is not None, dst._columnwise_data is not None
        row_amax, col_amax = self._reduced_amax(x, rowwise, columnwise, amax_reduction_group)
        nvfp4.quantize_out(
            x,
            self.with_rht,
            self._sign_mask(),
            self.with_2d_quantization,
            self.row_scaled_nvfp4,
            self._four_over_six(),
            self.nvfp4_e4m3_max,
            dst._with_gemm_swizzled_scales,
            nvfp4.new_seed(x.device) if self.stochastic_rounding else None,
            row_amax,
            col_amax,
            noop_flag,
            *dst._inner(),
        )

    def _allocate(self, shape: tuple[int, ...], device: torch.device, pin_memory: bool) -> Inner:
        six = nvfp4.make_empty(
            shape,
            self.rowwise_usage,
            self.columnwise_usage,
            self.with_2d_quantization,
            self.row_scaled_nvfp4,
            device,
            pin_memory,
        )
        return self._present(six)

    def alignment(self) -> int:
        """The multiple of which M and K must be, as far as they are scaled along."""
        return NVFP4.alignment

    def needs_rowwise(self) -> bool:
        """Whether it cannot be made without rowwise usage: row-scaled."""
        return self.row_scaled_nvfp4

    def usages_of(self, storage: Any) -> tuple[bool, bool]:
        """``(rowwise, columnwise)``: what the buffers of a storage or tensor can serve; traceable."""
        return storage._rowwise_data is not None, storage._columnwise_data is not None

    def rowwise_operand(self, inner: Inner) -> Operand:
        """The ``(M, K)`` operand: packed codes ``(M, K/2)``."""
        row, scale_inv, _, _, amax, _ = inner
        assert row is not None
        return self._operand(row.reshape(fp8_block.matrix_shape(tuple(row.shape))), scale_inv, amax, None)

    def columnwise_operand(self, inner: Inner) -> Operand:
        """The ``(K, M)`` operand: packed codes ``(K, M/2)``, of the transformed values with RHT.

        The product of two operands transformed alike is that of the originals; a GEMM undoes what one alone has.
        """
        _, _, col, scale_inv, _, amax = inner
        assert col is not None
        return self._operand(col, scale_inv, amax, self._sign_mask() if self.with_rht else None)

    def _operand(self, codes: Tensor, scale_inv: Tensor | None, amax: Tensor | None, sign_mask: int | None) -> Operand:
        assert scale_inv is not None
        return Operand(
            codes,
            scale_inv,
            E2M1.code,
            kind="nvfp4",
            amax=amax,
            e4m3_max=self.nvfp4_e4m3_max,
            swizzled=self.optimize_for_gemm,
            sign_mask=sign_mask,
        )

    def columnwise_from_rowwise(self, inner: Inner) -> Inner | None:
        """The same tiles transposed; None with blocks of 1x16, which differ by direction, and with RHT."""
        row, scale_inv, _, _, amax, _ = inner
        if not self.with_2d_quantization or self.with_rht:
            return None
        assert row is not None
        assert scale_inv is not None
        return None, None, *nvfp4.transpose_squares(row, scale_inv, self.optimize_for_gemm), None, amax

    def columnwise_inner(self, inner: Inner) -> Inner:
        """``inner`` less the rowwise buffers."""
        _, _, col, scale_inv, _, amax = inner
        return None, None, col, scale_inv, None, amax


def _check_choice(name: str, value: Any, kind: type, choices: tuple[Any, ...]) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; it must be of type {kind.__name__}")
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be {' or '.join(repr(choice) for choice in choices)}")


register_value_opaque_quantizer(NVFP4Quantizer)
