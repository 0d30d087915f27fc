"""What the benchmarks share: CUDA timing, versions, the dated JSON file."""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
import random
import statistics
from collections.abc import Callable

import torch

Call = Callable[[], object]


def replay_medians(calls: dict[str, Call], repeats: int = 30, per_graph: int = 10) -> dict[str, float]:
    """Microseconds a call: medians of CUDA-graph replays, the calls interleaved so that all see the same clocks.

    Each timed replay follows an untimed one of the same graph: the data that a call leaves in the cache, still to be
    written to memory, is then paid for by the call itself and not by whatever comes next.
    """
    graphs = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(per_graph):
                call()
        graphs[name].replay()
    times = _interleaved({name: graph.replay for name, graph in graphs.items()}, repeats, before=True)
    return {name: 1e3 * statistics.median(values) / per_graph for name, values in times.items()}


def event_medians(calls: dict[str, Call], repeats: int = 15, in_a_row: int = 8) -> dict[str, float]:
    """Microseconds a call by CUDA events, without graphs: what a training loop sees, where the host runs ahead."""

    def several(call: Call) -> Call:
        return lambda: [call() for _ in range(in_a_row)]

    for call in calls.values():
        several(call)()
    times = _interleaved({name: several(call) for name, call in calls.items()}, repeats)
    return {name: 1e3 * statistics.median(values) / in_a_row for name, values in times.items()}


def _interleaved(calls: dict[str, Call], repeats: int, before: bool = False) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    torch.cuda.synchronize()
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)  # what a call leaves in the cache serves the next one: not always the same one
        for name in order:
            call = calls[name]
            if before:
                call()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


def environment() -> dict[str, str]:
    """Versions and hardware, for the record."""
    import tejit

    facts = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "tejit": tejit.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
    return facts


def write(path: pathlib.Path | None, result: dict[str, object]) -> None:
    """Write a result with its environment as JSON, where a path is given."""
    if path is not None:
        path.write_text(json.dumps({**environment(), **result}, indent=1) + "\n", encoding="utf-8")
