"""Cache entries: found and proved whole, published in one step, moved out of the way when they are bad."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from . import leftovers
from .parts import SCHEMA, Part
from .roots import Root, distrust, distrust_root, distrust_stat, explicit_error

LIBRARY = "tejit.so"
CUBIN = "tejit.cubin"
MANIFEST = "manifest.json"
LOG = "build.log"
_MANIFEST_LIMIT = 1 << 20


class Entry(NamedTuple):
    """A compiled part that is on disk and proved whole."""

    folder: str
    file: str
    manifest: dict[str, Any]
    root: Root | None  # None: a private build of this process

    @property
    def is_cubin(self) -> bool:
        return self.file.endswith(".cubin")


class Found(NamedTuple):
    """What a look-up came to: the entry, if there is one, and what it had to pass over."""

    entry: Entry | None = None
    damaged: tuple[tuple[str, str], ...] = ()  # (folder, reason)
    skipped: tuple[tuple[str, str], ...] = ()  # roots that are not trusted: (path, reason)


class Damaged(Exception):
    """An entry is there but is not what it says it is."""


def find(roots: Iterable[Root], part: Part, avoid: Collection[str] = ()) -> Found:
    """Look `part` up in `roots`. Reads only.

    Args:
        avoid: entry folders that are known to be of no use.

    Raises:
        CacheDirError: TEJIT_CACHE_DIR is not trusted.
    """
    damaged: list[tuple[str, str]] = []
    skipped: list[tuple[str, str]] = []
    for root in roots:
        reason = distrust_root(root)
        if reason:
            if root.explicit:
                raise explicit_error(root, reason)
            skipped.append((root.path, reason))
            continue
        folder = os.path.join(root.store, part.key)
        if folder in avoid:
            continue
        try:
            entry = open_entry(folder, part, root)
            return Found(entry, tuple(damaged), tuple(skipped))
        except FileNotFoundError as error:
            if os.path.lexists(folder):
                damaged.append((folder, f"{os.path.basename(error.filename or folder)} is missing"))
        except OSError as error:
            damaged.append((folder, error.strerror or str(error)))
        except Damaged as error:
            damaged.append((folder, str(error)))
    return Found(None, tuple(damaged), tuple(skipped))


def open_entry(folder: str, part: Part, root: Root | None) -> Entry:
    """Read the entry in `folder` and prove it whole.

    Raises:
        FileNotFoundError: there is none, or a file of it is missing.
        OSError: it cannot be read.
        Damaged: it is not what its manifest says, or somebody else could have written it.
    """
    prebuilt = root is not None and root.prebuilt
    reason = distrust(folder, prebuilt=prebuilt)
    if reason:
        raise Damaged(reason)
    try:
        manifest = json.loads(_read(os.path.join(folder, MANIFEST), prebuilt, _MANIFEST_LIMIT))
    except ValueError as error:
        raise Damaged(f"{MANIFEST} cannot be parsed") from error
    if not isinstance(manifest, dict):
        raise Damaged(f"{MANIFEST} holds no object")
    for name, expected in (("schema", SCHEMA), ("key", part.key), ("part", part.name)):
        if manifest.get(name) != expected:
            raise Damaged(f"{MANIFEST}: {name} is {manifest.get(name)!r} instead of {expected!r}")
    file = manifest.get("file")
    if file not in (LIBRARY, CUBIN) or (part.is_host and file != LIBRARY):
        raise Damaged(f"{MANIFEST}: file is {file!r}")
    path = os.path.join(folder, file)
    data = _read(path, prebuilt)
    if len(data) != manifest.get("size"):
        raise Damaged(f"{file} has {len(data)} bytes instead of {manifest.get('size')}")
    if hashlib.sha256(data).hexdigest() != manifest.get("sha256"):
        raise Damaged(f"{file} does not match its checksum")
    return Entry(folder, path, manifest, root)


def _read(path: str, prebuilt: bool, limit: int | None = None) -> bytes:
    # O_NOFOLLOW: a link inside an entry may point to what somebody else can write.
    # O_NONBLOCK: a named pipe in its place must not hang the import.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        info = os.fstat(file.fileno())
        name = os.path.basename(path)
        if not stat.S_ISREG(info.st_mode):
            raise Damaged(f"{name} is no regular file")
        reason = distrust_stat(info, prebuilt=prebuilt)
        if reason:
            raise Damaged(f"{name}: {reason}")
        if limit is not None and info.st_size > limit:
            raise Damaged(f"{name} has {info.st_size} bytes")
        return file.read()


def publish(built: str, log: str, manifest: dict[str, Any], part: Part, root: Root) -> Entry:
    """Put a built file into the cache under its key, in one step, and return the entry that is there then.

    Whoever comes second uses the first one's entry, and its own copy where that is not visible yet (NFS).

    Raises:
        OSError: the root cannot take it (disk full, gone, read-only).
    """
    staging = os.path.join(root.store, leftovers.new_name(leftovers.STAGING))
    final = os.path.join(root.store, part.key)
    os.mkdir(staging, 0o700)
    try:
        copy(built, os.path.join(staging, str(manifest["file"])))
        copy(log, os.path.join(staging, LOG))
        write_file(os.path.join(staging, MANIFEST), json.dumps(manifest, indent=1, sort_keys=True).encode())
        _sync_folder(staging)
        for _ in range(3):
            try:
                os.rename(staging, final)
            except OSError:
                if not os.path.lexists(final):
                    raise
            else:
                _sync_folder(root.store)
                return open_entry(final, part, root)
            try:
                return open_entry(final, part, root)
            except (OSError, Damaged):
                move_aside(final)
        raise OSError(f"{final} cannot be replaced")
    finally:
        leftovers.remove(staging)


def move_aside(folder: str) -> None:
    """Take an entry out of its place, at once for all who look, and remove it as far as possible."""
    bad = os.path.join(os.path.dirname(folder), leftovers.new_name(leftovers.BAD))
    try:
        os.rename(folder, bad)
    except FileNotFoundError:
        return
    leftovers.remove(bad)


def write_file(path: str, data: bytes) -> None:
    """Write a new file for its owner alone, and do not return before the disk has it."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def copy(source: str, target: str) -> None:
    """`write_file` with the bytes of another file."""
    with open(source, "rb") as data:
        write_file(target, data.read())


def _sync_folder(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        # Some file systems cannot; the rename is still atomic for those who look.
        pass
    finally:
        os.close(descriptor)
