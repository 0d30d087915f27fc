"""Float8BlockwiseQTensor and its storage: what users do with tensors."""

import copy
import io
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode

import tejit
from tejit import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    Float8CurrentScalingQuantizer,
)
from tejit.dynamo import TensorSpec, to_tensor_spec
from tejit.kernels import fp8_block
from tests.common import DEVICES, DTYPES, FP8_DTYPES, assert_bitwise_equal, provoking, short

USAGES = [(True, True), (True, False), (False, True)]
each_usage = pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
both_dims = pytest.mark.parametrize("dim", [1, 2], ids=["1x128", "128x128"])
SHAPE = (140, 264)


def quantizer(dim: int = 2, usage=(True, True), **arguments) -> Float8BlockQuantizer:
    return Float8BlockQuantizer(rowwise=usage[0], columnwise=usage[1], block_scaling_dim=dim, **arguments)


def make(shape=SHAPE, dtype=torch.bfloat16, device="cpu", seed=0, **arguments):
    x = provoking("normal", shape, dtype, seed).to(device)
    return x, quantizer(**arguments)(x)


def assert_same_buffers(one, other) -> None:
    for name in one._INNER_TENSORS:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert_bitwise_equal(mine, theirs, name)


@pytest.mark.parametrize("device", DEVICES)
@each_usage
@both_dims
@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 70, 130), (2, 3, 4, 260), (0, 4), (4, 0)], ids=short)
def test_quantize_and_dequantize(shape, fp8_dtype, dim, usage, device) -> None:
    """The buffers are the op's; the values are within half a step of the format, and exactly the op's own."""
    code = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}[fp8_dtype]
    for dtype in DTYPES:
        x = provoking("wide", shape, dtype).to(device)
        t = quantizer(dim, usage, fp8_dtype=fp8_dtype, force_pow_2_scales=False)(x)
        assert type(t) is Float8BlockwiseQTensor
        assert (t.shape, t.dtype, t.device.type) == (x.shape, dtype, device)
        four = fp8_block.quantize(x, code, dim, *usage, False, 0.0)
        held = [tensor for tensor in t._inner() if tensor is not None]
        assert len(held) == 2 * sum(usage)
        wanted = [tensor for i, tensor in enumerate(four) if usage[i // 2]]
        for mine, theirs in zip(held, wanted, strict=True):
            assert_bitwise_equal(mine, theirs)
        for out_dtype in (None, torch.float32):
            got = t.dequantize(out_dtype)
            assert got.shape == x.shape
            assert got.dtype == (out_dtype or dtype)
        if x.numel():
            half_step = 2.0 ** -{0: 4, 1: 3}[code]
            amax = x.double().abs().amax()
            error = (t.dequantize(torch.float32).double() - x.double()).abs()
            assert (error <= x.double().abs() * half_step + amax * 2.0**-14).all()


@pytest.mark.parametrize("kind", ["zeros", "one inf", "nan"])
@both_dims
def test_values_that_other_packages_turn_into_nan(dim: int, kind: str) -> None:
    """pytorch/ao#4713: zeros dequantize to 0; an inf or NaN touches no other block and no other element."""
    x = provoking("normal", SHAPE, torch.bfloat16)
    if kind == "zeros":
        x[:130] = 0
    else:
        x[3, 5] = float("inf" if kind == "one inf" else "nan")
    for usage in USAGES:
        got = quantizer(dim, usage)(x).dequantize()
        assert torch.equal(got.isnan(), x.isnan())
        assert not got.isinf().any()
        assert (got[x == 0] == 0).all()
        assert_bitwise_equal(got[:, 256:], quantizer(dim, usage)(x[:, 256:].contiguous()).dequantize())


TRANSPOSES = (
    lambda a: a.view(140, 264).t(),
    lambda a: a.view(140, 264).T,
    lambda a: a.view(140, 264).transpose(1, 0),
    lambda a: a.view(140, 264).permute(1, 0),
)


@pytest.mark.parametrize("device", DEVICES)
@each_usage
@both_dims
def test_views_that_keep_blocks_whole_are_quantized_and_share_memory(dim, usage, device) -> None:
    x, t = make((2, 70, 264), device=device, dim=dim, usage=usage)
    values = t.dequantize()
    turns = dim == 2 or usage != (True, True)
    for view in (
        lambda a: a.view(140, 264),
        lambda a: a.reshape(-1, 264),
        lambda a: a.view(140, 264).view(4, 35, 264),
        lambda a: a.flatten(0, 1),
        lambda a: a.unsqueeze(0),
        lambda a: a[None].squeeze(0),
        *(TRANSPOSES if turns else ()),
    ):
        got = view(t)
        assert type(got) is Float8BlockwiseQTensor
        assert got.shape == view(x).shape
        assert got.stride() == view(x).stride()
        shared = {buffer.data_ptr() for buffer in t._inner() if buffer is not None}
        assert {buffer.data_ptr() for buffer in got._inner() if buffer is not None} == shared
        assert_bitwise_equal(got.dequantize().contiguous(), view(values).contiguous())
        # Its buffers are those of a tensor of this shape, whoever reads them next.
        specs = got._quantizer.replace(
            rowwise_usage=got.get_usages()["rowwise"], columnwise_usage=got.get_usages()["columnwise"]
        ).inner_tensor_specs(tuple(got.shape))
        for name, (size, dtype) in specs.items():
            assert (tuple(getattr(got, name).shape), getattr(got, name).dtype) == (size, dtype)


def test_a_transpose_keeps_the_values() -> None:
    """With blocks of 1x128 the directions hold values of their own: t() may not give those of the other one."""
    x = torch.randn(140, 264) * torch.logspace(-9, 3, 264)
    for pow2 in (False, True):
        q = quantizer(1, force_pow_2_scales=pow2)
        for usage in ((True, True), (True, False), (False, True)):
            t = q.with_usage(rowwise=usage[0], columnwise=usage[1])(x)
            for turn in TRANSPOSES:
                assert_bitwise_equal(turn(t).dequantize().contiguous(), turn(t.dequantize()).contiguous())
                assert (type(turn(t)) is Float8BlockwiseQTensor) == (usage != (True, True))


def test_other_views_dequantize() -> None:
    _, t = make()
    values = t.dequantize()
    for view in (
        lambda a: a[2:5],
        lambda a: a[:, 3:9],
        lambda a: a[1],
        lambda a: a.view(-1),
        lambda a: a.view(70, 528),
        lambda a: a.split(3)[1],
        lambda a: a[0:1].expand(5, 264),
        lambda a: a.unsqueeze(-1),
        lambda a: a.unsqueeze(0).permute(1, 0, 2),
    ):
        got = view(t)
        assert not isinstance(got, tejit.QuantizedTensor)
        assert_bitwise_equal(got.contiguous(), view(values).contiguous())
    empty = quantizer()(torch.empty(3, 0))
    assert not isinstance(empty.view(5, 0), tejit.QuantizedTensor)  # its scales would have another shape
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        t.view(7, 11)


def test_writing_to_a_view_writes_to_the_tensor() -> None:
    """A view has all blocks of its tensor, so it may be written to."""
    y, u = make((2, 70, 264), seed=4)
    for dim in (1, 2):
        _, t = make((2, 70, 264), dim=dim)
        want = quantizer(dim)(y)
        t.view(140, 264).copy_(y.view(140, 264))
        assert_same_buffers(t, want)
        if dim == 2:
            t.view(140, 264).t().copy_(u.dequantize().view(140, 264).t())
            assert_bitwise_equal(t.dequantize(), quantizer(dim)(u.dequantize()).dequantize())


@pytest.mark.parametrize("device", DEVICES)
@both_dims
def test_in_place_operations_and_copies_requantize(dim, device) -> None:
    x, t = make(device=device, dim=dim)
    want = quantizer(dim)(t.dequantize() * 3)
    t.mul_(3)
    assert_same_buffers(t, want)
    y, u = make(device=device, dim=dim, seed=2)
    t.copy_(y)
    assert_same_buffers(t, u)
    _, v = make(device=device, dim=dim, seed=3)
    v.copy_(u)  # buffers, not values requantized
    assert_same_buffers(v, u)
    _, rowwise = make(device=device, dim=dim, seed=4, usage=(True, False))
    v.copy_(rowwise)  # has no columnwise buffers to copy: requantized
    assert_bitwise_equal(v.dequantize(), rowwise.dequantize())
    _, other = make(device=device, dim=3 - dim, seed=5)
    v.copy_(other)  # other blocks: requantized
    assert_same_buffers(v, quantizer(dim)(other.dequantize()))
    assert_bitwise_equal(torch.empty_like(x).copy_(u), u.dequantize())
    v.copy_(torch.ones(264, device=device))  # broadcast
    assert (v.dequantize() == 1).all()


@pytest.mark.parametrize("device", DEVICES)
@each_usage
@both_dims
def test_quantize_into_given_tensors_and_storages(dim, usage, device) -> None:
    x, t = make(device=device, dim=dim, usage=usage)
    q = quantizer(dim, usage)
    for target in (q.make_empty(x.shape, dtype=x.dtype, device=device), q.replace(internal=True).quantize(x * 0)):
        assert q.quantize(x, out=target) is target
        assert_same_buffers(target, t)
        target.quantize_(x * 5, noop_flag=torch.ones(1, device=device))
        assert_same_buffers(target, t)
        target.quantize_(x * 5, noop_flag=torch.zeros(1, device=device))
        assert_same_buffers(target, q(x * 5))


def test_what_cannot_be_done_is_refused() -> None:
    x, t = make()
    with pytest.raises(TypeError, match=r"float8_e4m3fn and the quantizer makes torch\.float8_e5m2"):
        quantizer(fp8_dtype=torch.float8_e5m2).quantize(x, out=t)
    with pytest.raises(TypeError, match="blocks of dimension 2 and the quantizer makes those of dimension 1"):
        quantizer(1).quantize(x, out=t)
    with pytest.raises(TypeError, match="cannot write into a Float8Tensor"):
        quantizer().quantize(x, out=Float8CurrentScalingQuantizer()(x))
    with pytest.raises(ValueError, match=r"\(140, 265\).*\(140, 264\)"):
        quantizer().quantize(torch.ones(140, 265), out=t)
    with pytest.raises(ValueError, match="noop_flag was given without out"):
        quantizer().quantize(x, noop_flag=torch.zeros(1))
    with pytest.raises(ValueError, match="block_scaling_dim is 3"):
        quantizer(3)
    with pytest.raises(ValueError, match="amax_epsilon is nan"):
        quantizer(amax_epsilon=float("nan"))
    with pytest.raises(TypeError, match=r"must be torch\.float8_e4m3fn or"):
        Float8BlockQuantizer(torch.int8)


def test_defaults_are_those_of_the_recipe() -> None:
    q = Float8BlockQuantizer()
    assert (q.fp8_dtype, q.amax_epsilon, q.force_pow_2_scales, q.block_scaling_dim) == (torch.float8_e4m3fn, 0, True, 2)
    scale_inv = q(provoking("normal", SHAPE, torch.bfloat16))._rowwise_scale_inv
    assert (torch.frexp(scale_inv[:, :3]).mantissa == 0.5).all()


def test_update_usage_of_squares() -> None:
    _, t = make(dim=2)
    _, both = make(dim=2)
    t.update_usage(columnwise_usage=False)
    assert t._columnwise_data is t._columnwise_scale_inv is None
    t.update_usage(columnwise_usage=True)
    assert_same_buffers(t, both)
    t.update_usage(rowwise_usage=False)
    assert t.nbytes == both._columnwise_data.nbytes + both._columnwise_scale_inv.nbytes
    for request in ({"rowwise_usage": True}, {"columnwise_usage": False}):
        with pytest.raises(RuntimeError):
            t.update_usage(**request)
    assert t.get_usages() == {"rowwise": False, "columnwise": True}


def test_update_usage_of_vectors_only_drops() -> None:
    _, t = make(dim=1)
    t.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="1x128, whose columnwise data cannot be made"):
        t.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert t.get_usages() == {"rowwise": True, "columnwise": False}


@each_usage
@both_dims
def test_clone_pickle_and_save(dim, usage) -> None:
    _, t = make(dim=dim, usage=usage)
    storage = quantizer(dim, usage, internal=True)(provoking("normal", SHAPE, torch.bfloat16))
    for original in (t, storage):
        for twin in (
            original.clone(),
            copy.deepcopy(original),
            pickle.loads(pickle.dumps(original)),
            through_torch_save(original),
        ):
            assert type(twin) is type(original)
            assert twin._quantizer == original._quantizer
            assert twin._is_2D_scaled == (dim == 2)
            assert_same_buffers(twin, original)
            mine = {b.data_ptr() for b in original._inner() if b is not None}
            assert not mine & {b.data_ptr() for b in twin._inner() if b is not None}
    parameter = torch.nn.Parameter(t)
    parameter.main_grad = torch.ones(3)
    assert torch.equal(copy.deepcopy(parameter).main_grad, parameter.main_grad)


def through_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_to_and_data_and_factories() -> None:
    _, t = make()
    half = t.half()
    assert type(half) is Float8BlockwiseQTensor
    assert half.dequantize().dtype == torch.float16
    assert_same_buffers(half, t)
    assert t.to("meta").device.type == "meta"
    assert type(t.double()) is torch.Tensor
    y, u = make(seed=5)
    t.data = y
    assert_same_buffers(t, u)
    assert type(torch.zeros_like(t)) is torch.Tensor
    made = t.new_empty(3, 5)
    assert (type(made), made._rowwise_scale_inv.shape) == (Float8BlockwiseQTensor, (1, 4))


def test_gradients_and_optimizer() -> None:
    x = provoking("normal", SHAPE, torch.float32).requires_grad_()
    weights = torch.randn(SHAPE)
    (quantizer()(x).view(2, 70, 264).dequantize().view(SHAPE) * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    _, t = make(dtype=torch.float32)
    plain, quantized = torch.nn.Parameter(t.dequantize()), torch.nn.Parameter(t)
    plain.grad = quantized.grad = torch.ones(SHAPE)
    torch.optim.SGD([plain], lr=0.1, foreach=False).step()
    torch.optim.SGD([quantized], lr=0.1, foreach=False).step()
    assert_bitwise_equal(quantized.dequantize(), quantizer()(plain.detach()).dequantize())


def test_save_for_backward_protocol_and_repr() -> None:
    x, t = make(dim=1)
    assert "FP8 blocks 1x128 E4M3, shape=(140, 264), dtype=torch.bfloat16, device=cpu, rowwise+columnwise" in repr(t)
    for holder in (t, quantizer(1, internal=True)(x)):
        values = holder.dequantize()
        buffers, empty = holder.prepare_for_saving()
        assert len(buffers) == 4
        assert (empty.nbytes, empty.shape, empty.device) == (0, x.shape, x.device)
        with pytest.raises(RuntimeError, match="given away"):
            empty.dequantize()
        assert empty.restore_from_saved([*buffers, None]) == [None]
        assert_bitwise_equal(empty.dequantize(), values)


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@each_usage
@both_dims
@pytest.mark.parametrize(
    "shape",
    [(), (5,), (3, 7), (2, 3, 4), (1, 1, 1, 1), (0, 4), (4, 0), (2, 0, 5), (129, 641), (3, 50, 1000)],
    ids=short,
)
def test_make_empty_python_allocation_and_quantize_agree(shape, dim, usage, internal, device) -> None:
    q = quantizer(dim, usage, internal=internal)
    made = q.make_empty(shape, dtype=torch.float16, device=device)
    twin = TensorSpec(shape, torch.float16, q, device=torch.device(device)).create_tensor()
    filled = q(torch.ones(shape, dtype=torch.float16, device=device))
    specs = q.inner_tensor_specs(shape, device)
    for other in (made, twin, filled):
        assert type(other) is (Float8BlockwiseQTensorStorage if internal else Float8BlockwiseQTensor)
        assert other.__tensor_flatten__() == made.__tensor_flatten__()
        assert other.__tensor_flatten__()[0] == list(specs)
        assert (other.shape, other.dtype) == (torch.Size(shape), torch.float16)
        for name, (size, dtype) in specs.items():
            buffer, first = getattr(other, name), getattr(made, name)
            assert (tuple(buffer.shape), buffer.dtype, buffer.device) == (size, dtype, first.device)
            assert buffer.stride() == first.stride()
    assert to_tensor_spec(made) == TensorSpec(shape, torch.float16, q, device=made.device)
    for create in (q.make_empty, lambda s, dtype, device: TensorSpec(s, dtype, q, device=device).create_tensor()):
        with pytest.raises(TypeError, match=r"nominal dtype is torch\.int32"):
            create(shape, dtype=torch.int32, device=torch.device(device))


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "meta"])
def test_fake_tensors(device) -> None:
    spec = TensorSpec((140, 6), torch.bfloat16, quantizer(1), device=device)
    with FakeTensorMode(allow_non_fake_inputs=False):
        made = spec.create_tensor()
        assert made.device == torch.device(device)
        assert made._columnwise_scale_inv.shape == (2, 8)


@both_dims
@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("sizes", [(4, 6, 128), (130, 256, 1000)], ids=["one block", "more blocks"])
def test_one_graph_for_every_size(sizes, how, dim, need_kernels) -> None:
    """Of up to one block of rows, and of more: torch itself specialises a dimension of size 1, here of the scales."""
    if how == "kernels":
        need_kernels("cpu")
    torch._dynamo.reset()
    q = quantizer(dim)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def roundtrip(x):
        t = q.quantize(x)
        return t, t.dequantize()

    with tejit.backend(how):
        for rows in sizes:
            x = provoking("normal", (rows, 136), torch.bfloat16)
            torch._dynamo.mark_dynamic(x, 0)
            t, values = roundtrip(x)
            want = q(x)
            assert_same_buffers(t, want)
            assert_bitwise_equal(values, want.dequantize())
    assert counter.frame_count == 1
