"""``Linear``: ``nn.Linear`` that quantizes under ``tejit.autocast``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tejit import compat
from tejit.format_info import HIGH_PRECISION_DTYPES
from tejit.nn.delayed_state import Delayed
from tejit.nn.linear_function import quantized_linear
from tejit.nn.naming import Named, checked_name
from tejit.recipe import Recipe, current_recipe


class Linear(Delayed, Named, nn.Linear):
    """``y = x @ weight.T + bias``, a drop-in for ``torch.nn.Linear``.

    Without ``tejit.autocast`` it is ``torch.nn.Linear``. Under it the operands of forward, dgrad and wgrad
    are quantized as the recipe says. Inside ``torch.autocast`` input, weight and output take the AMP dtype.

    Args:
        in_features, out_features: any sizes; the GEMM pads inside.
        bias: whether to add a bias.
        device, dtype: of the parameters; None is torch's default.
        params_dtype: another name of ``dtype``.
        init_method: called with the weight instead of the default initialisation.
        return_bias: return ``(y without bias, bias)``, for callers that add the bias later.
        name: what recipes call the layer (``overrides``, ``CustomRecipe``); see ``tejit.name_modules``.

    Raises:
        ValueError: ``dtype`` and ``params_dtype`` are both given and differ; ``return_bias`` without ``bias``.

    Under ``tejit.autocast`` forward raises ``TypeError`` for an input whose dtype differs from the
    weight's (outside of ``torch.autocast``) or is not float32, bfloat16 or float16, and ``ValueError``
    for an input whose last dimension is not ``in_features`` or whose device is not the weight's. It has a first
    derivative only. In a checkpointed region it repeats the recipe of its last forward; a compiled module inside
    an eager checkpoint does not, so call backward inside ``autocast`` there.
    """

    return_bias = False
    _init_method: Callable[[Tensor], object] | None = None
    _forward_recipe: Recipe | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        init_method: Callable[[Tensor], object] | None = None,
        return_bias: bool = False,
        name: str | None = None,
    ) -> None:
        if dtype is not None and params_dtype is not None and dtype != params_dtype:
            raise ValueError(
                f"dtype is {dtype} and params_dtype is {params_dtype}: they are two names of one argument; give one"
            )
        if return_bias and not bias:
            raise ValueError("return_bias=True needs bias=True: there would be no bias to return")
        # Set before nn.Linear.__init__, which calls reset_parameters.
        object.__setattr__(self, "_init_method", init_method)
        super().__init__(in_features, out_features, bias, device, dtype if dtype is not None else params_dtype)
        self._init_method = init_method
        self.return_bias = return_bias
        self.name = checked_name(name)
        self._init_delayed(self.weight.device)

    def reset_parameters(self) -> None:
        """Initialise the parameters as ``nn.Linear`` does, the weight by ``init_method`` where one was given."""
        super().reset_parameters()
        if self._init_method is not None:
            with torch.no_grad():
                self._init_method(self.weight)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """``(..., in_features)`` to ``(..., out_features)``; with ``return_bias`` also the bias."""
        bias = None if self.return_bias else self.bias
        recipe = self._recipe()
        quantizers = None if recipe is None else recipe.for_linear(self.name)
        if quantizers is None:
            self._calibrate(x, self.weight)
            out = F.linear(x, self.weight, bias)
        else:
            operands = self._operands(x, bias)
            out = quantized_linear(*operands, quantizers, *self._delayed_state(quantizers.delayed))
        return (out, self.bias) if self.return_bias else out

    def _recipe(self) -> Recipe | None:
        """The recipe in force; in a recomputation (activation checkpointing) that of the forward which it repeats.

        Backward is usually called outside of ``autocast``, and a checkpointed forward runs again inside it.
        """
        if torch.compiler.is_compiling():
            return current_recipe()
        if compat.in_backward():
            return current_recipe() or self._forward_recipe
        self._forward_recipe = current_recipe()
        return self._forward_recipe

    def _operands(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Input, weight and bias in one dtype: AMP's inside ``torch.autocast``, else the one they share."""
        weight = self.weight
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"the input has shape {tuple(x.shape)}; its last dimension must be in_features = {self.in_features}"
            )
        if x.device != weight.device:
            raise ValueError(f"the input is on {x.device} and the weight on {weight.device}; move one of them")
        if compat.autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = _eligible(x, dtype), _eligible(weight, dtype), _eligible(bias, dtype)
        if x.dtype != weight.dtype:
            raise TypeError(
                f"the input is {x.dtype} and the weight {weight.dtype}; convert one of them, or use torch.autocast"
            )
        if x.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"the input is {x.dtype}; it must be torch.float32, torch.bfloat16 or torch.float16")
        return x, weight, bias


def _eligible(tensor: Any, dtype: torch.dtype) -> Any:
    """What torch.autocast would make of an operand: it leaves float64 and integers alone."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
