"""Quantizer classes in a module whose annotations are strings, named like those of test_value_classes.py."""

from __future__ import annotations

import enum
import typing
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch

from tejit import Quantizer
from tejit.dynamo import register_value_opaque_quantizer

if TYPE_CHECKING:
    from decimal import Decimal


class Mode(enum.Enum):
    FAST = "of the future"


@register_value_opaque_quantizer
class Twin(Quantizer):
    """Every kind of annotation, as text."""

    instances: ClassVar[dict[str, object]] = {}
    made: typing.ClassVar[int] = 0
    mode: Mode | None
    level: typing.Optional[int]  # noqa: UP045 - as people write it
    side: Literal["left", "right"]
    factor: Annotated[float, "a scale"]
    kind: torch.dtype
    child: Twin | None

    def __init__(self, *, mode=Mode.FAST, level=None, side="left", factor=1.0, kind=torch.half, child=None, **base):
        super().__init__(**base)
        self._init_fields(mode=mode, level=level, side=side, factor=factor, kind=kind, child=child)


class Unresolvable(Quantizer):
    """A field whose type exists for type checkers only."""

    amount: Decimal
