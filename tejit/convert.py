"""``convert``: torch's modules become tejit's in place, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from tejit.recipe import Recipe, default_recipe

Root = TypeVar("Root", bound=nn.Module)

#: The value of ``recipe`` that turns tejit's modules back into torch's.
NONE = "none"


def convert(
    module: Root,
    *,
    recipe: Recipe | str | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    quantize_params: bool = False,
) -> Root:
    """Turn ``nn.Linear``, ``nn.LayerNorm``, ``nn.RMSNorm`` and HF's ``Conv1D`` into tejit's modules, in place.

    The modules stay the same objects with another class: parameters, ties, hooks, names, devices and dtypes are as
    before, optimizers made before go on working, and without ``tejit.autocast``, which alone switches quantization
    on, they compute the same bits. Modules without a name get their qualified one. Converting twice changes nothing.

    Args:
        module: the model; itself may be such a layer.
        recipe: decides which layers are too small to gain and, with ``quantize_params``, the format of the weights;
            None is ``tejit.recipe.default_recipe()``. ``"none"`` turns tejit's modules back into torch's, quantized
            weights into high-precision ones.
        filter_fn: called with a layer and its qualified name; only layers of which it says True are converted. With it,
            layers that are too small to gain are converted as well: what is worth it is then the caller's decision.
        quantize_params: let the weights live quantized, as ``tejit.quantized_model_init`` does, whose
            ``preserve_high_precision_init_val`` counts where it is around the call. They are then other parameters
            than before, with what was attached to those and their hooks: make the optimizer afterwards.

    Returns:
        ``module``.

    Layers that stay as they are, because they are too small (without ``filter_fn``) or because a subclass computes
    something else, are named in one warning each.

    Raises:
        TypeError: ``module`` is no module, ``recipe`` neither a recipe, None nor ``"none"``, ``filter_fn`` no function,
            or ``quantize_params`` no bool.
        ValueError: ``quantize_params`` together with ``"none"``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {module!r}; it must be a torch.nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"filter_fn is {filter_fn!r}; it must be a function of a module and its qualified name")
    if not isinstance(quantize_params, bool):
        raise TypeError(f"quantize_params is {quantize_params!r}; it must be True or False")
    if recipe is not None and recipe != NONE and not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe is {recipe!r}; it must be an instance of a recipe, such as"
            ' tejit.recipe.Float8CurrentScaling(), None or "none"'
        )
    from tejit.nn import conversion

    if isinstance(recipe, str):
        if quantize_params:
            raise ValueError('quantize_params=True needs a recipe that has a format for them; "none" has none')
        conversion.back(module, filter_fn)
    else:
        chosen = default_recipe() if recipe is None else recipe
        conversion.forth(module, chosen, filter_fn)
        if quantize_params:
            conversion.quantize(module, chosen, filter_fn)
    return module
