"""What the builder says: progress on stderr, and warnings that are said once."""

from __future__ import annotations

import sys
import threading
import warnings

_said: set[str] = set()
_said_lock = threading.Lock()


def say(text: str, *, quiet: bool = False) -> None:
    """Write one line to stderr, unless `quiet` (TEJIT_QUIET) or there is no stderr."""
    stream = sys.stderr
    if quiet or stream is None:
        return
    try:
        stream.write(f"tejit: {text}\n")
        stream.flush()
    except (OSError, ValueError):
        # A closed stderr (daemons) must not turn progress into a failure.
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
    except RuntimeWarning:
        # Under `-W error` a warning would become the failure of `import tejit`, which never fails for this.
        say(text)


def forget() -> None:
    """Let every warning be said again (tests, and a second `load` after a settings change)."""
    with _said_lock:
        _said.clear()
