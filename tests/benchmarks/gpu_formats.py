"""Every format and usage on the GPU against the fewest bytes that it must move, and against Transformer Engine.

    [TE_LIB=/path/libtransformer_engine.so] python -m tests.benchmarks.gpu_formats [--sizes 8192x8192 ...] [--out FILE]

The floor is the fewest bytes (x read once, twice where the amax of the whole tensor comes first; every output written
once) over the rate of a copy of the same tensor in the same run. Times are medians of CUDA-graph replays of the public
ops into given buffers, all calls interleaved; input bfloat16. Exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import tejit  # noqa: F401 - registers the ops
from tejit.format_info import E4M3, NVFP4_SIGN_MASK
from tests.benchmarks import te_library
from tests.benchmarks.measure import replay_medians, write

Call = Callable[[], object]
ROW, COL, BOTH = "rowwise", "columnwise", "both"
USAGES = {ROW: (True, False), COL: (False, True), BOTH: (True, True)}
#: How much slower than Transformer Engine's kernel ours may be.
PEER_BAR = 1.03


@dataclass
class Case:
    """One call, the bytes it cannot do without, the share of the copy rate it is held to, and its peer there."""

    call: Call
    written: int
    reads: int
    share: float
    peer: str | None = None


class Outputs:
    """Buffers that every call of a run writes into, Transformer Engine's too: none is favoured by where it writes."""

    def __init__(self, x: torch.Tensor) -> None:
        rows, columns = x.shape
        self.row = torch.empty(rows, columns, device=x.device, dtype=torch.uint8)
        self.col = torch.empty(columns, rows, device=x.device, dtype=torch.uint8)
        self.one = torch.empty(1, device=x.device)

    def like(self, sizes: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
        """Buffers as an op would return them (here for a call on the meta device), None for an absent one.

        The data of a direction is a part of ``row`` or ``col``; scales and maxima are their own.
        """
        result: list[torch.Tensor | None] = []
        for index, wanted in enumerate(sizes):
            if wanted.numel() == 0:
                result.append(None)
            elif index in (0, len(sizes) // 2) and wanted.dtype == torch.uint8:
                result.append((self.col if index else self.row).reshape(-1)[: wanted.numel()].view(wanted.shape))
            else:
                result.append(torch.empty(wanted.shape, dtype=wanted.dtype, device=self.one.device))
        return tuple(result)


def cases(x: torch.Tensor, out: Outputs) -> dict[str, Case]:
    """Every format and usage over ``x``, ``(M, K)`` with both sides multiples of 128."""
    ops, code = torch.ops.tejit, E4M3.code
    scale, amax = torch.full((1,), 0.5, device=x.device), torch.zeros(1, device=x.device)
    seed = torch.tensor([1, 2], device=x.device)
    shape = x.to("meta")
    found: dict[str, Case] = {}
    for name, (row, col) in USAGES.items():
        peer = {ROW: "row", BOTH: "both"}.get(name)

        def add(
            label: str,
            call: Call,
            buffers: tuple[torch.Tensor | None, ...],
            reads: int,
            share: float,
            te: str | None = None,
            name: str = name,
            peer: str | None = peer,
        ) -> None:
            written = sum(buffer.nbytes for buffer in buffers if buffer is not None)
            found[f"{label} {name}"] = Case(call, written, reads, share, f"{te} {peer}" if te and peer else None)

        data, transpose = (out.row if row else None), (out.col if col else None)
        call = partial(ops.fp8_quantize_delayed_out, x, code, scale, amax, None, data, transpose, out.one)
        add("delayed", call, (data, transpose), 1, 0.8, "delayed")
        call = partial(ops.fp8_quantize_current_out, x, code, False, 0.0, None, None, data, transpose, out.one)
        add("current", call, (data, transpose), 2, 0.8, "current")
        for dim in (1, 2):
            buffers = out.like(ops.fp8_block_quantize(shape, code, dim, row, col, True, 0.0))
            call = partial(ops.fp8_block_quantize_out, x, code, dim, True, 0.0, None, *buffers)
            add(f"block {dim}D", call, buffers, 1, 0.8, f"block {dim}D")
        for dim, square in ((1, False), (2, True)):
            buffers = out.like(ops.mxfp8_quantize(shape, code, row, col, square, False))
            call = partial(ops.mxfp8_quantize_out, x, code, square, False, None, *buffers)
            add(f"MXFP8 {dim}D", call, buffers, 1, 0.75)
        share = {ROW: 0.6}.get(name, 0.45)
        modes = {"": (False, False, False), " 2D": (False, True, False), " SR": (False, False, True)}
        if col:
            modes |= {" RHT": (True, False, False), " RHT SR": (True, False, True)}
        for mode, (rht, square, random) in modes.items():
            switches = (rht, NVFP4_SIGN_MASK if rht else 0, square, False, 0, 448, False)
            buffers = out.like(ops.nvfp4_quantize(shape, row, col, *switches, None, None, None))
            given = (seed if random else None, None, None, None)
            call = partial(ops.nvfp4_quantize_out, x, *switches, *given, *buffers)
            add(f"NVFP4{mode}", call, buffers, 2, 0.3 if random else share)
    return found


def measure(rows: int, columns: int, only: str, peer: te_library.TransformerEngine | None) -> dict[str, float]:
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    out = Outputs(x)
    ours = {name: case for name, case in cases(x, out).items() if only in name}
    calls: dict[str, Call] = {"copy": lambda: y.copy_(x)}
    theirs = {}
    if peer is not None:
        theirs = {
            f"{name} {usage}": call
            for usage, both in (("row", False), ("both", True))
            for name, call in peer.calls(x, out.row, out.col if both else None).items()
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
        floor = per_byte * (case.reads * x.nbytes + case.written)
        once = per_byte * (x.nbytes + case.written)
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
