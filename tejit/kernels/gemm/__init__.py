"""GEMM on quantized operands: plain functions over aten ops, traced through by ``torch.compile``.

Native where the device's tensor cores multiply the bytes themselves; elsewhere, and for every mix of formats, the
same bytes are dequantized and multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tejit.kernels.arguments import QUANTIZES, refuse_gradients
from tejit.kernels.gemm import emulated, native
from tejit.kernels.gemm.native import emulation_reason, is_native
from tejit.kernels.gemm.operand import Operand

__all__ = ["Operand", "emulation_reason", "gemm", "is_native"]


def gemm(
    a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False
) -> Tensor:
    """``a @ b.T + bias``, accumulated in float32 and rounded once to ``out_dtype``.

    Args:
        a: ``(M, K)``; any M, K that its format holds (padded inside to what the hardware asks for).
        b: ``(N, K)``; any N; of any format.
        out_dtype: float32, bfloat16 or float16.
        bias: ``(N,)`` in a floating dtype, added in float32; or None.
        fast_accum: let the tensor cores accumulate in fewer bits (native GEMM of FP8 with one scale only).

    Returns:
        ``(M, N)`` of ``out_dtype``.

    Raises ``RuntimeError``, in grad mode, for a bias or values of a plain operand that require grad.
    """
    refuse_gradients("kernels.gemm.gemm", QUANTIZES, a=a.codes, b=b.codes, bias=bias)
    if is_native(a, b):
        return native.gemm(a, b, out_dtype, bias, fast_accum)
    return emulated.gemm(a, b, out_dtype, bias)
