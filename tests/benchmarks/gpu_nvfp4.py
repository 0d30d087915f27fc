"""NVFP4 on the GPU against the fewest bytes that it must move.

    python -m tests.benchmarks.gpu_nvfp4 [--sizes 8192x8192 ...] [--out results.json]

The floor is the bytes over the rate of a copy of the same tensor, measured in the same run: one read of x and one write
of codes and scales a direction. The amax of the whole tensor comes before its first code, so that x is read twice
unless the caches hold it; the second ratio is to that. Times are medians of CUDA-graph replays of the public op.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

import torch

import tejit  # noqa: F401 - registers the ops
from tejit.format_info import E4M3, NVFP4_SIGN_MASK
from tests.benchmarks.measure import replay_medians, write


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one call of the op is asked for, and the time over the floor (one read) that a run is held to."""

    rowwise: bool
    columnwise: bool
    rht: bool = False
    random: bool = False
    square: bool = False
    bar: float = 1 / 0.45


USAGES = {
    "rowwise": Usage(True, False, bar=1 / 0.6),
    "both": Usage(True, True),
    "both RHT": Usage(True, True, rht=True),
    "rowwise SR": Usage(True, False, random=True, bar=1 / 0.3),
    "both RHT+SR": Usage(True, True, rht=True, random=True, bar=1 / 0.3),
    "square both": Usage(True, True, square=True),
}


def measure(rows: int, columns: int) -> dict[str, float]:
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    seed = torch.tensor([1, 2], device="cuda")
    quantize = torch.ops.tejit.nvfp4_quantize.default

    def call(usage: Usage) -> tuple[torch.Tensor, ...]:
        mask = NVFP4_SIGN_MASK if usage.rht else 0
        return quantize(
            x,
            usage.rowwise,
            usage.columnwise,
            usage.rht,
            mask,
            usage.square,
            False,
            0,
            int(E4M3.max),
            False,
            seed if usage.random else None,
            None,
            None,
        )

    calls = {name: (lambda usage=usage: call(usage)) for name, usage in USAGES.items()}
    times = replay_medians({"copy": lambda: y.copy_(x), **calls})
    per_byte = times["copy"] / (2 * x.nbytes)
    result = {f"{name} us": value for name, value in times.items()}
    for name, one in calls.items():
        written = sum(buffer.nbytes for buffer in one())
        result[f"{name} over floor"] = times[name] / (per_byte * (x.nbytes + written))
        result[f"{name} over two reads"] = times[name] / (per_byte * (2 * x.nbytes + written))
    result["copy TB/s"] = 2 * x.nbytes / times["copy"] / 1e6
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["4096x4096", "8192x8192", "16384x8192"])
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    results = {}
    for size in options.sizes:
        rows, columns = map(int, size.split("x"))
        results[size] = found = measure(rows, columns)
        print(f"{size}: copy {found['copy TB/s']:.2f} TB/s")
        for name, usage in USAGES.items():
            over = found[f"{name} over floor"]
            print(
                f"  {name}: {found[f'{name} us']:.1f} us = {over:.2f} of the floor"
                f" ({1 / over:.0%}, bar {1 / usage.bar:.0%}), {found[f'{name} over two reads']:.2f} with two reads"
            )
    bars = {name: usage.bar for name, usage in USAGES.items()}
    write(options.out, {"benchmark": "gpu_nvfp4", "bars": bars, "results": results})


if __name__ == "__main__":
    main()
