"""A user's own quantized op: an RMSNorm that emits quantized output, as documented in docs/compile.md."""

import pathlib
import re

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import tejit
from tejit import ops
from tejit.dynamo import TensorSpec
from tests.common import assert_bitwise_equal
from tests.dynamo.samples import QUANTIZERS, SHAPE


# -- the example of docs/compile.md ---------------------------------------------------------------------------
def rms_norm(x, weight, eps, q):
    """RMSNorm in float32, rounded to the input's dtype, quantized."""
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return q.quantize(y.to(x.dtype))


def rms_norm_spec(x, weight, eps, q):
    return TensorSpec(tuple(x.shape), x.dtype, q, device=x.device)


def save(ctx, inputs, result):
    x, weight, eps, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.eps = eps


def rms_norm_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    values = x.float()
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + ctx.eps)
    normed, scaled = values * inverse, grad.float() * weight.float()
    dx = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    dweight = (grad.float() * normed).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype), None, None


quantized_rms_norm = ops.register_quantized_op(
    "tejit_test::rms_norm",
    "(Tensor x, Tensor weight, float eps, tejit.Quantizer q)",
    rms_norm,
    rms_norm_spec,
    setup_context=save,
    backward=rms_norm_backward,
)
# ----------------------------------------------------------------------------------------------------------------

NAMES = [name for name in QUANTIZERS if not name.startswith("identity")]


def present(quantized) -> list[torch.Tensor]:
    return [buffer for buffer in quantized._inner() if buffer is not None]


def oracle(x: torch.Tensor, weight: torch.Tensor, q: tejit.Quantizer):
    """torch.nn's own RMSNorm in float32, rounded, then quantized."""
    module = torch.nn.RMSNorm(x.shape[-1], eps=1e-5)
    with torch.no_grad():
        module.weight.copy_(weight)
        return q.quantize(module(x.float()).to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "internal"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_norm_round_quantize(name, internal, dtype) -> None:
    q = QUANTIZERS[name].replace(internal=internal)
    x, weight = torch.randn(SHAPE, dtype=dtype), torch.rand(SHAPE[1], dtype=dtype) + 0.5
    got, want = quantized_rms_norm(x, weight, 1e-5, q), oracle(x, weight, q)
    assert type(got) is type(want)
    assert got._quantizer == q
    assert got.dtype == dtype
    for one, other in zip(present(got), present(want), strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize("usage", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, usage) -> None:
    q = QUANTIZERS[name].with_usage(rowwise=usage[0], columnwise=usage[1])
    x, weight = torch.randn(SHAPE, dtype=torch.bfloat16), torch.rand(SHAPE[1])
    opcheck(quantized_rms_norm.op, (x, weight, 1e-5, q))
    assert torch.Tag.pt2_compliant_tag in quantized_rms_norm.op.tags


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["current", "block_2d", "hybrid"])
def test_training_through_it_in_one_graph(name, compiler) -> None:
    torch._dynamo.reset()
    q = QUANTIZERS[name]
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)

    def run(x, weight):
        t = quantized_rms_norm(x * 2, weight, eps=1e-5, q=q)
        return t.detach(), t.dequantize().sin()

    compiled = torch.compile(run, backend=counter, fullgraph=True)
    weight = torch.rand(64, requires_grad=True)
    for rows in (4, 6, 10):
        x = torch.randn(rows, 64, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        grads = []
        for function in (run, compiled):
            x.grad = weight.grad = None
            t, y = function(x, weight)
            y.sum().backward()
            grads.append((t, y, x.grad, weight.grad))
        (t, y, dx, dw), (t2, y2, dx2, dw2) = grads
        assert type(t2) is type(t)
        for one, other in zip(present(t2), present(t), strict=True):
            assert_bitwise_equal(one, other)
        torch.testing.assert_close((y2, dx2, dw2), (y, dx, dw), rtol=1e-5, atol=1e-5)
        if compiler == "aot_eager":
            assert torch.equal(dx2, dx)
    assert counter.frame_count == 1


def test_gradient_is_that_of_the_norm_straight_through() -> None:
    x = torch.randn(6, 64, dtype=torch.float64).float().requires_grad_()
    weight, grad = torch.rand(64, requires_grad=True), torch.randn(6, 64)
    quantized_rms_norm(x, weight, 1e-5, QUANTIZERS["current"]).dequantize().backward(grad)
    got, x.grad, weight_grad, weight.grad = x.grad, None, weight.grad, None
    F.rms_norm(x, (64,), weight, 1e-5).backward(grad)
    torch.testing.assert_close((got, weight_grad), (x.grad, weight.grad), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "meta"])
def test_fake_and_meta_give_the_spec_s_tensor(device) -> None:
    q = QUANTIZERS["block_1d"]
    with FakeTensorMode():
        x = torch.empty(SHAPE, dtype=torch.bfloat16, device=device)
        t = quantized_rms_norm(x, torch.empty(SHAPE[1], device=device), 1e-5, q)
        want = rms_norm_spec(x, None, 0, q).create_tensor()
    assert type(t) is type(want)
    assert t.device == torch.device(device)
    assert t.__tensor_flatten__() == want.__tensor_flatten__()
    assert [b.shape for b in present(t)] == [b.shape for b in present(want)]


def test_several_results_optional_quantizers_and_lists() -> None:
    def spec(x, q, many):
        plain = TensorSpec((x.shape[0],), torch.float32, device=x.device)
        whole = TensorSpec(tuple(x.shape), x.dtype, q, device=x.device)
        return (plain, whole, *[TensorSpec(tuple(x.shape), x.dtype, each, device=x.device) for each in many])

    def split(x, q, many):
        whole = x.clone() if q is None else q.quantize_inner(x)  # inner tensors will do
        return (x.float().sum(-1), whole, *[each.quantize(x) for each in many])

    op = ops.register_quantized_op(
        "tejit_test::split", "(Tensor x, tejit.Quantizer? q, tejit.Quantizer[] many)", split, spec
    )
    x = torch.randn(SHAPE)
    for q in (None, QUANTIZERS["current"]):
        many = [QUANTIZERS["block_1d"].replace(internal=True), QUANTIZERS["current"]]
        torch._dynamo.reset()
        for function in (op, torch.compile(op, backend="aot_eager", fullgraph=True)):
            sums, whole, *rest = function(x, q, many)
            assert torch.equal(sums, x.sum(-1))
            want = x if q is None else q.quantize(x).dequantize()
            assert torch.equal(whole if q is None else whole.dequantize(), want)
            for got, each in zip(rest, many, strict=True):
                assert torch.equal(got.dequantize(), each.quantize(x).dequantize())
        opcheck(op.op, (x, q, many))


def test_a_result_that_contradicts_its_spec_is_an_error() -> None:
    def register(implementation, spec=lambda x, q: TensorSpec(tuple(x.shape), x.dtype, q, device=x.device)):
        return ops.register_quantized_op("tejit_test::liar", "(Tensor x, tejit.Quantizer q)", implementation, spec)

    x, q = torch.randn(4, 8), QUANTIZERS["current"]
    with pytest.raises(RuntimeError, match=r"result 0 of tejit_test::liar has inner tensors .*\(2, 8\).*its spec says"):
        register(lambda x, q: q.quantize(x[:2]))(x, q)
    with pytest.raises(RuntimeError, match="result 0 of tejit_test::liar was made by"):
        register(lambda x, q: q.replace(amax_epsilon=0.5).quantize(x))(x, q)
    with pytest.raises(RuntimeError, match="computed 1 results; its specs describe 2"):
        register(lambda x, q: (x.clone(),), lambda x, q: (TensorSpec((4, 8), x.dtype), TensorSpec((4, 8), x.dtype)))(
            x, q
        )
    assert register(lambda x, q: q.quantize(x))(x, q).shape == (4, 8)  # registered again: the last one counts


def test_errors_of_registration_and_call() -> None:
    def register(name="tejit_test::wrong", arguments="(Tensor x, tejit.Quantizer q)"):
        spec = lambda x, q: TensorSpec(tuple(x.shape), x.dtype, q, device=x.device)  # noqa: E731
        return ops.register_quantized_op(name, arguments, lambda x, q: q.quantize(x), spec)

    with pytest.raises(ValueError, match="'library::op'"):
        register("norm")
    for arguments in (
        "(Tensor x, tejit.Quantizer q, int n=1)",
        "(Tensor x, *, tejit.Quantizer q)",
        "(Tensor(a!) x, tejit.Quantizer q)",
    ):
        with pytest.raises(ValueError, match="tejit_test::wrong: argument"):
            register(arguments=arguments)
    op, q = register(), QUANTIZERS["current"]
    with pytest.raises(TypeError, match="needs its argument 'q'"):
        op(torch.randn(2, 2))
    with pytest.raises(TypeError, match="takes the arguments x, q; got 2 and z"):
        op(torch.randn(2, 2), q, z=1)
    x = torch.randn(2, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"no derivative.*backward="):
        op(x, q)
    with torch.no_grad():
        assert not op(x, q).requires_grad
    assert op(x, q.replace(internal=True)).shape == (2, 2)  # a bare storage carries no gradient


def test_the_documented_examples_run() -> None:
    text = (pathlib.Path(__file__).parents[2] / "docs" / "compile.md").read_text(encoding="utf-8")
    blocks = {
        kind: block for block in re.findall(r"```python\n(.*?)```", text, re.S) for kind in MARKS if kind in block
    }
    assert set(blocks) == set(MARKS)
    names = {"__name__": "tejit_docs_compile", "torch": torch, "tejit": tejit}
    for kind in MARKS:
        exec(blocks[kind], names)
    assert names["Clipped"](bound=2.0) == names["Clipped"](bound=2.0) != names["Clipped"]()
    x, q = torch.randn(4, 64), tejit.Float8BlockQuantizer()
    got = names["quantized_rms_norm"](x, torch.ones(64), 1e-5, q)
    assert torch.equal(got.dequantize(), oracle(x, torch.ones(64), q).dequantize())
    for recipe in (names["recipe"], names["custom"]):
        with tejit.autocast(recipe=recipe):
            names["model"](torch.randn(4, 64))


MARKS = ("CustomRecipe", "class Clipped", "register_quantized_op")
