"""GEMM where the hardware cannot multiply the bytes: dequantized, multiplied with float32 accumulation."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from tejit import compat
from tejit.kernels.gemm.operand import PLAIN, Operand, exact_in_bfloat16, scaled, values
from tejit.kernels.nvfp4.hadamard import rotate_back
from tejit.kernels.rounding import as_rounded


def gemm(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """As ``kernels.gemm.gemm``, for any two operands of one K."""
    where = a.codes.device.type
    rotated_alike = a.sign_mask == b.sign_mask
    with _without_autocast(where):
        if where == "cuda" and rotated_alike and exact_in_bfloat16(a) and exact_in_bfloat16(b):
            # The operands are exact in bfloat16, and the accumulation stays float32.
            product = torch.mm(values(a, torch.bfloat16), values(b, torch.bfloat16).t(), out_dtype=torch.float32)
        elif where == "cuda" and a.kind == b.kind == PLAIN and a.codes.dtype == b.codes.dtype == torch.float16:
            product = torch.mm(a.codes, b.codes.t(), out_dtype=torch.float32)
        else:
            left, right = values(a, torch.float32), values(b, torch.float32)
            if not rotated_alike:  # one rotation cancels in the product of two, and only there
                left, right = _unrotated(left, a), _unrotated(right, b)
            product = torch.mm(left, right.t())
    out = scaled(product, a, b)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return rounded(out, out_dtype)


def _unrotated(matrix: Tensor, operand: Operand) -> Tensor:
    return matrix if operand.sign_mask is None else rotate_back(matrix.t(), operand.sign_mask).t()


def rounded(out: Tensor, dtype: torch.dtype) -> Tensor:
    """``out`` in ``dtype``."""
    # No `.to` that does nothing: torch 2.11 loses the gradient of an autograd function that returns one.
    return out if out.dtype == dtype else as_rounded(out.to(dtype))


def _without_autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    """torch.autocast would turn the float32 product of exact codes into a bfloat16 one."""
    if compat.autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
