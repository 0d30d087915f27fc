"""What the builder says: progress on stderr, and warnings that are said once. Nothing said here fails an import.

stderr may be missing (pythonw), closed (daemons), or anything that a program put there: an object with `write` alone,
one whose `write` raises, one that takes ASCII only.
"""

from __future__ import annotations

import sys
import threading
import warnings

_said: set[str] = set()
_said_lock = threading.Lock()


def say(text: str, *, quiet: bool = False) -> None:
    """Write one line to stderr, unless `quiet` (TEJIT_QUIET) or where stderr does not take it."""
    stream = getattr(sys, "stderr", None)
    if quiet or stream is None:
        return
    line = f"tejit: {text}\n"
    try:
        try:
            stream.write(line)
        except UnicodeEncodeError:
            stream.write(line.encode("ascii", "backslashreplace").decode("ascii"))
        flush = getattr(stream, "flush", None)
        if flush is not None:
            flush()
    except Exception:
        # Whatever this stream raises: progress is no reason for a failure.
        return


def warn_once(text: str) -> None:
    """Warn with `text`, the first time in this process."""
    with _said_lock:
        if text in _said:
            return
        _said.add(text)
    try:
        # The line that imports tejit says nothing about the cause: the package's name stands in its place.
        warnings.warn_explicit(text, RuntimeWarning, filename="tejit", lineno=1)
    except Exception:
        # Under `-W error` the warning itself; else what the stream or the program's own `showwarning` raised.
        say(text)


def forget() -> None:
    """Let every warning be said again (tests, and a second `load` after a settings change)."""
    with _said_lock:
        _said.clear()
