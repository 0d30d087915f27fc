"""Every format and usage on the GPU against the fewest bytes that it must move, and against Transformer Engine.

    [TE_LIB=/path/libtransformer_engine.so] python -m tests.benchmarks.gpu_formats [--sizes 8192x8192 ...] [--out FILE]

The floor is the fewest bytes (x read once, twice where the amax of the whole tensor comes first; every output written
once) over the rate of a copy of the same tensor in the same run. Times are medians of CUDA-graph replays of the public
ops, all calls interleaved; input bfloat16. Exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

import tejit  # noqa: F401 - registers the ops
from tejit.format_info import E4M3, NVFP4_SIGN_MASK
from tests.benchmarks import te_library
from tests.benchmarks.measure import replay_medians, write

Call = Callable[[], tuple[torch.Tensor, ...]]
ROW, COL, BOTH = "rowwise", "columnwise", "both"
USAGES = {ROW: (True, False), COL: (False, True), BOTH: (True, True)}
#: How much slower than Transformer Engine's kernel ours may be.
PEER_BAR = 1.03


@dataclass
class Case:
    """One call, the bytes it cannot do without, the share of the copy rate it is held to, and its peer there."""

    call: Call
    reads: int
    share: float
    peer: str | None = None


def cases(x: torch.Tensor) -> dict[str, Case]:
    """Every format and usage over ``x``, ``(M, K)`` with both sides multiples of 128."""
    ops, code = torch.ops.tejit, E4M3.code
    scale, amax = torch.full((1,), 0.5, device=x.device), torch.zeros(1, device=x.device)
    seed = torch.tensor([1, 2], device=x.device)
    found: dict[str, Case] = {}
    for name, (row, col) in USAGES.items():
        usage = (row, col)
        peer = {ROW: "row", BOTH: "both"}.get(name)

        def add(
            label: str, call: Call, reads: int, share: float, te: str | None = None, name: str = name, peer=peer
        ) -> None:
            found[f"{label} {name}"] = Case(call, reads, share, f"{te} {peer}" if te and peer else None)

        add("delayed", lambda u=usage: ops.fp8_quantize_delayed(x, code, *u, scale, amax), 1, 0.8, "delayed")
        add("current", lambda u=usage: ops.fp8_quantize_current(x, code, *u, False, 0.0, None), 2, 0.8, "current")
        for dim in (1, 2):
            call = lambda u=usage, d=dim: ops.fp8_block_quantize(x, code, d, *u, True, 0.0)  # noqa: E731
            add(f"block {dim}D", call, 1, 0.8, f"block {dim}D")
        for dim, square in ((1, False), (2, True)):
            call = lambda u=usage, s=square: ops.mxfp8_quantize(x, code, *u, s, False)  # noqa: E731
            add(f"MXFP8 {dim}D", call, 1, 0.75)

        def nvfp4(rht: bool, square: bool, seeded: bool, u: tuple[bool, bool] = usage) -> Call:
            mask = NVFP4_SIGN_MASK if rht else 0
            given = seed if seeded else None
            return lambda: ops.nvfp4_quantize(x, *u, rht, mask, square, False, 0, 448, False, given, None, None)

        share = {ROW: 0.6}.get(name, 0.45)
        add("NVFP4", nvfp4(False, False, False), 2, share)
        add("NVFP4 2D", nvfp4(False, True, False), 2, share)
        add("NVFP4 SR", nvfp4(False, False, True), 2, 0.3)
        if col:
            add("NVFP4 RHT", nvfp4(True, False, False), 2, 0.45)
            add("NVFP4 RHT SR", nvfp4(True, False, True), 2, 0.3)
    return found


def measure(rows: int, columns: int, only: str, peer: te_library.TransformerEngine | None) -> dict[str, float]:
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    ours = {name: case for name, case in cases(x).items() if only in name}
    calls: dict[str, Callable[[], object]] = {"copy": lambda: y.copy_(x)}
    theirs = {}
    if peer is not None:
        theirs = {
            f"{name} {usage}": call
            for usage, both in (("row", False), ("both", True))
            for name, call in peer.calls(x, both).items()
        }
    for name, case in ours.items():
        calls[name] = case.call
        if case.peer in theirs:
            calls[f"TE {case.peer}"] = theirs[case.peer]
    times = replay_medians(calls)
    per_byte = times["copy"] / (2 * x.nbytes)
    result = {"copy TB/s": 2 * x.nbytes / times["copy"] / 1e6}
    print(f"{rows}x{columns}: copy {result['copy TB/s']:.2f} TB/s")
    for name, case in ours.items():
        # A round of outputs that are not kept apart counts as written once.
        written = sum(buffer.nbytes for buffer in case.call())
        floor = per_byte * (case.reads * x.nbytes + written)
        once = per_byte * (x.nbytes + written)
        result[f"{name} us"], result[f"{name} of the copy rate"] = times[name], floor / times[name]
        line = f"  {name:24} {times[name]:7.1f} us, {100 * floor / times[name]:5.1f}% of the copy rate"
        line += f" (bar {100 * case.share:.0f}%)"
        if case.reads > 1:
            result[f"{name} of the copy rate, x counted once"] = once / times[name]
            line += f", {100 * once / times[name]:.1f}% with x counted once"
        missed = floor / times[name] < case.share
        if f"TE {case.peer}" in times:
            ratio = times[name] / times[f"TE {case.peer}"]
            result[f"{name} over TE"] = ratio
            line += f", {ratio:.3f} of TE's {times[f'TE {case.peer}']:.1f} us (bar {PEER_BAR})"
            missed = missed or ratio > PEER_BAR
        result[f"{name} missed"] = float(missed)
        print(line + ("  MISSED" if missed else ""))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["8192x8192", "16384x8192"])
    parser.add_argument("--only", default="", help="formats whose name holds this text")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    peer = te_library.find()
    results = {}
    for size in options.sizes:
        rows, columns = map(int, size.split("x"))
        results[size] = measure(rows, columns, options.only, peer)
    write(options.out, {"benchmark": "gpu_formats", "peer": "Transformer Engine" if peer else None, "results": results})
    return int(any(value for found in results.values() for name, value in found.items() if name.endswith("missed")))


if __name__ == "__main__":
    sys.exit(main())
