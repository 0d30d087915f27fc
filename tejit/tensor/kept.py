"""The high-precision values that a quantized parameter was made from, where somebody asked to keep them.

They lie beside the parameter, on the CPU. They are true only as long as the parameter holds their quantization, and a
parameter can be written to in many ways: through an alias (``p.data``, the tensors of a state dict), by a kernel, by a
compiled graph, by another process. So whoever asks for them gets them compared first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tejit.tensor.serialization import allow

#: Of values rounded at random: so often they may agree by chance before they count as fixed.
_DRAWS = 8

#: The attribute. Absent: nobody asked to keep values, or they were cleared. None: asked for, and none at hand.
KEPT = "_high_precision_init_val"


def keep(tensor: Any, values: Tensor | None) -> None:
    """Make ``values`` the kept ones, copied to the CPU; None, or values without memory: there are none at hand."""
    if values is not None:
        with torch.inference_mode(False):  # whoever asks may want to write to them
            values = None if values.is_meta else values.detach().to("cpu", copy=True)
    tensor.__dict__[KEPT] = values


def note_write(tensor: Any, values: Tensor | None) -> None:
    """``tensor`` was written to, with its quantization of ``values`` (None: not from high precision).

    Does nothing to a tensor that keeps no values. A graph, of either kind, holds no copy to the CPU: what it writes
    counts as unknown.
    """
    if KEPT in tensor.__dict__:
        keep(tensor, None if torch.compiler.is_compiling() or _is_capturing(tensor) else values)


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@torch.no_grad()
def _holds(tensor: Any, values: Tensor) -> bool:
    """Whether ``copy_`` of ``values`` would change no byte, but for those that are rounded at random."""
    quantizer = tensor._quantizer
    if quantizer is None or tuple(values.shape) != tuple(tensor.shape):
        return False
    values = values.to(tensor.device)

    def quantized() -> Any:
        again = torch.empty_like(tensor.detach())
        quantizer._write(values, again)
        return again

    with torch.random.fork_rng([tensor.device] if tensor.is_cuda else []):  # looking changes nobody's random numbers
        first = quantized()
        differ = [name for name in tensor._buffer_keywords() if not _equal(tensor, first, name)]
        # What several calls do not agree on is random: codes. Scales are not, and other values have others.
        for _ in range(_DRAWS):
            if not differ:
                break
            other = quantized()
            differ = [name for name in differ if _equal(first, other, name)]
    return not differ


def _equal(mine: Any, other: Any, name: str) -> bool:
    a, b = getattr(mine, name), getattr(other, name)
    return a is None or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def get_high_precision_init_val(parameter: Any) -> Tensor | None:
    """The values that a parameter was quantized from, on the CPU: the initial ones, or those that were copied into it
    since then (``load_state_dict``, ``copy_``, ``p.data = ...``), in the dtype that they came in.

    None after ``clear_high_precision_init_val``, on the meta device, while the buffers are given away or without memory
    (the values stay), and where the parameter holds anything else than
    their quantization: after a copy of a quantized tensor, another operation in place, or a copy inside of a graph
    (``torch.compile``, CUDA graphs). Then ``parameter.dequantize()`` is all there is. To know, the values are
    quantized and compared.
    """
    values = parameter.__dict__.get(KEPT)
    if values is None or parameter.is_meta:
        return None
    buffers = [buffer for buffer in parameter._inner() if buffer is not None]
    if any(isinstance(buffer, FakeTensor) for buffer in buffers):
        return values  # nothing there to compare
    # There is nothing to tell by.
    if not buffers or any(buffer.untyped_storage().nbytes() < buffer.nbytes for buffer in buffers):
        return None
    if not _holds(parameter, values):
        parameter.__dict__[KEPT] = values = None
    return values


def clear_high_precision_init_val(parameter: Tensor) -> None:
    """Forget the values that a parameter was quantized from, and keep no others; ``reset_parameters`` keeps them
    again. A parameter that is written in each step is to be cleared: each copy into it makes one to the CPU."""
    vars(parameter).pop(KEPT, None)


# Parameters keep these as their methods, and files name them: by where they stand, or where they stood before.
for _method in (get_high_precision_init_val, clear_high_precision_init_val):
    allow(_method, (_method, f"tejit.nn.init.{_method.__name__}"))
