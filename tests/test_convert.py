"""convert: torch's modules become tejit's, and nothing that people hold on to notices."""

import copy
import io
import pickle
import warnings
import weakref

import pytest
import torch
import torch._dynamo.testing
import torch.nn.utils.prune
from torch import nn
from torch.nn.utils import parametrizations

import tejit
from tejit.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tejit.recipe.gain import smallest_square, too_small_to_gain
from tests.common import DEVICES, DTYPES, short


def everything(module: nn.Module, name: str) -> bool:
    return True


class Block(nn.Module):
    def __init__(self, width: int, **kwargs) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, **kwargs)
        self.down = nn.Linear(2 * width, width, bias=False, **kwargs)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def model(width: int = 40, **kwargs) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(width, **kwargs), Block(width, **kwargs), nn.Linear(width, 7, **kwargs))


def step(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    found = {"y": y.detach(), "dgrad": x.grad} | {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return found


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want)
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_the_converted_model_computes_what_a_model_of_our_modules_does(dtype, device) -> None:
    plain = model(device=device, dtype=dtype)
    x = torch.randn(2, 5, 40, device=device, dtype=dtype)
    converted = tejit.convert(copy.deepcopy(plain), filter_fn=everything)
    assert_same(step(converted, x), step(plain, x))

    by_hand = copy.deepcopy(plain)
    for block in by_hand[:2]:
        for name in ("up", "down"):
            old = getattr(block, name)
            new = tejit.Linear(old.in_features, old.out_features, old.bias is not None, device=device, dtype=dtype)
            new.load_state_dict(old.state_dict())
            setattr(block, name, new)
    by_hand[2] = tejit.Linear(40, 7, device=device, dtype=dtype)
    by_hand[2].load_state_dict(plain[2].state_dict())
    with tejit.autocast(recipe=Float8CurrentScaling()):
        got, want = step(converted, x), step(by_hand, x)
    assert_same(got, want)
    assert not torch.equal(got["y"], step(plain, x)["y"])


def test_everything_stays_the_object_it_was() -> None:
    plain = model()
    modules, parameters = dict(plain.named_modules()), dict(plain.named_parameters())
    references = {name: weakref.ref(parameter) for name, parameter in parameters.items()}
    plain[0].up.weight.main_grad = torch.zeros(80, 40)
    plain[1].eval()
    plain[1].up.weight.requires_grad_(False)
    plain[0].up.note = "mine"
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    state = torch.get_rng_state()

    converted = tejit.convert(plain, filter_fn=everything)
    assert converted is plain
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(converted.named_modules()) == modules
    assert all(parameter is parameters[name] for name, parameter in converted.named_parameters())
    assert all(references[name]() is parameters[name] for name in parameters)
    assert parameters["0.up.weight"].main_grad.shape == (80, 40)
    assert [module.training for module in (converted[0].up, converted[1].up)] == [True, False]
    assert not converted[1].up.weight.requires_grad
    assert converted[0].up.note == "mine"
    assert [type(m) for m in converted.modules()].count(tejit.Linear) == 5
    assert [m.name for m in converted.modules() if isinstance(m, tejit.Linear)] == [
        "0.up",
        "0.down",
        "1.up",
        "1.down",
        "2",
    ]
    before = parameters["2.weight"].detach().clone()
    with tejit.autocast():
        converted(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    assert not torch.equal(converted[2].weight, before)


def test_hooks_fire_and_can_be_taken_away() -> None:
    linear, seen = nn.Linear(8, 8), []
    handles = [
        linear.register_forward_pre_hook(lambda *_: seen.append("pre")),
        linear.register_forward_hook(lambda *_: seen.append("forward")),
        linear.register_full_backward_hook(lambda *_: seen.append("backward")),
        linear.weight.register_hook(lambda _: seen.append("gradient")),
        linear.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated")),
        linear.register_state_dict_pre_hook(lambda *_: seen.append("state")),
    ]
    converted = tejit.convert(linear, filter_fn=everything)
    assert converted is linear
    assert type(converted) is tejit.Linear
    with tejit.autocast():
        converted(torch.randn(2, 8, requires_grad=True)).sum().backward()
    converted.state_dict()
    assert sorted(seen) == ["accumulated", "backward", "forward", "gradient", "pre", "state"]
    seen.clear()
    for handle in handles:
        handle.remove()
    converted(torch.randn(2, 8, requires_grad=True)).sum().backward()
    converted.state_dict()
    assert seen == []


def test_tied_weights_and_shared_modules_stay_tied() -> None:
    embedding, head = nn.Embedding(9, 40), nn.Linear(40, 9, bias=False)
    head.weight = embedding.weight
    shared = nn.Linear(40, 40)
    root = nn.ModuleDict({"embedding": embedding, "first": shared, "second": shared, "head": head})
    tejit.convert(root, filter_fn=everything)
    assert root["head"].weight is root["embedding"].weight
    assert root["first"] is root["second"]
    assert root["first"].name == "first"
    assert type(root["embedding"]) is nn.Embedding


def test_twice_is_once_and_none_goes_back() -> None:
    plain = model()
    attributes = {name: set(vars(module)) for name, module in plain.named_modules()}
    state, x = copy.deepcopy(plain.state_dict()), torch.randn(3, 40)
    want = step(plain, x)
    tejit.convert(plain, filter_fn=everything)
    once = {name: (type(m), set(vars(m))) for name, m in plain.named_modules()}
    tejit.convert(plain, filter_fn=everything)
    assert {name: (type(m), set(vars(m))) for name, m in plain.named_modules()} == once
    assert list(plain.state_dict()) == list(state)
    with tejit.autocast():
        step(plain, x)
    assert tejit.convert(plain, recipe="none") is plain
    assert not any(isinstance(module, tejit.Linear) for module in plain.modules())
    assert {name: set(vars(module)) for name, module in plain.named_modules()} == attributes
    assert_same(step(plain, x), want)
    plain.load_state_dict(state, strict=True)


def test_modules_made_by_our_own_classes_go_back_too() -> None:
    ours = nn.Sequential(tejit.Linear(5, 6), nn.ReLU(), tejit.Linear(6, 7, return_bias=True, name="last"))
    with pytest.warns(UserWarning, match=r"1 of 2 layers as they are: 2 \(torch's Linear has no return_bias\)"):
        tejit.convert(ours, recipe="none")
    assert [type(module) for module in ours] == [nn.Linear, nn.ReLU, tejit.Linear]


def test_the_filter_sees_layers_with_their_names() -> None:
    plain, asked = model(), []

    def only_up(module: nn.Module, name: str) -> bool:
        asked.append((name, type(module)))
        return name.endswith("up")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tejit.convert(plain, filter_fn=only_up)
    assert asked == [(name, nn.Linear) for name in ("0.up", "0.down", "1.up", "1.down", "2")]
    assert [name for name, m in plain.named_modules() if isinstance(m, tejit.Linear)] == ["0.up", "1.up"]


def test_layers_too_small_to_gain_are_left_and_named_once() -> None:
    plain = nn.ModuleDict({"wide": nn.Linear(1024, 1024), "head": nn.Linear(1024, 10), "flat": nn.Linear(16, 4096)})
    with pytest.warns(UserWarning, match="high precision") as caught:
        tejit.convert(plain, recipe=Float8CurrentScaling())
    assert [type(module) for module in plain.values()] == [tejit.Linear, nn.Linear, nn.Linear]
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("tejit.convert left 2 of 3 layers in high precision under Float8CurrentScaling")
    assert "head (too small to gain: 1024 -> 10, and a square layer starts at 730)" in message
    assert "flat (too small to gain: 16 -> 4096" in message
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("recipe", "width"),
    [
        (DelayedScaling(), 486.1),
        (Float8CurrentScaling(), 729.1),
        (Float8BlockScaling(), 585.5),
        (MXFP8BlockScaling(), 486.1),
        (NVFP4BlockScaling(), 607.6),
    ],
)
def test_the_bound_of_smallness_is_where_the_measured_rates_break_even(recipe, width) -> None:
    """The times themselves: three GEMMs in bfloat16 against three and the quantizations, with tokens without end."""
    assert smallest_square(recipe.linear) == pytest.approx(width, abs=0.1)
    tokens, low = 1e12, 1175e12 if isinstance(recipe, Float8BlockScaling) else 1356e12
    moved = {Float8CurrentScaling: 6, NVFP4BlockScaling: 5}.get(type(recipe), 4)

    def gains(i: int, o: int) -> bool:
        operations, elements = 6 * tokens * i * o, tokens * i + tokens * o + i * o
        return operations / low + elements * moved / 4.1e12 < operations / 711e12

    below, above = int(width), int(width) + 1
    for i, o in ((below, below), (above, above), (16, 4096), (below, 4 * below), (300, 8192)):
        assert (too_small_to_gain(recipe.linear, i, o) is None) == gains(i, o), (i, o)


def test_overrides_decide_by_name_what_is_too_small() -> None:
    recipe = Float8CurrentScaling(overrides=(("head", None), ("blocks.*", MXFP8BlockScaling())))
    plain = nn.ModuleDict({"head": nn.Linear(4, 4), "blocks": nn.Sequential(nn.Linear(600, 600))})
    plain["other"] = nn.Linear(600, 600)
    with pytest.warns(UserWarning, match=r"other \(too small to gain"):
        tejit.convert(plain, recipe=recipe)
    ours = [isinstance(m, tejit.Linear) for m in (plain["head"], plain["blocks"][0], plain["other"])]
    assert ours == [True, True, False]


class Constructed(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class WithMethod(nn.Linear):
    def norm(self):
        return self.weight.norm()


def test_subclasses_that_compute_something_else_are_left_and_named() -> None:
    root = nn.ModuleDict(
        {
            "constructed": Constructed(8),
            "doubled": Doubled(8, 8),
            "method": WithMethod(8, 8),
            "parametrized": parametrizations.weight_norm(nn.Linear(8, 8)),
            "lazy": nn.LazyLinear(8),
            "attention": nn.MultiheadAttention(8, 2),
        }
    )
    with pytest.warns(UserWarning, match="left 5 of 6 layers as they are") as caught:
        tejit.convert(root, filter_fn=everything)
    message = str(caught[0].message)
    assert "doubled (Doubled is a class of its own: it defines forward)" in message
    assert "method (WithMethod is a class of its own: it defines norm)" in message
    assert "parametrized (torch.nn.utils.parametrize" in message
    assert "lazy (LazyLinear has no parameters" in message
    assert "attention.out_proj (nn.MultiheadAttention reads its weight" in message
    assert [name for name, module in root.named_modules() if isinstance(module, tejit.Linear)] == ["constructed"]
    tejit.convert(root, recipe="none")
    assert type(root["constructed"]) is Constructed


def test_a_weight_that_a_hook_computes_goes_on_being_computed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linear = torch.nn.utils.weight_norm(nn.Linear(8, 8))
    want = linear(torch.ones(2, 8))
    tejit.convert(linear, filter_fn=everything)
    assert torch.equal(linear(torch.ones(2, 8)), want)
    with tejit.autocast():
        linear(torch.ones(2, 8)).sum().backward()
    assert linear.weight_v.grad is not None


def test_copies_and_files_of_a_converted_model_are_converted_models() -> None:
    converted, x = tejit.convert(model(), filter_fn=everything), torch.randn(3, 40)
    with tejit.autocast():
        want = step(converted, x)
        buffer = io.BytesIO()
        torch.save(converted, buffer)
        buffer.seek(0)
        copies = [
            copy.deepcopy(converted),
            pickle.loads(pickle.dumps(converted)),
            torch.load(buffer, weights_only=False),
        ]
        for twin in copies:
            assert_same(step(twin, x), want)


def test_meta_models_are_converted_before_they_have_memory() -> None:
    with torch.device("meta"):
        plain = model()
    tejit.convert(plain, filter_fn=everything)
    plain.to_empty(device="cpu")
    plain.load_state_dict(model().state_dict())
    with tejit.autocast():
        assert plain(torch.randn(3, 40)).isfinite().all()


def test_a_converted_model_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    converted = tejit.convert(model(), filter_fn=everything)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(converted, backend=counter, fullgraph=True)
    for rows in (4, 6, 10):
        x = torch.randn(rows, 40, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        with tejit.autocast():
            got, want = compiled(x), converted(x)
            assert torch.equal(got, want)
            got.sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_linear_layers_of_hugging_face_keep_their_layout(dtype) -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    plain = nn.Sequential(pytorch_utils.Conv1D(61, 40)).to(dtype)  # 40 -> 61
    nn.init.normal_(plain[0].bias)
    converted = tejit.convert(copy.deepcopy(plain), filter_fn=everything)
    x = torch.randn(2, 5, 40, dtype=dtype)
    assert_same(step(converted, x), step(plain, x))
    assert (converted[0].in_features, converted[0].out_features, converted[0].name) == (40, 61, "0")

    linear = tejit.Linear(40, 61, dtype=dtype)
    linear.load_state_dict({"weight": plain[0].weight.t(), "bias": plain[0].bias})
    with tejit.autocast(recipe=MXFP8BlockScaling()):
        got, want = step(converted, x), step(nn.Sequential(linear), x)
    want["0.weight"] = want["0.weight"].t()
    assert_same(got, want)

    attributes = set(vars(plain[0]))
    tejit.convert(converted, recipe="none")
    assert type(converted[0]) is pytorch_utils.Conv1D
    assert set(vars(converted[0])) == attributes
    with pytest.warns(UserWarning, match="40 -> 61"):
        tejit.convert(converted)


def norms() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.LayerNorm(24),
        nn.LayerNorm((4, 24), eps=1e-3, bias=False),
        nn.LayerNorm(24, elementwise_affine=False),
        nn.RMSNorm(24),
        nn.RMSNorm((4, 24), eps=1e-6, elementwise_affine=False),
    )
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_norms_are_converted_with_all_that_they_were_made_with(dtype) -> None:
    plain = norms().to(dtype)
    converted, x = copy.deepcopy(plain), torch.randn(3, 4, 24, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tejit.convert(converted)
    assert [type(m) for m in converted] == [tejit.LayerNorm] * 3 + [tejit.RMSNorm] * 2
    assert [repr(m) for m in converted] == [repr(m) for m in plain]
    assert [m.name for m in converted] == ["0", "1", "2", "3", "4"]
    assert_same(step(converted, x), step(plain, x))
    tejit.convert(converted, recipe="none")
    assert [type(m) for m in converted] == [nn.LayerNorm] * 3 + [nn.RMSNorm] * 2
    assert [set(vars(m)) for m in converted] == [set(vars(m)) for m in plain]
    centered = nn.Sequential(tejit.RMSNorm(24, zero_centered_gamma=True), tejit.LayerNormLinear(8, 8))
    with pytest.warns(UserWarning, match=r"0 \(torch's RMSNorm has no zero_centered_gamma\); 1 \(torch has no module"):
        tejit.convert(centered, recipe="none")


QUANTIZED = {
    "current": (Float8CurrentScaling(), tejit.Float8Tensor),
    "block": (Float8BlockScaling(), tejit.Float8BlockwiseQTensor),
    "mxfp8": (MXFP8BlockScaling(), tejit.MXFP8Tensor),
    "nvfp4": (NVFP4BlockScaling(), tejit.NVFP4Tensor),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_the_bytes_the_recipe_makes_in_each_call(name) -> None:
    recipe, cls = QUANTIZED[name]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    each_call, lives = (tejit.convert(copy.deepcopy(plain), recipe=recipe, filter_fn=everything) for _ in range(2))
    plain_weight, lost = lives[0].weight, []
    plain_weight.main_grad = torch.zeros(128, 64)
    lives[0].weight.register_hook(lambda gradient: lost.append("hook"))
    lives[0].weight.register_post_accumulate_grad_hook(lambda parameter: lost.append("accumulated"))
    tejit.convert(lives, recipe=recipe, quantize_params=True, filter_fn=everything)
    assert [type(m.weight) for m in (lives[0], lives[2])] == [cls, cls]
    assert isinstance(lives[0].weight, nn.Parameter)
    assert lives[0].weight.main_grad is plain_weight.main_grad
    assert type(lives[0].bias) is nn.Parameter
    again = lives[0].weight
    assert tejit.convert(lives, recipe=recipe, quantize_params=True, filter_fn=everything)[0].weight is again

    x = torch.randn(32, 64)
    with tejit.autocast(recipe=recipe):
        torch.manual_seed(1)
        want = each_call(x)
        torch.manual_seed(1)
        got = lives(x)
        got.sum().backward()
    assert torch.equal(got, want)
    assert lost == ["hook", "accumulated"]

    values = lives[0].weight.dequantize().detach()
    tejit.convert(lives, recipe="none")
    assert type(lives[0]) is nn.Linear
    assert type(lives[0].weight) is nn.Parameter
    assert torch.equal(lives[0].weight, values)
    assert lives[0].weight.main_grad is plain_weight.main_grad


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_weights_of_groups_become_quantized_too(name) -> None:
    """Oracle: the same module, whose weights are quantized in each call. The groups are told what they are."""
    recipe, cls = QUANTIZED[name]
    torch.manual_seed(0)
    each_call = nn.Sequential(tejit.GroupedLinear(3, 64, 128))
    lives, roles = copy.deepcopy(each_call), []
    tejit.convert(lives, recipe=recipe, quantize_params=True)
    assert [type(lives[0]._parameters[f"weight{i}"]) for i in range(3)] == [cls] * 3
    assert lives[0].name == "0"
    x = torch.randn(32, 64)
    found = []
    for module in (each_call, lives):
        given = x.clone().requires_grad_()
        torch.manual_seed(1)
        with tejit.autocast(recipe=recipe):
            y = module[0](given, [5, 0, 27])
        y.square().sum().backward()
        found.append([y, given.grad, *[p.grad for p in module.parameters()]])
    for want, got in zip(*found, strict=True):
        assert torch.equal(got, want)

    def qfactory(role):
        roles.append((role.module_type, role.tensor_type, role.name))
        return tejit.MXFP8Quantizer()

    kept = copy.deepcopy(each_call)
    tejit.convert(kept, recipe=recipe_with(None), quantize_params=True)
    assert type(kept[0].weight0) is nn.Parameter
    tejit.convert(kept, recipe=CustomRecipe(qfactory), quantize_params=True)
    assert type(kept[0].weight0) is tejit.MXFP8Tensor
    assert set(roles) == {("grouped_linear", tensor, "0") for tensor in ("input", "weight", "grad_output")}


def recipe_with(other) -> MXFP8BlockScaling:
    return MXFP8BlockScaling(overrides=(("0", other),))


def test_quantized_weights_stay_tied_on_the_way_there_and_back() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    embedding, head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    head.weight = embedding.weight
    root = nn.Sequential(embedding, first, second, head)
    tokens = torch.arange(6)
    want = root(tokens)
    recipe = MXFP8BlockScaling()
    tejit.convert(root, recipe=recipe, filter_fn=everything, quantize_params=True)
    assert isinstance(first.weight, tejit.MXFP8Tensor)
    assert first.weight is second.weight
    assert head.weight is embedding.weight
    with tejit.autocast(recipe=recipe):
        got = root(tokens)
    assert 0 < (got - want).norm() / want.norm() < 0.1
    got.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in root.parameters())
    tejit.convert(root, recipe="none")
    assert type(first.weight) is nn.Parameter
    assert first.weight is second.weight
    assert head.weight is embedding.weight


def test_a_weight_that_a_hook_makes_is_quantized_in_each_call_and_named() -> None:
    root = nn.Sequential(nn.Linear(64, 64))
    nn.utils.prune.l1_unstructured(root[0], "weight", 0.5)
    twin, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64)
    twin[0].weight, twin[0].bias = nn.Parameter(root[0].weight.detach()), root[0].bias
    with pytest.warns(UserWarning, match="left 1 weights in high precision: 0 .it is no parameter"):
        tejit.convert(root, filter_fn=everything, quantize_params=True)
    tejit.convert(twin, filter_fn=everything)
    with tejit.autocast():
        assert torch.equal(root(x), twin(x))


def test_a_tied_weight_for_which_the_recipe_has_two_formats_stays() -> None:
    """Quantized in one of them, the other layer could not read it."""
    root = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("a", "b", "c")})
    root["b"].weight = root["a"].weight
    recipe = Float8CurrentScaling(overrides=(("a", MXFP8BlockScaling()),))
    with pytest.warns(UserWarning, match=r"left 2 weights in high precision: a, b \(it is tied to one"):
        tejit.convert(root, recipe=recipe, filter_fn=everything, quantize_params=True)
    assert root["b"].weight is root["a"].weight
    assert [type(root[name].weight) for name in root] == [nn.Parameter, nn.Parameter, tejit.Float8Tensor]
    x = torch.randn(8, 64)
    with tejit.autocast(recipe=recipe):
        y = root["c"](root["b"](root["a"](x)))
    with tejit.autocast(recipe=MXFP8BlockScaling()):
        want = root["a"](x)
    with tejit.autocast(recipe=Float8CurrentScaling()):
        want = root["c"](root["b"](want))
    assert torch.equal(y, want)
    # Delayed scaling has the bytes of current scaling, and high precision reads any.
    recipe = Float8CurrentScaling(overrides=(("a", None), ("b", DelayedScaling())))
    tejit.convert(root, recipe=recipe, quantize_params=True)
    assert type(root["a"].weight) is tejit.Float8Tensor
    assert root["b"].weight is root["a"].weight
    with tejit.autocast(recipe=recipe):
        assert root["c"](root["b"](root["a"](x))).isfinite().all()


@pytest.mark.parametrize("history", [16, 2048])
def test_delayed_scaling_is_prepared_by_the_recipe(history) -> None:
    """State-dict keys from the start, room for a long history, and the losses of a model built under the recipe."""
    recipe, x = DelayedScaling(amax_history_len=history), torch.randn(8, 40)
    plain = model()
    others = tejit.convert(copy.deepcopy(plain), filter_fn=everything)
    assert list(others.state_dict()) == list(plain.state_dict())
    converted = tejit.convert(copy.deepcopy(plain), recipe=recipe, filter_fn=everything)
    keys = [key for key in converted.state_dict() if key not in plain.state_dict()]
    assert len(keys) == 5 * 4
    assert all("_delayed_" in key for key in keys)

    with tejit.autocast(recipe=recipe):
        built = nn.Sequential(tejit.Linear(40, 80), tejit.Linear(80, 7))
    swapped = nn.Sequential(nn.Linear(40, 80), nn.Linear(80, 7))
    swapped.load_state_dict(tejit.nn.plain_state_dict(built))
    tejit.convert(swapped, recipe=recipe, filter_fn=everything)
    for _ in range(3):
        results = []
        for module in (built, swapped):
            with tejit.autocast(recipe=recipe):
                y = module(x)
            y.square().sum().backward()
            results.append(y.detach())
        assert torch.equal(*results)
    for (name, got), (_, want) in zip(swapped.state_dict().items(), built.state_dict().items(), strict=True):
        assert torch.equal(got, want), name
    tejit.convert(swapped, recipe="none")
    assert list(swapped.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(swapped.buffers()) == []


def test_quantized_weights_under_delayed_scaling_are_scaled_by_their_own_amax() -> None:
    recipe, x = DelayedScaling(), torch.randn(16, 32)
    linear = nn.Linear(32, 48)
    want, values = linear(x), linear.weight.detach().clone()
    tejit.convert(linear, recipe=recipe, filter_fn=everything, quantize_params=True)
    quantized = tejit.Float8CurrentScalingQuantizer()(values).dequantize()
    assert torch.equal(linear.weight.dequantize(), quantized)
    for _ in range(2):  # the first step's input is not scaled yet
        with tejit.autocast(recipe=recipe):
            y = linear(x)
        y.sum().backward()
    assert 0 < (y - want).norm() / want.norm() < 0.1
    assert linear.weight.grad is not None


def test_weights_of_our_own_modules_live_quantized_by_the_names_of_their_products() -> None:
    recipe = Float8CurrentScaling(overrides=(("mlp.fc1", MXFP8BlockScaling()), ("plain", None)))
    root = nn.ModuleDict({"mlp": tejit.LayerNormMLP(32, 64), "plain": tejit.LayerNormMLP(32, 64)})
    tejit.convert(root, recipe=recipe, quantize_params=True)
    kinds = [type(m) for name in ("mlp", "plain") for m in (root[name].fc1_weight, root[name].fc2_weight)]
    assert kinds == [tejit.MXFP8Tensor, tejit.Float8Tensor, nn.Parameter, nn.Parameter]
    with tejit.autocast(recipe=recipe):
        assert root["plain"](root["mlp"](torch.randn(4, 32))).isfinite().all()


def test_initial_values_are_preserved_where_that_is_asked_for() -> None:
    linear = nn.Linear(32, 32)
    values = linear.weight.detach().clone()
    with tejit.quantized_model_init(preserve_high_precision_init_val=True):
        tejit.convert(linear, filter_fn=everything, quantize_params=True)
        assert type(tejit.convert(nn.Linear(32, 32), filter_fn=everything).weight) is nn.Parameter
    assert torch.equal(linear.weight.get_high_precision_init_val(), values)


def test_overrides_and_sizes_that_do_not_fit_keep_weights_in_high_precision() -> None:
    recipe = MXFP8BlockScaling(overrides=(("0", None),))
    root = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 33))
    with pytest.warns(UserWarning, match=r"Linear.weight of shape \(33, 32\).*stays in high precision"):
        tejit.convert(root, recipe=recipe, filter_fn=everything, quantize_params=True)
    assert [isinstance(m.weight, tejit.QuantizedTensor) for m in root] == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ({"module": 3}, TypeError, "module is 3"),
        ({"recipe": "fp8"}, TypeError, "recipe is 'fp8'"),
        ({"recipe": Float8CurrentScaling}, TypeError, "it must be an instance of a recipe"),
        ({"filter_fn": "up"}, TypeError, "filter_fn is 'up'"),
        ({"quantize_params": 1}, TypeError, "quantize_params is 1"),
        ({"quantize_params": True, "recipe": "none"}, ValueError, "needs a recipe that has a format"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, complaint) -> None:
    with pytest.raises(error, match=complaint):
        tejit.convert(**({"module": nn.Linear(2, 2)} | arguments))
