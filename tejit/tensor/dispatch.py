"""What each aten operation does to a quantized tensor.

Kept quantized: ``detach``, ``alias``, ``clone``, ``empty_like``, ``new_empty``, ``_to_copy`` (device moves the
buffers, a floating dtype changes the nominal dtype and no byte), ``copy_`` into one, pinning, and the views
that the format can take (:data:`VIEWS`). Everything else dequantizes, says so once per operation, and where
the operation writes to a quantized argument quantizes the result back into it. Factories (``zeros_like`` and
its kind, and ``new_empty`` of a shape that the format cannot hold) give plain tensors: an optimizer's state made from a
quantized parameter is in high precision.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tejit import compat
from tejit.format_info import HIGH_PRECISION_DTYPES
from tejit.tensor.attached import PARAMETER_MARK, carry
from tejit.tensor.dequantized_view import arguments, copied_view, gives_views, opened, writes_to
from tejit.tensor.kept import note_write
from tejit.tensor.modes import as_made
from tejit.tensor.storage import QuantizedTensorStorage
from tejit.tensor.swapping import refuse_if_held

aten = torch.ops.aten

#: Operations that give another view of the same elements.
VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
    }
)

#: Namespaces of collectives: their schemas do not say which arguments they write to.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_dtensor"})


def swaps_matrix(func: Any, args: tuple[Any, ...], ndim: int) -> bool:
    """Whether a view operation is the transpose of a matrix."""
    if ndim != 2:
        return False
    if func is aten.transpose.int:
        return args[0] % 2 != args[1] % 2
    if func is aten.permute.default:
        return [dim % 2 for dim in args[0]] == [1, 0]
    return func is aten.t.default


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_handlers: dict[Any, Handler] = {}
_announced: set[str] = set()


def is_quantized(value: Any) -> bool:
    return isinstance(value, QuantizedTensorStorage) and isinstance(value, Tensor)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func``; some argument is a quantized tensor."""
    handler = _handlers.get(func)
    if handler is not None and args and is_quantized(args[0]):
        result = handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
    if torch.is_inference_mode_enabled():
        # Inference mode does not take composite operations (`to`, `linear`) apart before they come here.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func is aten.copy_.default and not is_quantized(args[0]):
        return func(args[0], args[1].dequantize(), *args[2:], **kwargs)
    if args and is_quantized(args[0]) and gives_views(func):
        with as_made(args[0]):
            values = _dequantize_and_run(func, args, kwargs)
            if func._schema.name == "aten::to" and (values.dtype, values.device) != (args[0].dtype, args[0].device):
                return values  # a conversion, of torch's tensors too
            return copied_view(args[0], values, type(args[0]).__name__)
    return _dequantize_and_run(func, args, kwargs)


def _handles(*functions: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for function in functions:
            _handlers[function] = handler
        return handler

    return register


# -- kept quantized -------------------------------------------------------------------------------------------
@_handles(aten.detach.default, aten.alias.default)
def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    refuse_if_held()
    with as_made(args[0]):
        return args[0]._alias()


@_handles(*VIEWS)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with as_made(args[0]):
        return args[0]._view(func, args[1:], kwargs)


@_handles(aten.clone.default)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]._map(lambda buffer: buffer.clone(memory_format=torch.contiguous_format))


@_handles(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    dtype = kwargs.get("dtype") or source.dtype
    if dtype not in HIGH_PRECISION_DTYPES or kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    device = kwargs.get("device") or source.device
    pin, lazy = bool(kwargs.get("pin_memory")), bool(kwargs.get("non_blocking"))

    def move(buffer: Tensor) -> Tensor:
        moved = buffer.to(device, non_blocking=lazy, copy=True, memory_format=torch.contiguous_format)
        return moved.pin_memory() if pin else moved

    return _with_attached(source, source._map(move, fake_dtype=dtype))


@_handles(aten._pin_memory.default)
def _pin_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]._map(lambda buffer: buffer.pin_memory())


@_handles(aten.is_pinned.default)
def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(buffer.is_pinned() for buffer in args[0]._inner() if buffer is not None)


@_handles(aten.record_stream.default)
def _record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for buffer in args[0]._inner():
        if buffer is not None:
            buffer.record_stream(args[1])


@_handles(aten.empty_like.default)
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _with_attached(args[0], _fresh(args[0], tuple(args[0].shape), kwargs))


def _with_attached(source: Any, result: Any) -> Any:
    """A module puts a converted buffer in the buffer's place, so it takes along what was attached to it. A Parameter
    stays the object that it is (``tejit.tensor.swapping``), and a tensor with a history is another value.

    Of ``empty_like`` autograd detaches what refers to itself, which loses the attributes again."""
    leaf = not (torch.is_grad_enabled() and source.requires_grad)
    if leaf and result is not NotImplemented and PARAMETER_MARK not in source.__dict__:
        carry(source, result)
    return result


@_handles(aten.new_empty.default)
def _new_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _fresh(args[0], tuple(args[1]), kwargs)


def _fresh(like: Any, shape: tuple[int, ...], kwargs: dict[str, Any]) -> Any:
    dtype = kwargs.get("dtype") or like.dtype
    if dtype not in HIGH_PRECISION_DTYPES or like._quantizer is None:
        return NotImplemented
    usages = like.get_usages()
    quantizer = like._quantizer.replace(
        internal=False,
        rowwise_usage=usages["rowwise"] or like._quantizer.needs_rowwise(),
        columnwise_usage=usages["columnwise"],
    )
    if not quantizer.is_quantizable(torch.empty(shape, dtype=dtype, device="meta")):
        # Vectors of a matrix in blocks, such as those of spectral_norm: plain, as of every factory.
        plain = {name: value for name, value in kwargs.items() if name != "memory_format"}
        return torch.empty(shape, **{**plain, "dtype": dtype, "device": kwargs.get("device") or like.device})
    made = quantizer.make_empty(
        shape,
        dtype=dtype,
        device=kwargs.get("device") or like.device,
        pin_memory=bool(kwargs.get("pin_memory")),
    )
    # IdentityQuantizer has a dtype of its own; the tensor may have been given another one since.
    return made if made.dtype == dtype else made._map(lambda buffer: buffer, fake_dtype=dtype)


@_handles(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
)
def _factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.new_zeros.default:
        _refuse_sharding(args[0])
    like = torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
    return func(like, *args[1:], **kwargs)


#: Where FSDP2 makes a parameter's shard: zeros like the parameter, into which it copies a part of it.
_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param"


def _refuse_sharding(tensor: Any) -> None:
    """Raises ``NotImplementedError`` where ``fully_shard`` asks: its shards would be dequantized, and nothing say so.

    It calls nothing on a parameter that only it would, hence the look at the callers."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == _FSDP2:
            raise NotImplementedError(
                f"fully_shard got a quantized parameter, {tensor!r}: sharding those is not supported. Keep the"
                " parameters in high precision (build the model outside of quantized_model_init); tejit.autocast"
                " quantizes them in each forward. Or leave the parameter whole on each rank:"
                " fully_shard(..., ignored_params={...})"
            )
        frame = frame.f_back


@_handles(aten.copy_.default)
def _copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], opened(args[1])
    target._require_whole("copy_")
    target._require_data()
    values: Tensor | None = None
    if not (is_quantized(source) and target._copy_buffers(source)):
        values = source._dequantize(torch.float32) if is_quantized(source) else torch.as_tensor(source)
        if values.dtype not in HIGH_PRECISION_DTYPES:
            values = values.to(target.dtype)
        values = values.expand(target.shape)
        target._known_quantizer()._write(values, target)
    note_write(target, None if is_quantized(source) else values)
    return target


# -- everything else ------------------------------------------------------------------------------------------
def _dequantize_and_run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written: list[tuple[Any, Tensor]] = []
    if func.namespace in _COLLECTIVES:
        raise NotImplementedError(
            f"{func} got a quantized tensor. Collectives on quantized tensors are not supported; communicate the"
            " high-precision tensor, or tensor.dequantize()."
        )
    if func._schema.name == "aten::set_":
        raise RuntimeError(
            "set_ would make one tensor share another one's memory, and a quantized tensor has several buffers instead."
            " Copy the values: t.copy_(values), plain.copy_(t)"
        )

    def dequantized(value: Any, parameter: Any) -> Any:
        if is_quantized(value):
            value._require_data()
            writes = writes_to(parameter)
            if writes:
                value._require_whole(func.__name__)
            values = value._dequantize(value.dtype)
            if func is aten.as_strided.default:
                values = _laid_out_as(value, values)
            if writes:
                written.append((value, values))
            return values
        if isinstance(value, (list, tuple)):
            return type(value)([dequantized(item, parameter) for item in value])
        return value

    done = [dequantized(value, parameter) for value, parameter in arguments(func, args, kwargs)]
    new_args, new_kwargs = done[: len(args)], dict(zip(kwargs, done[len(args) :], strict=True))
    _announce(func)
    result = func(*new_args, **new_kwargs)
    for target, values in written:
        target._known_quantizer()._write(values, target)
        note_write(target, None)
    return _restore(result, written)


def _laid_out_as(tensor: Tensor, values: Tensor) -> Tensor:
    """``values`` with the strides of ``tensor``: what ``as_strided`` reads depends on them."""
    if values.stride() == tensor.stride() or any(step == 0 for step in tensor.stride()):
        return values
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=values.dtype, device=values.device).copy_(values)


def _restore(result: Any, written: list[tuple[Any, Tensor]]) -> Any:
    """An operation that returns the argument it wrote to returns the quantized one."""
    for target, values in written:
        if result is values:
            return target
    if isinstance(result, (list, tuple)):
        return type(result)([_restore(item, written) for item in result])
    return result


def _announce(func: Any) -> None:
    name = str(func)
    if name in _announced or torch.compiler.is_compiling():
        return
    _announced.add(name)
    text = f"tejit: {name} has no form on quantized tensors, so it dequantizes them first (said once per operation)"
    if gives_views(func):
        text += "; its result is a copy and no view: writing to it raises"
    compat.warn(text)
