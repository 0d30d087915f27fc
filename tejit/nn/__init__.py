"""Modules: drop-in layers that quantize under ``tejit.autocast``."""

from tejit.nn.attention import MultiheadAttention, RotaryPositionEmbedding
from tejit.nn.delayed_state import plain_state_dict
from tejit.nn.grouped import GroupedLinear
from tejit.nn.linear import Linear
from tejit.nn.naming import name_modules
from tejit.nn.norm_linear import LayerNormLinear
from tejit.nn.norm_mlp import LayerNormMLP
from tejit.nn.norms import LayerNorm, RMSNorm
from tejit.nn.transformer import TransformerLayer

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
