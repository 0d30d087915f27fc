"""``Linear``: ``nn.Linear`` that quantizes under ``tejit.autocast``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tejit.nn import init, inputs, ready
from tejit.nn.linear_function import quantized_linear
from tejit.nn.module import QuantizedModule, checked_dtype, returned


class Linear(QuantizedModule, nn.Linear):
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
        fuse_wgrad_accumulation: add the weight's gradient to ``weight.main_grad``, in that tensor's dtype, instead
            of returning it to autograd; ``weight.grad`` stays None. Backward sets ``weight.grad_added_to_main_grad``
            where the weight has that attribute (compiled: forward does) and then returns a gradient whose values mean
            nothing, so that hooks run; ``weight.overwrite_main_grad`` makes each backward overwrite.
        save_original_input: save the input in high precision for backward and quantize it again there.
        delay_wgrad_compute: leave the weight's gradient to :meth:`backward_dw`. Not inside ``torch.compile``.
        name: what recipes call the layer (``overrides``, ``CustomRecipe``); see ``tejit.name_modules``.

    ``weight`` may be a quantized tensor, which is multiplied as it is where its format is the recipe's for weights;
    its gradient is a high-precision tensor of its nominal dtype.

    Raises:
        ValueError: ``dtype`` and ``params_dtype`` are both given and differ; ``return_bias`` without ``bias``.
        TypeError: a switch is no bool.

    Under ``tejit.autocast`` forward raises ``TypeError`` for an input whose dtype differs from the weight's (outside
    of ``torch.autocast``) or is not float32, bfloat16 or float16, ``ValueError`` for an input whose last dimension is
    not ``in_features`` or whose device is not the weight's, and ``RuntimeError`` for a quantized weight of another
    format than the recipe's and for ``is_first_microbatch=False`` where no first one was. It has a first derivative
    only. In a checkpointed region it repeats the recipe of its last forward; a compiled module inside an eager
    checkpoint does not, so call backward inside ``autocast`` there.
    """

    return_bias = False
    _init_method: Callable[[Tensor], object] | None = None

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
        fuse_wgrad_accumulation: bool = False,
        save_original_input: bool = False,
        delay_wgrad_compute: bool = False,
        name: str | None = None,
    ) -> None:
        dtype = checked_dtype(dtype, params_dtype)
        if return_bias and not bias:
            raise ValueError("return_bias=True needs bias=True: there would be no bias to return")
        # Set before nn.Linear.__init__, which calls reset_parameters.
        object.__setattr__(self, "_init_method", init_method)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._init_method = init_method
        self.return_bias = return_bias
        self._init_quantized(
            name,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            save_original_input=save_original_input,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self._init_delayed(self.weight.device)
        init.quantize_parameters(self, {"weight": self.name})

    def reset_parameters(self) -> None:
        """Initialise the parameters as ``nn.Linear`` does, the weight by ``init_method`` where one was given."""
        with init.in_high_precision(self, "weight"):
            super().reset_parameters()
            if self._init_method is not None:
                with torch.no_grad():
                    self._init_method(self.weight)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``(..., in_features)`` to ``(..., out_features)``; with ``return_bias`` also the bias.

        ``is_first_microbatch`` is for several batches between two steps of an optimizer: True quantizes the weight
        into a workspace, False takes it from there, None quantizes it in this call. With ``fuse_wgrad_accumulation``
        True makes this batch's gradient overwrite ``main_grad`` instead of being added to it.
        """
        compiling = torch.compiler.is_compiling()
        known = None if compiling else self._ready
        if known is not None and known.holds(self, x, is_first_microbatch):
            self.__dict__["_forward_context"] = known.context
            out = known(x)
            return (out, returned(self.bias)) if self.return_bias else out
        other = inputs.other_forward(Linear.forward, self, x, is_first_microbatch)
        if other is not inputs.PLAIN:
            return other
        weight, own_bias = self.weight, self.bias  # read once: a parametrization computes them, at random perhaps
        bias = None if self.return_bias else own_bias
        quantizers = self._quantizers()
        if quantizers is None:
            self._calibrate(x, weight)
            out = F.linear(x, self._plain(weight, is_first_microbatch), bias)
        else:
            self._make_room(is_first_microbatch, {"weight": (quantizers, weight)})
            x, weight, bias = self._operands(x, weight, bias)
            product = self._product(quantizers, weight, x.requires_grad, is_first_microbatch)
            if not compiling:
                self.__dict__["_ready"] = ready.of_call(self, product, x, bias, is_first_microbatch)
            out = quantized_linear(x, product, bias)
        return (out, returned(own_bias)) if self.return_bias else out
