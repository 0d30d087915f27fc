"""What makes quantizers and quantized tensors traceable: constants and data-free descriptions."""

from tejit.dynamo.tensor_spec import TensorSpec, to_tensor_spec
from tejit.dynamo.value import is_value_opaque_quantizer, register_value_opaque_quantizer

__all__ = [
    "TensorSpec",
    "is_value_opaque_quantizer",
    "register_value_opaque_quantizer",
    "to_tensor_spec",
]
