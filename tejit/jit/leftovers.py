"""Names of temporary files and folders that tell who made them, and removing those whose maker was killed."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import time
from collections.abc import Sequence

BUILD = "tejit-build-"
PRIVATE = "tejit-private-"
STAGING = ".staging-"
BAD = ".bad-"
TRIAL = ".trial-"
NOTE = ".note-"

_FORM = r"([0-9a-f]{12})-(\d+)-[0-9a-f]{12}"
# For what cannot be asked about: made on another machine of a shared home, or by a process number now in use again.
_OLD = 86400.0


@functools.cache
def _machine() -> str:
    # A process number means something only until the machine starts again, and inside one container.
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]
    except OSError:
        return "0" * 12


def new_name(prefix: str) -> str:
    """A name that nobody else uses, with its maker in it."""
    return f"{prefix}{_machine()}-{os.getpid()}-{os.urandom(6).hex()}"


def sweep(folder: str, prefixes: Sequence[str]) -> None:
    """Remove what this user's killed processes left in `folder` under one of the prefixes."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        for prefix in prefixes:
            match = re.fullmatch(_FORM, name[len(prefix) :]) if name.startswith(prefix) else None
            if match and _is_left(os.path.join(folder, name), match[1], match[2]):
                remove(os.path.join(folder, name))


def _is_left(path: str, machine: str, pid: str) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    if info.st_uid != os.getuid():
        return False
    if machine == _machine() != "0" * 12 and not os.path.exists(f"/proc/{pid}"):
        return True
    return time.time() - info.st_mtime > _OLD


def remove(path: str) -> None:
    """Remove a file, a link or a whole directory as far as possible."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        os.unlink(path)
    except OSError:
        pass
