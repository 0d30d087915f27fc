"""MXFP8Tensor and its storage: what users do with tensors."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import tejit
from tejit import Float8CurrentScalingQuantizer, MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
from tejit.dynamo import TensorSpec, to_tensor_spec
from tejit.kernels import mxfp8
from tests.common import DEVICES, DTYPES, FP8_DTYPES, assert_bitwise_equal, provoking, short

USAGES = [(True, True), (True, False), (False, True)]
each_usage = pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
both_blocks = pytest.mark.parametrize("square", [False, True], ids=["1x32", "32x32"])
both_orders = pytest.mark.parametrize("swizzled", [False, True], ids=["plain", "swizzled"])
SHAPE = (160, 288)


def quantizer(usage=(True, True), square=False, swizzled=False, **arguments) -> MXFP8Quantizer:
    return MXFP8Quantizer(
        rowwise=usage[0],
        columnwise=usage[1],
        with_2d_quantization=square,
        optimize_for_gemm=swizzled,
        **arguments,
    )


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
@both_blocks
@both_orders
@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("shape", [(32, 32), (2, 80, 96), (0, 64), (64, 0), (4, 0, 32)], ids=short)
def test_quantize_and_dequantize(shape, fp8_dtype, swizzled, square, usage, device) -> None:
    """The buffers are the op's; the values are within half a step of the format."""
    code = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}[fp8_dtype]
    for dtype in DTYPES:
        x = provoking("wide", shape, dtype).to(device)
        t = quantizer(usage, square, swizzled, fp8_dtype=fp8_dtype)(x)
        assert type(t) is MXFP8Tensor
        assert (t.shape, t.dtype, t.device.type) == (x.shape, dtype, device)
        four = mxfp8.quantize(x, code, *usage, square, swizzled)
        held = [tensor for tensor in t._inner() if tensor is not None]
        assert len(held) == 2 * sum(usage)
        for mine, theirs in zip(held, [b for i, b in enumerate(four) if usage[i // 2]], strict=True):
            assert_bitwise_equal(mine, theirs)
        for out_dtype in (None, torch.float32):
            got = t.dequantize(out_dtype)
            assert got.shape == x.shape
            assert got.dtype == (out_dtype or dtype)
            assert got.is_contiguous()
        if x.numel():
            half_step = 2.0 ** -{0: 4, 1: 3}[code]
            amax = x.double().abs().amax()
            error = (t.dequantize(torch.float32).double() - x.double()).abs()
            assert (error <= x.double().abs() * half_step + amax * 2.0**-14).all()


@both_blocks
@each_usage
def test_values_that_other_packages_turn_into_nan(usage, square) -> None:
    """Field cases 1 and 7: zeros dequantize to 0; an inf or NaN touches no other block, a NaN no other element."""
    x = provoking("normal", SHAPE, torch.bfloat16)
    q = quantizer(usage, square)
    clean = q(x).dequantize()
    for value in (0.0, float("inf"), float("nan")):
        y = x.clone()
        if value == 0:
            y[:33] = 0
        else:
            y[3, 5] = value
        got = q(y).dequantize()
        assert torch.equal(got.isnan(), y.isnan())
        assert (got[y == 0] == 0).all()
        assert got[y.isfinite()].isfinite().all()
        outside = torch.ones(SHAPE, dtype=torch.bool)
        outside[: 64 if value == 0 else 32, : 288 if value == 0 else 32] = False
        assert_bitwise_equal(got[outside], clean[outside])
    assert (q(torch.zeros(SHAPE)).dequantize() == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@each_usage
@both_orders
def test_views_of_leading_dimensions_stay_quantized_and_share_memory(swizzled, usage, device) -> None:
    x, t = make((2, 80, 288), device=device, usage=usage, swizzled=swizzled)
    values = t.dequantize()
    for view in (
        lambda a: a.view(160, 288),
        lambda a: a.reshape(-1, 288),
        lambda a: a.view(160, 288).view(4, 40, 288),
        lambda a: a.flatten(0, 1),
        lambda a: a.unsqueeze(0),
        lambda a: a[None].squeeze(0),
        lambda a: a[:],
        lambda a: a[None][0],
        lambda a: a[None].unbind(0)[0],
        lambda a: a.split(2)[0],
    ):
        got = view(t)
        check_view(got, view(x), view(values), t)
        assert {b.data_ptr() for b in got._inner() if b is not None} == addresses(t)


def addresses(t) -> set[int]:
    return {buffer.data_ptr() for buffer in t._inner() if buffer is not None}


def check_view(got, plain, values, whole) -> None:
    assert type(got) is MXFP8Tensor
    assert (got.shape, got.stride()) == (plain.shape, plain.stride())
    assert got.get_usages() == whole.get_usages()
    assert_bitwise_equal(got.dequantize().contiguous(), values.contiguous())
    # Its buffers are those of a tensor of this shape, whoever reads them next.
    usages = got.get_usages()
    fitting = got._quantizer.with_usage(rowwise=usages["rowwise"], columnwise=usages["columnwise"])
    fresh = fitting(plain.contiguous())
    assert_same_buffers(got, fresh)
    for name, (size, dtype) in fitting.inner_tensor_specs(tuple(got.shape)).items():
        buffer = getattr(got, name)
        assert (tuple(buffer.shape), buffer.dtype, buffer.is_contiguous()) == (size, dtype, True)


@pytest.mark.parametrize("device", DEVICES)
@each_usage
@both_orders
def test_rows_in_whole_pieces_stay_quantized(swizzled, usage, device) -> None:
    """Cut between pieces of 128 rows of the scale buffers. Swizzled columnwise scales run along the rows: no cut."""
    x, t = make((416, 96), device=device, usage=usage, swizzled=swizzled)
    cubes, u = make((4, 64, 96), device=device, usage=usage, swizzled=swizzled)
    cases = [
        (x, t, lambda a: a[:128]),
        (x, t, lambda a: a[128:]),
        (x, t, lambda a: a[128:256]),
        (x, t, lambda a: a[384:]),
        (x, t, lambda a: a.narrow(0, 256, 160)),
        (x, t, lambda a: a.split(128)[1]),
        (x, t, lambda a: a.split([256, 160])[1]),
        (x, t, lambda a: a.tensor_split((128,))[0]),
        (cubes, u, lambda a: a[2:]),
        (cubes, u, lambda a: a.chunk(2)[1]),
        (cubes, u, lambda a: a.view(2, 128, 96)[1]),
        (cubes, u, lambda a: a.view(2, 128, 96).unbind(0)[1]),
    ]
    for plain, whole, view in cases:
        got, values = view(whole), view(whole.dequantize())
        if swizzled and usage[1]:
            assert not isinstance(got, tejit.QuantizedTensor)
            assert_bitwise_equal(got, values)
            continue
        check_view(got, view(plain), values, whole)
        for name in got._INNER_TENSORS:
            part, all_of_it = getattr(got, name), getattr(whole, name)
            if part is not None:
                assert part.untyped_storage().data_ptr() == all_of_it.untyped_storage().data_ptr()


@pytest.mark.parametrize("usage", [(True, True), (True, False)])
def test_other_views_dequantize(usage) -> None:
    _, t = make((288, 288), usage=usage)
    values = t.dequantize()
    for view in (
        lambda a: a[32:64],
        lambda a: a[:, :32],
        lambda a: a[:, 32:288],
        lambda a: a[128:256, :288:2],
        lambda a: a[0:256:2],
        lambda a: a[1],
        lambda a: a.view(-1),
        lambda a: a.view(144, 576),
        lambda a: a.split(96)[1],
        lambda a: a[0:1].expand(5, 288),
        lambda a: a.unsqueeze(-1),
        lambda a: a.t(),
        lambda a: a.transpose(0, 1),
        lambda a: a.unsqueeze(0).permute(1, 0, 2),
        lambda a: a[128:128],
    ):
        got = view(t)
        assert not isinstance(got, tejit.QuantizedTensor)
        assert_bitwise_equal(got.contiguous(), view(values).contiguous())
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        t.view(7, 11)


def test_writing_to_a_view_writes_to_the_tensor_and_nowhere_else() -> None:
    y = provoking("normal", (416, 96), torch.bfloat16, 4)
    for square in (False, True):
        x, t = make((416, 96), square=square)
        t.view(4, 104, 96).copy_(y.view(4, 104, 96))
        assert_same_buffers(t, quantizer(square=square)(y))
        t[128:256].copy_(x[128:256])
        t[384:].copy_(torch.zeros(32, 96))
        y[128:256], y[384:] = x[128:256], 0
        assert_bitwise_equal(t.dequantize(), quantizer(square=square)(y).dequantize())
        assert_bitwise_equal(t._rowwise_scale_inv, quantizer(square=square)(y)._rowwise_scale_inv)


@pytest.mark.parametrize("device", DEVICES)
@both_orders
@both_blocks
def test_in_place_operations_and_copies_requantize(square, swizzled, device) -> None:
    options = {"device": device, "square": square, "swizzled": swizzled}
    q = quantizer(square=square, swizzled=swizzled)
    x, t = make(**options)
    want = q(t.dequantize() * 3)
    t.mul_(3)
    assert_same_buffers(t, want)
    y, u = make(**options, seed=2)
    t.copy_(y)
    assert_same_buffers(t, u)
    _, v = make(**options, seed=3)
    v.copy_(u)  # buffers, not values requantized
    assert_same_buffers(v, u)
    _, rowwise = make(**options, seed=4, usage=(True, False))
    v.copy_(rowwise)  # has no columnwise buffers to copy: requantized
    assert_bitwise_equal(v.dequantize(), rowwise.dequantize())
    _, other = make(device=device, square=square, swizzled=not swizzled, seed=5)
    v.copy_(other)  # another order of scales: requantized
    assert v._with_gemm_swizzled_scales == swizzled
    assert_same_buffers(v, q(other.dequantize()))
    assert_bitwise_equal(torch.empty_like(x).copy_(u), u.dequantize())
    v.copy_(torch.ones(288, device=device))  # broadcast
    assert (v.dequantize() == 1).all()


@pytest.mark.parametrize("device", DEVICES)
@each_usage
@both_orders
def test_quantize_into_given_tensors_and_storages(swizzled, usage, device) -> None:
    x, t = make(device=device, usage=usage, swizzled=swizzled)
    q = quantizer(usage, swizzled=swizzled)
    for target in (q.make_empty(x.shape, dtype=x.dtype, device=device), q.replace(internal=True).quantize(x * 0)):
        assert q.quantize(x, out=target) is target
        assert_same_buffers(target, t)
        target.quantize_(x * 5, noop_flag=torch.ones(1, device=device))
        assert_same_buffers(target, t)
        target.quantize_(x * 5, noop_flag=torch.zeros(1, device=device))
        assert_same_buffers(target, q(x * 5))
        # The target's own scales say how they lie, whoever writes.
        q.replace(optimize_for_gemm=not swizzled).update_quantized(x, target)
        assert_same_buffers(target, t)


def test_what_cannot_be_done_is_refused() -> None:
    x, t = make()
    with pytest.raises(TypeError, match=r"float8_e4m3fn and the quantizer makes torch\.float8_e5m2"):
        quantizer(fp8_dtype=torch.float8_e5m2).quantize(x, out=t)
    with pytest.raises(TypeError, match="cannot write into a Float8Tensor"):
        quantizer().quantize(x, out=Float8CurrentScalingQuantizer()(x))
    with pytest.raises(ValueError, match=r"\(160, 320\).*\(160, 288\)"):
        quantizer().quantize(torch.ones(160, 320), out=t)
    with pytest.raises(ValueError, match="noop_flag was given without out"):
        quantizer().quantize(x, noop_flag=torch.zeros(1))
    with pytest.raises(TypeError, match="with_2d_quantization is 1"):
        MXFP8Quantizer(with_2d_quantization=1)
    with pytest.raises(TypeError, match=r"must be torch\.float8_e4m3fn or"):
        MXFP8Quantizer(torch.int8)


def test_defaults() -> None:
    """Field case 15 for the quantizer: E4M3 unless asked."""
    q = MXFP8Quantizer()
    assert (q.fp8_dtype, q.with_2d_quantization, q.optimize_for_gemm) == (torch.float8_e4m3fn, False, False)
    assert not make()[1]._with_gemm_swizzled_scales


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@pytest.mark.parametrize("square", [False, True], ids=["1x32", "32x32"])
@each_usage
@pytest.mark.parametrize("shape", [(), (5,), (33, 64), (64, 40), (3, 5, 64), (64, 767), (2, 3, 4, 5)], ids=short)
def test_misaligned_shapes_raise_one_error_from_every_way_to_make_a_tensor(shape, usage, square, internal) -> None:
    q = quantizer(usage, square, internal=internal)
    ways = [
        lambda: q.inner_tensor_specs(shape),
        lambda: q.make_empty(shape, device="cpu"),
        lambda: q.quantize(torch.ones(shape)),
        lambda: q.alloc_tensors(shape, device="cpu"),
        lambda: TensorSpec(shape, torch.float32, q, device="cpu").create_tensor(),
        lambda: q.make_empty(shape, device="meta"),
    ]
    texts = set()
    for way in ways:
        try:
            way()
            texts.add("")
        except ValueError as error:
            texts.add(str(error))
    assert len(texts) == 1
    text = texts.pop()
    assert (text == "") == q.is_quantizable(torch.ones(shape))
    assert not text or ("MXFP8 needs" in text and str(shape) in text and "pad it to" in text)


@each_usage
def test_update_usage_only_drops(usage) -> None:
    _, t = make(usage=usage)
    now = dict(t.get_usages())
    absent = [name for name, there in now.items() if not there]
    for name in absent:
        with pytest.raises(RuntimeError, match=f"no {name} data, and none can be made"):
            t.update_usage(**{f"{name}_usage": True})
    with pytest.raises(RuntimeError, match="without any direction"):
        t.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert t.get_usages() == now
    if not absent:
        other = t.detach()
        t.update_usage(rowwise_usage=False)
        assert t.get_usages() == {"rowwise": False, "columnwise": True}
        assert t._rowwise_data is t._rowwise_scale_inv is None
        assert other.get_usages() == now
        assert not addresses(t) & addresses(other)
        assert t.nbytes == other._columnwise_data.nbytes + other._columnwise_scale_inv.nbytes


@each_usage
@both_orders
def test_clone_pickle_and_save(swizzled, usage) -> None:
    _, t = make(usage=usage, swizzled=swizzled)
    storage = quantizer(usage, swizzled=swizzled, internal=True)(provoking("normal", SHAPE, torch.bfloat16))
    for original in (t, storage):
        for twin in (
            original.clone(),
            copy.deepcopy(original),
            pickle.loads(pickle.dumps(original)),
            through_torch_save(original),
        ):
            assert type(twin) is type(original)
            assert twin._quantizer == original._quantizer
            assert twin._with_gemm_swizzled_scales == swizzled
            assert_same_buffers(twin, original)
            assert not addresses(original) & addresses(twin)
    parameter = torch.nn.Parameter(t)
    parameter.main_grad = torch.ones(3)
    twin = copy.deepcopy(parameter)
    assert torch.equal(twin.main_grad, parameter.main_grad)
    assert not addresses(parameter) & addresses(twin)


def through_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_file_is_read_in_a_fresh_process(tmp_path) -> None:
    """Field case 45: `weights_only`, nothing imported but the package."""
    _, t = make()
    torch.save({"weight": t}, tmp_path / "t.pt")
    torch.save(t.dequantize(), tmp_path / "values.pt")
    code = (
        "import sys, torch, tejit\n"
        "t = torch.load(sys.argv[1], weights_only=True)['weight']\n"
        "assert type(t) is tejit.MXFP8Tensor\n"
        "assert torch.equal(t.dequantize(), torch.load(sys.argv[2], weights_only=True))\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "t.pt", tmp_path / "values.pt"], check=True, timeout=120)


def test_a_file_with_buffers_that_do_not_fit_is_refused() -> None:
    _, t = make()
    t._rowwise_scale_inv = t._rowwise_scale_inv[:128]
    with pytest.raises(pickle.UnpicklingError, match=r"_rowwise_scale_inv is torch.uint8 of shape \(128, 12\)"):
        pickle.loads(pickle.dumps(t))


@pytest.mark.parametrize("device", DEVICES)
def test_to_and_data_and_factories(device) -> None:
    _, t = make()
    moved = t.to(device)
    assert moved.device.type == device
    assert all(buffer.device.type == device for buffer in moved._inner())
    half = t.half()
    assert type(half) is MXFP8Tensor
    assert half.dequantize().dtype == torch.float16
    assert_same_buffers(half, t)
    assert t.to("meta").device.type == "meta"
    assert type(t.double()) is torch.Tensor
    y, u = make(seed=5)
    t.data = y
    assert_same_buffers(t, u)
    assert type(torch.zeros_like(t)) is torch.Tensor
    made = t.new_empty(32, 64)
    assert (type(made), made._rowwise_scale_inv.shape) == (MXFP8Tensor, (128, 4))


def test_gradients_and_optimizer() -> None:
    """Field case 40 among them."""
    x = provoking("normal", SHAPE, torch.float32).requires_grad_()
    weights = torch.randn(SHAPE)
    view = quantizer()(x).view(2, 80, 288)
    assert view.requires_grad
    (view.dequantize().view(SHAPE) * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    _, t = make(dtype=torch.float32)
    plain, quantized = torch.nn.Parameter(t.dequantize()), torch.nn.Parameter(t)
    plain.grad = quantized.grad = torch.ones(SHAPE)
    torch.optim.SGD([plain], lr=0.1, foreach=False).step()
    torch.optim.SGD([quantized], lr=0.1, foreach=False).step()
    assert_bitwise_equal(quantized.dequantize(), quantizer()(plain.detach()).dequantize())


def test_inference_mode_and_linear() -> None:
    """Field cases 41 and 42."""
    x = provoking("normal", (64, 288), torch.bfloat16, 7)
    _, outside = make()
    with torch.inference_mode():
        _, inside = make()
    want = F.linear(x, outside.dequantize())
    for weight in (outside, inside):
        for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with context():
                assert_bitwise_equal(F.linear(x, weight), want)
                assert_bitwise_equal(weight.detach().dequantize(), outside.dequantize())
                assert_bitwise_equal(weight.to(torch.float32).dequantize(), outside.dequantize(torch.float32))
                assert type(weight.view(2, 80, 288)) is MXFP8Tensor


def test_save_for_backward_protocol_and_repr() -> None:
    x, t = make()
    assert "MXFP8 E4M3, shape=(160, 288), dtype=torch.bfloat16, device=cpu, rowwise+columnwise" in repr(t)
    assert "scales swizzled" in repr(make(swizzled=True)[1])
    assert t.nbytes == sum(buffer.nbytes for buffer in t._inner())
    for holder in (t, quantizer(internal=True)(x)):
        values = holder.dequantize()
        buffers, empty = holder.prepare_for_saving()
        assert len(buffers) == 4
        assert (empty.nbytes, empty.shape, empty.device) == (0, x.shape, x.device)
        with pytest.raises(RuntimeError, match="given away"):
            empty.dequantize()
        assert empty.restore_from_saved([*buffers, None]) == [None]
        assert_bitwise_equal(empty.dequantize(), values)


@pytest.mark.parametrize("device", DEVICES)
@both_blocks
@both_orders
def test_operands_hold_the_values_of_all_three_products(swizzled, square, device) -> None:
    q = quantizer(square=square, swizzled=swizzled)
    x = provoking("wide", (3, 32, 160), torch.float32).to(device)
    inner = q.quantize_inner(x)
    for operand, shape in ((q.rowwise_operand(inner), (96, 160)), (q.columnwise_operand(inner), (160, 96))):
        assert (operand.kind, operand.swizzled, operand.fp8) == ("mxfp8", swizzled, 0)
        assert operand.codes.shape == shape
        assert operand.codes.untyped_storage().data_ptr() in {b.untyped_storage().data_ptr() for b in inner}
        if not swizzled:
            assert operand.scale_inv.shape == mxfp8.scale_shapes(*shape)[0]
    row, col = q.rowwise_operand(inner), q.columnwise_operand(q.columnwise_inner(inner))
    rows = mxfp8.values(row.codes, row.scale_inv, row.fp8, row.swizzled)
    columns = mxfp8.values(col.codes, col.scale_inv, col.fp8, col.swizzled)
    assert_bitwise_equal(rows, q.with_usage(columnwise=False)(x).dequantize().view(96, 160))
    assert_bitwise_equal(columns.t().contiguous(), q.with_usage(rowwise=False)(x).dequantize().view(96, 160))


ALIGNED = [(32, 32), (2, 16, 64), (1, 1, 32, 32), (0, 64), (64, 0), (2, 0, 32), (160, 288), (3, 32, 992)]
ROWS_ONLY = [(32,), (5, 64), (3, 7, 32), (129, 96)]
COLUMNS_ONLY = [(32, 1), (64, 7), (4, 8, 9), (128, 641)]


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@both_orders
@pytest.mark.parametrize(
    ("shape", "usage"),
    [
        *((shape, usage) for shape in ALIGNED for usage in USAGES),
        *((shape, (True, False)) for shape in ROWS_ONLY),
        *((shape, (False, True)) for shape in COLUMNS_ONLY),
    ],
    ids=str,
)
def test_make_empty_python_allocation_and_quantize_agree(shape, usage, swizzled, internal, device) -> None:
    q = quantizer(usage, swizzled=swizzled, internal=internal)
    made = q.make_empty(shape, dtype=torch.float16, device=device)
    twin = TensorSpec(shape, torch.float16, q, device=torch.device(device)).create_tensor()
    filled = q(torch.ones(shape, dtype=torch.float16, device=device))
    specs = q.inner_tensor_specs(shape, device)
    for other in (made, twin, filled):
        assert type(other) is (MXFP8TensorStorage if internal else MXFP8Tensor)
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
    spec = TensorSpec((160, 96), torch.bfloat16, quantizer(), device=device)
    with FakeTensorMode(allow_non_fake_inputs=False):
        made = spec.create_tensor()
        assert made.device == torch.device(device)
        assert made._columnwise_scale_inv.shape == (8, 128)


@pytest.mark.parametrize("how", ["kernels", "torch"])
@both_blocks
@both_orders
@each_usage
def test_one_graph_for_every_size(usage, swizzled, square, how, need_kernels) -> None:
    """Rowwise data of any number of rows; columnwise data of any that is a multiple of 32."""
    if how == "kernels":
        need_kernels("cpu")
    torch._dynamo.reset()
    q = quantizer(usage, square, swizzled)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def roundtrip(x):
        t = q.quantize(x)
        return t, t.dequantize()

    sizes = (5, 64, 130, 1001) if usage == (True, False) and not square else (64, 160, 1024)
    with tejit.backend(how):
        for rows in sizes:
            x = provoking("normal", (rows, 160), torch.bfloat16)
            torch._dynamo.mark_dynamic(x, 0)
            t, values = roundtrip(x)
            want = q(x)
            assert_same_buffers(t, want)
            assert_bitwise_equal(values, want.dequantize())
    assert counter.frame_count == 1
