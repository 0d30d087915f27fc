"""``LayerNormMLP``: a norm and the two linear layers with an activation between them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from tejit import compat
from tejit.formats import IdentityQuantizer
from tejit.nn import init, inputs, weights
from tejit.nn.arguments import one_of
from tejit.nn.fused import ACTIVATIONS, GATED, QUICK
from tejit.nn.module import Product, checked_dtype, eligible, returned
from tejit.nn.norm_linear_function import any_needs_grad
from tejit.nn.norm_mlp_function import norm_mlp
from tejit.nn.normed_module import Init, NormedModule, reset_linear
from tejit.recipe import LinearQuantizers
from tejit.recipe.recipes import linear_quantizers

_KEEP = IdentityQuantizer()
#: For a product that a recipe keeps in high precision while it quantizes the other one.
_HIGH_PRECISION = linear_quantizers(_KEEP, _KEEP, _KEEP)


class LayerNormMLP(NormedModule):
    """``fc2(activation(fc1(norm(x))))``: ``nn.LayerNorm`` or ``nn.RMSNorm``, and two ``nn.Linear``.

    Without ``tejit.autocast`` it is those. Under it norm and activation are computed in float32 and their outputs,
    rounded to the input's dtype, exist in quantized form only. Inside ``torch.autocast`` output and products take
    the AMP dtype; the norm takes its input as it comes.

    Args:
        hidden_size: features of input and output.
        ffn_hidden_size: features between the two linear layers.
        eps: added to the mean square.
        bias: whether the linear layers add a bias.
        device, dtype: of the parameters; None is torch's default.
        params_dtype: another name of ``dtype``.
        normalization: ``LayerNorm`` or ``RMSNorm`` (no ``layer_norm_bias``).
        activation: ``gelu`` (the approximation by tanh, as in Transformer Engine), ``qgelu`` (the one by sigmoid,
            ``x * sigmoid(1.702 x)``), ``relu``, ``silu``, ``srelu`` (squared ReLU), or one of them with a gate:
            ``geglu``, ``qgeglu``, ``reglu``, ``swiglu``, ``sreglu``, and ``glu``, which is ``sigmoid`` with a gate.
        init_method, output_layer_init_method: called with ``fc1_weight`` and ``fc2_weight`` instead of ``nn.Linear``'s
            initialisation.
        return_bias: return ``fc2_bias`` too and do not add it.
        return_layernorm_output: return the norm's output too, in high precision.
        zero_centered_gamma: ``layer_norm_weight`` holds ``gamma - 1``.
        fuse_wgrad_accumulation, delay_wgrad_compute: as in ``Linear``, of both weights.
        checkpoint: keep the input alone for backward, which then computes the rest again.
        name: what recipes call the module (``overrides``, ``CustomRecipe``); its products are ``name.fc1`` and
            ``name.fc2``. See ``tejit.name_modules``.

    Raises:
        ValueError: ``dtype`` and ``params_dtype`` are both given and differ; ``return_bias`` without ``bias``; another
            ``normalization`` or ``activation``; ``eps`` below zero, infinite or NaN.

    Parameters: ``layer_norm_weight``, ``layer_norm_bias`` ``(hidden_size,)``, ``fc1_weight`` ``(ffn_hidden_size,
    hidden_size)``, ``fc1_bias``, ``fc2_weight`` ``(hidden_size, ffn_hidden_size)``, ``fc2_bias``. With a gate ``fc1``
    has twice the rows: the activation's input first, then the gate. Errors of forward are those of ``tejit.Linear``.
    """

    _products = 2
    fc1_bias: nn.Parameter | None
    fc2_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        checkpoint: bool = False,
        name: str | None = None,
    ) -> None:
        dtype = checked_dtype(dtype, params_dtype)
        super().__init__(
            hidden_size,
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
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.activation = one_of("activation", activation, tuple(ACTIVATIONS))
        self.checkpoint = checkpoint
        self._init_methods = (init_method, output_layer_init_method)
        rows = 2 * ffn_hidden_size if activation in GATED else ffn_hidden_size
        for layer, shape in (("fc1", (rows, hidden_size)), ("fc2", (hidden_size, ffn_hidden_size))):
            self.register_parameter(f"{layer}_weight", nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
            self.register_parameter(
                f"{layer}_bias", nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
            )
        self.reset_parameters()
        self._init_delayed(self.fc1_weight.device)
        init.quantize_parameters(self, {"fc1_weight": (self.name, "fc1"), "fc2_weight": (self.name, "fc2")})

    def reset_parameters(self) -> None:
        """Initialise as ``nn.LayerNorm`` and ``nn.Linear`` do, a weight by its init method where one was given."""
        self._reset_norm()
        with init.in_high_precision(self, "fc1_weight", "fc2_weight"):
            reset_linear(self.fc1_weight, self.fc1_bias, self._init_methods[0])
            reset_linear(self.fc2_weight, self.fc2_bias, self._init_methods[1])

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, ...]:
        """``(..., hidden_size)`` to the same; then, as asked for, the bias and the norm's output.

        ``is_first_microbatch`` is as in ``Linear.forward``.
        """
        other = inputs.other_forward(LayerNormMLP.forward, self, x, is_first_microbatch)
        if other is not inputs.PLAIN:
            return other
        if self.checkpoint and torch.is_grad_enabled():
            run = torch.utils.checkpoint.checkpoint
            out, y = run(self._run, x, is_first_microbatch, use_reentrant=False)
        else:
            out, y = self._run(x, is_first_microbatch)
        more = ((returned(self.fc2_bias),) if self.return_bias else ()) + ((y,) if self.return_layernorm_output else ())
        return (out, *more) if more else out

    def _run(self, x: Tensor, is_first: bool | None) -> tuple[Tensor, Tensor | None]:
        """The output and, where it is asked for, the norm's."""
        recipe = self._recipe()
        if recipe is not None:
            one, two = recipe.for_linear(self.name, "fc1"), recipe.for_linear(self.name, "fc2")
            if one is not None or two is not None:
                return self._quantized(x, one, two, is_first)
        y, fc1, fc2 = self._plain_norm(x), self.fc1_weight, self.fc2_weight
        h = _plain_activation(F.linear(y, self._plain(fc1, is_first, "fc1_weight"), self.fc1_bias), self.activation)
        self._calibrate(y, fc1, h, fc2, products=("fc1", "fc2"))
        weight2 = self._plain(fc2, is_first, "fc2_weight")
        out = F.linear(h, weight2, None if self.return_bias else self.fc2_bias)
        return out, y if self.return_layernorm_output else None

    def _quantized(
        self, x: Tensor, one: LinearQuantizers | None, two: LinearQuantizers | None, is_first: bool | None
    ) -> tuple[Tensor, Tensor | None]:
        fc1, fc2 = self.fc1_weight, self.fc2_weight
        self._make_room(is_first, {"fc1_weight": (one, fc1), "fc2_weight": (two, fc2)})
        gamma, beta = self._norm_parameters()
        low, weight1, bias1 = self._operands(x, fc1, self.fc1_bias, "hidden_size")
        weight2, bias2 = self._behind(low, fc2, None if self.return_bias else self.fc2_bias)
        product1 = self._maybe_quantized(one, weight1, any_needs_grad(x, gamma, beta), is_first, "fc1_weight", 0)
        needs_dgrad = product1.plan.needs_dgrad or any_needs_grad(weight1, bias1)
        product2 = self._maybe_quantized(two, weight2, needs_dgrad, is_first, "fc2_weight", 1)
        flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        norm = self._norm_plan(low.dtype)
        out, y = norm_mlp(
            flat,
            gamma,
            beta,
            norm,
            product1,
            bias1,
            self.activation,
            product2,
            bias2,
        )
        if x.dim() == 2:
            return out, y
        return out.reshape(x.shape), None if y is None else y.reshape(x.shape)

    def _behind(self, low: Tensor, weight: Any, bias: Tensor | None) -> tuple[Any, Tensor | None]:
        """``fc2``'s operands in the dtype of ``low``, which :meth:`_operands` gave for ``fc1``."""
        compat.refuse_tangents(weight, bias)
        if compat.autocast_enabled(low.device.type):
            bias = eligible(bias, low.dtype)
            if not weights.is_quantized(weight):
                weight = eligible(weight, low.dtype)
        elif weight.dtype != low.dtype:
            raise TypeError(f"fc1_weight is {low.dtype} and fc2_weight {weight.dtype}; convert one of them")
        return weight, bias

    def _maybe_quantized(
        self,
        quantizers: LinearQuantizers | None,
        weight: Any,
        needs_dgrad: bool,
        is_first: bool | None,
        parameter: str,
        index: int,
    ) -> Product:
        """:meth:`_product`; where the recipe keeps it in high precision, without quantized data or a workspace."""
        if quantizers is not None:
            return self._product(quantizers, weight, needs_dgrad, is_first, parameter=parameter, index=index)
        product = self._product(_HIGH_PRECISION, weights.values(weight), needs_dgrad, parameter=parameter, index=index)
        plan = compat.replaced(product.plan, accumulate=product.plan.accumulate and not is_first)
        return compat.replaced(product, plan=plan)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, bias={self.fc1_bias is not None},"
            f" normalization={self.normalization}, activation={self.activation}"
        )


def _plain_activation(x: Tensor, activation: str) -> Tensor:
    """As ``fused.activate``, of torch's own functions in ``x``'s dtype."""
    gate = None
    if activation in GATED:
        x, gate = x.chunk(2, -1)
    function = ACTIVATIONS[activation]
    if function == "gelu":
        y = F.gelu(x, approximate="tanh")
    elif function == "silu":
        y = F.silu(x)
    elif function == "qgelu":
        y = x * torch.sigmoid(QUICK * x)
    elif function == "sigmoid":
        y = torch.sigmoid(x)
    else:
        y = F.relu(x) if function == "relu" else F.relu(x).square()
    return y if gate is None else y * gate
