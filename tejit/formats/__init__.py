"""The formats: one file each, with its quantizer, its storage and its tensor."""

from tejit.formats.float8 import Float8CurrentScalingQuantizer, Float8Tensor, Float8TensorStorage
from tejit.formats.float8_block import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from tejit.formats.hybrid import HybridQuantizedTensor, HybridQuantizedTensorStorage, HybridQuantizer
from tejit.formats.identity import IdentityQuantizer, IdentityTensor, IdentityTensorStorage

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
]
