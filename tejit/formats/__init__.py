"""The formats: one file each, with its quantizer, its storage and its tensor."""

from tejit.formats.float8 import Float8CurrentScalingQuantizer, Float8Tensor, Float8TensorStorage

__all__ = ["Float8CurrentScalingQuantizer", "Float8Tensor", "Float8TensorStorage"]
