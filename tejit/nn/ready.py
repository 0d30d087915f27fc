"""What an eager call of ``Linear`` found out and the next call need not ask again.

Half of the host's time of an eager forward goes into questions whose answers rarely change: which quantizers, whether
sizes and devices fit, what the tensor cores take. A :class:`Ready` keeps the answers of one call under FP8 with current
scaling, and says whether they hold for another. What is computed is the same, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tejit import compat
from tejit import device as hardware
from tejit.format_info import E5M2, FP8_GEMM_ALIGNMENT
from tejit.formats import Float8CurrentScalingQuantizer
from tejit.kernels import backend
from tejit.nn import asked, gradients, products, weights
from tejit.nn.module import Product, QuantizedModule
from tejit.nn.products import NO_STATE, Plan
from tejit.nn.workspace import Buffers
from tejit.recipe import Recipe, current_recipe, in_force
from tejit.tensor.quantizer import Inner

#: ``(x, weight, bias)`` of a product to its output, and what to save of input and weight.
Forward = Callable[[Tensor, Tensor, "Tensor | None"], tuple[Tensor, Inner, Inner]]

# Bound once: each look-up through a module costs as much as some of the questions below.
_gradients_are_on = torch.is_grad_enabled
_plainly_eager = compat.plainly_eager
_backend = backend.current
_STRIDED = torch.strided


class Ready:
    """The answers of a call: ``forward`` is the product that came of them, of a ``(rows, K)`` input.

    Of tensors it holds only what the module holds too.
    """

    def __init__(
        self,
        module: QuantizedModule,
        recipe: Recipe,
        product: Product,
        forward: Forward,
        x: Tensor,
        bias: Tensor | None,
        first: bool | None,
        buffers: Buffers | None,
    ) -> None:
        weight: Any = product.weight
        self.recipe, self.context, self.backend = recipe, (recipe, None), backend.current()
        self.forward, self.first = forward, first
        # What a graph takes with it. It lives as long as an output does, so nothing of this object's tensors is there.
        tensors = ("x", "weight", None if bias is None else "bias")
        self.of_backward = product.plan, weight.shape[1], x.dtype, tensors
        self.switches = _switches(module)
        self.weight, self.bias, self.x_shape, self.x_kind = weight, bias, x.shape, type(x)
        self.device, self.dtype = x.device, x.dtype
        # The weight may become another under the same name: its ``data`` assigned, swapped with a quantized tensor.
        self.kind, self.shape = type(weight), weight.shape
        self.grad, self.x_learns, self.weight_learns = torch.is_grad_enabled(), x.requires_grad, weight.requires_grad
        self.bias_learns = bias is not None and bias.requires_grad
        self.with_gradients = self.grad and (self.x_learns or self.weight_learns or self.bias_learns)
        # The buffers that the forward reads, where some came with the weight, and the address of the rowwise bytes.
        given: Any = product.given
        self.given, self.memory = given, given[0].data_ptr() if given else None
        self.buffers = buffers  # of the workspace

    def __call__(self, x: Tensor) -> Tensor:
        """What the module's forward computes, of an input for which this :meth:`holds`."""
        flat = x if x.dim() == 2 else x.reshape(-1, self.shape[1])
        out: Tensor
        if self.with_gradients:
            out = _apply(flat, self.weight, self.bias, self)
        else:
            out = self.forward(flat, self.weight, self.bias)[0]
        return out if x.dim() == 2 else out.reshape(*x.shape[:-1], self.shape[0])

    def holds(self, module: QuantizedModule, x: Tensor, first: bool | None) -> bool:
        """Whether a call with these arguments would find the same answers.

        The questions are put one by one and as C answers them: each function of Python's costs more than what it asks.
        """
        # Not by attributes of the module, which cost half a microsecond each. Where weight or bias is no parameter
        # (torch.nn.utils.parametrize, prune, a buffer) or something hides it, a call asks for itself.
        own, hiding = module._parameters, module.__dict__
        weight, bias, shape = self.weight, self.bias, self.shape
        asked = in_force()
        return (
            asked.recipe is self.recipe
            and asked.group is None
            # Before any size is compared: those of a dispatch mode may be symbols, which keep what they are asked.
            and _plainly_eager()
            # No input that is handled otherwise (tejit.nn.inputs): nested, sparse, or what a tracer follows.
            and type(x) is self.x_kind
            and x.layout is _STRIDED
            and own.get("weight") is weight
            and (None if module.return_bias else own.get("bias", hiding)) is bias
            and "weight" not in hiding
            and "bias" not in hiding
            and first is self.first
            # As in _switches, without the cost of a call.
            and (module.name, module.save_original_input, module.fuse_wgrad_accumulation, module.delay_wgrad_compute)
            == self.switches
            # At least as many elements as a row has, which is 1 or more: no scalar, and not empty.
            and (x.shape == self.x_shape or (x.numel() >= shape[1] and x.shape[-1] == shape[1]))
            and x.dtype is self.dtype
            and x.device == self.device
            and _gradients_are_on() is self.grad
            and x.requires_grad is self.x_learns
            and weight.requires_grad is self.weight_learns
            and type(weight) is self.kind
            and weight.shape == shape
            and weight.device == self.device
            and weight.dtype is self.dtype
            and (bias is None or (bias.dtype is self.dtype and bias.requires_grad is self.bias_learns))
            and (self.memory is None or self._same_buffers(module))
            and _backend() == self.backend
        )

    def _same_buffers(self, module: QuantizedModule) -> bool:
        given, memory = self.given, self.memory
        if given[0].data_ptr() != memory:  # the forward has a view of it
            return False
        if self.buffers is None:
            weight = self.weight
            return weight._data is given[0] and weight._transpose is given[1] and weight._scale_inv is given[2]
        (form_name, form, names), found = self.buffers, module._buffers
        return (
            module.__dict__.get(form_name) == form
            and found.get(names[0]) is given[0]
            and found.get(names[1]) is given[1]  # of no name: None
            and found.get(names[2]) is given[2]
        )


def _switches(module: QuantizedModule) -> tuple[Any, ...]:
    """What a module's attributes say about its calls; somebody may change them between two."""
    return module.name, module.save_original_input, module.fuse_wgrad_accumulation, module.delay_wgrad_compute


class _Product(torch.autograd.Function):
    """The product of a call that is ready: what ``linear_function`` does, where nothing is left to decide."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ready: Ready) -> Tensor:
        out, kept_x, kept_w = ready.forward(x, weight, bias)
        ctx.save_for_backward(*kept_x, *kept_w)
        ctx.of_call, ctx.of_x = ready.of_backward, len(kept_x)
        return out

    @staticmethod
    @asked.first_derivative_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (plan, features, dtype, tensors), of_x, saved = ctx.of_call, ctx.of_x, ctx.saved_tensors
        x, weight, bias = asked.of(ctx, tensors)
        dgrad, wgrad = gradients.product_gradients(
            gradients.narrowed(plan, x, weight),
            None,
            None,
            NO_STATE,
            grad_output,
            saved[:of_x],
            saved[of_x:],
            features,
            dtype,
            dtype,
        )
        return dgrad, wgrad, grad_output.sum(0) if bias else None, None


_apply = compat.direct_apply(_Product)


def of_call(
    module: QuantizedModule, product: Product, x: Tensor, bias: Tensor | None, first: bool | None
) -> Ready | None:
    """The answers of a call that found ``product``; None where another call has to ask for itself.

    That is wherever a call has more to do than to compute: fill the workspace, reach ``main_grad``, change dtypes;
    where weight or bias are the module's for this call only (``torch.func.functional_call``), which would keep them
    and their history alive; and where no answer of an earlier call would hold: tensors of a dispatch mode
    (``FakeTensorMode``) or of a transform of functions would come out of later calls.
    """
    plan, recipe = product.plan, current_recipe()
    plain = (
        recipe is not None
        and not first
        and product.late is None
        and product.main_grad is None
        and product.weight is module._parameters.get("weight")
        and compat.plainly_eager()
        and all(type(size) is int for size in x.shape)  # and no symbol of a fake tensor's, which keeps what it is asked
    )
    forward = _forward(plan, product.given, x, product.weight, bias) if plain else None
    if recipe is None or forward is None:
        return None
    if not all(isinstance(own, nn.Parameter) for own in (product.weight, bias) if own is not None):
        return None
    buffers = None
    if plan.weight_source == weights.WORKSPACE:
        buffers = module._workspace_record(plan.quantizers, "weight")
        if buffers is None:  # another thread has called the module under another recipe in the meantime
            return None
    return Ready(module, recipe, product, forward, x, bias, first, buffers)


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
