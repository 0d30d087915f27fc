"""Row 76: a backward computes and accumulates the gradients that it is asked for, and no others. Row 99: what autograd
gets beside ``main_grad`` is zeros under deterministic algorithms."""

import itertools

import pytest
import torch
import torch._dynamo.testing

import tejit
from tejit.nn import products
from tejit.recipe import DelayedScaling, Float8CurrentScaling
from tests.nn.recipes import RECIPES
from tests.nn.test_quantized_weights import assert_same


class Grouped(tejit.GroupedLinear):
    def forward(self, x):
        return super().forward(x, [3, 0, x.shape[0] - 3])


MODULES = {
    "Linear": lambda **a: tejit.Linear(32, 48, **a),
    "LayerNormLinear": lambda **a: tejit.LayerNormLinear(32, 48, **a),
    "RMSNormLinear": lambda **a: tejit.LayerNormLinear(32, 48, bias=False, normalization="RMSNorm", **a),
    "LayerNormMLP": lambda **a: tejit.LayerNormMLP(32, 64, **a),
    "GroupedLinear": lambda **a: Grouped(3, 32, 48, **a),
}
RECIPE = {"current": Float8CurrentScaling(), "delayed": DelayedScaling(amax_history_len=4), "none": None}


def weights_of(module):
    return {name: p for name, p in module.named_parameters() if p.dim() == 2}


def built(name, dtype=torch.float32, **arguments):
    torch.manual_seed(0)
    module = MODULES[name](**arguments).to(dtype)
    if module.fuse_wgrad_accumulation:
        for weight in weights_of(module).values():
            weight.main_grad = torch.ones(weight.shape)
    return module


def points(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(8, 32, dtype=dtype, requires_grad=True)


def loss_of(function, x, recipe):
    with tejit.autocast(enabled=recipe is not None, recipe=recipe):
        return function(x).float().square().sum()


def untouched(module):
    assert not module._put_off
    for weight in weights_of(module).values():
        assert weight.grad is None
        if module.fuse_wgrad_accumulation:
            assert (weight.main_grad == 1).all()


SWITCHES = {
    "fused": {"fuse_wgrad_accumulation": True},
    "late": {"delay_wgrad_compute": True},
    "both": {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
}


@pytest.mark.parametrize("cast", [False, True], ids=["plain", "amp"])
@pytest.mark.parametrize("recipe", RECIPE)
@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("name", MODULES)
def test_76_a_weight_that_nobody_asked_for_is_left_alone(name, switches, recipe, cast) -> None:
    module, plain = built(name, **SWITCHES[switches]), built(name)
    for _ in range(2):
        x = points()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            oracles = [loss_of(plain, x, RECIPE[recipe]) for _ in range(3)]
            losses = [loss_of(module, x, RECIPE[recipe]) for _ in range(3)]

        def wanted(number, x=x, oracles=oracles):  # in the order of the backwards, each of which delayed scaling counts
            return torch.autograd.grad(oracles[number], [x, *plain.parameters()], retain_graph=True)

        assert torch.equal(torch.autograd.grad(losses[0], x, retain_graph=True)[0], wanted(0)[0])
        untouched(module)
        losses[1].backward(inputs=[x])
        assert torch.equal(x.grad, wanted(1)[0])
        untouched(module)
        found = torch.autograd.grad(losses[0], [x, *module.parameters()])  # returned, so not accumulated
        assert_same(dict(enumerate(found)), dict(enumerate(wanted(0))))
        untouched(module)
    want = wanted(2)
    losses[2].backward()  # for all
    for at, (weight, wgrad) in enumerate(zip(module.parameters(), want[1:], strict=True)):
        if weight.dim() != 2:
            assert torch.equal(weight.grad, wgrad), at
    if module._put_off:
        module.backward_dw()
    for weight, wgrad in zip(module.parameters(), want[1:], strict=True):
        if weight.dim() == 2:
            got = weight.main_grad - 1 if module.fuse_wgrad_accumulation else weight.grad
            torch.testing.assert_close(got, wgrad, rtol=1e-2 if cast else 1e-4, atol=1e-4 * wgrad.abs().max())


@pytest.mark.parametrize("name", MODULES)
def test_76_of_several_weights_the_one_that_is_asked_for(name) -> None:
    """``backward(inputs=[weight])`` accumulates; the others, and ``x``, get nothing."""
    plain, module = built(name), built(name, fuse_wgrad_accumulation=True)
    loss_of(plain, points(), RECIPE["current"]).backward()
    for key, weight in weights_of(module).items():
        for other in weights_of(module).values():
            other.main_grad = torch.ones(other.shape)
        x = points()
        loss_of(module, x, RECIPE["current"]).backward(inputs=[weight])
        assert x.grad is None
        for again, other in weights_of(module).items():
            want = plain.get_parameter(key).grad + 1 if other is weight else torch.ones(other.shape)
            torch.testing.assert_close(other.main_grad, want, msg=f"{key}: {again}")


@pytest.mark.parametrize("recipe", ["current", pytest.param("delayed", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("name", "layers"), [("Linear", 1), ("LayerNormLinear", 1), ("LayerNormMLP", 2), ("GroupedLinear", 3)]
)
def test_76_products_that_nobody_asked_for_are_not_computed(name, layers, recipe, monkeypatch) -> None:
    module, calls = built(name), []
    for product in ("dgrad", "wgrad"):
        real = getattr(products, product)
        monkeypatch.setattr(products, product, lambda *a, n=product, r=real: calls.append(n) or r(*a))

    def of(inputs):
        x = points()
        calls.clear()
        loss = loss_of(module, x, RECIPE[recipe])
        torch.autograd.grad(loss, [x] if inputs is None else inputs)
        return calls.count("dgrad"), calls.count("wgrad")

    parameters, shapes = dict(module.named_parameters()), list(weights_of(module))
    dgrads = 2 if name == "GroupedLinear" else layers  # a group without rows has none
    for _ in range(2):  # the second call of a Linear is a ready one
        assert of(None) == (dgrads, 0)
        first, last = parameters[shapes[0]], parameters[shapes[-1]]
        assert of([last]) == (0, 1)
        assert of([first]) == (layers - 1 if name == "LayerNormMLP" else 0, 1)
        bias = next(p for key, p in reversed(parameters.items()) if "bias" in key)
        assert of([bias]) == (0, 0)


def test_76_delayed_scaling_collects_what_it_collected() -> None:
    """The gradient's amax, and a roll, of each backward that quantizes ``grad_output``, whatever it was asked for."""
    histories = []
    for inputs in (lambda x, m: None, lambda x, m: [x], lambda x, m: [m.weight]):
        module = built("Linear")
        for step in range(3):
            x = points()
            (loss_of(module, x, RECIPE["delayed"]) * (step + 1)).backward(inputs=inputs(x, module))
        histories.append((module._delayed_grad_amax_history.clone(), module._delayed_grad_scale.clone()))
    for history, scale in histories[1:]:
        assert torch.equal(history, histories[0][0])
        assert torch.equal(scale, histories[0][1])
    assert histories[0][0].count_nonzero() > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_76_checkpoints_ask_for_what_their_backward_asks_for(reentrant) -> None:
    module, x = built("LayerNormMLP", fuse_wgrad_accumulation=True), points()
    loss = loss_of(
        lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant), x, RECIPE["current"]
    )
    if reentrant:  # torch refuses inputs= there
        loss.backward()
        assert all((weight.main_grad != 1).any() for weight in weights_of(module).values())
    else:
        torch.autograd.grad(loss, x)
        untouched(module)


# -- in a graph -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", [None, True], ids=["added", "overwritten"])
@pytest.mark.parametrize(
    ("name", "backend", "recipe"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.full)
        for FAST in [{("Linear", "aot_eager", "current"), ("LayerNormMLP", "aot_eager", "none")}]
        for case in itertools.product(["Linear", "LayerNormLinear", "LayerNormMLP"], ["aot_eager", "inductor"], RECIPE)
    ],
)
def test_76_compiled(name, backend, recipe, first) -> None:
    """A graph's backward computes all, and adds into ``main_grad`` what it was asked for."""
    torch._dynamo.reset()
    module, plain = built(name, fuse_wgrad_accumulation=True), built(name)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(module, backend=counter, fullgraph=True)

    def call(x):
        return compiled(x, is_first_microbatch=first)

    x = points()
    want = torch.autograd.grad(loss_of(plain, x, RECIPE[recipe]), [x, *plain.parameters()])
    (dgrad,) = torch.autograd.grad(loss_of(call, x, RECIPE[recipe]), x)
    torch.testing.assert_close(dgrad, want[0])
    untouched(module)
    if recipe == "delayed":
        assert module._delayed_grad_amax_history.count_nonzero() > 0
        return  # scales are others by now
    loss_of(call, x, RECIPE[recipe]).backward(inputs=[x])
    untouched(module)
    weights = weights_of(module)
    key = list(weights)[-1]
    loss_of(call, x, RECIPE[recipe]).backward(inputs=[weights[key]])
    loss_of(call, x, RECIPE[recipe]).backward()
    for (other, weight), wgrad in zip(module.named_parameters(), want[1:], strict=True):
        if weight.dim() == 2:
            times = 1 if first or other != key else 2
            torch.testing.assert_close(
                weight.main_grad, times * wgrad + (0 if first else 1), rtol=1e-4, atol=1e-4 * wgrad.abs().max().item()
            )
    assert counter.frame_count == 1


@pytest.mark.parametrize("recipe", ["delayed"])
def test_76_a_compiled_backward_of_some_rolls_delayed_scaling_too(recipe) -> None:
    torch._dynamo.reset()
    found = []
    for compiling in (False, True):
        module = built("Linear")
        function = torch.compile(module, backend="aot_eager", fullgraph=True) if compiling else module
        for step in range(3):
            x = points()
            torch.autograd.grad(loss_of(function, x, RECIPES[recipe]) * (step + 1), x)
        found.append((module._delayed_grad_amax_history.clone(), module._delayed_grad_scale.clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


# -- row 99 -----------------------------------------------------------------------------------------------------
@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    filled, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        True,
    )
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize("recipe", RECIPE)
@pytest.mark.parametrize("name", MODULES)
def test_99_the_gradient_beside_main_grad_is_zeros(name, recipe, deterministic) -> None:
    module = built(name, fuse_wgrad_accumulation=True)
    for weight in weights_of(module).values():
        weight.grad_added_to_main_grad = False
    for _ in range(2):
        loss_of(module, points(), RECIPE[recipe]).backward()
    for weight in weights_of(module).values():
        assert weight.grad_added_to_main_grad
        assert (weight.grad == 0).all()
        assert weight.main_grad.isfinite().all()


@pytest.mark.parametrize("recipe", RECIPE)
def test_99_compiled(recipe, deterministic) -> None:
    torch._dynamo.reset()
    module = built("Linear", fuse_wgrad_accumulation=True)
    module.weight.grad_added_to_main_grad = False
    loss_of(torch.compile(module, backend="aot_eager", fullgraph=True), points(), RECIPE[recipe]).backward()
    assert module.weight.grad is None or (module.weight.grad == 0).all()
    assert module.weight.main_grad.isfinite().all()
    assert (module.weight.main_grad != 1).any()
