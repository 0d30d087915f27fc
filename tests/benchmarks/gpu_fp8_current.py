"""FP8 current scaling on the GPU against the fewest bytes that it must move.

    python -m tests.benchmarks.gpu_fp8_current [--sizes 8192x8192 ...] [--out results.json]

The floor is the bytes (two reads of x, one write a direction) over the rate of a copy of the same tensor,
measured in the same run. Times are medians of CUDA-graph replays of the public op.
"""

from __future__ import annotations

import argparse
import pathlib

import torch

import tejit  # noqa: F401 - registers the ops
from tests.benchmarks.measure import replay_medians, write

#: What a run is held to: time over floor.
BARS = {"rowwise": 1.25, "both": 1.3}


def measure(rows: int, columns: int) -> dict[str, float]:
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    quantize = torch.ops.tejit.fp8_quantize_current.default
    times = replay_medians(
        {
            "copy": lambda: y.copy_(x),
            "rowwise": lambda: quantize(x, 0, True, False, False, 0.0, None),
            "both": lambda: quantize(x, 0, True, True, False, 0.0, None),
            "columnwise": lambda: quantize(x, 0, False, True, False, 0.0, None),
        }
    )
    per_byte = times["copy"] / (2 * x.nbytes)
    reads, write_one = 2 * x.nbytes, x.numel()
    floors = {
        "rowwise": per_byte * (reads + write_one),
        "columnwise": per_byte * (reads + write_one),
        "both": per_byte * (reads + 2 * write_one),
    }
    result = {f"{name}_us": value for name, value in times.items()}
    result.update({f"{name}_over_floor": times[name] / floor for name, floor in floors.items()})
    result["copy_TBps"] = 2 * x.nbytes / times["copy"] / 1e6
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
        print(f"{size}: copy {found['copy_TBps']:.2f} TB/s", end="")
        for name in ("rowwise", "columnwise", "both"):
            print(f" | {name} {found[f'{name}_us']:.1f} us = {found[f'{name}_over_floor']:.2f} of the floor", end="")
        print()
    write(options.out, {"benchmark": "gpu_fp8_current", "bars": BARS, "results": results})


if __name__ == "__main__":
    main()
