"""Quantized parameters under the hooks and loaders of accelerate, and a resized head (row 79 of the field cases)."""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

from accelerate import cpu_offload, disk_offload, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import offload_state_dict
from accelerate.utils.modeling import set_module_tensor_to_device
from transformers import LlamaConfig, LlamaForCausalLM

import tejit
from tejit.tensor import QuantizedTensor
from tests.nn.recipes import RECIPES

NAMES = ("current", "delayed", "block", "MXFP8", "NVFP4 nearest")

pytestmark = pytest.mark.filterwarnings("ignore")


def build(name: str, tied: bool = False, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    with tejit.quantized_model_init(recipe=RECIPES[name]):
        model = nn.Sequential(tejit.Linear(64, 64), tejit.Linear(64, 64), nn.Linear(64, 64), tejit.Linear(64, 64))
    if tied:
        model[3].weight = model[1].weight
    return model


def output(model: nn.Module, name: str) -> torch.Tensor:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), tejit.autocast(recipe=RECIPES[name]):
        return model(x)


def plainly_loaded(name: str, tied: bool) -> nn.Module:
    """The model whose values went through a checkpoint in high precision."""
    model = build(name, tied)
    with torch.no_grad():
        for parameter in model.parameters():
            if isinstance(parameter, QuantizedTensor):
                parameter.copy_(parameter.dequantize())
    return model


def quantized(model: nn.Module) -> list[bool]:
    return [isinstance(m.weight, QuantizedTensor) and isinstance(m.weight, nn.Parameter) for m in model]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("name", NAMES)
def test_79_offload_hooks_keep_parameters_and_output(name, tied) -> None:
    """Tied parameters stay tied, and no others become so."""
    want = output(build(name, tied), name)
    for hooked in (
        cpu_offload(build(name, tied), execution_device="cpu"),
        dispatch_model(build(name, tied), {"": "cpu"}, main_device="cpu", force_hooks=True),
    ):
        for _ in range(2):
            assert torch.equal(output(hooked, name), want)
        assert quantized(hooked) == [True, True, False, True]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("name", NAMES)
def test_79_offload_to_disk_says_how_and_that_works(name, tied, tmp_path) -> None:
    with pytest.raises(RuntimeError, match="offload_state_dict"):
        disk_offload(build(name, tied), tmp_path / "first", execution_device="cpu")
    offload_state_dict(tmp_path, tejit.plain_state_dict(build(name, tied)))
    want = output(plainly_loaded(name, tied), name)
    hooked = disk_offload(build(name, tied), tmp_path, execution_device="cpu")
    for _ in range(2):
        assert torch.equal(output(hooked, name), want)
    places = {"0": "cpu", "1": "disk", "2": "cpu", "3": "disk"}
    mixed = dispatch_model(plainly_loaded(name, tied), places, main_device="cpu", offload_dir=tmp_path)
    assert torch.equal(output(mixed, name), want)


@pytest.mark.parametrize("name", NAMES)
def test_79_set_module_tensor_to_device_quantizes_as_the_parameter_was(name) -> None:
    model = build(name)
    output(model, name)
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    want = model[0].weight._quantizer(values)
    other = build(name)
    other[0].weight.data = values
    for device in ("cpu", "meta"):
        set_module_tensor_to_device(model, "0.weight", device)
        set_module_tensor_to_device(model, "0.weight", "cpu", value=values)
        assert quantized(model)[0]
        assert torch.equal(model[0].weight.dequantize(), want.dequantize())
        assert torch.equal(output(model, name), output(other, name))
    set_module_tensor_to_device(model, "0.weight", "meta")
    set_module_tensor_to_device(model, "0.weight", "cpu", value=want)
    assert quantized(model)[0]
    assert torch.equal(output(model, name), output(other, name))


@pytest.mark.parametrize("name", NAMES)
def test_79_models_on_meta_are_loaded_and_dispatched(name, tmp_path) -> None:
    """``device_map={"": "cpu"}``, from a checkpoint in high precision."""
    torch.save(tejit.plain_state_dict(build(name)), tmp_path / "pytorch_model.bin")
    with init_empty_weights():
        model = build(name, seed=1)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert quantized(model) == [True, True, False, True]
    loaded = load_checkpoint_and_dispatch(model, str(tmp_path), device_map={"": "cpu"})
    assert quantized(loaded) == [True, True, False, True]
    assert torch.equal(output(loaded, name), output(plainly_loaded(name, False), name))


def small(tied: bool) -> Any:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))


@pytest.mark.parametrize("size", [160, 131, 96])
@pytest.mark.parametrize("name", NAMES)
def test_79_a_head_is_resized_with_its_values(name, size) -> None:
    model = small(tied=False)
    with tejit.quantized_model_init(recipe=RECIPES[name]):
        model.lm_head = tejit.Linear(64, 128, bias=False)
    old = model.lm_head.weight.dequantize()
    model.resize_token_embeddings(size)
    kept = min(size, 128)
    assert model.lm_head.weight.shape == (size, 64)
    assert torch.equal(model.lm_head.weight[:kept], old[:kept])
    assert model(torch.arange(8)[None]).logits.shape == (1, 8, size)


def test_79_a_quantized_embedding_is_resized_or_says_why_not() -> None:
    model = small(tied=False)
    quantizer = tejit.MXFP8Quantizer(torch.float8_e4m3fn)
    embedding = model.get_input_embeddings()
    embedding.weight = nn.Parameter(quantizer(embedding.weight.detach()))
    old = embedding.weight.dequantize()
    model.resize_token_embeddings(160)
    assert torch.equal(model.get_input_embeddings().weight.dequantize()[:128], old)
    assert model(torch.arange(8)[None]).logits.shape == (1, 8, 160)
