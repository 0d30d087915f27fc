"""``Operand``: a quantized matrix as a GEMM reads it, and what its bytes stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tejit.kernels import fp8_block, mxfp8, nvfp4
from tejit.kernels.fp8.reference import values_of

FP8, MXFP8, NVFP4, PLAIN = "fp8", "mxfp8", "nvfp4", "plain"


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


def scaled(product: Tensor, a: Operand, b: Operand) -> Tensor:
    """``product`` of the values of ``a`` and ``b``, float32 ``(M, N)``, times the factors of both."""
    first, second = factor(a), factor(b)
    if first is not None and first.shape[0] != 1:
        first = first[:, None]
    if first is None or second is None:
        either = second if first is None else first
        return product if either is None else product * either
    # The smaller factor first: neither the product of two factors nor a partial result then leaves
    # float32's range unless the result itself does.
    return product * torch.minimum(first, second) * torch.maximum(first, second)


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """``matrix`` with zeros below and on the right, up to the given multiples.

    Inside a graph the padding is unconditional arithmetic, so that one graph serves every size; it is
    left out only where it is known to be nothing.
    """
    below, right = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    if known_zero(below) and known_zero(right):
        return matrix
    return F.pad(matrix, (0, right, 0, below))


def known_zero(amount: int) -> bool:
    """Whether an amount, possibly symbolic, is 0 for sure."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(amount == 0)
    return amount == 0
