"""The state of delayed scaling while it is in use: which modules ran, and when their histories roll.

Forward slots roll at the exit of the outermost ``autocast``, gradient slots at the end of the backward that wrote
them. Who knows what ran differs:

- ``autocast`` in eager code notes itself in each module that ran (``ran_in``), and looks through all modules at its
  exit. A store into an attribute is the one note that a compiled forward can take without a guard on what was there.
- ``autocast`` inside a compiled region keeps a list, which lives while the region is traced, and the roll becomes
  part of the graph.
- A backward in eager code asks the engine for a call at its end. A compiled one cannot, but its graph has an input
  without elements, the ``anchor``; the hook on the anchor's gradient asks instead.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tejit import compat
from tejit.kernels import fp8
from tejit.recipe.recipes import DelayedRule

_numbers = itertools.count()
_states: weakref.WeakValueDictionary[int, DelayedState] = weakref.WeakValueDictionary()


class DelayedBuffers:
    """A module's tensors of delayed scaling: float32, a column for each slot; row 0 of a history collects."""

    __slots__ = ("grad_history", "grad_scale", "history", "previous", "scale")

    def __init__(self, scale: Tensor, previous: Tensor, history: Tensor, grad_scale: Tensor, grad_history: Tensor):
        self.scale = scale
        self.previous = previous
        self.history = history
        self.grad_scale = grad_scale
        self.grad_history = grad_history


class Pass:
    """One outermost ``autocast``.

    Attributes:
        traced: whether it was entered while a compiled region is traced.
        delayed: whether a recipe with delayed scaling was in force.
        states: what ran, where ``traced``.
    """

    def __init__(self, traced: bool) -> None:
        self.traced = traced
        self.delayed = False
        self.states: list[DelayedState] = []

    def note(self, state: DelayedState) -> None:
        """A module collected amax in its forward."""
        if not self.traced:
            state.ran_in = self
        elif state not in self.states:
            self.states.append(state)

    def close(self) -> None:
        """Roll the forward slots of what ran."""
        if self.traced:
            for state in self.states:
                state.rolled = True
                state.roll_traced()
        elif self.delayed:
            ran = [state for state in _all_states() if state.ran_in is self]
            for state in ran:
                state.ran_in = None
                state.rolled = True
            _roll(ran, gradient=False)


class DelayedState:
    """What is known of a module's delayed state beside its tensors.

    Attributes:
        buffers: finds the tensors, None where the module is gone; asked anew each time, since modules move.
        stored: whether the tensors are part of the module's state dict.
        rule, group: of the last forward; the roll follows them.
        ran_in: the pass in which it collected amax and has not rolled.
        rolled: whether it rolled since it last collected; a recomputation then needs the scale before.
        queued, owes_gradient: whether it waits for the end of a backward, and whether gradient slots collected amax.
        anchor: float32 ``(0,)``, requires a gradient.
        known: the tensors as the module last saw them, by the names of their buffers; another one comes from outside.
        unborn: whether the module's parameters or the tensors had no memory then.
    """

    rule: DelayedRule | None = None
    group: Any = None
    ran_in: Pass | None = None
    rolled = False
    queued = False
    owes_gradient = False
    _aside: Tensor | None = None

    def __init__(self, buffers: Callable[[], DelayedBuffers | None], device: torch.device, stored: bool) -> None:
        self.number = next(_numbers)
        self.buffers = buffers
        self.stored = stored
        self.known: dict[str, Tensor | None] = {}
        self.unborn = False
        self.move(device)
        _states[self.number] = self

    def move(self, device: torch.device) -> None:
        """Make the anchor on another device."""
        with torch.inference_mode(False):
            self.anchor = torch.zeros(0, dtype=torch.float32, device=device, requires_grad=True)
        me = weakref.ref(self)
        self.anchor.register_hook(lambda grad: _gradient_written(me()))
        # No hook of a leaf runs in a backward that does not ask for it; the op on the anchor's gradient calls this one.
        anchor: Any = self.anchor
        anchor.gradient_written = lambda: _gradient_written(me())

    def aside(self, scale: Tensor) -> Tensor:
        """A history ``(1, slots)`` for amax that nobody will read: of a recomputation, whose forward collected it.

        It is kept, and no dispatch mode sees how it is made: selective activation checkpointing finds results of the
        forward by the operations that led to them, so a recomputation may run no other ones.
        """
        if isinstance(scale, FakeTensor):
            return torch.zeros_like(scale).unsqueeze(0)
        kept = self._aside
        if kept is None or kept.device != scale.device or kept.shape[1:] != scale.shape:
            with compat.without_dispatch_modes(), torch.inference_mode(False):
                kept = self._aside = torch.zeros((1, *scale.shape), dtype=scale.dtype, device=scale.device)
        return kept

    def roll_traced(self) -> None:
        """Roll the forward slots as part of a graph."""
        tensors, rule = self.buffers(), self.rule
        if tensors is not None and rule is not None:
            _reduce([tensors.history], self.group if rule.reduce_amax else None)
            fp8.delayed_update_(
                [tensors.history],
                [tensors.scale],
                [tensors.previous],
                rule.forward_max,
                rule.length,
                rule.margin,
                rule.algo,
            )

    def gradient_written(self) -> None:
        """A backward, which is still running, collected amax in gradient slots."""
        self.owes_gradient = True
        self.roll_after_backward()

    def roll_after_backward(self) -> None:
        """Have the gradient slots rolled, if they collected amax by then, at the end of the backward that runs.

        Under reentrant checkpointing a backward runs inside another, and a module may be used in several of them.
        Every recomputation calls this: it runs in the outer backward and before the inner one, so that the outer
        one's end counts. ``queued`` is taken back by the next forward, for a backward that failed has no end.
        """
        if torch.compiler.is_compiling():
            _refuse_compiled_autograd()
        if not self.queued:
            self.queued = True
            _end_of_backward().states.append(self)


@compat.constant_result  # called while tracing: what it raises ends the trace, also where graphs may break
def _refuse_compiled_autograd() -> None:
    """A graph of the forward has its own backward, and neither traces what asks the engine: compiled autograd does."""
    raise NotImplementedError(
        "DelayedScaling does not work under compiled autograd (torch._dynamo.config.compiled_autograd,"
        " torch._dynamo.compiled_autograd): its scales roll at the end of backward, which only the eager engine tells."
        " Call backward() without it; torch.compile of the forward compiles the backward too. Other recipes do work"
        " under compiled autograd"
    )


def _all_states() -> list[DelayedState]:
    """In the order in which they were made, which is the same in every process of a group."""
    # A list of references is taken in one go, whatever other threads build or drop meanwhile.
    states = [reference() for reference in _states.valuerefs()]
    return sorted([state for state in states if state is not None], key=_number)


def _number(state: DelayedState) -> int:
    return state.number


def _gradient_written(state: DelayedState | None) -> None:
    if state is not None:
        state.gradient_written()


class _EndOfBackward:
    """What rolls when a backward ends. Only the engine holds it, so that it goes with a backward that fails."""

    def __init__(self) -> None:
        self.states: list[DelayedState] = []

    def roll(self) -> None:
        written = [state for state in sorted(self.states, key=_number) if state.owes_gradient]
        for state in self.states:
            state.queued = state.owes_gradient = False
        _roll(written, gradient=True)


_ends: weakref.WeakValueDictionary[int, _EndOfBackward] = weakref.WeakValueDictionary()


def _end_of_backward() -> _EndOfBackward:
    number = compat.backward_number()
    end = _ends.get(number)
    if end is None:
        end = _ends[number] = _EndOfBackward()
        compat.after_backward(end.roll)
    return end


def _roll(states: Iterable[DelayedState], gradient: bool) -> None:
    """Roll slots of several modules at once, those alike in one go."""
    alike: dict[tuple[Any, ...], tuple[DelayedRule, Any, list[DelayedBuffers]]] = {}
    for state in states:
        tensors, rule = state.buffers(), state.rule
        if tensors is not None and rule is not None:
            group = state.group if rule.reduce_amax else None
            key = (rule, tensors.scale.device, id(group))
            alike.setdefault(key, (rule, group, []))[2].append(tensors)
    for rule, group, several in alike.values():
        histories = [t.grad_history if gradient else t.history for t in several]
        _reduce(histories, group)
        fp8.delayed_update_(
            histories,
            [t.grad_scale if gradient else t.scale for t in several],
            [] if gradient else [t.previous for t in several],
            rule.backward_max if gradient else rule.forward_max,
            rule.length,
            rule.margin,
            rule.algo,
        )


def _reduce(histories: list[Tensor], group: Any) -> None:
    """MAX over a process group of what row 0 of the histories collected."""
    if group is None:
        return
    collected = torch.cat([history[0] for history in histories])
    torch.distributed.all_reduce(collected, op=torch.distributed.ReduceOp.MAX, group=group)
    for history, amax in zip(histories, collected.split([h.shape[1] for h in histories]), strict=True):
        history[0].copy_(amax)
