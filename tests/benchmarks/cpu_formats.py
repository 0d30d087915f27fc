"""Every format's quantization on the CPU against a copy of the same tensor and against torch.compile.

    python -m tests.benchmarks.cpu_formats [--formats mxfp8 ...] [--threads 2] [--no-compile] [--out results.json]

Times, interleaved in one process: `y.copy_(x)` into memory that exists, each format's op rowwise and in both
directions, and torch.compile of its pure-torch reference, rowwise. What counts are the ratios to the copy: it sees
the same clock, neighbours and memory.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks.cpu_fp8_current import Call, cpu_name, interleaved, keep_freed_memory, summary
from tests.benchmarks.measure import environment

#: By format: the op's call, and its reference's, of x and whether the columnwise direction is wanted too.
Format = tuple[Callable[[torch.Tensor, bool], Any], Callable[[torch.Tensor, bool], Any]]


def formats() -> dict[str, Format]:
    from tejit.kernels.fp8.reference import quantize_current
    from tejit.kernels.fp8_block.reference import quantize as quantize_blocks
    from tejit.kernels.mxfp8.reference import quantize as quantize_mxfp8

    ops = torch.ops.tejit
    return {
        "fp8 current": (
            lambda x, both: ops.fp8_quantize_current(x, 0, True, both, False, 0.0, None),
            lambda x, both: quantize_current(x, 0, True, both, False, 0.0, None),
        ),
        "fp8 block 1D": (
            lambda x, both: ops.fp8_block_quantize(x, 0, 1, True, both, True, 0.0),
            lambda x, both: quantize_blocks(x, 0, 1, True, both, True, 0.0),
        ),
        "fp8 block 2D": (
            lambda x, both: ops.fp8_block_quantize(x, 0, 2, True, both, True, 0.0),
            lambda x, both: quantize_blocks(x, 0, 2, True, both, True, 0.0),
        ),
        "mxfp8": (
            lambda x, both: ops.mxfp8_quantize(x, 0, True, both, False, False),
            lambda x, both: quantize_mxfp8(x, 0, True, both, False, False),
        ),
        "mxfp8 2D": (
            lambda x, both: ops.mxfp8_quantize(x, 0, True, both, True, False),
            lambda x, both: quantize_mxfp8(x, 0, True, both, True, False),
        ),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", nargs="+", help="some of them; default all")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--fresh-memory", action="store_true", help="let malloc return freed outputs to the system")
    parser.add_argument("--out", type=pathlib.Path, help="write the result to this file as JSON")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    kept = False if options.fresh_memory else keep_freed_memory()
    import tejit  # noqa: F401 - after the memory setting, and not when only --help is wanted

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    x = torch.randn(options.rows, options.columns).mul_(torch.rand(options.rows, 1)).to(getattr(torch, options.dtype))
    y = torch.empty_like(x)
    known = formats()
    calls: dict[str, Call] = {"copy": lambda: y.copy_(x)}
    for name in options.formats or known:
        op, reference = known[name]
        calls[f"{name} rowwise"] = lambda op=op: op(x, False)  # type: ignore[misc]
        calls[f"{name} both"] = lambda op=op: op(x, True)  # type: ignore[misc]
        if not options.no_compile:
            compiled = torch.compile(reference, fullgraph=True, dynamic=False)
            calls[f"{name} rowwise, compiled"] = lambda compiled=compiled: compiled(x, False)  # type: ignore[misc]
    result = summary(interleaved(calls, options.repeats), base="copy")
    print(f"{options.rows}x{options.columns} {options.dtype}, {options.threads} threads, {cpu_name()}", end="")
    print(f" ({torch.backends.cpu.get_cpu_capability()}), torch {torch.__version__}")
    print(f"{'':32} {'median ms':>10} {'min ms':>8} {'/copy: medians':>15} {'minima':>7} {'in a round':>11}")
    for name, row in result.items():
        print(
            f"{name:32} {row['median_ms']:10.3f} {row['min_ms']:8.3f} {row['ratio_of_medians']:15.2f}"
            f" {row['ratio_of_minima']:7.2f} {row['median_of_ratios']:11.2f}"
        )
    if options.out is not None:
        report = {
            **environment(),
            "cpu": {"name": cpu_name(), "capability": torch.backends.cpu.get_cpu_capability()},
            "threads": options.threads,
            "shape": [options.rows, options.columns],
            "dtype": options.dtype,
            "repeats": options.repeats,
            "freed_memory_kept": kept,
            "results": result,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
