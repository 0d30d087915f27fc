"""Delayed scaling in modules with norms: the state and the results of the same parts, each a module of its own."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import tejit
from tejit import LayerNormMLP, TransformerLayer
from tejit.recipe import DelayedScaling, Float8CurrentScaling
from tests.common import DEVICES
from tests.nn.bounds import bounds, relative_error
from tests.nn.test_norm_modules import Parts, chained
from tests.nn.twins import made, randomised, results

SCALES = ("_delayed_scale", "_delayed_grad_scale", "_delayed_amax_history", "_delayed_grad_amax_history")


def batch(module, step, device="cpu"):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 64, generator=generator).to(device) * (step + 1)
    out = 64 if isinstance(module, LayerNormMLP) else 96
    return x, torch.randn(24, out, generator=generator).to(device) / (step + 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["linear", "swiglu", "qgelu", "qgeglu", "sreglu", "glu"])
def test_state_and_results_are_those_of_the_parts(kind, device) -> None:
    """Over five steps of data whose range changes, with an evaluation in between."""
    module, twin = made(kind, 64, 96, device=device)
    parts, recipe = Parts(module), DelayedScaling(amax_history_len=3)
    for step in range(5):
        x, grad = batch(module, step, device)
        with tejit.autocast(recipe=recipe):
            got = results(module, module, x, grad)
        with tejit.autocast(recipe=recipe):
            want = results(parts, module, x, grad)
        with torch.no_grad(), tejit.autocast(recipe=recipe):
            module(100 * x)
        for what, value in want.items():
            # a sum over 24 rows shows one code more, where the function's derivative is small
            bar = 0.01 if kind == "glu" else 0.005
            assert relative_error(got[what], value) < bar, f"step {step}: {what}"
        for name in SCALES:
            mine, theirs = getattr(module, name), [getattr(layer, name) for layer in parts.layers]
            # the norm's last bits turn a few codes of fc1's input, and so move the gradient that it gets
            moved = kind != "linear" and "grad" in name
            torch.testing.assert_close(mine, torch.cat(theirs, -1), rtol=1e-3 if moved else 1e-5, atol=0)
    assert (module._delayed_scale != 1).all()
    assert (module._delayed_grad_scale != 1).all()
    # The scales fit by now.
    plain = results(lambda x: twin(module, x), module, x, grad)
    one = bounds("delayed", x.dtype)
    bound = one if kind == "linear" else chained(kind, "delayed", x.dtype)
    for what in ("y", "dgrad"):
        assert relative_error(got[what], plain[what]) < bound[what], what


@pytest.mark.parametrize("reentrant", [True, False, "itself"])
def test_recomputation_changes_neither_results_nor_state(reentrant) -> None:
    found = []
    for checkpointed in (False, True):
        module, _ = made("gelu", 64, 96)
        module.checkpoint = checkpointed and reentrant == "itself"
        steps = []
        for step in range(4):
            x, grad = batch(module, step)

            def run(x, module=module, checkpointed=checkpointed):
                with tejit.autocast(recipe=DelayedScaling()):
                    if checkpointed and reentrant != "itself":
                        return checkpoint(module, x, use_reentrant=reentrant)
                    return module(x)

            x = x.requires_grad_()
            module.zero_grad()
            run(x).backward(grad)
            steps += [x.grad, *[p.grad for p in module.parameters()]]
        found.append([*steps, *[getattr(module, name) for name in SCALES]])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_only_the_product_under_the_recipe_has_state() -> None:
    module, _ = made("gelu", 64, 96, name="m")
    recipe = Float8CurrentScaling(overrides=(("*.fc2", DelayedScaling()),))
    for step in range(2):
        x, grad = batch(module, step)
        with tejit.autocast(recipe=recipe):
            results(module, module, x, grad)
    assert (module._delayed_scale[:2] == 1).all()
    assert (module._delayed_scale[2:] != 1).all()
    assert module._delayed_grad_scale[0] == 1
    assert module._delayed_grad_scale[1] != 1


@pytest.mark.parametrize("kind", ["linear", "gelu"])
def test_calibrating_sees_every_operand(kind) -> None:
    module, twin = made(kind, 64, 96)
    x, _ = batch(module, 0)
    with tejit.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        assert torch.equal(module(x), twin(module, x))
    reference, _ = made(kind, 64, 96)
    with tejit.autocast(recipe=DelayedScaling()):
        reference(x)
    torch.testing.assert_close(module._delayed_scale, reference._delayed_scale, rtol=0.1, atol=0)


def transformer() -> TransformerLayer:
    return randomised(TransformerLayer(64, 96, 4, 2, hidden_dropout=0.0, attention_dropout=0.0))


@pytest.mark.parametrize(
    "make",
    [lambda: made("swiglu", 64, 96)[0], pytest.param(transformer, marks=pytest.mark.full)],
    ids=["mlp", "transformer"],
)
def test_the_state_moves_in_one_graph_as_in_eager(make) -> None:
    torch._dynamo.reset()
    module, other = make(), make()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    for step in range(4):
        x, grad = batch(module, step)
        if isinstance(module, TransformerLayer):
            x, grad = (torch.randn(2, 12, 64) * (step + 1) for _ in range(2))
        found = []
        for function, holder in ((module, module), (compiled, other)):
            holder.zero_grad()
            given = x.clone().requires_grad_()
            with tejit.autocast(recipe=DelayedScaling()):
                y = function(given)
            y.backward(grad)
            found.append([y, given.grad, *[p.grad for p in holder.parameters()]])
        for number, (want, got) in enumerate(zip(*found, strict=True)):
            assert torch.equal(got, want), f"step {step}: {number}"
        states = [[b for _, b in holder.named_buffers()] for holder in (module, other)]
        for want, got in zip(*states, strict=True):
            assert torch.equal(got, want)
    assert len(states[0]) >= len(SCALES)
    assert counter.frame_count == 1
