"""Hybrid: one format for the rowwise direction, another one for the columnwise direction.

The buffers are those of two nested storages, one a direction, under the children's own names with a prefix:
``_rowwise_data`` is the ``_data`` of a per-tensor FP8 child, ``_rowwise_rowwise_data`` the ``_rowwise_data`` of
one in blocks.
"""

from tejit.formats.hybrid.quantizer import HybridQuantizer
from tejit.formats.hybrid.tensor import HybridQuantizedTensor, HybridQuantizedTensorStorage

__all__ = ["HybridQuantizedTensor", "HybridQuantizedTensorStorage", "HybridQuantizer"]
