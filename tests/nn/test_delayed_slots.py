"""Delayed scaling: a slot that collected nothing keeps its history and its scale, while its neighbours roll."""

import itertools

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import tejit
from tejit.recipe import DelayedScaling, Float8CurrentScaling
from tests.common import DEVICES
from tests.nn.test_delayed import assert_same, data, state

WAYS = ["eager", "compiled", "compiled with the context inside"]
#: A compiled case in the fast tier; the other in the full one.
SOME_WAYS = [WAYS[0], WAYS[1], pytest.param(WAYS[2], marks=pytest.mark.full)]
ALGORITHMS = {"max": 8.0, "most_recent": 2.0}


def modules(device: str = "cpu") -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "linear": tejit.Linear(32, 32, device=device),
        "norm_linear": tejit.LayerNormLinear(32, 32, device=device),
        "norm_mlp": tejit.LayerNormMLP(32, 64, device=device),
        "grouped": tejit.GroupedLinear(2, 32, 32, device=device),
    }


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if p.dim() == 2]


def set_amax(module: nn.Module, amax: float) -> None:
    with torch.no_grad():
        for weight in weights_of(module):
            weight.clamp_(-1, 1)[0, 0] = amax


def step(module, x, recipe, way="eager", first=None, compiled=None):
    """Forward and backward of a batch, with the module compiled or not; returns what is compiled for the next."""
    arguments = ([5, 7],) if isinstance(module, tejit.GroupedLinear) else ()
    if compiled is None:

        def region(x, first):
            if way != WAYS[2]:
                return module(x, *arguments, is_first_microbatch=first)
            with tejit.autocast(recipe=recipe):
                return module(x, *arguments, is_first_microbatch=first)

        compiled = region if way == "eager" else torch.compile(region, backend="aot_eager", fullgraph=True)
    if way == WAYS[2]:
        y = compiled(x, first)
    else:
        with tejit.autocast(recipe=recipe):
            y = compiled(x, first)
    y.sum().backward()
    return compiled


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "way", "algo"),
    [
        pytest.param(*case, marks=() if case[1] == "eager" or case == ("linear", WAYS[1], "max") else pytest.mark.full)
        for case in itertools.product(modules(), WAYS, ALGORITHMS)
    ],
)
def test_rolled_slot_the_weight_s_history_is_that_of_the_steps_that_quantized_it(name, way, algo, device) -> None:
    """8 microbatches a step and a history of 4: the weight's amax of three steps is still there after the third, where
    every microbatch rolled the inputs' slots."""
    torch._dynamo.reset()
    module, recipe = modules(device)[name], DelayedScaling(amax_history_len=4, amax_compute_algo=algo)
    compiled = None
    for amax in (8.0, 4.0, 2.0):
        set_amax(module, amax)
        for number in range(8):
            x = (torch.randn(12, 32) * (number + 1)).to(device)
            compiled = step(module, x, recipe, way, number == 0, compiled)
    count = len(weights_of(module))
    history, scale = module._delayed_amax_history, module._delayed_scale
    assert history[:4, 1::2].tolist() == [[row] * count for row in (0.0, 8.0, 4.0, 2.0)]
    assert scale[1::2].tolist() == [448 / ALGORITHMS[algo]] * count
    assert history[1:4, ::2].all()
    assert not history[4:].any()
    if name == "linear":  # its gradient is one in every microbatch
        assert module._delayed_grad_amax_history[:4, 0].tolist() == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("way", SOME_WAYS)
def test_rolled_slot_microbatches_in_one_context_are_one_step(way) -> None:
    """One roll for all of them, and the weight's slot collected in the first."""
    torch._dynamo.reset()
    recipe = DelayedScaling(amax_history_len=4)
    found = []
    for how in ("eager", way):
        module = modules()["linear"]

        def region(x, module=module):
            return [module(x * (n + 1), is_first_microbatch=n == 0) for n in range(3)]

        run = region if how == "eager" else torch.compile(region, backend="aot_eager", fullgraph=True)
        for number, amax in enumerate((8.0, 4.0)):
            set_amax(module, amax)
            with tejit.autocast(recipe=recipe):
                outs = run(torch.randn(12, 32, generator=torch.Generator().manual_seed(number)))
            sum(y.sum() for y in outs).backward()
        found.append(state(module))
        assert module._delayed_amax_history[:4, 1].tolist() == [0.0, 0.0, 8.0, 4.0]
        assert module._delayed_amax_history[:4, 0].count_nonzero() == 2
    assert_same(found[1], found[0])


@pytest.mark.parametrize("way", SOME_WAYS)
def test_rolled_slot_groups_without_rows_keep_their_history(way) -> None:
    torch._dynamo.reset()
    module, recipe = tejit.GroupedLinear(3, 32, 32), DelayedScaling(amax_history_len=3)

    def region(x, splits):
        return module(x, splits)

    def inside(x, splits):
        with tejit.autocast(recipe=recipe):
            return module(x, splits)

    run = inside if way == WAYS[2] else region
    if way != "eager":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    for splits in ([4, 4, 8], [8, 0, 8], [16, 0, 0], [0, 0, 16], [16, 0, 0]):
        x = torch.full((16, 32), float(max(splits)))
        with tejit.autocast(enabled=way != WAYS[2], recipe=recipe):
            y = run(x, splits)
        y.sum().backward()
    inputs = module._delayed_amax_history[:3, ::2]
    assert inputs.T.tolist() == [[0.0, 16.0, 16.0], [0.0, 0.0, 8.0], [0.0, 8.0, 16.0]]
    assert module._delayed_scale[::2].tolist() == [448 / 16, 448 / 8, 448 / 16]
    assert module._delayed_grad_amax_history[:3].T.tolist() == [[0.0, 1.0, 1.0], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
    seen = module._delayed_amax_history[:3, 1::2].count_nonzero(0).tolist()
    assert seen == [2, 1, 2]


@pytest.mark.parametrize("way", WAYS[:2])
def test_rolled_slot_calibrating_without_rows_collects_nothing_of_them(way) -> None:
    torch._dynamo.reset()
    module, recipe = tejit.GroupedLinear(2, 32, 32), DelayedScaling(amax_history_len=3)
    run = module if way == "eager" else torch.compile(module, backend="aot_eager", fullgraph=True)
    for splits in ([8, 8], [16, 0], [16, 0]):
        with torch.no_grad(), tejit.autocast(enabled=False, recipe=recipe, calibrating=True):
            run(torch.full((16, 32), float(max(splits))), splits)
    assert module._delayed_amax_history[:3, ::2].T.tolist() == [[0.0, 16.0, 16.0], [0.0, 0.0, 8.0]]
    assert module._delayed_scale[::2].tolist() == [448 / 16, 448 / 8]


@pytest.mark.parametrize("way", SOME_WAYS)
def test_rolled_slot_a_backward_that_does_not_reach_a_module(way) -> None:
    """Compiled, it computes zeros for what the loss does not depend on."""
    torch._dynamo.reset()
    first, second = modules()["linear"], modules()["linear"]
    recipe = DelayedScaling(amax_history_len=3)

    def region(x):
        return first(x), second(x)

    def inside(x):
        with tejit.autocast(recipe=recipe):
            return first(x), second(x)

    run = inside if way == WAYS[2] else region
    if way != "eager":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    for number, factor in enumerate((4.0, 0.0, 0.0, 0.0)):
        with tejit.autocast(enabled=way != WAYS[2], recipe=recipe):
            one, two = run(torch.randn(12, 32))
        (one.sum() + factor * two.sum() if factor else one.sum()).backward()
        rows = [0.0, *[1.0] * min(number + 1, 2)]
        assert first._delayed_grad_amax_history[:3, 0].tolist() == [*[0.0] * (3 - len(rows)), *rows]
        assert second._delayed_grad_amax_history[:3, 0].tolist() == [0.0, 0.0, 4.0]
    assert second._delayed_grad_scale.tolist() == [57344 / 4]


@pytest.mark.parametrize("way", SOME_WAYS)
def test_rolled_slot_an_mlp_that_trains_its_second_weight_alone(way) -> None:
    """The gradient of the first product is not asked for; the second's rolls, in a graph too."""
    torch._dynamo.reset()
    module, recipe = tejit.LayerNormMLP(32, 64), DelayedScaling(amax_history_len=3)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("fc2"))
    compiled = None
    for _ in range(3):
        compiled = step(module, torch.randn(12, 32), recipe, way, None, compiled)
    assert module._delayed_grad_amax_history[:3].T.tolist() == [[0.0, 0.0, 0.0], [0.0, 1.0, 1.0]]
    assert module._delayed_grad_scale.tolist() == [1.0, 57344.0]


@pytest.mark.parametrize("way", SOME_WAYS)
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
def test_rolled_slot_a_weight_that_came_quantized_and_gradients_in_high_precision(override, way) -> None:
    """The weight's slot collects nothing where the parameter is quantized, the gradient's nothing under an override."""
    torch._dynamo.reset()
    recipe = DelayedScaling(amax_history_len=3, backward_override=override)
    with tejit.quantized_model_init(recipe=recipe):
        module = tejit.Linear(32, 32)
    with torch.no_grad():
        module._delayed_scale[1], module._delayed_amax_history[2, 1] = 448 / 8, 8.0
        module._delayed_grad_scale[0], module._delayed_grad_amax_history[2, 0] = 57344 / 8, 8.0
    compiled = None
    for number in range(4):
        compiled = step(module, torch.full((12, 32), number + 1.0), recipe, way, None, compiled)
    assert module._delayed_amax_history[:3].T.tolist() == [[0.0, 3.0, 4.0], [0.0, 0.0, 8.0]]
    assert module._delayed_scale[1] == 448 / 8
    kept = override is not None
    assert module._delayed_grad_amax_history[:3, 0].tolist() == ([0.0, 0.0, 8.0] if kept else [0.0, 1.0, 1.0])
    assert module._delayed_grad_scale[0] == (57344 / 8 if kept else 57344.0)


def test_rolled_slot_products_that_the_recipe_delays_by_name() -> None:
    module = tejit.LayerNormMLP(32, 64, name="m")
    whole = DelayedScaling(amax_history_len=3)
    part = DelayedScaling(amax_history_len=3, overrides=(("*.fc1", Float8CurrentScaling()),))
    step(module, data(0)[:, :1].expand(5, 32).contiguous(), whole)
    before = state(module)
    for _ in range(4):
        step(module, torch.randn(12, 32), part)
    after = state(module)
    for name, value in after.items():
        columns = value.shape[-1] // 2
        assert torch.equal(value[..., :columns], before[name][..., :columns]), name
    assert after["_delayed_amax_history"][1:3, 2:].all()
    assert after["_delayed_grad_amax_history"][1:3, 1:].all()


def test_rolled_slot_an_empty_batch_collects_nothing() -> None:
    module, recipe = modules()["linear"], DelayedScaling(amax_history_len=3)
    step(module, torch.full((4, 32), 8.0), recipe)
    for _ in range(4):
        step(module, torch.zeros(0, 32, requires_grad=True), recipe)
    assert module._delayed_amax_history[:3, 0].tolist() == [0.0, 0.0, 8.0]
    assert module._delayed_scale[0] == 448 / 8
    assert module._delayed_amax_history[1:3, 1].all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_rolled_slot_recomputation_takes_the_scales_of_its_forward(reentrant) -> None:
    """Of the slots that rolled and of those that did not."""
    recipe = DelayedScaling(amax_history_len=4)
    found = []
    for on in (False, True):
        module, records = modules()["linear"], []
        for number in range(6):
            x = (torch.randn(12, 32, generator=torch.Generator().manual_seed(number)) * (number + 1)).requires_grad_()
            module.zero_grad()

            def run(x, first=number % 3 == 0, module=module):
                return module(x, is_first_microbatch=first)

            with tejit.autocast(recipe=recipe):
                y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=reentrant) if on else run(x)
            y.square().sum().backward()
            records.append({"y": y.detach(), "dgrad": x.grad, "wgrad": module.weight.grad.clone(), **state(module)})
            if number == 2:
                set_amax(module, 3.0)
        found.append(records)
    for want, got in zip(*found, strict=True):
        assert_same(got, want)
