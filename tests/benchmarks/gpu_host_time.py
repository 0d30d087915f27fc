"""Time that the host spends on an eager ``Linear`` forward on the GPU, against ``nn.Linear`` in the same run.

    python -m tests.benchmarks.gpu_host_time [--size 256] [--out results.json]

The layers are so small that the GPU is never waited for: what is measured is the wall time of a call without
synchronising. For FP8 with current scaling: the weight quantized already (a quantized parameter, and a workspace that
an earlier microbatch filled) and quantized in each call, with and without gradients.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import time

import torch
from torch import nn

import tejit
from tests.benchmarks.measure import Call, write

IN_A_ROW = 100


def medians(calls: dict[str, Call], repeats: int = 50) -> dict[str, float]:
    """Microseconds a call on the host: medians over rounds in which the calls come in random order."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for call in calls.values():
        for _ in range(IN_A_ROW):
            call()
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            call = calls[name]
            torch.cuda.synchronize()  # an empty queue: the host is never held back
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                call()
            times[name].append(1e6 * (time.perf_counter() - start) / IN_A_ROW)
    return {name: statistics.median(values) for name, values in times.items()}


def layers(size: int) -> tuple[nn.Linear, tejit.Linear, tejit.Linear]:
    options = {"device": "cuda", "dtype": torch.bfloat16}
    plain, ours, quantized = nn.Linear(size, size, **options), *[tejit.Linear(size, size, **options) for _ in range(2)]
    quantized.weight = nn.Parameter(tejit.Float8CurrentScalingQuantizer()(quantized.weight.detach()))
    return plain, ours, quantized


def measure(size: int, gradients: bool) -> dict[str, float]:
    plain, ours, quantized = layers(size)
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16, requires_grad=gradients)
    with torch.set_grad_enabled(gradients), tejit.autocast(recipe=tejit.recipe.Float8CurrentScaling()):
        ours(x, is_first_microbatch=True)
        times = medians(
            {
                "nn.Linear": lambda: plain(x),
                "quantized parameter": lambda: quantized(x),
                "cached weight": lambda: ours(x, is_first_microbatch=False),
                "weight quantized in the call": lambda: ours(x),
            }
        )
    found = {f"{name}_us": value for name, value in times.items()}
    found.update({f"{name}_ratio": value / times["nn.Linear"] for name, value in times.items() if name != "nn.Linear"})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="rows, in_features and out_features")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    results = {}
    for gradients in (True, False):
        name = "with gradients" if gradients else "without gradients"
        results[name] = found = measure(options.size, gradients)
        for key in [key for key in found if key.endswith("_us")]:
            ratio = found.get(key.replace("_us", "_ratio"), 1.0)
            print(f"{name}, {key.removesuffix('_us')}: {found[key]:.1f} us, {ratio:.2f} times nn.Linear")
    write(options.out, {"benchmark": "gpu_host_time", "size": options.size, "results": results})


if __name__ == "__main__":
    main()
