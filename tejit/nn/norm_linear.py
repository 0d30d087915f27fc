"""``LayerNormLinear``: a norm and the linear layer behind it, with the norm's output quantized as it is made."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tejit.nn import init, inputs
from tejit.nn.module import checked_dtype, returned
from tejit.nn.norm_linear_function import any_needs_grad, norm_linear
from tejit.nn.normed_module import Init, NormedModule, reset_linear
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
        fuse_wgrad_accumulation, delay_wgrad_compute: as in ``Linear``.
        name: what recipes call the layer (``overrides``, ``CustomRecipe``); see ``tejit.name_modules``.

    Raises:
        ValueError: ``dtype`` and ``params_dtype`` are both given and differ; ``return_bias`` without ``bias``; another
            ``normalization``; ``eps`` below zero, infinite or NaN.

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
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        name: str | None = None,
    ) -> None:
        dtype = checked_dtype(dtype, params_dtype)
        super().__init__(
            in_features,
            eps,
            normalization,
            zero_centered_gamma,
            return_layernorm_output,
            return_bias,
            bias,
            device,
            dtype,
            name,
            fuse_wgrad_accumulation,
            delay_wgrad_compute,
        )
        self.in_features, self.out_features = in_features, out_features
        self._init_method = init_method
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()
        self._init_delayed(self.weight.device)
        init.quantize_parameters(self, {"weight": self.name})

    def reset_parameters(self) -> None:
        """Initialise as ``nn.LayerNorm`` and ``nn.Linear`` do, the weight by ``init_method`` where one was given."""
        self._reset_norm()
        with init.in_high_precision(self, "weight"):
            reset_linear(self.weight, self.bias, self._init_method)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, ...]:
        """``(..., in_features)`` to ``(..., out_features)``; then, as asked for, the bias and the norm's output.

        ``is_first_microbatch`` is as in ``Linear.forward``.
        """
        other = inputs.other_forward(LayerNormLinear.forward, self, x, is_first_microbatch)
        if other is not inputs.PLAIN:
            return other
        quantizers = self._quantizers()
        weight, own_bias = self.weight, self.bias
        bias = None if self.return_bias else own_bias
        if quantizers is None:
            y = self._plain_norm(x)
            self._calibrate(y, weight)
            out = F.linear(y, self._plain(weight, is_first_microbatch), bias)
        else:
            out, y = self._quantized(x, weight, bias, quantizers, is_first_microbatch)
        more = ((returned(own_bias),) if self.return_bias else ()) + ((y,) if self.return_layernorm_output else ())
        return (out, *more) if more else out

    def _quantized(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, quantizers: LinearQuantizers, is_first: bool | None
    ) -> Any:
        self._make_room(is_first, {"weight": (quantizers, weight)})
        gamma, beta = self._norm_parameters()
        low, weight, bias = self._operands(x, weight, bias)
        product = self._product(quantizers, weight, any_needs_grad(x, gamma, beta), is_first)
        flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        norm = self._norm_plan(low.dtype)
        out, y = norm_linear(flat, gamma, beta, norm, product, bias)
        if x.dim() == 2:
            return out, y
        return out.reshape(*x.shape[:-1], self.out_features), None if y is None else y.reshape(x.shape)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" normalization={self.normalization}"
        )
