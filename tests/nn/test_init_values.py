"""`get_high_precision_init_val`: the values that the parameter's bytes were made from, whatever was written to it.

A value is right where quantizing it gives the parameter's bytes; what is expected is what the test itself wrote.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tejit
from tejit import recipe as recipes
from tests.common import DEVICES, DTYPES, assert_bitwise_equal, short
from tests.nn.test_quantized_init import RECIPES, TENSORS, assert_same_bytes, built, each_recipe, twin

KEPT = "_high_precision_init_val"


def layer(name="mxfp8", **arguments) -> tejit.Linear:
    return built(name, 64, 96, preserve=True, **arguments)


def other_values(dtype=torch.float32) -> torch.Tensor:
    return twin(64, 96, seed=5, dtype=dtype).weight.detach()


class Foreign(nn.Module):
    """A module that is not tejit's and loads as torch does; its weight came from one that is."""

    def __init__(self, weight) -> None:
        super().__init__()
        self.weight = weight


def load(module, values) -> None:
    module.load_state_dict({"weight": values}, strict=False)


def load_by_swapping(module, values) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        load(module, values)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@torch.no_grad()
def copy_into(module, values) -> None:
    module.weight.copy_(values)


def assign_data(module, values) -> None:
    module.weight.data = values


WRITES = {
    "load_state_dict": load,
    "load_state_dict by swapping": load_by_swapping,
    "load_state_dict of a foreign module": lambda module, values: load(Foreign(module.weight), values),
    "copy_": copy_into,
    "data =": assign_data,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("write", list(WRITES))
@each_recipe
def test_after_a_copy_the_value_is_what_was_copied(name, write, dtype) -> None:
    module, values = layer(name), other_values(dtype)
    WRITES[write](module, values)
    got = module.weight.get_high_precision_init_val()
    assert_bitwise_equal(got, values)
    assert got.device.type == "cpu"
    values.zero_()  # it is a copy
    assert got.any()
    want = RECIPES[name].linear.weight.both.replace(internal=False).quantize(got, dtype=torch.float32)
    assert_same_bytes(module.weight, want)


@pytest.mark.parametrize("write", list(WRITES))
@each_recipe
def test_after_a_copy_of_a_quantized_tensor_there_is_none(name, write) -> None:
    module, source = layer(name), built(name, 64, 96, seed=5).weight.detach()
    WRITES[write](module, source)
    assert_same_bytes(module.weight, source)
    assert getattr(module.weight, KEPT) is None
    assert module.weight.get_high_precision_init_val() is None
    load(module, other_values())  # and a later load brings one
    assert_bitwise_equal(module.weight.get_high_precision_init_val(), other_values())


@pytest.mark.parametrize("quantized", [False, True])
@each_recipe
def test_an_assigned_parameter_is_another_one_and_keeps_nothing(name, quantized) -> None:
    module = layer(name)
    source = built(name, 64, 96, seed=5) if quantized else twin(64, 96, seed=5)
    module.load_state_dict(source.state_dict(), assign=True)
    assert isinstance(module.weight, tejit.QuantizedTensor) == quantized
    assert not hasattr(module.weight, "get_high_precision_init_val")


def through_the_state_dict(module, values) -> None:
    """As torch.distributed.checkpoint does, which reads into the tensors of a state dict."""
    module.state_dict()["weight"].copy_(values)


@torch.no_grad()
def through_a_graph(module, values) -> None:
    torch._dynamo.reset()
    torch.compile(lambda p, v: p.copy_(v), backend="aot_eager")(module.weight, values)


@torch.no_grad()
def in_place(module, values) -> None:
    module.weight.mul_(3)


HIDDEN = {
    "data": lambda module, values: module.weight.data.copy_(values),
    "state dict": through_the_state_dict,
    "graph": through_a_graph,
    "in place": in_place,
    "quantize_": lambda module, values: module.weight.detach().quantize_(values),
    "a buffer": lambda module, values: next(b for b in module.weight._inner() if b is not None).view(torch.uint8)[0]
    .bitwise_xor_(1),
}  # fmt: skip


@pytest.mark.parametrize("write", list(HIDDEN))
@each_recipe
def test_what_is_written_past_the_parameter_is_noticed(name, write) -> None:
    """Aliases, graphs and kernels write to the bytes, and the parameter hears nothing of it."""
    module = layer(name)
    before = module.weight.dequantize().detach()
    HIDDEN[write](module, other_values())
    assert not torch.equal(module.weight.dequantize(), before)
    assert module.weight.get_high_precision_init_val() is None
    assert getattr(module.weight, KEPT) is None
    load(module, other_values())
    assert_bitwise_equal(module.weight.get_high_precision_init_val(), other_values())


@pytest.mark.filterwarnings("ignore:.*torch.distributed", "ignore:.*TypedStorage")
@each_recipe
def test_distributed_checkpoints(name, tmp_path) -> None:
    dcp.save({"model": twin(64, 96, seed=5).state_dict()}, checkpoint_id=tmp_path)
    module = layer(name)
    content = {"model": module.state_dict()}
    dcp.load(content, checkpoint_id=tmp_path)
    assert module.weight.get_high_precision_init_val() is None  # they were read into the module's own memory
    module.load_state_dict(content["model"])
    assert module.weight.get_high_precision_init_val() is None
    assert_same_bytes(module.weight, RECIPES[name].linear.weight.both.replace(internal=False)(other_values()))


@pytest.mark.parametrize("device", DEVICES)
@each_recipe
def test_a_parameter_without_both_directions_and_one_that_moved(name, device) -> None:
    with torch.no_grad():
        module = layer(name)
    want = module.weight.get_high_precision_init_val()
    assert want is not None
    module.to(device)
    assert module.weight.get_high_precision_init_val() is want
    copied = copy.deepcopy(module)
    assert_bitwise_equal(copied.weight.get_high_precision_init_val(), want)
    load(copied, other_values())
    assert module.weight.get_high_precision_init_val() is want
    module.to("meta")
    assert module.weight.get_high_precision_init_val() is None


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_a_model_from_meta_takes_the_values_that_it_loads(name) -> None:
    module = layer(name, device="meta").to_empty(device="cpu")
    assert module.weight.get_high_precision_init_val() is None
    load(module, other_values())
    assert_bitwise_equal(module.weight.get_high_precision_init_val(), other_values())


def test_what_was_cleared_stays_cleared_and_memory_does_not_grow() -> None:
    module, held = layer(), layer()
    module.weight.clear_high_precision_init_val()
    for step in range(3):
        for each in (module, held):
            copy_into(each, other_values() + step)
        assert KEPT not in vars(module.weight)
        assert_bitwise_equal(held.weight.get_high_precision_init_val(), other_values() + step)
    load(module, other_values())
    assert module.weight.get_high_precision_init_val() is None
    assert KEPT not in vars(module.weight)
    assert KEPT not in vars(built("mxfp8", 64, 96).weight)


@pytest.mark.parametrize("hybrid", [False, True])
def test_stochastic_rounding_is_no_other_value(hybrid) -> None:
    def factory(role):
        rounded = tejit.NVFP4Quantizer(stochastic_rounding=True)
        if not hybrid:
            return rounded
        return tejit.HybridQuantizer(rowwise_quantizer=rounded, columnwise_quantizer=tejit.MXFP8Quantizer())

    recipe = recipes.CustomRecipe(factory)
    torch.manual_seed(0)
    with tejit.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        module = tejit.Linear(64, 96)
    assert_bitwise_equal(module.weight.get_high_precision_init_val(), twin(64, 96).weight.detach())
    module.weight.data.copy_(other_values())
    assert module.weight.get_high_precision_init_val() is None


@each_recipe
def test_masters_of_loaded_weights(name) -> None:
    """The pattern of docs/parameters.md after loading: a step of next to nothing leaves the loaded weights."""
    module, plain = layer(name), twin(64, 96, seed=5)
    module.load_state_dict(plain.state_dict())
    before = module.weight.dequantize().detach().clone()
    master = nn.Parameter(module.weight.get_high_precision_init_val().float())
    module.weight.clear_high_precision_init_val()
    optimizer = torch.optim.SGD([master], 1e-12)
    with tejit.autocast(recipe=RECIPES[name]):
        module(torch.randn(32, 64)).sum().backward()
    master.grad = module.weight.grad.float()
    optimizer.step()
    copy_into(module, master)
    assert isinstance(module.weight, TENSORS[name])
    assert_bitwise_equal(module.weight.dequantize().detach(), before)


def test_a_file_keeps_the_value_and_what_it_is_compared_with() -> None:
    module = layer()
    load(module, other_values(torch.bfloat16))
    file = io.BytesIO()
    torch.save(module.weight, file)
    file.seek(0)
    weight = torch.load(file, weights_only=True)
    assert_bitwise_equal(weight.get_high_precision_init_val(), other_values(torch.bfloat16))


@each_recipe
def test_asking_changes_nothing_and_needs_no_data(name) -> None:
    """Loaded in inference mode they may be written to outside of it; no random number is used up; fake tensors."""
    module, plain = layer(name), twin(64, 96, seed=5)
    with torch.inference_mode():
        module.load_state_dict(plain.state_dict())
    state = torch.get_rng_state()
    values = module.weight.get_high_precision_init_val()
    assert torch.equal(state, torch.get_rng_state())
    assert_bitwise_equal(values, plain.weight.detach())
    values.add_(1)
    with FakeTensorMode():
        assert type(layer(name).weight.get_high_precision_init_val()) is FakeTensor


@each_recipe
def test_without_bytes_there_is_nothing_to_tell_by(name) -> None:
    """While the buffers are given away, or their memory is (as a sharder takes it); afterwards the values are there."""
    weight = layer(name).weight
    want = weight.get_high_precision_init_val()
    buffers, _ = weight.prepare_for_saving()
    assert weight.get_high_precision_init_val() is None
    weight.restore_from_saved(buffers)
    assert weight.get_high_precision_init_val() is want
    kept = [buffer.clone() for buffer in buffers if buffer is not None]
    for buffer in buffers:
        if buffer is not None:
            buffer.untyped_storage().resize_(0)
    assert weight.get_high_precision_init_val() is None
    for buffer, bytes_ in zip([buffer for buffer in buffers if buffer is not None], kept, strict=True):
        buffer.untyped_storage().resize_(bytes_.nbytes)
        buffer.copy_(bytes_)
    assert weight.get_high_precision_init_val() is want
