"""Hybrid and Identity: what they do that no other format does. What all formats do: tests/formats."""

import pickle

import pytest
import torch

import tejit
from tejit import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensorStorage,
    Float8CurrentScalingQuantizer,
    Float8TensorStorage,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
    Linear,
)
from tejit.dynamo import TensorSpec, is_value_opaque_quantizer
from tejit.recipe import LinearQuantizers, Recipe
from tejit.recipe.recipes import linear_quantizers
from tests.common import DTYPES, assert_bitwise_equal, provoking, short

E5M2 = torch.float8_e5m2


def hybrid(**arguments) -> HybridQuantizer:
    return HybridQuantizer(
        rowwise_quantizer=Float8CurrentScalingQuantizer(),
        columnwise_quantizer=Float8BlockQuantizer(E5M2, block_scaling_dim=1),
        **arguments,
    )


def test_what_it_refuses() -> None:
    q = Float8CurrentScalingQuantizer()
    with pytest.raises(ValueError, match="one instance"):
        HybridQuantizer(rowwise_quantizer=q, columnwise_quantizer=q)
    with pytest.raises(TypeError, match="rowwise_quantizer is 3"):
        HybridQuantizer(rowwise_quantizer=3, columnwise_quantizer=q)
    with pytest.raises(TypeError, match="columnwise_quantizer is a hybrid itself"):
        HybridQuantizer(rowwise_quantizer=q, columnwise_quantizer=hybrid())
    with pytest.raises(ValueError, match="columnwise_source is 'rowwise'"):
        hybrid(columnwise_source="rowwise")
    with pytest.raises(TypeError, match="columnwise_sorce"):
        hybrid(columnwise_sorce="original")
    with pytest.raises(ValueError, match="neither rowwise nor columnwise"):
        hybrid(rowwise=False, columnwise=False)(torch.randn(4, 4))
    with pytest.raises(TypeError, match="needs its HybridQuantizer"):
        HybridQuantizedTensorStorage(quantizer=q)
    with pytest.raises(TypeError, match="'rowwise_dat' is no buffer"):
        HybridQuantizedTensorStorage(quantizer=hybrid(), rowwise_dat=torch.ones(1))
    with pytest.raises(TypeError, match=r"dtype is torch\.float64"):
        IdentityQuantizer(dtype=torch.float64)


def test_children_are_pinned_to_their_directions() -> None:
    q = hybrid(optimize_for_gemm=True)
    row, column = q.rowwise_quantizer, q.columnwise_quantizer
    assert row.get_usages() == {"rowwise": True, "columnwise": False}
    assert column.get_usages() == {"rowwise": False, "columnwise": True}
    assert row.internal
    assert column.optimize_for_gemm
    for other in (q.with_usage(columnwise=False), q.replace(internal=True)):
        assert other.rowwise_quantizer == row
        assert other.columnwise_quantizer == column


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_each_direction_has_its_child_s_bytes(dtype) -> None:
    x = provoking("wide", (70, 136), dtype)
    t = hybrid()(x)
    row = Float8CurrentScalingQuantizer(columnwise=False, internal=True)(x)
    column = Float8BlockQuantizer(E5M2, rowwise=False, block_scaling_dim=1, internal=True)(x)
    assert t.__tensor_flatten__()[0] == [
        "_rowwise_data",
        "_rowwise_scale_inv",
        "_columnwise_columnwise_data",
        "_columnwise_columnwise_scale_inv",
    ]
    for nested, want in ((t.rowwise_storage, row), (t.columnwise_storage, column)):
        assert type(nested) is type(want)
        for mine, theirs in zip(nested._inner(), want._inner(), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
    assert t.rowwise_storage._data is t._rowwise_data
    assert_bitwise_equal(t.dequantize(), row.dequantize())
    assert_bitwise_equal(hybrid(rowwise=False)(x).dequantize(), column.dequantize())


def test_columnwise_from_the_dequantized_rows() -> None:
    x = provoking("wide", (70, 136), torch.bfloat16)
    rounded = Float8CurrentScalingQuantizer()(x).dequantize()
    want = Float8BlockQuantizer(E5M2, rowwise=False, block_scaling_dim=1)(rounded)
    direct = Float8BlockQuantizer(E5M2, rowwise=False, block_scaling_dim=1)(x)
    for usage in ({}, {"rowwise": False}):
        q = hybrid(columnwise_source="rowwise_dequantized", **usage)
        written = q.make_empty((70, 136), device="cpu")
        q.update_quantized(x, written)
        for t in (q(x), written):
            assert torch.equal(t._columnwise_columnwise_data, want._columnwise_data)
            assert not torch.equal(t._columnwise_columnwise_data, direct._columnwise_data)
            assert ("_rowwise_data" in t.__tensor_flatten__()[0]) == (not usage)


def test_update_usage_drops_and_never_makes() -> None:
    x = provoking("normal", (8, 16), torch.float32)
    t = hybrid()(x)
    with pytest.raises(RuntimeError, match="without any direction"):
        t.update_usage(False, False)
    t.update_usage(columnwise_usage=False)
    assert t.columnwise_storage is None
    assert t.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(RuntimeError, match="no columnwise data"):
        t.update_usage(columnwise_usage=True)
    assert_bitwise_equal(t.dequantize(), Float8CurrentScalingQuantizer()(x).dequantize())


def test_a_target_of_another_hybrid_is_refused() -> None:
    other = HybridQuantizer(
        rowwise_quantizer=Float8BlockQuantizer(), columnwise_quantizer=Float8CurrentScalingQuantizer()
    )
    t = hybrid()(torch.randn(8, 16))
    before = t.dequantize()
    with pytest.raises(TypeError, match="made by a Float8CurrentScalingQuantizer"):
        other.update_quantized(torch.randn(8, 16), t)
    assert_bitwise_equal(t.dequantize(), before)
    with pytest.raises(TypeError, match="cannot write into a Float8Tensor"):
        other.update_quantized(torch.randn(8, 16), Float8CurrentScalingQuantizer()(torch.randn(8, 16)))


COLUMNS = {
    "fp8": (Float8CurrentScalingQuantizer(), Float8CurrentScalingQuantizer(E5M2)),
    "blocks": (Float8BlockQuantizer(), Float8BlockQuantizer(block_scaling_dim=1)),
    "mxfp8": (tejit.MXFP8Quantizer(), tejit.MXFP8Quantizer(E5M2)),
    "nvfp4": (tejit.NVFP4Quantizer(), tejit.NVFP4Quantizer(with_rht=True)),
    "identity": (tejit.IdentityQuantizer(), tejit.IdentityQuantizer(dtype=torch.float16)),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_target_that_one_child_refuses_keeps_both_directions(name) -> None:
    mine, theirs = [
        HybridQuantizer(rowwise_quantizer=Float8CurrentScalingQuantizer(), columnwise_quantizer=child)
        for child in COLUMNS[name]
    ]
    t = mine(torch.randn(32, 64))
    before = t.clone()
    with pytest.raises(TypeError, match="instead"):
        theirs.update_quantized(torch.randn(32, 64), t)
    for got, want in zip(t._inner(), before._inner(), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert_bitwise_equal(got, want)


def test_a_dependent_hybrid_quantizes_what_both_children_can() -> None:
    q = HybridQuantizer(
        rowwise_quantizer=tejit.NVFP4Quantizer(),
        columnwise_quantizer=tejit.MXFP8Quantizer(),
        columnwise_source="rowwise_dequantized",
        rowwise=False,
    )
    x = torch.randn(32, 40)  # the columns are made of rows of 40, which NVFP4 has not
    assert not q.is_quantizable(x)
    with pytest.raises(ValueError, match="K = 40"):
        q(x)
    assert q.is_quantizable(torch.randn(32, 48))


def test_constructed_from_nested_buffers() -> None:
    t = hybrid()(torch.randn(8, 16))
    storage = HybridQuantizedTensorStorage(**t.get_metadata())
    assert storage.shape == (8, 16)
    assert isinstance(storage.rowwise_storage, Float8TensorStorage)
    assert isinstance(storage.columnwise_storage, Float8BlockwiseQTensorStorage)
    keywords = {k: v for k, v in t.get_metadata().items() if k != "fake_dtype"}
    tensor = HybridQuantizedTensor((8, 16), torch.float32, **keywords)
    for made in (storage, tensor):
        assert_bitwise_equal(made.dequantize(), t.dequantize())


def test_an_unregistered_child_gives_it_identity_semantics() -> None:
    class Mine(Float8CurrentScalingQuantizer):
        pass

    def make():
        return HybridQuantizer(rowwise_quantizer=Mine(), columnwise_quantizer=Float8BlockQuantizer())

    q = make()
    assert isinstance(q, HybridQuantizer)
    assert not is_value_opaque_quantizer(q)
    assert q != make()
    assert q.with_usage(columnwise=False).columnwise_usage is False
    value = q.replace(rowwise_quantizer=Float8CurrentScalingQuantizer())
    assert is_value_opaque_quantizer(value)
    assert pickle.loads(pickle.dumps(value)) == value
    x = torch.randn(8, 16)
    assert_bitwise_equal(q(x).dequantize(), Float8CurrentScalingQuantizer()(x).dequantize())


# -- Identity -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=short)
@pytest.mark.parametrize("given", DTYPES, ids=short)
def test_identity_casts_or_keeps(given, dtype) -> None:
    x = provoking("wide", (5, 7), given)
    q = IdentityQuantizer(dtype=dtype)
    t = q(x)
    assert type(t) is IdentityTensor
    assert t.dtype == given
    assert t._hp_data.dtype == (dtype or given)
    assert_bitwise_equal(t.dequantize(), x.to(dtype or given).to(given))
    assert t.get_usages() == {"rowwise": True, "columnwise": True}
    for empty in (q.make_empty((5, 7), dtype=given, device="cpu"), TensorSpec((5, 7), given, q, device="cpu")):
        made = empty if isinstance(empty, IdentityTensor) else empty.create_tensor()
        assert made._hp_data.dtype == (dtype or given)
    storage = IdentityTensorStorage(hp_data=x)
    assert storage.dtype == given


def test_identity_views_may_be_written_to() -> None:
    t = IdentityQuantizer()(torch.zeros(4, 6))
    t.view(24)[:5].fill_(1)
    t.t()[0].copy_(torch.full((4,), 2.0))
    want = torch.zeros(24)
    want[:5] = 1
    want = want.view(4, 6)
    want[:, 0] = 2
    assert_bitwise_equal(t.dequantize(), want)
    with pytest.raises(RuntimeError, match="without any direction"):
        t.update_usage(False, False)


class Custom(Recipe):
    """One quantizer for all three tensors of a layer."""

    def __init__(self, quantizer) -> None:
        object.__setattr__(self, "made", linear_quantizers(quantizer, quantizer, quantizer))

    @property
    def linear(self) -> LinearQuantizers:
        return self.made


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_a_layer_under_identity_is_the_layer_without(dtype, compiled) -> None:
    """Oracle: nn.Linear, in float32 where the dtype is bfloat16 (one rounding, as ours)."""
    torch.manual_seed(0)
    layer = Linear(40, 24, dtype=dtype)
    x, dy = provoking("normal", (9, 40), dtype, 1), provoking("normal", (9, 24), dtype, 2)

    def run(module, x):
        x = x.clone().requires_grad_()
        module.zero_grad()
        with tejit.autocast(recipe=Custom(IdentityQuantizer())):
            y = module(x)
        y.backward(dy.to(y.dtype))
        return y.detach(), x.grad, module.weight.grad.clone(), module.bias.grad.clone()

    torch._dynamo.reset()
    got = run(torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer, x)
    exact = torch.nn.Linear(40, 24)
    exact.load_state_dict({k: v.float() for k, v in layer.state_dict().items()})
    want = run(exact, x.float())
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(
            mine.float(), theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-5 if dtype == torch.float32 else 1e-2
        )


def test_a_layer_under_a_hybrid_uses_each_direction_where_it_belongs() -> None:
    """fprop reads rowwise data, dgrad and wgrad columnwise ones: E5M2 there shows in the gradients alone."""
    torch.manual_seed(0)
    layer = Linear(64, 48, bias=False)
    x, dy = provoking("normal", (32, 64), torch.float32, 1), provoking("normal", (32, 48), torch.float32, 2)

    def run(quantizer):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        with tejit.autocast(recipe=Custom(quantizer)):
            y = layer(leaf)
        y.backward(dy)
        return y.detach(), leaf.grad, layer.weight.grad.clone()

    mixed = run(
        HybridQuantizer(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=Float8CurrentScalingQuantizer(E5M2))
    )
    exact = run(IdentityQuantizer())
    assert_bitwise_equal(mixed[0], exact[0])
    for got, want in zip(mixed[1:], exact[1:], strict=True):
        assert 0.01 < (got - want).norm() / want.norm() < 0.12
