"""Results of finished runs: files, one a command, that are merged into one table and one picture."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lm.recipes import BASELINE
from lm.training import History

FORMAT = 1


class ResultsError(Exception):
    """A file of results that cannot be used; the text says why."""


@dataclass(frozen=True)
class Result:
    """A finished run: its recipe's name, what stands in the table and the picture, its seed and its curves."""

    recipe: str
    label: str
    seed: int
    history: History


@dataclass(frozen=True)
class Results:
    """Finished runs of one model on one text; `entropy` is the unigram entropy in nats per byte."""

    settings: dict[str, Any]
    entropy: float
    runs: tuple[Result, ...]

    @property
    def baseline(self) -> Result | None:
        """What the others are measured against: the first bf16 run."""
        return next((run for run in self.runs if run.recipe == BASELINE), None)

    def save(self, path: Path) -> None:
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps({"format": FORMAT} | asdict(self), indent=1), encoding="utf-8")
        os.replace(unfinished, path)


def load(path: Path) -> Results:
    """Raises ResultsError: there is no file of results."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ResultsError(f"{path} has format {content['format']}, this program reads {FORMAT}")
        runs = [Result(**(run | {"history": History(**run["history"])})) for run in content["runs"]]
        return Results(content["settings"], content["entropy"], tuple(runs))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} is no file of results ({type(error).__name__}: {error})") from error


def merge(paths: Sequence[Path]) -> Results:
    """The runs of several files in one; they may differ by recipe and seed.

    Raises:
        ResultsError: a file cannot be read, or was made with another model, text or number of steps.
    """
    first, *others = [load(path) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        for name, wanted in first.settings.items():
            if other.settings.get(name) != wanted:
                raise ResultsError(
                    f"{path} was made with {name} = {other.settings.get(name)}, {paths[0]} with {name} = {wanted}"
                )
    return Results(first.settings, first.entropy, tuple(run for each in (first, *others) for run in each.runs))
