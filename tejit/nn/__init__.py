"""Modules: drop-in layers that quantize under ``tejit.autocast``."""

from typing import TYPE_CHECKING

from tejit import compat
from tejit.nn.delayed_state import plain_state_dict
from tejit.nn.linear import Linear
from tejit.nn.naming import name_modules
from tejit.nn.norms import LayerNorm, RMSNorm

if TYPE_CHECKING:
    from tejit.nn.attention import MultiheadAttention, RotaryPositionEmbedding
    from tejit.nn.grouped import GroupedLinear
    from tejit.nn.norm_linear import LayerNormLinear
    from tejit.nn.norm_mlp import LayerNormMLP
    from tejit.nn.transformer import TransformerLayer

__getattr__, __dir__ = compat.late_names(
    __name__,
    {
        "GroupedLinear": "tejit.nn.grouped",
        "LayerNormLinear": "tejit.nn.norm_linear",
        "LayerNormMLP": "tejit.nn.norm_mlp",
        "MultiheadAttention": "tejit.nn.attention",
        "RotaryPositionEmbedding": "tejit.nn.attention",
        "TransformerLayer": "tejit.nn.transformer",
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
