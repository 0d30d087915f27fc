"""High-precision copies of quantized weights: what the optimizer updates, and what the weights are quantized from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import tejit


class Masters:
    """For each quantized parameter of a model a master in float32; a small step would be lost in eight bits."""

    def __init__(self, model: nn.Module, values: Mapping[str, Tensor]) -> None:
        """`values` are the parameters, by name, before they were quantized."""
        self.pairs = {
            name: (parameter, values[name].detach().clone().requires_grad_())
            for name, parameter in model.named_parameters()
            if isinstance(parameter, tejit.QuantizedTensor)
        }

    def trained(self, model: nn.Module) -> list[Tensor]:
        """What an optimizer of `model` is given: masters where there are some, else the parameters."""
        return [self.pairs[name][1] if name in self.pairs else p for name, p in model.named_parameters()]

    def take_gradients(self) -> None:
        """Move the gradients, after backward, from the parameters to the masters."""
        for parameter, master in self.pairs.values():
            master.grad, parameter.grad = parameter.grad, None

    @torch.no_grad()
    def write_back(self) -> None:
        """Quantize the masters, after the optimizer's step, into the parameters."""
        for parameter, master in self.pairs.values():
            parameter.copy_(master)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, (_, master) in self.pairs.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, (_, master) in self.pairs.items():
            master.copy_(state[name])
