"""Row 75: what a module returns, and every gradient, is a tensor of its own: no memory of padding hangs on it, and
operations in place work on it as they do on what torch's own layers return."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tejit
from tejit.nn.twins import TransposedLinear
from tejit.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.common import DEVICES
from tests.nn.recipes import RECIPES

FEW = {name: RECIPES[name] for name in ("current", "delayed", "block", "MXFP8", "NVFP4")}
PLAIN = {
    "none": None,
    "override": Float8CurrentScaling(overrides=(("part*", None),)),
    "identity": CustomRecipe(lambda role: tejit.IdentityQuantizer()),
}
ALL = {**RECIPES, **PLAIN}
MORE = ["current", "delayed", "NVFP4", *PLAIN]
WIDE = [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in ALL]
each_device = pytest.mark.parametrize("device", DEVICES)


class Grouped(tejit.GroupedLinear):
    """One group has all rows but two, which are in another one; the third is empty."""

    def forward(self, x, is_first_microbatch=None):
        rows = x.numel() // x.shape[-1] if x.numel() else 0
        return super().forward(x, [max(rows - 2, 0), 0, min(rows, 2)], is_first_microbatch)


class OneGroup(tejit.GroupedLinear):
    def forward(self, x, is_first_microbatch=None):
        rows = x.numel() // x.shape[-1] if x.numel() else 0
        return super().forward(x, [0, rows, 0], is_first_microbatch)


#: By the number of output features. Those of attention have inputs of three dimensions.
MODULES = {
    "Linear": lambda n, **a: tejit.Linear(64, n, **a),
    "no bias": lambda n, **a: tejit.Linear(64, n, bias=False, **a),
    "return_bias": lambda n, **a: tejit.Linear(64, n, return_bias=True, **a),
    "save_original_input": lambda n, **a: tejit.Linear(64, n, save_original_input=True, **a),
    "LayerNormLinear": lambda n, **a: tejit.LayerNormLinear(64, n, **a),
    "norm output": lambda n, **a: tejit.LayerNormLinear(64, n, return_layernorm_output=True, **a),
    "LayerNormMLP": lambda n, **a: tejit.LayerNormMLP(64, n, **a),
    "gated MLP": lambda n, **a: tejit.LayerNormMLP(64, n, activation="swiglu", return_layernorm_output=True, **a),
    "checkpointed MLP": lambda n, **a: tejit.LayerNormMLP(64, n, checkpoint=True, **a),
    "GroupedLinear": lambda n, **a: Grouped(3, 64, n, **a),
    "one group": lambda n, **a: OneGroup(3, 64, n, **a),
    "MultiheadAttention": lambda n, **a: tejit.MultiheadAttention(64, 4, attention_dropout=0.0, **a),
    "TransformerLayer": lambda n, **a: tejit.TransformerLayer(64, n, 4, hidden_dropout=0.0, attention_dropout=0.0, **a),
}
DEEP = ("MultiheadAttention", "TransformerLayer")


def assert_own(tensor: Tensor, what: str, viewed: bool = False) -> None:
    """`viewed`: another shape of a tensor of its own, as what `nn.Linear` returns for three dimensions is."""
    assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), what
    assert tensor.is_contiguous(), what
    assert viewed or tensor._base is None, what


def written(tensor: Tensor) -> None:
    """Some operations in place, one after the other; the last one saves its output."""
    tensor.add_(1).mul_(2)
    F.dropout(tensor, 0.5, inplace=True)
    tensor.masked_fill_(tensor > 3, 0)
    if tensor.numel():
        tensor[0] = 1
        tensor[..., -1:].zero_()
    F.relu(tensor, inplace=True)


def called(module: nn.Module, x: Tensor, recipe, function=None):
    with tejit.autocast(enabled=recipe is not None, recipe=recipe):
        found = (module if function is None else function)(x)
    return found if isinstance(found, tuple) else (found,)


def outputs_of(module: nn.Module, x: Tensor, recipe, function=None) -> list[Tensor]:
    """Without parameters that are returned."""
    found = called(module, x, recipe, function)
    return [tensor for tensor in found if not (tensor.is_leaf and tensor.requires_grad)]


def check(module: nn.Module, x: Tensor, recipe, function=None, *, saved: bool = False) -> None:
    """All of it twice: the second call of a layer may know what the first found out.

    `saved`: backward needs an output, as that of torch's own layers would, and nobody may write to it.
    """
    by_torch = recipe is None or recipe is PLAIN["override"]  # whose gradients of weights are transposed
    for _ in range(2):
        module.zero_grad()
        x = x.detach().clone().requires_grad_()
        outs = outputs_of(module, x, recipe, function)
        for out in outs:
            assert_own(out, "output", viewed=x.dim() > 2)
        sum(out.sum() for out in outs).backward()
        for name, tensor in (("x", x), *module.named_parameters()):
            if tensor.grad is not None:
                assert_own(tensor.grad, f"{name}.grad", viewed=x.dim() > 2)
        outs = outputs_of(module, x, recipe, function)
        learnt = [x, *module.parameters()]
        found = torch.autograd.grad(outs, learnt, [torch.ones_like(out) for out in outs], allow_unused=True)
        for gradient in found:
            if gradient is not None:
                assert_own(gradient, "a gradient", viewed=x.dim() > 2 or by_torch)
                gradient.mul_(2)
        outs = outputs_of(module, x, recipe, function)
        for out in outs[: 1 if saved else 2]:
            written(out)
        sum(out.sum() for out in outs).backward()
        with torch.no_grad():
            for out in outputs_of(module, x, recipe, function):
                assert_own(out, "output without gradients", viewed=x.dim() > 2)
                written(out)


@each_device
def test_75_the_report(device):
    layer = tejit.Linear(64, 64, device=device)
    with tejit.autocast(recipe=MXFP8BlockScaling()):
        y = torch.relu_(layer(torch.randn(10, 64, device=device)))
        one = layer(torch.randn(1, 64, device=device))
    y.sum().backward()
    assert (y >= 0).all()
    buffer = io.BytesIO()
    torch.save(one, buffer)
    assert one.untyped_storage().nbytes() == 64 * 4
    assert buffer.tell() < 2500


@each_device
@pytest.mark.parametrize("shape", [(10, 64), (1, 64), (0, 64), (2, 5, 64)], ids=str)
@pytest.mark.parametrize("features", [64, 7, pytest.param(72, marks=pytest.mark.full)])
@pytest.mark.parametrize("recipe", WIDE)
def test_75_outputs_and_gradients_of_a_linear_layer_are_tensors_of_their_own(recipe, features, shape, device):
    check(tejit.Linear(64, features, device=device, name="part"), torch.randn(shape, device=device), ALL[recipe])


@each_device
@pytest.mark.parametrize("recipe", ["block", "MXFP8", *[pytest.param(n, marks=pytest.mark.full) for n in MORE]])
@pytest.mark.parametrize("kind", list(MODULES))
def test_75_those_of_every_module(kind, recipe, device):
    if (kind, recipe) == ("save_original_input", "delayed"):
        pytest.skip("they do not go together")
    saved, recipe = recipe in PLAIN, ALL[recipe]
    for features in (32, 40) if kind in DEEP else (40,):
        module = MODULES[kind](features, device=device, name="part")
        for shape in ((2, 5, 64),) if kind in DEEP else ((10, 64), (2, 5, 64), (1, 64)):
            check(module, torch.randn(shape, device=device), recipe, saved=saved)


@each_device
@pytest.mark.parametrize("recipe", list(FEW))
def test_75_those_of_a_transposed_layer(recipe, device):
    module = TransposedLinear(64, 40).to(device)
    module.weight = nn.Parameter(module.weight.detach().t().contiguous())
    module = module.to(device)
    x = torch.randn(10, 64, device=device, requires_grad=True)
    with tejit.autocast(recipe=FEW[recipe]):
        y = module(x)
    assert_own(y, "output")
    torch.relu_(y).sum().backward()
    assert_own(x.grad, "x.grad")
    assert module.weight.grad.untyped_storage().nbytes() == 64 * 40 * 4


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "GroupedLinear"])
@pytest.mark.parametrize("recipe", ["block", "MXFP8"])
def test_75_in_two_bytes(recipe, kind, dtype, device):
    module = MODULES[kind](40, device=device, dtype=dtype)
    check(module, torch.randn(10, 64, device=device, dtype=dtype), FEW[recipe])


@each_device
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("recipe", [DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling])
def test_75_under_a_backward_override(recipe, override, device):
    module = MODULES["Linear"](40, device=device)
    check(module, torch.randn(10, 64, device=device), recipe(backward_override=override))


@each_device
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "GroupedLinear", "TransformerLayer"])
@pytest.mark.parametrize("recipe", ["current", "block", "MXFP8", "NVFP4"])
def test_75_of_weights_that_live_quantized(recipe, kind, device):
    with tejit.quantized_model_init(recipe=FEW[recipe]):
        module = MODULES[kind](64, device=device)
    x = torch.randn(2, 5, 64, device=device) if kind in DEEP else torch.randn(10, 64, device=device)
    check(module, x, FEW[recipe])


@each_device
@pytest.mark.parametrize("recipe", list(FEW))
def test_75_gradients_that_are_put_off(recipe, device):
    module = tejit.Linear(64, 40, delay_wgrad_compute=True, device=device)
    with tejit.autocast(recipe=FEW[recipe]):
        module(torch.randn(10, 64, device=device)).sum().backward()
    module.backward_dw()
    assert_own(module.weight.grad, "weight.grad")


@each_device
@pytest.mark.parametrize("recipe", ["block", "MXFP8"])
@pytest.mark.parametrize("kind", ["Linear", "norm output", "GroupedLinear"])
def test_75_in_place_changes_count_in_backward(kind, recipe, device):
    """The gradient is that of the same operations not in place."""
    module = MODULES[kind](40, device=device)
    for shape in ((10, 64), (2, 5, 64)):
        found = []
        for in_place in (True, False):
            torch.manual_seed(0)
            x = torch.randn(shape, device=device, requires_grad=True)
            outs = outputs_of(module, x, FEW[recipe])
            if in_place:
                for out in outs:
                    out.mul_(3)
                    out[..., :2].zero_()
            else:
                keep = [torch.arange(out.shape[-1], device=device) >= 2 for out in outs]
                outs = [out * 3 * kept for out, kept in zip(outs, keep, strict=True)]
            sum(out.sum() for out in outs).backward()
            found.append(x.grad)
        assert torch.equal(*found)


def compiled_cases():
    for kind in ("Linear", "norm output", "LayerNormMLP", "GroupedLinear"):
        for recipe in ("current", "block", "MXFP8"):
            quick = recipe == "MXFP8" and kind == "Linear"
            yield pytest.param(kind, recipe, "aot_eager", marks=[] if quick else pytest.mark.full)
            yield pytest.param(kind, recipe, "inductor", marks=[pytest.mark.full, pytest.mark.jit])


@each_device
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(("kind", "recipe", "backend"), list(compiled_cases()))
def test_75_of_compiled_modules(kind, recipe, backend, dynamic, device):
    torch._dynamo.reset()
    module = MODULES[kind](40, device=device)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)
    check(module, torch.randn(10, 64, device=device), FEW[recipe], compiled)
