"""What the modules that begin with a norm have in common."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tejit import compat
from tejit.nn.arguments import checked_eps, one_of
from tejit.nn.fused import NORMS
from tejit.nn.module import QuantizedModule
from tejit.nn.norm_linear_function import NormPlan
from tejit.nn.norms import layer_norm, rms_norm

Init = Callable[[Tensor], object]


class NormedModule(QuantizedModule):
    """Base of the modules that begin with a norm: its parameters and how it runs.

    Raises ``ValueError`` for a ``normalization`` that is none of ``NORMS``, an ``eps`` below zero, infinite or NaN, and
    for a bias that is to be returned and is not there.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        return_layernorm_output: bool,
        return_bias: bool,
        has_bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        name: str | None,
        fuse_wgrad_accumulation: bool,
        delay_wgrad_compute: bool,
    ) -> None:
        if return_bias and not has_bias:
            raise ValueError("return_bias=True needs bias=True: there would be no bias to return")
        super().__init__()
        self._init_quantized(
            name, fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute
        )
        self.return_bias = return_bias
        self.eps = checked_eps(eps)
        self.normalization = one_of("normalization", normalization, NORMS)
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.layer_norm_weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        norm_bias = None
        if normalization == "LayerNorm":
            norm_bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.register_parameter("layer_norm_bias", norm_bias)

    def _reset_norm(self) -> None:
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)

    def _norm_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Gamma and beta, for an autograd function."""
        gamma, beta = self.layer_norm_weight, self.layer_norm_bias
        compat.refuse_tangents(gamma, beta)
        return gamma, beta

    def _plain_norm(self, x: Tensor) -> Tensor:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        if self.normalization == "LayerNorm":
            return layer_norm(x, weight.shape, weight, bias, self.eps, self.zero_centered_gamma)
        return rms_norm(x, weight.shape, weight, self.eps, self.zero_centered_gamma)

    def _norm_plan(self, dtype: torch.dtype) -> NormPlan:
        return NormPlan(self.normalization, self.eps, self.zero_centered_gamma, dtype, self.return_layernorm_output)


def reset_linear(weight: Tensor, bias: Tensor | None, init_method: Init | None) -> None:
    """Initialise parameters as ``nn.Linear`` does, the weight by ``init_method`` where one is given."""
    with torch.no_grad():
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if bias is not None:
            bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] > 0 else 0
            nn.init.uniform_(bias, -bound, bound)
        if init_method is not None:
            init_method(weight)
