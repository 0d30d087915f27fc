"""Checkpoints: one file for all runs, replaced as a whole, loadable with `weights_only=True`."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

FORMAT = 1


class CheckpointError(Exception):
    """A checkpoint that cannot be resumed from; the text says why and what to do."""


def save_checkpoint(path: Path, settings: dict[str, Any], runs: dict[str, dict[str, Any]]) -> None:
    """Write the run states by recipe so that `path` holds a whole checkpoint, old or new, at any moment."""
    unfinished = path.with_name(path.name + ".part")
    torch.save({"format": FORMAT, "settings": settings, "runs": runs}, unfinished)
    os.replace(unfinished, path)


def load_checkpoint(path: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The run states in `path`, on the CPU.

    Raises:
        CheckpointError: there is no file, it is not of this program, or it was made with other settings.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path} to resume: run without --resume first")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read ({first_line}): run without --resume") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of this program (format {FORMAT}): run without --resume")
    for name, wanted in settings.items():
        found = content["settings"].get(name)
        if found != wanted:
            raise CheckpointError(
                f"{path} was made with {name} = {found}, this run has {name} = {wanted}: "
                "give the same arguments, or run without --resume"
            )
    return content["runs"]
