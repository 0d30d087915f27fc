"""What is left when training is over: a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure

from lm.recipes import BASELINE, RECIPES
from lm.training import History


def table(histories: Mapping[str, History], entropy: float) -> str:
    """The result as text, one row a recipe; `entropy` is the unigram entropy in nats per byte."""
    baseline = histories.get(BASELINE)
    header = ("recipe", "validation loss", f"against {RECIPES[BASELINE].label}", "tokens/s")
    rows = [header]
    for name, history in histories.items():
        loss, speed = history.validation[-1], history.bytes_per_second
        difference = "-"
        if baseline is not None and history is not baseline:
            difference = f"{100 * (loss / baseline.validation[-1] - 1):+.2f} %"
        rows.append(
            (
                f"{name} ({RECIPES[name].label})",
                f"{loss:.4f}",
                difference,
                "-" if math.isnan(speed) else f"{speed:,.0f}",
            )
        )
    rows.append(("byte frequencies alone", f"{entropy:.4f}", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    lines.append(
        "Losses are nats per byte, a token is a byte. Last row: the unigram entropy of the text, "
        "the loss of guessing by byte frequency."
    )
    return "\n".join(lines)


def smoothed(values: Sequence[float]) -> list[float]:
    """A running mean with a memory of about 3 % of the curve, without the bias of its first value."""
    keep = 1 - 1 / max(1.0, 0.03 * len(values))
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        result.append(total / weight)
    return result


def draw(histories: Mapping[str, History], entropy: float, path: Path) -> None:
    """Save the curves: losses above, below them the difference to the baseline where there is one."""
    baseline = histories.get(BASELINE)
    compared = {name: history for name, history in histories.items() if baseline and history is not baseline}
    figure = Figure(figsize=(8.5, 7.5 if compared else 5.5), dpi=120, layout="constrained")
    if compared:
        losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    else:
        losses, differences = figure.subplots(), None

    colors = {name: f"C{index}" for index, name in enumerate(histories)}
    for (name, history), marker in zip(histories.items(), cycle("osD^v")):
        label, color = RECIPES[name].label, colors[name]
        steps = range(1, len(history.train) + 1)
        losses.plot(steps, history.train, color=color, alpha=0.15, linewidth=0.8)
        losses.plot(steps, smoothed(history.train), color=color, linewidth=1.3, label=f"{label}, train")
        losses.plot(
            history.validation_steps,
            history.validation,
            color=color,
            linestyle="--",
            marker=marker,
            markerfacecolor="none",
            label=f"{label}, validation ({history.validation[-1]:.3f})",
        )
    losses.axhline(entropy, color="0.4", linestyle=":", label=f"unigram entropy ({entropy:.3f})")
    # The first losses are near ln 256 = 5.5 and would flatten everything after them.
    lowest = min(min(history.train + history.validation) for history in histories.values())
    losses.set_ylim(lowest - 0.1, max(entropy, lowest) + 0.4)
    losses.set_ylabel("loss, nats per byte")
    losses.set_title("Byte-level transformer on the Python standard library")
    losses.legend()
    losses.grid(alpha=0.25)

    if baseline is not None and differences is not None:
        reference = dict(zip(baseline.validation_steps, baseline.validation, strict=True))
        for name, history in compared.items():
            percent = [
                100 * (loss / reference[step] - 1)
                for step, loss in zip(history.validation_steps, history.validation, strict=True)
            ]
            differences.plot(
                history.validation_steps, percent, color=colors[name], marker="o", label=RECIPES[name].label
            )
        differences.axhline(0, color=colors[BASELINE], linewidth=1)
        differences.set_ylabel(f"validation loss\nagainst {RECIPES[BASELINE].label}, %")
        differences.legend()
        differences.grid(alpha=0.25)
    (losses if differences is None else differences).set_xlabel("step")
    figure.savefig(path)
