"""What an eager call of ``Linear`` found out and the next call need not ask again.

Half of the host's time of an eager forward goes into questions whose answers rarely change: which quantizers, whether
sizes and devices fit, what the tensor cores take. A :class:`Ready` keeps the answers of one call under FP8 with current
scaling, and says whether they hold for another. What is computed is the same, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tejit import compat
from tejit import device as hardware
from tejit.format_info import E5M2, FP8_GEMM_ALIGNMENT
from tejit.formats import Float8CurrentScalingQuantizer
from tejit.kernels import backend
from tejit.nn import products, weights
from tejit.nn.module import Product, QuantizedModule
from tejit.nn.products import Forward, Plan
from tejit.recipe import Recipe, current_group, current_recipe
from tejit.tensor.quantizer import Inner


class Ready:
    """The answers of a call. ``product`` is what the module made of them, ``forward`` in its plan included.

    Of tensors it holds only what the module holds too.
    """

    __slots__ = (
        "asked",
        "backend",
        "bias",
        "context",
        "device",
        "dtype",
        "first",
        "kind",
        "memory",
        "needs",
        "product",
        "rowwise",
        "shape",
    )

    def __init__(
        self,
        module: QuantizedModule,
        recipe: Recipe,
        product: Product,
        x: Tensor,
        bias: Tensor | None,
        first: bool | None,
    ) -> None:
        self.context, self.asked = (recipe, None), _asked(module)
        self.product, self.bias, self.first = product, bias, first
        self.device, self.dtype = x.device, x.dtype
        # The weight may become another under the same name: its ``data`` assigned, swapped with a quantized tensor.
        self.kind, self.shape = type(product.weight), product.weight.shape
        self.rowwise = product.given[0] if product.given else None
        self.memory = None if self.rowwise is None else self.rowwise.data_ptr()
        self.needs = (torch.is_grad_enabled(), x.requires_grad, product.weight.requires_grad)
        self.backend = backend.current()

    def holds(self, module: QuantizedModule, x: Tensor, first: bool | None) -> bool:
        """Whether a call with these arguments would find the same answers."""
        # Not by attributes of the module, which cost half a microsecond each. Where weight or bias is no parameter
        # (torch.nn.utils.parametrize, prune, a buffer) or something hides it, a call asks for itself.
        own, weight, hiding = module._parameters, self.product.weight, module.__dict__
        bias, shape = self.bias, self.shape
        return (
            current_recipe() is self.context[0]
            and own.get("weight") is weight
            and (None if module.return_bias else own.get("bias", hiding)) is bias
            and "weight" not in hiding
            and "bias" not in hiding
            and first is self.first
            and _asked(module) == self.asked
            and x.numel() >= shape[1]  # which is at least 1: no scalar, and not empty
            and x.shape[-1] == shape[1]
            and x.dtype is self.dtype
            and x.device == self.device
            and self.needs == (torch.is_grad_enabled(), x.requires_grad, weight.requires_grad)
            and type(weight) is self.kind
            and weight.shape == shape
            and weight.device == self.device
            and weight.dtype is self.dtype
            and (bias is None or bias.dtype is self.dtype)
            and self._same_buffers(module, weight)
            and backend.current() == self.backend
            and current_group() is None
            and not compat.autocast_enabled(self.device.type)
            and not compat.in_backward()
            and not compat.has_tangent(x, weight, bias)
        )

    def _same_buffers(self, module: QuantizedModule, weight: Any) -> bool:
        if self.rowwise is None:  # no buffers came with it: the call quantizes
            return True
        if self.rowwise.data_ptr() != self.memory:  # the plan's forward has a view of it
            return False
        source, given = self.product.plan.weight_source, self.product.given
        if source == weights.PARAMETER:
            return weight._data is given[0] and weight._transpose is given[1] and weight._scale_inv is given[2]
        return module._workspace_is(self.product.plan.quantizers, "weight", given)


def _asked(module: QuantizedModule) -> tuple[Any, ...]:
    """What a module's attributes say about its calls; somebody may change them between two."""
    return module.name, module.save_original_input, module.fuse_wgrad_accumulation, module.delay_wgrad_compute


def of_call(
    module: QuantizedModule, product: Product, x: Tensor, bias: Tensor | None, first: bool | None
) -> Ready | None:
    """The answers of a call that found ``product``; None where another call has to ask for itself.

    That is wherever a call has more to do than to compute: fill the workspace, reach ``main_grad``, change dtypes;
    where weight or bias are the module's for this call only (``torch.func.functional_call``), which would keep them
    and their history alive; and under a dispatch mode (``FakeTensorMode``): its tensors would come out of later calls.
    """
    plan, recipe = product.plan, current_recipe()
    plain = (
        recipe is not None
        and first is not True
        and product.late is None
        and product.main_grad is None
        and product.weight is module.weight
        and not compat.in_backward()
        and not compat.autocast_enabled(x.device.type)
    )
    forward = _forward(plan, product.given, x, product.weight, bias) if plain else None
    if recipe is None or forward is None or torch._C._len_torch_dispatch_stack() > 0:
        return None
    if not all(isinstance(own, nn.Parameter) for own in (product.weight, bias) if own is not None):
        return None
    return Ready(module, recipe, product._replace(plan=plan._replace(forward=forward)), x, bias, first)


def _forward(plan: Plan, given: Inner, x: Tensor, weight: Tensor, bias: Tensor | None) -> Forward | None:
    """The forward of a product where the tensor cores take its operands as they are; else None."""
    quantizers = plan.quantizers
    x_quantizer, w_quantizer = products.input_quantizer(plan), weights.quantizer(plan)
    own_weight = plan.weight_source == weights.CALL
    w_fp8 = getattr(quantizers.weight.rowwise, "fp8_dtype", None)
    if not (
        type(x_quantizer) is Float8CurrentScalingQuantizer
        and type(w_quantizer) is Float8CurrentScalingQuantizer
        and plan.group is None
        and (own_weight or (plan.weight_usages[0] and len(given) == 3))
        and backend.use_ops(x.device)
        and hardware.fp8_gemm_is_native(x.device)
        and not x_quantizer.fp8_dtype == w_fp8 == E5M2.dtype
        and x.numel() > 0
        and weight.shape[0] % FP8_GEMM_ALIGNMENT == 0
        and weight.shape[1] % FP8_GEMM_ALIGNMENT == 0
        and (bias is None or bias.dtype == x.dtype != torch.float32)
    ):
        return None
    dtype, x_fp8, fast_accum = x.dtype, x_quantizer.fp8_dtype, quantizers.fast_accum_fprop
    cast_x, cast_w = x_quantizer.caster(x.device), w_quantizer.caster(x.device)
    given_codes = None
    if not own_weight:
        assert given[0] is not None
        given_codes = given[0].view(w_fp8).t()
    # What to save is decided once too: the columnwise buffers, where nothing else was asked for.
    columns_of_x = quantizers.input.both.columnwise_inner
    columns_are_kept = plan.needs_wgrad and quantizers.backward_override is None and not plan.save_original_input
    given_kept = weights.kept(plan, weight, given, given) if given_codes is not None else ()

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Inner, Inner]:
        x_inner = cast_x(x)
        w_inner = given if given_codes is not None else cast_w(weight)
        codes = given_codes if given_codes is not None else w_inner[0].view(w_fp8).t()  # type: ignore[union-attr]
        out = torch._scaled_mm(
            x_inner[0].view(x_fp8),  # type: ignore[union-attr]
            codes,
            x_inner[2],
            w_inner[2],
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast_accum,
        )
        kept_x = columns_of_x(x_inner) if columns_are_kept else products.kept_input(plan, x, x_inner)
        kept_w = given_kept if given_codes is not None else weights.kept(plan, weight, w_inner, given)
        return out, kept_x, kept_w

    return forward
