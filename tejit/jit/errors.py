"""The errors of the kernel builder: what happened, what to do, where the log is."""

from __future__ import annotations

from collections.abc import Sequence


class TejitError(RuntimeError):
    """Base of every error that the builder raises.

    Args:
        what: one line, what happened, naming the value at fault.
        todo: one line, what to do about it.
        log: path of the compiler's output, where there is any.
        details: further lines, such as the first errors of a compiler.
    """

    def __init__(self, what: str, todo: str = "", log: str | None = None, details: Sequence[str] = ()) -> None:
        # All of it goes into `args`, so that a pickle (a worker's error shown by its parent) is whole.
        super().__init__(what, todo, log, tuple(details))
        self.what = what
        self.todo = todo
        self.log = log
        self.details = tuple(details)

    def __str__(self) -> str:
        lines = [self.what]
        if self.todo:
            lines.append(self.todo)
        lines.extend(f"  {line}" for line in self.details)
        if self.log:
            lines.append(f"log: {self.log}")
        return "\n".join(lines)


class ToolchainError(TejitError):
    """A compiler or toolkit is missing, or does not fit this torch or this GPU."""


class KernelNotCached(TejitError):
    """`TEJIT_COMPILE=never` is set and the cache holds no entry for a part that is needed."""


class CompileError(TejitError):
    """The compiler ran and failed, or was killed."""


class CacheError(TejitError):
    """No directory can hold the compiled kernels, or one that was asked for by name cannot."""
