"""``QuantizedModule``: what all modules share that multiply quantized operands."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tejit import compat
from tejit.format_info import HIGH_PRECISION_DTYPES
from tejit.nn import gradients, products, weights
from tejit.nn.apply import KeepsAttached
from tejit.nn.delayed_state import Delayed
from tejit.nn.gradients import Late, PutOff
from tejit.nn.naming import Named, checked_name
from tejit.nn.products import Plan, State
from tejit.recipe import LinearQuantizers, Recipe, current_group, current_recipe, entered_in_this_backward
from tejit.tensor.quantizer import Inner

Self = TypeVar("Self", bound="QuantizedModule")

_numbers = itertools.count()
#: Modules by key, a string that a graph can hold.
_modules: weakref.WeakValueDictionary[str, QuantizedModule] = weakref.WeakValueDictionary()

#: Attributes that no copy of a module takes over.
_OWN = ("_forward_context", "_ready", "_key", "_put_off", "_known_readings", "_known_workspaces")

#: What the names of a workspace's buffers begin with.
_WORKSPACE = "_workspace"


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


class QuantizedModule(Delayed, KeepsAttached, Named, nn.Module):
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
    _known_workspaces: dict[str, Any]
    _key: str

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
        self._known_readings, self._known_workspaces = {}, {}
        self._key = f"module {next(_numbers)}"
        _modules[self._key] = self

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
        if not (needs_dgrad or needs_wgrad):
            state = state._replace(anchor=None)  # it would make the output require a gradient
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

    # -- the workspace ------------------------------------------------------------------------------------------
    def _make_room(
        self, is_first_microbatch: bool | None, products: Mapping[str, tuple[LinearQuantizers | None, Any]]
    ) -> None:
        """In a graph: the workspaces of a first microbatch, before anything reads a buffer of the module. Dynamo looks
        once at which there are.

        ``products``: by the name of each weight's parameter, the quantizers and what :meth:`_product` will be given.
        """
        if not (is_first_microbatch and torch.compiler.is_compiling()):
            return
        for parameter, (quantizers, weight) in products.items():
            if quantizers is not None and not weights.is_quantized(weight):
                both = torch.is_grad_enabled() and quantizers.backward_override is None
                _allocate(self._key, parameter, _workspace_specs(quantizers, weight, both))

    def _cached(
        self, plan: Plan, state: State, weight: Tensor, needs_dgrad: bool, is_first: bool, parameter: str
    ) -> Inner:
        """The weight's buffers in the workspace, quantized anew in the first microbatch.

        Raises ``RuntimeError`` where no first microbatch filled it in this form.
        """
        quantizers = plan.quantizers
        both = needs_dgrad and quantizers.backward_override is None
        compiling = torch.compiler.is_compiling()
        if not (is_first or compiling):
            known = self._known_workspaces.get(parameter)
            if known is not None and known[1] == both:
                found = self._workspace_of(quantizers, parameter)
                if found is not None:
                    return found
        quantizer = quantizers.weight.needing(True, both)
        form = f"{quantizers.weight_key} {both}"
        prefix = f"{_WORKSPACE}_{parameter}"
        if not is_first and getattr(self, f"{prefix}_form", None) not in (form, f"{quantizers.weight_key} True"):
            raise RuntimeError(
                f"is_first_microbatch=False uses the {parameter} that a call with is_first_microbatch=True quantized,"
                " and there was none under this recipe, or it needed no gradient of its input. Pass True in the first"
                " microbatch after each step, or None to quantize in each call"
            )
        multiple = quantizers.alignment
        specs = _workspace_specs(quantizers, weight, both)
        if is_first:
            _allocate(self._key, parameter, specs)
        metadata = quantizer.storage_metadata(weight.dtype)
        names = metadata["cls"]._keywords_of(metadata["nontensor_kwargs"])
        made_of = [spec[0] for spec in specs]
        buffers = tuple([f"{prefix}{name}" if name in made_of else None for name in names])
        inner = tuple([None if name is None else getattr(self, name) for name in buffers])
        if is_first:
            with torch.no_grad():
                made = products.quantized(quantizer, weight.detach(), multiple, plan, state, products.WEIGHT)
                for buffer, new in zip(inner, made, strict=True):
                    if buffer is not None and new is not None:
                        buffer.copy_(new)
            setattr(self, f"{prefix}_form", form)
        if not compiling:
            form_name = f"{prefix}_form"
            self._known_workspaces[parameter] = (quantizers, both, (form_name, getattr(self, form_name), buffers))
        return inner

    def _workspace_of(self, quantizers: LinearQuantizers, parameter: str) -> Inner | None:
        """The buffers of the workspace as eager calls of these quantizers last found them; None where they did not, or
        others wrote there since."""
        known = self._known_workspaces.get(parameter)
        if known is None or known[0] is not quantizers:
            return None
        form_name, form, names = known[2]
        if self.__dict__.get(form_name) != form:
            return None
        buffers = self._buffers
        return tuple([None if name is None else buffers[name] for name in names])

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The bytes of the workspace and their scales move with the module, and have no other dtype.
        self.__dict__.pop("_ready", None)  # it would keep what the module is moved away from
        workspace = {name: self._buffers.pop(name) for name in list(self._buffers) if name.startswith(_WORKSPACE)}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(workspace)
        for name, buffer in workspace.items():
            assert buffer is not None
            moved = fn(buffer)
            self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
            if buffer.is_meta or moved.is_meta:  # its bytes are gone
                for attribute in [key for key in self.__dict__ if key.startswith(_WORKSPACE)]:
                    del self.__dict__[attribute]
        return self


def _workspace_specs(quantizers: LinearQuantizers, weight: Tensor, both: bool) -> Any:
    """``(attribute, shape, dtype)`` of each buffer of a quantized weight, columnwise ones too where ``both``."""
    shape = tuple([size + -size % quantizers.alignment for size in weight.shape])
    specs = quantizers.weight.needing(True, both).inner_tensor_specs(shape, weight.device)
    return tuple([(name, *spec) for name, spec in specs.items()])


@compat.constant_result
def _allocate(key: str, parameter: str, specs: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]) -> None:
    """Give a module the workspace's buffers of a parameter, ``(attribute, shape, dtype)`` each, where it lacks them.

    A graph finds them there: it is called while tracing.
    """
    module = _modules[key]
    device = getattr(module, parameter).device
    for attribute, shape, dtype in specs:
        name = f"{_WORKSPACE}_{parameter}{attribute}"
        buffer = getattr(module, name, None)
        if buffer is None or (tuple(buffer.shape), buffer.dtype, buffer.device) != (shape, dtype, device):
            if hasattr(module, name):
                delattr(module, name)
            with torch.inference_mode(False):  # a later first microbatch may come outside of it
                zeros = torch.zeros(shape, dtype=dtype, device=device)
            module.register_buffer(name, zeros, persistent=False)


@compat.constant_result
def _settle(key: str, device: torch.device) -> None:
    """``Delayed._settle`` of a module, while tracing: before the graph looks at the buffers."""
    Delayed._settle(_modules[key], device)


@compat.constant_result
def _is_waited_for(key: str, parameter: str) -> bool:
    """Whether somebody set ``grad_added_to_main_grad`` on a parameter; a graph would guard its value."""
    return hasattr(getattr(_modules[key], parameter), "grad_added_to_main_grad")


def eligible(tensor: Any, dtype: torch.dtype) -> Any:
    """What torch.autocast would make of an operand: it leaves float64 and integers alone."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
