"""FP8 current scaling on the CPU against a copy of the same tensor and against torch.compile.

    python -m tests.benchmarks.cpu_fp8_current [--threads 2] [--out results.json]

Times, interleaved in one process: `y.copy_(x)` into memory that exists, the op
`torch.ops.tejit.fp8_quantize_current` with the bytes in x's order and with both orders, and torch.compile of
the same numerics. What counts are the ratios to the copy: it sees the same clock, neighbours and memory.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch

FP8 = {"e4m3": (0, torch.float8_e4m3fn), "e5m2": (1, torch.float8_e5m2)}
Call = Callable[[], object]


def keep_freed_memory() -> bool:
    """Tells glibc's malloc not to give freed memory back to the system. False where malloc is another one.

    An op allocates its outputs. By default 16 MiB that are freed go back to the system after many a call, and
    the next call pays for thousands of page faults, several times what any kernel here takes.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(m_mmap_threshold, 32 << 20)) and bool(mallopt(m_trim_threshold, (1 << 31) - 1))


def plain_quantize(x: torch.Tensor, dtype: torch.dtype, transpose: bool) -> tuple[torch.Tensor, ...]:
    """fp8_quantize_current (no power of two, eps 0) in plain torch, for torch.compile to fuse.

    Only the rules for NaN are left out: they made the compiled code four times slower, and x has no NaN.
    """
    largest = torch.finfo(dtype).max
    amax = x.abs().amax().float()
    scale = torch.div(torch.full_like(amax, largest), amax)
    scale = torch.where(scale.isinf(), torch.finfo(torch.float32).max, scale)
    scale = torch.where((amax > 0) & amax.isfinite(), scale, 1.0)
    data = (x.float() * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    if not transpose:
        return data, scale.reciprocal()
    return data, data.t().contiguous(), scale.reciprocal()


def interleaved(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """Seconds of `repeats` calls of each, one after the other in turn; the first changes every round."""
    names = list(calls)
    for name in names:
        for _ in range(3):
            calls[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            begin = time.perf_counter()
            result = calls[name]()
            seconds[name].append(time.perf_counter() - begin)
            del result
    return seconds


def summary(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Milliseconds, and ratios to `base`: of the medians, of the minima, and the median over the rounds."""
    reference = seconds[base]
    return {
        name: {
            "median_ms": 1e3 * statistics.median(values),
            "min_ms": 1e3 * min(values),
            "ratio_of_medians": statistics.median(values) / statistics.median(reference),
            "ratio_of_minima": min(values) / min(reference),
            "median_of_ratios": statistics.median(a / b for a, b in zip(values, reference, strict=True)),
        }
        for name, values in seconds.items()
    }


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--fp8", choices=list(FP8), default="e4m3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--fresh-memory", action="store_true", help="let malloc return freed outputs to the system")
    parser.add_argument("--out", type=pathlib.Path, help="write the result to this file as JSON")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    kept = False if options.fresh_memory else keep_freed_memory()
    import tejit  # after the memory setting, and not when only --help is wanted

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    code, dtype = FP8[options.fp8]
    x = torch.randn(options.rows, options.columns).mul_(torch.rand(options.rows, 1)).to(getattr(torch, options.dtype))
    y = torch.empty_like(x)
    quantize = torch.ops.tejit.fp8_quantize_current

    calls: dict[str, Call] = {
        "copy": lambda: y.copy_(x),
        "tejit rowwise": lambda: quantize(x, code, True, False, False, 0.0, None),
        "tejit both": lambda: quantize(x, code, True, True, False, 0.0, None),
    }
    differing: dict[str, int] = {}
    if not options.no_compile:
        compiled = torch.compile(plain_quantize, fullgraph=True, dynamic=False)
        calls["compile rowwise"] = lambda: compiled(x, dtype, False)
        calls["compile both"] = lambda: compiled(x, dtype, True)
        data, transpose, _ = quantize(x, code, True, True, False, 0.0, None)
        other_data, other_transpose, _ = compiled(x, dtype, True)
        differing = {
            "rowwise": int((data != other_data).sum()),
            "columnwise": int((transpose != other_transpose).sum()),
        }

    result = summary(interleaved(calls, options.repeats), base="copy")
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "tejit": tejit.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "cpu": {
            "name": cpu_name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": options.threads,
            "load": list(os.getloadavg()),
        },
        "shape": [options.rows, options.columns],
        "dtype": options.dtype,
        "fp8": options.fp8,
        "repeats": options.repeats,
        "freed_memory_kept": kept,
        "bytes_unlike_compile": differing,
        "results": result,
    }
    print(
        f"{options.rows}x{options.columns} {options.dtype} -> {options.fp8}, {options.threads} threads,"
        f" {report['cpu']['name']} ({report['cpu']['capability']}), torch {torch.__version__}"
    )
    print(f"{'':16} {'median ms':>10} {'min ms':>8} {'/copy: medians':>15} {'minima':>7} {'in a round':>11}")
    for name, row in result.items():
        print(
            f"{name:16} {row['median_ms']:10.3f} {row['min_ms']:8.3f} {row['ratio_of_medians']:15.2f}"
            f" {row['ratio_of_minima']:7.2f} {row['median_of_ratios']:11.2f}"
        )
    if differing:
        print(f"bytes that differ from torch.compile's: {differing}")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
