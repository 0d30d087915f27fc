"""tejit: train and run PyTorch models in low precision.

Importing it loads the compiled kernels from the cache and builds them on the first import of a machine;
where that is not possible the same numerics run in plain torch.
"""

from typing import TYPE_CHECKING

from tejit import compat

with compat.collecting_later():
    from tejit import dynamo, jit, ops, recipe
    from tejit.convert import convert
    from tejit.formats import (
        Float8BlockQuantizer,
        Float8BlockwiseQTensor,
        Float8BlockwiseQTensorStorage,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        Float8Tensor,
        Float8TensorStorage,
        HybridQuantizedTensor,
        HybridQuantizedTensorStorage,
        HybridQuantizer,
        IdentityQuantizer,
        IdentityTensor,
        IdentityTensorStorage,
        MXFP8Quantizer,
        MXFP8Tensor,
        MXFP8TensorStorage,
        NVFP4Quantizer,
        NVFP4Tensor,
        NVFP4TensorStorage,
    )
    from tejit.jit import CacheError, CompileError, KernelNotCached, TejitError, ToolchainError, warm
    from tejit.kernels import library as _ops  # noqa: F401 - registers the ops
    from tejit.kernels.backend import DEFAULT as _BACKEND
    from tejit.kernels.backend import backend
    from tejit.recipe import (
        autocast,
        is_fp8_available,
        is_fp8_block_scaling_available,
        is_mxfp8_available,
        is_nvfp4_available,
    )
    from tejit.tensor import InnerTensor, QuantizedTensor, QuantizedTensorStorage, Quantizer

if TYPE_CHECKING:
    from tejit import inspect as inspect
    from tejit import nn as nn
    from tejit.inspect.explain import explain
    from tejit.inspect.info import info
    from tejit.nn import (
        GroupedLinear,
        LayerNorm,
        LayerNormLinear,
        LayerNormMLP,
        Linear,
        MultiheadAttention,
        RMSNorm,
        RotaryPositionEmbedding,
        TransformerLayer,
        name_modules,
        plain_state_dict,
    )
    from tejit.recipe import quantized_model_init

__version__ = "0.1.0"

__all__ = [
    "CacheError",
    "CompileError",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "GroupedLinear",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "InnerTensor",
    "KernelNotCached",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TejitError",
    "ToolchainError",
    "TransformerLayer",
    "autocast",
    "backend",
    "convert",
    "dynamo",
    "explain",
    "info",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "name_modules",
    "ops",
    "plain_state_dict",
    "quantized_model_init",
    "recipe",
    "warm",
]

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__ = compat.late_names(
        __name__,
        {
            "explain": "tejit.inspect",
            "info": "tejit.inspect",
            "GroupedLinear": "tejit.nn",
            "LayerNorm": "tejit.nn",
            "LayerNormLinear": "tejit.nn",
            "LayerNormMLP": "tejit.nn",
            "Linear": "tejit.nn",
            "MultiheadAttention": "tejit.nn",
            "RMSNorm": "tejit.nn",
            "RotaryPositionEmbedding": "tejit.nn",
            "TransformerLayer": "tejit.nn",
            "name_modules": "tejit.nn",
            "plain_state_dict": "tejit.nn",
            "quantized_model_init": "tejit.recipe",
        },
    )

if _BACKEND != "torch" and not jit.is_command_line():
    jit.load()
