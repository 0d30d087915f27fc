"""TensorSpec: descriptions equal what is described, in eager, under FakeTensorMode, on meta and in a graph."""

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import tejit
from tejit import Float8CurrentScalingQuantizer, Float8Tensor, Float8TensorStorage
from tejit.dynamo import TensorSpec, to_tensor_spec

USAGES = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
def test_spec_of_what_a_quantizer_makes(usage, internal) -> None:
    q = Float8CurrentScalingQuantizer(rowwise=usage[0], columnwise=usage[1], internal=internal)
    x = torch.randn(6, 10, dtype=torch.float16)
    made = q(x)
    spec = to_tensor_spec(made)
    assert spec == TensorSpec((6, 10), torch.float16, q, False, torch.device("cpu"))
    assert spec.is_quantized
    twin = spec.assemble([getattr(made, name) for name in spec.inner_names()])
    assert type(twin) is type(made)
    assert torch.equal(twin.dequantize(), made.dequantize())
    created = spec.create_tensor()
    assert created.__tensor_flatten__() == made.__tensor_flatten__()
    buffers, _ = made.prepare_for_saving()
    assert made.device.type == "cpu"
    assert made.shape == (6, 10)
    made.restore_from_saved(buffers)


def test_plain_tensors() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    spec = to_tensor_spec(x)
    assert spec == TensorSpec([3, 4], torch.float32, None, True, "cpu")
    assert not spec.is_quantized
    assert spec.inner_names() == ("data",)
    assert spec.create_metadata() is None
    made = spec.create_tensor()
    assert made.requires_grad
    assert made.shape == x.shape
    with pytest.raises(ValueError, match="plain tensor"):
        spec.update_usage(rowwise_usage=False)
    with pytest.raises(TypeError, match="neither a tensor"):
        to_tensor_spec(3)
    orphan = Float8TensorStorage(data=torch.zeros(2, 2, dtype=torch.uint8), fp8_scale_inv=torch.ones(1))
    with pytest.raises(TypeError, match="does not know its quantizer"):
        to_tensor_spec(orphan)


def test_update_usage_takes_another_quantizer() -> None:
    q = Float8CurrentScalingQuantizer()
    spec = TensorSpec((4, 4), torch.bfloat16, q, device="cpu")
    other = TensorSpec((4, 4), torch.bfloat16, q, device="cpu")
    spec.update_usage(columnwise_usage=False)
    assert q.columnwise_usage
    assert spec != other
    assert spec.inner_names() == ("_data", "_scale_inv")
    with pytest.raises(ValueError, match="3 inner tensors were given; this spec has 2"):
        spec.assemble(other.create_inner_tensors())


def test_order_of_the_storage_is_enforced() -> None:
    class Backwards(Float8CurrentScalingQuantizer):
        def inner_tensor_specs(self, shape, device=None):
            return dict(reversed(super().inner_tensor_specs(shape, device).items()))

    with pytest.raises(RuntimeError, match=r"Backwards\.inner_tensor_specs.*storage's order"):
        TensorSpec((4, 4), torch.bfloat16, Backwards(), device="cpu").inner_names()


def test_requires_grad() -> None:
    spec = TensorSpec((4, 4), torch.bfloat16, Float8CurrentScalingQuantizer(), requires_grad=True, device="cpu")
    assert spec.create_tensor().requires_grad
    assert to_tensor_spec(spec.create_tensor()) == spec


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "meta"])
def test_fake_tensors(device) -> None:
    """The layout follows the spec's own device, also one that this machine does not have."""
    spec = TensorSpec((4, 6), torch.bfloat16, Float8CurrentScalingQuantizer(), device=device)
    with FakeTensorMode(allow_non_fake_inputs=False):
        made = spec.create_tensor()
        assert type(made) is Float8Tensor
        assert made.device == torch.device(device)
        assert made._transpose.shape == (6, 4)
        assert made._data.device == torch.device(device)


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
def test_in_a_graph_with_symbolic_sizes(internal) -> None:
    q = Float8CurrentScalingQuantizer(internal=internal)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def create(x):
        made = TensorSpec(tuple(x.shape), x.dtype, q, device=x.device).create_tensor()
        return (made._data, made._transpose, made._scale_inv) if internal else made

    for rows in (4, 6, 10):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        made = create(x)
        want = q.make_empty(x.shape, device="cpu")
        if internal:
            assert [t.shape for t in made] == [want._data.shape, want._transpose.shape, want._scale_inv.shape]
        else:
            assert made.__tensor_flatten__() == want.__tensor_flatten__()
            assert made.shape == want.shape
            assert made.stride() == want.stride()
    assert counter.frame_count == 1


def test_spec_of_a_tensor_inside_a_graph() -> None:
    t = Float8CurrentScalingQuantizer(columnwise=False)(torch.randn(4, 8))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def twin(t):
        return to_tensor_spec(t).create_tensor()

    made = twin(t)
    assert made.__tensor_flatten__() == t.__tensor_flatten__()


def test_inner_tensor_fields_keep_their_place_and_clash_loudly() -> None:
    from typing import Annotated

    class Base(tejit.QuantizedTensorStorage):
        _one: Annotated[torch.Tensor, tejit.InnerTensor("one")]
        _two: Annotated[torch.Tensor, tejit.InnerTensor("two")]

    class Child(Base):
        _three: Annotated[torch.Tensor, tejit.InnerTensor("three")]
        _one: Annotated[torch.Tensor, tejit.InnerTensor("first")]

    assert Child._INNER_TENSORS == {"_one": "first", "_two": "two", "_three": "three"}
    with pytest.raises(TypeError, match="_one and _again have one keyword, 'one'"):

        class Clash(Base):
            _again: Annotated[torch.Tensor, tejit.InnerTensor("one")]

    with pytest.raises(TypeError, match=r"_version: torch\.Tensor uses this name"):

        class Taken(Base):
            _version: Annotated[torch.Tensor, tejit.InnerTensor("version")]


@pytest.mark.parametrize("wrong", ["mxfp8", tejit.MXFP8Quantizer, 0])
def test_what_is_no_quantizer_is_refused(wrong) -> None:
    with pytest.raises(TypeError, match="it must be a quantizer, or None"):
        TensorSpec((32, 32), torch.float32, wrong)
