"""Pickling of storages and tensors, in a form that ``torch.load(weights_only=True)`` accepts."""

from __future__ import annotations

import pickle
from typing import Any

import torch


def attached(tensor: Any) -> dict[str, Any]:
    """What others attached to a quantized tensor (``main_grad``, flags, ``_is_param``), by attribute."""
    own = set(tensor._own_state())
    return {name: value for name, value in tensor.__dict__.items() if name not in own}


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
    if not hasattr(cls, "_INNER_TENSORS"):
        raise pickle.UnpicklingError(f"{cls!r} is no class of quantized tensors")
    device = next((b.device for b in buffers.values() if b is not None), torch.device("cpu"))
    tensor = cls._construct(buffers, keywords, tuple(shape), device, requires_grad, stride)
    tensor._check_buffers()
    if shares_scale:
        tensor._shares_scale = True
    for name, value in attributes.items():
        if name.startswith("__") or name in tensor._own_state():
            raise pickle.UnpicklingError(f"{name!r} cannot be an attached attribute of a {cls.__name__}")
        setattr(tensor, name, value)
    return tensor


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
        attached(tensor),
    )
    return rebuild, arguments


def reduce_storage(storage: Any) -> Any:
    shape = tuple(storage.shape)
    return rebuild, (type(storage), _buffers(storage), storage._nontensor_kwargs(), shape, None, False, False, {})


def allow(*names: Any) -> None:
    """Let ``torch.load(weights_only=True)`` rebuild these classes and functions."""
    torch.serialization.add_safe_globals(list(names))


allow(rebuild)
