"""A quantized tensor of every format behaves as a tensor: what users do with it."""

import copy
import io
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import tejit
from tejit.dynamo import is_value_opaque_quantizer
from tests.common import DEVICES, assert_bitwise_equal, provoking
from tests.formats.registry import buffers, described, each_case, quantized

SHAPE = (64, 96)


def made(case, usage=(True, True), device="cpu", internal=False, seed=0, shape=SHAPE):
    x = provoking("normal", shape, torch.float32, seed).to(device)
    return quantized(case.quantizer(usage, internal, device), x)


def assert_same(one, other) -> None:
    assert buffers(one).keys() == buffers(other).keys()
    for name, buffer in buffers(one).items():
        assert_bitwise_equal(buffer.contiguous(), buffers(other)[name].contiguous(), name)


def values_of(t):
    return t.dequantize() if isinstance(t, tejit.QuantizedTensor) else t


@each_case(usages=True)
def test_views_have_the_values_of_views(case, usage) -> None:
    t = made(case, usage, shape=(2, 32, 96))
    values = t.dequantize()
    for view in (
        lambda a: a.view(64, 96),
        lambda a: a.view(-1),
        lambda a: a.reshape(4, 16, 96),
        lambda a: a.flatten(0, 1).t(),
        lambda a: a.flatten(0, 1).transpose(0, 1),
        lambda a: a.flatten(0, 1).permute(1, 0),
        lambda a: a.flatten(0, 1).t().t(),
        lambda a: a.transpose(1, 2),
        lambda a: a[0],
        lambda a: a[:, 3:17],
        lambda a: a[..., ::2],
        lambda a: a[:, :, 32:64],
        lambda a: a.unsqueeze(0),
        lambda a: a.unsqueeze(-1),
        lambda a: a.squeeze(),
        lambda a: a[0:1].expand(5, 32, 96),
    ):
        got, want = view(t), view(values)
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert_bitwise_equal(values_of(got).contiguous(), want.contiguous())
    for parts, wants in (
        (t.split(1), values.split(1)),
        (t.chunk(4, 1), values.chunk(4, 1)),
        (t.split([32, 64], -1), values.split([32, 64], -1)),
        (t.unbind(), values.unbind()),
    ):
        assert len(parts) == len(wants)
        for got, want in zip(parts, wants, strict=True):
            assert_bitwise_equal(values_of(got).contiguous(), want.contiguous())
    joined = torch.cat([t, t], 1)
    assert_bitwise_equal(values_of(joined), torch.cat([values, values], 1))


@each_case(usages=True)
def test_a_view_that_is_quantized_is_a_whole_tensor_of_its_shape(case, usage) -> None:
    """Whoever reads its buffers next finds them in the shapes of the format."""
    t = made(case, usage, shape=(2, 32, 96))
    for view in (
        lambda a: a.view(64, 96),
        lambda a: a.view(64, 96).t(),
        lambda a: a.unsqueeze(0),
        lambda a: a.view(-1),
    ):
        got = view(t)
        if isinstance(got, tejit.QuantizedTensor):
            for name, (shape, dtype) in got._buffer_shapes().items():
                buffer = getattr(got, name)
                assert buffer is None or (tuple(buffer.shape), buffer.dtype) == (tuple(shape), dtype), name


@each_case(usages=True)
def test_dtype_and_device_moves(case, usage) -> None:
    t = made(case, usage)
    for half in (t.half(), t.to(torch.float16), t.to(dtype=torch.float16, device="cpu")):
        assert type(half) is type(t)
        assert half.dtype == half.dequantize().dtype == torch.float16
        assert_same(half, t)
    meta = t.to("meta")
    assert meta.device.type == "meta"
    assert type(meta) is type(t)
    assert all(b.device.type == "meta" for b in buffers(meta).values())
    assert type(t.double()) is torch.Tensor


@each_case(usages=True)
def test_copies_share_nothing(case, usage) -> None:
    for internal in (False, True):
        t = made(case, usage, internal=internal)
        for twin in (t.clone(), copy.deepcopy(t), pickle.loads(pickle.dumps(t))):
            assert type(twin) is type(t)
            assert described(twin)[2:] == described(t)[2:]
            assert_same(twin, t)
            mine, theirs = ({b.data_ptr() for b in buffers(one).values()} for one in (t, twin))
            assert not mine & theirs
        shared = t.detach()
        assert {b.data_ptr() for b in buffers(shared).values()} == {b.data_ptr() for b in buffers(t).values()}
        assert shared is not t


@each_case(usages=True)
def test_the_input_is_not_shared(case, usage) -> None:
    x = provoking("normal", SHAPE, torch.float32)
    for internal in (False, True):
        t = quantized(case.quantizer(usage, internal), x)
        before = t.dequantize()
        x.add_(1)
        assert_bitwise_equal(t.dequantize(), before)
        t.dequantize().zero_()
        assert_bitwise_equal(t.dequantize(), before)


@each_case(usages=True)
def test_files(case, usage) -> None:
    """torch.save, loaded with weights_only, of tensors, storages and a state dict."""
    module = nn.Module()
    module.weight = nn.Parameter(made(case, usage))
    file = io.BytesIO()
    torch.save(
        {"state": module.state_dict(), "storage": made(case, usage, internal=True), "t": made(case, usage)}, file
    )
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same(loaded["t"], made(case, usage))
    assert_same(loaded["storage"], made(case, usage))
    assert type(loaded["state"]["weight"]) is type(loaded["t"])
    other = nn.Module()
    other.weight = nn.Parameter(made(case, usage, seed=3))
    other.load_state_dict(loaded["state"])
    assert_same(other.weight, module.weight)
    other.load_state_dict(loaded["state"], assign=True)
    assert_same(other.weight, module.weight)
    if is_value_opaque_quantizer(module.weight._quantizer):
        assert loaded["t"]._quantizer == module.weight._quantizer


@each_case(usages=True)
def test_copy_into(case, usage) -> None:
    x = provoking("normal", SHAPE, torch.float32, 1)
    want = quantized(case.quantizer(usage), x)
    target = made(case, usage)
    torch.manual_seed(11)
    target.copy_(x)
    assert_same(target, want)
    target = made(case, usage)
    target.copy_(want)
    assert_same(target, want)
    plain = torch.zeros(SHAPE)
    plain.copy_(want)
    assert_bitwise_equal(plain, want.dequantize())
    for internal in (False, True):
        target = made(case, usage, internal=internal)
        torch.manual_seed(11)
        assert target.quantize_(x) is target
        assert_same(target, want)


@pytest.mark.parametrize("device", DEVICES)
@each_case(usages=True)
def test_a_noop_flag_of_one_leaves_every_byte(case, usage, device) -> None:
    x = provoking("normal", SHAPE, torch.float32, 1).to(device)
    for flag, moves in ((1.0, False), (0.0, True), (2.0, True)):
        t, before = made(case, usage, device), made(case, usage, device)
        torch.manual_seed(11)
        t.quantize_(x, noop_flag=torch.tensor([flag], device=device))
        assert_same(t, quantized(case.quantizer(usage, device=device), x) if moves else before)
    with pytest.raises(ValueError, match="noop_flag"):
        case.quantizer(usage, device=device).quantize(x, noop_flag=torch.ones(1, device=device))


@each_case(usages=True)
def test_buffers_given_away_and_taken_back(case, usage) -> None:
    for internal in (False, True):
        t, twin = made(case, usage, internal=internal), made(case, usage)
        given, rest = t.prepare_for_saving()
        assert rest is t
        assert tuple(t.shape) == SHAPE
        assert t.device.type == "cpu"
        assert t.nbytes == 0
        with pytest.raises(RuntimeError, match="given away"):
            t.dequantize()
        marker = torch.ones(1)
        assert t.restore_from_saved([*given, marker]) == [marker]
        assert_same(t, twin)


@each_case(usages=True)
def test_gradients_go_straight_through(case, usage) -> None:
    x = provoking("normal", SHAPE, torch.float32).requires_grad_()
    t = quantized(case.quantizer(usage), x)
    assert t.requires_grad
    factor = provoking("normal", SHAPE, torch.float32, 2)
    (t.dequantize() * factor).sum().backward()
    assert_bitwise_equal(x.grad, factor)
    x.grad = None
    (quantized(case.quantizer(usage), x) * factor).sum().backward()
    assert_bitwise_equal(x.grad, factor)
    assert not quantized(case.quantizer(usage, True), x).dequantize().requires_grad


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.5, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9, fused=True),
    "adam foreach": lambda p: torch.optim.Adam(p, 0.5, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.5, fused=True),
}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@each_case()
def test_optimizers_step_it(case, optimizer) -> None:
    """Oracle: the same optimizer on the dequantized values, quantized again after each step."""
    parameter = nn.Parameter(made(case))
    plain = nn.Parameter(parameter.dequantize().detach().clone())
    ours, theirs = OPTIMIZERS[optimizer]([parameter]), OPTIMIZERS[optimizer]([plain])
    q = case.quantizer()
    for step in range(3):
        grad = provoking("normal", SHAPE, torch.float32, 10 + step)
        parameter.grad, plain.grad = grad.clone(), grad.clone()
        torch.manual_seed(11)
        ours.step()
        theirs.step()
        if optimizer == "adamw fused" or case.stochastic or case.live:  # more than one write a step, or a history
            error = (parameter.dequantize() - plain).norm() / plain.norm()
            assert error < 4 * case.error + 1e-3
        with torch.no_grad():
            if not (optimizer == "adamw fused" or case.stochastic or case.live):
                want = quantized(q, plain.detach())
                error = (parameter.dequantize() - want.dequantize()).norm() / want.dequantize().norm()
                assert error < 2.5 * case.error + 1e-6, error
            plain.copy_(parameter.dequantize())
    assert type(parameter.data) is type(made(case))
    assert type(ours.state_dict()["state"].get(0, {}).get("exp_avg", torch.zeros(1))) is torch.Tensor


@each_case(usages=True)
def test_repr_is_one_line_and_says_what_matters(case, usage) -> None:
    for internal in (False, True):
        t = made(case, usage, internal=internal)
        text = repr(t)
        assert "\n" not in text
        for part in (type(t).__name__, "(64, 96)", "torch.float32", "cpu", f"{t.nbytes} bytes"):
            assert part in text


@each_case(usages=True)
def test_update_usage_keeps_or_refuses(case, usage) -> None:
    """A request is met, with the same values, or refused before anything changes."""
    for internal in (False, True):
        for wanted in ((True, False), (False, True), (True, True), (None, False), (False, None), (False, False)):
            t, before = made(case, usage, internal=internal), made(case, usage)
            values = t.dequantize()
            try:
                t.update_usage(*wanted)
            except RuntimeError:
                assert_same(t, before)
                continue
            assert wanted != (False, False)
            usages = t.get_usages()
            assert any(usages.values())
            for asked, direction in zip(wanted, ("rowwise", "columnwise"), strict=True):
                assert not asked or usages[direction]
            assert set(buffers(t)) == set(buffers(t.clone()))
            if usages["rowwise"] == before.get_usages()["rowwise"]:
                assert_bitwise_equal(t.dequantize(), values)


@each_case(usages=True)
def test_one_graph_and_the_same_bytes_compiled(case, usage) -> None:
    if case.live:
        pytest.skip("a quantizer with live tensors is not a constant of a graph")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    q = case.quantizer(usage)

    @torch.compile(backend=counter, fullgraph=True)
    def roundtrip(x):
        t = q.quantize(x)
        return t, t.dequantize()

    for rows in (160, 256, 320):  # blocks of 128: with up to 128 rows there is one row of blocks, and another graph
        x = provoking("normal", (rows, 96), torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        torch.manual_seed(11)
        t, values = roundtrip(x)
        assert values.dtype == torch.bfloat16
        if not case.stochastic:
            want = quantized(q, x)
            assert_same(t, want)
            assert_bitwise_equal(values, want.dequantize())
    assert counter.frame_count == 1


@each_case(only=lambda case: not case.live)
def test_quantizers_are_values(case) -> None:
    one, other = case.quantizer(), case.quantizer()
    assert one == other
    assert hash(one) == hash(other)
    assert is_value_opaque_quantizer(one)
    for twin in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one), one.replace()):
        assert twin == one
    if not case.rowwise_needed:
        assert one != case.quantizer((False, True))
    assert one.with_usage(columnwise=False) == case.quantizer((True, False))
    with pytest.raises(AttributeError, match="with_usage"):
        one.rowwise_usage = False


@each_case(only=lambda case: case.live)
def test_quantizers_with_live_tensors_keep_their_identity(case) -> None:
    one, other = case.quantizer(), case.quantizer()
    assert one != other
    assert one == one
    assert not is_value_opaque_quantizer(one)
    assert len({one, other}) == 2
