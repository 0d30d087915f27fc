"""Ops that take a whole quantizer, as torch custom ops over inner tensors, and the way to write one's own."""

from tejit.ops.inner import dequantize, fake_quantize, quantize, quantize_split
from tejit.ops.register import register_quantized_op

__all__ = [
    "dequantize",
    "fake_quantize",
    "quantize",
    "quantize_split",
    "register_quantized_op",
]
