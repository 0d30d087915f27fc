"""Pickling of storages and tensors, in a form that ``torch.load(weights_only=True)`` accepts."""

from __future__ import annotations

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
    requires_grad: bool,
    attributes: dict[str, Any],
) -> Any:
    """Inverse of :func:`reduce_tensor` and :func:`reduce_storage`."""
    device = next((b.device for b in buffers.values() if b is not None), torch.device("cpu"))
    tensor = cls._construct(buffers, keywords, tuple(shape), device, requires_grad)
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def _buffers(storage: Any) -> dict[str, Any]:
    return {keyword: getattr(storage, name) for name, keyword in storage._INNER_TENSORS.items()}


def reduce_tensor(tensor: Any) -> Any:
    arguments = (
        type(tensor),
        _buffers(tensor),
        tensor._nontensor_kwargs(),
        tuple(tensor.shape),
        tensor.requires_grad,
        attached(tensor),
    )
    return rebuild, arguments


def reduce_storage(storage: Any) -> Any:
    shape = tuple(storage.shape)
    return rebuild, (type(storage), _buffers(storage), storage._nontensor_kwargs(), shape, False, {})


def allow(*names: Any) -> None:
    """Let ``torch.load(weights_only=True)`` rebuild these classes and functions."""
    torch.serialization.add_safe_globals(list(names))


allow(rebuild)
