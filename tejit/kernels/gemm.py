"""GEMM on quantized operands: a plain function over aten ops, traced through by ``torch.compile``.

Native where the device's tensor cores multiply the bytes themselves; elsewhere the same bytes are
dequantized and multiplied.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tejit import compat
from tejit import device as hardware
from tejit.format_info import E4M3, E5M2, FP8_BLOCK, FP8_ELEMENTS, FP8_GEMM_ALIGNMENT
from tejit.kernels import fp8_block
from tejit.kernels.fp8.reference import values_of
from tejit.kernels.rounding import as_rounded


class Operand(NamedTuple):
    """A quantized matrix as a GEMM reads it, contracted dimension last.

    Attributes:
        codes: uint8 ``(rows, K)``; contiguous except on devices whose GEMM takes every layout.
        scale_inv: float32, the factors that dequantize ``codes``: ``(1,)``, or as :func:`fp8_block.scale_shape`
            ``(rows, K, block_dim)`` says.
        fp8: ``ElementInfo.code`` of the element type.
        block_dim: 0 for one factor, 1 for one in each 1x128, 2 for one in each 128x128.
        pow2_scales: all factors of blocks are powers of two.
        kind: ``fp8``, ``mxfp8``, ``nvfp4`` or ``plain`` (``codes`` are then the values themselves).
        amax: NVFP4's, ``(1,)`` or ``(rows,)``.
        e4m3_max: NVFP4's largest scale.
        swizzled: the scales lie in the GEMM's own order (``kernels.swizzle``).
    """

    codes: Tensor
    scale_inv: Tensor | None
    fp8: int = 0
    block_dim: int = 0
    pow2_scales: bool = False
    kind: str = "fp8"
    amax: Tensor | None = None
    e4m3_max: int = 448
    swizzled: bool = False


def gemm(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False
) -> Tensor:
    """``a @ b.T + bias``, accumulated in float32 and rounded once to ``out_dtype``.

    Args:
        a: ``(M, K)``; any M, K (padded inside to what the hardware asks for).
        b: ``(N, K)``; any N.
        out_dtype: float32, bfloat16 or float16.
        bias: ``(N,)`` in a floating dtype, added in float32; or None.
        fast_accum: let the tensor cores accumulate in fewer bits (native GEMM only).

    Returns:
        ``(M, N)`` of ``out_dtype``.
    """
    if not _is_native(a, b):
        return _emulated(a, b, out_dtype, bias)
    if a.block_dim:
        return _native_blocks(a, b, out_dtype, bias)
    n = b.codes.shape[0]
    a_codes = _padded(a.codes, 1, FP8_GEMM_ALIGNMENT).view(FP8_ELEMENTS[a.fp8].dtype)
    b_codes = _padded(b.codes, FP8_GEMM_ALIGNMENT, FP8_GEMM_ALIGNMENT).view(FP8_ELEMENTS[b.fp8].dtype)
    # cuBLASLt's own bias comes in the output's dtype, and not at all for float32.
    fused = bias if bias is not None and bias.dtype == out_dtype != torch.float32 else None
    added = bias if fused is None else None
    out = torch._scaled_mm(
        a_codes,
        b_codes.t(),
        a.scale_inv,
        b.scale_inv,
        bias=None if fused is None else _padded(fused.reshape(1, -1), 1, FP8_GEMM_ALIGNMENT).reshape(-1),
        out_dtype=out_dtype if added is None else torch.float32,
        use_fast_accum=fast_accum,
    )
    if not _known_zero(-n % FP8_GEMM_ALIGNMENT):
        out = out[:, :n]
    return out if added is None else _rounded(out + added.to(torch.float32), out_dtype)


#: ``torch.nn.functional.ScalingType`` (whose Python function does not trace on torch 2.11) by ``block_dim``.
_SCALING_TYPE = {1: 4, 2: 5}
_NO_SWIZZLE = 0


def _native_blocks(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Blocks of 1x128 by 1x128 or 128x128 on the tensor cores. Scales lie as cuBLASLt reads them; where codes are
    padded, the products with their zeros do not depend on the scale."""
    m, n = a.codes.shape[0], b.codes.shape[0]
    block = fp8_block.BLOCK
    a_codes = _padded(a.codes, FP8_BLOCK.scale_alignment, block).view(FP8_ELEMENTS[a.fp8].dtype)
    # Whole tiles of 128 rows: torch 2.11's own check of a traced call counts only those.
    b_rows = block if b.block_dim == 2 else FP8_GEMM_ALIGNMENT
    b_codes = _padded(b.codes, b_rows, block).view(FP8_ELEMENTS[b.fp8].dtype)
    b_scale_inv = b.scale_inv if b.block_dim == 2 else _padded(b.scale_inv, 1, FP8_GEMM_ALIGNMENT)
    # Rounding, and a bias in float32, are ours: cuBLASLt gives bfloat16 or float32.
    direct = out_dtype == torch.bfloat16 and bias is None
    out = torch.ops.aten._scaled_mm_v2.default(
        a_codes,
        b_codes.t(),
        [a.scale_inv.t()],
        [_SCALING_TYPE[a.block_dim]],
        [_NO_SWIZZLE],
        [b_scale_inv.t()],
        [_SCALING_TYPE[b.block_dim]],
        [_NO_SWIZZLE],
        None,
        torch.bfloat16 if direct else torch.float32,
    )
    if not (_known_zero(a_codes.shape[0] - m) and _known_zero(b_codes.shape[0] - n)):
        out = out[:m, :n]
    if bias is not None:
        out = out + bias.to(torch.float32)
    return _rounded(out, out_dtype)


def _is_native(a: Operand, b: Operand) -> bool:
    if a.codes.numel() == 0 or b.codes.numel() == 0:
        return False
    if a.fp8 == E5M2.code and b.fp8 == E5M2.code:
        return False  # no tensor core multiplies E5M2 by E5M2
    if a.block_dim or b.block_dim:
        pair, elements = (a.block_dim, b.block_dim), (a.fp8, b.fp8)
        if elements != (E4M3.code, E4M3.code):
            return False  # torch takes no E5M2 with blocks of 128
        return pair in ((1, 1), (1, 2)) and hardware.fp8_block_gemm_is_native(a.codes.device)
    return hardware.fp8_gemm_is_native(a.codes.device)


def _emulated(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    where = a.codes.device.type
    with _without_autocast(where):
        if where == "cuda" and _exact_in_bfloat16(a) and _exact_in_bfloat16(b):
            # The operands are exact in bfloat16, and the accumulation stays float32.
            accumulated = torch.mm(_values(a, torch.bfloat16), _values(b, torch.bfloat16).t(), out_dtype=torch.float32)
        else:
            accumulated = torch.mm(_values(a, torch.float32), _values(b, torch.float32).t())
    # The smaller factor first: neither the product of two factors nor a partial result then leaves
    # float32's range unless the result itself does.
    factors = [operand.scale_inv for operand in (a, b) if not operand.block_dim]
    if len(factors) == 2:
        factors = [torch.minimum(*factors), torch.maximum(*factors)]
    out = accumulated
    for factor in factors:
        out = out * factor
    if bias is not None:
        out = out + bias.to(torch.float32)
    return _rounded(out, out_dtype)


def _exact_in_bfloat16(operand: Operand) -> bool:
    """Whether what :func:`_values` gives has as few bits as bfloat16 holds."""
    return operand.block_dim == 0 or operand.pow2_scales


def _rounded(out: Tensor, dtype: torch.dtype) -> Tensor:
    # No `.to` that does nothing: torch 2.11 loses the gradient of an autograd function that returns one.
    return out if out.dtype == dtype else as_rounded(out.to(dtype))


def _values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Codes times the scales of their blocks; a factor of the whole matrix is left for after the product."""
    if operand.block_dim:
        return fp8_block.values(operand.codes, operand.scale_inv, operand.fp8, operand.block_dim, dtype)
    return values_of(operand.codes, operand.fp8, dtype)


def _without_autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    """torch.autocast would turn the float32 product of exact codes into a bfloat16 one."""
    if compat.autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """``matrix`` with zeros below and on the right, up to the given multiples.

    Inside a graph the padding is unconditional arithmetic, so that one graph serves every size; it is
    left out only where it is known to be nothing.
    """
    below, right = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    if _known_zero(below) and _known_zero(right):
        return matrix
    return F.pad(matrix, (0, right, 0, below))


def _known_zero(amount: int) -> bool:
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(amount == 0)
    return amount == 0
