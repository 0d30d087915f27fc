"""Torch's modes, as far as operations on quantized tensors have to heed them."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def as_made(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """A view of a normal tensor is a normal tensor in inference mode too: torch sets its version counter."""
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        return torch.inference_mode(False)
    return contextlib.nullcontext()
