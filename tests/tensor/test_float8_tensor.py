"""Float8Tensor and Float8TensorStorage: what users do with tensors."""

import copy
import io
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tejit
from tejit import Float8CurrentScalingQuantizer, Float8Tensor, Float8TensorStorage
from tests.common import DEVICES, DTYPES, FP8_DTYPES, assert_bitwise_equal, provoking, short

USAGES = [(True, True), (True, False), (False, True)]


def make(shape=(8, 32), dtype=torch.bfloat16, device="cpu", seed=0, **arguments) -> tuple[torch.Tensor, Float8Tensor]:
    x = provoking("normal", shape, dtype, seed).to(device)
    return x, Float8CurrentScalingQuantizer(**arguments)(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES, ids=short)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 4), (2, 3, 4, 5), (0, 4), (4, 0)], ids=short)
def test_dequantize_is_code_times_scale_inv(shape, dtype, fp8_dtype, usage, device) -> None:
    """From either direction the same values. Oracle: ml_dtypes' reading of the codes (numpy)."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = provoking("wide", shape, dtype).to(device)
    rowwise, columnwise = usage
    t = Float8CurrentScalingQuantizer(fp8_dtype, rowwise=rowwise, columnwise=columnwise)(x)
    assert t.shape == x.shape
    assert t.dtype == dtype
    assert t._scale_inv.shape == (1,)
    both = Float8CurrentScalingQuantizer(fp8_dtype)(x)
    name = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}[fp8_dtype]
    codes = both._data.cpu().numpy().view(getattr(ml_dtypes, name)).astype(np.float32)
    want = torch.from_numpy(codes * both._scale_inv.cpu().numpy()).reshape(shape)
    for out_dtype in (None, torch.float32):
        got = t.dequantize(out_dtype)
        assert got.shape == x.shape
        assert_bitwise_equal(got.cpu(), want.to(out_dtype or dtype))


@pytest.mark.parametrize("kind", ["zero row", "zeros", "one inf"])
def test_values_that_other_packages_turn_into_nan(kind: str) -> None:
    """pytorch/ao#4713: zeros dequantize to 0; with one inf every other value stays finite."""
    x = provoking("normal", (16, 64), torch.bfloat16)
    if kind == "zeros":
        x.zero_()
    elif kind == "zero row":
        x[3] = 0
    else:
        x[3, 5] = float("inf")
    got = Float8CurrentScalingQuantizer()(x).dequantize()
    assert got.isfinite().all()
    assert (got[x == 0] == 0).all()


def test_a_nan_stays_visible_and_alone() -> None:
    x = provoking("normal", (16, 64), torch.float32)
    x[3, 5], x[7, 9] = float("nan"), -float("nan")
    for fp8_dtype in FP8_DTYPES:
        t = Float8CurrentScalingQuantizer(fp8_dtype)(x)
        assert t._data[3, 5] == t._data[7, 9] == 0x7F
        assert torch.equal(t.dequantize().isnan(), x.isnan())


@pytest.mark.parametrize("device", DEVICES)
def test_views_keep_the_format_and_share_memory(device) -> None:
    x, t = make((8, 32), device=device)
    values = t.dequantize()
    for view in (
        lambda a: a.view(4, 64),
        lambda a: a.view(2, 4, 32),
        lambda a: a.reshape(-1),
        lambda a: a[2:5],
        lambda a: a[:, 3:9],
        lambda a: a[1],
        lambda a: a[:, None],
        lambda a: a.t(),
        lambda a: a.T,
        lambda a: a.transpose(0, 1),
        lambda a: a.permute(1, 0),
        lambda a: a.permute(0, 1),
        lambda a: a.split(3)[1],
        lambda a: a.chunk(4, dim=1)[2],
        lambda a: a.unbind(0)[7],
        lambda a: a[0:1].expand(5, 32),
        lambda a: a.unsqueeze(0).squeeze(0),
        lambda a: a.narrow(0, 1, 3),
    ):
        got = view(t)
        assert type(got) is Float8Tensor
        assert got.shape == view(x).shape
        assert got._data.untyped_storage().data_ptr() == t._data.untyped_storage().data_ptr()
        assert_bitwise_equal(got.dequantize().contiguous(), view(values).contiguous())
        if got._transpose is not None:
            assert torch.equal(got._transpose, got._data.movedim(-1, 0))


def test_writing_to_a_view_is_refused_and_changes_nothing() -> None:
    _, t = make()
    before = t.dequantize()
    for write in (lambda v: v.copy_(torch.ones(2, 32)), lambda v: v.mul_(2), lambda v: v.zero_()):
        with pytest.raises(RuntimeError, match="scale belongs to the whole"):
            write(t[2:4])
    assert_bitwise_equal(t.dequantize(), before)


def test_operations_dequantize_say_so_once_and_give_plain_tensors() -> None:
    _, t = make()
    tejit.tensor.dispatch._announced.clear()
    with pytest.warns(UserWarning, match=r"aten\.cos\.default has no form on quantized tensors"):
        got = t.cos()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        t.cos()
    assert type(got) is torch.Tensor
    assert_bitwise_equal(got, t.dequantize().cos())
    assert_bitwise_equal(torch.cat([t, t]), torch.cat([t.dequantize()] * 2))


def test_factories_give_plain_tensors_and_empty_like_a_quantized_one() -> None:
    _, t = make()
    for plain in (torch.zeros_like(t), torch.ones_like(t), torch.full_like(t, 3.0), t.new_zeros(3)):
        assert type(plain) is torch.Tensor
        assert plain.dtype == t.dtype
    for made in (torch.empty_like(t), t.new_empty(3, 5)):
        assert type(made) is Float8Tensor
        assert made.dtype == t.dtype
    assert torch.empty_like(t, device="meta").device.type == "meta"


@pytest.mark.parametrize("device", DEVICES)
def test_in_place_operations_requantize(device) -> None:
    _, t = make(device=device)
    want = Float8CurrentScalingQuantizer()(t.dequantize() * 3)
    t.mul_(3)
    assert_bitwise_equal(t._data, want._data)
    assert_bitwise_equal(t._transpose, want._transpose)
    assert_bitwise_equal(t._scale_inv, want._scale_inv)


@pytest.mark.parametrize("device", DEVICES)
def test_copy_(device) -> None:
    x, t = make(seed=1, device=device)
    y, u = make(seed=2, device=device)
    t.copy_(y)
    assert_bitwise_equal(t.dequantize(), u.dequantize())
    _, v = make(seed=3, device=device)
    v.copy_(u)  # buffers, not values requantized
    assert_bitwise_equal(v._data, u._data)
    plain = torch.empty_like(x).copy_(u)
    assert_bitwise_equal(plain, u.dequantize())
    rowwise = Float8CurrentScalingQuantizer(columnwise=False)(x)
    v.copy_(rowwise)  # has no transpose to copy: requantized
    assert_bitwise_equal(v.dequantize(), rowwise.dequantize())
    v.copy_(torch.ones(32, device=device))  # broadcast
    assert (v.dequantize() == 1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_quantize_into_given_tensors_and_storages(device) -> None:
    x, t = make(device=device)
    q = Float8CurrentScalingQuantizer()
    for target in (q.make_empty(x.shape, dtype=x.dtype, device=device), q.replace(internal=True).quantize(x * 0)):
        assert q.quantize(x, out=target) is target
        assert_bitwise_equal(target._data, t._data)
        target.quantize_(x * 5, noop_flag=torch.ones(1, device=device))
        assert_bitwise_equal(target._data, t._data)
        assert_bitwise_equal(target._scale_inv, t._scale_inv)
        target.quantize_(x * 5, noop_flag=torch.zeros(1, device=device))
        assert_bitwise_equal(target.dequantize(), q(x * 5).dequantize())


def test_quantize_refuses_what_it_cannot_do() -> None:
    x, t = make()
    q = Float8CurrentScalingQuantizer()
    with pytest.raises(ValueError, match="noop_flag was given without out"):
        q.quantize(x, noop_flag=torch.zeros(1))
    with pytest.raises(TypeError, match="int64"):
        q(torch.ones(3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"dtype torch\.float64"):
        q.quantize(x, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"\(8, 33\).*\(8, 32\)"):
        q.quantize(torch.ones(8, 33), out=t)
    with pytest.raises(ValueError, match=r"noop_flag is torch\.int64"):
        q.update_quantized(x, t, noop_flag=torch.ones(1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"float8_e4m3fn and the quantizer makes torch\.float8_e5m2"):
        Float8CurrentScalingQuantizer(torch.float8_e5m2).quantize(x, out=t)
    with pytest.raises(ValueError, match="neither rowwise nor columnwise"):
        q.with_usage(rowwise=False, columnwise=False)(x)
    with pytest.raises(TypeError, match=r"must be torch\.float8_e4m3fn or"):
        Float8CurrentScalingQuantizer(torch.int8)
    with pytest.raises(ValueError, match="amax_epsilon is -1"):
        Float8CurrentScalingQuantizer(amax_epsilon=-1)
    with pytest.raises(ValueError, match="amax_epsilon is nan"):
        Float8CurrentScalingQuantizer(amax_epsilon=float("nan"))


def test_straight_through_gradients() -> None:
    """Primus-Turbo#335: the result requires grad, through views and dequantize alike."""
    x = provoking("normal", (8, 32), torch.float32).requires_grad_()
    t = Float8CurrentScalingQuantizer()(x)
    assert t.view(-1, 64).requires_grad
    weights = torch.randn(8, 32)
    (t.view(-1, 64).view(8, 32).dequantize() * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    x.grad = None
    (t * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    internal = Float8CurrentScalingQuantizer(internal=True)(x)
    assert type(internal) is Float8TensorStorage
    with torch.no_grad():
        assert not Float8CurrentScalingQuantizer()(x).requires_grad


def test_linear_on_a_quantized_weight_in_every_mode() -> None:
    """pytorch/ao#564: F.linear(x, qw) gives the same under no_grad, inference_mode and enable_grad."""
    x, w = torch.randn(4, 32, dtype=torch.bfloat16), make()[1]
    results = []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            results.append(F.linear(x, w))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_inference_mode_tensors_outside_and_the_reverse() -> None:
    """pytorch/ao#3487."""
    with torch.inference_mode():
        _, inside = make()
    _, outside = make()
    for use in (lambda t: t.t(), lambda t: t.detach(), lambda t: t.to(torch.float32), lambda t: t.dequantize()):
        use(inside)
        with torch.inference_mode():
            use(outside)
    assert_bitwise_equal(inside.dequantize(), outside.dequantize())


def test_clone_and_deepcopy_share_nothing_and_keep_attributes() -> None:
    """optimum-quanto#358."""
    _, t = make()
    t = torch.nn.Parameter(t)
    t.main_grad = torch.ones(3)
    for twin in (t.clone(), copy.deepcopy(t), t.detach().clone()):
        assert_bitwise_equal(twin._data, t._data)
        for mine, theirs in zip(t._inner(), twin._inner(), strict=True):
            assert mine.data_ptr() != theirs.data_ptr()
    twin = copy.deepcopy(t)
    assert isinstance(twin, torch.nn.Parameter)
    assert torch.equal(twin.main_grad, t.main_grad)
    assert twin.main_grad is not t.main_grad
    nested = copy.deepcopy([t, t])
    assert nested[0] is nested[1]
    with pytest.raises(RuntimeError, match="only a leaf"):
        copy.deepcopy(t.view(-1))


@pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
def test_pickle_and_torch_save(usage) -> None:
    x = provoking("normal", (8, 32), torch.bfloat16)
    q = Float8CurrentScalingQuantizer(rowwise=usage[0], columnwise=usage[1], amax_epsilon=0.5)
    t, storage = q(x), q.replace(internal=True)(x)
    for restore in (lambda o: pickle.loads(pickle.dumps(o)), _through_torch_save):
        for original in (t, storage):
            twin = restore(original)
            assert type(twin) is type(original)
            assert twin._quantizer == original._quantizer
            assert_bitwise_equal(twin.dequantize(), original.dequantize())
    parameter = torch.nn.Parameter(t)
    parameter.note = "kept"
    twin = _through_torch_save(parameter)
    assert isinstance(twin, torch.nn.Parameter)
    assert twin.requires_grad
    assert twin.note == "kept"


def _through_torch_save(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_load_in_a_fresh_process(tmp_path) -> None:
    """pytorch/ao#2478: torch.load as it is, with nothing but `import tejit`."""
    _, t = make()
    torch.save({"weight": t}, tmp_path / "state.pt")
    code = (
        "import sys, torch, tejit; t = torch.load(sys.argv[1])['weight'];"
        "print(type(t).__name__, float(t.dequantize().float().sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "state.pt")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["Float8Tensor", str(float(t.dequantize().float().sum()))]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, foreach=False),
        lambda p: torch.optim.SGD([p], lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW([p], lr=0.1, foreach=False),
        lambda p: torch.optim.AdamW([p], lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW([p], lr=0.1, fused=True),
        lambda p: torch.optim.Adam([p], lr=0.1, amsgrad=True),
    ],
    ids=["sgd", "sgd-foreach", "adamw", "adamw-foreach", "adamw-fused", "amsgrad"],
)
def test_optimizers_update_quantized_parameters(optimizer) -> None:
    """Oracle: the same optimizer on the dequantized parameter, result quantized."""
    _, t = make(dtype=torch.float32)
    plain, quantized = torch.nn.Parameter(t.dequantize()), torch.nn.Parameter(t)
    gradient = torch.randn(8, 32)
    plain.grad, quantized.grad = gradient.clone(), gradient.clone()
    optimizer(plain).step()
    before = t.dequantize()
    state = optimizer(quantized)
    state.step()
    assert all(type(v) is torch.Tensor for s in state.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    moved = (quantized.dequantize() - before).abs().sum()
    assert moved > 0
    want = Float8CurrentScalingQuantizer()(plain.detach()).dequantize()
    # Several in-place steps requantize in between: within one quantization step of the plain update.
    assert (quantized.dequantize() - want).abs().max() <= want.abs().max() * 2**-3


def test_to_dtype_and_device() -> None:
    _, t = make()
    half = t.half()
    assert type(half) is Float8Tensor
    assert half.dtype == torch.float16
    assert half.dequantize().dtype == torch.float16
    assert_bitwise_equal(half._data, t._data)
    assert t.to("meta").device.type == "meta"
    assert t.to(torch.bfloat16) is t
    assert type(t.to(torch.int32)) is torch.Tensor
    assert type(t.double()) is torch.Tensor


def test_data_setter() -> None:
    _, t = make()
    y, u = make(seed=5)
    alias = t.data
    assert alias._data is t._data
    t.data = y
    assert_bitwise_equal(t._data, u._data)
    t.data = u
    assert t._data is u._data
    with pytest.raises(ValueError, match=r"\(3,\)"):
        t.data = torch.ones(3)


def test_update_usage_on_a_tn_only_device() -> None:
    _, t = make()
    t.update_usage(columnwise_usage=False)
    assert t._transpose is None
    t.update_usage(columnwise_usage=True)
    assert_bitwise_equal(t._transpose, t._data.t().contiguous())
    t.update_usage(rowwise_usage=False)
    assert t.get_usages() == {"rowwise": False, "columnwise": True}
    assert t.nbytes == t._transpose.nbytes + 4
    for request in ({"rowwise_usage": True}, {"columnwise_usage": False}):
        with pytest.raises(RuntimeError):
            t.update_usage(**request)
    assert t.get_usages() == {"rowwise": False, "columnwise": True}
    columnwise = t.dequantize()
    assert_bitwise_equal(columnwise, make()[1].dequantize())


def test_save_for_backward_protocol() -> None:
    x, t = make()
    for holder in (t, Float8CurrentScalingQuantizer(internal=True)(x)):
        values = holder.dequantize()
        buffers, empty = holder.prepare_for_saving()
        assert empty.nbytes == 0
        assert empty.shape == x.shape
        assert empty.device == x.device
        with pytest.raises(RuntimeError, match="given away"):
            empty.dequantize()
        rest = empty.restore_from_saved([*buffers, None, x])
        assert rest[0] is None
        assert rest[1] is x
        assert_bitwise_equal(empty.dequantize(), values)


def test_repr_is_one_true_line() -> None:
    _, t = make()
    text = repr(t)
    assert "\n" not in text
    for part in ("FP8 E4M3", "(8, 32)", "torch.bfloat16", "cpu", "rowwise+columnwise", "516 bytes", "1.01"):
        assert part in text
    assert t.nbytes == 516


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 4), (1, 1, 1, 1), (0, 4)], ids=short)
def test_make_empty_and_python_allocation_agree(shape, usage, internal, device) -> None:
    q = Float8CurrentScalingQuantizer(rowwise=usage[0], columnwise=usage[1], internal=internal)
    made = q.make_empty(shape, dtype=torch.float16, device=device)
    spec = tejit.dynamo.TensorSpec(shape, torch.float16, q, device=torch.device(device))
    twin = spec.create_tensor()
    names, context = made.__tensor_flatten__()
    assert (names, context) == twin.__tensor_flatten__()
    assert tuple(names) == spec.inner_names()
    assert type(made) is type(twin) is (Float8TensorStorage if internal else Float8Tensor)
    specs = q.inner_tensor_specs(shape, device)
    assert list(specs) == names
    for name in names:
        one, other = getattr(made, name), getattr(twin, name)
        assert (one.shape, one.dtype, one.device, one.stride()) == (
            other.shape,
            other.dtype,
            other.device,
            other.stride(),
        )
        assert (tuple(one.shape), one.dtype) == specs[name]
    assert made.shape == twin.shape == torch.Size(shape)
    assert made.dtype == twin.dtype == torch.float16
    for create in (
        q.make_empty,
        lambda s, dtype, device: tejit.dynamo.TensorSpec(s, dtype, q, device=device).create_tensor(),
    ):
        with pytest.raises(TypeError, match=r"nominal dtype is torch\.int32"):
            create(shape, dtype=torch.int32, device=torch.device(device))


def test_default_device_of_make_empty() -> None:
    q = Float8CurrentScalingQuantizer()
    with torch.device("meta"):
        assert q.make_empty((3, 4)).device.type == "meta"
    assert q.make_empty((3, 4)).device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert q.make_empty((3, 4), device="cpu", requires_grad=True).requires_grad
    for shape, match in (((2, -1), "dimension 1"), ((2, 1.5), r"is 1\.5")):
        with pytest.raises(ValueError, match=match):
            q.make_empty(shape, device="cpu")
    with pytest.raises(ValueError, match="neither rowwise nor columnwise"):
        q.with_usage(rowwise=False, columnwise=False).make_empty((2, 2), device="cpu")
    with pytest.raises(TypeError, match="cannot quantize a list"):
        q([1.0])


@pytest.mark.parametrize("count", [1, 2])
def test_amax_reduction_over_a_process_group(count, tmp_path) -> None:
    """Two processes with different data take the scale of the larger amax."""
    code = """
import sys, torch, torch.distributed as dist, tejit
rank, world, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
x = torch.full((4, 4), float(rank + 1))
t = tejit.Float8CurrentScalingQuantizer().quantize(x, amax_reduction_group=dist.group.WORLD)
print(t._scale_inv.item() == torch.tensor(world / 448.0).item() or abs(t._scale_inv.item() * 448 - world) < 1e-6)
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
    assert [worker.communicate(timeout=120)[0].strip() for worker in workers] == ["True"] * count
