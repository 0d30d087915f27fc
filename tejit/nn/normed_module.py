"""What the modules that begin with a norm have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tejit import compat
from tejit.format_info import HIGH_PRECISION_DTYPES
from tejit.nn.arguments import one_of
from tejit.nn.fused import NORMS
from tejit.nn.linear import _eligible as eligible
from tejit.nn.module import QuantizedModule
from tejit.nn.norm_linear_function import NormPlan
from tejit.nn.norms import gamma

Init = Callable[[Tensor], object]


class NormedModule(QuantizedModule):
    """Base of the modules that begin with a norm: its parameters and how it runs.

    Raises ``ValueError`` for a ``normalization`` that is none of ``NORMS``.
    """

    #: What the argument is called that says how many features the norm has.
    _features = "in_features"
    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        return_layernorm_output: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.normalization = one_of("normalization", normalization, NORMS)
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.layer_norm_weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        has_bias = normalization == "LayerNorm"
        self.register_parameter(
            "layer_norm_bias", nn.Parameter(torch.empty(features, device=device, dtype=dtype)) if has_bias else None
        )

    def _reset_norm(self) -> None:
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def _plain_norm(self, x: Tensor) -> Tensor:
        weight = gamma(self.layer_norm_weight, self.zero_centered_gamma)
        if self.normalization == "LayerNorm":
            return F.layer_norm(x, self.layer_norm_weight.shape, weight, self.layer_norm_bias, self.eps)
        return F.rms_norm(x, self.layer_norm_weight.shape, weight, self.eps)

    def _operands(self, x: Tensor, weight: Any, *others: Tensor | None) -> list[Any]:
        """The products' parameters in the dtype that they run in: AMP's inside ``torch.autocast``, else their own,
        which must be ``x``'s; the norm takes ``x`` as it is."""
        features = self.layer_norm_weight.shape[0]
        if x.dim() == 0 or x.shape[-1] != features:
            raise ValueError(
                f"the input has shape {tuple(x.shape)}; its last dimension must be {self._features} = {features}"
            )
        if x.device != weight.device:
            raise ValueError(f"the input is on {x.device} and the weight on {weight.device}; move one of them")
        computed = x.dtype
        if compat.autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            weight, *others = [eligible(parameter, dtype) for parameter in (weight, *others)]  # type: ignore[assignment]
            computed = dtype if x.is_floating_point() and x.dtype != torch.float64 else x.dtype
        if computed != weight.dtype:
            raise TypeError(
                f"the input is {computed} and the weight {weight.dtype}; convert one of them, or use torch.autocast"
            )
        if computed not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"the input is {computed}; it must be torch.float32, torch.bfloat16 or torch.float16")
        return [weight, *others]

    def _norm_plan(self, dtype: torch.dtype) -> NormPlan:
        return NormPlan(self.normalization, self.eps, self.zero_centered_gamma, dtype, self.return_layernorm_output)

    def _norm_needs_grad(self, x: Tensor) -> bool:
        """Whether the gradient of the norm's output is needed, for the input or the norm's parameters."""
        return torch.is_grad_enabled() and any_needs_grad(x, self.layer_norm_weight, self.layer_norm_bias)


def any_needs_grad(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors that are there requires a gradient."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def reset_linear(weight: Tensor, bias: Tensor | None, init_method: Init | None) -> None:
    """Initialise parameters as ``nn.Linear`` does, the weight by ``init_method`` where one is given."""
    with torch.no_grad():
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if bias is not None:
            bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] > 0 else 0
            nn.init.uniform_(bias, -bound, bound)
        if init_method is not None:
            init_method(weight)
