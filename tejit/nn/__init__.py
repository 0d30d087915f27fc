"""Modules: drop-in layers that quantize under ``tejit.autocast``."""

from tejit.nn.linear import Linear

__all__ = ["Linear"]
