"""Parameters that live quantized: what modules built inside ``quantized_model_init`` do with their weights."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tejit import compat
from tejit.format_info import HIGH_PRECISION_DTYPES
from tejit.formats import Float8CurrentScalingQuantizer
from tejit.formats.float8.slot import Float8SlotQuantizer
from tejit.recipe import LinearQuantizers
from tejit.recipe.model_init import current_model_init
from tejit.tensor import QuantizedTensor, Quantizer
from tejit.tensor.attached import carry
from tejit.tensor.kept import clear_high_precision_init_val, get_high_precision_init_val, keep


def quantize_parameters(module: Any, products: dict[str, str | tuple[Any, ...] | None]) -> None:
    """Replace weights of a module under construction by quantized ones, as ``quantized_model_init`` asks; nothing
    outside of it.

    Args:
        module: one of tejit's modules, its parameters made and initialised.
        products: for each weight's parameter name, what the recipe calls its linear product: the arguments of
            ``Recipe.for_linear``, or the only one.
    """
    asked = current_model_init()
    if asked is None:
        return
    for parameter_name, product_name in products.items():
        called = product_name if isinstance(product_name, tuple) else (product_name,)
        quantizers = asked.recipe.for_linear(*called)
        quantizer = None if quantizers is None else weight_quantizer(module, quantizers, parameter_name)
        parameter = module._parameters[parameter_name]
        if quantizers is None or quantizer is None or isinstance(parameter, QuantizedTensor):
            continue
        if not _fits(quantizer, parameter, quantizers.alignment):
            _say_it_stays(type(module).__name__, parameter_name, tuple(parameter.shape), parameter.dtype, quantizer)
            continue
        module._parameters[parameter_name] = _quantized(parameter, quantizer, asked.preserve)


def weight_quantizer(module: Any, quantizers: LinearQuantizers, parameter: str) -> Quantizer | None:
    """What quantizes a parameter of ``module``; None where the recipe leaves weights in high precision without a
    quantizer (an ``IdentityQuantizer`` that it names is one: the parameter is an ``IdentityTensor``).

    Under delayed scaling a parameter is scaled by its own amax: that is at hand whenever the parameter is written,
    and the scale needs no state of the module.
    """
    quantizer = quantizers.weight.both if torch.is_grad_enabled() else quantizers.weight.rowwise
    if isinstance(quantizer, Float8SlotQuantizer):
        quantizer = Float8CurrentScalingQuantizer(quantizer.fp8_dtype, **quantizer.get_usages())
    if quantizers.weight_is_left:
        return None
    return quantizer.replace(internal=False)


def _fits(quantizer: Quantizer, weight: Tensor, multiple: int) -> bool:
    return quantizer.is_quantizable(weight) and not any(size % multiple for size in weight.shape)


@functools.cache
def _say_it_stays(
    module: str, parameter: str, shape: tuple[int, ...], dtype: torch.dtype, quantizer: Quantizer
) -> None:
    compat.warn(
        f"tejit: {module}.{parameter} of shape {shape} in {dtype} does not fit {quantizer!r} and stays in high"
        " precision; it is quantized in each call under autocast (said once for each shape)"
    )


def _quantized(parameter: nn.Parameter, quantizer: Quantizer, preserve: bool) -> nn.Parameter:
    values = parameter.detach()
    # The module computes in its own dtype, whatever an IdentityQuantizer keeps values in.
    made = nn.Parameter(quantizer.quantize(values).to(values.dtype), requires_grad=parameter.requires_grad)
    carry(parameter, made)
    if preserve:
        made.get_high_precision_init_val = types.MethodType(get_high_precision_init_val, made)
        made.clear_high_precision_init_val = types.MethodType(clear_high_precision_init_val, made)
        keep(made, values)
    return made


def taken_over(placeholder: QuantizedTensor, values: nn.Parameter) -> nn.Parameter:
    """Values that a loader assigns in place of a quantized parameter without memory, in that parameter's format, with
    what is attached to either; as they are where their shape or dtype is none that it stands for."""
    quantizer: Any = placeholder._known_quantizer()
    if values.shape != placeholder.shape or values.dtype not in HIGH_PRECISION_DTYPES:
        return values
    plain = values.detach()
    made = nn.Parameter(quantizer.quantize(plain).to(plain.dtype), requires_grad=values.requires_grad)
    for old in (placeholder, values):
        carry(old, made)
    if "get_high_precision_init_val" in vars(made):
        keep(made, plain)
    return made


@contextlib.contextmanager
def in_high_precision(module: Any, *names: str) -> Iterator[None]:
    """Initialise parameters: quantized ones are plain inside, uninitialised, and take over what was written to those.

    An initialisation that fails leaves them as they were.
    """
    quantized = {name: p for name in names if isinstance(p := module._parameters.get(name), QuantizedTensor)}
    for name, parameter in quantized.items():
        plain = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        module._parameters[name] = nn.Parameter(plain, requires_grad=parameter.requires_grad)
    written: dict[str, Tensor] = {}
    try:
        yield
        written = {name: module._parameters[name].detach() for name in quantized}
    finally:
        module._parameters.update(quantized)
    for name, values in written.items():
        if not values.is_meta:
            with torch.no_grad():
                quantized[name].copy_(values)
            if "get_high_precision_init_val" in vars(quantized[name]):
                keep(quantized[name], values)
