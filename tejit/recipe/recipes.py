"""Recipes: frozen dataclasses that say how the three GEMMs of a linear layer are quantized."""

from __future__ import annotations

import enum
import fnmatch
import functools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tejit import compat
from tejit.format_info import E4M3, E5M2
from tejit.formats import Float8CurrentScalingQuantizer
from tejit.recipe.plain import PlainForm
from tejit.tensor import Quantizer
from tejit.tensor.serialization import allow


class Format(enum.Enum):
    """Element types of a recipe."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    #: E4M3 for inputs and weights, E5M2 (more range, fewer bits) for gradients.
    HYBRID = "HYBRID"

    @property
    def forward_dtype(self) -> torch.dtype:
        """Element type of inputs and weights."""
        return (E5M2 if self is Format.E5M2 else E4M3).dtype

    @property
    def backward_dtype(self) -> torch.dtype:
        """Element type of gradients."""
        return (E4M3 if self is Format.E4M3 else E5M2).dtype


allow(Format)


class Variants(NamedTuple):
    """One quantizer for each set of directions a layer may need; made beforehand, since quantizers never change."""

    rowwise: Quantizer
    columnwise: Quantizer
    both: Quantizer

    def needing(self, rowwise: bool, columnwise: bool) -> Quantizer:
        """The variant that makes what is needed (at least one direction)."""
        if rowwise and columnwise:
            return self.both
        return self.rowwise if rowwise else self.columnwise


def variants(quantizer: Quantizer) -> Variants:
    """The :class:`Variants` of a quantizer, making bare storages."""
    bare = quantizer.replace(internal=True)
    both = bare.with_usage(rowwise=True, columnwise=True)
    return Variants(
        rowwise=bare.with_usage(rowwise=True, columnwise=False),
        # Where rowwise data cannot be left out, the variant makes too much; what a layer keeps is the same.
        columnwise=both if bare.needs_rowwise() else bare.with_usage(rowwise=False, columnwise=True),
        both=both,
    )


class DelayedRule(NamedTuple):
    """How the state of delayed scaling rolls, see ``DelayedScaling``; the maxima are those of the element types."""

    forward_max: float
    backward_max: float
    margin: int
    length: int
    algo: str
    reduce_amax: bool


class LinearQuantizers(NamedTuple):
    """What a linear layer quantizes: ``y = input @ weight.T`` and the two products with ``grad_output``.

    ``alignment`` is what all sizes of the operands are padded to; ``fast_accum_*`` say whether a GEMM may accumulate
    in fewer bits than float32 has; ``backward_override`` is the recipe's; ``weight_key`` is equal where weights are
    quantized alike. With ``delayed`` the scales come from the module's state, which rolls by that rule.
    ``weight_is_left`` where the recipe names no quantizer for weights: parameters then stay plain.
    """

    input: Variants
    weight: Variants
    grad_output: Variants
    alignment: int
    fast_accum_fprop: bool
    fast_accum_dgrad: bool
    fast_accum_wgrad: bool
    backward_override: str | None
    weight_key: str
    delayed: DelayedRule | None = None
    weight_is_left: bool = False


@compat.constant_result  # a recipe that is made inside of a compiled region has quantizers that are constants of it
def linear_quantizers(
    input: Quantizer,
    weight: Quantizer,
    grad_output: Quantizer,
    *,
    fast_accum_fprop: bool = False,
    fast_accum_dgrad: bool = False,
    fast_accum_wgrad: bool = False,
    backward_override: str | None = None,
    delayed: DelayedRule | None = None,
) -> LinearQuantizers:
    """:class:`LinearQuantizers` from one quantizer an operand."""
    return LinearQuantizers(
        input=variants(input),
        weight=variants(weight),
        grad_output=variants(grad_output),
        alignment=math.lcm(*(quantizer.alignment() for quantizer in (input, weight, grad_output))),
        fast_accum_fprop=fast_accum_fprop,
        fast_accum_dgrad=fast_accum_dgrad,
        fast_accum_wgrad=fast_accum_wgrad,
        backward_override=backward_override,
        weight_key=_key(weight),
        delayed=delayed,
    )


def _key(quantizer: Quantizer) -> str:
    """The quantizer's class and fields as text, less live state."""
    fields = quantizer._constructor_arguments()
    return f"{type(quantizer).__name__} {[item for item in fields.items() if not isinstance(item[1], Tensor)]}"


#: What backward multiplies instead of quantized operands.
BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")


@dataclass(frozen=True)
class Recipe(PlainForm):
    """Base of all recipes. Recipes are immutable and compared by value; unknown arguments are errors.

    Attributes:
        overrides: pairs of a pattern and another recipe, or None for high precision. A module whose name the pattern
            matches (``fnmatch``: ``"blocks.*.fc1"``) follows that recipe; the first match counts. A module without
            a name matches nothing, which is warned about once (``Linear(name=...)``, ``tejit.name_modules(root)``).
        backward_override: None quantizes the operands of backward's GEMMs too. ``high_precision`` multiplies in high
            precision there, the original input and weight, which are saved; ``dequantized`` multiplies in high
            precision what forward's operands stand for, which costs no more memory than None. ``grad_output`` is not
            quantized in either.

    A subclass's ``__post_init__`` calls this one's, which raises ``TypeError`` for overrides that are no such pairs
    and ``ValueError`` for a recipe among them that has overrides itself, or another ``backward_override``.
    """

    overrides: tuple[tuple[str, Recipe | None], ...] = field(default=(), kw_only=True)
    backward_override: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.backward_override not in BACKWARD_OVERRIDES:
            raise ValueError(
                f"backward_override is {self.backward_override!r}; it must be None, 'high_precision' or 'dequantized'"
            )
        object.__setattr__(self, "overrides", _checked_overrides(self.overrides))

    @property
    def linear(self) -> LinearQuantizers:
        """The quantizers of a linear layer under this recipe."""
        raise NotImplementedError(f"{type(self).__name__} does not define linear")

    def for_linear(
        self, name: str | None, product: str | None = None, module_type: str = "linear"
    ) -> LinearQuantizers | None:
        """The quantizers of the linear layer of this name; None for high precision.

        ``product`` is which one, where a module has several (``fc1``): it is called ``name.product``, and a pattern
        may match that or the module's name. ``module_type`` is what a ``CustomRecipe`` is told.
        """
        full = name if name is None or product is None else f"{name}.{product}"
        if self.overrides:
            index = _first_match(tuple([pattern for pattern, _ in self.overrides]), name, full)
            if index is not None:
                other = self.overrides[index][1]
                return None if other is None else other._linear_of(full, module_type)
        return self._linear_of(full, module_type)

    def _linear_of(self, name: str | None, module_type: str) -> LinearQuantizers | None:
        return self.linear

    def delayed_rule(self) -> DelayedRule | None:
        """How this recipe's own state of delayed scaling rolls; None where it has none."""
        return None


def delayed_rules(recipe: Recipe | None) -> tuple[DelayedRule, ...]:
    """The rules of delayed scaling that a recipe follows anywhere: its own, its overrides'."""
    if recipe is None:
        return ()
    rules = [each.delayed_rule() for each in (recipe, *[other for _, other in recipe.overrides]) if each is not None]
    return tuple([rule for rule in rules if rule is not None])


def _checked_overrides(overrides: Any) -> tuple[tuple[str, Recipe | None], ...]:
    needed = 'it must be pairs of a pattern and a recipe or None, such as (("lm_head", None),)'
    if not isinstance(overrides, (tuple, list)):
        raise TypeError(f"overrides is {overrides!r}; {needed}")
    for pair in overrides:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"overrides has {pair!r}; {needed}")
        if pair[1] is not None and not isinstance(pair[1], Recipe):
            raise TypeError(f"overrides has {pair[1]!r} for {pair[0]!r}; {needed}")
        if pair[1] is not None and pair[1].overrides:
            raise ValueError(f"the recipe for {pair[0]!r} has overrides itself; write them all in the outer recipe")
    return tuple([(pattern, recipe) for pattern, recipe in overrides])


@compat.constant_result
def _first_match(patterns: tuple[str, ...], name: str | None, full: str | None) -> int | None:
    """The place of the first pattern that matches a module's name or, in full, that of its product."""
    if name is None or full is None:
        _warn_of_no_name(patterns)
        return None
    return next(
        (i for i, pattern in enumerate(patterns) if any(fnmatch.fnmatchcase(n, pattern) for n in (name, full))), None
    )


@functools.cache
def _warn_of_no_name(patterns: tuple[str, ...]) -> None:
    compat.warn(
        f"a recipe has overrides for {', '.join(patterns)}, and a module without a name asks for its quantizers: no"
        " pattern can match it. Give it one with name=..., or all of them with tejit.name_modules(model)."
    )


def checked_format(fp8_format: Format) -> Format:
    if not isinstance(fp8_format, Format):
        raise TypeError(f"fp8_format is {fp8_format!r}; it must be a tejit.recipe.Format")
    if fp8_format is Format.E5M2:
        raise ValueError(
            "fp8_format is E5M2 for both passes, but no tensor core multiplies E5M2 by E5M2;"
            " use Format.HYBRID (E5M2 for gradients only) or Format.E4M3"
        )
    return fp8_format


def check_switches(recipe: Recipe, *names: str) -> None:
    for name in names:
        value = getattr(recipe, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be True or False")


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, taken from the tensor itself each time.

    Attributes:
        fp8_format: element types, forward and backward.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: lower bound of amax.
        fast_accum_fprop, fast_accum_dgrad, fast_accum_wgrad: let the tensor cores accumulate that GEMM in
            fewer bits, which is faster.

    Raises ``TypeError`` for a ``fp8_format`` that is no :class:`Format` or a switch that is no bool, and
    ``ValueError`` for pure E5M2 (two E5M2 operands have no GEMM) or a negative ``amax_epsilon``.
    """

    fp8_format: Format = Format.HYBRID
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0
    fast_accum_fprop: bool = True
    fast_accum_dgrad: bool = False
    fast_accum_wgrad: bool = False
    # Made once, outside any graph: a compiled region then only reads it.
    _linear: ClassVar[LinearQuantizers]  # each instance has its own; no field, which asdict would show

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_format(self.fp8_format)
        check_switches(self, "force_pow_2_scales", "fast_accum_fprop", "fast_accum_dgrad", "fast_accum_wgrad")

        def quantizer(dtype: torch.dtype) -> Quantizer:
            return Float8CurrentScalingQuantizer(
                dtype, force_pow_2_scales=self.force_pow_2_scales, amax_epsilon=self.amax_epsilon
            )

        forward = quantizer(self.fp8_format.forward_dtype)
        quantizers = linear_quantizers(
            forward,
            forward,
            quantizer(self.fp8_format.backward_dtype),
            fast_accum_fprop=self.fast_accum_fprop,
            fast_accum_dgrad=self.fast_accum_dgrad,
            fast_accum_wgrad=self.fast_accum_wgrad,
            backward_override=self.backward_override,
        )
        object.__setattr__(self, "_linear", quantizers)

    @property
    def linear(self) -> LinearQuantizers:
        """The quantizers of a linear layer under this recipe."""
        return self._linear
