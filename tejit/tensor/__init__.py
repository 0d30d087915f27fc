"""The contract of quantizers and quantized tensors. No format's name appears on this floor."""

from tejit.tensor.inner import InnerTensor
from tejit.tensor.quantized import QuantizedTensor
from tejit.tensor.quantizer import Quantizer
from tejit.tensor.storage import QuantizedTensorStorage

__all__ = ["InnerTensor", "QuantizedTensor", "QuantizedTensorStorage", "Quantizer"]
