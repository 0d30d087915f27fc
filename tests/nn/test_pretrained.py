"""Models of tejit's modules through the loaders of transformers and accelerate (rows 78 and 98 of the field cases).

Memory that nobody initialises is NaN here, so that it shows.
"""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from accelerate import cpu_offload, init_empty_weights, load_checkpoint_and_dispatch

import tejit
from tejit.tensor import QuantizedTensor
from tests.nn.pretrained import Config, Model, output, state_of, train
from tests.nn.recipes import RECIPES
from tests.nn.test_delayed import assert_same

FAST = ("current", "delayed")
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in RECIPES]
ON_DISK = {
    **dict.fromkeys(("linear", "norm", "norm_linear", "grouped", "rope", "head"), "cpu"),
    **dict.fromkeys(("mlp", "layer"), "disk"),
}

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("poisoned_memory")]


@pytest.fixture
def poisoned_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def trained(name: str, steps: int = 2) -> Model:
    torch.manual_seed(0)
    model = Model(Config())
    train(model, RECIPES[name], steps)
    return model


def stored(model: Model) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state_of(model).items() if "previous" not in key}


def assert_equal_to(model: Model, saved: Model, name: str) -> None:
    """State, output, and what a step of training makes of both."""
    assert_same(stored(model), stored(saved))
    assert torch.equal(output(model, RECIPES[name]), output(saved, RECIPES[name]))
    for each in (model, saved):
        train(each.train(), RECIPES[name], 1)
    assert_same(stored(model), stored(saved))
    for (key, got), want in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(got, want), key


@pytest.mark.parametrize("how", [{}, {"device_map": "cpu"}, {"dtype": torch.float32}], ids=["plain", "map", "dtype"])
@pytest.mark.parametrize("name", NAMES)
def test_78_from_pretrained_is_equal_to_the_model_that_was_saved(name, how, tmp_path) -> None:
    """In one file and in shards; the state of delayed scaling where the model is built under the recipe."""
    saved = trained(name)
    saved.save_pretrained(tmp_path, **({"max_shard_size": "60KB"} if how else {}))
    with tejit.autocast(recipe=RECIPES[name]):
        model, info = Model.from_pretrained(tmp_path, output_loading_info=True, **how)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_equal_to(model, saved, name)


@pytest.mark.parametrize("under", [False, True], ids=["not told the recipe", "built under the recipe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_78_what_was_not_saved_is_fresh(dtype, under, tmp_path) -> None:
    torch.manual_seed(0)
    saved = Model(Config()).to(dtype)
    saved.save_pretrained(tmp_path)
    with tejit.autocast(enabled=under, recipe=RECIPES["delayed"]):
        model = Model.from_pretrained(tmp_path, dtype=dtype)
    assert_same(state_of(model), state_of(Model(Config())))
    for each in (model, saved):
        train(each.train(), RECIPES["delayed"])
    assert_same(stored(model), stored(saved))
    for got, want in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("include_buffers", [False, True])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, "auto"], ids=["no map", "cpu", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_78_load_checkpoint_and_dispatch_is_equal_to_the_model_that_was_saved(
    name, device_map, include_buffers, tmp_path
) -> None:
    saved = trained(name)
    saved.save_pretrained(tmp_path)
    with init_empty_weights(include_buffers=include_buffers), tejit.autocast(recipe=RECIPES[name]):
        model = Model(Config())
    if device_map is None and "delayed" not in name:
        device_map = {"": "cpu"}  # torch loads into a model of which all is on meta in a process group only
    model = load_checkpoint_and_dispatch(model, str(tmp_path / "model.safetensors"), device_map=device_map)
    assert_equal_to(model, saved, name)


@pytest.mark.parametrize("include_buffers", [False, True])
def test_78_dispatched_without_a_saved_state_is_fresh(include_buffers, tmp_path) -> None:
    torch.manual_seed(0)
    saved = Model(Config())
    saved.save_pretrained(tmp_path)
    with init_empty_weights(include_buffers=include_buffers):
        model = Model(Config())
    model = load_checkpoint_and_dispatch(model, str(tmp_path / "model.safetensors"), device_map={"": "cpu"})
    assert_equal_to(model, saved, "delayed")


@pytest.mark.parametrize("name", [pytest.param("current", marks=pytest.mark.full), "delayed"])
@pytest.mark.parametrize("how", ["accelerate", "transformers", "cpu_offload", "cpu_offload with buffers"])
def test_78_offloaded_models_compute_what_was_saved(how, name, tmp_path) -> None:
    saved, recipe = trained(name), RECIPES[name]
    saved.save_pretrained(tmp_path)
    folder = tmp_path / "offload"
    with tejit.autocast(recipe=recipe):
        if how == "accelerate":
            with init_empty_weights():
                model = Model(Config())
            model = load_checkpoint_and_dispatch(
                model, str(tmp_path / "model.safetensors"), ON_DISK, offload_folder=folder, offload_buffers=True
            )
        elif how == "transformers":
            model = Model.from_pretrained(tmp_path, device_map=ON_DISK, offload_folder=folder)
        else:
            model = Model.from_pretrained(tmp_path)
            cpu_offload(model, execution_device="cpu", offload_buffers="buffers" in how)
    want = output(saved, recipe)
    for _ in range(2):
        assert torch.equal(output(model, recipe), want)


# -- parameters that live quantized ---------------------------------------------------------------------------------
def quantized_count(model: Model) -> int:
    return sum(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in (*FAST, "MXFP8") else pytest.mark.full) for n in RECIPES]
)
def test_98_quantized_model_init_around_from_pretrained_quantizes(name, preserve, tmp_path) -> None:
    recipe = RECIPES[name]
    torch.manual_seed(0)
    saved = Model(Config())
    saved.save_pretrained(tmp_path)
    with tejit.quantized_model_init(recipe=recipe):
        want = Model(Config())
    want.load_state_dict(saved.state_dict())
    with tejit.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        model = Model.from_pretrained(tmp_path)
    assert quantized_count(model) == quantized_count(want) > 0
    assert torch.equal(output(model, recipe), output(want, recipe))
    for (key, parameter), plain in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert parameter.requires_grad, key
        if preserve and isinstance(parameter, QuantizedTensor):
            assert torch.equal(parameter.get_high_precision_init_val(), plain), key
    with pytest.raises(RuntimeError, match=r"tejit\.plain_state_dict"):
        model.save_pretrained(tmp_path / "again")
    model.save_pretrained(tmp_path / "plain", state_dict=tejit.plain_state_dict(model))


@pytest.mark.parametrize("preserve", [False, True])
def test_98_plain_values_given_to_a_quantized_module_on_meta_are_quantized(preserve) -> None:
    """By assignment and by ``load_state_dict(assign=True)``; where a module has memory, an assigned plain parameter is
    what the user wants."""
    recipe, plain = RECIPES["current"], tejit.Linear(64, 32)
    for assign in (True, False):
        with tejit.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
            module = tejit.Linear(64, 32, device="meta")
        module.weight.mark = "kept"
        if assign:
            module.load_state_dict(plain.state_dict(), assign=True)
        else:
            module.weight, module.bias = (torch.nn.Parameter(p.detach().clone()) for p in plain.parameters())
        assert isinstance(module.weight, QuantizedTensor)
        assert module.weight.mark == "kept"
        x = torch.randn(4, 64)
        with tejit.autocast(recipe=recipe):
            assert torch.equal(module(x), plain(x))
        if preserve:
            assert torch.equal(module.weight.get_high_precision_init_val(), plain.weight)
    module.weight = torch.nn.Parameter(module.weight.detach().dequantize())
    assert not isinstance(module.weight, QuantizedTensor)
