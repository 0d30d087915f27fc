"""The text: the Python standard library's own source as bytes, split by file into training and validation."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

# Installed packages are not the standard library, and its test suites are left out in many installations.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "idlelib"})
# Without a limit one generated file (pydoc_data/topics.py) would be a sixth of everything it falls into.
MAX_BYTES_PER_FILE = 100_000
VALIDATION_SHARE = 0.05


class TextError(Exception):
    """There is no text to train on; the message says where it was looked for."""


@dataclass(frozen=True)
class Text:
    """Both splits as uint8 tensors of shape (bytes,), the number of files read, and a digest of all of it."""

    train: Tensor
    validation: Tensor
    files: int
    digest: str

    def to(self, device: torch.device) -> Text:
        """The same text on a device, so that a step sends the places of its windows there and not the windows."""
        return replace(self, train=self.train.to(device), validation=self.validation.to(device))


def is_validation(path: str) -> bool:
    """Whether the file at this relative path (with forward slashes) is held out; the path alone decides."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") < VALIDATION_SHARE * 2**32


def source_files(root: Path) -> list[str]:
    """The relative paths of the `.py` files under `root`, in one order on every machine."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        here = Path(folder).relative_to(root)
        found += [(here / name).as_posix() for name in names if name.endswith(".py")]
    return sorted(found)


def read_text(root: Path | None = None) -> Text:
    """Read the `.py` files under `root`, by default the standard library of the running Python.

    Raises:
        TextError: there is no text there, as in a Python that was installed without its sources.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    splits: dict[bool, list[bytes]] = {False: [], True: []}
    for path in source_files(root):
        with open(root / path, "rb") as file:
            splits[is_validation(path)].append(file.read(MAX_BYTES_PER_FILE))
    train, validation = b"\n".join(splits[False]), b"\n".join(splits[True])
    if min(len(train), len(validation)) < MAX_BYTES_PER_FILE:
        raise TextError(
            f"{root} holds {len(train)} bytes of Python source to train on and {len(validation)} to validate "
            f"on, at least {MAX_BYTES_PER_FILE} of each are needed: use a Python installed with its .py files"
        )
    return Text(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        validation=torch.frombuffer(bytearray(validation), dtype=torch.uint8),
        files=sum(map(len, splits.values())),
        digest=hashlib.sha256(train + validation).hexdigest()[:16],
    )


def windows_at(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """The windows of `context + 1` bytes that begin at `starts`: int64, (len(starts), context + 1), where `text` is."""
    starts = starts.to(text.device, non_blocking=True)
    return text[starts[:, None] + torch.arange(context + 1, device=text.device)].long()


def training_batch(text: Text, batch: int, context: int, generator: torch.Generator) -> Tensor:
    """`batch` windows at places drawn from `generator`, the CPU's, whose state alone decides every later batch."""
    starts = torch.randint(len(text.train) - context, (batch,), generator=generator)
    return windows_at(text.train, starts, context)


def validation_windows(text: Text, count: int, context: int) -> Tensor:
    """`count` windows spread evenly over the validation text, the same ones every time."""
    last = len(text.validation) - context - 1
    starts = torch.arange(count) * last // max(1, count - 1)
    return windows_at(text.validation, starts, context)


def unigram_entropy(text: Text, windows: Tensor) -> float:
    """Nats per byte that knowing only the training text's byte frequencies costs on `windows`' targets.

    A model worth the name ends far below it. Counts start at one, so that no byte is impossible.
    """
    counts = torch.bincount(text.train.int(), minlength=256).double() + 1
    return -(counts / counts.sum()).log()[windows[:, 1:]].mean().item()
