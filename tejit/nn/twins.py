"""Which of torch's modules have a twin among tejit's, and how one becomes the other in place.

A module changes its class and stays the same object: whoever holds it (a parent, the handle of a hook, a list of
somebody's) goes on holding it, and so do those who hold its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from tejit.nn import inputs
from tejit.nn.delayed_buffers import PREVIOUS, STORED
from tejit.nn.linear import Linear
from tejit.nn.linear_function import quantized_linear
from tejit.nn.module import _OWN as OWN
from tejit.nn.module import QuantizedModule
from tejit.nn.norms import LayerNorm, RMSNorm
from tejit.nn.workspace import PREFIX as WORKSPACE
from tejit.recipe.model_init import quantized_model_init


class TransposedLinear(Linear):
    """``y = x @ weight + bias`` with a weight of ``(in_features, out_features)``: what ``tejit.convert`` makes of the
    linear layers of Hugging Face's GPT-2 (``transformers.pytorch_utils.Conv1D``)."""

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """``(..., in_features)`` to ``(..., out_features)``; ``is_first_microbatch`` as in ``Linear.forward``."""
        other = inputs.other_forward(TransposedLinear.forward, self, x, is_first_microbatch)
        if other is not inputs.PLAIN:
            return other
        weight, quantizers = self.weight, self._quantizers()
        if quantizers is None:
            self._calibrate(x, weight.t())
            # The operation of Conv1D, so that the bits are its bits.
            flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self._plain(weight, is_first_microbatch))
            return flat.reshape(*x.shape[:-1], self.out_features)
        weight = weight.t()
        self._make_room(is_first_microbatch, {"weight": (quantizers, weight)})
        x, weight, bias = self._operands(x, weight, self.bias)
        return quantized_linear(x, self._product(quantizers, weight, x.requires_grad, is_first_microbatch), bias)

    def reset_parameters(self) -> None:
        """Initialise the parameters as ``Conv1D`` does."""
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class Twin(NamedTuple):
    """A class of torch's and one of ours.

    Attributes:
        plain: torch's class; what both classes' constructors are given is the same.
        ours: tejit's class.
        arguments: what a module of either class would be made with again.
        described: attributes that ``ours`` has and a foreign module lacks, by what they are for that module.
    """

    plain: type[nn.Module]
    ours: type[nn.Module]
    arguments: Callable[[Any], tuple[Any, ...]]
    described: Callable[[Any], dict[str, Any]] = lambda module: {}

    def additions(self, module: nn.Module) -> dict[str, Any]:
        """The attributes, with their first values, that only ``ours`` has."""
        with quantized_model_init(enabled=False):
            ours, plain = (cls(*self.arguments(module), device="meta") for cls in (self.ours, self.plain))
        return {name: value for name, value in vars(ours).items() if name not in vars(plain)}


_LINEAR = Twin(nn.Linear, Linear, lambda module: (module.in_features, module.out_features, module.bias is not None))
_TRANSPOSED = Twin(
    nn.Linear,
    TransposedLinear,
    lambda module: (*module.weight.shape, module.bias is not None),
    lambda module: {"in_features": module.weight.shape[0], "out_features": module.weight.shape[1]},
)
_TWINS = (
    _LINEAR,
    Twin(
        nn.LayerNorm,
        LayerNorm,
        lambda module: (module.normalized_shape, module.eps, module.elementwise_affine, module.bias is not None),
    ),
    Twin(nn.RMSNorm, RMSNorm, lambda module: (module.normalized_shape, module.eps, module.elementwise_affine)),
)
#: By the full name of a class whose package may not be there.
_FOREIGN = {"transformers.pytorch_utils.Conv1D": _TRANSPOSED}

#: Buffers of delayed scaling.
STATE = (*STORED, PREVIOUS)

#: What a subclass may define and still compute what its base computes.
_HARMLESS = {"__init__", "reset_parameters", "extra_repr", "__repr__", "__annotate__", "__annotate_func__"}


def _foreign(cls: type) -> Twin | None:
    return _FOREIGN.get(f"{cls.__module__}.{cls.__qualname__}")


def twin_of(module: nn.Module) -> Twin | None:
    """The pair that a module of torch's or of ours belongs to, subclasses included; None where there is none."""
    for base in type(module).__mro__:
        for twin in (*_TWINS, *_FOREIGN.values()):
            if base in (twin.ours, twin.plain):
                return twin
        if _foreign(base):
            return _foreign(base)
    return None


def is_ours(module: nn.Module) -> bool:
    """Whether the module is of a class of tejit's that has a twin, or of a subclass of one."""
    twin = twin_of(module)
    return twin is not None and isinstance(module, twin.ours)


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """``(in_features, out_features)`` of a linear layer, torch's, foreign or ours; None for what is none."""
    twin = twin_of(module)
    if twin is None or not issubclass(twin.ours, nn.Linear):
        return None
    described = twin.described(module) or vars(module)
    return described["in_features"], described["out_features"]


class LinearProduct(NamedTuple):
    """A linear product of one of tejit's modules.

    Attributes:
        product: its name inside of a module that has several, else None (``Recipe.for_linear``); the groups of a
            ``GroupedLinear`` are products of one name.
        parameter: the name of its weight: a parameter, or a tensor that a hook makes of other parameters before each
            forward (pruning, ``torch.nn.utils.weight_norm``).
        sizes: ``(in_features, out_features)``.
    """

    product: str | None
    parameter: str
    sizes: tuple[int, int]


def linear_products(module: QuantizedModule) -> list[LinearProduct]:
    """The linear products of one of tejit's modules; empty for modules that leave them to modules below."""
    found = []
    for parameter, weight in (module._parameters | module._buffers | vars(module)).items():
        is_weight = _WEIGHT.fullmatch(parameter)
        if is_weight and isinstance(weight, Tensor) and weight.dim() == 2:
            rows, columns = weight.shape
            sizes = linear_sizes(module) or (columns, rows)
            found.append(LinearProduct(is_weight[1], parameter, sizes))
    return found


#: Names of weights: ``weight``, ``fc1_weight``, ``weight0``.
_WEIGHT = re.compile(r"(?:(.+)_)?weight\d*")


def twin_name(module: nn.Module) -> str:
    """The name of the class that a module of torch's would become."""
    twin = twin_of(module)
    assert twin is not None
    return twin.ours.__name__


def obstacle(module: nn.Module) -> str | None:
    """Why one of torch's modules that has a twin must stay what it is; None where nothing stands against it."""
    cls = type(module)
    if isinstance(module, LazyModuleMixin):
        return f"{cls.__name__} has no parameters before its first forward; convert the model after one"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight and never calls it"
    if is_parametrized(module):
        return "torch.nn.utils.parametrize gave it a class of its own, which makes its parameters"
    for base in cls.__mro__:
        if _foreign(base) or any(base is twin.plain for twin in _TWINS):
            break
        own = {name for name, value in vars(base).items() if callable(value) or hasattr(value, "__get__")} - _HARMLESS
        own -= {"__dict__", "__weakref__"}
        if own:
            return f"{base.__name__} is a class of its own: it defines {', '.join(sorted(own))}"
    return None


def to_ours(module: nn.Module) -> None:
    """Turn one of torch's modules, against which :func:`obstacle` has nothing, into its twin."""
    twin = twin_of(module)
    assert twin is not None
    cls = type(module)
    for name, value in (twin.described(module) | twin.additions(module)).items():
        if name not in vars(module):  # a name that somebody gave it counts
            setattr(module, name, value)
    module.__class__ = twin.ours
    if isinstance(module, QuantizedModule):
        module._init_quantized(module.name)
        module._init_delayed(module.weight.device)
    if cls is not twin.plain:
        module._torch_class = cls


def _forget(module: nn.Module) -> list[str]:
    """Take the buffers of ours out of a module that quantizes; the names of the attributes that go with them."""
    ours = [name for name in module._buffers if name in STATE or name.startswith(WORKSPACE)]
    for name in ours:
        delattr(module, name)
    return [name for name in vars(module) if name.startswith(WORKSPACE) or name in OWN]


def obstacle_back(module: nn.Module) -> str | None:
    """Why a module of tejit's cannot become torch's; None where it can."""
    twin = twin_of(module)
    if twin is None or not isinstance(module, twin.ours):
        return f"torch has no module that does what {type(module).__name__} does"
    if type(module) is not twin.ours:
        return f"{type(module).__name__} is a class of its own"
    for switch in ("return_bias", "zero_centered_gamma"):
        if getattr(module, switch, False):
            return f"torch's {twin.plain.__name__} has no {switch}"
    return None


def to_torch(module: nn.Module) -> None:
    """Turn a module, against which :func:`obstacle_back` has nothing, into what it was, or its twin of torch's."""
    twin = twin_of(module)
    assert twin is not None
    cls = vars(module).get("_torch_class", twin.plain)
    added = twin.additions(module)
    own = [*added, *twin.described(module), "_torch_class", *_forget(module)]
    for name in own:
        vars(module).pop(name, None)
    module.__class__ = cls
