"""The state of delayed scaling in modules: its buffers, what a forward takes from them, and how they are kept.

A module has ``2 * products`` forward slots (input and weight of each product) and ``products`` gradient slots, in
buffers of their own: a forward in a graph changes the first only and a backward the second only, so that neither sees
values from the other's time. When they roll is told in ``tejit.recipe.state``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tejit import compat
from tejit.kernels import fp8
from tejit.nn import provenance, weights
from tejit.nn.delayed_buffers import ALL, GRAD_HISTORY, GRAD_SCALE, HISTORY, PREVIOUS, ROWS, SCALE, STORED, fresh_state
from tejit.nn.products import NO_STATE, State
from tejit.recipe import (
    DelayedBuffers,
    DelayedRule,
    DelayedState,
    Recipe,
    current_group,
    current_pass,
    current_recipe,
    delayed_rules,
    observed_recipe,
)
from tejit.recipe.model_init import current_model_init
from tejit.tensor.attached import carry

Self = TypeVar("Self", bound="Delayed")


class Delayed(nn.Module):
    """Mixin of modules that quantize: the state of delayed scaling.

    Buffers, all float32 whatever the module is converted to: ``_delayed_scale`` ``(2 * products,)`` and
    ``_delayed_amax_history`` ``(1024, 2 * products)``, and ``_delayed_grad_scale``, ``_delayed_grad_amax_history``
    with ``products`` columns. A recipe with a shorter history uses the first rows. They are keys of the state dict
    where the module was built under ``DelayedScaling`` (or :meth:`keep_delayed_state` was called), else from the first
    step under it. Loading takes them present or absent, which means fresh state; see :func:`tejit.plain_state_dict`.

    The state is fresh wherever nobody loaded it, whoever gave the buffers their memory (:meth:`_adopt`).

    Attributes:
        _products: how many linear products the module computes.
        _module_type: what a ``CustomRecipe`` is told of them.
    """

    _products = 1
    _module_type = "linear"
    _delayed: DelayedState

    def _init_delayed(self, device: torch.device) -> None:
        """Called at the end of the constructor, inside the contexts that it was called in."""
        asked = current_model_init()
        rules = delayed_rules(current_recipe()) + delayed_rules(None if asked is None else asked.recipe)
        # A module on meta has a state with values: nobody else could give the buffers theirs. It moves with the module.
        place = torch.device("cpu") if device.type == "meta" else device
        fresh = fresh_state(self._products, max([ROWS, *[rule.length for rule in rules]]), place)
        for name, tensor in fresh.items():
            self.register_buffer(name, tensor, persistent=False)
        self._delayed = self._new_state(place, stored=bool(rules))
        self._say_what_is_stored()

    def _new_state(self, device: torch.device, stored: bool) -> DelayedState:
        me = weakref.ref(self)
        state = DelayedState(lambda: _buffers(me()), device, stored)
        self._know(state)
        return state

    def _know(self, state: DelayedState) -> None:
        """The tensors in the buffers are the module's: made, loaded or converted by it."""
        state.known = {name: self._buffers.get(name) for name in ALL}
        tensors = (*state.known.values(), *self._parameters.values())
        state.unborn = any(tensor is not None and tensor.is_meta for tensor in tensors)

    def _say_what_is_stored(self) -> None:
        """Tell torch, and who asks torch, which buffers are keys of the state dict."""
        stored, transient = self._delayed.stored, self._non_persistent_buffers_set
        for name in STORED:
            (transient.discard if stored else transient.add)(name)

    def keep_delayed_state(self, recipe: Recipe) -> None:
        """Prepare for a recipe as if built under it: room for its history, state-dict keys from the start. Does
        nothing for a recipe without delayed scaling."""
        rules = delayed_rules(recipe)
        if rules:
            self._adopt()
            self._make_rows(max([rule.length for rule in rules]))
            self._delayed.stored = True
            self._say_what_is_stored()

    def _make_rows(self, rows: int) -> None:
        """Lengthen the histories to at least ``rows``; what they hold stays."""
        for name in (HISTORY, GRAD_HISTORY):
            old = self._buffers[name]
            assert old is not None
            if old.shape[0] < rows:
                longer = old.new_zeros(rows, old.shape[1])
                longer[: old.shape[0]].copy_(old)
                self._buffers[name] = longer
        self._know(self._delayed)

    # -- whose the values are -----------------------------------------------------------------------------------
    def _adopt(self) -> None:
        """Look at buffers that others replaced since the module last saw them: a loaded state stays, a copy of the
        module's own too, and what is memory as it was found becomes a fresh state."""
        state = self.__dict__.get("_delayed")
        if state is None:  # under construction
            return
        known, buffers = state.known, self._buffers
        for name in ALL:
            if buffers.get(name) is not known[name]:
                self._take_over()
                return

    def _take_over(self) -> None:
        state, buffers = self._delayed, self._buffers
        found = [tensor for name in ALL if (tensor := buffers.get(name)) is not None]
        # On meta, or of a dispatch mode or a transform: there is nothing to look at.
        if not provenance.can_be_read() or not all(tensor.is_meta or provenance.is_plain(tensor) for tensor in found):
            return
        with torch.inference_mode(False), torch.no_grad():
            replaced = False
            for names, slots in (((SCALE, HISTORY), 2 * self._products), ((GRAD_SCALE, GRAD_HISTORY), self._products)):
                if any(buffers.get(name) is not state.known[name] for name in names):
                    replaced = self._take_over_pair(names, slots) or replaced
            previous, known = buffers.get(PREVIOUS), state.known[PREVIOUS]
            if previous is not known and not (
                previous is not None and not replaced and provenance.is_copy(previous, known)
            ):
                scale = buffers[SCALE]
                assert scale is not None
                buffers[PREVIOUS] = scale.clone()
        self._know(state)
        if state.anchor.device != self._delayed_scale.device:
            state.move(self._delayed_scale.device)

    def _take_over_pair(self, names: tuple[str, str], slots: int) -> bool:
        """Scales and histories of which some were replaced; returns whether they are fresh now."""
        state, buffers = self._delayed, self._buffers
        given, known = [buffers.get(name) for name in names], [state.known[name] for name in names]
        pairs = list(zip(given, known, strict=True))
        if all(tensor is not None and tensor.is_meta for tensor in given):
            return False
        if all(
            provenance.is_loaded(t) or t is old or (t is not None and provenance.is_copy(t, old)) for t, old in pairs
        ):
            keeps = all(provenance.is_plain(tensor) for tensor in given)
        else:
            scale, history = given
            # Into a module without memory, tensors that no state dict has, or transformers did not mark, were rarely
            # loaded.
            strict = state.unborn and (not state.stored or provenance.LOADED in self.__dict__)
            keeps = provenance.is_plain(scale) and provenance.is_plain(history)
            keeps = keeps and provenance.is_state(scale, history, slots, strict)
        device = next((t.device for t in given if t is not None and not t.is_meta), torch.device("cpu"))
        rows = max([ROWS, *[old.shape[0] for old in (known[1],) if old is not None]])
        fresh = fresh_state(self._products, rows, device)
        for name, tensor in zip(names, given, strict=True):
            new = fresh[name]
            if keeps:
                assert tensor is not None
                right = tensor.dtype == torch.float32 and not tensor.is_inference()
                new = tensor if right else tensor.to(torch.float32, copy=True)
            buffers[name] = new
        return not keeps

    def train(self: Self, mode: bool = True) -> Self:
        """As ``nn.Module.train``."""
        if not torch.compiler.is_compiling():
            self._adopt()  # loaders end with it, and somebody may look at the buffers next
            self._say_what_is_stored()
        return super().train(mode)

    # -- use ----------------------------------------------------------------------------------------------------
    def _settle(self, device: torch.device) -> None:
        """Have the state where the parameters are. They may have come by themselves, assigned to a module that was
        built elsewhere: from the meta device the state then comes fresh."""
        self._adopt()
        state = self._delayed
        if self._delayed_scale.device == device:
            if state.unborn and device.type != "meta":
                self._know(state)
            if state.anchor.device != device:  # the buffers were moved through `.data`
                state.move(device)
            return
        with torch.inference_mode(False):
            fresh = fresh_state(self._products, self._delayed_amax_history.shape[0], device)
            for name, value in fresh.items():
                old = self._buffers[name]
                assert old is not None
                new = value if old.is_meta else old.to(device)
                carry(old, new)
                self._buffers[name] = new
        self._know(state)
        state.move(device)

    def _delayed_state(self, rule: DelayedRule | None, device: torch.device) -> tuple[State, DelayedState | None]:
        """What a forward on ``device`` needs: the tensors for its autograd function, and whom an eager backward tells.

        Empty where ``rule`` is None. Notes that the module ran, where gradients are enabled; where they are not, amax
        is collected in a tensor that is thrown away.

        Raises ``ValueError`` for a history longer than the module's.
        """
        if rule is None:
            return NO_STATE, None
        self._settle(device)
        self._require_rows(rule)
        state = self._delayed
        compiling = torch.compiler.is_compiling()
        scale, history, collects = self._delayed_scale, self._delayed_amax_history, torch.is_grad_enabled()
        if not compiling and compat.in_backward():
            # A recomputation: it needs the scale of the forward that it repeats, and its amax was collected then.
            scale, history = self._delayed_previous_scale if state.rolled else scale, state.aside(scale)
            state.roll_after_backward()
        else:
            collects = collects or (not compiling and compat.in_recomputed_region())
            if collects:
                self._note_forward(rule)
            else:
                history = torch.zeros_like(scale).unsqueeze(0)
        return State(
            scale=scale,
            history=history,
            grad_scale=self._delayed_grad_scale,
            grad_history=self._delayed_grad_amax_history,
            anchor=state.anchor if compiling and torch.is_grad_enabled() else None,
        ), None if compiling else state

    def _require_rows(self, rule: DelayedRule) -> None:
        rows = self._delayed_amax_history.shape[0]
        if rule.length > rows:
            raise ValueError(
                f"amax_history_len is {rule.length}, and this {type(self).__name__} keeps a history of {rows}: build it"
                " inside of autocast with that recipe, or call module.keep_delayed_state(recipe) before the first step"
            )

    def _note_forward(self, rule: DelayedRule) -> None:
        """A forward, no recomputation, collects amax."""
        state, running = self._delayed, current_pass()
        if not torch.compiler.is_compiling() and not state.stored:
            state.stored = True
            self._say_what_is_stored()
        state.rule, state.group, state.stored = rule, current_group(), True
        state.rolled = state.queued = False
        if running is not None:
            running.note(state)

    def _calibrate(self, *operands: Tensor, products: tuple[str | None, ...] = (None,)) -> None:
        """In ``autocast(enabled=False, calibrating=True)``: take the operands' amax into the forward slots.

        ``operands``: input and weight of each product, in the order of the slots; ``products``: what the recipe calls
        these beside the module's name. Does nothing elsewhere, in a recomputation, or for products without delayed
        scaling.
        """
        recipe = observed_recipe()
        if recipe is None or (not torch.compiler.is_compiling() and compat.in_backward()):
            return
        name = getattr(self, "name", None)
        for number, product in enumerate(products):
            quantizers = recipe.for_linear(name, product, self._module_type)
            if quantizers is None or quantizers.delayed is None:
                continue
            self._settle(operands[0].device)
            self._require_rows(quantizers.delayed)
            self._note_forward(quantizers.delayed)
            with torch.no_grad():
                pair = [weights.values(operand).detach() for operand in operands[2 * number : 2 * number + 2]]
                row = self._delayed_amax_history[0, 2 * number : 2 * number + 2]
                row.copy_(torch.maximum(row, torch.cat([fp8.amax(operand) for operand in pair])))

    # -- moving, copying ----------------------------------------------------------------------------------------
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._adopt()
        before = {name: self._buffers[name] for name in ALL if name in self._buffers}
        # Parameters that came one by one left these behind on meta, from where nothing can be moved.
        waiting = {id(old) for old in before.values() if old is not None and old.is_meta}

        def convert(tensor: Tensor) -> Tensor:
            return tensor if id(tensor) in waiting else fn(tensor)

        try:
            return super()._apply(convert if waiting else fn, recurse)
        finally:  # what was converted before a failure too
            place = self._place(fn) if waiting else None
            for name, old in before.items():
                now = self._buffers[name]
                assert old is not None
                assert now is not None
                if now is not old:
                    self._buffers[name] = self._converted_state(name, old, now)
                elif place is not None and id(old) in waiting and place.type != "meta":
                    self._buffers[name] = _carried(old, fresh_state(self._products, old.shape[0], place)[name])
            if before:
                self._know(self._delayed)
                if self._delayed.anchor.device != self._delayed_scale.device:
                    self._delayed.move(self._delayed_scale.device)

    def _place(self, fn: Callable[[Tensor], Tensor]) -> torch.device:
        """Where the module is after ``fn``, by its parameters if it has any."""
        devices = [parameter.device for parameter in self._parameters.values() if parameter is not None]
        return next((device for device in devices if device.type != "meta"), None) or provenance.device_after(fn)

    def _converted_state(self, name: str, old: Tensor, now: Tensor) -> Tensor:
        """A buffer after a conversion, which counts for where it is: dtype and values stay, also where ``to_empty``
        leaves memory as it is found."""
        if now.is_meta:
            return now if now.dtype == old.dtype else _carried(now, old.to(now.device))
        if now.dtype == old.dtype:
            return now.copy_(old)
        return _carried(now, old.to(now.device, copy=True))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._delayed = self._new_state(self._delayed_scale.device, stored=bool(self.__dict__["_delayed"]))
        self._say_what_is_stored()

    def __getstate__(self) -> dict[str, Any]:
        self._adopt()
        # Of what is known beside the tensors, a copy needs to know only whether they are stored.
        return {**self.__dict__, "_delayed": self._delayed.stored}

    # -- state dicts --------------------------------------------------------------------------------------------
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not torch.compiler.is_compiling():
            self._adopt()
        self._say_what_is_stored()  # a graph may have changed it
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._adopt()
        ours = {name: state_dict[prefix + name] for name in STORED if prefix + name in state_dict}
        own = {prefix + name for name in STORED}
        rest = {key: value for key, value in state_dict.items() if key not in own}
        missing: list[str] = []  # not ours, which may be absent
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        missing_keys.extend([key for key in missing if key not in own])
        if ours:
            missing_keys.extend([prefix + name for name in STORED if name not in ours])
            for name, value in ours.items():
                self._load_tensor(name, value, prefix, error_msgs)
            if len(ours) == len(STORED):
                self._delayed.stored = True
            else:
                self._check_parts()
        elif any(prefix + name in rest for name in self._parameters):
            self._begin_anew(STORED)
        if self._delayed_previous_scale.device != self._delayed_scale.device:  # was on meta, and got memory
            self._set(PREVIOUS, self._delayed_scale)
            self._delayed.move(self._delayed_scale.device)
        self._say_what_is_stored()
        self._know(self._delayed)

    def _begin_anew(self, names: tuple[str, ...]) -> None:
        """Fresh values for these buffers, where they are, or with the parameters if they are on meta."""
        device = self._delayed_scale.device
        if device.type == "meta":
            device = next((p.device for p in self._parameters.values() if p is not None), device)
        fresh = fresh_state(self._products, self._delayed_amax_history.shape[0], device)
        for name in (*names, PREVIOUS):
            self._set(name, fresh[name])

    def _check_parts(self) -> None:
        """After a state dict with some keys of the state only, by which some loaders initialise a model piece by piece:
        scales and histories that can be none are memory as it was found."""
        if not provenance.can_be_read():
            return
        for names, slots in ((STORED[:2], 2 * self._products), (STORED[2:], self._products)):
            scale, history = (self._buffers[name] for name in names)
            if provenance.is_plain(scale) and provenance.is_plain(history):
                assert scale is not None
                assert history is not None
                if not provenance.is_state(scale, history, slots, strict=False):
                    self._begin_anew(names)

    def _load_tensor(self, name: str, value: Any, prefix: str, error_msgs: list[str]) -> None:
        """Histories may be longer or shorter than ours, all else must fit."""
        mine = self._buffers[name]
        assert mine is not None
        is_history = name in (HISTORY, GRAD_HISTORY)
        if not isinstance(value, Tensor) or value.dtype != mine.dtype or value.dim() != mine.dim():
            what = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            error_msgs.append(f"{prefix}{name} is {what} in the state dict; {mine.dtype} {tuple(mine.shape)} is needed")
        elif value.shape[-1] != mine.shape[-1] or (is_history and value.shape[0] == 0):
            error_msgs.append(
                f"{prefix}{name} has shape {tuple(value.shape)} in the state dict and {tuple(mine.shape)} here"
            )
        else:
            if value.is_meta and not mine.is_meta:  # saved by a module without memory: no values
                value = fresh_state(self._products, value.shape[0], mine.device)[name]
            if is_history:
                self._make_rows(value.shape[0])
                value = torch.cat([value, value.new_zeros(max(0, mine.shape[0] - value.shape[0]), value.shape[1])])
            self._set(name, value)

    def _set(self, name: str, value: Tensor) -> None:
        mine = self._buffers[name]
        assert mine is not None
        if mine.is_meta:  # load_state_dict(assign=True) into a module without memory
            self._buffers[name] = value.detach().clone()
        else:
            with torch.no_grad():
                mine.copy_(value)


def _carried(old: Tensor, new: Tensor) -> Tensor:
    """``new``, with what is attached to ``old``."""
    carry(old, new)
    return new


def _buffers(module: Delayed | None) -> DelayedBuffers | None:
    if module is None:
        return None
    return DelayedBuffers(
        scale=module._delayed_scale,
        previous=module._delayed_previous_scale,
        history=module._delayed_amax_history,
        grad_scale=module._delayed_grad_scale,
        grad_history=module._delayed_grad_amax_history,
    )
