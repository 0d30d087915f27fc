"""One builder a key and machine. The lock saves work: where it does not hold, a part is built twice."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from dataclasses import dataclass
from typing import Any

from . import leftovers
from .errors import CompileError
from .roots import Root, distrust, own_temporary
from .settings import Settings


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    pid: int
    label: str
    since: float  # time.time() of the start

    def __str__(self) -> str:
        return f"pid {self.pid} (building {self.label} since {max(0.0, time.time() - self.since):.0f} s)"


class BuildLock:
    """A lock on one key, in the temporary directory, else inside the cache root, else none at all."""

    def __init__(self, root: Root | None, key: str, label: str, settings: Settings) -> None:
        self._label = label
        self._tools = _tools(settings)
        self._lock: Any = None
        self.held = False
        where = hashlib.sha256((root.path if root else "").encode()).hexdigest()[:16]
        self._paths = []
        own = own_temporary()
        if own is not None and _private_folder(own) and _private_folder(os.path.join(own, "locks")):
            self._paths.append(os.path.join(own, "locks", f"{where}-{key}.lock"))
        if root is not None and _private_folder(os.path.join(root.store, ".locks")):
            self._paths.append(os.path.join(root.store, ".locks", f"{key}.lock"))

    @property
    def path(self) -> str | None:
        """The lock file in use, None where nothing can be locked."""
        return self._paths[0] if self._paths else None

    def try_acquire(self) -> bool:
        """Take the lock if it is free. Where nothing can be locked: True, and `held` stays False."""
        from filelock import Timeout

        while self._paths:
            try:
                if self._lock is None:
                    self._lock = _file_lock(self._paths[0])
                self._lock.acquire(timeout=0)
            except Timeout:
                return False
            except (OSError, NotImplementedError, ValueError):
                # No locks on this file system, no space for the file, somebody else's file: the next place.
                self._lock = None
                self._paths.pop(0)
                continue
            self.held = True
            self._note_owner()
            return True
        return True

    def release(self) -> None:
        """Give the lock back; the file stays, for unlinking it would let two hold it."""
        if not self.held:
            return
        self.held = False
        try:
            os.unlink(f"{self.path}.owner")
        except OSError:
            pass
        try:
            self._lock.release()
        except OSError:
            pass

    def owner(self) -> Owner | None:
        """Who holds the lock, as far as it is known."""
        try:
            with open(f"{self.path}.owner", "rb") as file:
                note = json.loads(file.read(4096))
            return Owner(int(note["pid"]), str(note["label"]), float(note["since"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note_failure(self, error: CompileError) -> None:
        """Tell those who wait for this lock that the part does not compile."""
        if self.held:
            said = {"what": error.what, "todo": error.todo, "log": error.log, "details": list(error.details)}
            self._write("failed", {"at": time.time(), "tools": self._tools, **said})

    def failure_since(self, moment: float) -> CompileError | None:
        """The failure of somebody who held the lock after `moment` (time.time()) and used the same tools."""
        try:
            with open(f"{self.path}.failed", "rb") as file:
                note = json.loads(file.read(1 << 16))
            if float(note["at"]) < moment or note["tools"] != self._tools:
                return None
            return CompileError(note["what"], note["todo"], note["log"], note["details"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _note_owner(self) -> None:
        self._write("owner", {"pid": os.getpid(), "label": self._label, "since": time.time()})

    def _write(self, kind: str, note: dict[str, Any]) -> None:
        assert self.path is not None
        folder = os.path.dirname(self.path)
        leftovers.sweep(folder, (leftovers.NOTE,))
        new = os.path.join(folder, leftovers.new_name(leftovers.NOTE))
        try:
            with open(new, "w", encoding="utf-8") as file:
                json.dump(note, file)
            os.replace(new, f"{self.path}.{kind}")
        except OSError:
            leftovers.remove(new)


def _file_lock(path: str) -> Any:
    from filelock import FileLock

    # Releases differ: newer ones unlink the file on release, and fall back to a lock that outlives a
    # killed owner.
    known = inspect.signature(FileLock.__init__).parameters
    wanted: dict[str, Any] = {"thread_local": False, "preserve_lock_file": True, "fallback_to_soft": False}
    return FileLock(path, **{name: value for name, value in wanted.items() if name in known})


def _tools(settings: Settings) -> list[str | None]:
    """What decides about the compilers: another process's failure is one's own only where this is the same."""
    names = ("CXX", "CUDA_HOME", "CUDA_PATH", "PATH")
    return [settings.cxx, settings.nvcc, *map(os.environ.get, names)]


def _private_folder(path: str) -> bool:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        return distrust(path) is None and os.access(path, os.W_OK | os.X_OK)
    except OSError:
        return False
