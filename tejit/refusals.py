"""What quantized code refuses: tensors that are no rows of numbers, and tracers that cannot record it. Each error names
what was given and the way out.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tejit import compat


def refuse_batch(quantizer: Any) -> NoReturn:
    """Raises ``NotImplementedError``: a quantizer cannot see one example alone inside ``torch.func.vmap``."""
    raise NotImplementedError(
        f"{type(quantizer).__name__} cannot make a quantized tensor of an example inside torch.func.vmap. Quantize the"
        " batch outside of it, or use tejit.ops.fake_quantize, which quantizes each example by itself"
    )


def refuse_jit(what: str) -> NoReturn:
    """Raises ``RuntimeError``: ``torch.jit`` cannot record ``what``. Names the ways that can."""
    raise RuntimeError(
        f"torch.jit.trace and torch.jit.script cannot record {what}. Use torch.compile or torch.export (for ONNX,"
        " torch.onnx.export(..., dynamo=True))"
    )


def refuse_jit_tracing(what: str) -> None:
    """Raises ``RuntimeError`` inside of ``torch.jit.trace``, which would stop at an assertion of its own."""
    if not torch.compiler.is_compiling() and compat.jit_is_tracing():
        refuse_jit(what)


def refuse_layouts(x: torch.Tensor, weight: torch.Tensor | None = None) -> None:
    """Raises ``TypeError`` where input or weight of a quantized product is no tensor of rows of numbers."""
    for what, tensor in (("input", x), ("weight", weight)):
        if tensor is not None and _is_of_another_kind(tensor):
            way = _instead(tensor)
            if tensor.layout is torch.jagged:
                way = (
                    "one without gaps between its parts (contiguous()) and with the features, of one size, as its last"
                    " dimension; or its values()"
                )
            raise TypeError(f"the {what} is {_kind(tensor)}, which no quantized product takes; use {way}")


def refuse_to_quantize(x: torch.Tensor) -> None:
    """Raises ``TypeError`` for a tensor that no format can hold: nested, sparse, or quantized by torch."""
    if _is_of_another_kind(x):
        raise TypeError(f"cannot quantize {_kind(x)}; use {_instead(x)}")


def _is_of_another_kind(x: torch.Tensor) -> bool:
    return x.layout is not torch.strided or x.is_nested or x.is_quantized


def _kind(x: torch.Tensor) -> str:
    if x.is_nested:
        return f"a nested tensor of layout {x.layout}"
    return f"a tensor quantized by torch ({x.dtype})" if x.is_quantized else f"a tensor of layout {x.layout}"


def _instead(x: torch.Tensor) -> str:
    """What takes the place of a tensor of another kind."""
    if x.layout is torch.jagged:
        return "its values(), and keep its offsets()"
    if x.is_nested:
        return "one of layout=torch.jagged, or its parts one by one (unbind())"
    return "x.dequantize()" if x.is_quantized else "x.to_dense()"
