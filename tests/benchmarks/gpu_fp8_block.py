"""FP8 in blocks of 128 on the GPU against the fewest bytes that it must move.

    python -m tests.benchmarks.gpu_fp8_block [--sizes 8192x8192 ...] [--out results.json]

The floor is the bytes (one read of x, one write a direction, scales) over the rate of a copy of the same tensor,
measured in the same run. Times are medians of CUDA-graph replays of the public op.
"""

from __future__ import annotations

import argparse
import pathlib

import torch

import tejit  # noqa: F401 - registers the ops
from tests.benchmarks.measure import replay_medians, write

#: What a run is held to: time over floor, at least 80% of the copy rate.
BAR = 1.25
USAGES = {"rowwise": (True, False), "both": (True, True), "columnwise": (False, True)}


def measure(rows: int, columns: int) -> dict[str, float]:
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    quantize = torch.ops.tejit.fp8_block_quantize.default
    cases = {(dim, name): usage for dim in (1, 2) for name, usage in USAGES.items()}
    calls = {
        f"{dim}D {name}": (lambda dim=dim, usage=usage: quantize(x, 0, dim, *usage, True, 0.0))
        for (dim, name), usage in cases.items()
    }
    times = replay_medians({"copy": lambda: y.copy_(x), **calls})
    per_byte = times["copy"] / (2 * x.nbytes)
    result = {f"{name} us": value for name, value in times.items()}
    for name, call in calls.items():
        moved = x.nbytes + sum(buffer.nbytes for buffer in call())
        result[f"{name} over floor"] = times[name] / (per_byte * moved)
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
        print(f"{size}: copy {found['copy TB/s']:.2f} TB/s", end="")
        for dim in (1, 2):
            for name in USAGES:
                case = f"{dim}D {name}"
                print(
                    f" | {case} {found[f'{case} us']:.1f} us = {found[f'{case} over floor']:.2f} of the floor", end=""
                )
        print()
    write(options.out, {"benchmark": "gpu_fp8_block", "bar": BAR, "results": results})


if __name__ == "__main__":
    main()
