"""Modules: drop-in layers that quantize under ``tejit.autocast``."""

from tejit.nn.grouped import GroupedLinear
from tejit.nn.linear import Linear
from tejit.nn.naming import name_modules

__all__ = ["GroupedLinear", "Linear", "name_modules"]
