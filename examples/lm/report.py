"""What is left when training is over: a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure

from lm.recipes import BASELINE, RECIPES
from lm.results import Result, Results

#: With more runs than this a picture shows validation losses only.
MANY = 3


def table(results: Results) -> str:
    """The result as text, one row a run."""
    baseline = results.baseline
    header = ("recipe", "validation loss", f"against {RECIPES[BASELINE].label}", "tokens/s")
    rows = [header]
    for run in results.runs:
        loss, speed = run.history.validation[-1], run.history.bytes_per_second
        difference = "-"
        if baseline is not None and run is not baseline:
            difference = f"{100 * (loss / baseline.history.validation[-1] - 1):+.2f} %"
        rows.append(
            (
                f"{run.recipe} ({label_of(run, results)})",
                f"{loss:.4f}",
                difference,
                "-" if math.isnan(speed) else f"{speed:,.0f}",
            )
        )
    rows.append(("byte frequencies alone", f"{results.entropy:.4f}", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    lines += spread(results)
    lines.append(
        "Losses are nats per byte, a token is a byte. Last row: the unigram entropy of the text, "
        "the loss of guessing by byte frequency."
    )
    return "\n".join(lines)


def label_of(run: Result, results: Results) -> str:
    """A run's label, with the seed where the runs differ by it."""
    return run.label if len({each.seed for each in results.runs}) == 1 else f"{run.label}, seed {run.seed}"


def spread(results: Results) -> list[str]:
    """A line on how far bf16 runs are apart that differ by their seed alone, where there are several."""
    runs = [run for run in results.runs if run.recipe == BASELINE]
    count = len({run.seed for run in runs})
    if count < 2:
        return []
    losses = [run.history.validation[-1] for run in runs]
    low, high = min(losses), max(losses)
    seeds = f"{count} seeds of {RECIPES[BASELINE].label}"
    return [f"{seeds}: {low:.4f} to {high:.4f}, {100 * (high / low - 1):.2f} % apart."]


def smoothed(values: Sequence[float]) -> list[float]:
    """A running mean with a memory of about 3 % of the curve, without the bias of its first value."""
    keep = 1 - 1 / max(1.0, 0.03 * len(values))
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        result.append(total / weight)
    return result


def draw(results: Results, path: Path) -> None:
    """Save the curves: losses above, below them the difference to the baseline where there is one."""
    baseline = results.baseline
    compared = [run for run in results.runs if baseline is not None and run is not baseline]
    figure = Figure(figsize=(8.5, 7.5 if compared else 5.5), dpi=120, layout="constrained")
    if compared:
        losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    else:
        losses, differences = figure.subplots(), None

    few = len(results.runs) <= MANY
    colors = {id(run): f"C{index % 10}" for index, run in enumerate(results.runs)}
    for run, marker in zip(results.runs, cycle("osD^v<>p")):
        label, color, history = label_of(run, results), colors[id(run)], run.history
        steps = range(1, len(history.train) + 1)
        if few:
            losses.plot(steps, history.train, color=color, alpha=0.15, linewidth=0.8)
            losses.plot(steps, smoothed(history.train), color=color, linewidth=1.3, label=f"{label}, train")
        losses.plot(
            history.validation_steps,
            history.validation,
            color=color,
            linestyle="--" if few else "-",
            marker=marker,
            markerfacecolor="none",
            label=f"{label}, validation ({history.validation[-1]:.3f})",
        )
    losses.axhline(results.entropy, color="0.4", linestyle=":", label=f"unigram entropy ({results.entropy:.3f})")
    # The first losses are near ln 256 = 5.5 and would flatten everything after them.
    lowest = min(min(run.history.train + run.history.validation) for run in results.runs)
    losses.set_ylim(lowest - 0.1, max(results.entropy, lowest) + 0.4)
    losses.set_ylabel("loss, nats per byte")
    losses.set_title("Byte-level transformer on the Python standard library")
    losses.legend(fontsize=None if few else "small")
    losses.grid(alpha=0.25)

    if baseline is not None and differences is not None:
        reference = dict(zip(baseline.history.validation_steps, baseline.history.validation, strict=True))
        for run in compared:
            percent = [
                100 * (loss / reference[step] - 1)
                for step, loss in zip(run.history.validation_steps, run.history.validation, strict=True)
            ]
            differences.plot(
                run.history.validation_steps, percent, color=colors[id(run)], marker="o", label=label_of(run, results)
            )
        differences.axhline(0, color=colors[id(baseline)], linewidth=1)
        differences.set_ylabel(f"validation loss\nagainst {RECIPES[BASELINE].label}, %")
        if few:
            differences.legend()
        differences.grid(alpha=0.25)
    (losses if differences is None else differences).set_xlabel("step")
    figure.savefig(path)
