"""`Module._apply` and copies: attributes, hooks, methods and ties survive, on our modules and on plain ones."""

from __future__ import annotations

import copy
import functools
import pickle
import types
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tejit
from tests.common import DEVICES, assert_bitwise_equal
from tests.formats.registry import buffers, each_case, quantized

SHAPE = (64, 96)


def own_id(tensor: torch.Tensor) -> int:
    return id(tensor)


class Probe:
    """Something attached that is only itself."""

    def __deepcopy__(self, memo):
        return self


def attach(tensor: torch.Tensor) -> torch.Tensor:
    tensor.main_grad = torch.full(tensor.shape, 3.0)
    tensor.grad_added_to_main_grad = True
    tensor.itself = tensor
    tensor.nested = [{"me": (tensor,)}]
    tensor.method = types.MethodType(own_id, tensor)
    tensor.partial = functools.partial(own_id, tensor)
    return tensor


def check(tensor: torch.Tensor) -> None:
    assert tensor.main_grad.dtype == torch.float32
    assert tensor.main_grad.device.type == "cpu"  # attachments are not moved
    assert tensor.main_grad.sum() == 3 * tensor.main_grad.numel()
    assert tensor.grad_added_to_main_grad is True
    assert tensor.itself is tensor
    assert tensor.nested[0]["me"][0] is tensor
    assert tensor.method() == id(tensor)
    assert tensor.partial() == id(tensor)


def check_all(module: nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        check(tensor)


def value_of(case, seed: int = 0):
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    return quantized(case.quantizer(), x)


def ours(case=None) -> nn.Module:
    """A tejit module with a quantized weight (or a plain one) and buffers."""
    module = tejit.Linear(SHAPE[1], SHAPE[0])
    if case is not None:
        module.weight = nn.Parameter(value_of(case))
        module.register_buffer("quantized_buffer", value_of(case, 1))
    module.register_buffer("plain_buffer", torch.ones(3))
    module.below = nn.Module()  # a plain module below ours: nobody else keeps its buffers' attributes
    module.below.register_buffer("plain_buffer", torch.ones(3))
    return module


def plain(case) -> nn.Module:
    """A module that is not ours, with a quantized parameter and buffer."""
    module = nn.Module()
    module.weight = nn.Parameter(value_of(case))
    module.register_buffer("quantized_buffer", value_of(case, 1))
    return module


KINDS = {"ours": ours, "plain": plain}

#: Conversions, and the nominal dtype after them.
CONVERSIONS = {
    "cpu": (lambda m: m.cpu().cpu(), torch.float32),
    "to cpu": (lambda m: m.to("cpu"), torch.float32),
    "apply cpu": (lambda m: m._apply(lambda t: t.cpu()), torch.float32),
    "to bfloat16": (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "type": (lambda m: m.type(torch.float16), torch.float16),
    "half and back": (lambda m: m.half().float(), torch.float32),
    "share_memory": (lambda m: m.share_memory(), torch.float32),
    "deepcopy": (copy.deepcopy, torch.float32),
}


@pytest.mark.parametrize("conversion", list(CONVERSIONS))
@pytest.mark.parametrize("kind", list(KINDS))
@each_case()
def test_attributes_and_bytes_survive_conversions(case, kind, conversion) -> None:
    module = KINDS[kind](case)
    before = {name: attach(t) for name, t in [*module.named_parameters(), *module.named_buffers()]}
    want = {name: value_of(case, seed) for seed, name in enumerate(("weight", "quantized_buffer"))}
    convert, dtype = CONVERSIONS[conversion]
    after = convert(module)
    check_all(after)
    assert after.weight.requires_grad
    assert isinstance(after.weight, nn.Parameter)
    assert after.weight.dtype == after.weight.dequantize().dtype == dtype
    if conversion != "deepcopy":
        assert after.weight is before["weight"]
    for name, tensor in want.items():
        found = getattr(after, name)
        assert type(found) is type(tensor)
        for key, buffer in buffers(tensor).items():
            if case.name.startswith("identity") or "_identity" in key or buffer.is_floating_point():
                continue  # a plain buffer follows the dtype; scales are looked at through the values
            assert_bitwise_equal(getattr(found, key), buffer, key)
        error = (found.dequantize().float() - tensor.dequantize()).abs().max()
        assert error <= tensor.dequantize().abs().max() * torch.finfo(dtype).eps
    if conversion == "share_memory":
        assert all(buffer.is_shared() for buffer in buffers(after.weight).values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", list(KINDS))
@each_case(only=lambda case: not case.live)
def test_every_way_at_once(case, kind, device) -> None:
    """The field's case: there, half, and back again; the method is bound to the surviving object."""
    module = KINDS[kind](case)
    weight = module.weight
    for tensor in [*module.parameters(), *module.buffers()]:
        attach(tensor)
    module.to("cpu").half().to(device).bfloat16().to(device)
    check_all(module)
    assert module.weight is weight
    for tensor in (module.weight, module.quantized_buffer):
        assert tensor.dtype == torch.bfloat16
        assert tensor.device.type == device
        assert {b.device.type for b in buffers(tensor).values()} == {device}
    x = torch.randn(5, SHAPE[1], device=device, dtype=torch.bfloat16)
    torch.nn.functional.linear(x, module.weight).sum().backward()
    assert module.weight.grad.shape == SHAPE
    module.cpu()
    check_all(module)
    assert module.weight.grad.device.type == "cpu"


@pytest.mark.parametrize("kind", list(KINDS))
@each_case(only=lambda case: case.name in ("fp8", "mxfp8", "nvfp4", "hybrid mxfp8 nvfp4"))
def test_to_and_from_the_meta_device(case, kind) -> None:
    module = KINDS[kind](case)
    weight = attach(module.weight)
    weight.register_hook(lambda grad: calls.append("hook"))
    module.tied = module.weight
    calls: list[str] = []
    module.to_empty(device="meta")
    assert module.weight is module.tied is weight
    assert weight.is_meta
    assert all(buffer.is_meta for buffer in buffers(weight).values())
    check(weight)
    module.to_empty(device="cpu")
    assert module.weight is module.tied is weight
    assert not weight.is_meta
    check(weight)
    with torch.no_grad():
        weight.copy_(torch.randn(SHAPE))
    (weight * 1).sum().backward()
    assert calls == ["hook"]


@pytest.mark.parametrize("quantize", [False, True])
def test_meta_parameters_of_ours_keep_everything(quantize) -> None:
    module = ours(next(iter(each_case().args[1])) if quantize else None)
    parameters, calls = dict(module.named_parameters()), []
    for tensor in [*module.parameters(), *module.buffers()]:
        attach(tensor)
    for name, parameter in parameters.items():
        parameter.register_hook(lambda grad, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    twin = nn.Sequential(module, tejit.Linear(*SHAPE))
    twin[1].weight2 = module.weight
    twin.to_empty(device="meta").to_empty(device="cpu")
    check_all(module)
    assert dict(module.named_parameters()) == parameters
    assert twin[1].weight2 is module.weight
    module.reset_parameters()
    module(torch.randn(3, SHAPE[1])).sum().backward()
    assert sorted(calls) == ["after", "after", "bias", "weight"]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("quantize", [True, False])
def test_hooks_fire_after_conversions_those_from_before_and_later_ones(kind, quantize) -> None:
    if kind == "plain" and not quantize:
        pytest.skip("torch's own")
    module = KINDS[kind](next(iter(each_case().args[1])) if quantize else None)
    weight, calls = module.weight, []
    removed = weight.register_hook(lambda grad: calls.append("removed"))
    weight.register_hook(lambda grad: calls.append("before"))
    weight.register_post_accumulate_grad_hook(lambda p: calls.append("post before"))
    module.half()
    weight.register_hook(lambda grad: calls.append("between"))
    module.float().to("cpu")
    weight.register_hook(lambda grad: calls.append("after"))
    weight.register_post_accumulate_grad_hook(lambda p: calls.append("post after"))
    removed.remove()
    module.to(torch.bfloat16)
    (weight * 1).sum().backward()
    assert calls == ["before", "between", "after", "post before", "post after"]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("requires_grad", [True, False])
@each_case(only=lambda case: case.name in ("fp8", "nvfp4"))
def test_requires_grad_gradients_and_ties(case, kind, requires_grad) -> None:
    module = KINDS[kind](case)
    module.weight.requires_grad_(requires_grad)
    module.other = module.weight
    root = nn.Sequential(module, KINDS[kind](case))
    root[1].weight = module.weight
    if requires_grad:
        module.weight.grad = attach(torch.ones(SHAPE))
    for convert, dtype in (
        (lambda m: m.half(), torch.float16),
        (lambda m: m.to("cpu"), torch.float16),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
    ):
        convert(root)
        assert module.weight is module.other is root[1].weight
        assert module.weight.requires_grad is requires_grad
        if requires_grad:
            if kind == "ours":  # a plain module swaps plain gradients, and no class of ours sees it
                check(module.weight.grad)
            assert module.weight.grad.dtype == dtype


@pytest.mark.parametrize("kind", list(KINDS))
@each_case(only=lambda case: case.name in ("fp8", "mxfp8"))
def test_a_failure_half_way_loses_nothing(case, kind) -> None:
    module = KINDS[kind](case)
    module.later = nn.Parameter(torch.ones(7))
    for tensor in [*module.parameters(), *module.buffers()]:
        attach(tensor)
    module.weight.grad = torch.ones(SHAPE)

    def fails(tensor):
        if tensor.shape == (7,):
            raise OSError("no more")
        return tensor.half()

    with pytest.raises(OSError, match="no more"):
        module._apply(fails)
    check_all(module)
    assert module.weight.dtype == torch.float16
    assert module.weight.grad.dtype == torch.float16
    module.float()
    check_all(module)
    assert module.weight.dtype == torch.float32


def test_a_failing_gradient_leaves_its_parameter_as_it_was() -> None:
    module = ours(next(iter(each_case().args[1])))
    attach(module.weight).grad = grad = torch.ones(SHAPE)

    def fails(tensor):
        if tensor is grad:
            raise OSError("no more")
        return tensor.half()

    with pytest.raises(OSError, match="no more"):
        module._apply(fails)
    assert module.weight.dtype == torch.float32
    assert module.weight.grad is grad
    check(module.weight)


@each_case()
def test_a_live_weak_reference_and_a_waiting_graph_do_not_matter(case) -> None:
    """pytorch/pytorch#187008. torch's own modules say that they could not swap."""
    module = ours(case)
    attach(module.weight)
    reference = weakref.ref(module.weight)
    waiting = (module.weight * torch.ones(SHAPE, requires_grad=True)).sum()
    module.to(torch.float32).half()
    assert reference() is module.weight
    assert module.weight.dtype == torch.float16
    check(module.weight)
    del waiting


def test_who_holds_a_parameter_that_must_be_swapped() -> None:
    class Holder:
        def __init__(self, tensor):
            self.reference = weakref.ref(tensor)

    module = ours(next(iter(each_case().args[1])))
    attach(module.weight).grad = grad = torch.ones(SHAPE)
    holder = Holder(module.weight)
    with pytest.raises(RuntimeError, match=r"Linear.weight .* cpu to meta .*held by 1 weak reference.*(Holder|dict)"):
        module.to_empty(device="meta")
    check(module.weight)
    assert module.weight.grad is grad
    assert module.weight.device.type == "cpu"
    del holder
    waiting = (module.weight * torch.ones(SHAPE, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="DistributedDataParallel or another wrapper"):
        module.to_empty(device="meta")
    del waiting
    plain_module = ours()
    reference = weakref.ref(attach(plain_module.weight))
    calls: list[str] = []
    plain_module.weight.register_hook(lambda grad: calls.append("hook"))
    plain_module.to_empty(device="meta").to_empty(device="cpu")  # torch makes new parameters, and so do we
    check(plain_module.weight)
    assert reference() is not plain_module.weight
    (plain_module.weight * 1).sum().backward()
    assert calls == ["hook"]


def test_values_in_high_precision_are_quantized_again() -> None:
    case = next(case for case in each_case().args[1] if case.name == "mxfp8")
    module = ours(case)
    attach(module.weight)
    values = module.weight.dequantize().detach()
    module._apply(lambda t: t.dequantize().half() if hasattr(t, "_quantizer") else t.half())
    assert type(module.weight) is type(value_of(case))
    assert module.weight.dtype == torch.float16
    assert_bitwise_equal(module.weight.dequantize(), values.half())
    check(module.weight)


def test_what_a_quantized_parameter_cannot_become_is_an_error() -> None:
    module = ours(next(iter(each_case().args[1])))
    attach(module.weight)
    with pytest.raises(TypeError, match=r"Linear.weight .*torch.float64.*make it plain first"):
        module.double()
    check(module.weight)
    assert module.weight.dtype == torch.float32


@pytest.mark.parametrize("switch", ["overwrite", "swap"])
def test_torchs_own_switches(switch) -> None:
    name = f"set_{switch}_module_params_on_conversion"
    getattr(torch.__future__, name)(True)
    try:
        for case in (None, next(iter(each_case().args[1]))):
            module = ours(case)
            attach(module.weight)
            attach(module.bias)
            weight = module.weight
            module.half()
            check(module.weight)
            check(module.bias)
            assert (module.weight is weight) == (switch == "swap" or case is not None)
    finally:
        getattr(torch.__future__, name)(False)


@pytest.mark.parametrize("name", [None, "mxfp8", "fp8"])
def test_fake_tensors(name) -> None:
    """A model that is planned before it has memory. torch's own modules cannot swap such parameters."""
    planned = "cuda" if torch.backends.cuda.is_built() else "cpu"  # a build for the CPU cannot even plan for a GPU
    with FakeTensorMode():
        module = ours(next((case for case in each_case().args[1] if case.name == name), None))
        for tensor in [*module.parameters(), *module.buffers()]:
            attach(tensor)
        module.half()
        module.to(planned)
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for tensor_name, tensor in named.items():
            assert tensor.device.type == planned
            assert tensor.dtype == (torch.float32 if "_delayed" in tensor_name else torch.float16)
            assert tensor.grad_added_to_main_grad
            assert tensor.method() == id(tensor)
        assert module(torch.randn(2, SHAPE[1], device=planned, dtype=torch.float16)).shape == (2, SHAPE[0])


@each_case()
def test_a_parameter_in_a_file_keeps_its_attributes(case) -> None:
    parameter = attach(nn.Parameter(value_of(case)))
    twin = pickle.loads(pickle.dumps(parameter))
    check(twin)
    assert twin is not parameter
    assert isinstance(twin, nn.Parameter)
    module = pickle.loads(pickle.dumps(plain(case)))
    assert_bitwise_equal(module.weight.dequantize(), parameter.dequantize())


@each_case()
def test_a_deep_copy_has_buffers_of_its_own(case) -> None:
    module = ours(case)
    module.probe = module.weight.probe = module.bias.probe = Probe()
    twin = copy.deepcopy(module)
    assert twin.weight.probe is twin.bias.probe is module.probe
    for mine, theirs in zip(buffers(module.weight).values(), buffers(twin.weight).values(), strict=True):
        assert_bitwise_equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
    module.tied = module.weight
    twin = copy.deepcopy(nn.ModuleList([module, module]))
    assert twin[0] is twin[1]
    assert twin[0].tied is twin[0].weight


@each_case(usages=True)
def test_everything_a_tensor_has_of_its_own_is_declared(case, usage) -> None:
    """What is not declared counts as attached, and would outlive the values that it was made from."""
    t = quantized(case.quantizer(usage), torch.randn(SHAPE))
    t.dequantize()
    made = [t, t.clone(), t.detach(), t.half(), t.view(2, -1, SHAPE[1]), pickle.loads(pickle.dumps(t)), nn.Parameter(t)]
    for each in made:
        assert set(vars(each)) - {"_is_param"} <= set(each._own_state()) if hasattr(each, "_own_state") else True


def test_swapping_two_quantized_tensors_leaves_each_its_attributes() -> None:
    one, other = (value_of(case) for case in each_case().args[1] if case.name in ("fp8", "mxfp8"))
    one.tag, other.label = "one", "other"
    classes = type(one), type(other)
    values = one.dequantize(), other.dequantize()
    torch.utils.swap_tensors(one, other)
    assert (type(other), type(one)) == classes
    assert_bitwise_equal(other.dequantize(), values[0])
    assert_bitwise_equal(one.dequantize(), values[1])
    assert one.tag == "one"
    assert other.label == "other"
    assert not hasattr(one, "label")
    assert not hasattr(other, "tag")
