"""The Python interpreter that compiles in a process of its own: known to be one before it is started.

`sys.executable` may be any program: a frozen one (PyInstaller, cx_Freeze, Nuitka) or one that embeds Python (uwsgi).
Started as an interpreter it would run itself again, import tejit again, and start the next one.
"""

from __future__ import annotations

import _imp
import contextlib
import os
import re
import sys
from collections.abc import Iterator

from .errors import ToolchainError

#: Set for everything that a build starts, to the builder's process id. No build begins in such a process.
MARKER = "TEJIT_STARTED_BY_BUILD_OF"

# python, python3.12d, pypy3, python.exe, .python3.12-wrapped, platform-python3.6, python3-dbg
_NAME = re.compile(
    r"\.?(platform-)?(python|pypy|graalpy)w?[\d.]*[dmtu]{0,3}(-(dbg|debug|bin|real|wrapped|intel64))?(\.exe)?",
    re.IGNORECASE,
)
_TODO = (
    "fill a cache where there is a Python interpreter, with `python -m tejit warm`, and name it in TEJIT_PREBUILT "
    "or TEJIT_CACHE_DIR"
)


def refuse_inside_a_build() -> None:
    """End a program that a build took for an interpreter: it would do all its work a second time.

    Raises:
        ToolchainError: a build has started this process.
    """
    builder = os.environ.get(MARKER)
    if builder:
        raise ToolchainError(
            f"process {builder} started this one to compile kernels ({MARKER} is set), but it imports tejit: "
            f"{sys.executable!r} is no Python interpreter",
            _TODO,
        )


def find() -> str:
    """The path of an interpreter like the one that runs this. Starts nothing.

    Raises:
        ToolchainError: this program is no interpreter and none belongs to it, or a build has started it.
    """
    refuse_inside_a_build()
    frozen = _frozen_by()
    if frozen:
        raise ToolchainError(f"this is a frozen program ({frozen}), which cannot compile kernels", _TODO)
    running = _running()
    names = (f"python{sys.version_info[0]}.{sys.version_info[1]}", "python3", "python")
    beside = [os.path.join(sys.prefix, "bin", name) for name in names]
    if running is not None and _is_interpreter(running):
        # The same program under the name that belongs to the virtual environment, whose packages it then finds.
        return next((path for path in (sys.executable, *beside) if path and _same(path, running)), running)
    for path in (sys.executable, getattr(sys, "_base_executable", None), beside[0]):
        if path and _is_interpreter(path):
            return str(path)
    raise ToolchainError(
        f"there is no Python interpreter to compile with: sys.executable is {sys.executable!r}, "
        f"the running program is {running or 'unknown'}, and there is no {beside[0]}",
        _TODO,
    )


@contextlib.contextmanager
def for_libraries() -> Iterator[None]:
    """While this lasts `sys.executable` is an interpreter: cuda.pathfinder starts it to look for libraries.

    Raises:
        ToolchainError: there is none.
    """
    path, before = find(), sys.executable
    sys.executable = path
    try:
        yield
    finally:
        sys.executable = before


def _frozen_by() -> str | None:
    """What tells that this program was made of Python code and is no interpreter any more; None where nothing does."""
    for name in ("frozen", "_MEIPASS", "oxidized"):
        if getattr(sys, name, None):
            return f"sys.{name} is set"
    main = sys.modules.get("__main__")
    if hasattr(main, "__compiled__") or "__compiled__" in globals():
        return "compiled by Nuitka"
    return "__main__ is a frozen module" if _imp.is_frozen("__main__") else None


def _running() -> str | None:
    """The file of the program that runs this process; None where the system does not tell."""
    try:
        return os.readlink("/proc/self/exe")
    except OSError:
        return None


def _is_interpreter(path: str) -> bool:
    name = os.path.basename(os.path.realpath(path))
    named = _NAME.fullmatch(name) or _NAME.fullmatch(os.path.basename(path))
    return named is not None and os.path.isfile(path) and os.access(path, os.X_OK)


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
