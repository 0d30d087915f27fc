"""The buffers of delayed scaling: their names, what is in them at the start, and a state dict without them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tejit.tensor import QuantizedTensor

SCALE = "_delayed_scale"
HISTORY = "_delayed_amax_history"
GRAD_SCALE = "_delayed_grad_scale"
GRAD_HISTORY = "_delayed_grad_amax_history"
#: The scale before the last roll, for a recomputation after it. Means nothing between steps, so it is not stored.
PREVIOUS = "_delayed_previous_scale"
#: The buffers that are state, hence keys of a state dict.
STORED = (SCALE, HISTORY, GRAD_SCALE, GRAD_HISTORY)
ALL = (*STORED, PREVIOUS)
#: Rows of a history: what any recipe up to this length can use at any time.
ROWS = 1024


def fresh_state(products: int, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Buffers of a module that never ran: scales of 1, nothing seen."""

    def filled(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=device)

    return {
        SCALE: filled(1.0, 2 * products),
        HISTORY: filled(0.0, rows, 2 * products),
        GRAD_SCALE: filled(1.0, products),
        GRAD_HISTORY: filled(0.0, rows, products),
        PREVIOUS: filled(1.0, 2 * products),
    }


def plain_state_dict(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` in the form to give away: without the state of delayed scaling, and with plain tensors of
    their nominal dtype in place of quantized ones. ``torch.nn`` modules of the same parameters load it strictly, and
    what knows plain tensors only saves it (safetensors).

    Tied entries stay one tensor. All else is as in ``state_dict()``: plain tensors share the module's memory.
    """
    state = module.state_dict()
    made: dict[tuple[int, ...], Tensor] = {}  # a state dict has an alias of its own for each of several tied ones
    for key, value in state.items():
        if isinstance(value, QuantizedTensor):
            buffers = tuple(id(buffer) for buffer in value._inner())
            if buffers not in made:
                made[buffers] = value.dequantize()
            state[key] = made[buffers]
    return {key: value for key, value in state.items() if key.rpartition(".")[2] not in STORED}
