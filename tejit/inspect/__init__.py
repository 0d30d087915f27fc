"""Help: what a model's layers do under a recipe, and what this machine has."""

from tejit.inspect.explain import Explanation, Product, explain
from tejit.inspect.info import Info, info

__all__ = ["Explanation", "Info", "Product", "explain", "info"]
