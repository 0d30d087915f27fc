"""``QuantizedModule``: what all modules share that multiply quantized operands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tejit import compat, refusals
from tejit.format_info import HIGH_PRECISION_DTYPES
from tejit.nn import asked, gradients, init, products, weights
from tejit.nn.apply import KeepsAttached
from tejit.nn.delayed_state import Delayed
from tejit.nn.gradients import Late, PutOff
from tejit.nn.keyed import module_of
from tejit.nn.naming import Named, checked_name
from tejit.nn.products import Plan, State
from tejit.nn.workspace import KeepsWorkspace
from tejit.recipe import LinearQuantizers, Recipe, current_group, current_recipe, entered_in_this_backward
from tejit.tensor.quantizer import Inner

Self = TypeVar("Self", bound="QuantizedModule")

#: Attributes that no copy of a module takes over.
_OWN = ("_forward_context", "_ready", "_key", "_put_off", "_known_readings", "_known_workspaces", "_own_workspace")


class Product(NamedTuple):
    """One linear product of a module, ready for its autograd function.

    Attributes:
        plan: how it runs.
        weight: ``(N, K)``, what the gradient goes to; in the dtype that is multiplied in, unless it came quantized.
        main_grad: what the weight's gradient is accumulated into, or None.
        late: what eager backward does beside computing it, or None.
        given: the weight's buffers where it came quantized, else empty.
        state: the module's state of delayed scaling.
    """

    plan: Plan
    weight: Tensor
    main_grad: Tensor | None
    late: Late | None
    given: Inner
    state: State


def checked_dtype(dtype: torch.dtype | None, params_dtype: torch.dtype | None) -> torch.dtype | None:
    """The one that is given of two names of an argument.

    Raises ``ValueError`` where both are given and differ.
    """
    if dtype is not None and params_dtype is not None and dtype != params_dtype:
        raise ValueError(
            f"dtype is {dtype} and params_dtype is {params_dtype}: they are two names of one argument; give one"
        )
    return dtype if dtype is not None else params_dtype


class QuantizedModule(KeepsWorkspace, Delayed, KeepsAttached, Named, nn.Module):
    """Base of the modules that quantize under ``tejit.autocast``; a mixin where torch has the module too.

    A subclass calls :meth:`_init_quantized` after ``nn.Module.__init__`` and ``_init_delayed`` when the parameters are
    there, with ``_products`` set to the number of its linear products. In forward it asks :meth:`_quantizers` (None
    means high precision) and makes one :meth:`_product` a linear product, whose numbers are ``index``.
    """

    fuse_wgrad_accumulation = False
    save_original_input = False
    delay_wgrad_compute = False
    _forward_context: tuple[Recipe | None, Any] = (None, None)
    _ready: Any = None
    _put_off: deque[PutOff]
    _known_readings: dict[str, Any]

    def _init_quantized(
        self,
        name: str | None,
        *,
        fuse_wgrad_accumulation: bool = False,
        save_original_input: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        self.name = checked_name(name)
        for switch, value in (
            ("fuse_wgrad_accumulation", fuse_wgrad_accumulation),
            ("save_original_input", save_original_input),
            ("delay_wgrad_compute", delay_wgrad_compute),
        ):
            if not isinstance(value, bool):
                raise TypeError(f"{switch} is {value!r}; it must be True or False")
            setattr(self, switch, value)
        self._begin()

    def _begin(self) -> None:
        """What a module has of its own, and a copy of it too."""
        self._put_off = deque()
        self._known_readings, self._known_workspaces, self._own_workspace = {}, {}, {}
        self._take_key()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in _OWN}

    # -- what forward asks --------------------------------------------------------------------------------------
    def _recipe(self) -> Recipe | None:
        """The recipe in force; in a recomputation (activation checkpointing) that of the forward which it repeats.

        Backward is usually called outside of that ``autocast``, and a checkpointed forward runs again inside it; an
        ``autocast`` counts there that is part of what runs again.
        """
        recipe = current_recipe()
        if torch.compiler.is_compiling():
            return recipe
        known = self._forward_context
        if compat.in_backward():
            return recipe if entered_in_this_backward() else known[0]
        group = current_group()
        if recipe is not known[0] or group is not known[1]:
            self.__dict__["_forward_context"] = (recipe, group)
        return recipe

    def _group(self) -> Any:
        """The group over which amax is reduced; found as :meth:`_recipe` finds the recipe."""
        if torch.compiler.is_compiling() or not compat.in_backward() or entered_in_this_backward():
            return current_group()
        return self._forward_context[1]

    def _quantizers(self, name: str | None = None) -> LinearQuantizers | None:
        """The quantizers of the module's linear products; None for high precision.

        ``name`` is that of a product inside, for modules that have several; default: the module's.
        """
        recipe = self._recipe()
        return (
            None
            if recipe is None
            else recipe.for_linear(self.name if name is None else name, module_type=self._module_type)
        )

    def _operands(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, features: str = "in_features"
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Input, weight and bias in one dtype: AMP's inside ``torch.autocast``, else the one they share.

        A quantized weight stays as it is; its nominal dtype counts outside of ``torch.autocast``.
        """
        refusals.refuse_layouts(x, weight)
        if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"the input has shape {tuple(x.shape)}; its last dimension must be {features} = {weight.shape[1]}"
            )
        if x.device != weight.device:
            raise ValueError(f"the input is on {x.device} and the weight on {weight.device}; move one of them")
        compat.refuse_tangents(x, weight, bias)
        kind = x.device.type
        if compat.autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, bias = eligible(x, dtype), eligible(bias, dtype)
            if not weights.is_quantized(weight):
                weight = eligible(weight, dtype)
            elif x.dtype == dtype:
                return x, weight, bias
        if x.dtype != weight.dtype:
            raise TypeError(
                f"the input is {x.dtype} and the weight {weight.dtype}; convert one of them, or use torch.autocast"
            )
        if x.dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"the input is {x.dtype}; it must be torch.float32, torch.bfloat16 or torch.float16")
        return x, weight, bias

    def _product(
        self,
        quantizers: LinearQuantizers,
        weight: Tensor,
        needs_dgrad: bool,
        is_first_microbatch: bool | None = None,
        *,
        parameter: str = "weight",
        index: int = 0,
    ) -> Product:
        """A linear product with ``weight``, which :meth:`_operands` made of the parameter of this name.

        Args:
            quantizers: from :meth:`_quantizers`.
            weight: ``(N, K)``.
            needs_dgrad: whether the product's input needs a gradient.
            is_first_microbatch: None quantizes the weight in this call; True fills the workspace with it, False
                uses the workspace. It decides too whether ``main_grad`` is overwritten or added to.
            parameter: the parameter's name.
            index: the product's number in the module.
        """
        grad = torch.is_grad_enabled()
        needs_dgrad, needs_wgrad = grad and needs_dgrad, grad and weight.requires_grad
        if quantizers.delayed is not None and self.save_original_input:
            raise ValueError(
                "save_original_input=True and delayed scaling do not go together: by the time of backward the scale may"
                " be another one"
            )
        state, delayed = self._delayed_state(quantizers.delayed, weight.device)
        if torch.compiler.is_compiling():
            if not (needs_dgrad or needs_wgrad):
                state = compat.replaced(state, anchor=None)  # it would make the output require a gradient
            elif state.anchor is None:
                state = compat.replaced(state, anchor=asked.anchor(weight.device))
        group = self._group()
        source, usages = weights.CALL, (True, True)
        given: Inner = ()
        if weights.is_quantized(weight):
            source = weights.PARAMETER
            quantizers, usages, given = self._read(quantizers, weight, parameter)
        elif is_first_microbatch is not None:
            source = weights.WORKSPACE
            writing = Plan(quantizers, False, False, index * products.SLOTS, group=group)
            given = self._cached(writing, state, weight, needs_dgrad, is_first_microbatch, parameter)
        main_grad, late, accumulate = None, None, True
        if needs_wgrad and (self.fuse_wgrad_accumulation or self.delay_wgrad_compute):
            main_grad, late, accumulate = self._destination(parameter, is_first_microbatch)
        plan = Plan(
            quantizers,
            needs_dgrad,
            needs_wgrad,
            index * products.SLOTS,
            source,
            usages,
            self.save_original_input,
            accumulate,
            group,
            delayed,
        )
        return Product(plan, weight, main_grad, late, given, state)

    def _read(self, quantizers: LinearQuantizers, weight: Any, parameter: str) -> Any:
        """``weights.reading``, whose checks are made once for a parameter's quantizer in eager."""
        if torch.compiler.is_compiling():
            return weights.reading(quantizers, weight, parameter)
        known = self._known_readings.get(parameter)
        if known is not None and known[0] is quantizers and known[1] is weight._quantizer:
            inner = tuple([getattr(weight, attribute) for attribute in known[2]])
            if quantizers.weight.both.usages_of(weight) == known[4]:
                return known[3], known[4], inner
        read, usages, inner = weights.reading(quantizers, weight, parameter)
        names = tuple(weight._buffer_keywords())
        self._known_readings[parameter] = (quantizers, weight._quantizer, names, read, usages)
        return read, usages, inner

    def _plain(self, weight: Any, is_first_microbatch: bool | None = None, parameter: str = "weight") -> Tensor:
        """The parameter of this name for a product of torch's own, whose gradient goes where the module's switches
        send it."""
        values = weights.values(weight)
        sends = self.fuse_wgrad_accumulation or self.delay_wgrad_compute
        if not (sends and torch.is_grad_enabled() and values.requires_grad):
            return values
        return gradients.sent(values, *self._destination(parameter, is_first_microbatch))

    def _destination(self, parameter: str, is_first: bool | None) -> tuple[Tensor | None, Late | None, bool]:
        """Where a parameter's gradient goes: ``main_grad``, what backward does beside computing it, and whether it is
        added to ``main_grad``."""
        owner = getattr(self, parameter)
        main_grad, accumulate = None, True
        if self.fuse_wgrad_accumulation:
            main_grad = gradients.main_grad_of(owner, parameter)
            accumulate = gradients.accumulates(owner, is_first)
        return main_grad, self._late(owner, parameter), accumulate

    def _late(self, owner: Any, parameter: str) -> Late | None:
        if torch.compiler.is_compiling():
            if self.delay_wgrad_compute:
                raise RuntimeError(
                    "delay_wgrad_compute=True cannot be compiled: a graph's backward cannot put a product off. Leave"
                    " this module out of the compiled region, or use delay_wgrad_compute=False"
                )
            if _is_waited_for(self._key, parameter):
                owner.grad_added_to_main_grad = True  # a graph's backward cannot
            return None
        if self.delay_wgrad_compute and not owner.is_leaf:
            raise RuntimeError(
                f"delay_wgrad_compute=True cannot put off the gradient of {parameter}, which is computed from other"
                " tensors (a parametrization, torch.func): it would not reach them. Use delay_wgrad_compute=False"
            )
        return Late(owner, self._put_off if self.delay_wgrad_compute else None)

    def backward_dw(self) -> None:
        """Compute the weights' gradients that the oldest backward put off (``delay_wgrad_compute``), one for each
        time that it passed a product that needs one; nothing where the module does not put off.

        They are added to the weights' ``grad``, or to ``main_grad`` with ``fuse_wgrad_accumulation``; hooks of the
        parameters do not run.

        Raises ``RuntimeError`` where no backward put one off that is still to be computed.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._put_off:
            raise RuntimeError(
                "backward_dw() was called, and no backward has put off a gradient of this module's weight"
            )
        oldest = self._put_off[0].backward
        while self._put_off and self._put_off[0].backward == oldest:
            self._put_off.popleft().compute()

    def _settle(self, device: torch.device) -> None:
        if torch.compiler.is_compiling():
            _settle(self._key, device)
        else:
            super()._settle(device)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        # Another parameter comes (assigned, or loaded with ``assign=True``): what is ready would keep the one before.
        self.__dict__.pop("_ready", None)
        old = self._parameters.get(name)
        placeholder = weights.is_quantized(old) and old.is_meta  # built on meta inside of quantized_model_init
        if placeholder and param is not None and not (param.is_meta or weights.is_quantized(param)):
            param = init.taken_over(old, param)  # plain values from a loader (transformers, assign=True)
        super().register_parameter(name, param)

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.__dict__.pop("_ready", None)  # it would keep what the module is moved away from
        super()._apply(fn, recurse)
        return self


@compat.constant_result
def _settle(key: str, device: torch.device) -> None:
    """``Delayed._settle`` of a module, while tracing: before the graph looks at the buffers."""
    Delayed._settle(module_of(key), device)


@compat.constant_result
def _is_waited_for(key: str, parameter: str) -> bool:
    """Whether somebody set ``grad_added_to_main_grad`` on a parameter; a graph would guard its value."""
    return hasattr(getattr(module_of(key), parameter), "grad_added_to_main_grad")


def returned(parameter: Tensor) -> Tensor:
    """A parameter as an output of a module: itself, where nobody will take it for what an autograd function made."""
    return parameter.detach() if compat.in_function_forward() else parameter


def eligible(tensor: Any, dtype: torch.dtype) -> Any:
    """What torch.autocast would make of an operand: it leaves float64 and integers alone."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
