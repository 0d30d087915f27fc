"""Delayed scaling: the state as part of a module: state dicts, moves, copies, resumed runs."""

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tejit
from tejit.recipe import DelayedScaling, Float8CurrentScaling
from tests.common import DEVICES
from tests.nn.test_delayed import assert_same, data, layers, state, step_of

RECIPE = DelayedScaling(amax_history_len=3)
KEYS = ["_delayed_scale", "_delayed_amax_history", "_delayed_grad_scale", "_delayed_grad_amax_history"]


def saved(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return file.getvalue()


def loaded(content: bytes) -> dict[str, torch.Tensor]:
    return torch.load(io.BytesIO(content), weights_only=True)


def train(module: nn.Module, steps: range, recipe=RECIPE) -> list[torch.Tensor]:
    """Losses of steps of plain SGD."""
    losses = []
    for step in steps:
        module.zero_grad()
        with tejit.autocast(recipe=recipe):
            loss = module(data(step)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(p.grad.clamp(-1, 1), alpha=0.01)
    return losses


def built_under_the_recipe() -> nn.Sequential:
    with tejit.autocast(recipe=RECIPE):
        return layers()


def test_keys_from_the_start_or_from_the_first_step() -> None:
    plain = layers()
    bare = [f"{i}.{name}" for i in (0, 2) for name in ("weight", "bias")]
    assert list(plain.state_dict()) == bare
    train(plain, range(1), Float8CurrentScaling())
    with torch.no_grad(), tejit.autocast(recipe=RECIPE):
        plain(data(0))
    assert list(plain.state_dict()) == bare
    train(plain, range(1))
    full = [f"{i}.{name}" for i in (0, 2) for name in ("weight", "bias", *KEYS)]
    assert list(plain.state_dict()) == full
    assert list(built_under_the_recipe().state_dict()) == full
    kept = layers()
    for i in (0, 2):
        kept[i].keep_delayed_state(Float8CurrentScaling())
        assert kept[i].state_dict().keys() == {"weight", "bias"}
        kept[i].keep_delayed_state(RECIPE)
    assert list(kept.state_dict()) == full
    with tejit.autocast(recipe=Float8CurrentScaling(overrides=(("x", RECIPE),))):
        assert list(tejit.Linear(2, 2).state_dict()) == ["weight", "bias", *KEYS]
    assert not [name for name, _ in plain.named_parameters() if "delayed" in name]


def test_the_state_dict_does_not_grow() -> None:
    """TE#231: after 1 and after 200 steps."""
    module, sizes = layers(), []
    for steps in (range(1), range(1, 200)):
        train(module, steps)
        sizes.append(len(saved(module)))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("build", [layers, built_under_the_recipe])
def test_a_resumed_run_equals_the_unbroken_one(build, at) -> None:
    """TE#1860, TE#1623: also where the file was written before any forward, and into a module that never ran."""
    unbroken, first = build(), build()
    want = train(unbroken, range(8))
    train(first, range(at))
    second = build()
    train(second, range(0))
    with torch.no_grad():
        for p in second.parameters():
            p.zero_()
    second.load_state_dict(loaded(saved(first)))
    assert [*map(float, train(second, range(at, 8)))] == [*map(float, want[at:])]
    assert_same(state(second), state(unbroken))


def prepared() -> nn.Sequential:
    """The remedy of docs/delayed.md."""
    model = layers()
    for module in model.modules():
        if hasattr(module, "keep_delayed_state"):
            module.keep_delayed_state(RECIPE)
    return model


def prepared_by_convert() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(31, 40), nn.GELU(), nn.Linear(40, 17))
    return tejit.convert(model, recipe=RECIPE, filter_fn=lambda module, name: True)


@pytest.mark.filterwarnings("ignore:.*torch.distributed", "ignore:.*TypedStorage")
@pytest.mark.parametrize("build", [layers, built_under_the_recipe, prepared, prepared_by_convert])
def test_distributed_checkpoints_read_the_keys_that_the_model_has(build, tmp_path) -> None:
    """TE#1860. Into a model that never ran and was told of no recipe the state is not read, which docs/delayed.md says;
    such a model is as one that loads a plain file. All others go on as the unbroken run does."""
    unbroken, plain = layers(), layers()
    train(unbroken, range(3))
    dcp.save({"model": unbroken.state_dict()}, checkpoint_id=tmp_path)
    plain.load_state_dict(tejit.plain_state_dict(unbroken))
    resumed = build()
    content = {"model": resumed.state_dict()}
    dcp.load(content, checkpoint_id=tmp_path)
    resumed.load_state_dict(content["model"])
    want, fresh, got = (train(module, range(3, 6)) for module in (unbroken, plain, resumed))
    assert want != fresh
    assert got == (fresh if build is layers else want)
    assert_same(state(resumed), state(plain if build is layers else unbroken))


def test_plain_tensors_in_the_file_of_another_process() -> None:
    """Row 45 of the field cases: a fresh process reads it with torch alone, nothing to unpickle."""
    module = layers()
    train(module, range(2))
    code = (
        "import io, sys, torch; d = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=True);"
        "assert all(type(t) is torch.Tensor for t in d.values()); print(d['0._delayed_scale'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], input=saved(module), capture_output=True, env=os.environ)
    assert done.stdout.decode().strip() == str(module[0]._delayed_scale.tolist()), done.stderr.decode()


def test_strict_loading_without_state_gives_fresh_state() -> None:
    plain = nn.Sequential(nn.Linear(31, 40), nn.GELU(), nn.Linear(40, 17))
    module = layers()
    train(module, range(3))
    module.load_state_dict(plain.state_dict())
    assert_same(state(module), state(layers()))
    assert torch.equal(module[2].weight, plain[2].weight)
    # A dict that says nothing of the module is no reason to forget.
    train(module, range(3))
    before = state(module)
    module.load_state_dict({"0.weight": plain[0].weight}, strict=False)
    assert_same(state(module[2]), {name.removeprefix("2."): b for name, b in before.items() if name.startswith("2.")})


def test_the_plain_form_loads_into_torch_s_modules() -> None:
    module = layers()
    train(module, range(2))
    plain = nn.Sequential(nn.Linear(31, 40), nn.GELU(), nn.Linear(40, 17))
    plain.load_state_dict(tejit.plain_state_dict(module))
    assert torch.equal(plain[0].weight, module[0].weight)
    assert "0._delayed_scale" in module.state_dict()


@pytest.mark.parametrize("assign", [False, True])
def test_loading_into_a_module_on_meta(assign) -> None:
    module = layers()
    train(module, range(3))
    empty = layers(device="meta")
    if not assign:
        empty = empty.to_empty(device="cpu")
        assert_same(state(empty), state(layers()))
    empty.load_state_dict(loaded(saved(module)), assign=assign)
    assert_same(state(empty), state(module))
    want = train(module, range(3, 6))
    assert [*map(float, train(empty, range(3, 6)))] == [*map(float, want)]


def test_a_plain_dict_gives_a_module_on_meta_fresh_state() -> None:
    module, empty = layers(), layers(device="meta")
    empty.load_state_dict(loaded(saved(module)), assign=True)
    assert_same(state(empty), state(module))
    for _ in range(2):
        step_of(module, data(0), RECIPE)
        step_of(torch.compile(empty, backend="aot_eager"), data(0), RECIPE)
        assert_same(state(empty), state(module))


MODULES = {
    "Linear": lambda **how: tejit.Linear(32, 48, **how),
    "LayerNormLinear": lambda **how: tejit.LayerNormLinear(32, 48, **how),
    "LayerNormMLP": lambda **how: tejit.LayerNormMLP(32, 48, **how),
    "GroupedLinear": lambda **how: tejit.GroupedLinear(3, 32, 48, **how),
}


@pytest.mark.parametrize(
    ("first", "kind"),
    [(first, kind) for first in ("a step", "calibrating", "evaluation") for kind in MODULES]
    + [pytest.param("compiled", kind, marks=[] if kind == "Linear" else pytest.mark.full) for kind in MODULES],
)
def test_parameters_assigned_one_by_one_to_a_module_on_meta(first, kind) -> None:
    """As loaders of large models do; the state follows the parameters. Oracle: the module built in place."""
    torch._dynamo.reset()
    module, empty = MODULES[kind](), MODULES[kind](device="meta")
    for name, parameter in module.named_parameters():
        setattr(empty, name, nn.Parameter(parameter.detach().clone()))
    splits = ([2, 0, 3],) if kind == "GroupedLinear" else ()

    def step(layer, run, number):
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(number)) * (number + 1)
        with tejit.autocast(recipe=RECIPE):
            y = run(x, *splits)
        y.square().sum().backward()
        return y

    for number in range(3):
        if number == 0 and first == "calibrating":
            for layer in (module, empty):
                with tejit.autocast(enabled=False, recipe=RECIPE, calibrating=True):
                    layer(torch.ones(5, 32), *splits)
        if number == 0 and first == "evaluation":
            for layer in (module, empty):
                with torch.inference_mode(), tejit.autocast(recipe=RECIPE):
                    layer(torch.ones(5, 32), *splits)
        run = torch.compile(empty, backend="aot_eager", fullgraph=True) if first == "compiled" else empty
        got, want = step(empty, run, number), step(module, module, number)
        assert torch.equal(got, want)
        assert_same(state(empty), state(module))
    for (name, got), want in zip(empty.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad), name


def test_histories_of_other_lengths() -> None:
    long = DelayedScaling(amax_history_len=1500)
    module = layers()
    with pytest.raises(
        ValueError, match=r"amax_history_len is 1500, and this Linear keeps a history of 1024.*keep_del"
    ):
        train(module, range(1), long)
    assert_same(state(module), state(layers()))
    with tejit.autocast(recipe=long):
        built = layers()
    kept = layers()
    for i in (0, 2):
        kept[i].keep_delayed_state(long)
    for longer in (built, kept):
        assert longer[0]._delayed_amax_history.shape == (1500, 2)
        assert longer[0]._delayed_grad_amax_history.shape == (1500, 1)
        train(longer, range(2), long)
    assert_same(state(built), state(kept))
    module.load_state_dict(built.state_dict())  # a longer one in the file makes room
    assert_same(state(module), state(built))
    train(module, range(2, 4), long)
    short = layers()
    train(short, range(2))
    module.load_state_dict(short.state_dict())  # a shorter one fills the first rows
    assert torch.equal(module[0]._delayed_amax_history[:1024], short[0]._delayed_amax_history)
    assert not module[0]._delayed_amax_history[1024:].any()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_delayed_scale", torch.ones(5), r"0\._delayed_scale has shape \(5,\)"),
        ("_delayed_scale", torch.ones(2, dtype=torch.float16), r"0\._delayed_scale is torch.float16"),
        ("_delayed_scale", "nonsense", r"0\._delayed_scale is str"),
        ("_delayed_amax_history", torch.zeros(0, 2), r"0\._delayed_amax_history has shape \(0, 2\)"),
        ("_delayed_grad_amax_history", torch.zeros(4), r"0\._delayed_grad_amax_history is torch.float32 \(4,\)"),
        ("_delayed_grad_scale", None, r"Missing key.*0\._delayed_grad_scale"),
        ("_delayed_nonsense", torch.zeros(4), r"Unexpected key.*0\._delayed_nonsense"),
    ],
)
def test_what_does_not_fit_is_an_error(name, value, message) -> None:
    module = layers()
    train(module, range(1))
    content = {**module.state_dict(), f"0.{name}": value}
    if value is None:
        del content[f"0.{name}"]
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(content)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["half", "bfloat16", "to", "double", "type"])
def test_the_state_stays_float32_and_keeps_its_bits(how, device) -> None:
    module = layers(device)
    step_of(module, data(0, device), RECIPE)
    before = state(module)
    if how == "to":
        module.to(torch.float16)
    elif how == "type":
        module.type(torch.float16)
    else:
        getattr(module, how)()
    assert module[0].weight.dtype != torch.float32
    assert_same(state(module), before)


def test_the_state_keeps_its_bits_where_a_conversion_fails_half_way() -> None:
    """Oracle: the state before; and the run of a module that was not touched."""
    module, twin = layers(), layers()
    train(module, range(2))
    train(twin, range(2))
    module[0].register_buffer("late", torch.zeros(1))
    module.zero_grad()

    def fails(tensor):
        if tensor is module[0].late:
            raise RuntimeError("on purpose")
        return tensor.half() if tensor is not module[0].weight and tensor is not module[0].bias else tensor

    with pytest.raises(RuntimeError, match="on purpose"):
        module._apply(fails)
    assert_same(state(module), state(twin))
    assert train(module, range(2, 4)) == train(twin, range(2, 4))


def test_the_state_is_not_left_to_chance_by_to_empty(monkeypatch) -> None:
    """Of a module that has memory: parameters are to be initialised again, and no user knows of the state."""
    module = layers()
    train(module, range(2))
    before = state(module)
    module[0]._delayed_scale.tag = "kept"
    like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **how: like(*args, **how).fill_(float("nan")))
    module.to_empty(device="cpu")
    assert module[0].weight.isnan().all()
    assert_same(state(module), before)
    assert not module[0]._delayed_previous_scale.isnan().any()
    assert module[0]._delayed_scale.tag == "kept"


@pytest.mark.gpu
def test_the_state_moves() -> None:
    module, twin = layers(), layers("cuda")
    step_of(module, data(0), RECIPE)
    twin.load_state_dict(module.state_dict())
    module.cuda()
    assert all(b.is_cuda for b in state(module).values())
    for step in range(1, 4):
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        step_of(compiled, data(step, "cuda"), RECIPE)
        step_of(twin, data(step, "cuda"), RECIPE)
        assert_same(state(module), state(twin))
    module.cpu()
    step_of(module, data(0), RECIPE)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_have_a_state_of_their_own(how) -> None:
    module = layers()
    train(module, range(2))
    if how == "deepcopy":
        twin = copy.deepcopy(module)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert list(twin.state_dict()) == list(module.state_dict())
    assert_same(state(twin), state(module))
    before = state(module)
    losses = train(twin, range(2, 4))
    assert_same(state(module), before)
    assert [*map(float, train(module, range(2, 4)))] == [*map(float, losses)]
    assert_same(state(twin), state(module))
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    step_of(compiled, data(4), RECIPE)
    step_of(module, data(4), RECIPE)
    assert_same(state(twin), state(module))


def test_modules_that_are_gone_are_forgotten() -> None:
    import gc

    from tejit.recipe import state as states

    gc.collect()
    before = len(states._states)
    module = layers()
    train(module, range(1))
    assert len(states._states) == before + 2
    del module
    gc.collect()
    assert len(states._states) == before
