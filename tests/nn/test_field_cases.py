"""Faults that users of this kind of software met, in every module of tejit's and in a plain one: moves and state."""

from __future__ import annotations

import copy
import functools
import re
import subprocess
import sys
import types
import warnings
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import tejit
from tejit.recipe import DelayedScaling, MXFP8BlockScaling
from tests.common import DEVICES
from tests.nn.test_delayed_state import assert_same, loaded, saved, state

DELAYED = DelayedScaling(amax_history_len=3)


class Grouped(tejit.GroupedLinear):
    """Called with the rows of two groups and an empty one."""

    def forward(self, x, m_splits=(5, 0, 3), is_first_microbatch=None):
        return super().forward(x, list(m_splits), is_first_microbatch)


class Plain(nn.Module):
    """A module that is not tejit's, whose weight is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(tejit.MXFP8Quantizer()(torch.randn(64, 64)))
        self.register_buffer("quantized", tejit.MXFP8Quantizer()(torch.randn(64, 64)))

    def forward(self, x):
        return nn.functional.linear(x, self.weight) + nn.functional.linear(x, self.quantized)


OURS = {
    "Linear": lambda: tejit.Linear(64, 64),
    "LayerNormLinear": lambda: tejit.LayerNormLinear(64, 64),
    "LayerNormMLP": lambda: tejit.LayerNormMLP(64, 64, activation="swiglu"),
    "GroupedLinear": lambda: Grouped(3, 64, 64),
    "TransformerLayer": lambda: tejit.TransformerLayer(64, 64, 4, hidden_dropout=0.0, attention_dropout=0.0),
}
KINDS = {**OURS, "plain": Plain}
each_module = pytest.mark.parametrize("kind", list(OURS))


def made(kind: str, quantized: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with tejit.quantized_model_init(quantized, recipe=MXFP8BlockScaling()):
        return KINDS[kind]()


def built_for_delayed(kind: str, seed: int = 0) -> nn.Module:
    with tejit.autocast(recipe=DELAYED):
        return made(kind, seed=seed)


def run(module: nn.Module, number: int = 0) -> Tensor:
    weight = next(module.parameters())
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)) * (number % 4 + 1)
    x = x.to(weight.device, weight.dtype)
    return module(x.view(2, 4, 64)) if isinstance(module, tejit.TransformerLayer) else module(x)


def train(module: nn.Module, steps: range) -> list[float]:
    losses = []
    for number in steps:
        module.zero_grad()
        with tejit.autocast(recipe=DELAYED):
            loss = run(module, number).square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in module.parameters():
                if p.grad is not None:
                    p.sub_(p.grad.clamp(-1, 1), alpha=0.01)
    return losses


def everything(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that are to keep what is attached: all of ours; of a plain module the quantized ones."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if isinstance(module, Plain):
        return {name: tensor for name, tensor in named.items() if isinstance(tensor, tejit.QuantizedTensor)}
    return named


def probe(self):
    return self


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_attached_stays_and_is_bound_to_what_survives(kind, quantized, device) -> None:
    module = made(kind, quantized)
    main_grads = {}
    for name, tensor in everything(module).items():
        tensor.main_grad = main_grads[name] = torch.zeros(1)
        tensor.method, tensor.partial = types.MethodType(probe, tensor), functools.partial(probe, tensor)
    parameters = dict(module.named_parameters())
    module.to("cpu").half().to(device)
    assert dict(module.named_parameters()) == parameters
    for name, tensor in everything(module).items():
        assert tensor.main_grad is main_grads[name], name
        assert tensor.method() is tensor.partial() is tensor, name
        assert tensor.device.type == device
    # What the parameters stand for is float16 now, also where it is computed with; the state of delayed scaling is not.
    for name, parameter in module.named_parameters():
        values = parameter.dequantize() if isinstance(parameter, tejit.QuantizedTensor) else parameter
        assert parameter.dtype == values.dtype == torch.float16, name
    assert {b.dtype for b in state(module).values()} <= {torch.float32}
    y = run(module)
    assert y.dtype == torch.float16
    y.float().sum().backward()


@pytest.mark.parametrize("quantized", [False, True])
@each_module
def test_weak_references_to_every_parameter_do_not_matter(kind, quantized) -> None:
    module = made(kind, quantized)
    references = [weakref.ref(parameter) for parameter in module.parameters()]
    want = run(module)
    module.to(torch.float32).to(torch.bfloat16).to(torch.float32)
    assert [reference() for reference in references] == list(module.parameters())
    assert (run(module) - want).norm() <= 0.02 * want.norm()


CONVERSIONS = {
    "to": lambda module: module.to(torch.bfloat16),
    "half": lambda module: module.half(),
    "type": lambda module: module.type(torch.bfloat16),
    "to_empty": lambda module: module.to_empty(device="meta"),
    "no change": lambda module: module.to(torch.float32),
}


@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_plain_module_says_who_holds_its_quantized_parameter(how) -> None:
    """Field case 34 where the module is not ours: torch refuses to swap; the error says who and what to do."""

    class Cache:
        def __init__(self, tensor) -> None:
            self.reference = weakref.ref(tensor)

    module = torch.nn.Sequential(torch.nn.Linear(32, 32))
    weight = torch.nn.Parameter(tejit.MXFP8Quantizer().quantize(module[0].weight.detach()))
    module[0].weight = weight
    holder = Cache(weight)
    with pytest.raises(RuntimeError) as raised:
        CONVERSIONS[how](module)
    # Where nothing is to be converted, torch wraps the error.
    said = str(raised.value) + str(raised.value.__cause__)
    assert re.search(r"Linear\.weight, a quantized parameter .* 1 weak reference\(s\), .*(Cache|dict)", said)
    assert "drop what holds it" in said
    assert module[0].weight is weight
    assert weight.dtype == torch.float32
    # Elsewhere a weak reference is nobody's business: nothing is swapped.
    weight.detach().to(torch.float16)
    torch.nn.Parameter(weight.detach())
    with pytest.raises(TypeError, match="float64"):
        module.double()
    twin = copy.deepcopy(module)
    held = weakref.ref(twin[0].weight)
    twin._apply(lambda t: t.detach().dequantize() if isinstance(t, tejit.MXFP8Tensor) else t)
    assert held() is twin[0].weight
    del holder
    CONVERSIONS[how](module)
    assert module[0].weight is weight


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_moves_that_change_nothing_change_nothing(kind, quantized, device) -> None:
    module = made(kind, quantized)
    want = run(module)
    module._apply(lambda t: t.cpu())
    module.cpu().cpu()
    assert torch.equal(run(module), want)
    module.to(device).to("cpu")
    assert torch.equal(run(module), want)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_deep_copy_is_equal_and_shares_nothing(kind, quantized) -> None:
    module = made(kind, quantized)
    for tensor in everything(module).values():
        tensor.tag = ["kept"]
    want = run(module)
    twin = copy.deepcopy(module)
    for (name, ours), theirs in zip(everything(module).items(), everything(twin).values(), strict=True):
        assert theirs.tag == ["kept"], name
        assert theirs.tag is not ours.tag
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(run(twin), want)


FRESH = """
import sys, torch
if sys.argv[2] == "quantized":
    import tejit
state = torch.load(sys.argv[1], weights_only=True)
print(sum(v.dequantize().double().abs().sum() if sys.argv[2] == "quantized" and "weight" in k else v.double().sum()
          for k, v in state.items()).item() > 0, len(state))
"""


@pytest.mark.full
@pytest.mark.parametrize("quantized", [False, True])
@each_module
def test_the_file_is_read_in_a_fresh_process(kind, quantized, tmp_path) -> None:
    """Without tejit where nothing is quantized, the state of delayed scaling included."""
    module = made(kind, quantized)
    if not quantized:
        train(module, range(1))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    how = "quantized" if quantized else "plain"
    command = [sys.executable, "-c", FRESH, str(tmp_path / "state.pt"), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"True {len(module.state_dict())}\n", done.stderr


@each_module
def test_the_state_dict_has_one_size(kind) -> None:
    module, sizes = built_for_delayed(kind), []
    for steps in (range(0), range(1), range(1, 30)):
        train(module, steps)
        sizes.append(len(saved(module)))
    assert len(set(sizes)) == 1, sizes


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("how", ["file", "distributed", "assigned"])
@each_module
def test_a_resumed_run_equals_the_unbroken_one_to_the_bit(kind, how, at, tmp_path) -> None:
    """From a file or a distributed checkpoint, of a model that did or did not run, into one that never ran."""
    unbroken = built_for_delayed(kind)
    want = train(unbroken, range(at + 3))[at:]
    first, second = built_for_delayed(kind), built_for_delayed(kind, seed=7)
    train(first, range(at))
    if how == "distributed":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed.*")
            warnings.filterwarnings("ignore", message=".*TypedStorage.*")
            dcp.save({"model": first.state_dict()}, checkpoint_id=tmp_path)
            content = {"model": second.state_dict()}
            dcp.load(content, checkpoint_id=tmp_path)
        second.load_state_dict(content["model"])
    elif how == "assigned":
        with torch.device("meta"):
            second = built_for_delayed(kind)
        second.load_state_dict(loaded(saved(first)), assign=True)
    else:
        second.load_state_dict(loaded(saved(first)))
    assert train(second, range(at, at + 3)) == want
    assert_same(state(second), state(unbroken))


@pytest.mark.filterwarnings("ignore:TypedStorage")
@each_module
def test_safetensors_take_a_trained_model_and_its_plain_form(kind, tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    module, again, fresh = (made(kind, seed=seed) for seed in (0, 1, 2))
    train(module, range(2))
    safetensors.save_file(module.state_dict(), tmp_path / "all")
    again.load_state_dict(safetensors.load_file(tmp_path / "all"), strict=True)
    assert_same(state(again), state(module))
    safetensors.save_file(tejit.plain_state_dict(module), tmp_path / "plain")
    content = safetensors.load_file(tmp_path / "plain")
    assert not [name for name in content if "_delayed" in name]
    fresh.load_state_dict(content, strict=True)
    assert_same(state(fresh), state(made(kind)))
    assert train(again, range(2, 4)) == train(module, range(2, 4))


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_frozen_quantized_layer_passes_the_gradient_on(kind) -> None:
    module = made(kind, True).requires_grad_(False)
    recipe = MXFP8BlockScaling()
    first = nn.Linear(64, 64)
    x = torch.randn(2, 4, 64) if kind == "TransformerLayer" else torch.randn(8, 64)
    grads = []
    for quantize in (True, False):
        first.zero_grad()
        with tejit.autocast(quantize, recipe=recipe):
            module(first(x)).sum().backward()
        grads.append(first.weight.grad)
    assert all(p.grad is None for p in module.parameters())
    assert grads[1].norm() > 0
    assert (grads[0] - grads[1]).norm() < 0.2 * grads[1].norm()
