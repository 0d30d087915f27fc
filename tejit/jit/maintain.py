"""Keeping the cache small: what lies in it, what is too old or too much, and emptying it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass

from . import cache
from .roots import Root, distrust_root
from .settings import Settings

OLDEST = 60 * 86400.0
YOUNGEST = 3600.0
_KEY_LENGTH = 64


@dataclass(frozen=True)
class Listed:
    """An entry as it lies on disk; nothing about it is proved."""

    folder: str
    key: str
    part: str
    builder: str
    size: int  # bytes on disk of all its files
    used: float  # time.time() of the build or of the last load, whichever is later


def entries(root: Root) -> list[Listed]:
    """The entries of a root, the least recently used first; none where it is not trusted."""
    if distrust_root(root) is not None:
        return []
    try:
        names = os.listdir(root.store)
    except OSError:
        return []
    found = [_describe(root.store, name) for name in names if _is_key(name)]
    return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.used)


def trim(root: Root, settings: Settings, keep: Collection[str] = ()) -> list[Listed]:
    """Remove entries unused for 60 days, and the oldest beyond TEJIT_CACHE_MAX_MB; none under an hour old.

    Args:
        keep: entry folders that stay.
    """
    now, removed = time.time(), []
    there = entries(root)
    total = sum(entry.size for entry in there)
    for entry in there:
        age = now - entry.used
        if age < YOUNGEST or entry.folder in keep:
            continue
        if age > OLDEST or total > settings.cache_max_bytes:
            try:
                cache.move_aside(entry.folder)
            except OSError:
                continue
            total -= entry.size
            removed.append(entry)
    _sweep(root, now)
    return removed


def clear(root: Root) -> list[Listed]:
    """Remove every entry of a root, whatever its age."""
    removed = []
    for entry in entries(root):
        try:
            cache.move_aside(entry.folder)
        except OSError:
            continue
        removed.append(entry)
    _sweep(root, time.time())
    return removed


def _is_key(name: str) -> bool:
    return len(name) == _KEY_LENGTH and all(c in "0123456789abcdef" for c in name)


def _describe(store: str, name: str) -> Listed | None:
    folder = os.path.join(store, name)
    part, builder, size, used = "?", "?", 0, 0.0
    try:
        with open(os.path.join(folder, cache.MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)
        part, builder = str(manifest["part"]), str(manifest["builder"])
        used = float(manifest["built"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        used = max(used, os.lstat(folder).st_mtime)
        for file_name in os.listdir(folder):
            info = os.lstat(os.path.join(folder, file_name))
            size += info.st_size
            if file_name in (cache.LIBRARY, cache.CUBIN):
                used = max(used, info.st_atime)
    except OSError:
        if not os.path.lexists(folder):
            return None
    return Listed(folder, name, part, builder, size, used)


def _sweep(root: Root, now: float) -> None:
    """Remove what killed builders left behind in the root."""
    try:
        names = os.listdir(root.store)
    except OSError:
        return
    for name in names:
        path = os.path.join(root.store, name)
        if name.startswith((".staging-", ".bad-", ".trial-", "tejit-build-")):
            try:
                if now - os.lstat(path).st_mtime > YOUNGEST:
                    cache.remove(path)
            except OSError:
                continue
