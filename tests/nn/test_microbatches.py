"""Linear over several batches between two steps: the weight quantized once, its gradient accumulated or put off."""

import copy
import itertools
import pickle

import pytest
import torch
import torch._dynamo.testing

import tejit
from tejit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.common import DEVICES, DTYPES, short
from tests.nn.bounds import STATELESS
from tests.nn.test_linear_bounds import made
from tests.nn.test_quantized_weights import RECIPES, assert_same, step

torch._dynamo.config.cache_size_limit = 64


def layer(device="cpu", dtype=torch.float32, **arguments) -> tejit.Linear:
    torch.manual_seed(0)
    return tejit.Linear(61, 45, device=device, dtype=dtype, **arguments)  # sizes that every small block pads


def batches(count, device="cpu", dtype=torch.float32):
    made = [
        (torch.randn(19, 61, device=device, dtype=dtype), torch.randn(19, 45, device=device, dtype=dtype))
        for _ in range(count)
    ]
    return list(enumerate(made))


def update(module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)


# -- the workspace ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STATELESS)
def test_the_cached_weight_equals_the_weight_quantized_each_time(name, device) -> None:
    recipe, module = made(name), layer(device)
    with tejit.autocast(recipe=recipe):
        for _ in range(2):
            for number, (x, grad) in batches(3, device):
                torch.manual_seed(number)  # stochastic rounding of gradients
                want = step(module, module, x, grad)
                torch.manual_seed(number)
                assert_same(step(module, module, x, grad, is_first_microbatch=number == 0), want)
            update(module)


def test_the_weight_is_quantized_in_the_first_microbatch_alone() -> None:
    module, x = layer(), torch.randn(4, 61)
    with tejit.autocast(), torch.no_grad():
        first = module(x, is_first_microbatch=True)
        update(module)
        bias = module.bias.detach()
        stale = module(x, is_first_microbatch=False)
        fresh = module(x, is_first_microbatch=True)
        assert torch.equal(fresh, module(x))
    assert not torch.allclose(stale - bias, fresh - bias, atol=0.1)
    assert first.shape == stale.shape


def test_a_workspace_made_in_inference_mode_serves_training() -> None:
    module, (x, grad) = layer(), batches(1)[0][1]
    with tejit.autocast():
        want = step(module, module, x, grad)
        with torch.inference_mode():
            module(x, is_first_microbatch=True)
        assert_same(step(module, module, x, grad, is_first_microbatch=True), want)
        with torch.inference_mode():
            module(x, is_first_microbatch=False)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()])
def test_false_after_a_true_of_fake_tensors_is_an_error(recipe) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    module, x = layer(), torch.randn(4, 61)
    with tejit.autocast(recipe=recipe):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            module(mode.from_tensor(x), is_first_microbatch=True)
            assert isinstance(module(mode.from_tensor(x), is_first_microbatch=False), FakeTensor)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="is_first_microbatch=True"):
                module(x, is_first_microbatch=False)
        want = module(x, is_first_microbatch=True)
        assert torch.equal(module(x, is_first_microbatch=False), want)


def test_a_true_in_a_transform_of_functions_fills_nothing_for_calls_outside() -> None:
    module, x = layer().requires_grad_(False), torch.randn(4, 61)
    with tejit.autocast(recipe=Float8CurrentScaling()):
        slope = torch.func.grad(lambda scale: (module(x, is_first_microbatch=True) * scale).sum())(torch.ones(()))
        want = module(x)
        assert torch.allclose(slope, want.sum(), rtol=1e-4)
        with pytest.raises(RuntimeError, match="is_first_microbatch=True"):
            module(x, is_first_microbatch=False)
        assert torch.equal(module(x, is_first_microbatch=True), want)
        assert torch.equal(module(x, is_first_microbatch=False), want)


def test_false_without_true_is_an_error() -> None:
    module, x = layer(), torch.randn(4, 61)
    with tejit.autocast():
        with pytest.raises(RuntimeError, match="is_first_microbatch=True"):
            module(x, is_first_microbatch=False)
        with torch.no_grad():
            module(x, is_first_microbatch=True)
            module(x, is_first_microbatch=False)
        with pytest.raises(RuntimeError, match="is_first_microbatch=True"):  # it lacks what dgrad needs
            module(x.requires_grad_(), is_first_microbatch=False)
        module(x, is_first_microbatch=True)
        with torch.no_grad():
            module(x, is_first_microbatch=False)
    for recipe in (Float8BlockScaling(), Float8CurrentScaling(amax_epsilon=1.0)):  # another recipe, if only in a field
        with tejit.autocast(recipe=recipe), pytest.raises(RuntimeError, match="is_first_microbatch=True"):
            module(x, is_first_microbatch=False)
    with tejit.autocast(enabled=False):
        module(x, is_first_microbatch=False)  # nothing is quantized


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16).float(), lambda m: m.half().float()])
def test_the_workspace_is_no_state_and_keeps_its_bytes(move) -> None:
    module, x = layer(), torch.randn(4, 61)
    with tejit.autocast():
        want = module(x, is_first_microbatch=True)
        assert set(module.state_dict()) == {"weight", "bias"}
        bias = module.bias.detach().clone()
        move(module)
        got = module(x, is_first_microbatch=False)
        assert torch.equal(got - module.bias, want - bias) or torch.allclose(got, want, atol=1e-2)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            update(twin)
            twin(x, is_first_microbatch=True)
            assert torch.equal(module(x, is_first_microbatch=False), got)
            assert not torch.equal(twin(x, is_first_microbatch=False), got)


@pytest.mark.gpu
def test_the_workspace_moves_with_the_module() -> None:
    module, x = layer(), torch.randn(4, 61)
    with tejit.autocast():
        want = module(x, is_first_microbatch=True)
        got = module.cuda()(x.cuda(), is_first_microbatch=False)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "warm"),
    [
        pytest.param(*case, marks=() if case == ("current", False) else pytest.mark.full)
        for case in itertools.product(RECIPES, (False, True))
    ],
)
def test_two_graphs(name, warm) -> None:
    """One that fills the workspace and one that uses it, whether eager calls allocated it or tracing did."""
    recipe, module = RECIPES[name], layer()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with tejit.autocast(recipe=recipe):
        if warm:
            module(torch.randn(2, 61, requires_grad=True), is_first_microbatch=True)
        for _ in range(3):
            for number, (x, grad) in batches(3):
                want = step(module, module, x, grad)
                assert_same(step(compiled, module, x, grad, is_first_microbatch=number == 0), want)
            update(module)
    assert counter.frame_count == 2


def test_forwards_may_run_ahead_of_backwards() -> None:
    module = layer()
    found = {}
    for cached in (False, True):
        module.zero_grad()
        with tejit.autocast():
            torch.manual_seed(1)
            pairs = [
                (module(x, is_first_microbatch=number == 0 if cached else None), grad)
                for number, (x, grad) in batches(3)
            ]
        for y, grad in pairs:
            y.backward(grad)
        found[cached] = module.weight.grad
    assert torch.equal(found[True], found[False])


FLAG = "grad_added_to_main_grad"


# -- main_grad --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_the_gradient_is_added_to_main_grad(dtype, main, device) -> None:
    plain, fused = layer(device, dtype), layer(device, dtype, fuse_wgrad_accumulation=True)
    fused.weight.main_grad = torch.ones(45, 61, device=device, dtype=main)
    total = torch.ones(45, 61, dtype=torch.float64, device=device)
    for _, (x, grad) in batches(3, device, dtype):
        with tejit.autocast():
            want, got = step(plain, plain, x, grad), step(fused, fused, x, grad)
        assert got.pop("weight") is None
        total += want.pop("weight").double()
        assert_same(got, want)
    # Each of the three was rounded once to the layer's dtype in the oracle, and each sum to main_grad's here.
    unit = max(torch.finfo(dtype).eps, torch.finfo(main).eps)
    assert (fused.weight.main_grad.double() - total).abs().max() <= 4 * unit * total.abs().max()
    if dtype == torch.bfloat16 and main == torch.float32:  # kept in more bits than the weight has
        assert not torch.equal(fused.weight.main_grad, fused.weight.main_grad.to(dtype).float())


def test_the_first_microbatch_overwrites() -> None:
    module = layer(fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.full((45, 61), float("nan"))
    plain = layer()
    with tejit.autocast():
        for number, (x, grad) in batches(3):
            step(module, module, x, grad, is_first_microbatch=number == 0)
            (plain(x) * grad).sum().backward()
        torch.testing.assert_close(module.weight.main_grad, plain.weight.grad)
        module.weight.overwrite_main_grad = True
        [(_, (x, grad))] = batches(1)
        step(module, module, x, grad, is_first_microbatch=False)
        assert torch.equal(module.weight.main_grad, step(plain, plain, x, grad)["weight"])


def test_whoever_waits_for_the_gradient_is_told() -> None:
    module, calls = layer(fuse_wgrad_accumulation=True), []
    module.weight.main_grad = torch.zeros(45, 61)
    module.weight.register_post_accumulate_grad_hook(
        lambda p: calls.append((p.grad is None, hasattr(p, FLAG) and p.grad_added_to_main_grad))
    )
    [(_, (x, grad))] = batches(1)
    with tejit.autocast():
        assert step(module, module, x, grad)["weight"] is None
        assert not hasattr(module.weight, FLAG)
        module.weight.grad_added_to_main_grad = False
        module.weight.zero_out_wgrad = True
        assert (step(module, module, x, grad)["weight"] == 0).all()
    assert calls == [(True, False), (False, True)]


def test_main_grad_comes_from_get_main_grad_of_a_sharded_parameter() -> None:
    module, elsewhere = layer(fuse_wgrad_accumulation=True), torch.zeros(45, 61)
    module.weight.__fsdp_param__ = True
    module.weight.get_main_grad = lambda: elsewhere
    [(_, (x, grad))] = batches(1)
    with tejit.autocast():
        step(module, module, x, grad)
        plain = layer()
        assert torch.equal(elsewhere, step(plain, plain, x, grad)["weight"])


def test_no_main_grad_and_one_of_another_shape_are_errors() -> None:
    module = layer(fuse_wgrad_accumulation=True)
    with tejit.autocast():
        with pytest.raises(RuntimeError, match=r"needs weight\.main_grad"):
            module(torch.randn(2, 61))
        module.weight.main_grad = torch.zeros(3, 61)
        with pytest.raises(RuntimeError, match=r"\(3, 61\).*\(45, 61\)"):
            module(torch.randn(2, 61))
        module.weight.requires_grad_(False)
        module(torch.randn(2, 61))  # there is no gradient to put anywhere
    with pytest.raises(TypeError, match="fuse_wgrad_accumulation is 1"):
        tejit.Linear(4, 4, fuse_wgrad_accumulation=1)


def test_main_grad_in_one_graph() -> None:
    """Two forwards ahead of their backwards; the flag's value is no guard."""
    module, main = layer(fuse_wgrad_accumulation=True), []
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for function in (module, compiled):
        torch.manual_seed(2)
        module.weight.main_grad = torch.zeros(45, 61)
        module.weight.grad_added_to_main_grad = False
        for _ in range(2):
            with tejit.autocast():
                pairs = [(function(x.requires_grad_()), grad) for _, (x, grad) in batches(2)]
            for y, grad in pairs:
                y.backward(grad)
            assert module.weight.grad_added_to_main_grad
        main.append(module.weight.main_grad)
        module.zero_grad()
    assert torch.equal(*main)
    assert main[0].abs().sum() > 0
    assert counter.frame_count == 1


# -- delay_wgrad_compute ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
def test_a_gradient_that_was_put_off_is_the_same(fused) -> None:
    plain, late = layer(), layer(delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
    late.weight.main_grad = torch.zeros(45, 61)
    with tejit.autocast():
        for _, (x, grad) in batches(3):
            want = step(plain, plain, x, grad)
            got = step(late, late, x, grad)
            assert got.pop("weight") is None
            wgrad = want.pop("weight")
            assert_same(got, want)
            late.weight.main_grad.zero_()
            late.backward_dw()
            assert torch.equal(late.weight.main_grad if fused else late.weight.grad, wgrad)


def test_backwards_are_put_off_in_order_and_add_up() -> None:
    plain, late = layer(), layer(delay_wgrad_compute=True)
    made = batches(2)
    with tejit.autocast():
        for _, (x, grad) in made:
            plain(x).backward(grad)
            late(x).backward(grad)
    late.backward_dw()
    late.backward_dw()
    assert torch.equal(late.weight.grad, plain.weight.grad)
    with pytest.raises(RuntimeError, match="no backward has put off"):
        late.backward_dw()
    plain.backward_dw()  # does not put off: nothing to do


@pytest.mark.parametrize("make", [lambda **a: tejit.Linear(48, 48, **a), lambda **a: tejit.LayerNormMLP(48, 80, **a)])
def test_one_backward_is_one_call_however_often_it_passed_the_module(make) -> None:
    torch.manual_seed(0)
    plain = make()
    late = make(delay_wgrad_compute=True)
    late.load_state_dict(plain.state_dict())
    x = torch.randn(8, 48)
    for module in (plain, late):
        with tejit.autocast():
            for _ in range(2):  # two backwards, each of which passes the module twice
                module(module(x)).sum().backward()
    for _ in range(2):
        late.backward_dw()
    with pytest.raises(RuntimeError, match="no backward has put off"):
        late.backward_dw()
    for mine, others in zip(late.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, others.grad)  # the order of additions is another one


def test_a_weight_that_is_computed_cannot_wait_for_its_gradient() -> None:
    module = layer(delay_wgrad_compute=True)
    torch.nn.utils.parametrizations.weight_norm(module)
    with tejit.autocast(), pytest.raises(RuntimeError, match="cannot put off the gradient of weight"):
        module(torch.randn(4, 61))


def test_putting_off_cannot_be_compiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer(delay_wgrad_compute=True), backend="aot_eager", fullgraph=True)
    with tejit.autocast(), pytest.raises(Exception, match="delay_wgrad_compute=True cannot be compiled"):
        compiled(torch.randn(4, 61))


# -- save_original_input ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STATELESS)
def test_the_original_input_gives_the_same_gradients(name, device) -> None:
    recipe = made(name)
    plain, saving = layer(device, torch.bfloat16), layer(device, torch.bfloat16, save_original_input=True)
    saved = []
    for _, (x, grad) in batches(1, device, torch.bfloat16):
        results = []
        for module in (plain, saving):
            torch.manual_seed(4)
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
            with tejit.autocast(recipe=recipe), hooks:
                results.append(step(module, module, x, grad))
        assert_same(results[1], results[0])
    assert sum(t.dtype == torch.bfloat16 and t.shape == (19, 61) for t in saved) == 1


# -- in a graph from the start ----------------------------------------------------------------------------------
def experts() -> torch.nn.Module:
    class Experts(tejit.GroupedLinear):
        def forward(self, x, is_first_microbatch=None):
            return super().forward(x, [3, x.shape[0] - 3], is_first_microbatch)

    return Experts(2, 48, 32)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling()], ids=["current", "delayed"])
@pytest.mark.parametrize(
    "make",
    [lambda: tejit.Linear(48, 32), lambda: tejit.LayerNormLinear(48, 32), lambda: tejit.LayerNormMLP(48, 32), experts],
)
def test_the_first_microbatch_of_all_may_be_compiled(make, recipe) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = make()
    module = copy.deepcopy(plain)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for number in range(3):
        x = torch.randn(7, 48)
        found = []
        for owner, function in ((plain, plain), (module, compiled if number < 2 else module)):
            owner.zero_grad()
            given = x.clone().requires_grad_()
            with tejit.autocast(recipe=recipe):
                y = function(given, is_first_microbatch=number == 0)
            y.square().sum().backward()
            found.append({"y": y, "x": given.grad, **{name: p.grad for name, p in owner.named_parameters()}})
        for name, value in found[0].items():
            assert torch.equal(found[1][name], value), (number, name)


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_a_workspace_of_fake_tensors_gives_way_to_a_real_one(name) -> None:
    """A call that only asks for shapes or memory (``FakeTensorMode``) leaves nothing that real calls compute with."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    recipe = {"current": Float8CurrentScaling(), "delayed": DelayedScaling()}[name]
    module, x = layer(), torch.randn(19, 61)
    fresh = copy.deepcopy(module)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, tejit.autocast(recipe=recipe):
        for first in (True, False):
            assert isinstance(module(mode.from_tensor(x), is_first_microbatch=first), FakeTensor)
    for first in (True, False):
        with tejit.autocast(recipe=recipe):
            want = fresh(x, is_first_microbatch=first)
            assert torch.equal(module(x, is_first_microbatch=first), want)
