"""`quantized_model_init`: parameters that live quantized, from construction to training."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

import tejit
from tejit import recipe as recipes
from tejit.nn import init
from tests.common import DEVICES, DTYPES, assert_bitwise_equal, short
from tests.formats.registry import buffers

RECIPES = {
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
TENSORS = {
    "current": tejit.Float8Tensor,
    "block": tejit.Float8BlockwiseQTensor,
    "mxfp8": tejit.MXFP8Tensor,
    "nvfp4": tejit.NVFP4Tensor,
}
each_recipe = pytest.mark.parametrize("name", list(RECIPES))


def built(name, *sizes, seed=0, preserve=False, **arguments):
    torch.manual_seed(seed)
    with tejit.quantized_model_init(recipe=RECIPES[name], preserve_high_precision_init_val=preserve):
        return tejit.Linear(*sizes, **arguments)


def twin(*sizes, seed=0, **arguments) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(*sizes, **arguments)


def assert_same_bytes(got, want) -> None:
    assert type(got) is type(want)
    assert list(buffers(got)) == list(buffers(want))
    for key, buffer in buffers(want).items():
        assert_bitwise_equal(getattr(got, key), buffer, key)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@each_recipe
def test_the_weight_is_what_the_recipe_makes_of_torchs_own(name, dtype, device) -> None:
    module = built(name, 64, 96, device=device, dtype=dtype)
    plain = twin(64, 96, device=device, dtype=dtype)
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, TENSORS[name])
    assert weight.requires_grad
    assert weight.dtype == dtype
    assert weight.get_usages() == {"rowwise": True, "columnwise": True}
    assert_same_bytes(weight, RECIPES[name].linear.weight.both.replace(internal=False)(plain.weight.detach()))
    assert type(module.bias) is nn.Parameter
    assert_bitwise_equal(module.bias, plain.bias)
    assert not hasattr(weight, "get_high_precision_init_val")


@each_recipe
def test_without_gradients_there_is_rowwise_data_only(name) -> None:
    with torch.no_grad():
        weight = built(name, 64, 96).weight
    assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    assert set(buffers(weight)) < set(buffers(built(name, 64, 96).weight))


@pytest.mark.parametrize(("name", "sizes"), [("mxfp8", (767, 61)), ("mxfp8", (64, 48)), ("nvfp4", (40, 64))])
def test_a_weight_that_does_not_fit_stays_in_high_precision_and_says_so_once(name, sizes) -> None:
    init._say_it_stays.cache_clear()
    with pytest.warns(UserWarning, match=rf"Linear.weight of shape \({sizes[1]}, {sizes[0]}\).*stays in high") as said:
        module = built(name, *sizes)
    assert len(said) == 1
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built(name, *sizes)
    assert type(module.weight) is nn.Parameter
    with tejit.autocast(recipe=RECIPES[name]):
        module(torch.randn(5, sizes[0])).sum().backward()
    assert module.weight.grad.isfinite().all()


def test_contexts_nest_and_belong_to_their_thread() -> None:
    other: list[object] = []
    with tejit.quantized_model_init(recipe=RECIPES["mxfp8"]) as outer:
        with tejit.quantized_model_init(False), outer:
            assert isinstance(tejit.Linear(64, 64).weight, tejit.MXFP8Tensor)
        with tejit.quantized_model_init(False):
            assert type(tejit.Linear(64, 64).weight) is nn.Parameter
        with tejit.quantized_model_init(recipe=RECIPES["block"]):
            assert isinstance(tejit.Linear(64, 64).weight, tejit.Float8BlockwiseQTensor)
        with pytest.raises(OSError), tejit.quantized_model_init(False):
            raise OSError
        assert isinstance(tejit.Linear(64, 64).weight, tejit.MXFP8Tensor)
        assert type(nn.Linear(64, 64).weight) is nn.Parameter
        thread = threading.Thread(target=lambda: other.append(type(tejit.Linear(64, 64).weight)))
        thread.start()
        thread.join()
    assert other == [nn.Parameter]
    assert type(tejit.Linear(64, 64).weight) is nn.Parameter
    with tejit.quantized_model_init():
        assert isinstance(tejit.Linear(64, 64).weight, tejit.QuantizedTensor)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"enabled": RECIPES["mxfp8"]}, "enabled is"),
        ({"recipe": "mxfp8"}, "recipe is 'mxfp8'"),
        ({"preserve_high_precision_init_val": 1}, "preserve_high_precision_init_val is 1"),
    ],
)
def test_wrong_arguments(arguments, error) -> None:
    with pytest.raises(TypeError, match=error):
        tejit.quantized_model_init(**arguments)


def test_recipes_decide_by_name_and_role() -> None:
    recipe = recipes.MXFP8BlockScaling(overrides=(("head", None), ("fc*", RECIPES["block"])))
    custom = recipes.CustomRecipe(lambda role: None if role.tensor_type == "weight" else tejit.MXFP8Quantizer())
    with tejit.quantized_model_init(recipe=recipe):
        assert type(tejit.Linear(64, 64, name="head").weight) is nn.Parameter
        assert isinstance(tejit.Linear(64, 64, name="fc1").weight, tejit.Float8BlockwiseQTensor)
        assert isinstance(tejit.Linear(64, 64, name="other").weight, tejit.MXFP8Tensor)
    with tejit.quantized_model_init(recipe=custom):
        assert type(tejit.Linear(64, 64).weight) is nn.Parameter


@each_recipe
def test_init_method_and_the_meta_device(name) -> None:
    def constant(weight) -> None:
        assert type(weight) in (torch.Tensor, nn.Parameter)  # never the quantized one, value by value
        nn.init.normal_(weight, std=0.5)

    torch.manual_seed(3)
    expected = twin(64, 96, seed=0)
    torch.manual_seed(0)
    constant_twin = nn.Linear(64, 96)
    constant(constant_twin.weight.data)
    module = built(name, 64, 96, init_method=constant, preserve=True)
    assert_bitwise_equal(module.weight.get_high_precision_init_val(), constant_twin.weight.detach())

    module = built(name, 64, 96, device="meta", preserve=True)
    assert module.weight.is_meta
    assert isinstance(module.weight, TENSORS[name])
    assert module.weight.get_high_precision_init_val() is None
    weight = module.weight
    weight.sharded = True
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    module.reset_parameters()
    assert module.weight is weight
    assert weight.sharded
    assert_bitwise_equal(weight.get_high_precision_init_val(), expected.weight.detach())
    assert_same_bytes(weight, built(name, 64, 96).weight)


def test_an_initialisation_that_fails_leaves_the_parameter() -> None:
    module = built("mxfp8", 64, 96)
    weight, before = module.weight, module.weight.dequantize().detach()

    def fails(weight) -> None:
        raise OSError("no more")

    module._init_method = fails
    with pytest.raises(OSError, match="no more"):
        module.reset_parameters()
    assert module.weight is weight
    assert_bitwise_equal(weight.dequantize().detach(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
@each_recipe
def test_initial_values_are_kept_and_survive(name, dtype) -> None:
    want = twin(64, 96, dtype=dtype).weight.detach()
    module = built(name, 64, 96, dtype=dtype, preserve=True)
    file = io.BytesIO()
    torch.save(module.weight, file)
    file.seek(0)
    for weight in (
        module.weight,
        module.half().float().to(dtype).weight,
        copy.deepcopy(module).weight,
        pickle.loads(pickle.dumps(module)).weight,
        torch.load(file, weights_only=True),
    ):
        value = weight.get_high_precision_init_val()
        assert value.device.type == "cpu"
        assert_bitwise_equal(value, want)
        weight.clear_high_precision_init_val()
        assert weight.get_high_precision_init_val() is None
        weight.clear_high_precision_init_val()  # once more is no error
        weight._high_precision_init_val = value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@each_recipe
def test_without_autocast_the_weight_is_dequantized(name, dtype, device) -> None:
    module = built(name, 64, 96, device=device, dtype=dtype)
    x = torch.randn(3, 5, 64, device=device, dtype=dtype, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    weight = module.weight.dequantize().detach().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = module(x)
        got.square().sum().backward()
    want = F.linear(y, weight, module.bias)
    want.square().sum().backward()
    assert_bitwise_equal(got, want)
    assert_bitwise_equal(x.grad, y.grad)
    assert_bitwise_equal(module.weight.grad, weight.grad)


# -- training -------------------------------------------------------------------------------------------------
class MLP(nn.Module):
    def __init__(self, recipe=None) -> None:
        super().__init__()
        torch.manual_seed(1)
        with tejit.quantized_model_init(recipe is not None, recipe=recipe, preserve_high_precision_init_val=True):
            self.up, self.down = tejit.Linear(32, 128), tejit.Linear(128, 32)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def batches(steps):
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(32, 32, generator=generator) / 6
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        yield x, (x @ target).tanh()


STEPS = 150


def train(model, step, recipe) -> list[float]:
    losses = []
    for x, y in batches(STEPS):
        with tejit.autocast(recipe is not None, recipe=recipe):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def with_masters(model) -> object:
    """AdamW over float32 masters made from the initial values; a step requantizes the parameters."""
    parameters = list(model.parameters())
    masters = []
    for parameter in parameters:
        quantized = isinstance(parameter, tejit.QuantizedTensor)
        value = parameter.get_high_precision_init_val() if quantized else parameter.detach().clone()
        masters.append(nn.Parameter(value))
        if quantized:
            parameter.clear_high_precision_init_val()
    optimizer = torch.optim.AdamW(masters, lr=3e-3)

    def step() -> None:
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)

    return step


@each_recipe
def test_with_float32_masters_training_equals_that_of_high_precision_weights(name) -> None:
    """A weight that is quantized from its master after each step is the weight that is quantized in each call: every
    loss is equal to the bit. Beside training in float32, without any quantization, the last ones lie within 0.02 of
    the first loss (NVFP4: 0.1)."""
    recipe = RECIPES[name]
    quantized = MLP(recipe)
    got = train(quantized, with_masters(quantized), recipe)
    assert isinstance(quantized.up.weight, TENSORS[name])
    plain = MLP()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    assert got == train(plain, step, recipe)
    reference = MLP()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=3e-3)
    want = train(reference, step, None)
    last_got, last_want = (sum(losses[-10:]) / 10 for losses in (got, want))
    assert last_want < 0.1 * want[0]  # there was something to learn, and it was learnt
    assert abs(last_got - last_want) < (0.1 if name == "nvfp4" else 0.02) * want[0]


def test_under_delayed_scaling_a_quantized_weight_has_the_scale_of_its_own_largest_value() -> None:
    """So a step differs from one of float32 weights, whose scale is of earlier steps; both learn the same."""
    recipe = recipes.DelayedScaling(amax_history_len=3)
    quantized, plain = MLP(recipe), MLP()
    masters = {name: p.get_high_precision_init_val() for name, p in quantized.named_parameters() if p.dim() == 2}
    got = train(quantized, with_masters(quantized), recipe)
    for name, master in masters.items():  # trained in place
        weight = quantized.get_parameter(name)
        torch.testing.assert_close(weight._scale_inv, (master.detach().abs().max() / 448).view(1), rtol=1e-6, atol=0)
        assert_same_bytes(weight, RECIPES["current"].linear.weight.both.replace(internal=False)(master.detach()))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    want = train(plain, step, recipe)
    assert got != want
    last_got, last_want = (sum(losses[-10:]) / 10 for losses in (got, want))
    assert last_want < 0.1 * want[0]
    assert abs(last_got - last_want) < 0.02 * want[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
        lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    ],
    ids=["sgd-foreach", "sgd-fused", "adamw-foreach", "adamw-fused"],
)
@pytest.mark.parametrize("name", ["block", "mxfp8"])
def test_torchs_optimizers_train_quantized_parameters(name, make) -> None:
    """Without masters a step that is smaller than half a code is lost, so these steps are large. Of every format one
    step is compared with torch's on plain values in `tests/formats/test_behaviour.py`."""
    model = MLP(RECIPES[name])
    optimizer = make(model.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    losses = train(model, step, RECIPES[name])
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]
    assert isinstance(model.up.weight, TENSORS[name])


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_an_optimizers_state_comes_back_from_a_file(name) -> None:
    recipe = RECIPES[name]

    def steps(model, optimizer, count) -> list[float]:
        losses = []
        for x, y in batches(count):
            with tejit.autocast(recipe=recipe):
                loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model = MLP(recipe)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    steps(model, optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(type(v) is torch.Tensor for s in state["optimizer"]["state"].values() for v in s.values())
    other = MLP(recipe)
    other.load_state_dict(state["model"])
    resumed = torch.optim.Adam(other.parameters(), 1e-2)
    resumed.load_state_dict(state["optimizer"])
    assert steps(model, optimizer, 5) == steps(other, resumed, 5)


@pytest.mark.parametrize(
    ("name", "quantizes"),
    [
        ("mxfp8", True),
        ("current", False),
        *(pytest.param(n, q, marks=pytest.mark.full) for n in ("current", "block", "nvfp4") for q in (True, False)),
    ],
)
def test_one_graph_with_quantized_parameters(name, quantizes) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model, other = MLP(RECIPES[name]), MLP(RECIPES[name])
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for rows in (160, 192, 288):
        x = torch.randn(rows, 32)
        torch._dynamo.mark_dynamic(x, 0)
        with tejit.autocast(quantizes, recipe=RECIPES[name] if quantizes else None):
            got, want = compiled(x), other(x)
        got.square().sum().backward()
        want.square().sum().backward()
        assert_bitwise_equal(got, want)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert_bitwise_equal(mine.grad, theirs.grad)
            mine.grad = theirs.grad = None
            with torch.no_grad():  # what is in a parameter is no constant of the graph
                for parameter in (mine, theirs):
                    parameter.copy_(torch.ones(parameter.shape) / (rows - 100))
    assert counter.frame_count == 1
