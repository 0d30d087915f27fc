"""``Module._apply`` (``.to``, ``.cuda``, ``.half``, ``.type``, ``.to_empty``, ``share_memory``) that loses nothing.

Parameters stay the objects that they are: converted in place where torch can, swapped with the converted tensor where
it cannot (to and from the meta device). What others attached to parameters, gradients and buffers stays, with their
hooks; ``main_grad`` and ``_high_precision_init_val`` stay too, as they are: nothing attached is moved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tejit.format_info import HIGH_PRECISION_DTYPES
from tejit.tensor import QuantizedTensor
from tejit.tensor.attached import PARAMETER_MARK, attached, carry
from tejit.tensor.swapping import holders

Convert = Callable[[Tensor], Tensor]


class KeepsAttached:
    """Mixin of tejit's modules, before ``nn.Module``: conversions keep what is attached to parameters and buffers, of
    the module and of all modules below it that have no ``_apply`` of their own; deep copies keep it too, with what
    referred to the original referring to the copy.

    A parameter is converted completely or not at all, so an exception half-way leaves some of them converted and
    every attribute in place.

    Raises ``TypeError`` for a conversion that a quantized parameter cannot follow (float64), and ``RuntimeError`` where
    a quantized parameter goes to or from the meta device while something holds it.
    """

    def _apply(self: Any, fn: Convert, recurse: bool = True) -> Any:
        _convert_module(self, fn, recurse, {})
        return self

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if is_parametrized(self):  # torch gave it a class of its own, which copies and does not pickle
            twin, state = self.__new__(type(self)), super(type(self), self).__getstate__()
        else:
            make, arguments, state = self.__reduce_ex__(4)[:3]
            twin = make(*arguments)
        memo[id(self)] = twin
        # torch forgets what is attached to a Parameter, and copies a plain tensor that refers to itself wrongly.
        tensors = [t for m in self.modules() for t in (*m._parameters.values(), *m._buffers.values())]
        ours = [t for t in tensors if type(t) in (nn.Parameter, Tensor) and t.is_leaf and id(t) not in memo]
        for tensor in ours:
            memo[id(tensor)] = _copied(tensor, memo)
        for tensor in ours:
            for name, value in attached(tensor).items():
                setattr(memo[id(tensor)], name, copy.deepcopy(value, memo))
        twin.__setstate__(copy.deepcopy(state, memo))
        return twin


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A deep copy without attributes; buffers that share memory share that of their copies, as torch has it."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(memory_format=torch.preserve_format), tensor.requires_grad)
    return copy.deepcopy(tensor.detach(), memo).requires_grad_(tensor.requires_grad)


def _convert_module(module: nn.Module, fn: Convert, recurse: bool, done: dict[int, tuple[Any, Any]]) -> None:
    """``done``: by its id, each parameter that was met, with what it became: tied ones stay tied."""
    for child in module.children() if recurse else ():
        if type(child)._apply is nn.Module._apply:
            _convert_module(child, fn, True, done)
        else:
            child._apply(fn)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            if id(parameter) not in done:
                became = _converted(parameter, fn, f"{type(module).__name__}.{name}")
                done[id(parameter)] = parameter, became
            module._parameters[name] = done[id(parameter)][1]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            applied = fn(buffer)
            if applied is not buffer:
                carry(buffer, applied)
            module._buffers[name] = applied


def _converted(parameter: Any, fn: Convert, where: str) -> Any:
    """The parameter after ``fn``: the same object wherever torch's settings and the devices allow it."""
    grad = parameter.grad
    with torch.no_grad():
        applied = fn(parameter)
        grad_applied = None if grad is None else fn(grad)
    parameter.grad = None  # it may not fit any more, and it must not be held twice to be swapped
    try:
        became = parameter if applied is parameter else _take(parameter, applied, where)
    except BaseException:
        parameter.grad = grad
        raise
    if grad is not None:
        became.grad = _converted_grad(grad, grad_applied)
    return became


def _converted_grad(grad: Tensor, applied: Any) -> Tensor:
    if applied is grad:
        return grad
    if _fits_in_place(grad, applied) and not isinstance(applied, QuantizedTensor):
        grad.data = applied
        return grad
    carry(grad, applied)
    return applied.requires_grad_(grad.requires_grad)


def _take(parameter: Any, applied: Any, where: str) -> Any:
    """Make ``parameter`` what ``fn`` made of it."""
    if isinstance(parameter, QuantizedTensor):
        if not isinstance(applied, QuantizedTensor):
            applied = _quantized_again(parameter, applied, where)
        if type(applied) is type(parameter) and _fits_in_place(parameter, applied):
            parameter._become(applied)
        else:
            _swap(parameter, applied, where)
        return parameter
    swaps = torch.__future__.get_swap_module_params_on_conversion() or is_traceable_wrapper_subclass(applied)
    if not swaps and _fits_in_place(parameter, applied):
        if torch.__future__.get_overwrite_module_params_on_conversion():
            return _replaced(parameter, applied)
        parameter.data = applied
        return parameter
    try:
        _swap(parameter, applied, where)
    except RuntimeError:
        if swaps:
            raise
        return _replaced(parameter, applied)  # what torch does with every such parameter
    return parameter


def _fits_in_place(tensor: Tensor, applied: Tensor) -> bool:
    fake = torch._subclasses.fake_tensor.FakeTensor
    same_kind = torch._has_compatible_shallow_copy_type(tensor, applied)
    return same_kind and not isinstance(tensor, fake) and not isinstance(applied, fake)


def _quantized_again(parameter: Any, applied: Tensor, where: str) -> Any:
    """``applied``, plain values that a conversion made of a quantized parameter, in the parameter's format."""
    if applied.dtype not in HIGH_PRECISION_DTYPES or applied.shape != parameter.shape:
        raise TypeError(
            f"{where} is a {type(parameter).__name__} of shape {tuple(parameter.shape)}, and the conversion made"
            f" {applied.dtype} of shape {tuple(applied.shape)} of it. A quantized parameter stands for torch.float32,"
            " torch.bfloat16 or torch.float16; for anything else make it plain first:"
            " module.weight = torch.nn.Parameter(module.weight.detach().dequantize())"
        )
    parameter._known_quantizer()
    twin = torch.empty_like(parameter.detach(), dtype=applied.dtype, device=applied.device)
    with torch.no_grad():
        return twin.copy_(applied)


def _replaced(parameter: Any, applied: Tensor) -> nn.Parameter:
    made = nn.Parameter(applied, parameter.requires_grad)
    carry(parameter, made)
    _give_hooks(parameter, made)
    return made


def _give_hooks(old: Any, new: Any) -> None:
    """Registers the hooks of ``old`` with the tensor that is below ``new`` now."""
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def _swap(parameter: Any, applied: Tensor, where: str) -> None:
    """Give ``parameter`` the tensor of ``applied``; object, attributes and hooks stay."""
    before = attached(parameter)
    twin = nn.Parameter(applied, requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, twin)
    except RuntimeError as error:
        raise RuntimeError(
            f"{where} cannot go from {parameter.device} to {twin.device} with its attributes and hooks, since it is"
            f" held by {holders(parameter)}. Convert the module before it is handed to others, or drop what holds it."
        ) from error
    # A quantized tensor has kept them itself; of other wrappers nobody can tell what is their own.
    after = parameter.__dict__
    for name, value in before.items():
        if name != PARAMETER_MARK and name not in after:
            setattr(parameter, name, value)
    _give_hooks(parameter, parameter)
