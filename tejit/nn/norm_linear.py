"""``LayerNormLinear``: a norm and the linear layer behind it, with the norm's output quantized as it is made."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tejit.nn.arguments import one_dtype
from tejit.nn.naming import checked_name
from tejit.nn.norm_linear_function import NormLinear
from tejit.nn.normed_module import Init, NormedModule, reset_linear
from tejit.nn.products import Plan
from tejit.recipe import LinearQuantizers


class LayerNormLinear(NormedModule):
    """``norm(x) @ weight.T + bias``: ``nn.LayerNorm`` or ``nn.RMSNorm``, then ``nn.Linear``.

    Without ``tejit.autocast`` it is those two. Under it the norm is computed in float32 and its output, rounded to
    the input's dtype, exists in quantized form only. Inside ``torch.autocast`` output and products take the AMP
    dtype; the norm takes its input as it comes.

    Args:
        in_features, out_features: any sizes.
        eps: added to the mean square.
        bias: whether the linear layer adds a bias.
        device, dtype: of the parameters; None is torch's default.
        params_dtype: another name of ``dtype``.
        normalization: ``LayerNorm`` or ``RMSNorm`` (no ``layer_norm_bias``).
        init_method: called with the weight instead of ``nn.Linear``'s initialisation.
        return_bias: return the bias too and do not add it.
        return_layernorm_output: return the norm's output too, in high precision.
        zero_centered_gamma: ``layer_norm_weight`` holds ``gamma - 1``.
        name: what recipes call the layer (``overrides``, ``CustomRecipe``); see ``tejit.name_modules``.

    Raises:
        ValueError: ``dtype`` and ``params_dtype`` are both given and differ; ``return_bias`` without ``bias``; another
            ``normalization``.

    Parameters: ``layer_norm_weight``, ``layer_norm_bias`` ``(in_features,)``, ``weight`` ``(out_features,
    in_features)``, ``bias`` ``(out_features,)``. Errors of forward are those of ``tejit.Linear``.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        normalization: str = "LayerNorm",
        init_method: Init | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        name: str | None = None,
    ) -> None:
        dtype = one_dtype(dtype, params_dtype)
        if return_bias and not bias:
            raise ValueError("return_bias=True needs bias=True: there would be no bias to return")
        super().__init__(in_features, eps, normalization, zero_centered_gamma, return_layernorm_output, device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.return_bias = return_bias
        self.name = checked_name(name)
        self._init_method = init_method
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as ``nn.LayerNorm`` and ``nn.Linear`` do, the weight by ``init_method`` where one was given."""
        self._reset_norm()
        reset_linear(self.weight, self.bias, self._init_method)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """``(..., in_features)`` to ``(..., out_features)``; then, as asked for, the bias and the norm's output."""
        recipe = self._recipe()
        quantizers = None if recipe is None else recipe.for_linear(self.name)
        bias = None if self.return_bias else self.bias
        if quantizers is None:
            y = self._plain_norm(x)
            out = F.linear(y, self.weight, bias)
        else:
            out, y = self._quantized(x, bias, quantizers)
        more = ((self.bias,) if self.return_bias else ()) + ((y,) if self.return_layernorm_output else ())
        return (out, *more) if more else out

    def _quantized(self, x: Tensor, bias: Tensor | None, quantizers: LinearQuantizers) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._operands(x, self.weight, bias)
        plan = Plan(quantizers, self._norm_needs_grad(x), torch.is_grad_enabled() and weight.requires_grad)
        flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        norm = self._norm_plan(weight.dtype)
        found = NormLinear.apply(flat, self.layer_norm_weight, self.layer_norm_bias, weight, bias, norm, plan)
        out, y = found if norm.returned else (found, None)
        return out.reshape(*x.shape[:-1], weight.shape[0]), None if y is None else y.reshape(x.shape)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" normalization={self.normalization}"
        )
