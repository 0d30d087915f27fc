"""A view of a quantized tensor that its format cannot follow: the values as a copy, which refuses to be written to.

Torch takes the result of ``t[:8]`` for a view, and so does whoever writes ``t[:8] = 1.``. Where the format cannot keep
it the values are dequantized, and what is written to them would be lost without a word. So they come in a subclass of
``torch.Tensor`` that reads as any tensor, has memory as any tensor, and raises where an operation writes to it. What is
computed from it is plain; views of it refuse as well.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor

from tejit import compat
from tejit.tensor.attached import PARAMETER_MARK
from tejit.tensor.modes import as_made

aten = torch.ops.aten

#: Operations whose results share memory with an argument though their schemas do not say so.
_UNSAID_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten.unsafe_chunk.default,
    }
)

#: Collectives in place of which the first argument is only read; their schemas do not say which ones they write to.
_SENDERS = frozenset({"send", "barrier"})


def gives_views(func: Any) -> bool:
    """Whether torch takes the results of ``func`` for views of an argument."""
    if func in _UNSAID_VIEWS:
        return True
    return any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)


def writes_to(parameter: Any) -> bool:
    """Whether an operation writes to this argument (of its schema)."""
    return parameter.alias_info is not None and parameter.alias_info.is_write


def arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each argument with its entry in the schema."""
    parameters = func._schema.arguments
    named = {parameter.name: parameter for parameter in parameters}
    return [*zip(args, parameters, strict=False), *((value, named[name]) for name, value in kwargs.items())]


def refusal(operation: str, origin: str) -> RuntimeError:
    """The error of whoever would write to a view of a tensor of the class ``origin``."""
    return RuntimeError(
        f"{operation} would write to a view of a {origin} that its format cannot follow, so the view is a copy and what"
        " is written to it would be lost. Write to the whole tensor: t.copy_(values), t.quantize_(values), or"
        " v = t.dequantize(), change v, t.copy_(v). To change the copy alone, take view.clone()"
    )


def copied_view(source: Tensor, values: Any, origin: str) -> Any:
    """``values``, the dequantized result of a view operation on ``source``, so that writing to them raises.

    Args:
        source: the tensor that the view is of.
        values: a tensor, or a list or tuple of tensors.
        origin: the name of the quantized tensor's class.

    While tracing, views of a leaf that requires grad stay plain: torch refuses to write to those itself, and a graph's
    output of another class would want its gradient to be of that class. AOTAutograd, which decides on the latter, shows
    no leaves; what it traces TorchDynamo has run before.
    """
    if isinstance(values, (list, tuple)):
        return type(values)([copied_view(source, item, origin) for item in values])
    if not isinstance(values, Tensor) or isinstance(values, DequantizedView):
        return values
    if source.requires_grad:
        if isinstance(values, FunctionalTensor):
            return values
        if type(values) is not Tensor and source.is_leaf and torch.is_grad_enabled():
            return values
    return DequantizedView(values, origin)


def opened(value: Any) -> Any:
    """``value`` with plain tensors for the views in it, also inside lists and tuples."""
    if isinstance(value, DequantizedView):
        return value._values
    if isinstance(value, (list, tuple)):
        return type(value)([opened(item) for item in value])
    return value


def _views_in(value: Any) -> list[DequantizedView]:
    if isinstance(value, DequantizedView):
        return [value]
    return [view for item in value for view in _views_in(item)] if isinstance(value, (list, tuple)) else []


class DequantizedView(Tensor):
    """Values of a view of a quantized tensor, dequantized; ``RuntimeError`` for whatever writes to them.

    Args:
        values: a plain tensor, whose memory this one shares.
        origin: the name of the quantized tensor's class, for the error.

    ``clone()`` gives a plain tensor. ``numpy()`` gives an array that is read-only, pickle and ``copy.deepcopy`` keep
    the values as a plain tensor.
    """

    _values: Tensor
    _origin: str

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, values: Tensor, origin: str) -> Any:
        if type(values) is Tensor:
            made = Tensor._make_subclass(cls, values)
        else:  # a tracer's: they have no memory to share
            made = Tensor._make_wrapper_subclass(
                cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
            )
        return made

    def __init__(self, values: Tensor, origin: str) -> None:
        self._values = values
        self._origin = origin

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = None
        for value, parameter in arguments(func, args, kwargs):
            views = _views_in(value)
            if views and _loses(func, parameter):
                raise refusal(func.__name__.split(".")[0], views[0]._origin)
            if views and (parameter.alias_info is not None or func in _UNSAID_VIEWS):
                source = views[0]
        new_args, new_kwargs = opened(tuple(args)), {name: opened(value) for name, value in kwargs.items()}
        if source is None:
            return func(*new_args, **new_kwargs)
        with as_made(source):
            result = func(*new_args, **new_kwargs)
            if result is source._values:
                return source
            if type(result) is Tensor and not _share_memory(result, source._values):
                return result  # composite operations (`to`, `reshape`) come as they are in inference mode, and may copy
            return copied_view(source, result, source._origin)

    # -- the protocol by which tracers take it apart ----------------------------------------------------------
    def __tensor_flatten__(self) -> tuple[list[str], str]:
        if not compat.INNER_TENSORS_MAY_SHARE and type(self._values) is Tensor:
            self._values = _with_own_memory(self._values, self.untyped_storage())
        return ["_values"], self._origin

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], origin: str, outer_size: Any, outer_stride: Any) -> Any:
        return DequantizedView(inner["_values"], origin)

    # Tracers make a view anew from its base, as far as they know of one.
    _base = None

    def _is_view(self) -> bool:
        return False

    # -- what reads ---------------------------------------------------------------------------------------
    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return repr(self._values)

    def tolist(self) -> Any:
        """As ``torch.Tensor.tolist``."""
        return self._values.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As ``torch.Tensor.numpy``; the array is read-only."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        array = self._values.numpy(force=force)
        array.flags.writeable = False
        return array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        known = self._values.__cuda_array_interface__
        return {**known, "data": (known["data"][0], True)}  # read-only

    def _plain(self) -> Any:
        """The values as they are to be kept elsewhere: a plain tensor, or a Parameter where this one is."""
        kind = nn.Parameter if PARAMETER_MARK in self.__dict__ else None
        values = self._values.detach()
        return values.requires_grad_(self.requires_grad) if kind is None else kind(values, self.requires_grad)

    def __copy__(self) -> Any:
        twin = self.detach().requires_grad_(self.requires_grad)
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError("only a leaf can be deep-copied; this view has a history: detach() it first")
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self._plain(), memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    # -- what writes, past the operations ---------------------------------------------------------------------
    @property
    def data(self) -> Any:
        """The view without its autograd history. Assigning raises ``RuntimeError``."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> NoReturn:
        raise refusal("assigning to .data", self._origin)

    def apply_(self, *args: Any) -> NoReturn:
        """Raises ``RuntimeError``."""
        raise refusal("apply_", self._origin)

    def map_(self, *args: Any) -> NoReturn:
        """Raises ``RuntimeError``."""
        raise refusal("map_", self._origin)

    def map2_(self, *args: Any) -> NoReturn:
        """Raises ``RuntimeError``."""
        raise refusal("map2_", self._origin)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ``BufferError``: who takes it could write to it."""
        raise BufferError(f"a view of a {self._origin} cannot be exported; use view.clone()")


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _with_own_memory(values: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """``values``, which lie in ``storage``, in a copy of it with the same strides; unchanged where they do not."""
    if values.untyped_storage().data_ptr() != storage.data_ptr():
        return values
    alone = torch.empty(0, dtype=values.dtype, device=values.device)
    return alone.set_(storage.clone(), values.storage_offset(), values.shape, values.stride())


def _loses(func: Any, parameter: Any) -> bool:
    """Whether ``func`` writes to this argument, or makes another tensor share its memory."""
    if func.namespace == "c10d":
        return parameter is func._schema.arguments[0] and func.__name__.split(".")[0] not in _SENDERS
    return writes_to(parameter) or func._schema.name == "aten::set_"
