"""Pickling of storages and tensors, in a form that ``torch.load(weights_only=True)`` accepts."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import torch
from torch import Tensor

from tejit.format_info import HIGH_PRECISION_DTYPES
from tejit.tensor.attached import Itself, MethodOf, for_file, from_file
from tejit.tensor.quantizer import Quantizer


def rebuild(
    cls: Any,
    buffers: dict[str, Any],
    keywords: dict[str, Any],
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    requires_grad: bool,
    shares_scale: bool,
    attributes: dict[str, Any],
) -> Any:
    """Inverse of :func:`reduce_tensor` and :func:`reduce_storage`.

    Files come from anywhere: raises ``pickle.UnpicklingError`` for anything but a quantized storage or tensor,
    buffers that do not fit its shape, and attributes that would replace its own state.
    """
    known = isinstance(cls, type) and hasattr(cls, "_INNER_TENSORS")
    if not known:
        raise pickle.UnpicklingError(f"{cls!r} is no class of quantized tensors")
    _check_kinds(cls, buffers, shape, stride, requires_grad, shares_scale, attributes)
    _check_keywords(cls, keywords)
    device = next((b.device for b in buffers.values() if b is not None), torch.device("cpu"))
    try:
        tensor = cls._construct(buffers, keywords, shape, device, requires_grad, stride)
        tensor._format_name()  # it looks the element type up
        tensor._check_buffers()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # whatever a constructor meets in what is no tensor of its class
        raise pickle.UnpicklingError(f"the file holds no {cls.__name__}: {error}") from error
    if shares_scale:
        tensor._shares_scale = True
    for name, value in attributes.items():
        # What the class has is no attachment: it would hide a method, or go through a setter.
        if hasattr(cls, name) or name in tensor._own_state():
            raise pickle.UnpicklingError(f"{name!r} cannot be an attached attribute of a {cls.__name__}")
        setattr(tensor, name, from_file(value, tensor))
    return tensor


def _check_kinds(
    cls: type, buffers: Any, shape: Any, stride: Any, requires_grad: Any, shares_scale: Any, attributes: Any
) -> None:
    """Raises ``pickle.UnpicklingError`` where an argument of :func:`rebuild` is not of its type."""

    def sizes(value: Any) -> bool:
        return isinstance(value, tuple) and all(type(size) is int and size >= 0 for size in value)

    for right, what in (
        (isinstance(buffers, dict) and all(b is None or _is_plain(b) for b in buffers.values()), "buffers"),
        (sizes(shape), "shape"),
        (stride is None or (sizes(stride) and sizes(shape) and len(stride) == len(shape)), "stride"),
        (isinstance(requires_grad, bool), "requires_grad"),
        (isinstance(shares_scale, bool), "shares_scale"),
        (isinstance(attributes, dict) and all(isinstance(name, str) for name in attributes), "attributes"),
    ):
        if not right:
            raise pickle.UnpicklingError(f"the {what} of this {cls.__name__} cannot be such a thing")
    if len({b.device for b in buffers.values() if b is not None}) > 1:
        raise pickle.UnpicklingError(f"the buffers of this {cls.__name__} are on several devices")


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not hasattr(value, "_INNER_TENSORS")


def _check_keywords(cls: type, keywords: Any) -> None:
    """Raises ``pickle.UnpicklingError`` for a keyword whose value is not of its default's type, a nominal dtype that
    no quantized tensor has, or a quantizer that does not make such tensors."""
    if not isinstance(keywords, dict) or keywords.get("fake_dtype") not in HIGH_PRECISION_DTYPES:
        raise pickle.UnpicklingError(f"the keywords of this {cls.__name__} have no nominal dtype of a quantized tensor")
    quantizer = keywords.get("quantizer")
    if quantizer is not None:
        made = quantizer.storage_metadata(keywords["fake_dtype"])["cls"] if isinstance(quantizer, Quantizer) else object
        if not (issubclass(cls, made) or issubclass(made, cls)) or made is object:
            raise pickle.UnpicklingError(f"{quantizer!r} makes no {cls.__name__}")
    for name, parameter in inspect.signature(cls.__init__).parameters.items():  # type: ignore[misc]
        default = parameter.default
        known = name in keywords and default is not None and default is not parameter.empty
        if known and type(keywords[name]) is not type(default):
            raise pickle.UnpicklingError(f"{name} of this {cls.__name__} is {keywords[name]!r}")


def _buffers(storage: Any) -> dict[str, Any]:
    return {keyword: getattr(storage, name) for name, keyword in storage._buffer_keywords().items()}


def reduce_tensor(tensor: Any) -> Any:
    arguments = (
        type(tensor),
        _buffers(tensor),
        tensor._nontensor_kwargs(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.requires_grad,
        tensor._shares_scale,
        for_file(tensor),
    )
    return rebuild, arguments


def reduce_storage(storage: Any) -> Any:
    shape = tuple(storage.shape)
    return rebuild, (type(storage), _buffers(storage), storage._nontensor_kwargs(), shape, None, False, False, {})


def allow(*names: Any) -> None:
    """Let ``torch.load(weights_only=True)`` rebuild these classes and functions; a pair of one and the name by which
    files know it counts too."""
    torch.serialization.add_safe_globals(list(names))


allow(rebuild, Itself, MethodOf)
