"""``convert``: torch's modules become tejit's in place, and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import nn

from tejit.nn import name_modules, twins
from tejit.nn.naming import Named
from tejit.recipe import Recipe, default_recipe
from tejit.recipe.gain import too_small_to_gain

Root = TypeVar("Root", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]

#: The value of ``recipe`` that turns tejit's modules back into torch's.
NONE = "none"
#: How many layers a warning names.
_NAMED = 8


def convert(
    module: Root,
    *,
    recipe: Recipe | str | None = None,
    filter_fn: Filter | None = None,
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
        quantize_params: let the weights live quantized; they are then other parameters than before.

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
    if isinstance(recipe, str):
        if quantize_params:
            raise ValueError('quantize_params=True needs a recipe that has a format for them; "none" has none')
        _back(module, filter_fn)
    else:
        _forth(module, default_recipe() if recipe is None else recipe, filter_fn)
    return module


def _forth(root: nn.Module, recipe: Recipe, filter_fn: Filter | None) -> None:
    candidates = [(name, m) for name, m in root.named_modules() if twins.twin_of(m) and not twins.is_ours(m)]
    kept, small = {}, {}
    for name, module in candidates:
        if filter_fn is not None and not filter_fn(module, name):
            continue
        obstacle = twins.obstacle(module)
        if obstacle is not None:
            kept[name] = obstacle
        elif filter_fn is None and (reason := too_small(module, name, recipe)):
            small[name] = reason
        else:
            twins.to_ours(module)
    name_modules(root)
    if kept:
        _warn(f"tejit.convert left {len(kept)} of {len(candidates)} layers as they are: ", kept)
    if small:
        _warn(
            f"tejit.convert left {len(small)} of {len(candidates)} layers in high precision under"
            f" {type(recipe).__name__} (with filter_fn it leaves that choice to you): ",
            small,
        )


def too_small(module: nn.Module, name: str, recipe: Recipe) -> str | None:
    """Why a linear layer of torch's gains nothing under ``recipe``; None for a layer that may, and for norms."""
    sizes = twins.linear_sizes(module)
    return None if sizes is None else too_small_to_gain(recipe, name or None, *sizes)


def _back(root: nn.Module, filter_fn: Filter | None) -> None:
    ours = [(name, m) for name, m in root.named_modules() if isinstance(m, Named)]
    kept = {}
    for name, module in ours:
        if filter_fn is not None and not filter_fn(module, name):
            continue
        obstacle = twins.obstacle_back(module)
        if obstacle is not None:
            kept[name] = obstacle
        else:
            twins.to_torch(module)
    if kept:
        _warn(f'tejit.convert(recipe="none") left {len(kept)} of {len(ours)} layers as they are: ', kept)


def _warn(what: str, reasons: dict[str, str]) -> None:
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name or "the module itself")
    warnings.warn(what + "; ".join(f"{_listed(names)} ({reason})" for reason, names in by_reason.items()), stacklevel=4)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
