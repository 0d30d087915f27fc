"""Whether the tensor that is found in a buffer holds what somebody put there, or memory as it was found.

Loaders of large models build a model on the meta device and replace its tensors afterwards: what is in the file by
loaded ones, the rest by ``torch.empty_like``, for the model to initialise. They write to ``_buffers`` or set
attributes, which no module is told of. What a module made or loaded itself it knows by the object; here is what can be
said of another one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tejit import compat

#: What transformers sets on each tensor that it loaded, and on each module that it has initialised.
LOADED = "_is_hf_initialized"


def can_be_read() -> bool:
    """Whether values of tensors can be looked at here: not in a transform of functions, under a dispatch mode
    (``FakeTensorMode``) or while a CUDA graph is captured."""
    if compat.in_mode_or_transform():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def is_plain(tensor: Tensor | None) -> bool:
    """Whether it is an ordinary tensor with memory."""
    return (
        tensor is not None
        and type(tensor) is Tensor
        and not tensor.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def is_copy(tensor: Tensor, of: Tensor | None) -> bool:
    """Whether a tensor is another one moved, hence equal to it."""
    if of is None or not (is_plain(tensor) and is_plain(of)) or (tensor.shape, tensor.dtype) != (of.shape, of.dtype):
        return False
    return torch.equal(tensor.detach().cpu(), of.detach().cpu())


def is_loaded(tensor: Tensor | None) -> bool:
    """Whether transformers says that it loaded the tensor."""
    return getattr(tensor, LOADED, False) is True


def is_state(scale: Tensor, history: Tensor, slots: int, strict: bool) -> bool:
    """Whether scales and histories can be a state of delayed scaling, between two steps.

    Scales are normal numbers above 0, what a history holds is no NaN and not below 0, and nothing is being collected.
    With ``strict``, a slot that never saw anything has the scale 1 (not so where a history has one row, which remembers
    nothing). Memory as it is found, be it zeros, NaN or one number throughout, fails one of these.
    """
    fits = scale.shape == (slots,) and history.dim() == 2 and history.shape[0] > 0 and history.shape[1] == slots
    if not (fits and scale.is_floating_point() and history.is_floating_point()):
        return False
    scale, history = scale.detach().cpu(), history.detach().cpu()
    normal = torch.finfo(torch.float32).tiny
    if not bool((torch.isfinite(scale) & (scale >= normal)).all()) or not bool((history >= 0).all()):
        return False
    if bool(history[0].any()):
        return False
    return not strict or bool((history.any(0) | (scale == 1)).all())


def device_after(fn: Callable[[Tensor], Tensor]) -> torch.device:
    """Where ``fn``, a conversion of ``Module._apply``, puts what is on the meta device: on the device that it moves to,
    if it moves."""
    with torch.no_grad():
        try:
            return fn(torch.empty(0, device="meta")).device
        except NotImplementedError:  # `.to`: there are no values to move, which is an error of torch's
            return fn(torch.empty(0, device="cpu")).device
