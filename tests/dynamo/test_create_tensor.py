"""``create_tensor()`` of one spec in eager mode, under FakeTensorMode, on meta and in a graph: one class, buffers,
strides and context, and what ``make_empty`` allocates in C++."""

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

from tejit.dynamo import TensorSpec, to_tensor_spec
from tests.common import assert_bitwise_equal
from tests.dynamo.samples import QUANTIZERS, SHAPE

USAGES = [(True, True), (True, False), (False, True)]
SHAPES = [SHAPE, (2, *SHAPE), (2, 3, *SHAPE), (SHAPE[1],)]


def of_usage(quantizer, usage, internal=False):
    return quantizer.replace(rowwise_usage=usage[0], columnwise_usage=usage[1], internal=internal)


def holds(quantizer, shape) -> bool:
    """Whether the format can hold the shape: a single dimension has one row, which columnwise blocks may refuse."""
    try:
        quantizer.inner_tensor_specs(shape, "cpu")
    except ValueError:
        return False
    return True


def described(tensor) -> dict:
    """Everything that two such tensors have in common, less the device."""
    names, context = tensor.__tensor_flatten__()
    found = {"names": names, "context": context, "shape": tuple(tensor.shape), "dtype": tensor.dtype}
    for name in names:
        buffer = getattr(tensor, name)
        found[name] = (tuple(buffer.shape), buffer.dtype, tuple(buffer.stride()))
    if isinstance(tensor, torch.Tensor):
        found["strides"] = tuple(tensor.stride())
    return found


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_eager_fake_and_meta_agree(name, usage, internal) -> None:
    quantizer = of_usage(QUANTIZERS[name], usage, internal)
    for shape in filter(lambda shape: holds(quantizer, shape), SHAPES):
        for dtype in (torch.float32, torch.bfloat16):
            spec = TensorSpec(shape, dtype, quantizer, device="cpu")
            eager = spec.create_tensor()
            want = described(eager)
            assert described(quantizer.make_empty(shape, dtype=dtype, device="cpu")) == want
            assert described(TensorSpec(shape, dtype, quantizer, device="meta").create_tensor()) == want
            with FakeTensorMode(allow_non_fake_inputs=False):
                assert described(spec.create_tensor()) == want
            served = of_usage(quantizer, quantizer.usages_of(eager), internal)  # identity's one buffer serves both
            assert to_tensor_spec(eager) == TensorSpec(shape, dtype, served, device="cpu")
            x = torch.randn(shape, dtype=dtype)
            made = quantizer.quantize(x)
            assert described(made) == want
            for target in (eager, quantizer.make_empty(shape, dtype=dtype, device="cpu")):
                quantizer.update_quantized(x, target)
                for attribute in want["names"]:
                    assert_bitwise_equal(getattr(target, attribute), getattr(made, attribute), attribute)


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_compiled_agrees(name, usage, internal) -> None:
    """The graph returns the buffers of a storage: torch 2.11 returns no object that holds a quantizer."""
    torch._dynamo.reset()
    quantizer = of_usage(QUANTIZERS[name], usage, internal)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def create(x):
        spec = TensorSpec(tuple(x.shape), x.dtype, quantizer, device=x.device)
        made = spec.create_tensor()
        return [getattr(made, name) for name in spec.inner_names()] if internal else made

    for rows in (128, 160, 256):  # blocks of 128: one block is another graph, torch specialises sizes of 1
        x = torch.randn(2, rows, SHAPE[1], dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 1)
        want = described(TensorSpec(tuple(x.shape), x.dtype, quantizer, device="cpu").create_tensor())
        made = create(x)
        if internal:
            buffers = dict(zip(want["names"], made, strict=True))
            assert {n: (tuple(b.shape), b.dtype, tuple(b.stride())) for n, b in buffers.items()} == {
                n: want[n] for n in want["names"]
            }
        else:
            assert described(made) == want
    assert counter.frame_count == 1


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_to_tensor_spec_in_a_graph(name, internal) -> None:
    """Of a tensor or storage whose buffers are what its quantizer makes; sizes symbolic."""
    torch._dynamo.reset()
    quantizer = QUANTIZERS[name].replace(internal=internal)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def twin(t):
        spec = to_tensor_spec(t)
        return spec.create_inner_tensors()

    for _ in range(2):
        t = quantizer.quantize(torch.randn(SHAPE))
        got = twin(t)
        want = [getattr(t, attribute) for attribute in t.__tensor_flatten__()[0]]
        assert [(b.shape, b.dtype, b.stride()) for b in got] == [(b.shape, b.dtype, b.stride()) for b in want]
    assert counter.frame_count == 1


@pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
@pytest.mark.parametrize("name", ["current", "block_2d", "identity"])
def test_strides_where_every_size_is_symbolic(name, usage) -> None:
    """torch 2.11 took the sizes of what leaves a graph for its strides."""
    torch._dynamo.reset()
    quantizer = of_usage(QUANTIZERS[name], usage)
    run = torch.compile(lambda x: quantizer.quantize(x), backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in ((144, 256), (256, 144), (160, 384), (2, 130, 256), (3, 160, 144)):
        x = torch.randn(shape)
        made, want = run(x), quantizer.quantize(x)
        assert described(made) == described(want)
        assert made.is_contiguous()
        assert torch.equal(made.dequantize(), want.dequantize())
