"""GEMM on the tensor cores: which pairs of operands the hardware multiplies, and how torch is asked to.

MXFP8 and NVFP4 were written after torch's own checks and documentation; they have not run on hardware.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tejit import device as hardware
from tejit.format_info import E2M1, E4M3, E5M2, FP8_BLOCK, FP8_ELEMENTS, FP8_GEMM_ALIGNMENT
from tejit.kernels import fp8_block
from tejit.kernels.gemm.emulated import rounded
from tejit.kernels.gemm.operand import FP8, MXFP8, NVFP4, PLAIN, Operand, factor, scaled
from tejit.kernels.padding import cut, cut_out, known_zero, padded
from tejit.kernels.swizzle import swizzle

#: ``torch.nn.functional.ScalingType`` (whose Python function does not trace on torch 2.11) by ``block_dim``.
_SCALING_TYPE = {1: 4, 2: 5}
_NO_SWIZZLE = 0


def is_native(a: Operand, b: Operand) -> bool:
    """Whether the tensor cores of the operands' device multiply this pair."""
    if a.kind != b.kind or a.codes.numel() == 0 or b.codes.numel() == 0:
        return False
    if a.kind in (FP8, MXFP8) and a.fp8 == b.fp8 == E5M2.code:
        return False  # no tensor core multiplies E5M2 by E5M2
    where = a.codes.device
    if a.kind == FP8:
        if not (a.block_dim or b.block_dim):
            return hardware.fp8_gemm_is_native(where)
        if not a.fp8 == b.fp8 == E4M3.code:
            return False  # torch takes no E5M2 with blocks of 128
        return (a.block_dim, b.block_dim) in ((1, 1), (1, 2)) and hardware.fp8_block_gemm_is_native(where)
    if a.kind == NVFP4:
        return a.sign_mask == b.sign_mask and hardware.nvfp4_gemm_is_native(where)
    return a.kind == MXFP8 and hardware.mxfp8_gemm_is_native(where)


def emulation_reason(a: Operand, b: Operand) -> str | None:
    """Why the pair is dequantized and multiplied; None where :func:`is_native`."""
    if is_native(a, b):
        return None
    plain = [operand.kind == PLAIN for operand in (a, b)]
    if any(plain):
        return "neither operand is quantized" if all(plain) else "only one operand is quantized"
    if a.kind != b.kind:
        return "the operands are of two formats"
    if a.codes.numel() == 0 or b.codes.numel() == 0:
        return "an operand is empty"
    device = a.codes.device
    if a.kind == NVFP4:
        return hardware.nvfp4_gemm_reason(device) or "only one operand is rotated by the Hadamard transform"
    if a.fp8 == b.fp8 == E5M2.code:
        return "no tensor core multiplies E5M2 by E5M2"
    if a.kind == MXFP8:
        return hardware.mxfp8_gemm_reason(device)
    if not (a.block_dim or b.block_dim):
        return hardware.fp8_gemm_reason(device)
    reason = hardware.fp8_block_gemm_reason(device)
    if reason is not None:
        return reason
    if E5M2.code in (a.fp8, b.fp8):
        return "torch multiplies blocks of 128 in E4M3 only"
    return "tensor cores multiply blocks of 1x128 by 1x128 or 128x128, and not these"


def gemm(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    """As ``kernels.gemm.gemm``, for a pair of which :func:`is_native` is true."""
    if a.kind == MXFP8:
        return _mxfp8(a, b, out_dtype, bias)
    if a.kind == NVFP4:
        return _nvfp4(a, b, out_dtype, bias)
    return _blocks(a, b, out_dtype, bias) if a.block_dim else _tensors(a, b, out_dtype, bias, fast_accum)


def _tensors(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    """FP8 with one scale each."""
    assert a.scale_inv is not None
    assert b.scale_inv is not None
    a_codes, b_codes = a.codes, b.codes
    n, k = b_codes.shape
    whole = known_zero(n % FP8_GEMM_ALIGNMENT)
    if not (whole and known_zero(k % FP8_GEMM_ALIGNMENT)):
        a_codes = padded(a_codes, 1, FP8_GEMM_ALIGNMENT)
        b_codes = padded(b_codes, FP8_GEMM_ALIGNMENT, FP8_GEMM_ALIGNMENT)
    # cuBLASLt's own bias comes in the output's dtype, and not at all for float32.
    fused = bias if bias is not None and bias.dtype == out_dtype != torch.float32 else None
    added = bias if fused is None else None
    if fused is not None and not whole:
        fused = padded(fused.reshape(1, -1), 1, FP8_GEMM_ALIGNMENT).reshape(-1)
    out = torch._scaled_mm(
        a_codes.view(FP8_ELEMENTS[a.fp8].dtype),
        b_codes.view(FP8_ELEMENTS[b.fp8].dtype).t(),
        a.scale_inv,
        b.scale_inv,
        bias=fused,
        out_dtype=out_dtype if added is None else torch.float32,
        use_fast_accum=fast_accum,
    )
    return out if whole and added is None else _finished(out, out.shape[0], n, added, out_dtype)


def _blocks(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Blocks of 1x128 by 1x128 or 128x128. Scales lie as cuBLASLt reads them; where codes are padded, the
    products with their zeros do not depend on the scale."""
    assert a.scale_inv is not None
    assert b.scale_inv is not None
    m, n = a.codes.shape[0], b.codes.shape[0]
    block = fp8_block.BLOCK
    a_codes = padded(a.codes, FP8_BLOCK.scale_alignment, block).view(FP8_ELEMENTS[a.fp8].dtype)
    # Whole tiles of 128 rows: torch 2.11's own check of a traced call counts only those.
    b_rows = block if b.block_dim == 2 else FP8_GEMM_ALIGNMENT
    b_codes = padded(b.codes, b_rows, block).view(FP8_ELEMENTS[b.fp8].dtype)
    b_scale_inv = b.scale_inv if b.block_dim == 2 else padded(b.scale_inv, 1, FP8_GEMM_ALIGNMENT)
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
    return _finished(out, m, n, bias, out_dtype)


def _mxfp8(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """E8M0 scales of 32 elements; torch knows the scaling from the scales' dtype and number. Not run on hardware."""
    n = b.codes.shape[0]
    # Both with the contracted dimension contiguous: what every device takes, and all that torch's own check of a
    # traced call does.
    a_codes = a.codes.contiguous().view(FP8_ELEMENTS[a.fp8].dtype)
    b_codes = padded(b.codes, FP8_GEMM_ALIGNMENT, 1).contiguous().view(FP8_ELEMENTS[b.fp8].dtype)
    direct = bias is None
    out = torch._scaled_mm(
        a_codes,
        b_codes.t(),
        _swizzled(a).view(torch.float8_e8m0fnu),
        _swizzled(b).view(torch.float8_e8m0fnu),
        out_dtype=out_dtype if direct else torch.float32,
    )
    return _finished(out, out.shape[0], n, bias, out_dtype)


def _nvfp4(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """E4M3 scales of 16 elements. The factors of whole tensors or rows are applied in float32 afterwards: one way
    for both, and for every torch (``_scaled_mm`` takes no second scale). Not run on hardware."""
    n = b.codes.shape[0]
    # 16 bytes are 32 elements; the scale buffers, padded to 4 blocks, cover what is added.
    a_codes = padded(a.codes, 1, FP8_GEMM_ALIGNMENT).contiguous().view(E2M1.dtype)
    b_codes = padded(b.codes, FP8_GEMM_ALIGNMENT, FP8_GEMM_ALIGNMENT).contiguous().view(E2M1.dtype)
    out = torch._scaled_mm(
        a_codes,
        b_codes.t(),
        _swizzled(a).view(E4M3.dtype),
        _swizzled(b).view(E4M3.dtype),
        out_dtype=torch.float32,
    )
    out = cut(out, out.shape[0], n)
    return _finished(scaled(out, factor(a), factor(b)), out.shape[0], n, bias, out_dtype)


def _swizzled(operand: Operand) -> Tensor:
    """The scales in one contiguous row of bytes, in the GEMM's order."""
    assert operand.scale_inv is not None
    scales = operand.scale_inv if operand.swizzled else swizzle(operand.scale_inv)
    return scales.reshape(-1)


def _finished(out: Tensor, rows: int, columns: int, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The product without what its operands were padded by, a tensor of its own."""
    if bias is None and out.dtype == out_dtype:
        return cut_out(out, rows, columns)
    out = cut(out, rows, columns)
    if bias is not None:
        out = out + bias.to(torch.float32)
    return rounded(out, out_dtype)
