"""Ops that take a whole quantizer, as torch custom ops over inner tensors, and the way to write one's own."""

from typing import TYPE_CHECKING

from tejit import compat
from tejit.ops.inner import dequantize, fake_quantize, quantize, quantize_split

if TYPE_CHECKING:
    from tejit.ops.register import register_quantized_op

__all__ = [
    "dequantize",
    "fake_quantize",
    "quantize",
    "quantize_split",
    "register_quantized_op",
]

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__ = compat.late_names(__name__, {"register_quantized_op": "tejit.ops.register"})
