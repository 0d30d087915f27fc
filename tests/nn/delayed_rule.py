"""The update rule of delayed scaling in numpy, written from `formats.md`: the oracle of the tests of the modules."""

from __future__ import annotations

import numpy as np
import torch

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class Slots:
    """Histories and scales of a few tensors; row 0 of the history collects the step that runs."""

    def __init__(self, count: int, length: int, dtype: torch.dtype, margin: int = 0, algo: str = "max") -> None:
        self.history = np.zeros((length, count), np.float32)
        self.scale = np.ones(count, np.float32)
        self.numerator = np.float32(FP8_MAX[dtype] * 2.0**-margin)
        self.algo = algo

    def see(self, slot: int, tensor: torch.Tensor) -> None:
        self.history[0, slot] = max(self.history[0, slot], np.abs(tensor.detach().float().cpu().numpy()).max())

    def roll(self) -> None:
        old, length = self.history, len(self.history)
        collected = old[0] != 0  # the others keep history and scale
        for slot, column in enumerate(old.T):
            if not collected[slot]:
                continue
            amax = column.max() if self.algo == "max" else column[0]
            if np.isfinite(amax) and amax > 0:
                with np.errstate(over="ignore"):
                    scale = self.numerator / amax
                self.scale[slot] = np.finfo(np.float32).max if np.isinf(scale) else scale
        new = np.zeros_like(old)
        for i in range(1, length - 1):
            new[i] = old[i + 1]
        if length > 1:
            new[length - 1] = old[0]
        self.history = np.where(collected, new, old)


class Watched:
    """A layer's two sets of slots, fed by hooks on the layer with what goes in and what comes back."""

    def __init__(self, layer: torch.nn.Linear, length: int, forward: torch.dtype, backward: torch.dtype, **how) -> None:
        self.layer, self.length = layer, length
        self.forward = Slots(2, length, forward, **how)
        self.backward = Slots(1, length, backward, **how)
        layer.register_forward_hook(self._ran)

    def _ran(self, layer, arguments, output) -> None:
        if torch.is_grad_enabled():
            self.forward.see(0, arguments[0])
            self.forward.see(1, layer.weight)
            output.register_hook(lambda grad: self.backward.see(0, grad))

    def check(self, what: str = "") -> None:
        """The layer's buffers hold what the rule says, to the bit, and nothing below the rows in use."""
        layer = self.layer
        for name, buffer, want in (
            ("scale", layer._delayed_scale, self.forward.scale),
            ("history", layer._delayed_amax_history[: self.length], self.forward.history),
            ("gradient scale", layer._delayed_grad_scale, self.backward.scale),
            ("gradient history", layer._delayed_grad_amax_history[: self.length], self.backward.history),
        ):
            assert buffer.dtype == torch.float32
            got = buffer.cpu().numpy()
            assert np.array_equal(got, want), f"{what} {name}: {got} is not {want}"
        assert not layer._delayed_amax_history[self.length :].any()
        assert not layer._delayed_grad_amax_history[self.length :].any()
