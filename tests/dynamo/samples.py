"""What the tests of specs, ops and graphs run over. A new format adds its quantizers and the arguments of its ops."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tejit import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from tejit.format_info import NVFP4_SIGN_MASK

#: Quantizers by name, with both usages; they hold a tensor of SHAPE.
QUANTIZERS: dict[str, Quantizer] = {
    "current": Float8CurrentScalingQuantizer(),
    "current_e5m2": Float8CurrentScalingQuantizer(torch.float8_e5m2, force_pow_2_scales=True, amax_epsilon=0.5),
    "block_1d": Float8BlockQuantizer(block_scaling_dim=1),
    "block_2d": Float8BlockQuantizer(block_scaling_dim=2),
    "mxfp8": MXFP8Quantizer(),
    "mxfp8_2d": MXFP8Quantizer(torch.float8_e5m2, with_2d_quantization=True, optimize_for_gemm=True),
    "nvfp4": NVFP4Quantizer(),
    "nvfp4_rht": NVFP4Quantizer(with_rht=True),
    "nvfp4_2d": NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4_4over6": NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
    "identity": IdentityQuantizer(),
    "identity_bf16": IdentityQuantizer(dtype=torch.bfloat16),
    "hybrid": HybridQuantizer(
        rowwise_quantizer=Float8CurrentScalingQuantizer(), columnwise_quantizer=Float8BlockQuantizer()
    ),
}

#: A multiple of every format's block in both directions.
SHAPE = (64, 64)

Arguments = Iterator[tuple[str, tuple]]


def kernel_ops(device: str) -> list[tuple[str, tuple]]:
    """``(op, arguments)`` of the ops that take plain arguments."""
    return [*_fp8(device), *_fp8_block(device), *_mxfp8(device), *_nvfp4(device)]


def quantizer_ops(device: str, quantizer: Quantizer) -> list[tuple[str, tuple]]:
    """``(op, arguments)`` of the ops that take a whole quantizer."""
    from tejit import ops

    x = torch.randn(SHAPE, dtype=torch.bfloat16, device=device)
    with_grad = torch.randn(SHAPE, device=device, requires_grad=True)
    inner = ops.quantize(x, quantizer)
    return [
        ("quantize", (x, quantizer)),
        ("quantize", (with_grad, quantizer)),
        ("quantize_split", (x, [32, 32], [quantizer, QUANTIZERS["current"]])),
        ("dequantize", (inner, list(SHAPE), quantizer, torch.bfloat16, torch.float32)),
        ("fake_quantize", (x, quantizer)),
        ("fake_quantize", (with_grad, quantizer)),
        ("fake_quantize", (with_grad, None)),
    ]


def _zeros(device: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]


def _fp8(device: str) -> Arguments:
    x = torch.randn(6, 10, dtype=torch.bfloat16, device=device)
    one = torch.ones(1, device=device)
    out = _zeros(device, (6, 10), (10, 6))
    yield "fp8_amax", (x,)
    yield "fp8_scale", (one, 0, True, 0.5)
    yield "fp8_quantize_current", (x, 0, True, True, False, 0.0, None)
    yield "fp8_quantize_current", (x, 1, True, False, True, 0.1, one)
    yield "fp8_quantize_current", (x[:0], 1, False, True, False, 0.0, None)
    yield "fp8_quantize_current_out", (x, 0, False, 0.0, None, None, *out, one.clone())
    yield "fp8_quantize_current_out", (x, 1, True, 0.0, one, one * 0, None, out[1], one.clone())
    yield "fp8_quantize_delayed", (x, 0, True, True, one, one * 0)
    yield "fp8_quantize_delayed", (x[:0], 1, True, False, one, one * 0)
    yield "fp8_quantize_delayed_out", (x, 1, one, one * 0, None, None, out[1], one.clone())
    yield "fp8_quantize_delayed_out", (x, 0, one, one * 0, one * 0, *out, one.clone())
    histories, scales = [torch.rand(4, n, device=device) for n in (2, 3)], [one.repeat(n) for n in (2, 3)]
    yield "fp8_delayed_update_", (histories, scales, [one.repeat(n) for n in (2, 3)], 448.0, 3, 0, "max")
    yield "fp8_delayed_update_", (histories, scales, [], 448.0, 4, 1, "most_recent")
    yield "fp8_make_empty", ([6, 10], True, True, torch.device(device), False)
    yield "fp8_make_empty", ([], True, False, torch.device(device), False)


def _fp8_block(device: str) -> Arguments:
    x = torch.randn(6, 10, dtype=torch.bfloat16, device=device)
    flag = torch.zeros(1, device=device)
    out = _zeros(device, (6, 10), (10, 6))
    scales = _zeros(device, (1, 8), (1, 12), dtype=torch.float32)
    yield "fp8_block_quantize", (x, 0, 1, True, True, False, 0.0)
    yield "fp8_block_quantize", (x, 1, 2, True, False, True, 0.1)
    yield "fp8_block_quantize", (x[:0], 1, 1, False, True, False, 0.0)
    yield "fp8_block_quantize_out", (x, 0, 1, False, 0.0, flag, out[0], scales[0], out[1], scales[1])
    yield "fp8_block_quantize_out", (x, 1, 1, True, 0.0, None, None, None, out[1], scales[1])
    yield "fp8_block_make_empty", ([6, 10], 1, True, True, torch.device(device), False)
    yield "fp8_block_make_empty", ([], 2, True, False, torch.device(device), False)


def _mxfp8(device: str) -> Arguments:
    x = torch.randn(64, 96, dtype=torch.bfloat16, device=device)
    made = torch.ops.tejit.mxfp8_make_empty([64, 96], True, True, torch.device(device), False)
    out = [torch.zeros_like(tensor) for tensor in made]
    yield "mxfp8_quantize", (x, 0, True, True, False, False)
    yield "mxfp8_quantize", (x, 1, True, False, True, True)
    yield "mxfp8_quantize_out", (x, 0, False, True, torch.zeros(1, device=device), *out)
    yield "mxfp8_quantize_out", (x, 1, True, False, None, None, None, *out[2:])
    yield "mxfp8_make_empty", ([64, 96], True, False, torch.device(device), False)


def _nvfp4(device: str) -> Arguments:
    x = torch.randn(32, 48, dtype=torch.bfloat16, device=device)
    seed, one = torch.tensor([3, 4], device=device), torch.ones(1, device=device)
    row, row_scales, col, col_scales = _zeros(device, (32, 24), (128, 4), (48, 16), (128, 4))
    plain = (False, NVFP4_SIGN_MASK, False, False, 0, 448, False)
    rotated = (True, 0, False, False, 0, 448, True)
    tiles = (False, 0, True, False, 0, 256, False)
    lines = (False, 0, False, True, 0, 448, False)
    better = (False, 0, True, False, 2, 256, False)
    yield "nvfp4_quantize", (x, True, True, *plain, None, None, None)
    yield "nvfp4_quantize", (x, True, True, *rotated, seed, None, one)
    yield "nvfp4_quantize", (x, True, False, *tiles, None, one, None)
    yield "nvfp4_quantize", (x[:5], True, False, *lines, None, None, None)
    yield "nvfp4_quantize", (x[:, :0], False, True, *better, None, None, None)
    yield "nvfp4_quantize_out", (x, *plain, seed, None, None, one * 0, row, row_scales, None, None, one.clone(), None)
    out = (row, row_scales, col, col_scales, one * 2, one * 3)
    yield "nvfp4_quantize_out", (x, *tiles, None, one, one, None, *out)
    yield "nvfp4_amax", (x, True, True, True, NVFP4_SIGN_MASK, False)
    yield "nvfp4_amax", (x[:5], True, False, False, 0, True)
    yield "nvfp4_make_empty", ([32, 48], True, True, True, torch.device(device), False)
    yield "nvfp4_make_empty", ([16], True, False, False, torch.device(device), False)
