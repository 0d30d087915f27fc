"""``quantized_model_init``: where modules are built with quantized parameters."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import NamedTuple

from tejit.recipe.context import default_recipe
from tejit.recipe.recipes import Recipe


class ModelInit(NamedTuple):
    """What the innermost ``quantized_model_init`` asks for.

    Attributes:
        recipe: whose quantizers for weights make the parameters.
        preserve: whether parameters keep their values before quantization, on the CPU.
    """

    recipe: Recipe
    preserve: bool


class _State(threading.local):
    """The contexts that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.entered: list[ModelInit | None] = []


_state = _State()


class quantized_model_init:
    """Context in which tejit's modules are built with weights that live quantized: no high-precision copy is kept.

    Args:
        enabled: False builds high-precision parameters inside an outer ``quantized_model_init``.
        recipe: whose quantizers for weights make them; None means ``default_recipe()``. Train under ``autocast`` with
            the same recipe; without ``autocast`` the weights are dequantized.
        preserve_high_precision_init_val: each quantized parameter keeps the values that it was quantized from, on the
            CPU, for the masters of an optimizer: ``parameter.get_high_precision_init_val()`` gives them. They are the
            initial ones, in the module's dtype, until ``load_state_dict`` or ``parameter.copy_`` brings others from
            high precision, in the dtype that they come in. It gives None where the parameter holds anything but their
            quantization (it took over a quantized tensor, or was changed in place), on the meta device, and after
            ``parameter.clear_high_precision_init_val()``. Conversions of the module leave them where and as they are.
            With ``load_state_dict(assign=True)`` the parameter is another one, without these methods.

    Weights have both directions, under ``torch.no_grad()`` rowwise data only. A weight whose shape does not fit stays
    in high precision, which is said once. Optimizers update them by ``copy_`` and other in-place operations, which
    quantize again. One instance may be entered again after it was left, and inside itself.

    Raises ``TypeError`` where ``recipe`` is no recipe or a switch no bool.
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        for name, value in (
            ("enabled", enabled),
            ("preserve_high_precision_init_val", preserve_high_precision_init_val),
        ):
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; it must be True or False")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"recipe is {recipe!r}; it must be an instance of a recipe, such as tejit.recipe.Float8CurrentScaling()"
            )
        chosen = default_recipe() if recipe is None else recipe
        self._asked = ModelInit(chosen, preserve_high_precision_init_val) if enabled else None

    def __enter__(self) -> quantized_model_init:
        _state.entered.append(self._asked)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _state.entered.pop()


def current_model_init() -> ModelInit | None:
    """What modules built in this thread are asked for; None where their parameters are of high precision."""
    return _state.entered[-1] if _state.entered else None
