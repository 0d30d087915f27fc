"""Norms and activations with quantized output on the GPU, against the fewest bytes and against two steps.

    python -m tests.benchmarks.gpu_norm [--sizes 8192x8192 ...] [--only TEXT] [--out FILE]

The floor is the fewest bytes over the rate of a copy of the same tensor in the same run. x is read once where a row, or
an element, is all that its output needs (delayed scaling rowwise; activations but for current scaling), else twice: a
column's output needs the statistics of every row, and current scaling the maximum of all. The two steps are
torch.compile's norm or activation, then our own quantization. Times are medians of CUDA-graph replays, all calls
interleaved; x, gamma and beta bfloat16. Exits with 1 where a norm misses its bar at 8192x8192.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tejit import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer, Quantizer
from tejit.kernels.activation import activation_quantize
from tejit.kernels.norm import norm, norm_quantize
from tests.benchmarks.measure import replay_medians, write

#: How much longer than its floor a fused norm may take, and where.
BAR, BAR_SIZE = 1.2, "8192x8192"
USAGES = {"rowwise": (True, False), "both": (True, True)}


class Case(NamedTuple):
    """One fused call, the same in two steps, and the bytes that it cannot do without."""

    fused: Callable[[], object]
    steps: Callable[[], object]
    floor: int


def quantizers(rowwise: bool, columnwise: bool) -> dict[str, Quantizer]:
    usage = {"rowwise": rowwise, "columnwise": columnwise}
    scale, amax = torch.full((1,), 0.5, device="cuda"), torch.zeros(1, device="cuda")
    return {
        "current": Float8CurrentScalingQuantizer(**usage),
        "delayed": Float8Quantizer(scale=scale, amax=amax, **usage),
        "blocks 1D": Float8BlockQuantizer(block_scaling_dim=1, **usage),
        "MXFP8": MXFP8Quantizer(optimize_for_gemm=True, **usage),
    }


def cases(rows: int, columns: int) -> dict[str, Case]:
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    halves = torch.randn(rows, 2 * columns, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(2, columns, device="cuda", dtype=torch.bfloat16)
    layer_norm = torch.compile(lambda x: F.layer_norm(x, (columns,), weight, bias, 1e-5))
    rms_norm = torch.compile(lambda x: F.rms_norm(x, (columns,), weight, 1e-5))
    gelu = torch.compile(lambda x: F.gelu(x, approximate="tanh"))
    swiglu = torch.compile(lambda x: F.silu(x[:, :columns].float()).mul(x[:, columns:].float()).to(x.dtype))
    found = {}
    for usage, (row, col) in USAGES.items():
        for name, quantizer in quantizers(row, col).items():
            cast = quantizer.fused_cast(x)
            if cast is None:
                raise AssertionError(f"no op quantizes with {name}")
            written = sum(buffer.nbytes for buffer in quantizer.quantize_inner(x) if buffer is not None)
            reads = 1 if name == "delayed" and usage == "rowwise" else 2
            for rms, of_torch in ((False, layer_norm), (True, rms_norm)):
                found[f"{'RMSNorm' if rms else 'LayerNorm'}, {name} {usage}"] = Case(
                    lambda rms=rms, cast=cast: norm_quantize(
                        x, weight, None if rms else bias, 1e-5, rms, False, 1, cast
                    ),
                    lambda of_torch=of_torch, quantizer=quantizer: quantizer.quantize_inner(of_torch(x)),
                    reads * x.nbytes + written,
                )
            reads = 2 if name == "current" else 1
            for kind, gated, source, of_torch in (("gelu", False, x, gelu), ("silu", True, halves, swiglu)):
                found[f"{'SwiGLU' if gated else 'GELU'}, {name} {usage}"] = Case(
                    lambda kind=kind, gated=gated, source=source, cast=cast: activation_quantize(
                        source, kind, gated, 1, cast
                    ),
                    lambda of_torch=of_torch, source=source, quantizer=quantizer: quantizer.quantize_inner(
                        of_torch(source)
                    ),
                    reads * source.nbytes + written,
                )
    # Statistics, and the maximum of what it does not write: the first of two kernels; then a plain norm.
    found["LayerNorm alone"] = Case(
        lambda: norm(x, weight, bias, 1e-5, False, False), lambda: layer_norm(x), 2 * x.nbytes
    )
    return found


def measure(size: str, only: str) -> dict[str, float]:
    rows, columns = map(int, size.split("x"))
    chosen = {name: case for name, case in cases(rows, columns).items() if only in name}
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: y.copy_(x)}
    for name, case in chosen.items():
        calls[name], calls[f"{name} in steps"] = case.fused, case.steps
    times = replay_medians(calls)
    per_byte = times["copy"] / (2 * x.nbytes)
    result = {"copy TB/s": 2 * x.nbytes / times["copy"] / 1e6}
    print(f"{size}: copy {result['copy TB/s']:.2f} TB/s")
    for name, case in chosen.items():
        ratio, steps = times[name] / (per_byte * case.floor), times[f"{name} in steps"]
        missed = "Norm, " in name and size == BAR_SIZE and ratio > BAR
        result[f"{name} us"], result[f"{name} over its floor"] = times[name], ratio
        result[f"{name} in steps us"], result[f"{name} missed"] = steps, float(missed)
        line = f"  {name:28} {times[name]:7.1f} us, {ratio:.3f} of its floor; in two steps {steps:7.1f} us"
        print(line + ("  MISSED" if missed else ""))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["8192x8192", "16384x8192"])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    results = {size: measure(size, options.only) for size in options.sizes}
    write(options.out, {"benchmark": "gpu_norm", "bar": BAR, "results": results})
    return int(any(value for found in results.values() for name, value in found.items() if name.endswith("missed")))


if __name__ == "__main__":
    sys.exit(main())
