"""``untouched``: run a module and leave no trace in it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tejit.nn.delayed_state import Delayed

#: Attributes of a module whose dictionaries are put back too.
_HOLDERS = ("_buffers", "_parameters", "_modules")


@contextmanager
def untouched(root: nn.Module) -> Iterator[None]:
    """A context after which modules and random generators are what they were before.

    That covers attributes of the modules, values of buffers, the state of delayed scaling, and the generators of torch
    (the CPU's and those of the modules' devices), of Python and of NumPy's own functions. It does not cover what a
    forward changes inside of an object that an attribute holds, such as a list.
    """
    tensors = [*root.parameters(), *root.buffers()]
    devices = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    values = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    attributes = [(module, _copied(vars(module))) for module in root.modules()]
    delayed = [module._delayed for module in root.modules() if isinstance(module, Delayed)]
    known = [dict(vars(state)) for state in delayed]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            generator = sys.modules["numpy"].random
            stack.callback(generator.set_state, generator.get_state())
        try:
            yield
        finally:
            for module, saved in attributes:
                _restore(module, saved)
            for state, saved in zip(delayed, known, strict=True):
                vars(state).clear()
                vars(state).update(saved)
            _restore_values(values)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return attributes | {name: dict(attributes[name]) for name in _HOLDERS}


def _restore(module: nn.Module, saved: dict[str, Any]) -> None:
    current = vars(module)
    holders = {name: current[name] for name in _HOLDERS}
    current.clear()
    current.update(saved)
    for name, holder in holders.items():  # the same dictionaries: others may hold them
        holder.clear()
        holder.update(saved[name])
        current[name] = holder


def _restore_values(values: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in values:
        # Not by version: batch norm writes its statistics without counting. What is the same stays unwritten.
        if not (buffer.is_meta or torch.equal(buffer, value)):
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                buffer.copy_(value)
