"""Writes the table of `docs/formats.md` from the code: `python docs/make_formats_table.py`, `--check` only compares."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from table_page import main

import tejit
from tejit import device, format_info

#: Compute capabilities that are told apart, and the name of the first hardware of each.
HARDWARE = {(8, 0): "Ampere 8.0", (8, 9): "Ada 8.9", (9, 0): "Hopper 9.0", (10, 0): "10.x", (12, 0): "12.x"}

E5M2 = torch.float8_e5m2


def entries() -> list[tuple[str, Callable[..., Any], format_info.FormatInfo | None, Callable[..., str | None] | None]]:
    """Name, quantizer by usages, facts, and why the GEMM is not native on a device."""

    def of(cls: Any, *arguments: Any, **fixed: Any) -> Callable[..., Any]:
        return lambda **usage: cls(*arguments, **fixed, **usage)

    def delayed(**usage: Any) -> Any:
        scale = torch.tensor([format_info.E4M3.max]) / sample().abs().amax().float()
        return tejit.Float8Quantizer(scale=scale, amax=torch.zeros(1), **usage)

    current, block, mx, nv = (
        tejit.Float8CurrentScalingQuantizer,
        tejit.Float8BlockQuantizer,
        tejit.MXFP8Quantizer,
        tejit.NVFP4Quantizer,
    )
    fp8 = (format_info.FP8_TENSOR, device.fp8_gemm_reason)
    blocks = (format_info.FP8_BLOCK, device.fp8_block_gemm_reason)
    mxfp8 = (format_info.MXFP8, device.mxfp8_gemm_reason)
    nvfp4 = (format_info.NVFP4, device.nvfp4_gemm_reason)
    return [
        ("FP8 E4M3, current scaling", of(current), *fp8),
        ("FP8 E4M3, delayed scaling", delayed, *fp8),
        ("FP8 E5M2, current scaling", of(current, E5M2), *fp8),
        ("FP8 E4M3, blocks of 1x128", of(block, block_scaling_dim=1), *blocks),
        ("FP8 E4M3, blocks of 128x128", of(block), *blocks),
        ("MXFP8 E4M3", of(mx), *mxfp8),
        ("MXFP8 E5M2", of(mx, E5M2), *mxfp8),
        ("MXFP8 E4M3, tiles of 32x32", of(mx, with_2d_quantization=True), *mxfp8),
        ("NVFP4", of(nv), *nvfp4),
        ("NVFP4, tiles of 16x16", of(nv, with_2d_quantization=True), *nvfp4),
        ("NVFP4, stochastic rounding", of(nv, stochastic_rounding=True), *nvfp4),
        ("NVFP4, the better of two scales (4over6)", of(nv, nvfp4_use_4over6=True, nvfp4_e4m3_max=256), *nvfp4),
        ("NVFP4, an amax a row", of(nv, row_scaled_nvfp4=True), *nvfp4),
        ("Identity in bfloat16", of(tejit.IdentityQuantizer, dtype=torch.bfloat16), None, None),
    ]


def sample() -> torch.Tensor:
    """N(0, 1), 1024x1024 in bfloat16, the same on every machine."""
    return torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def sqnr(x: torch.Tensor, quantizer: Any) -> str:
    """Power of the values over that of the errors, in dB."""
    torch.manual_seed(0)
    error = (quantizer(x).dequantize(torch.float32).double() - x.double()).square().mean()
    return "exact" if error == 0 else f"{10 * math.log10(x.double().square().mean() / error):.1f}"


def bits(x: torch.Tensor, quantizer: Any) -> str:
    return f"{8 * quantizer(x).nbytes / x.numel():.2f}"


def native(reason: Callable[..., str | None] | None) -> str:
    if reason is None:
        return "every device"
    found = []
    for capability, name in HARDWARE.items():
        with (
            mock.patch.object(device, "cuda_capability", lambda _, value=capability: value),
            mock.patch.object(device, "_cuda_version", return_value=(13, 0)),
        ):
            if reason(torch.device("cuda", 0)) is None:
                found.append(name)
    return ", ".join(found)


def table() -> str:
    x = sample()
    lines = [
        "| format | bits per element | SQNR, dB | multiple of | buffers of both directions | GEMM is native on |",
        "|---|---|---|---|---|---|",
    ]
    for name, make, facts, reason in entries():
        one, both = make(rowwise=True, columnwise=False), make(rowwise=True, columnwise=True)
        buffers = ", ".join(f"`{attribute}`" for attribute in both.inner_tensor_specs((1024, 1024), "cpu"))
        alignment = "-" if facts is None or facts.alignment == 1 else str(facts.alignment)
        lines.append(f"| {name} | {bits(x, one)} | {sqnr(x, one)} | {alignment} | {buffers} | {native(reason)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main("formats.md", "make_formats_table.py", table, __doc__))
