"""``Operand``: a quantized matrix as a GEMM reads it, and what its bytes stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tejit.kernels import fp8_block, mxfp8, nvfp4
from tejit.kernels.fp8.reference import values_of

FP8, MXFP8, NVFP4, PLAIN = "fp8", "mxfp8", "nvfp4", "plain"


#: The exponent among a float32's bits.
_EXPONENT = 0x7F800000


class Operand(NamedTuple):
    """A quantized matrix as a GEMM reads it, contracted dimension last.

    Attributes:
        codes: uint8 ``(rows, K)``; contiguous except on devices whose GEMM takes every layout, and for MXFP8. NVFP4:
            ``(rows, K/2)``, two codes a byte. Plain: the values themselves.
        scale_inv: the factors that dequantize ``codes``. FP8: float32 ``(1,)``, or as :func:`fp8_block.scale_shape`
            ``(rows, K, block_dim)`` says. MXFP8 and NVFP4: uint8, entry ``[row, k / block]``, padded to multiples
            of 128 and 4. Plain: None.
        fp8: ``ElementInfo.code`` of the element type of FP8 and MXFP8.
        block_dim: FP8: 0 for one factor, 1 for one in each 1x128, 2 for one in each 128x128.
        pow2_scales: FP8: all factors of blocks are powers of two.
        kind: ``fp8``, ``mxfp8``, ``nvfp4`` or ``plain``.
        amax: NVFP4's, float32 ``(1,)`` or ``(rows,)``.
        e4m3_max: NVFP4's largest scale.
        swizzled: the scales of MXFP8 or NVFP4 lie in the GEMM's own order (``kernels.swizzle``), in any shape.
        sign_mask: NVFP4: the values are rotated along K (``nvfp4.hadamard``) with these signs; None: they are not.
    """

    codes: Tensor
    scale_inv: Tensor | None
    fp8: int = 0
    block_dim: int = 0
    pow2_scales: bool = False
    kind: str = FP8
    amax: Tensor | None = None
    e4m3_max: int = 448
    swizzled: bool = False
    sign_mask: int | None = None


def exact_in_bfloat16(operand: Operand) -> bool:
    """Whether what :func:`values` gives has as few bits as bfloat16 holds.

    MXFP8 and NVFP4 without its factor do: 4 bits times a power of two, 2 bits times 4 bits.
    """
    if operand.kind == PLAIN:
        return operand.codes.dtype == torch.bfloat16
    return operand.kind != FP8 or operand.block_dim == 0 or operand.pow2_scales


def values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """``(rows, K)``: codes times the scales of their blocks; :func:`factor` is left for after the product."""
    codes, scale_inv = operand.codes, operand.scale_inv
    if operand.kind == PLAIN:
        return codes if codes.dtype == dtype else codes.to(dtype)
    assert scale_inv is not None
    if operand.kind == MXFP8:
        return mxfp8.values(codes, scale_inv, operand.fp8, operand.swizzled, dtype)
    if operand.kind == NVFP4:
        return nvfp4.values(codes, scale_inv, None, operand.e4m3_max, operand.swizzled, dtype)
    if operand.block_dim:
        return fp8_block.values(codes, scale_inv, operand.fp8, operand.block_dim, dtype)
    return values_of(codes, operand.fp8, dtype)


def factor(operand: Operand) -> Tensor | None:
    """What a product over :func:`values` still lacks: float32 ``(1,)`` or, one for each row, ``(rows,)``; or None."""
    if operand.kind == NVFP4:
        assert operand.amax is not None
        return nvfp4.global_factor(operand.amax, operand.e4m3_max)
    return operand.scale_inv if operand.kind == FP8 and not operand.block_dim else None


def power_of_two(factor: Tensor) -> Tensor:
    """The largest power of two that is not above each factor (2^-126 where that is subnormal; 1 for inf and NaN).

    Times it, values of any dtype keep their bits; ``factor / power`` is exact too.
    """
    power = (factor.view(torch.int32) & _EXPONENT).view(torch.float32)
    return torch.where(power.isinf(), torch.ones_like(power), power.clamp(min=torch.finfo(torch.float32).tiny))


def scaled(product: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor:
    """``product`` of two operands' values, float32 ``(M, N)``, times the :func:`factor` of both."""
    if first is not None and first.shape[0] != 1:
        first = first[:, None]
    if first is None or second is None:
        either = second if first is None else first
        return product if either is None else product * either
    # The smaller factor first: neither the product of two factors nor a partial result then leaves
    # float32's range unless the result itself does.
    return product * torch.minimum(first, second) * torch.maximum(first, second)
