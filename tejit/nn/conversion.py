"""What ``convert`` does: torch's modules become tejit's in place, weights become quantized, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn

from tejit import compat
from tejit.nn import init, name_modules, twins
from tejit.nn.module import QuantizedModule
from tejit.nn.naming import Named
from tejit.recipe import Recipe
from tejit.recipe.gain import too_small_to_gain
from tejit.recipe.model_init import current_model_init, quantized_model_init
from tejit.tensor import QuantizedTensor, Quantizer
from tejit.tensor.attached import carry

Filter = Callable[[nn.Module, str], bool]

#: How many layers a warning names.
_NAMED = 8


def forth(root: nn.Module, recipe: Recipe, filter_fn: Filter | None) -> None:
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
    for module in root.modules():
        if isinstance(module, QuantizedModule):
            module.keep_delayed_state(recipe)
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
    return None if sizes is None else too_small_to_gain(recipe.for_linear(name or None), *sizes)


def quantize(root: nn.Module, recipe: Recipe, filter_fn: Filter | None) -> None:
    """Let the weights of tejit's modules live quantized."""
    asked, kept = current_model_init(), {}
    preserve = asked is not None and asked.preserve
    became: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    chosen = [
        (name, module)
        for name, module in root.named_modules()
        if isinstance(module, QuantizedModule) and (filter_fn is None or filter_fn(module, name))
    ]
    torn = _of_several_formats([module for _, module in chosen], recipe)
    for name, module in chosen:
        if isinstance(module, twins.TransposedLinear):
            kept[name] = "its weight is stored transposed"
            continue
        before = dict(module._parameters)
        if any(id(parameter) in torn for parameter in before.values()):
            kept[name] = "it is tied to one for which the recipe has another format"
        linear = twins.linear_products(module)
        if any(each.parameter not in before for each in linear):
            kept[name] = "it is no parameter: a hook makes it, or it is a buffer"
        done = {parameter: became[id(old)][1] for parameter, old in before.items() if id(old) in became}
        module._parameters.update(done)
        with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
            init.quantize_parameters(
                module,
                {
                    each.parameter: (module.name, each.product, module._module_type)
                    for each in linear
                    if each.parameter in before
                    and each.parameter not in done
                    and id(before[each.parameter]) not in torn
                },
            )
        became |= {
            id(old): (old, module._parameters[parameter])
            for parameter, old in before.items()
            if module._parameters[parameter] is not old and parameter not in done
        }
    _replace(root, became)
    if kept:
        _warn(f"tejit.convert left {len(kept)} weights in high precision: ", kept)


def _of_several_formats(modules: list[QuantizedModule], recipe: Recipe) -> set[int]:
    """The ids of tied weights that no single format would let all of their layers use."""
    formats: dict[int, set[Quantizer]] = {}
    for module in modules:
        for each in twins.linear_products(module):
            quantizers = recipe.for_linear(module.name, each.product, module._module_type)
            if quantizers is not None:
                quantizer = init.weight_quantizer(module, quantizers, each.parameter)
                if quantizer is not None:
                    formats.setdefault(id(getattr(module, each.parameter)), set()).add(quantizer)
    return {key for key, found in formats.items() if len(found) > 1}


def _dequantize(root: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Give modules high-precision parameters for quantized ones."""
    became = {}
    for parameter in {id(p): p for module in modules for p in module.parameters(recurse=False)}.values():
        if isinstance(parameter, QuantizedTensor):
            plain = nn.Parameter(parameter.dequantize().detach(), requires_grad=parameter.requires_grad)
            carry(parameter, plain)
            became[id(parameter)] = parameter, plain
    _replace(root, became)


def _replace(root: nn.Module, became: Mapping[int, tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Put parameters into the place of others, by their ids, wherever these are; hooks of the old ones go along."""
    for old, new in became.values():
        new._backward_hooks = old._backward_hooks
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in became:
                module._parameters[name] = became[id(parameter)][1]


def back(root: nn.Module, filter_fn: Filter | None) -> None:
    ours = [(name, m) for name, m in root.named_modules() if isinstance(m, Named)]
    kept, turned = {}, []
    for name, module in ours:
        if filter_fn is not None and not filter_fn(module, name):
            continue
        obstacle = twins.obstacle_back(module)
        if obstacle is not None:
            kept[name] = obstacle
        else:
            turned.append(module)
    _dequantize(root, turned)
    for module in turned:
        twins.to_torch(module)
    if kept:
        _warn(f'tejit.convert(recipe="none") left {len(kept)} of {len(ours)} layers as they are: ', kept)


def _warn(what: str, reasons: dict[str, str]) -> None:
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name or "the module itself")
    compat.warn(what + "; ".join(f"{_listed(names)} ({reason})" for reason, names in by_reason.items()))


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
