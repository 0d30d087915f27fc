"""What functions ask of the tensors they are given, whichever of op, fake and reference then runs."""

from __future__ import annotations

import torch
from torch import Tensor

from tejit import compat
from tejit.format_info import HIGH_PRECISION_DTYPES

#: What to use in place of a function that quantizes.
QUANTIZES = "tejit.Linear and the other modules train, and Quantizer.quantize passes gradients straight through"


def refuse_gradients(name: str, trains: str, **tensors: Tensor | None) -> None:
    """Refuse where a derivative is asked for, instead of losing it without a word.

    Args:
        name: of the function, as its users call it.
        trains: which classes have a derivative, as a clause.
        tensors: its arguments by name.

    Raises ``RuntimeError``, in grad mode, for a tensor that requires grad, and for one with a tangent of forward-mode
    differentiation. Inside an autograd function's forward neither counts.
    """
    if torch.is_grad_enabled():
        for key, tensor in tensors.items():
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(
                    f"tejit: {name} has no derivative, and {key} requires grad: {trains}; or call it under"
                    " torch.no_grad()"
                )
    if not torch.compiler.is_compiling() and not torch._C._is_fwd_grad_enabled():
        return
    for key, tensor in tensors.items():
        if compat.has_tangent(tensor):
            raise RuntimeError(
                f"tejit: {name} has no derivative, and {key} has a tangent (torch.func.jvp, forward_ad), which would be"
                f" lost: {trains} in backward mode; or detach {key}"
            )


def require_same_device(x: Tensor, **others: Tensor | None) -> None:
    """Raises ``RuntimeError`` for one that is not where ``x`` is."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise RuntimeError(
                f"tejit: {name} is on {tensor.device}, but x is on {x.device}; move one of them with .to(device)"
            )


def require_matrix(x: Tensor) -> None:
    """Raises ``RuntimeError`` unless ``x`` is a matrix in a dtype that kernels take."""
    if x.dim() != 2:
        raise RuntimeError(f"tejit: x has shape {tuple(x.shape)}, but a matrix (rows, columns) is needed; reshape it")
    require_dtype("x", x)


def require_dtype(name: str, tensor: Tensor) -> None:
    """Raises ``RuntimeError`` for a dtype that kernels do not take."""
    if tensor.dtype not in HIGH_PRECISION_DTYPES:
        raise RuntimeError(
            f"tejit: {name} has dtype {str(tensor.dtype).removeprefix('torch.')}, but float32, float16 or bfloat16 is"
            " needed; convert it first, for example with .to(torch.bfloat16)"
        )


def require_multiple(multiple: int) -> None:
    """Raises ``RuntimeError`` unless rows can be padded to it."""
    if multiple < 1:
        raise RuntimeError(f"tejit: multiple is {multiple}, but a number >= 1 is needed; 1 adds no rows")
