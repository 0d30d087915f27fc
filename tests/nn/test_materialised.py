"""Row 78 of the field cases: buffers that others gave their memory. Oracle: a module that was built in place."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

import tejit
from tejit.recipe import DelayedScaling, Float8CurrentScaling
from tests.nn.test_delayed import assert_same, state
from tests.nn.test_delayed_state import MODULES

RECIPE = DelayedScaling(amax_history_len=3)
POISONS = [
    float("nan"),
    0.0,
    1.0,
    *[pytest.param(v, marks=pytest.mark.full) for v in (448.0, -1.0, float("inf"), 1e-42)],
]


def all_state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers() if "_delayed" in name}


def poisoned(tensor: torch.Tensor, value: float, device: str = "cpu") -> torch.Tensor:
    """Memory as it may be found."""
    return torch.full_like(tensor, value, device=device)


def step(module: nn.Module, number: int, recipe=RECIPE) -> torch.Tensor:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(number)) * (number + 1)
    splits = ([2, 0, 3],) if isinstance(module, tejit.GroupedLinear) else ()
    with tejit.autocast(recipe=recipe):
        y = module(x, *splits)
    y.square().sum().backward()
    return y.detach()


def assert_goes_on_as(module: nn.Module, twin: nn.Module) -> None:
    twin = copy.deepcopy(twin)
    for number in range(3):
        assert torch.equal(step(module, number), step(twin, number)), number
        assert_same(state(module), state(twin))


def give_parameters(module: nn.Module, twin: nn.Module) -> None:
    for name, parameter in twin.named_parameters():
        module._parameters[name] = nn.Parameter(parameter.detach().clone())


#: How others put memory into the buffers of a module.
WAYS = {
    "into _buffers": lambda module, name, tensor: module._buffers.__setitem__(name, tensor),
    "setattr": setattr,
    "register_buffer": lambda module, name, tensor: module.register_buffer(name, tensor, persistent=False),
    "load_state_dict of one": lambda module, name, tensor: module.load_state_dict(
        {name: tensor}, strict=False, assign=True
    ),
}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("under", [None, RECIPE], ids=["not stored", "stored"])
def test_78_buffers_that_others_materialise_are_a_fresh_state(kind, way, poison, under) -> None:
    with tejit.autocast(enabled=under is not None, recipe=under):
        twin, module = MODULES[kind](), MODULES[kind](device="meta")
    give_parameters(module, twin)
    for name, buffer in list(module.named_buffers()):
        WAYS[way](module, name, poisoned(buffer, poison))
    module.eval()  # as loaders end
    assert_same(all_state(module), all_state(twin))
    module.train()
    assert_goes_on_as(module, twin)


@pytest.mark.parametrize("look", ["forward", "calibrate", "compiled", "state_dict", "deepcopy", "pickle", "to", "load"])
@pytest.mark.parametrize("kind", ["Linear", pytest.param("LayerNormMLP", marks=pytest.mark.full)])
def test_78_whoever_looks_first_finds_a_fresh_state(kind, look) -> None:
    torch._dynamo.reset()
    with tejit.autocast(recipe=RECIPE):
        twin, module = MODULES[kind](), MODULES[kind](device="meta")
    give_parameters(module, twin)
    for name, buffer in list(module.named_buffers()):
        module._buffers[name] = poisoned(buffer, float("nan"))
    if look == "state_dict":
        assert_same(module.state_dict(), twin.state_dict())
    elif look == "load":
        module.load_state_dict({"bias": torch.zeros(48)}, strict=False)
        module.load_state_dict(twin.state_dict())
    elif look == "calibrate":
        for layer in (module, twin):
            with tejit.autocast(enabled=False, recipe=RECIPE, calibrating=True):
                layer(torch.ones(5, 32))
    elif look == "compiled":
        with tejit.autocast(recipe=RECIPE):
            y = torch.compile(module, backend="aot_eager", fullgraph=True)(torch.ones(5, 32))
            want = twin(torch.ones(5, 32))
        assert torch.equal(y, want)
    else:
        looks = {
            "deepcopy": copy.deepcopy,
            "pickle": lambda m: pickle.loads(pickle.dumps(m)),
            "to": lambda m: m.to("cpu"),
            "forward": lambda m: m,
        }
        module = looks[look](module)
    assert_goes_on_as(module, twin)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.to(torch.float32)])
@pytest.mark.parametrize("on_meta", [False, True], ids=["as built", "state on meta"])
def test_78_parameters_set_one_by_one_then_moved(kind, move, on_meta) -> None:
    twin, module = MODULES[kind](), MODULES[kind](device="meta")
    if on_meta:  # as older versions of accelerate put buffers there
        for name, buffer in list(module.named_buffers()):
            module._buffers[name] = buffer.to("meta")
    give_parameters(module, twin)
    holder = move(nn.Sequential(module))
    assert_same(all_state(holder[0]), all_state(twin))
    assert_goes_on_as(holder[0], twin)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("before", [False, True], ids=["new", "after steps"])
def test_78_to_empty_and_skip_init(kind, before) -> None:
    """A module that had memory keeps its state through ``to_empty``, one that had none gets a fresh one."""
    torch.use_deterministic_algorithms(True)  # which fills what is not initialised with NaN
    try:
        module, twin = MODULES[kind](), MODULES[kind](device="meta").to_empty(device="cpu")
        assert_same(all_state(twin), all_state(module))
        if before:
            step(module, 0)
        want = all_state(module)
        assert_same(all_state(module.to_empty(device="cpu")), want)
        gone = module.to("meta").to_empty(device="cpu")
        assert_same(all_state(gone), all_state(twin))
        if kind == "Linear":
            skipped = torch.nn.utils.skip_init(tejit.Linear, 32, 48)
            assert_same(all_state(skipped), all_state(twin))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("under", [False, True], ids=["not stored", "stored"])
def test_78_a_state_that_was_loaded_past_the_module_is_kept(kind, way, length, under) -> None:
    """As accelerate loads it. A history of one row remembers nothing, so that only a state that is in the state dict
    can be told from memory as it was found."""
    recipe = DelayedScaling(amax_history_len=length)
    twin = MODULES[kind]()
    for number in range(3):
        step(twin, number, recipe)
    with tejit.autocast(recipe=recipe) if under else contextlib.nullcontext():
        module = MODULES[kind](device="meta")
    give_parameters(module, twin)
    for name, value in twin.state_dict().items():
        if "_delayed" in name:
            WAYS[way](module, name, value.clone())
    module.eval()
    if under or length > 1:
        assert_same(state(module), state(twin))
        for number in (3, 4):
            assert torch.equal(step(module, number, recipe), step(twin, number, recipe))
            assert_same(state(module), state(twin))


@pytest.mark.parametrize("kind", MODULES)
def test_78_a_state_that_was_moved_past_the_module_is_kept(kind) -> None:
    module = MODULES[kind]()
    for number in range(2):
        step(module, number)
    twin = copy.deepcopy(module)
    for name, buffer in list(module.named_buffers()):
        module._buffers[name] = buffer.clone()
    assert_same(all_state(module), all_state(twin))
    assert_goes_on_as(module, twin)


def test_78_functional_calls_use_the_buffers_that_they_are_given() -> None:
    module = MODULES["Linear"]()
    for number in range(2):
        step(module, number)
    given = {name: value.clone() for name, value in [*module.named_parameters(), *module.named_buffers()]}
    given["_delayed_scale"] = given["_delayed_scale"] / 3
    x = torch.randn(5, 32)
    with torch.no_grad(), tejit.autocast(recipe=RECIPE):
        got = torch.func.functional_call(module, given, (x,))
        plain = module(x)
        module._delayed_scale.copy_(given["_delayed_scale"])
        want = module(x)
    assert torch.equal(got, want)
    assert not torch.equal(got, plain)


@pytest.mark.parametrize("way", ["into _buffers", "setattr"])
@pytest.mark.parametrize("poison", POISONS)
def test_78_the_angles_of_rotary_embeddings(way, poison) -> None:
    with torch.device("meta"):
        module = tejit.RotaryPositionEmbedding(16)
    want = tejit.RotaryPositionEmbedding(16)(8)
    assert torch.equal(module(8), want)
    WAYS[way](module, "inv_freq", poisoned(module.inv_freq, poison))
    assert torch.equal(module(8), want)
    WAYS[way](module, "inv_freq", module.inv_freq.to("meta"))
    assert torch.equal(nn.Sequential(module).to("cpu")[0](8), want)
    assert torch.equal(module.inv_freq, tejit.RotaryPositionEmbedding(16).inv_freq)


@pytest.mark.parametrize("recipe", [RECIPE, Float8CurrentScaling()])
def test_78_a_workspace_that_others_replaced_is_no_workspace(recipe) -> None:
    """The weight of a first microbatch is gone; the next call that needs it says so."""
    module, x = tejit.Linear(32, 32, bias=False), torch.randn(4, 32)
    with torch.no_grad(), tejit.autocast(recipe=recipe):
        want = module(x, is_first_microbatch=True)
        for name, buffer in list(module.named_buffers()):
            module._buffers[name] = buffer.clone()  # moved
        assert torch.equal(module(x, is_first_microbatch=False), want)
        assert torch.equal(module.to_empty(device="cpu")(x, is_first_microbatch=False), want)
        for name, buffer in list(module.named_buffers()):
            if "workspace" in name:
                module._buffers[name] = torch.full_like(buffer, 3)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="is_first_microbatch=True"):
                module(x, is_first_microbatch=False)
        want = module(x, is_first_microbatch=True)
        assert torch.equal(module(x, is_first_microbatch=False), want)
