"""Modules: drop-in layers that quantize under ``tejit.autocast``."""

from typing import TYPE_CHECKING

from tejit import compat

if TYPE_CHECKING:
    from tejit.nn.attention import MultiheadAttention, RotaryPositionEmbedding
    from tejit.nn.delayed_buffers import plain_state_dict
    from tejit.nn.grouped import GroupedLinear
    from tejit.nn.linear import Linear
    from tejit.nn.naming import name_modules
    from tejit.nn.norm_linear import LayerNormLinear
    from tejit.nn.norm_mlp import LayerNormMLP
    from tejit.nn.norms import LayerNorm, RMSNorm
    from tejit.nn.transformer import TransformerLayer

# All of them late: this package is loaded at the first use, which threads may make together. One that imports a module
# of it holds that module's lock while it waits for the package, so the package must not wait for the module.
if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__ = compat.late_names(
        __name__,
        {
            "GroupedLinear": "tejit.nn.grouped",
            "LayerNorm": "tejit.nn.norms",
            "LayerNormLinear": "tejit.nn.norm_linear",
            "LayerNormMLP": "tejit.nn.norm_mlp",
            "Linear": "tejit.nn.linear",
            "MultiheadAttention": "tejit.nn.attention",
            "RMSNorm": "tejit.nn.norms",
            "RotaryPositionEmbedding": "tejit.nn.attention",
            "TransformerLayer": "tejit.nn.transformer",
            "name_modules": "tejit.nn.naming",
            "plain_state_dict": "tejit.nn.delayed_buffers",
        },
    )

__all__ = [
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "name_modules",
    "plain_state_dict",
]
