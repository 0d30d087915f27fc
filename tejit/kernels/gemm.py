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
from tejit.format_info import E5M2, FP8_ELEMENTS, FP8_GEMM_ALIGNMENT
from tejit.kernels.rounding import as_rounded


class Operand(NamedTuple):
    """A quantized matrix as a GEMM reads it, contracted dimension last.

    Attributes:
        codes: uint8 ``(rows, K)``; contiguous except on devices whose GEMM takes every layout.
        scale_inv: float32 ``(1,)``, the factor that dequantizes ``codes``.
        fp8: ``ElementInfo.code`` of the element type.
    """

    codes: Tensor
    scale_inv: Tensor
    fp8: int


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


def _is_native(a: Operand, b: Operand) -> bool:
    if a.codes.numel() == 0 or b.codes.numel() == 0:
        return False
    if a.fp8 == E5M2.code and b.fp8 == E5M2.code:
        return False  # no tensor core multiplies E5M2 by E5M2
    return hardware.fp8_gemm_is_native(a.codes.device)


def _emulated(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    where = a.codes.device.type
    with _without_autocast(where):
        if where == "cuda":
            # FP8 codes are exact in bfloat16, and the accumulation stays float32.
            accumulated = torch.mm(_values(a, torch.bfloat16), _values(b, torch.bfloat16).t(), out_dtype=torch.float32)
        else:
            accumulated = torch.mm(_values(a, torch.float32), _values(b, torch.float32).t())
    # The smaller factor first: neither the product of two factors nor a partial result then leaves
    # float32's range unless the result itself does.
    out = accumulated * torch.minimum(a.scale_inv, b.scale_inv) * torch.maximum(a.scale_inv, b.scale_inv)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return _rounded(out, out_dtype)


def _rounded(out: Tensor, dtype: torch.dtype) -> Tensor:
    # No `.to` that does nothing: torch 2.11 loses the gradient of an autograd function that returns one.
    return out if out.dtype == dtype else as_rounded(out.to(dtype))


def _values(operand: Operand, dtype: torch.dtype) -> Tensor:
    return operand.codes.view(FP8_ELEMENTS[operand.fp8].dtype).to(dtype)


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
