"""What the tests of specs, ops and graphs run over. A new format adds its quantizers and the arguments of its ops."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tejit import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    Quantizer,
)

#: Quantizers by name, with both usages; they hold a tensor of SHAPE.
QUANTIZERS: dict[str, Quantizer] = {
    "current": Float8CurrentScalingQuantizer(),
    "current_e5m2": Float8CurrentScalingQuantizer(torch.float8_e5m2, force_pow_2_scales=True, amax_epsilon=0.5),
    "block_1d": Float8BlockQuantizer(block_scaling_dim=1),
    "block_2d": Float8BlockQuantizer(block_scaling_dim=2),
    "identity": IdentityQuantizer(),
    "identity_bf16": IdentityQuantizer(dtype=torch.bfloat16),
    "hybrid": HybridQuantizer(
        rowwise_quantizer=Float8CurrentScalingQuantizer(), columnwise_quantizer=Float8BlockQuantizer()
    ),
}

#: A multiple of every format's block in both directions.
SHAPE = (32, 64)

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
        ("quantize_split", (x, [16, 16], [quantizer, QUANTIZERS["current"]])),
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
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
    seed = torch.tensor([7, 3], device=device)
    made = torch.ops.tejit.nvfp4_make_empty([32, 64], True, True, False, torch.device(device), False)
    out = [torch.zeros_like(tensor) for tensor in made]
    plain = (False, 0, False, False, 0, 448, False)
    yield "nvfp4_quantize", (x, True, True, *plain, None, None, None)
    yield "nvfp4_quantize", (x, True, True, True, 0xD7E8, False, False, 0, 448, True, seed, None, None)
    yield "nvfp4_quantize_out", (x, *plain, None, None, None, torch.zeros(1, device=device), *out)
    yield "nvfp4_amax", (x, True, True, True, 0xD7E8, False)
    yield "nvfp4_make_empty", ([32, 64], True, False, True, torch.device(device), False)
