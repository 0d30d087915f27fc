"""``explain``: what each layer's three GEMMs multiply, and why not something faster."""

from __future__ import annotations

import fnmatch
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tejit import compat
from tejit.format_info import FP8_BLOCK, FP8_ELEMENTS, FP8_GEMM_ALIGNMENT
from tejit.formats.float8.slot import Float8SlotQuantizer
from tejit.inspect import table
from tejit.inspect.untouched import untouched
from tejit.kernels.gemm import Operand, emulation_reason
from tejit.kernels.gemm.operand import PLAIN
from tejit.nn import twins
from tejit.nn.module import QuantizedModule
from tejit.recipe import LinearQuantizers, Recipe, autocast, current_recipe, default_recipe
from tejit.recipe.gain import too_small_to_gain
from tejit.tensor import Quantizer
from tejit.tensor.quantizer import Inner

#: Values of ``Product.runs``.
NATIVE, EMULATED, HIGH_PRECISION, NOT_RUN = "native", "emulated", "high precision", "not run"
GEMMS = ("fprop", "dgrad", "wgrad")

#: Modules whose matrices are no operands of a product.
_NO_PRODUCT = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU)


class Product(NamedTuple):
    """One GEMM of one layer, or all three of a layer that is not quantized.

    Attributes:
        layer: qualified name.
        module: class, and the sizes where it is a linear layer.
        gemm: ``fprop``, ``dgrad``, ``wgrad`` or all of them.
        operands: the formats multiplied.
        runs: ``native``, ``emulated``, ``high precision`` or ``not run``.
        reason: why it is not native, or not worth it.
    """

    layer: str
    module: str
    gemm: str
    operands: str
    runs: str
    reason: str


@dataclass(frozen=True, repr=False)
class Explanation:
    """What :func:`explain` found; shown as a table, in text and in a notebook.

    Attributes:
        recipe: the recipe it was asked for.
        device: where the module is.
        products: one a GEMM, in the order of the modules.
    """

    recipe: Recipe
    device: torch.device
    products: tuple[Product, ...]

    def _summary(self) -> str:
        counts = [(what, sum(p.runs == what for p in self.products)) for what in (NATIVE, EMULATED)]
        layers = {p.layer for p in self.products}
        low = {p.layer for p in self.products if p.runs in (NATIVE, EMULATED)}
        plain = {p.layer for p in self.products if p.runs == HIGH_PRECISION} - low
        told = ", ".join(f"{count} GEMMs {what}" for what, count in counts)
        return (
            f"{type(self.recipe).__name__} on {self.device}: {len(layers)} layers; {told}; layers"
            f" in high precision: {len(plain)}"
        )

    def __repr__(self) -> str:
        return f"{self._summary()}\n\n{table.as_text(Product._fields, self.products)}"

    def _repr_html_(self) -> str:
        return f"<p>{self._summary()}</p>{table.as_html(Product._fields, self.products)}"


class _Call(NamedTuple):
    """What a layer met when it ran."""

    recipe: Recipe | None
    dtype: torch.dtype
    grad: bool
    input_needs_grad: bool


_ALL = ", ".join(GEMMS)


def explain(module: nn.Module, *inputs: Any, recipe: Recipe | None = None, **named_inputs: Any) -> Explanation:
    """Run ``module`` once under ``recipe`` and tell, for each layer and GEMM, the formats and whether they are native.

    The forward pass runs on ``inputs`` as they are, hooks included, without backward; afterwards the attributes and
    buffers of the modules and the random generators are as before. Compiled modules run eagerly.

    Args:
        module: the model; converted or not.
        inputs, named_inputs: what it is called with. Gradients are told of as these inputs need them: with inputs that
            need none, the first layer has no dgrad.
        recipe: None is that of the ``tejit.autocast`` around the call, else ``tejit.recipe.default_recipe()``.

    Raises:
        TypeError: ``module`` is no module or ``recipe`` no recipe.

    What the forward pass raises is raised.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {module!r}; it must be a torch.nn.Module")
    recipe = recipe or current_recipe() or default_recipe()
    layers = [(name or "(root)", layer) for name, layer in module.named_modules() if _has_product(layer)]
    calls: dict[nn.Module, dict[_Call, None]] = {layer: {} for _, layer in layers}

    def record(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if layer in calls:
            calls[layer][_met(layer, arguments)] = None

    with untouched(module), ExitStack() as stack:
        # One hook for all: torch's own modules take another path where a module below them has one of its own.
        stack.callback(register_module_forward_pre_hook(record).remove)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(autocast(recipe=recipe))
        getattr(module, "_orig_mod", module)(*inputs, **named_inputs)
        products = [p for name, layer in layers for p in _products(name, layer, list(calls[layer]), recipe)]
    return Explanation(recipe, _device(module), tuple(products))


def _has_product(layer: nn.Module) -> bool:
    """Whether a module itself, not one below it, multiplies by a matrix of its own."""
    if isinstance(layer, _NO_PRODUCT):
        return False
    if twins.linear_sizes(layer) is not None:
        return True
    own = (*layer._parameters.values(), *(getattr(layer, name, None) for name in ("weight",)))
    return any(isinstance(p, Tensor) and p.is_floating_point() and p.dim() >= 2 for p in own)


def _device(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _met(layer: nn.Module, arguments: tuple[Any, ...]) -> _Call:
    x = next((a for a in arguments if isinstance(a, Tensor) and a.is_floating_point()), None)
    device = _device(layer)
    own = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.get_default_dtype())
    dtype = own if x is None else x.dtype
    if compat.autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return _Call(current_recipe(), dtype, torch.is_grad_enabled(), x is None or x.requires_grad)


def _products(name: str, layer: nn.Module, calls: list[_Call], recipe: Recipe) -> Iterator[Product]:
    root, module = name, type(layer).__name__
    sizes = twins.linear_sizes(layer)
    if sizes is not None:
        module += " {} -> {}".format(*sizes)

    def plain(reason: str, runs: str = HIGH_PRECISION, operands: str = "") -> Product:
        return Product(name, module, _ALL, operands, runs, reason)

    if not calls:
        yield plain("its forward was not called; a caller may read its weight", NOT_RUN)
        return
    for call in calls:
        if not isinstance(layer, QuantizedModule):
            yield plain(_foreign(layer, name, recipe), operands=_short(call.dtype))
            continue
        before = [p for own, p in layer._parameters.items() if own.startswith("layer_norm")]
        for product, several in groupby(twins.linear_products(layer), attrgetter("product")):
            each, *others = several
            quantizers, reason = _chosen(layer, product, call)
            if sizes is None:
                module = f"{type(layer).__name__} {len(others) + 1} x " if others else f"{type(layer).__name__} "
                module += "{} -> {}".format(*each.sizes)
            if product is not None:
                name = f"{root}.{product}"
            if quantizers is None:
                yield Product(name, module, _ALL, _short(call.dtype), HIGH_PRECISION, reason)
                continue
            notes = [*filter(None, [reason, too_small_to_gain(quantizers, *each.sizes)])]
            # Behind a norm or another product the gradient of the input is needed for their parameters as well.
            needs_grad = call.input_needs_grad or any(p is not None and p.requires_grad for p in before)
            matrices = [getattr(layer, one.parameter) for one in (each, *others)]
            before.extend(matrices)
            # Of several groups, one that trains stands for all.
            weight = next((matrix for matrix in matrices if matrix.requires_grad), matrices[0])
            for gemm in GEMMS:
                found = _product(gemm, weight, call, quantizers, needs_grad, notes)
                yield Product(name, module, gemm, *found)


def _foreign(layer: nn.Module, name: str, recipe: Recipe) -> str:
    """Why a layer that is not tejit's stays in high precision."""
    sizes = twins.linear_sizes(layer)
    if sizes is None:
        return "not a module of tejit"
    obstacle = twins.obstacle(layer)
    if obstacle is not None:
        return f"not a module of tejit: {obstacle}"
    small = too_small_to_gain(recipe.for_linear(name), *sizes)
    return small or f"tejit.convert makes it a tejit.{twins.twin_name(layer)}"


def _chosen(layer: QuantizedModule, product: str | None, call: _Call) -> tuple[LinearQuantizers | None, str]:
    """The quantizers of a product, None for high precision; and why, or what is to be said beside."""
    if call.recipe is None:
        return None, "tejit.autocast is switched off around it"
    quantizers = call.recipe.for_linear(layer.name, product, layer._module_type)
    names = [layer.name or ""] + ([f"{layer.name}.{product}"] if product else [])
    patterns = (p for p, _ in call.recipe.overrides if any(fnmatch.fnmatchcase(name, p) for name in names))
    pattern = next(patterns, None)
    if quantizers is None:
        return None, f"override {pattern!r}" if pattern else "the recipe keeps it in high precision"
    if call.recipe.overrides and layer.name is None:
        return quantizers, "it has no name, so that no override can match it (tejit.name_modules)"
    return quantizers, f"override {pattern!r}" if pattern else ""


def _product(
    gemm: str,
    weight: Any,
    call: _Call,
    quantizers: LinearQuantizers,
    input_needs_grad: bool,
    notes: list[str],
) -> tuple[str, str, str]:
    """Operands, how the GEMM runs, and why."""
    if gemm != GEMMS[0] and quantizers.backward_override is not None:
        formats, runs = _short(call.dtype), HIGH_PRECISION
        why: str | None = f"backward_override={quantizers.backward_override!r}"
    else:
        a, b = _operands(gemm, quantizers, weight.device, call.dtype)
        formats, why = f"{_format(*a)} x {_format(*b)}", emulation_reason(a[1], b[1])
        if all(operand.kind == PLAIN for _, operand in (a, b)):
            runs = HIGH_PRECISION  # there is nothing to dequantize
        else:
            runs = NATIVE if why is None else EMULATED
    if call.grad:
        if gemm == "dgrad" and not input_needs_grad:
            return formats, NOT_RUN, "the input needs no gradient"
        if gemm == "wgrad" and not weight.requires_grad:
            return formats, NOT_RUN, "the weight needs no gradient"
    return formats, runs, "; ".join([*filter(None, [why]), *notes])


def _operands(
    gemm: str, quantizers: LinearQuantizers, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Quantizer, Operand], tuple[Quantizer, Operand]]:
    """The two operands of a GEMM, made small by the very quantizers of the layer."""
    size = math.lcm(quantizers.alignment, FP8_GEMM_ALIGNMENT)
    matrix = torch.zeros(size, size, device=device, dtype=dtype)

    def made(quantizer: Quantizer) -> Inner:
        if isinstance(quantizer, Float8SlotQuantizer):
            scale = torch.ones(1, device=device)
            return quantizer.quantize_slot(matrix, scale, torch.zeros_like(scale))
        return quantizer.quantize_inner(matrix)

    def rowwise(quantizer: Quantizer) -> tuple[Quantizer, Operand]:
        return quantizer, quantizer.rowwise_operand(made(quantizer))

    def columnwise(quantizer: Quantizer) -> tuple[Quantizer, Operand]:
        return quantizer, quantizer.columnwise_operand(made(quantizer))

    x, weight, grad_output = quantizers.input, quantizers.weight, quantizers.grad_output
    if gemm == "fprop":
        return rowwise(x.rowwise), rowwise(weight.rowwise)
    if gemm == "dgrad":
        return rowwise(grad_output.rowwise), columnwise(weight.columnwise)
    return columnwise(grad_output.columnwise), columnwise(x.columnwise)


def _format(quantizer: Quantizer, operand: Operand) -> str:
    """An operand's format in a few words, from its bytes and how they are rounded."""
    if operand.kind == PLAIN:
        return _short(operand.codes.dtype)
    words = [operand.kind.upper()]
    if operand.kind != "nvfp4":
        words.append(next(element.name for element in FP8_ELEMENTS if element.code == operand.fp8))
    if operand.block_dim:
        words.append(f"{FP8_BLOCK.block if operand.block_dim == 2 else 1}x{FP8_BLOCK.block}")
    if isinstance(quantizer, Float8SlotQuantizer):
        words.append("delayed")
    for field, word in (("with_2d_quantization", "2D"), ("stochastic_rounding", "stochastic")):
        if getattr(quantizer, field, False):
            words.append(word)
    if operand.sign_mask is not None:
        words.append("RHT")
    return " ".join(words)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
