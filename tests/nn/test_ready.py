"""Eager calls that take the answers of an earlier one: the same bits, and only where the answers still hold.

On the CPU the tensor cores' part is played by torch's own slow ``_scaled_mm``; the oracle is a module's first call,
which asks everything.
"""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import tejit
from tejit import Float8CurrentScalingQuantizer
from tejit import device as hardware
from tejit.nn import ready
from tejit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from tests.common import DEVICES

CURRENT = Float8CurrentScaling()


@pytest.fixture(autouse=True)
def tensor_cores(monkeypatch, request, need_kernels) -> None:
    if request.getfixturevalue("device") == "cpu":
        monkeypatch.setattr(hardware, "fp8_gemm_is_native", lambda device: True)
    need_kernels(request.getfixturevalue("device"))


def layer(device: str, quantized: bool = False, **options) -> tejit.Linear:
    torch.manual_seed(0)
    module = tejit.Linear(32, 16, device=device, dtype=torch.bfloat16, **options)
    if quantized:
        module.weight = nn.Parameter(Float8CurrentScalingQuantizer()(module.weight.detach()))
    return module


def step(module: nn.Module, x: torch.Tensor, **options) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x, **options)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *[p.grad for p in module.parameters() if p.grad is not None]]


def input_of(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (8, 32)), device=device, dtype=torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [CURRENT, Float8CurrentScaling(fp8_format=Format.E4M3, force_pow_2_scales=True)])
@pytest.mark.parametrize("kind", ["call", "parameter", "workspace", "no bias", "high_precision", "original input"])
def test_a_later_call_equals_a_first_one(kind, recipe, device) -> None:
    """Changing data and weights; 2-D and 3-D inputs; the first call of a fresh copy is the oracle."""
    if kind == "high_precision":
        recipe = Float8CurrentScaling(backward_override="high_precision")
    module = layer(device, kind == "parameter", bias=kind != "no bias", save_original_input=kind == "original input")
    options = {"is_first_microbatch": False} if kind == "workspace" else {}
    with tejit.autocast(recipe=recipe):
        for number in range(4):
            x = input_of(device, *((8, 32) if number < 3 else (2, 4, 32)))
            if kind == "workspace":
                module(x.clone().requires_grad_(), is_first_microbatch=True)
            fresh = copy.deepcopy(module)
            if kind == "workspace":
                fresh(x.clone().requires_grad_(), is_first_microbatch=True)
            for got, want in zip(step(module, x, **options), step(fresh, x, **options), strict=True):
                assert torch.equal(got, want), number
            assert module._ready is not None, "the call was not made ready"
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(torch.ones_like(p.dequantize() if kind == "parameter" else p), alpha=0.01)


@pytest.mark.parametrize("device", DEVICES)
def test_what_changes_is_asked_again(device, monkeypatch) -> None:
    module, asked = layer(device), []
    original = ready.of_call
    monkeypatch.setattr(ready, "of_call", lambda *arguments: asked.append(1) or original(*arguments))

    def questions(call) -> int:
        asked.clear()
        call()
        return len(asked)

    x = input_of(device)
    with tejit.autocast(recipe=CURRENT):
        assert questions(lambda: module(x)) == 1
        assert questions(lambda: module(x)) == 0
        assert questions(lambda: module(input_of(device, 3, 5, 32))) == 0
        assert questions(lambda: module(x.clone().requires_grad_())) == 1
        with torch.no_grad():
            assert questions(lambda: module(x)) == 1
            assert questions(lambda: module(x[:0])) == 1
        assert questions(lambda: module(x, is_first_microbatch=True)) == 1
        assert questions(lambda: module(x)) == 1
        with tejit.backend("kernels"):
            assert questions(lambda: module(x)) == 1
        module.weight = nn.Parameter(module.weight.detach().clone())
        assert questions(lambda: module(x)) == 1
        module.weight.requires_grad_(False)
        assert questions(lambda: module(x)) == 1
        module.bias.requires_grad_(False)
        assert questions(lambda: module(x)) == 1
        assert not module(x).requires_grad
        module.bias.requires_grad_(True)
        assert questions(lambda: module(x)) == 1
        assert module(x).requires_grad
        module.half()
        assert questions(lambda: module(x.half())) == 1
        module.bfloat16()
        with pytest.raises(TypeError, match="float32"):
            module(x.float())
        with pytest.raises(ValueError, match="in_features"):
            module(x[:, :16])
        assert questions(lambda: module(x)) == 1
    for recipe in (Float8CurrentScaling(fp8_format=Format.E4M3), Float8BlockScaling(), DelayedScaling(), CURRENT):
        with tejit.autocast(recipe=recipe):
            assert questions(lambda: module(x)) == 1
    with torch.autocast(device, torch.bfloat16), tejit.autocast(recipe=CURRENT):
        assert questions(lambda: module(x.float())) == 1
    assert questions(lambda: module(x)) == 0, "without autocast there is nothing to ask"


@pytest.mark.filterwarnings("ignore:a recipe has overrides")
@pytest.mark.parametrize("device", DEVICES)
def test_a_name_and_switches_that_come_later_count(device) -> None:
    module, x = layer(device), input_of(device)
    recipe = Float8CurrentScaling(overrides=(("head", None),))
    with tejit.autocast(recipe=recipe):
        quantized = module(x)
        assert torch.equal(module(x), quantized)
        tejit.name_modules(nn.ModuleDict({"head": module}))
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    module.name = "body"
    with tejit.autocast(recipe=recipe):
        assert torch.equal(module(x), quantized)
        module.delay_wgrad_compute = True
        step(module, x)
        assert module.weight.grad is None
        module.backward_dw()
        assert module.weight.grad is not None
        module.delay_wgrad_compute, module.fuse_wgrad_accumulation = False, True
        module.weight.main_grad = torch.zeros(16, 32, device=device)
        step(module, x)
        assert module.weight.main_grad.any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_parameter_whose_buffers_changed_is_read_again(device) -> None:
    module, x = layer(device, quantized=True), input_of(device)
    with tejit.autocast(recipe=CURRENT), torch.no_grad():
        first = module(x)
        assert torch.equal(module(x), first)
        module.weight.copy_(module.weight.dequantize() * 2)  # in place: the buffers stay
        assert torch.equal(module(x), copy.deepcopy(module)(x))
        module.weight.data = Float8CurrentScalingQuantizer()(input_of(device, 16, 32))
        assert torch.equal(module(x), copy.deepcopy(module)(x))
        assert not torch.equal(module(x), first)


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_module_s_owner_changes_is_seen(device) -> None:
    """A name that a pattern matches, the switches, dtypes, the place of a quantized weight."""
    recipe, x = Float8CurrentScaling(overrides=(("head", None),)), input_of(device)
    module = layer(device, name="body")
    with tejit.autocast(recipe=recipe):
        module(x)
        module.name = "head"
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
        module.name = "body"
        module(x)
        module.weight.main_grad = torch.zeros(16, 32, device=device)
        module.fuse_wgrad_accumulation = True
        module(x).sum().backward()
        assert module.weight.grad is None
        assert module.weight.main_grad.any()
    module = layer(device, quantized=True, name="body")
    for options in ({}, {"is_first_microbatch": False}):
        with tejit.autocast(recipe=recipe):
            if options:
                module = layer(device, name="body")
                module(x, is_first_microbatch=True)
            module(x, **options)
            assert module._ready is not None
            module.half()
            with pytest.raises(TypeError, match=r"bfloat16 and the weight torch.float16"):
                module(x, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_module_that_moves_away_leaves_nothing(device) -> None:
    module, x = layer(device, quantized=True), input_of(device)
    with tejit.autocast(recipe=CURRENT):
        module(x)
    data = weakref.ref(module.weight._data)
    module.to("meta")
    gc.collect()
    assert data() is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("how", ["assigned", "loaded"])
def test_a_replaced_parameter_is_let_go_at_once(how, quantized, device) -> None:
    module, other = layer(device, quantized), layer(device, quantized)
    with tejit.autocast(recipe=CURRENT):
        step(module, input_of(device))
        assert module._ready is not None
        gone = weakref.ref(module.weight)
        if how == "assigned":
            module.weight = other.weight
        else:
            module.load_state_dict(other.state_dict(), assign=True)
        gc.collect()
        assert gone() is None
        assert module._ready is None
        x = input_of(device)
        for got, want in zip(step(module, x), step(other, x), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_recomputation_follows_the_forward_it_repeats(device) -> None:
    """Two recipes by turns, backward outside of autocast: each recomputation is under its forward's recipe."""
    from torch.utils.checkpoint import checkpoint

    module, x = layer(device), input_of(device)
    coarse = Float8CurrentScaling(amax_epsilon=64.0)
    with tejit.autocast(recipe=coarse):
        module(x.clone().requires_grad_())
    for recipe in (CURRENT, coarse, CURRENT):
        found = []
        for how in (lambda x: module(x), lambda x: checkpoint(module, x, use_reentrant=False)):
            given = x.clone().requires_grad_()
            module.zero_grad()
            with tejit.autocast(recipe=recipe):
                y = how(given)
            y.sum().backward()
            found.append([y.detach(), given.grad, module.weight.grad.clone()])
        for plain, again in zip(*found, strict=True):
            assert torch.equal(plain, again)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["attribute", "buffer", "hidden bias", "hidden weight"])
def test_a_weight_or_bias_that_is_no_parameter_any_more(how, device) -> None:
    module = layer(device, bias=how == "hidden bias")
    x, ones = input_of(device), torch.ones(16, device=device, dtype=torch.bfloat16)
    with tejit.autocast(recipe=CURRENT):
        for _ in range(2):
            module(x)
        assert module._ready is not None
        fresh = copy.deepcopy(module)
        for each in (module, fresh):
            if how == "attribute":
                del each.bias
                each.bias = ones
            elif how == "buffer":
                del each.bias
                each.register_buffer("bias", ones)
            elif how == "hidden bias":
                each.__dict__["bias"] = ones
            else:
                each.__dict__["weight"] = torch.ones_like(each.weight)
        fresh.__dict__["_ready"] = None
        assert torch.equal(module(x), fresh(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantized", [False, True])
def test_a_weight_that_becomes_another_under_its_name(quantized, device) -> None:
    """``torch.utils.swap_tensors`` (and loading by ``torch.__future__``'s switches) changes what the object is."""
    x = input_of(device)
    module = layer(device, quantized)
    with tejit.autocast(recipe=Float8CurrentScaling(backward_override="high_precision")):
        step(module, x)
        assert module._ready is not None
        values = input_of(device, 16, 32)
        other = nn.Parameter(values if quantized else Float8CurrentScalingQuantizer()(values))
        torch.utils.swap_tensors(module.weight, other)
        assert isinstance(module.weight, tejit.QuantizedTensor) is not quantized
        for _ in range(2):
            for got, want in zip(step(module, x), step(copy.deepcopy(module), x), strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_data_of_another_shape_or_dtype_is_asked_about(device, monkeypatch) -> None:
    """As pruning assigns it: 16 rows become 24, which the tensor cores take padded only; a bias in float32."""
    module, x, asked = layer(device), input_of(device), []
    original = ready.of_call
    monkeypatch.setattr(ready, "of_call", lambda *arguments: asked.append(1) or original(*arguments))
    with tejit.autocast(recipe=CURRENT):
        module(x)
        module.bias.data = module.bias.data.float()
        assert torch.equal(module(x), copy.deepcopy(module)(x))
        assert len(asked) == 3
        module.bias.data = module.bias.data.bfloat16()
        module(x)
        module.weight.data, module.bias.data = input_of(device, 24, 32), input_of(device, 24)
        asked.clear()
        assert torch.equal(module(x), copy.deepcopy(module)(x))
        assert len(asked) == 2
        with pytest.raises(ValueError, match="in_features"):
            module(x[0, 0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workspace", [False, True])
def test_bytes_in_other_memory_are_read_there(workspace, device) -> None:
    module, x = layer(device, quantized=not workspace), input_of(device)
    options = {"is_first_microbatch": False} if workspace else {}
    with tejit.autocast(recipe=CURRENT), torch.no_grad():
        if workspace:
            module(x, is_first_microbatch=True)
        first = module(x, **options)
        assert module._ready is not None
        codes = module._workspace_weight_data if workspace else module.weight._data
        codes.data = codes ^ 128  # the sign
        bias = module.bias.float()
        assert torch.allclose(module(x, **options).float() - bias, bias - first.float(), atol=0.05)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["call", "parameter", "workspace"])
def test_fake_tensors_leave_nothing_for_real_ones(kind, device) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    module, x = layer(device, quantized=kind == "parameter"), input_of(device)
    options = {"is_first_microbatch": False} if kind == "workspace" else {}
    with tejit.autocast(recipe=CURRENT):
        if options:
            module(x, is_first_microbatch=True)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert isinstance(module(mode.from_tensor(x), **options), FakeTensor)
        assert torch.equal(module(x, **options), copy.deepcopy(module)(x))


@pytest.mark.parametrize("device", DEVICES)
def test_a_ready_layer_is_differentiated_only_by_what_can(device) -> None:
    """A transform of functions, forward mode and a second derivative find the same answer as before."""
    module, x = layer(device), input_of(device)
    with tejit.autocast(recipe=CURRENT):
        step(module, x)
        assert module._ready is not None
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            torch.func.grad(lambda x: module(x).sum())(x)
        step(module, x)
        with torch.autograd.forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError)):
            module(torch.autograd.forward_ad.make_dual(x, x))
        step(module, x)
        twice = x.clone().requires_grad_()
        with pytest.raises(NotImplementedError, match="first derivative only"):
            torch.autograd.grad(module(twice).square().sum(), twice, create_graph=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_functional_call_s_weight_is_not_kept(device) -> None:
    module, x = layer(device), input_of(device)
    given = torch.ones(16, 32, device=device, dtype=torch.bfloat16, requires_grad=True) * 1
    there = weakref.ref(given)
    with tejit.autocast(recipe=CURRENT):
        torch.func.functional_call(module, {"weight": given}, (x,))
    del given
    gc.collect()
    assert there() is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["call", "parameter", "workspace"])
def test_a_graph_keeps_no_more_than_a_first_call_s(kind, device) -> None:
    """A frozen weight and bias that the module replaces are let go, however long outputs and graphs live."""
    options = {"is_first_microbatch": False} if kind == "workspace" else {}
    with tejit.autocast(recipe=CURRENT):
        for calls in (1, 2):
            module = layer(device, quantized=kind == "parameter").requires_grad_(False)
            if options:
                module(input_of(device).requires_grad_(), is_first_microbatch=True)
            for _ in range(calls):
                y = module(input_of(device).requires_grad_(), **options)
            gone = [weakref.ref(module.weight), weakref.ref(module.bias)]
            module.weight, module.bias = nn.Parameter(input_of(device, 16, 32)), None
            gc.collect()
            assert y.requires_grad
            assert [there() for there in gone] == [None, None], calls


@pytest.mark.parametrize("device", DEVICES)
def test_sizes_of_a_trace_stay_symbols(device) -> None:
    """A ready layer is traced as any other: comparing the trace's sizes with those of a call would fix them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    module, x = layer(device).requires_grad_(False), input_of(device)
    with tejit.autocast(recipe=CURRENT):
        for _ in range(2):
            graph = make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
            (traced,) = [node for node in graph.graph.nodes if node.op == "placeholder"]
            assert traced.meta["val"].shape[0].node.maybe_as_int() is None
            module(x)
            assert module._ready is not None


@pytest.mark.parametrize("device", DEVICES)
def test_sizes_of_fake_tensors_stay_symbols(device) -> None:
    """Outside of their mode too; nobody says that the two inputs have equally many rows."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    sizes = ShapeEnv()
    with FakeTensorMode(shape_env=sizes) as mode:
        module = layer(device).requires_grad_(False)
    with tejit.autocast(recipe=CURRENT):
        for name in ("one", "other"):
            free = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
            x = mode.from_tensor(input_of(device), symbolic_context=free, source=ConstantSource(name))
            module(x)
    assert [str(guard.expr) for guard in sizes.guards] == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["parameter", "workspace"])
def test_a_transform_of_functions_leaves_nothing(kind, device) -> None:
    """What is computed inside one is wrapped, and would come out of later calls."""
    module, x = layer(device, quantized=kind == "parameter").requires_grad_(False), input_of(device)
    options = {"is_first_microbatch": False} if kind == "workspace" else {}
    with tejit.autocast(recipe=CURRENT):
        if options:
            module(x, is_first_microbatch=True)
        want = module(x, **options)
        torch.func.grad(lambda scale: (module(x, **options) * scale).float().sum())(torch.ones((), device=device))
        assert module._ready is None
        assert torch.equal(module(x, **options), want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_workspace_read_by_two_threads_under_two_recipes(device, monkeypatch) -> None:
    """The other thread reads between what this one does: here from inside of its call."""
    module, x, alike = layer(device), input_of(device), Float8CurrentScaling(amax_epsilon=0.0)
    original, inside = ready.of_call, []

    def interrupted(*arguments):
        if not inside:
            inside.append(1)
            with tejit.autocast(recipe=alike):
                module(x, is_first_microbatch=False)
        return original(*arguments)

    with tejit.autocast(recipe=CURRENT):
        module(x, is_first_microbatch=True)
        want = copy.deepcopy(module)(x, is_first_microbatch=False)
        monkeypatch.setattr(ready, "of_call", interrupted)
        for _ in range(3):
            assert torch.equal(module(x, is_first_microbatch=False), want)
    assert inside


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
def test_inputs_that_are_handled_otherwise_never_hold(device) -> None:
    """Rows 84, 85 and 94: nested and sparse ones of the same size, a proxy, and any inside ``torch.jit.trace``."""
    module, x = layer(device), input_of(device)
    with tejit.autocast(recipe=CURRENT), torch.no_grad():
        want = module(x)
        known = module._ready
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 8], device=device))
        for other in (nested, x.to_sparse(), torch.fx.Proxy(torch.fx.Graph().placeholder("x"))):
            assert not known.holds(module, other, None)
        assert torch.equal(module(nested).values(), want)
        with pytest.raises(TypeError, match="sparse_coo"):
            module(x.to_sparse())
        assert known.holds(module, x, None)
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
            torch.jit.trace(lambda x: module(x), x)
        assert module._ready is known
