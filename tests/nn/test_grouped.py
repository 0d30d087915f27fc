"""GroupedLinear: each group is the linear layer that it would be alone."""

import copy

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

import tejit
from tejit import Float8CurrentScalingQuantizer
from tejit.recipe import CustomRecipe, DelayedScaling, Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling
from tests.common import DEVICES, DTYPES, poisoned_memory, short
from tests.nn.bounds import STATELESS, bounds, relative_error
from tests.nn.test_linear_bounds import made
from tests.nn.test_quantized_weights import assert_same

torch._dynamo.config.cache_size_limit = 64

K, N = 61, 45  # sizes that every small block pads
#: TransformerEngine#2966, and ones in which most groups are empty.
SPLITS = [1, 31, 33, 0, 447]
SHORT = [3, 0, 5]


def grouped(count: int, device="cpu", dtype=torch.float32, i: int = K, o: int = N, **arguments) -> tejit.GroupedLinear:
    torch.manual_seed(0)
    return tejit.GroupedLinear(count, i, o, device=device, dtype=dtype, **arguments)


def alone(module: tejit.GroupedLinear, **arguments) -> list[tejit.Linear]:
    """One tejit.Linear a group, with its parameters."""
    layers = []
    for n in range(module.num_gemms):
        weight = getattr(module, f"weight{n}")
        layer = tejit.Linear(module.in_features, module.out_features, device=weight.device, **arguments)
        layer.weight, layer.bias = copy.deepcopy(weight), copy.deepcopy(getattr(module, f"bias{n}"))
        layers.append(layer)
    return layers


def data(splits, module, lead=None):
    device, dtype = module.weight0.device, module.weight0.dtype
    shape = lead or (sum(splits),)
    return tuple(torch.randn(*shape, n, device=device, dtype=dtype) for n in (module.in_features, module.out_features))


def step(function, module, x, grad, splits, **arguments):
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = function(x, splits, **arguments)
    y.backward(grad)
    return {"y": y.detach(), "dgrad": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def step_alone(layers, x, grad, splits, call=lambda layer, rows: layer(rows)):
    """The same from one layer after the other; a group without rows is not run, and its gradients are 0."""
    whole = x.clone().reshape(-1, x.shape[-1])
    found = {"y": [], "dgrad": []}
    pairs = [
        (rows.detach().requires_grad_(), g)
        for rows, g in zip(whole.split(splits), grad.reshape(-1, grad.shape[-1]).split(splits), strict=True)
    ]
    outs = [call(layer, rows) if len(rows) else None for layer, (rows, _) in zip(layers, pairs, strict=True)]
    for n, (layer, (rows, g)) in enumerate(zip(layers, pairs, strict=True)):
        layer.zero_grad()
        if len(rows):
            outs[n].backward(g)
            found["y"].append(outs[n].detach())
            found["dgrad"].append(rows.grad)
        for kind in ("weight", "bias"):
            p = getattr(layer, kind)
            none = torch.zeros(p.shape, dtype=p.dtype, device=p.device) if p.requires_grad and not len(rows) else None
            found[f"{kind}{n}"] = p.grad if len(rows) else none
    for name in ("y", "dgrad"):
        width = N if name == "y" else x.shape[-1]
        parts = found[name] or [x.new_empty((0, width))]
        found[name] = torch.cat(parts).reshape(*x.shape[:-1], parts[0].shape[1])
    return found


# -- against the same layers alone ------------------------------------------------------------------------------
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("splits", "lead"), [(SPLITS, None), ([2, 0, 5], (7, 1)), ([4, 8], (2, 2, 3)), ([5], None)])
def test_without_autocast_each_group_is_f_linear(splits, lead, dtype, device) -> None:
    module = grouped(len(splits), device, dtype)
    x, grad = data(splits, module, lead)

    def plain(x, splits):
        return torch.cat(
            [
                F.linear(rows, getattr(module, f"weight{n}"), getattr(module, f"bias{n}"))
                for n, rows in enumerate(x.reshape(-1, K).split(splits))
            ]
        ).reshape(*x.shape[:-1], N)

    want = step(plain, module, x, grad, splits)
    assert_same(step(module, module, x, grad, splits), want)
    with tejit.autocast(), tejit.autocast(enabled=False):
        assert_same(step(module, module, x, grad, splits), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", STATELESS)
def test_each_group_is_a_linear_of_its_own(name, dtype, device) -> None:
    """TransformerEngine#2966 [1, 31, 33, 0, 447]: output and every gradient to the bit."""
    module, recipe = grouped(len(SPLITS), device, dtype), made(name)
    layers = alone(module)
    x, grad = data(SPLITS, module)
    found = []
    for run in (lambda: step(module, module, x, grad, SPLITS), lambda: step_alone(layers, x, grad, SPLITS)):
        torch.manual_seed(2)  # stochastic rounding
        with tejit.autocast(recipe=recipe):
            found.append(run())
    assert_same(*found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STATELESS)
def test_empty_groups_touch_nothing(name, device) -> None:
    """vllm#39645: splits [0, 32, 0] with poisoned memory; the others against F.linear within the format's bound."""
    splits = [0, 32, 0]
    module = grouped(3, device)
    for n in range(3):
        nn.init.normal_(getattr(module, f"weight{n}"))  # as the bounds say
    x, grad = data(splits, module)
    want = step(module, module, x, grad, splits)
    with poisoned_memory(), tejit.autocast(recipe=made(name)):
        got = step(module, module, x, grad, splits)
    for n in (0, 2):
        assert (got[f"weight{n}"] == 0).all()
        assert (got[f"bias{n}"] == 0).all()
    limits = bounds(name, torch.float32)
    for product, ours in (("y", "y"), ("dgrad", "dgrad"), ("wgrad", "weight1")):
        assert 0 < relative_error(got[ours], want[ours]) < limits[product], product
    torch.testing.assert_close(got["bias1"], want["bias1"])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # torch's own
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, K), (3, 0, K)], ids=short)
def test_no_rows_at_all(shape, device) -> None:
    module = grouped(2, device)
    x = torch.randn(shape, device=device, requires_grad=True)
    with tejit.autocast():
        y = module(x, [0, 0])
    assert y.shape == (*shape[:-1], N)
    y.sum().backward()
    assert x.grad.shape == x.shape
    for p in module.parameters():
        assert (p.grad == 0).all()
    for i, o in ((0, 4), (4, 0)):
        module = grouped(2, device, i=i, o=o)
        with tejit.autocast():
            y = module(torch.randn(5, i, device=device, requires_grad=True), [2, 3])
        y.sum().backward()
        assert module.weight1.grad.shape == (o, i)


def test_a_group_s_result_does_not_depend_on_the_others() -> None:
    """Scales and blocks never span groups: a huge value in one group changes no byte of the next."""
    module = grouped(2)
    x, grad = data([33, 31], module)
    changed = x.clone()
    changed[:33] *= 1e6
    for name in ("current", "block", "MXFP8", "NVFP4 plain"):
        with tejit.autocast(recipe=made(name)):
            one, other = (step(module, module, value, grad, [33, 31]) for value in (x, changed))
        assert torch.equal(one["y"][33:], other["y"][33:])
        assert torch.equal(one["weight1"], other["weight1"])


# -- what it shares with Linear -----------------------------------------------------------------------------------
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("save", [False, True], ids=["", "save_original_input"])
@pytest.mark.parametrize("make", [Float8CurrentScaling, Float8BlockScaling, NVFP4BlockScaling])
def test_backward_override_and_the_original_input(make, save, override) -> None:
    module, splits = grouped(3, save_original_input=save), [33, 0, 31]
    layers = alone(module, save_original_input=save)
    x, grad = data(splits, module)
    for recipe in (make(backward_override=override), make()):
        found = []
        for run in (
            lambda: step(module, module, x, grad, splits),
            lambda: step_alone(layers, x, grad, splits),
        ):
            torch.manual_seed(2)
            with tejit.autocast(recipe=recipe):
                found.append(run())
        assert_same(*found)


def test_saved_for_backward_is_the_quantized_operand_of_groups_with_rows() -> None:
    module, saved = grouped(3, dtype=torch.bfloat16, i=64, o=96), []
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)

    def pack(tensor):
        saved.append((tensor.dtype, tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), tejit.autocast():
        module(x, [20, 0, 12])
        scales = 4
        assert sum(n * d.itemsize for d, n in saved) == 32 * 64 + 2 * 64 * 96 + scales * 4
        saved.clear()
        with torch.no_grad():
            module(x, [20, 0, 12])
        assert saved == []


def test_frozen_weights_and_frozen_input() -> None:
    module = grouped(3)
    module.weight0.requires_grad_(False)
    module.bias2.requires_grad_(False)
    splits = [7, 0, 5]
    x, grad = data(splits, module)
    with tejit.autocast():
        got = step(module, module, x, grad, splits)
        assert_same(got, step_alone(alone(module), x, grad, splits))
        assert got["weight0"] is None
        assert got["bias2"] is None
        module.zero_grad()
        module(x, splits).backward(grad)
    assert torch.equal(module.weight2.grad, got["weight2"])
    assert module.weight0.grad is None


@pytest.mark.parametrize("device", DEVICES)
def test_microbatches_use_the_workspace_whichever_groups_have_rows(device) -> None:
    module = grouped(3, device)
    with tejit.autocast(recipe=Float8BlockScaling()):
        for number, splits in enumerate(([3, 0, 5], [0, 7, 1], [2, 2, 2])):
            x, grad = data(splits, module)
            want = step(module, module, x, grad, splits)
            assert_same(step(module, module, x, grad, splits, is_first_microbatch=number == 0), want)
        first = module(x, splits, is_first_microbatch=True)
        with torch.no_grad():
            module.weight1.mul_(2)
        assert torch.equal(module(x, splits, is_first_microbatch=False), first)
        assert not torch.equal(module(x, splits), first)
    assert set(module.state_dict()) == {f"{kind}{n}" for kind in ("weight", "bias") for n in range(3)}


@pytest.mark.parametrize("late", [False, True], ids=["", "delay_wgrad_compute"])
@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
def test_where_the_gradients_go(fused, late) -> None:
    module = grouped(3, fuse_wgrad_accumulation=fused, delay_wgrad_compute=late)
    plain, names = grouped(3), [f"weight{n}" for n in range(3)]
    for name in names:
        getattr(module, name).main_grad = torch.full((N, K), float("nan"))
    with tejit.autocast():
        for number, splits in enumerate((SHORT, [0, 0, 8], [0, 0, 0])):  # with and without rows
            x, grad = data(splits, module)
            want = step(plain, plain, x, grad, splits)
            wgrads = {name: want.pop(name) for name in names}
            got = step(module, module, x, grad, splits, is_first_microbatch=True if fused else None)
            if fused or late:
                assert all(got[name] is None for name in names)
            module.backward_dw()
            for name in names:
                p = getattr(module, name)
                assert torch.equal(p.main_grad if fused else p.grad, wgrads[name]), (number, name)
            assert_same(got, want)
        if fused:  # added to, a group without rows adds nothing
            before = module.weight1.main_grad = torch.ones(N, K)
            step(module, module, *data(SHORT, module), SHORT)
            module.backward_dw()
            assert (before == 1).all()


@pytest.mark.parametrize("name", ["current", "block", "MXFP8 2D", "NVFP4 plain"])
def test_quantized_weights(name) -> None:
    recipe = made(name)
    plain = grouped(3, i=64, o=96)
    module = copy.deepcopy(plain)
    quantizer = recipe.linear.weight.both.replace(internal=False)
    for n in range(3):
        setattr(module, f"weight{n}", nn.Parameter(quantizer(getattr(plain, f"weight{n}").detach())))
    x, grad = data(SHORT, plain)
    with tejit.autocast(recipe=recipe):
        assert_same(step(module, module, x, grad, SHORT), step(plain, plain, x, grad, SHORT))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "aot_eager"])
def test_delayed_scaling_has_slots_for_each_group(compiled, device) -> None:
    """Each group's scales are those that its Linear has; a group without rows keeps its own."""
    torch._dynamo.reset()
    module, recipe = grouped(3, device), DelayedScaling()
    layers = alone(module)
    function = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    assert module._delayed_scale.shape == (6,)
    assert module._delayed_grad_scale.shape == (3,)
    for number in range(4):
        splits = [3, 0, 5] if number == 2 else [3, 7, 5]
        x, grad = data(splits, module)
        x = x * 10**number
        with tejit.autocast(recipe=recipe):
            got = step(function, module, x, grad, splits)
            want = step_alone(layers, x, grad, splits)
        assert_same(got, want)
        for n, layer in enumerate(layers):
            assert torch.equal(module._delayed_scale[2 * n : 2 * n + 2], layer._delayed_scale), (number, n)
            assert torch.equal(module._delayed_grad_scale[n : n + 1], layer._delayed_grad_scale), (number, n)
    assert (module._delayed_scale != 1).all()
    twin = grouped(3, device)
    twin.load_state_dict(module.state_dict())
    with tejit.autocast(recipe=recipe), torch.no_grad():
        assert torch.equal(twin(x, splits), module(x, splits))


def test_calibration_sees_each_group() -> None:
    module, (x, _) = grouped(2), data([3, 4], grouped(2))
    with tejit.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        module(x, [3, 4])
    amax = torch.stack([t.detach().abs().max() for t in (x[:3], module.weight0, x[3:], module.weight1)])
    assert torch.equal(module._delayed_scale, torch.tensor(torch.finfo(torch.float8_e4m3fn).max) / amax)


def test_quantized_model_init_quantizes_every_group() -> None:
    with tejit.quantized_model_init(recipe=Float8BlockScaling()):
        module = grouped(2, i=128, o=256)
    plain = grouped(2, i=128, o=256)
    assert all(isinstance(getattr(module, f"weight{n}"), tejit.QuantizedTensor) for n in range(2))
    x, grad = data([3, 4], plain)
    with tejit.autocast(recipe=Float8BlockScaling()):
        assert_same(step(module, module, x, grad, [3, 4]), step(plain, plain, x, grad, [3, 4]))


def test_custom_recipes_are_told_grouped_linear_and_overrides_match_its_name() -> None:
    roles = []

    def factory(role):
        roles.append(role)
        return Float8CurrentScalingQuantizer() if role.tensor_type != "input" else None

    module, layer = grouped(2, name="experts"), tejit.Linear(K, N, name="experts")
    x, _ = data([3, 4], module)
    with tejit.autocast(recipe=CustomRecipe(factory)):
        module(x, [3, 4])
        layer(x)
    kinds = [(role.module_type, role.tensor_type, role.name) for role in roles]
    tensors = ("input", "weight", "grad_output")
    assert kinds == [(kind, tensor, "experts") for kind in ("grouped_linear", "linear") for tensor in tensors]
    plain = module(x, [3, 4])
    with tejit.autocast(recipe=Float8CurrentScaling(overrides=(("exp*", None),))):
        assert torch.equal(module(x, [3, 4]), plain)
    with tejit.autocast():
        assert not torch.equal(module(x, [3, 4]), plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_bit_equal(reentrant) -> None:
    module = grouped(3)
    x, grad = data(SHORT, module)

    def checkpointed(x, splits):
        return torch.utils.checkpoint.checkpoint(module, x, splits, use_reentrant=reentrant)

    with tejit.autocast():
        want = step(module, module, x, grad, SHORT)
    value = x.clone().requires_grad_()
    module.zero_grad()
    with tejit.autocast():
        y = checkpointed(value, SHORT)
    y.backward(grad)
    got = {"y": y.detach(), "dgrad": value.grad, **{n: p.grad for n, p in module.named_parameters()}}
    assert_same(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_inside_torch_autocast_it_takes_the_amp_dtype(device) -> None:
    module = grouped(3, device)
    low = grouped(3, device, torch.bfloat16)
    low.load_state_dict(module.state_dict())
    x = torch.randn(8, K, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16), tejit.autocast():
        y = module(x, SHORT)
    y.float().sum().backward()
    assert x.grad.dtype == module.weight0.grad.dtype == torch.float32
    with tejit.autocast():
        assert torch.equal(y, low(x.to(torch.bfloat16), SHORT))


# -- construction, state, errors ----------------------------------------------------------------------------------
def test_arguments_and_state() -> None:
    module = grouped(2)
    torch.manual_seed(0)
    for n in range(2):  # initialised like one nn.Linear after the other
        plain = nn.Linear(K, N)
        assert torch.equal(getattr(module, f"weight{n}"), plain.weight)
        assert torch.equal(getattr(module, f"bias{n}"), plain.bias)
    assert list(module.state_dict()) == ["weight0", "bias0", "weight1", "bias1"]
    twin = tejit.GroupedLinear(2, K, N)
    twin.load_state_dict(module.state_dict())
    x, _ = data([3, 4], module)
    with tejit.autocast():
        assert torch.equal(twin(x, [3, 4]), module(x, (3, 4)))
    bare = tejit.GroupedLinear(2, K, N, bias=False, params_dtype=torch.float16, init_method=nn.init.ones_)
    assert list(bare.state_dict()) == ["weight0", "weight1"]
    assert bare.weight1.dtype == torch.float16
    assert (bare.weight1 == 1).all()
    with tejit.autocast():
        assert bare(x.half(), [3, 4]).shape == (7, N)
    with torch.device("meta"):
        module = tejit.GroupedLinear(2, K, N)
    with tejit.autocast():
        assert module(torch.randn(7, K, device="meta"), [3, 4]).shape == (7, N)
    assert "num_gemms=2" in repr(module)


def test_return_bias() -> None:
    module, plain = grouped(2, return_bias=True), grouped(2)
    x, _ = data([3, 4], module)
    for context in (tejit.autocast(enabled=False), tejit.autocast()):
        with context:
            y, biases = module(x, [3, 4])
            want = plain(x, [3, 4])
        assert biases[0] is module.bias0
        assert biases[1] is module.bias1
        torch.testing.assert_close(torch.cat([y[:3] + biases[0], y[3:] + biases[1]]), want)


def test_errors_name_the_value() -> None:
    with pytest.raises(ValueError, match="num_gemms is 0"):
        tejit.GroupedLinear(0, 4, 4)
    with pytest.raises(TypeError, match=r"num_gemms is 2\.0"):
        tejit.GroupedLinear(2.0, 4, 4)
    with pytest.raises(ValueError, match="needs bias=True"):
        tejit.GroupedLinear(2, 4, 4, bias=False, return_bias=True)
    with pytest.raises(ValueError, match=r"torch\.float16.*torch\.bfloat16"):
        tejit.GroupedLinear(2, 4, 4, dtype=torch.float16, params_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="delay_wgrad_compute is 1"):
        tejit.GroupedLinear(2, 4, 4, delay_wgrad_compute=1)
    module = grouped(2)
    x = torch.randn(7, K)
    for context in (tejit.autocast(), tejit.autocast(enabled=False)):
        with context:
            with pytest.raises(ValueError, match="adds up to 8 rows, and the input has 7"):
                module(x, [4, 4])
            with pytest.raises(ValueError, match="m_splits has -1"):
                module(x, [8, -1])
            with pytest.raises(ValueError, match="3 entries; it must have num_gemms = 2"):
                module(x, [3, 4, 0])
            with pytest.raises(TypeError, match=r"m_splits is a Tensor.*tolist"):
                module(x, torch.tensor([3, 4]))
            with pytest.raises(ValueError, match=r"\(7, 60\).*in_features = 61"):
                module(x[:, 1:], [3, 4])
    with tejit.autocast():
        with pytest.raises(TypeError, match=r"torch\.bfloat16 and the weight torch\.float32"):
            module(x.bfloat16(), [3, 4])
        with pytest.raises(RuntimeError, match=r"is_first_microbatch=False uses the weight0"):
            module(x, [3, 4], is_first_microbatch=False)
        for n in range(2):
            quantized = Float8CurrentScalingQuantizer()(getattr(module, f"weight{n}").detach())
            setattr(module, f"weight{n}", nn.Parameter(quantized))
    with (
        tejit.autocast(recipe=Float8BlockScaling()),
        pytest.raises(RuntimeError, match="Recipe mismatch for 'weight0'"),
    ):
        module(x, [3, 4])


# -- one graph ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "current" else pytest.mark.full) for name in STATELESS],
)
def test_one_graph_and_eager_s_result(name) -> None:
    """Other splits make one more graph, with symbolic sizes, and then no more; an empty group is a case of its own."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module, recipe = grouped(2, i=32, o=48), made(name)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with tejit.autocast(recipe=recipe):
        for splits, graphs in (([3, 33],) * 2, 1), (([5, 40], [32, 7], [64, 2]), 2), (([0, 5],), 3):
            for each in splits:
                x, grad = data(each, module)
                found = []
                for function in (compiled, module):
                    torch.manual_seed(3)
                    found.append(step(function, module, x, grad, each))
                assert_same(*found)
            assert counter.frame_count == graphs
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.full
def test_one_row_and_a_frozen_weight_compile_too() -> None:
    torch._dynamo.reset()
    module = grouped(5)
    module.weight1.requires_grad_(False)
    x, grad = data(SPLITS, module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16), tejit.autocast():
        want = step(module, module, x, grad.bfloat16(), SPLITS)
        assert_same(step(compiled, module, x, grad.bfloat16(), SPLITS), want)


@pytest.mark.full
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_microbatches_and_main_grad_in_graphs(compiler) -> None:
    """A graph for the first microbatch and one for the others; inductor's within 1e-5 of the largest value."""
    torch._dynamo.reset()
    module = grouped(3, fuse_wgrad_accumulation=True)
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    found = []
    for function in (module, compiled):
        for n in range(3):
            getattr(module, f"weight{n}").main_grad = torch.zeros(N, K)
        torch.manual_seed(1)
        for number in range(3):
            x, grad = data(SHORT, module)
            with tejit.autocast():
                result = step(function, module, x, grad, SHORT, is_first_microbatch=number == 0)
        mains = {f"main{n}": getattr(module, f"weight{n}").main_grad for n in range(3)}
        found.append({name: value for name, value in {**result, **mains}.items() if value is not None})
    for name, want in found[0].items():
        tolerance = 0 if compiler == "aot_eager" else 1e-5 * want.abs().max().item()
        torch.testing.assert_close(found[1][name], want, rtol=0, atol=tolerance)
    assert counter.frame_count == 2
