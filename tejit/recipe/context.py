"""``autocast``: where quantization is switched on, and by which recipe."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

import torch

from tejit import compat
from tejit import device as hardware
from tejit.recipe.recipes import Float8CurrentScaling, Recipe, delayed_rules
from tejit.recipe.state import Pass

Function = TypeVar("Function", bound=Callable[..., Any])


class _Outer(NamedTuple):
    """What was in force before an ``autocast``."""

    recipe: Recipe | None
    observing: Recipe | None
    group: Any
    running: Pass | None
    backward: int


class _Asked:
    """What the innermost ``autocast`` of this thread asked for. Backward never reads it: layers keep what
    their forward used.

    An object of its own, since TorchDynamo loses what is written to attributes of a ``threading.local`` where a graph
    breaks.
    """

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.observing: Recipe | None = None
        self.group: Any = None
        self.running: Pass | None = None
        self.backward = -1  # number of the backward pass that it was entered in; -1 outside
        self.outer: list[_Outer] = []  # of the contexts that this thread is in


class _State(threading.local):
    def __init__(self) -> None:  # once a thread; torch 2.11 reads a class attribute past the thread's own value
        self.asked = _Asked()


_state = _State()
#: Made once, outside any graph; the second where it is the default.
_default: Recipe = Float8CurrentScaling()
_default_mxfp8: Recipe | None = None


class autocast:
    """Context in which tejit's modules quantize.

    Args:
        enabled: False switches quantization off inside an outer ``autocast``.
        recipe: how to quantize; None means :func:`default_recipe`.
        calibrating: with ``enabled=False``, compute in high precision and let the forward slots of delayed scaling
            collect amax, under ``no_grad`` too, so that the state is there when quantization is switched on. With
            ``enabled=True`` it changes nothing.
        amax_reduction_group: a ``torch.distributed`` process group over which amax is reduced (MAX): that of delayed
            scaling when it rolls (where the recipe has ``reduce_amax``), that of current scaling and NVFP4 when a
            tensor is quantized.

    The state of delayed scaling rolls at the exit of the outermost ``autocast`` (inputs and weights of the modules
    that ran with gradients enabled) and at the end of backward (gradients).

    One instance may be entered again after it was left, and inside itself. Works inside and outside of
    compiled regions; returning to an earlier recipe recompiles nothing.
    What is in force belongs to the thread, as with ``torch.autocast``: coroutines or generators that take turns in one
    thread each see what another one entered and has not left.

    Also a decorator of functions and methods, ``@tejit.autocast(recipe=recipe)``: each call runs in a context of its
    own, with the same arguments.

    Raises ``TypeError`` where ``recipe`` is no recipe or ``enabled`` or ``calibrating`` no bool, and where what is
    decorated is no function or runs after its call has returned (generators, coroutines).
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        recipe: Recipe | None = None,
        calibrating: bool = False,
        amax_reduction_group: Any = None,
    ) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled is {enabled!r}; it must be True or False (a recipe is given as recipe=...)")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"recipe is {recipe!r}; it must be an instance of a recipe, such as tejit.recipe.Float8CurrentScaling()"
            )
        if not isinstance(calibrating, bool):
            raise TypeError(f"calibrating is {calibrating!r}; it must be True or False")
        asked = (default_recipe() if recipe is None else recipe) if enabled or calibrating else None
        self._recipe = asked if enabled else None
        self._observing = None if enabled else asked
        self._group = amax_reduction_group
        self._delayed = len(delayed_rules(asked)) > 0

        self._arguments = {
            "enabled": enabled,
            "recipe": recipe,
            "calibrating": calibrating,
            "amax_reduction_group": amax_reduction_group,
        }

    def __call__(self, function: Function) -> Function:
        if not callable(function) or isinstance(function, type):
            raise TypeError(
                f"autocast got {function!r} to decorate; it must be a function or a method (of a module, forward)"
            )
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        # What it wraps (contextlib.contextmanager says so), and an object's own method, too.
        called = (function, inspect.unwrap(function), type(function).__call__)
        if any(is_kind(each) for is_kind in kinds for each in called):
            raise TypeError(
                f"autocast got {function!r} to decorate, which runs after its call has returned, hence outside of the"
                " context; write `with tejit.autocast(...):` inside of it"
            )

        @functools.wraps(function)
        def in_context(*arguments: Any, **keywords: Any) -> Any:
            with autocast(**self._arguments):
                return function(*arguments, **keywords)

        return cast(Function, in_context)

    def __enter__(self) -> autocast:
        if not torch.compiler.is_compiling() and compat.symbolic_tracer() is not None:
            raise RuntimeError(
                "tejit.autocast was entered inside what torch.fx traces, and the graph would lose it. Enter it around"
                " the call of the traced module, have the tracer take the module that enters it for a leaf, or use"
                " torch.compile or torch.export"
            )
        state = _state.asked
        state.outer.append(_Outer(state.recipe, state.observing, state.group, state.running, state.backward))
        state.recipe, state.observing, state.group = self._recipe, self._observing, self._group
        state.backward = -1 if torch.compiler.is_compiling() else compat.backward_number()
        if state.running is None:
            state.running = Pass(traced=torch.compiler.is_compiling())
        if self._delayed:
            state.running.delayed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        state = _state.asked
        running, outer = state.running, state.outer.pop()
        state.recipe, state.observing, state.group, state.running, state.backward = outer
        if outer.running is None and running is not None and kind is None:
            running.close()


def in_force() -> _Asked:
    """What is in force in this thread, to be read at once: its ``recipe`` and ``group``."""
    return _state.asked


def current_recipe() -> Recipe | None:
    """The recipe in force in this thread; None outside of ``autocast``."""
    return _state.asked.recipe


def observed_recipe() -> Recipe | None:
    """The recipe whose state high-precision modules calibrate in this thread; None where none asks for it."""
    return _state.asked.observing


def current_group() -> Any:
    """The ``amax_reduction_group`` in force in this thread."""
    return _state.asked.group


def entered_in_this_backward() -> bool:
    """Whether the innermost ``autocast`` of this thread was entered in the backward pass that the thread runs inside,
    hence by the region that is computed again there."""
    return compat.in_backward() and _state.asked.backward == compat.backward_number()


def current_pass() -> Pass | None:
    """The outermost ``autocast`` of this thread; None outside."""
    return _state.asked.running


def default_recipe() -> Recipe:
    """The recipe that ``autocast()`` takes when none is given, by torch's default device where one was set, else
    cuda if there is one: MXFP8 on compute capability 10.x, FP8 with current scaling everywhere else."""
    if not _mxfp8_is_default():
        return _default
    assert _default_mxfp8 is not None  # by the call above
    return _default_mxfp8


@compat.constant_result
def _mxfp8_is_default() -> bool:
    """Whether it is, in which case it is there afterwards."""
    global _default_mxfp8
    capability = hardware.cuda_capability(hardware.resolve_device(None))
    found = capability is not None and capability[0] == _MXFP8_MAJOR
    if found and _default_mxfp8 is None:
        from tejit.recipe.blocks import MXFP8BlockScaling

        _default_mxfp8 = MXFP8BlockScaling()
    return found


#: Of the compute capability where MXFP8 is the default: data centre Blackwell.
_MXFP8_MAJOR = 10


def is_fp8_available(return_reason: bool = False, device: torch.device | str | None = None) -> bool | tuple[bool, str]:
    """Whether the per-tensor FP8 GEMM is native on ``device``.

    Where it is not, every recipe still runs: the same bytes are dequantized and multiplied.

    Args:
        return_reason: return ``(available, reason)``; the reason is empty where it is available.
        device: None is torch's default where one was set, else cuda if there is one, else cpu.
    """
    reason = hardware.fp8_gemm_reason(hardware.resolve_device(device))
    return (reason is None, reason or "") if return_reason else reason is None


def is_fp8_block_scaling_available(
    return_reason: bool = False, device: torch.device | str | None = None
) -> bool | tuple[bool, str]:
    """Whether the GEMM of FP8 blocks of 128 is native on ``device``; arguments as in :func:`is_fp8_available`."""
    reason = hardware.fp8_block_gemm_reason(hardware.resolve_device(device))
    return (reason is None, reason or "") if return_reason else reason is None


def is_mxfp8_available(
    return_reason: bool = False, device: torch.device | str | None = None
) -> bool | tuple[bool, str]:
    """Whether the MXFP8 GEMM is native on ``device``; arguments as in :func:`is_fp8_available`."""
    reason = hardware.mxfp8_gemm_reason(hardware.resolve_device(device))
    return (reason is None, reason or "") if return_reason else reason is None


def is_nvfp4_available(
    return_reason: bool = False, device: torch.device | str | None = None
) -> bool | tuple[bool, str]:
    """Whether the NVFP4 GEMM is native on ``device``; arguments as in :func:`is_fp8_available`."""
    reason = hardware.nvfp4_gemm_reason(hardware.resolve_device(device))
    return (reason is None, reason or "") if return_reason else reason is None
