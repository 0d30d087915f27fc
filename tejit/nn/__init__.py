"""Modules: drop-in layers that quantize under ``tejit.autocast``."""

from tejit.nn.delayed_state import plain_state_dict
from tejit.nn.linear import Linear
from tejit.nn.naming import name_modules

__all__ = ["Linear", "name_modules", "plain_state_dict"]
