"""NVFP4 on the CPU against a copy of the same tensor and against torch.compile of its reference.

    python -m tests.benchmarks.cpu_nvfp4 [--threads 2] [--no-compile] [--out results.json]

Times, interleaved in one process: `y.copy_(x)` into memory that exists, and the op `torch.ops.tejit.nvfp4_quantize` by
mode and direction. What counts are the ratios to the copy: it sees the same clock, neighbours and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys

import torch

from tests.benchmarks.cpu_fp8_current import Call, cpu_name, interleaved, keep_freed_memory, summary
from tests.benchmarks.measure import environment

SIGNS = 0xD7E8
#: By name: directions, then rht, sign_mask, square, row_scaled, four_over_six, e4m3_max, swizzled.
MODES = {
    "rowwise": ((True, False), (False, SIGNS, False, False, 0, 448, False)),
    "rowwise 16x16": ((True, False), (False, SIGNS, True, False, 0, 448, False)),
    "both": ((True, True), (False, SIGNS, False, False, 0, 448, False)),
    "both rht": ((True, True), (True, SIGNS, False, False, 0, 448, False)),
    "rowwise stochastic": ((True, False), (False, SIGNS, False, False, 0, 448, False)),
    "rowwise 4over6": ((True, False), (False, SIGNS, False, False, 1, 256, False)),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=pathlib.Path, help="write the result to this file as JSON")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    keep_freed_memory()
    import tejit  # noqa: F401 - after the memory setting, and not when only --help is wanted
    from tejit.kernels.nvfp4 import reference

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    x = torch.randn(options.rows, options.columns).mul_(torch.rand(options.rows, 1)).to(getattr(torch, options.dtype))
    y = torch.empty_like(x)
    seed = torch.tensor([1, 2])

    def call(name: str) -> Call:
        directions, mode = MODES[name]
        drawn = seed if "stochastic" in name else None
        return lambda: torch.ops.tejit.nvfp4_quantize(x, *directions, *mode, drawn, None, None)

    calls: dict[str, Call] = {"copy": lambda: y.copy_(x), **{name: call(name) for name in options.modes}}
    if not options.no_compile:
        directions, mode = MODES["rowwise"]
        compiled = torch.compile(reference.quantize, fullgraph=True, dynamic=False)
        calls["compile rowwise"] = lambda: compiled(x, *directions, *mode, None, None, None)
    result = summary(interleaved(calls, options.repeats), base="copy")
    report = {
        **environment(),
        "cpu": {"name": cpu_name(), "threads": options.threads, "load": list(os.getloadavg())},
        "shape": [options.rows, options.columns],
        "dtype": options.dtype,
        "results": result,
    }
    print(f"{options.rows}x{options.columns} {options.dtype}, {options.threads} threads, {cpu_name()}")
    print(f"{'':20} {'median ms':>10} {'min ms':>8} {'/copy: medians':>15} {'minima':>7}")
    for name, row in result.items():
        print(
            f"{name:20} {row['median_ms']:10.3f} {row['min_ms']:8.3f} {row['ratio_of_medians']:15.2f}"
            f" {row['ratio_of_minima']:7.2f}"
        )
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
