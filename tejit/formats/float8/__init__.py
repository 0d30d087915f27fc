"""FP8 with one scale per tensor: storage and tensor, and three quantizers that differ in where the scale comes from."""

from tejit.formats.float8.current import Float8CurrentScalingQuantizer
from tejit.formats.float8.delayed import Float8Quantizer
from tejit.formats.float8.slot import Float8SlotQuantizer
from tejit.formats.float8.tensor import Float8Tensor, Float8TensorStorage

__all__ = [
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8SlotQuantizer",
    "Float8Tensor",
    "Float8TensorStorage",
]
