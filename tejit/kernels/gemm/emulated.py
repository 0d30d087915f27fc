"""GEMM where the hardware cannot multiply the bytes: dequantized, multiplied with float32 accumulation."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from tejit import compat
from tejit.kernels.gemm.operand import PLAIN, Operand, exact_in_bfloat16, factor, power_of_two, scaled, values
from tejit.kernels.nvfp4.hadamard import rotate_back
from tejit.kernels.rounding import as_rounded


def gemm(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """As ``kernels.gemm.gemm``, for any two operands of one K."""
    where = a.codes.device.type
    rotated_alike = a.sign_mask == b.sign_mask
    first, second = factor(a), factor(b)
    power_a = power_b = None
    # Codes alone multiply without overflow. Where one side has whole values, which may be as large or small as
    # float32 can say, the other one's factor must be in the product too: its power of two, which costs no bit.
    if first is not None and second is None:
        power_a = power_of_two(first)
        first = first / power_a
    elif second is not None and first is None:
        power_b = power_of_two(second)
        second = second / power_b
    with _without_autocast(where):
        if where == "cuda" and rotated_alike and exact_in_bfloat16(a) and exact_in_bfloat16(b):
            # The operands are exact in bfloat16, and the accumulation stays float32.
            product = torch.mm(
                _times(values(a, torch.bfloat16), power_a),
                _times(values(b, torch.bfloat16), power_b).t(),
                out_dtype=torch.float32,
            )
        elif where == "cuda" and a.kind == b.kind == PLAIN and a.codes.dtype == b.codes.dtype == torch.float16:
            product = torch.mm(a.codes, b.codes.t(), out_dtype=torch.float32)
        else:
            left, right = _times(values(a, torch.float32), power_a), _times(values(b, torch.float32), power_b)
            if not rotated_alike:  # one rotation cancels in the product of two, and only there
                left, right = _unrotated(left, a), _unrotated(right, b)
            product = torch.mm(left, right.t())
    out = scaled(product, first, second)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return rounded(out, out_dtype)


def _times(matrix: Tensor, power: Tensor | None) -> Tensor:
    """``matrix`` times powers of two, ``(1,)`` or one for each row, in its own dtype."""
    return matrix if power is None else matrix * power.to(matrix.dtype)[:, None]


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
