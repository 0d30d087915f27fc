"""The formats: one file or folder each, with its quantizer, its storage and its tensor."""

from tejit.formats.float8 import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)
from tejit.formats.float8_block import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from tejit.formats.hybrid import HybridQuantizedTensor, HybridQuantizedTensorStorage, HybridQuantizer
from tejit.formats.identity import IdentityQuantizer, IdentityTensor, IdentityTensorStorage
from tejit.formats.mxfp8 import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
from tejit.formats.nvfp4 import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
]
