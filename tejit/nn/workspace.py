"""The workspace of a module: its weights as a first microbatch quantized them, for the microbatches that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tejit import compat
from tejit.nn import products, provenance, weights
from tejit.nn.keyed import Keyed, module_of
from tejit.nn.products import Plan, State
from tejit.recipe import LinearQuantizers
from tejit.tensor.quantizer import Inner

Self = TypeVar("Self", bound="KeepsWorkspace")

#: What the names of a workspace's buffers begin with.
PREFIX = "_workspace"

#: What eager calls note of a workspace: the attribute that names the form of what is in it, that form, and the names of
#: the buffers, None for an absent one.
Buffers = tuple[str, str, tuple[str | None, ...]]


class KeepsWorkspace(Keyed, nn.Module):
    """Mixin of modules that quantize their weights once for several microbatches.

    The buffers are no state: no key of the state dict is theirs, and the first microbatch after a step fills them.
    """

    _known_workspaces: dict[str, Any]
    #: The buffers as the module made or moved them; a tensor that others put there may be memory as it was found.
    _own_workspace: dict[str, Tensor]

    def _make_room(
        self, is_first_microbatch: bool | None, products: Mapping[str, tuple[LinearQuantizers | None, Any]]
    ) -> None:
        """In a graph: the workspaces of a first microbatch, before anything reads a buffer of the module. Dynamo looks
        once at which there are.

        ``products``: by the name of each weight's parameter, the quantizers and what ``_product`` will be given.
        """
        if not (is_first_microbatch and torch.compiler.is_compiling()):
            return
        for parameter, (quantizers, weight) in products.items():
            if quantizers is not None and not weights.is_quantized(weight):
                both = torch.is_grad_enabled() and quantizers.backward_override is None
                _allocate(self._key, parameter, weight.device, _specs(quantizers, weight, both))

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
                if found is not None and not _is_of_another_world(found):
                    return found
        quantizer = quantizers.weight.needing(True, both)
        form = f"{quantizers.weight_key} {both}"
        prefix = f"{PREFIX}_{parameter}"
        if not is_first and not self._is_filled(prefix, (form, f"{quantizers.weight_key} True")):
            raise RuntimeError(
                f"is_first_microbatch=False uses the {parameter} that a call with is_first_microbatch=True quantized,"
                " and there was none under this recipe, or it needed no gradient of its input. Pass True in the first"
                " microbatch after each step, or None to quantize in each call"
            )
        multiple = quantizers.alignment
        specs = _specs(quantizers, weight, both)
        if is_first:
            _allocate(self._key, parameter, weight.device, specs)
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

    def _is_filled(self, prefix: str, forms: tuple[str, str]) -> bool:
        """Whether a first microbatch wrote one of these forms to the buffers whose names begin so."""
        if getattr(self, f"{prefix}_form", None) not in forms:
            return False
        if torch.compiler.is_compiling():
            return True
        found = {name: buffer for name, buffer in self._buffers.items() if name.startswith(prefix)}
        return self._own(found) and not _is_of_another_world(found.values())

    def _own(self, found: Mapping[str, Tensor | None]) -> bool:
        """Whether buffers are the module's, or copies of them."""
        for name, buffer in found.items():
            own = self._own_workspace.get(name)
            if own is None or buffer is own:
                continue
            if buffer is None or buffer.is_meta:
                return False
            if provenance.can_be_read() and provenance.is_plain(buffer) and provenance.is_plain(own):
                if not provenance.is_copy(buffer, own):
                    return False
                self._own_workspace[name] = buffer
        return True

    def _workspace_of(self, quantizers: LinearQuantizers, parameter: str) -> Inner | None:
        """The buffers of the workspace as eager calls of these quantizers last found them; None where they did not, or
        others wrote there since."""
        record = self._workspace_record(quantizers, parameter)
        if record is None or self.__dict__.get(record[0]) != record[1]:
            return None
        found = {name: self._buffers[name] for name in record[2] if name is not None}
        if not self._own(found):
            return None
        return tuple([None if name is None else found[name] for name in record[2]])

    def _workspace_record(self, quantizers: LinearQuantizers, parameter: str) -> Buffers | None:
        """What an eager call of these quantizers noted; None where there was none, or one of others since."""
        known = self._known_workspaces.get(parameter)
        return known[2] if known is not None and known[0] is quantizers else None

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The bytes of the workspace and their scales move with the module, and have no other dtype.
        workspace = {name: self._buffers.pop(name) for name in list(self._buffers) if name.startswith(PREFIX)}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers.update(workspace)
        for name, buffer in workspace.items():
            assert buffer is not None
            moved = fn(buffer)
            if moved.dtype != buffer.dtype:
                moved = buffer.to(moved.device)
            elif not (moved is buffer or moved.is_meta or buffer.is_meta):
                moved.copy_(buffer)  # to_empty leaves memory as it is found
            self._buffers[name] = self._own_workspace[name] = moved
            if buffer.is_meta or moved.is_meta:  # its bytes are gone
                for attribute in [key for key in self.__dict__ if key.startswith(PREFIX)]:
                    del self.__dict__[attribute]
        return self


def _is_of_another_world(buffers: Iterable[Tensor | None]) -> bool:
    """Whether a call inside of ``FakeTensorMode`` or a transform of functions left them, and this one is outside."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    left = any(buffer is not None and (isinstance(buffer, FakeTensor) or wrapped(buffer)) for buffer in buffers)
    return left and not compat.in_mode_or_transform()


def _specs(quantizers: LinearQuantizers, weight: Tensor, both: bool) -> Any:
    """``(attribute, shape, dtype)`` of each buffer of a quantized weight, columnwise ones too where ``both``."""
    shape = tuple([size + -size % quantizers.alignment for size in weight.shape])
    specs = quantizers.weight.needing(True, both).inner_tensor_specs(shape, weight.device)
    return tuple([(name, *spec) for name, spec in specs.items()])


@compat.constant_result
def _allocate(
    key: str, parameter: str, device: torch.device, specs: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
) -> None:
    """Give a module the workspace's buffers of a parameter, ``(attribute, shape, dtype)`` each, where it lacks them.

    A graph finds them there: it is called while tracing.
    """
    module = module_of(key)
    for attribute, shape, dtype in specs:
        name = f"{PREFIX}_{parameter}{attribute}"
        buffer = getattr(module, name, None)
        fits = buffer is not None and (tuple(buffer.shape), buffer.dtype, buffer.device) == (shape, dtype, device)
        if not fits or _is_of_another_world((buffer,)):
            if hasattr(module, name):
                delattr(module, name)
            with torch.inference_mode(False):  # a later first microbatch may come outside of it
                zeros = torch.zeros(shape, dtype=dtype, device=device)
            module.register_buffer(name, zeros, persistent=False)
        module._own_workspace[name] = getattr(module, name)  # about to be filled
