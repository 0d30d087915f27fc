"""The choice between compiled kernels and the pure-torch numerics. Both give the same bytes."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from tejit import compat, device, jit

NAMES = ("auto", "kernels", "torch")


def _checked(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source} is {name!r}; it must be one of {', '.join(NAMES)}")
    return name


#: The process-wide choice, from ``TEJIT_BACKEND``; `python -m tejit` computes nothing and tells of a wrong one itself.
DEFAULT = (
    "auto" if jit.is_command_line() else _checked(os.environ.get("TEJIT_BACKEND", "auto") or "auto", "TEJIT_BACKEND")
)


class _Choice:
    """That of a thread. An object of its own: see ``recipe.context``."""

    def __init__(self) -> None:
        self.name = DEFAULT
        self.outer: list[str] = []  # of the contexts that this thread is in


class _State(threading.local):
    def __init__(self) -> None:  # once a thread; torch 2.11 reads a class attribute past the thread's own value
        self.choice = _Choice()


_state = _State()


class backend:
    """Context that chooses how tejit computes in this thread: ``auto``, ``kernels`` or ``torch``.

    ``auto`` takes the compiled kernels where they exist and the pure-torch numerics elsewhere;
    ``kernels`` raises where they do not exist; ``torch`` always takes the pure-torch numerics, which
    ``torch.compile`` can fuse. The bytes are the same (the pure-torch numerics need subnormal numbers:
    ``torch.set_flush_denormal`` off).

    Raises ``ValueError`` for another name.
    """

    def __init__(self, name: str) -> None:
        self.name = _checked(name, "backend")

    def __enter__(self) -> backend:
        _state.choice.outer.append(_state.choice.name)
        _state.choice.name = self.name
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _state.choice.name = _state.choice.outer.pop()


def current() -> str:
    """The choice in force in this thread."""
    return _state.choice.name


def use_ops(where: torch.device) -> bool:
    """Whether a computation on ``where`` goes through the compiled op (else: the pure-torch numerics, inline).

    Raises the ``TejitError`` that explains the absence where ``kernels`` was demanded and there are none.
    """
    name = _state.choice.name
    if name == "torch":
        return False
    if name == "kernels":
        _demand(where)
        return True
    return _has_kernels(where)


#: Devices whose kernels were found once; they stay. (Of ``cuda`` without an index the current one may change.)
_found: set[torch.device] = set()


#: CUDA devices whose kernels are loaded: they stay so.
_present: set[torch.device] = set()


@compat.constant_result
def _has_kernels(where: torch.device) -> bool:
    if where in _found:
        return True
    if where.type == "meta":
        return True  # nothing is computed: the op's fake answers
    error = _absence(where.type, where.index)
    if isinstance(error, jit.KernelNotCached):
        raise error  # TEJIT_COMPILE=never: whoever set it wants to hear of a missing entry
    if error is None and (where.type == "cpu" or where.index is not None):
        _found.add(where)
    return error is None


@compat.constant_result
def _demand(where: torch.device) -> bool:
    error = None if where.type == "meta" else _absence(where.type, where.index)
    if error is not None:
        raise error
    return True


def _absence(kind: str, index: int | None) -> jit.TejitError | None:
    """Why there are no compiled kernels for this device; None where there are. Builds them under ``lazy``."""
    if not jit.is_loaded():
        if jit.host_pending():
            error = jit.ensure_host()
        else:
            error = jit.host_error() or jit.TejitError("the kernels are not loaded", "import tejit first")
        if error is not None:
            return error
    if kind == "cpu":
        return None
    if kind != "cuda":
        return jit.TejitError(f"tejit has no kernels for devices of type {kind!r}", "use TEJIT_BACKEND=auto or torch")
    return _cuda_absence(index if index is not None else torch.cuda.current_device())


@functools.cache
def _cuda_absence(index: int) -> jit.TejitError | None:
    capability = device.cuda_capability(torch.device("cuda", index))
    if capability is None:
        return jit.TejitError(
            f"the compute capability of cuda:{index} cannot be asked", "check the driver, or use TEJIT_BACKEND=torch"
        )
    return jit.ensure_arch(10 * capability[0] + capability[1])


def guarded(reference: Callable[..., Any], native: Callable[[], Any]) -> Callable[..., Any]:
    """The reference as an op's implementation: reached where no compiled kernel took the call.

    Under ``TEJIT_COMPILE=lazy`` the kernels may just not have been built yet: they are, and ``native()``,
    the op itself, is called again. Under ``never``, and where ``kernels`` was demanded, the reason is raised.
    """

    @functools.wraps(reference)
    def run(*args: Any) -> Any:
        where = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        if where is not None and where.type in ("cpu", "cuda") and _state.choice.name != "torch":
            pending = jit.host_pending()
            if use_ops(where) and pending:
                return native()(*args)
        return reference(*args)

    return run
