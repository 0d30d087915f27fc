"""NVFP4: quantizer, storage and tensor.

Buffers: ``_rowwise_data`` (uint8, two codes a byte) with ``_rowwise_scale_inv`` (E4M3 bytes, one for 16 elements) and
``_amax_rowwise``, scaled along the last dimension; the columnwise ones hold the transpose, scaled along the others.
"""

from tejit.formats.nvfp4.quantizer import NVFP4Quantizer
from tejit.formats.nvfp4.tensor import NVFP4Tensor, NVFP4TensorStorage

__all__ = ["NVFP4Quantizer", "NVFP4Tensor", "NVFP4TensorStorage"]
