"""Delayed scaling in Linear, step by step against the rule written in numpy; when it rolls and when it does not."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tejit
from tejit.recipe import DelayedScaling, Float8CurrentScaling, Format
from tests.common import DEVICES, DTYPES, short
from tests.nn.delayed_rule import Watched

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def layers(device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = ((31, 40), (40, 17))
    first, second = [tejit.Linear(i, o, device=device, dtype=dtype) for i, o in sizes]
    return nn.Sequential(first, nn.GELU(), second)


def watch(module: nn.Sequential, length: int = 1024, backward: torch.dtype = E5M2, **how) -> list[Watched]:
    return [Watched(module[i], length, E4M3, backward, **how) for i in (0, 2)]


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Everything of the state but the scale before the last roll."""
    return {name: b.clone() for name, b in module.named_buffers() if "_delayed" in name and "previous" not in name}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want)
    for name in want:
        assert torch.equal(got[name], want[name]), name


def data(step: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    factor = (1.0, 30.0, 0.01, 2.0, 2.0)[step % 5]
    return (torch.randn(5, 31, generator=generator) * factor).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    ("fp8_format", "length", "margin", "algo"),
    [
        (Format.HYBRID, 5, 0, "max"),
        (Format.HYBRID, 2, 3, "max"),
        (Format.HYBRID, 1, 0, "max"),
        (Format.HYBRID, 2, -1, "most_recent"),
        (Format.E4M3, 5, 1, "most_recent"),
        (Format.E4M3, 1, 0, "most_recent"),
        (Format.E4M3, 1024, 0, "max"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_state_follows_the_rule_step_by_step(fp8_format, length, margin, algo, dtype, how, device, need_kernels):
    if how == "kernels":
        need_kernels(device)
    module = layers(device, dtype)
    recipe = DelayedScaling(margin, fp8_format, length, algo)
    watched = watch(module, length, E5M2 if fp8_format is Format.HYBRID else E4M3, margin=margin, algo=algo)
    with tejit.backend(how):
        for step in range(7):
            with tejit.autocast(recipe=recipe):
                y = module(data(step, device, dtype))
            for layer in watched:
                layer.forward.roll()
                layer.check(f"step {step}, after autocast:")
            y.float().square().sum().backward()
            for layer in watched:
                layer.backward.roll()
                layer.check(f"step {step}, after backward:")
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(1.1)


@pytest.mark.parametrize("device", DEVICES)
def test_the_products_use_the_scale_of_earlier_steps(device) -> None:
    """Forward, dgrad and wgrad from operands cast with the scales as they stood before the step."""
    torch.manual_seed(0)
    layer = tejit.Linear(48, 32, device=device)
    for step in range(4):
        x = (torch.randn(16, 48, device=device) * 2.0**step).requires_grad_()
        grad = torch.randn(16, 32, device=device) * 0.01
        scales = torch.cat([layer._delayed_scale, layer._delayed_grad_scale]).tolist()
        layer.zero_grad()
        with tejit.autocast(recipe=DelayedScaling(amax_history_len=2)):
            y = layer(x)
        y.backward(grad)

        def cast(tensor, scale, dtype):
            largest = torch.finfo(dtype).max
            codes = (tensor.detach() * torch.tensor(scale)).clamp(-largest, largest).to(dtype)
            return codes.double() / scale

        q, w, g = (cast(t, s, d) for t, s, d in zip((x, layer.weight, grad), scales, (E4M3, E4M3, E5M2), strict=True))
        for got, want in ((y, q @ w.t() + layer.bias.double()), (x.grad, g @ w), (layer.weight.grad, g.t() @ q)):
            # 22 bits are more than the products need and hardware that accumulates fast keeps about 13.
            tolerance = 2.0**-20 if device == "cpu" else 2.0**-9
            assert (got.double() - want).abs().max() <= tolerance * want.abs().max(), step
    assert scales != [1.0, 1.0, 1.0]


def step_of(module: nn.Module, x: torch.Tensor, recipe) -> None:
    with tejit.autocast(recipe=recipe):
        y = module(x)
    y.square().sum().backward()


def test_a_module_that_did_not_run_is_left_alone() -> None:
    module, recipe = layers(), DelayedScaling(amax_history_len=3)
    step_of(module, data(0), recipe)
    before = state(module[2])
    with tejit.autocast(recipe=recipe):
        y = module[0](data(1))
    y.sum().backward()
    assert_same(state(module[2]), before)
    # Ran, but no gradient came: its gradient slots are left alone.
    before = state(module)
    with tejit.autocast(recipe=recipe):
        module(data(2))
    after = state(module)
    for name, value in after.items():
        if "grad" in name or "history" in name:  # the largest of three steps, the scale, may be the same
            assert torch.equal(value, before[name]) == ("grad" in name), name


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("order", ["autocast inside", "autocast outside", "in a training pass"])
def test_evaluation_leaves_the_state_alone(order, quiet) -> None:
    module, twin, recipe = layers(), layers(), DelayedScaling(amax_history_len=3)
    for step in range(3):
        step_of(module, data(step), recipe)
        with tejit.autocast(recipe=recipe):
            y = twin(data(step))
            if order == "in a training pass":
                with quiet():
                    twin(data(1) * 1000)
        if order == "autocast inside":
            with quiet(), tejit.autocast(recipe=recipe):
                twin(data(1) * 1000)
        elif order == "autocast outside":
            with tejit.autocast(recipe=recipe), quiet():
                twin(data(1) * 1000)
        y.square().sum().backward()
        assert_same(state(twin), state(module))


def test_a_module_used_twice_rolls_once() -> None:
    torch.manual_seed(0)
    layer, recipe = tejit.Linear(31, 31), DelayedScaling(amax_history_len=4)
    watched = Watched(layer, 4, E4M3, E5M2)
    for step in range(4):
        with tejit.autocast(recipe=recipe):
            y = layer(layer(data(step)))
        watched.forward.roll()
        watched.check()
        y.square().sum().backward()
        watched.backward.roll()
        watched.check(f"step {step}")


def test_several_backwards_and_gradients_by_autograd_grad() -> None:
    """Each backward that wrote gradient slots rolls them at its end, also one that asks for few gradients."""
    layer, recipe = tejit.Linear(31, 17), DelayedScaling(amax_history_len=4)
    watched = Watched(layer, 4, E4M3, E5M2)
    x = data(0).requires_grad_()
    with tejit.autocast(recipe=recipe):
        first, second = layer(x), layer(x * 2)
    watched.forward.roll()
    first.square().sum().backward()
    watched.backward.roll()
    watched.check("first")
    torch.autograd.grad(second.square().sum(), x)
    watched.backward.roll()
    watched.check("second")


def test_a_failed_step_leaves_a_state_that_goes_on() -> None:
    layer, recipe = tejit.Linear(31, 17), DelayedScaling(amax_history_len=4)
    watched = Watched(layer, 4, E4M3, E5M2)

    def fails(grad):
        raise RuntimeError("on purpose")

    x = data(0).requires_grad_()
    with tejit.autocast(recipe=recipe):
        inside = x * 1
        inside.register_hook(fails)
        y = layer(inside)
    watched.forward.roll()
    with pytest.raises(RuntimeError, match="on purpose"):
        y.square().sum().backward()

    def forward_that_fails():
        with tejit.autocast(recipe=recipe):
            fails(layer(data(0)))

    with pytest.raises(RuntimeError, match="on purpose"):
        forward_that_fails()
    for step in (1, 2):  # what the failed passes collected counts with the next one
        with tejit.autocast(recipe=recipe):
            y = layer(data(step))
        watched.forward.roll()
        y.square().sum().backward()
        watched.backward.roll()
        watched.check(f"step {step}")


class OwnCheckpoint(torch.autograd.Function):
    """Reentrant activation checkpointing as other libraries have it (DeepSpeed, Megatron)."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


@pytest.mark.parametrize("uses", ["once", "twice", "checkpointed and not", "nested"])
@pytest.mark.parametrize("reentrant", [True, False, "own"])
def test_checkpointing_is_equal_to_none_to_the_bit(reentrant, uses) -> None:
    """Recomputation takes the scale of the forward that it repeats and counts nothing, wherever backward is called."""
    recipe = DelayedScaling(amax_history_len=3)

    def model():
        torch.manual_seed(0)
        return nn.Sequential(tejit.Linear(31, 31), nn.GELU(), tejit.Linear(31, 31))

    def region(module, x, on):
        if on and reentrant == "own":
            return OwnCheckpoint.apply(module, x)
        return checkpoint(module, x, use_reentrant=reentrant) if on else module(x)

    def forward(module, x, on):
        if uses == "nested":
            return region(lambda z: region(module, z, on), x, on)
        x = region(module, x, on)
        return x if uses == "once" else region(module, x, on and uses == "twice")

    found = []
    for on in (False, True):
        module, records = model(), []
        for step in range(5):
            x = data(step).requires_grad_()
            module.zero_grad()
            with tejit.autocast(recipe=recipe):
                y = forward(module, x, on)
                if step % 2:
                    y.square().sum().backward()
            if not step % 2:
                with torch.no_grad(), tejit.autocast(recipe=recipe):
                    module(data(1) * 100)  # an evaluation before the backward
                y.square().sum().backward()
            records.append({"y": y.detach(), "dgrad": x.grad, **state(module)})
            records[-1].update({name: p.grad.clone() for name, p in module.named_parameters()})
        found.append(records)
    for want, got in zip(*found, strict=True):
        assert_same(got, want)


def test_an_evaluation_of_checkpointed_regions_is_an_evaluation() -> None:
    module, recipe = layers(), DelayedScaling(amax_history_len=3)
    step_of(module, data(0), recipe)
    before = state(module)
    with torch.no_grad(), tejit.autocast(recipe=recipe):
        for x in (data(1), data(1).requires_grad_()):
            for reentrant in (True, False):
                checkpoint(module, x, use_reentrant=reentrant)
            OwnCheckpoint.apply(module, x)
    assert_same(state(module), before)


def test_nested_contexts_roll_at_the_outermost_exit() -> None:
    module, recipe = layers(), DelayedScaling(amax_history_len=3)
    first, second = watch(module, 3)
    with tejit.autocast(recipe=Float8CurrentScaling()):
        with tejit.autocast(recipe=recipe):
            x = module[0](data(0))
        with tejit.autocast(enabled=False):
            x = nn.functional.gelu(x)
        assert module[0]._delayed_scale.tolist() == [1.0, 1.0]
        x = module[2](x)  # under current scaling
    first.forward.roll()
    first.check()
    assert not state(module[2])["_delayed_amax_history"].any()
    x.square().sum().backward()
    first.backward.roll()
    first.check()
    assert not state(module[2])["_delayed_grad_amax_history"].any()
    del second


def test_as_an_override_and_with_overrides() -> None:
    module = tejit.name_modules(layers())
    delayed = DelayedScaling(amax_history_len=3)
    for recipe, ran, not_ran in (
        (Float8CurrentScaling(overrides=(("2", delayed),)), 2, 0),
        (DelayedScaling(amax_history_len=3, overrides=(("0", delayed), ("2", None))), 0, 2),
    ):
        before = state(module)
        step_of(module, data(0), recipe)
        after = state(module)
        for name in before:
            assert torch.equal(before[name], after[name]) == name.startswith(f"{not_ran}."), name
        assert ran != not_ran


def test_threads_roll_what_they_ran() -> None:
    """Two threads in the middle of a pass each: one's exit does not roll the other's modules."""
    recipe = DelayedScaling(amax_history_len=3)
    modules, twins = [layers() for _ in range(2)], [layers() for _ in range(2)]
    both_inside, errors = threading.Barrier(2, timeout=60), []

    def work(index: int) -> None:
        try:
            for step in range(3):
                with tejit.autocast(recipe=recipe):
                    y = modules[index](data(step + index))
                    both_inside.wait()
                    if index:
                        both_inside.wait()  # the other one has left its context
                        assert modules[index][0]._delayed_amax_history[0].any()
                if not index:
                    both_inside.wait()
                y.square().sum().backward()
        except BaseException as error:
            errors.append(error)
            both_inside.abort()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for index, twin in enumerate(twins):
        for step in range(3):
            step_of(twin, data(step + index), recipe)
        assert_same(state(modules[index]), state(twin))


@pytest.mark.parametrize("grad", [True, False])
def test_calibrating_computes_in_high_precision_and_fills_the_state(grad) -> None:
    module, recipe = layers(), DelayedScaling(amax_history_len=3)
    watched = watch(module, 3)
    for step in range(3):
        with torch.set_grad_enabled(grad):
            with tejit.autocast(enabled=False, recipe=recipe, calibrating=True):
                y = module(data(step))
            if not grad:
                hidden = nn.functional.gelu(module[0](data(step)))
                for layer, x in zip(watched, (data(step), hidden), strict=True):
                    layer.forward.see(0, x)
                    layer.forward.see(1, layer.layer.weight)
            want = module[2](nn.functional.gelu(module[0](data(step))))
        assert torch.equal(y, want)
        for layer in watched:
            layer.forward.roll()
            layer.check(f"step {step}")
    # Current scaling has nothing to calibrate, and without `calibrating` nothing is collected.
    before = state(module)
    with tejit.autocast(enabled=False, recipe=Float8CurrentScaling(), calibrating=True):
        module(data(0))
    with tejit.autocast(enabled=False, recipe=recipe):
        module(data(0))
    assert_same(state(module), before)


@pytest.mark.parametrize("frozen", ["weight", "input", "both"])
def test_frozen_weights_and_inputs(frozen) -> None:
    layer, recipe = tejit.Linear(31, 17), DelayedScaling(amax_history_len=3)
    watched = Watched(layer, 3, E4M3, E5M2)
    layer.weight.requires_grad_(frozen == "input")
    x = data(0).requires_grad_(frozen == "weight")
    with tejit.autocast(recipe=recipe):
        y = layer(x)
    y.square().sum().backward()
    watched.forward.roll()
    if frozen == "both":  # the bias alone needs no quantized gradient
        watched.backward.history[:] = 0
    else:
        watched.backward.roll()
    watched.check()


def test_an_empty_batch() -> None:
    layer, recipe = tejit.Linear(31, 17), DelayedScaling(amax_history_len=3)
    x = torch.zeros(0, 31, requires_grad=True)
    with tejit.autocast(recipe=recipe):
        y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 17)
    assert layer._delayed_scale[0] == 1
    assert layer._delayed_scale[1] == 448 / layer.weight.abs().max()


def test_what_linear_can_do_besides() -> None:
    """The workspace counts the weight where it quantizes it; the input cannot be quantized again after the roll."""
    layer, recipe = tejit.Linear(31, 17), DelayedScaling(amax_history_len=4)
    watched = Watched(layer, 4, E4M3, E5M2)
    for first in (True, False, False):
        with tejit.autocast(recipe=recipe):
            y = layer(data(int(first)), is_first_microbatch=first)
        if not first:
            watched.forward.history[0, 1] = 0
        watched.forward.roll()
        y.square().sum().backward()
        watched.backward.roll()
        watched.check(f"first {first}")
    original = tejit.Linear(31, 17, save_original_input=True)
    with (
        pytest.raises(ValueError, match="save_original_input=True and delayed scaling do not go together"),
        tejit.autocast(recipe=recipe),
    ):
        original(data(0))
    overridden = DelayedScaling(amax_history_len=4, backward_override="dequantized")
    before = layer._delayed_grad_scale.clone()
    with tejit.autocast(recipe=overridden):
        y = layer(data(3))
    y.square().sum().backward()
    assert torch.equal(layer._delayed_grad_scale, before)
    assert layer._delayed_grad_amax_history[3] != 0
