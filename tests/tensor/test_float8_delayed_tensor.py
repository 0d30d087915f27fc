"""Float8Quantizer: live state, identity, and the same tensors as current scaling makes."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch

import tejit
from tejit import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor, Float8TensorStorage
from tejit.dynamo import TensorSpec, is_value_opaque_quantizer, to_tensor_spec
from tests.common import DEVICES, DTYPES, FP8_DTYPES, assert_bitwise_equal, provoking, short

USAGES = [(True, True), (True, False), (False, True)]


def make(scale: float = 4.0, device="cpu", **arguments) -> Float8Quantizer:
    return Float8Quantizer(
        scale=torch.full((1,), scale, device=device), amax=torch.zeros(1, device=device), **arguments
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 4), (0, 4)], ids=short)
def test_with_the_scale_of_current_scaling_it_makes_the_same_tensor(shape, dtype, fp8_dtype, usage, device) -> None:
    """Oracle: current scaling, whose bytes are Transformer Engine's. With powers of two 1 / scale_inv is exact."""
    x = provoking("wide", shape, dtype).to(device) if 0 not in shape else torch.empty(shape, dtype=dtype, device=device)
    current = Float8CurrentScalingQuantizer(fp8_dtype, rowwise=usage[0], columnwise=usage[1], force_pow_2_scales=True)(
        x
    )
    q = make(1.0 / current._scale_inv.item(), device, fp8_dtype=fp8_dtype, rowwise=usage[0], columnwise=usage[1])
    t = q(x)
    assert type(t) is Float8Tensor
    assert (t.shape, t.dtype, t.device) == (current.shape, current.dtype, current.device)
    for name in ("_data", "_transpose", "_scale_inv"):
        one, other = getattr(t, name), getattr(current, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert_bitwise_equal(one, other, name)
    assert q.amax.item() == (x.abs().max().item() if x.numel() else 0.0)


def test_the_scale_is_read_when_a_tensor_is_quantized() -> None:
    q, x = make(1.0), torch.full((2, 2), 3.0)
    assert q(x)._scale_inv.item() == 1.0
    q.scale.fill_(8.0)
    t = q(x)
    assert t._scale_inv.item() == 0.125
    assert t.dequantize().tolist() == x.tolist()
    assert q.amax.tolist() == [3.0]
    q(x * 2)
    q(x)
    assert q.amax.tolist() == [6.0]


def test_it_is_equal_to_itself_only() -> None:
    scale, amax = torch.ones(1), torch.zeros(1)
    q, twin = Float8Quantizer(scale=scale, amax=amax), Float8Quantizer(scale=scale, amax=amax)
    assert q == q
    assert q != twin
    assert len({q, twin, q}) == 2
    assert not is_value_opaque_quantizer(q)
    with pytest.raises(AttributeError, match="immutable"):
        q.scale = torch.ones(1)


def test_replace_and_with_usage_keep_the_very_same_state() -> None:
    q = make()
    for other in (q.with_usage(columnwise=False), q.replace(internal=True), copy.copy(q)):
        assert other.scale is q.scale
        assert other.amax is q.amax
    q.with_usage(columnwise=False)(torch.full((2, 2), 5.0))
    assert q.amax.tolist() == [5.0]
    fresh = torch.full((1,), 9.0)
    assert q.replace(scale=fresh).scale is fresh
    with pytest.raises(TypeError, match="no field 'scales'"):
        q.replace(scales=fresh)


def test_a_deep_copy_has_state_of_its_own_that_it_shares_as_before() -> None:
    scale, amaxes = torch.ones(1), torch.zeros(2)
    one = Float8Quantizer(scale=scale, amax=amaxes[:1])
    two = one.with_usage(columnwise=False)
    a, b, state = copy.deepcopy([one, two, scale])
    assert a is not one
    assert a.scale is b.scale is state
    assert a.amax is b.amax
    a(torch.full((2, 2), 5.0))
    assert b.amax.tolist() == [5.0]
    assert amaxes.tolist() == [0.0, 0.0]
    t = one(torch.ones(2, 2))
    assert copy.deepcopy(t)._quantizer is one  # a tensor's copy is quantized again as the tensor would be


def test_pickles_hold_the_values_and_what_is_shared() -> None:
    one = make(3.0, fp8_dtype=torch.float8_e5m2, columnwise=False)
    two = one.replace(internal=True)
    one(torch.full((2, 2), 5.0))
    file = io.BytesIO()
    torch.save([one, two, one(torch.ones(2, 2))], file)
    file.seek(0)
    for a, b, t in (pickle.loads(pickle.dumps([one, two, one(torch.ones(2, 2))])), torch.load(file, weights_only=True)):
        assert type(a) is Float8Quantizer
        assert a != one
        assert (a.fp8_dtype, a.get_usages(), b.internal) == (one.fp8_dtype, one.get_usages(), True)
        assert (a.scale.tolist(), a.amax.tolist()) == ([3.0], [5.0])
        assert t._quantizer is a
        a.amax.fill_(7.0)
        assert b.amax.tolist() == [7.0]
        assert one.amax.tolist() == [5.0]
        assert_bitwise_equal(t.dequantize(), one(torch.ones(2, 2)).dequantize())


def test_a_forged_pickle_is_refused() -> None:
    from tejit.formats.float8.delayed import rebuild_float8_quantizer

    fields = make()._constructor_arguments()
    with pytest.raises(pickle.UnpicklingError, match="no Float8Quantizer"):
        rebuild_float8_quantizer(Float8CurrentScalingQuantizer, fields)
    with pytest.raises(pickle.UnpicklingError, match="no field 'evil'"):
        rebuild_float8_quantizer(Float8Quantizer, {**fields, "evil": 1})
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        rebuild_float8_quantizer(Float8Quantizer, {**fields, "scale": torch.ones(2)})


def test_refusals() -> None:
    one = torch.ones(1)
    for bad, error, match in (
        (torch.ones(()), ValueError, r"shape \(\).*shape \(1,\)"),
        (torch.ones(2), ValueError, r"shape \(2,\)"),
        (torch.ones(1, dtype=torch.float64), TypeError, r"torch\.float64"),
        (1.0, TypeError, r"1\.0"),
    ):
        for name, state in (("scale", {"scale": bad, "amax": one}), ("amax", {"scale": one, "amax": bad})):
            with pytest.raises(error, match=f"{name} .*{match}"):
                Float8Quantizer(**state)
    with pytest.raises(ValueError, match="scale is on cpu and amax on meta"):
        Float8Quantizer(scale=one, amax=one.to("meta"))
    with pytest.raises(TypeError, match="rowwise_usage is 1"):
        Float8Quantizer(scale=one, amax=one, rowwise=1)
    with pytest.raises(TypeError):
        Float8Quantizer(torch.int8, scale=one, amax=one)
    with pytest.raises(ValueError, match="x is on meta and the scale"):
        make()(torch.ones(2, 2, device="meta"))
    with pytest.raises(TypeError, match="the target holds"):
        make().update_quantized(torch.ones(2, 2), make(fp8_dtype=torch.float8_e5m2)(torch.ones(2, 2)))


@pytest.mark.parametrize("device", DEVICES)
def test_update_quantized_and_noop(device) -> None:
    q = make(2.0, device)
    t = q(torch.ones(4, 6, device=device))
    q.amax.zero_()
    x = provoking("normal", (4, 6), torch.float32).to(device)
    before = t.dequantize()
    q.update_quantized(x, t, noop_flag=torch.ones(1, device=device))
    assert_bitwise_equal(t.dequantize(), before)
    assert q.amax.item() == 0.0
    q.update_quantized(x, t, noop_flag=torch.zeros(1, device=device))
    assert_bitwise_equal(t._data, q(x)._data)
    assert_bitwise_equal(t._transpose, q(x)._transpose)
    assert q.amax.item() == x.abs().max().item()
    tripled = t.dequantize() * 3
    t.mul_(3)  # in place: quantized again, with the scale as it stands
    assert t._scale_inv.item() == 0.5
    assert q.amax.item() == tripled.abs().max().item()


def test_straight_through_gradients() -> None:
    x = provoking("normal", (4, 6), torch.float32).requires_grad_()
    make()(x).dequantize().sum().backward()
    assert x.grad.tolist() == torch.ones(4, 6).tolist()


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
def test_specs_and_both_allocations_agree(usage, internal, device) -> None:
    q = make(rowwise=usage[0], columnwise=usage[1], internal=internal, device=device)
    made = q.make_empty((3, 7), dtype=torch.float16, device=device)
    spec = TensorSpec((3, 7), torch.float16, q, device=torch.device(device))
    twin = spec.create_tensor()
    assert made.__tensor_flatten__() == twin.__tensor_flatten__()
    assert type(made) is type(twin) is (Float8TensorStorage if internal else Float8Tensor)
    assert to_tensor_spec(made) == TensorSpec((3, 7), torch.float16, q, device=made.device)
    assert to_tensor_spec(made).quantizer is q
    names = made.__tensor_flatten__()[0]
    assert names == list(q.inner_tensor_specs((3, 7), device))
    for name in names:
        one, other = getattr(made, name), getattr(twin, name)
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_a_compiled_step_reads_and_collects_live_state() -> None:
    """One graph; another scale neither recompiles nor is a constant."""
    q = make(2.0)
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module

    @torch.compile(fullgraph=True, backend=count)
    def step(x):
        data, _, scale_inv = q.quantize_inner(x)
        return data, scale_inv

    for scale in (2.0, 16.0):
        q.scale.fill_(scale)
        q.amax.zero_()
        x = provoking("normal", (8, 32), torch.bfloat16, seed=int(scale))
        data, scale_inv = step(x)
        assert scale_inv.item() == 1 / scale
        assert_bitwise_equal(data, make(scale)(x)._data)
        assert q.amax.item() == x.abs().max().item()
    assert len(graphs) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_amax_reduction_over_a_process_group(count, tmp_path) -> None:
    """Each process casts with its scale; afterwards all have the largest amax."""
    code = """
import sys, torch, torch.distributed as dist, tejit
rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
q = tejit.Float8Quantizer(scale=torch.full((1,), 2.0), amax=torch.zeros(1))
t = q.quantize(torch.full((4, 4), float(rank + 1)), amax_reduction_group=dist.group.WORLD)
print(t._scale_inv.item(), q.amax.item())
dist.destroy_process_group()
"""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(count), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    assert [worker.communicate(timeout=120)[0].strip() for worker in workers] == [f"0.5 {float(count)}"] * count


def test_the_name_is_public() -> None:
    assert tejit.Float8Quantizer is Float8Quantizer
