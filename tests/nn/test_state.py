"""State of modules: to and from `nn.Linear`, files, processes, checkpoints and other releases of torch."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import tejit
from tests.common import DATA, DTYPES, assert_bitwise_equal, short
from tests.data import make_state
from tests.formats.registry import buffers, each_case, quantized
from tests.nn.test_quantized_init import RECIPES, TENSORS, assert_same_bytes, built, each_recipe, twin


def quantizer(name):
    return RECIPES[name].linear.weight.both.replace(internal=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_a_high_precision_layer_and_torchs_exchange_state(dtype) -> None:
    ours, plain = tejit.Linear(64, 96, dtype=dtype), nn.Linear(64, 96, dtype=dtype)
    assert list(ours.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    for source, target in ((ours, plain), (plain, ours)):
        for assign in (False, True):
            with torch.no_grad():
                source.weight.normal_()
            target.load_state_dict(source.state_dict(), strict=True, assign=assign)
            assert_bitwise_equal(target.weight, source.weight)
            assert_bitwise_equal(target.bias, source.bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@each_recipe
def test_a_quantized_layer_and_torchs_exchange_state(name, dtype) -> None:
    plain, ours = twin(64, 96, seed=2, dtype=dtype), built(name, 64, 96)
    assert list(ours.state_dict()) == ["weight", "bias"]
    weight = ours.weight
    weight.tag = "kept"
    ours.load_state_dict(plain.state_dict(), strict=True)  # quantizes
    assert ours.weight is weight
    assert weight.tag == "kept"
    assert weight.dtype == torch.float32
    assert_same_bytes(weight, quantizer(name)(plain.weight.detach()))
    back = nn.Linear(64, 96)
    back.load_state_dict(ours.state_dict(), strict=True)  # dequantizes
    assert type(back.weight) is nn.Parameter
    assert_bitwise_equal(back.weight.detach(), weight.dequantize().detach())
    back.load_state_dict(ours.state_dict(), assign=True)  # takes the tensor as it is
    assert_same_bytes(back.weight, weight)
    x = torch.randn(3, 64)
    torch.testing.assert_close(back(x), ours(x), rtol=1e-5, atol=1e-6)  # torch takes another path to the product
    ours.load_state_dict(plain.state_dict(), assign=True)
    assert type(ours.weight) is nn.Parameter
    assert_bitwise_equal(ours.weight, plain.weight)


@each_recipe
def test_loading_by_swapping_keeps_what_is_attached(name) -> None:
    """torch's switch for tensor subclasses."""
    module, other, plain = built(name, 64, 96), built(name, 64, 96, seed=3), twin(64, 96, seed=2)
    weight, calls = module.weight, []
    weight.main_grad = main_grad = torch.zeros(96, 64)
    weight.register_hook(lambda grad: calls.append("hook"))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for source, want in ((plain, quantizer(name)(plain.weight.detach())), (other, other.weight)):
            module.load_state_dict(source.state_dict())
            assert module.weight is weight
            assert weight.main_grad is main_grad
            assert_same_bytes(weight, want)
            (weight * 1).sum().backward()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert calls == ["hook", "hook"]


@each_recipe
def test_a_state_dict_of_plain_tensors_to_give_away(name) -> None:
    """Oracle: torch's layer, which knows nothing of us, computes the same."""
    module = built(name, 64, 96, dtype=torch.bfloat16)
    plain = tejit.plain_state_dict(module)
    assert list(plain) == list(module.state_dict())
    assert {(type(v), v.dtype, v.requires_grad) for v in plain.values()} == {(torch.Tensor, torch.bfloat16, False)}
    assert plain["bias"].data_ptr() == module.bias.data_ptr()
    stranger = nn.Linear(64, 96, dtype=torch.bfloat16)
    stranger.load_state_dict(plain)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert_bitwise_equal(stranger(x), module(x))
    again = built(name, 64, 96, seed=9, dtype=torch.bfloat16)
    again.load_state_dict(plain)
    error = (again.weight.dequantize() - module.weight.dequantize()).float().norm()
    assert error <= 0.1 * module.weight.dequantize().float().norm()


@pytest.mark.parametrize("sizes", [(96, 64), (64, 128)])
def test_another_size_is_torchs_error(sizes) -> None:
    module = built("mxfp8", 64, 96)
    before = module.weight.dequantize().detach()
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        module.load_state_dict(nn.Linear(*sizes).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*weight"):
        module.load_state_dict({"bias": torch.zeros(96)})
    assert_bitwise_equal(module.weight.dequantize().detach(), before)


@pytest.mark.filterwarnings("ignore:TypedStorage")
@each_recipe
def test_safetensors(name, tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    module = built(name, 64, 96)
    plain = tejit.plain_state_dict(module)
    safetensors.save_file(plain, tmp_path / "plain")
    loaded = safetensors.load_file(tmp_path / "plain")
    target = built(name, 64, 96, seed=4)
    target.load_state_dict(loaded)
    assert_same_bytes(target.weight, quantizer(name)(plain["weight"]))
    # The buffers are plain tensors too.
    safetensors.save_file(buffers(module.weight), tmp_path / "buffers")
    loaded = safetensors.load_file(tmp_path / "buffers")
    for key, buffer in buffers(module.weight).items():
        assert_bitwise_equal(loaded[key], buffer)
    # What is no plain tensor is an error that says what to do, and no file of other bytes.
    for state in (module.state_dict(), {"weight": module.weight}):
        with pytest.raises(RuntimeError, match=rf"a {TENSORS[name].__name__} has no storage.*tejit.plain_state_dict"):
            safetensors.save_file(state, tmp_path / "quantized")
        assert not (tmp_path / "quantized").exists()


@each_recipe
def test_the_plain_form_keeps_ties(name) -> None:
    model = nn.ModuleDict({"a": built(name, 64, 96), "b": built(name, 64, 96), "c": built(name, 64, 96)})
    model["c"].weight = model["a"].weight
    plain = tejit.plain_state_dict(model)
    assert plain["a.weight"] is plain["c.weight"]
    assert plain["a.weight"] is not plain["b.weight"]
    assert_bitwise_equal(plain["b.weight"], model["b"].weight.dequantize().detach())


def test_a_hugging_face_model_is_saved_in_its_plain_form(tmp_path) -> None:
    """Oracle: transformers' own model from the files, which knows nothing of us."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    tejit.convert(model, recipe=RECIPES["mxfp8"], filter_fn=lambda module, name: True, quantize_params=True)
    with pytest.raises(RuntimeError, match=r"save_pretrained\(path, state_dict=tejit.plain_state_dict\(model\)\)"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, state_dict=tejit.plain_state_dict(model))
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(8)[None]
    assert type(again.lm_head.weight) is nn.Parameter
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


@each_recipe
def test_distributed_checkpoints(name, tmp_path) -> None:
    """TE#1860: into models that never ran, quantized and plain ones, from either."""
    quantized, plain = built(name, 64, 96), twin(64, 96, seed=5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed.*")
        warnings.filterwarnings("ignore", message=".*TypedStorage.*")
        for source, place in ((quantized, "quantized"), (plain, "plain")):
            dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path / place)
        targets = {
            (place, kind): target
            for place in ("quantized", "plain")
            for kind, target in (("quantized", built(name, 64, 96, seed=7)), ("plain", twin(64, 96, seed=7)))
        }
        for (place, _), target in targets.items():
            state = {"model": target.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path / place)
            target.load_state_dict(state["model"])
    assert_same_bytes(targets["quantized", "quantized"].weight, quantized.weight)
    assert_bitwise_equal(targets["quantized", "plain"].weight.detach(), quantized.weight.dequantize().detach())
    assert_same_bytes(targets["plain", "quantized"].weight, quantizer(name)(plain.weight.detach()))
    assert_bitwise_equal(targets["plain", "plain"].weight, plain.weight)
    for target in targets.values():
        assert_bitwise_equal(target.bias, (quantized if target in list(targets.values())[:2] else plain).bias)


FRESH = """
import sys, torch, tejit
# Nothing of tejit's was used yet: modules and most recipes are loaded when they are asked for.
for file in sys.argv[2:]:
    content = torch.load(file, weights_only=True)
    for parameter in content.get("parameters") or [content["parameter"]]:
        assert parameter.get_high_precision_init_val() is not None
state = torch.load(sys.argv[1], weights_only=True)
for name, tensors in state.items():
    for assign in (False, True):
        for quantized in (False, True):
            with tejit.quantized_model_init(quantized, recipe=tejit.recipe.MXFP8BlockScaling()):
                module = tejit.Linear(64, 96)
            module.load_state_dict(tensors, strict=True, assign=assign)
            kept = isinstance(module.weight, tejit.QuantizedTensor)
            assert kept == (assign or quantized), (name, assign, quantized)
            weight = module.weight.detach()
            assert torch.equal(weight.dequantize() if kept else weight, tensors["weight"].dequantize()) or (
                quantized and not assign and name != "mxfp8"
            )
            module(torch.ones(2, 64)).sum().backward()
print("all", len(state))
"""


def test_a_fresh_process_loads_the_file(tmp_path) -> None:
    """pytorch/ao#2478."""
    torch.save({name: built(name, 64, 96).state_dict() for name in RECIPES}, tmp_path / "state.pt")
    parameters = [built(name, 64, 96, preserve=True).weight for name in RECIPES]
    torch.save({"parameters": parameters}, tmp_path / "parameters.pt")
    # In this one the parameters' methods stand where they stood at first.
    files = [tmp_path / "state.pt", tmp_path / "parameters.pt", DATA / "state_torch_2_11.pt"]
    command = [sys.executable, "-c", FRESH, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"all {len(RECIPES)}\n", done.stderr


CASES = each_case(only=lambda case: not case.live).args[1]


class Samples(torch.utils.data.Dataset):
    """Quantized tensors of every format: one that a worker makes, and one that it was sent."""

    def __init__(self) -> None:
        self.kept = [quantized(case.quantizer(), torch.ones(64, 96)) for case in CASES]

    def __len__(self) -> int:
        return len(CASES)

    def __getitem__(self, index: int):
        made = quantized(CASES[index].quantizer(), torch.full((64, 96), index + 1.0))
        made.number = index
        return made, self.kept[index]


def alone(batch):
    return batch[0]


@pytest.mark.full
def test_a_spawned_worker_sends_quantized_tensors() -> None:
    """safetensors#515."""
    samples = Samples()
    loader = torch.utils.data.DataLoader(samples, num_workers=1, multiprocessing_context="spawn", collate_fn=alone)
    for index, (made, kept) in enumerate(loader):
        want, _ = samples[index]
        assert_same_bytes(made, want)
        assert made.number == index
        assert_same_bytes(kept, samples.kept[index])


def _answer(pipe) -> None:
    tensor = pipe.recv()
    pipe.send((tensor, tensor.dequantize().sum().item()))
    pipe.recv()  # shared memory lives as long as who made it


@pytest.mark.full
def test_a_spawned_process_gets_a_parameter_and_sends_it_back() -> None:
    context = torch.multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs,))
    process.start()
    weight = built("mxfp8", 64, 96, preserve=True).weight
    mine.send(weight)
    assert mine.poll(120)
    back, total = mine.recv()
    mine.send("done")
    process.join(60)
    assert process.exitcode == 0
    assert_same_bytes(back, weight)
    assert total == weight.dequantize().sum().item()
    assert back.get_high_precision_init_val() is not None
    assert back.get_high_precision_init_val.__self__ is back


@pytest.mark.parametrize("name", list(make_state.RECIPES))
def test_a_file_of_another_torch_loads(name) -> None:
    """Written under torch 2.11 by tests/data/make_state.py; TEJIT_TEST_STATE names a file of another release."""
    file = torch.load(os.environ.get("TEJIT_TEST_STATE", DATA / "state_torch_2_11.pt"), weights_only=True)
    weight = file["state"][name]["weight"]
    recipe = make_state.RECIPES[name]
    want = recipe.linear.weight.both.replace(internal=False)(make_state.values())
    assert_same_bytes(weight, want)
    assert weight._quantizer == want._quantizer
    module = make_state.layer(name)
    with torch.no_grad():
        module.weight.copy_(torch.zeros(weight.shape))
    module.load_state_dict(file["state"][name])
    assert_same_bytes(module.weight, want)
    assert_bitwise_equal(file["parameter"].get_high_precision_init_val(), make_state.values())


def test_a_model_in_a_pickle_trains_on() -> None:
    model = nn.Sequential(built("mxfp8", 64, 96), nn.ReLU(), built("mxfp8", 96, 32))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin_model in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        x = torch.randn(8, 64)
        with tejit.autocast(recipe=RECIPES["mxfp8"]):
            got, want = twin_model(x), model(x)
        assert_bitwise_equal(got, want)
        got.sum().backward()
        assert isinstance(twin_model[0].weight, nn.Parameter)
        assert twin_model[0].weight.grad is not None
