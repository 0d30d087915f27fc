"""``torch.utils.swap_tensors`` on quantized tensors: what was attached stays with the object.

``nn.Module._apply`` (``.to``, ``.half``, ``.to_empty``) swaps a parameter that is a wrapper with its converted twin:
their classes, then their whole ``__dict__``, then the tensors below. The parameter would lose to the twin, which is
thrown away, all that others attached to it, and its hooks. Modules that are not ours do this too, so it is the tensor
that keeps them.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

from torch import Tensor, nn

from tejit.tensor.attached import attached

_DICT = Tensor.__dict__["__dict__"]

#: A key that only the ``__dict__`` of a quantized tensor has.
_SIGN = "_quantizer"


class _Half(threading.local):
    """The first half of a swap in this thread: a tensor that has its twin's ``__dict__``, and the one it had."""

    def __init__(self) -> None:
        self.tensor: Any = None
        self.before: dict[str, Any] | None = None


_half = _Half()


class SwappedState:
    """The ``__dict__`` of quantized tensors: reading gives the real one, exchanging two exchanges own state only."""

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        return self if tensor is None else _DICT.__get__(tensor)

    def __set__(self, tensor: Any, state: dict[str, Any]) -> None:
        before = _DICT.__get__(tensor)
        _DICT.__set__(tensor, state)
        if _half.before is not None and state is _half.before:
            first, _half.tensor, _half.before = _half.tensor, None, None
            _exchange_attached(first, tensor)
        elif _SIGN in before and _SIGN in state:
            _half.tensor, _half.before = tensor, before


def _exchange_attached(first: Any, second: Any) -> None:
    """Both have the other's ``__dict__`` and not yet the other's tensor below."""
    on_first, on_second = attached(first), attached(second)
    for tensor, gone, back in ((first, on_first, on_second), (second, on_second, on_first)):
        state = _DICT.__get__(tensor)
        for name in gone:
            del state[name]
        state.update(back)
    # Hooks live in the tensor below; the second one's is the first one's in a moment. The object remembers them too.
    if first._backward_hooks:
        second._backward_hooks = first._backward_hooks
    if first._post_accumulate_grad_hooks:
        second._post_accumulate_grad_hooks = first._post_accumulate_grad_hooks


def holders(parameter: Any) -> str:
    """Who keeps a parameter from being swapped."""
    references = weakref.getweakrefs(parameter)
    if not references:
        return (
            "something in torch below Python: DistributedDataParallel or another wrapper made before, or a graph whose"
            " backward has not run"
        )
    names = {type(item).__qualname__ for reference in references for item in gc.get_referrers(reference)}
    owners = sorted(names - {"frame", "list_iterator"})
    return f"{len(references)} weak reference(s), in objects of type {', '.join(owners) or 'unknown'}"


def refuse_if_held() -> None:
    """Raises ``RuntimeError`` where torch is about to swap a parameter that is under a weak reference, which it refuses
    to do, and says neither what holds it nor what to do. To be called where a tensor is detached.

    Only torch's ``nn.Module._apply`` knows that it will swap: it makes a parameter of the converted tensor first. Hence
    the look at who is calling; where that looks different, torch's own error remains.
    """
    frame = sys._getframe(1)
    for _ in range(4):
        if frame.f_back is None or frame.f_code is nn.Parameter.__new__.__code__:
            break
        frame = frame.f_back
    caller = frame.f_back
    if caller is None or caller.f_code is not nn.Module._apply.__code__:
        return
    known = caller.f_locals
    parameter = known.get("param")
    if not isinstance(parameter, nn.Parameter) or not weakref.getweakrefs(parameter):
        return
    raise RuntimeError(
        f"{type(known.get('self')).__name__}.{known.get('key')}, a quantized parameter of a module that is not tejit's,"
        f" cannot be converted: torch swaps it with the result, and it is held by {holders(parameter)}. Convert the"
        " module before it is handed to others, drop what holds it, or make the module one of tejit's (tejit.convert),"
        " which converts in place"
    )
