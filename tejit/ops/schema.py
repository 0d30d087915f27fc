"""The type that quantizers have in the schemas of ops: ``tejit.Quantizer``, also ``tejit.Quantizer?`` and ``[]``."""

from __future__ import annotations

from typing import Any, NoReturn

from tejit import compat
from tejit.dynamo import is_value_opaque_quantizer
from tejit.tensor import Quantizer

QUANTIZER = "tejit.Quantizer"


class _QuantizerType(metaclass=compat.ValueMeta):
    """Stands for every registered quantizer in schemas; nobody makes one.

    torch wants a registered class there and looks at each argument's own class afterwards. The base of all
    quantizers is none: it would turn quantizers of unregistered classes into constants too (from torch 2.12,
    registration is inherited).
    """

    def __new__(cls) -> NoReturn:
        raise TypeError(f"{QUANTIZER} is the name of a type in schemas; make a quantizer")

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        raise TypeError(f"{QUANTIZER} has no instances")


_QuantizerType.__module__, _QuantizerType.__qualname__ = QUANTIZER.split(".")
compat.register_constant_class(_QuantizerType, fields=(), methods=())


def checked_quantizer(quantizer: Any) -> Quantizer:
    """The argument of an op, where it is a quantizer with a value.

    Raises ``TypeError`` for anything else: the dispatcher lets every object through.
    """
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"an op got {quantizer!r} of type {type(quantizer).__name__} where it takes a quantizer")
    if not is_value_opaque_quantizer(quantizer):
        raise TypeError(
            f"an op got a {type(quantizer).__name__}, whose class is not registered: a graph would not notice another"
            " one. Use tejit.dynamo.register_value_opaque_quantizer where all of its state is in its fields; else call"
            " quantizer.quantize(x)."
        )
    return quantizer
