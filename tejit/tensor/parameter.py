"""Quantized parameters made as loaders make them: ``type(old)(new, requires_grad=..., **old.__dict__)``.

Loaders and offload hooks know parameters as objects of a class that takes the new values, as ``nn.Parameter`` does. A
class of quantized tensors does not say how values are quantized, so those come quantized, or with the old parameter.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor

from tejit.format_info import HIGH_PRECISION_DTYPES
from tejit.tensor.attached import PARAMETER_MARK, rebound
from tejit.tensor.storage import QuantizedTensorStorage


class QuantizedTensorMeta(type(Tensor)):  # type: ignore[misc]
    """Class of the classes of quantized tensors: calling one with a tensor makes a parameter of it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get("data") if "shape" not in kwargs else None
        if isinstance(data, Tensor):
            kwargs.pop("data", None)
            return make_parameter(cls, data, *args[1:], **kwargs)
        return super().__call__(*args, **kwargs)


def make_parameter(cls: Any, data: Tensor, requires_grad: bool = True, **others: Any) -> Any:
    """A parameter of class ``cls``, as ``nn.Parameter(data, requires_grad)`` makes one.

    Args:
        cls: a class of quantized tensors.
        data: a tensor of ``cls``, whose buffers are shared; or other values in float32, bfloat16 or float16, which are
            quantized as the old parameter was.
        requires_grad: of the parameter.
        others: the ``__dict__`` of the old parameter, or nothing. What others attached to that one is attached to this.

    Raises ``TypeError`` where the values would have to be quantized and nothing says how, and for a keyword that
    belongs to no parameter; ``ValueError`` for a shape that the format cannot hold.
    """
    whole = "_quantizer" in others  # a __dict__, of whatever a parameter of ours has
    if others and not whole:
        raise TypeError(
            f"{cls.__name__}(data, requires_grad=...) got {', '.join(others)}; besides these two it takes only the"
            " whole __dict__ of the parameter that it replaces"
        )
    if isinstance(data, cls):
        made: Any = data.detach()
    else:
        quantizer = others["_quantizer"] if whole else _quantizer_of_caller(cls)
        nominal = others.get("_dtype", data.dtype)
        made = quantized_for(cls, quantizer, data, nominal)
    made.requires_grad_(requires_grad)
    setattr(made, PARAMETER_MARK, True)
    own = {*made._own_state(), PARAMETER_MARK, "requires_grad"}
    for name, value in others.items():
        if name not in own:
            setattr(made, name, _rebound(name, value, made))
    return made


def quantized_for(cls: Any, quantizer: Any, data: Tensor, nominal: torch.dtype) -> Any:
    """``data`` quantized for a tensor of class ``cls``.

    Raises ``TypeError`` without a quantizer, or for another dtype; ``ValueError`` for a shape that does not fit.
    """
    what = f"a {type(data).__name__} of {data.dtype} and shape {tuple(data.shape)}"
    if quantizer is None:
        raise TypeError(
            f"{cls.__name__} got {what} and the class alone does not say how to quantize it. Give it a"
            f" {cls.__name__}: quantizer(values). Or write the values into the parameter that is there, with"
            " parameter.copy_(values) under torch.no_grad(), or load_state_dict. Or assign them as"
            " torch.nn.Parameter(values) to a module built on the meta device inside of"
            " tejit.quantized_model_init: module.weight = torch.nn.Parameter(values)"
        )
    if data.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"{cls.__name__} got {what}; values to quantize are torch.float32, torch.bfloat16 or torch.float16"
        )
    values = data.detach()
    if isinstance(values, QuantizedTensorStorage):
        values = values.dequantize()
    if not quantizer.is_quantizable(values):
        raise ValueError(
            f"{cls.__name__} got {what}, which does not fit {quantizer!r}: its dimensions must be multiples of"
            f" {_multiple(quantizer)}. Pad the values, or assign a plain parameter in place of the quantized one:"
            " module.weight = torch.nn.Parameter(values); it is quantized in each call under tejit.autocast"
        )
    with torch.no_grad():
        made = quantizer.replace(internal=False).quantize(values, dtype=nominal)
        return made if made.dtype == nominal else made.to(nominal)  # IdentityQuantizer has a dtype of its own


def _multiple(quantizer: Any) -> int:
    """Of what every dimension is a multiple wherever ``quantizer`` can follow: the first one that it can."""
    sizes = (1, 4, 8, 16, 32, 64, 128)
    return next(size for size in sizes if quantizer.is_quantizable(torch.empty(size, size, device="meta")))


def _rebound(name: str, value: Any, made: Any) -> Any:
    """What was attached to the old parameter, with the new one wherever it refers to the old one."""
    owner = value.__self__ if isinstance(value, types.MethodType) else None
    theirs = isinstance(owner, QuantizedTensorStorage) and owner.__dict__.get(name) is value
    return rebound(value, owner, made) if theirs else value


def _quantizer_of_caller(cls: Any) -> Any:
    """How the parameter is quantized that accelerate is about to replace; None where somebody else calls.

    Its ``set_module_tensor_to_device`` passes on the new values alone, hence the look at who is calling; where that
    looks different, the error of ``quantized_for`` remains.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "accelerate.utils.modeling":
        return None
    parameters = getattr(frame.f_locals.get("module"), "_parameters", {})
    old = parameters.get(frame.f_locals.get("tensor_name"))
    return old._quantizer if old is not None and type(old) is cls else None
