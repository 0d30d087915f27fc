"""Traps of torch.compile, one test each, on every supported torch."""

import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import tejit
from tejit import Float8CurrentScalingQuantizer, NVFP4Quantizer, backend, compat, ops
from tejit.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.common import assert_bitwise_equal
from tests.dynamo.samples import QUANTIZERS


def compiled(function, compiler="aot_eager"):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    return torch.compile(function, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize(
    "name",
    # 4over6 is minutes of inductor's time on a busy machine.
    [pytest.param(name, marks=pytest.mark.full) if name == "nvfp4_4over6" else name for name in QUANTIZERS],
)
def test_inductor_keeps_the_tail_of_the_last_dimension(name) -> None:
    """On the CPU it dropped what a last block of (view * scale)[:, :K] covers beyond the last whole one."""
    quantizer = QUANTIZERS[name]
    multiple = quantizer.alignment()
    x = torch.randn(2 * multiple, -(-200 // multiple) * multiple) * torch.arange(1, 2 * multiple + 1).view(-1, 1)

    def run(x):
        inner = [tensor for tensor in quantizer.quantize_inner(x) if tensor is not None]
        return (*inner, quantizer.quantize(x).dequantize())

    with backend("torch"):
        for got, want in zip(compiled(run, "inductor")[0](x), run(x), strict=True):
            assert_bitwise_equal(got, want)


@pytest.mark.parametrize(
    "name",
    [
        "block_2d",
        "mxfp8",
        "identity_bf16",
        *[
            pytest.param(name, marks=pytest.mark.full)
            for name in ("block_1d", "mxfp8_2d", "nvfp4", "nvfp4_rht", "nvfp4_2d", "nvfp4_4over6", "hybrid")
        ],
    ],
)
def test_inductor_rounds_what_a_fused_producer_hands_over(name) -> None:
    """It went on with the float32 intermediate; a quantizer then saw another tensor than in eager mode."""
    quantizer, x = QUANTIZERS[name], torch.randn(64, 96, dtype=torch.float16)

    def run(x):
        y = torch.nn.functional.gelu(x) * 1.37
        return y, *[tensor for tensor in quantizer.quantize_inner(y) if tensor is not None]

    with backend("torch"):
        y, *got = compiled(run, "inductor")[0](x)
        want = [tensor for tensor in quantizer.quantize_inner(y) if tensor is not None]
    for one, other in zip(got, want, strict=True):
        assert_bitwise_equal(one, other)


@pytest.mark.parametrize("how", ["kernels", "torch"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_stochastic_rounding_in_a_graph_draws_anew(compiler, how, need_kernels) -> None:
    """Twice in one graph and at every call: neither a constant of the graph nor one draw for equal inputs."""
    if how == "kernels":
        need_kernels("cpu")
    q, x = NVFP4Quantizer(stochastic_rounding=True), torch.randn(32, 64)
    run, counter = compiled(lambda x: (q.quantize(x).dequantize(), q.quantize(x).dequantize()), compiler)
    with backend(how):
        torch.manual_seed(0)
        drawn = [*run(x), *run(x)]
        torch.manual_seed(0)
        again = [*run(x), *run(x)]
    for index, values in enumerate(drawn):
        assert torch.equal(values, again[index])
        assert not any(torch.equal(values, other) for other in drawn[:index])
    assert counter.frame_count == 1


def test_a_quantizer_made_in_the_graph_is_an_argument_of_an_op() -> None:
    q, x = Float8CurrentScalingQuantizer(), torch.randn(4, 8)

    def run(x):
        fresh = Float8CurrentScalingQuantizer(amax_epsilon=0.5)
        changed = fresh if compat.TORCH_VERSION < (2, 12) else q.with_usage(columnwise=False)  # 2.11: not from another
        return ops.fake_quantize(x, fresh), ops.fake_quantize(x, changed)

    for got, want in zip(compiled(run)[0](x), run(x), strict=True):
        assert torch.equal(got, want)


def test_an_op_takes_a_quantized_tensor_by_its_values() -> None:
    """A wrapper never reaches the op: dispatch dequantizes it first, compiled and not."""
    q = QUANTIZERS["block_1d"]
    t = QUANTIZERS["current"].quantize(torch.randn(4, 64))
    want = ops.quantize(t.dequantize(), q)
    for function in (ops.quantize, compiled(lambda t, q: ops.quantize(t, q))[0]):
        for got, expected in zip(function(t, q), want, strict=True):
            assert_bitwise_equal(got, expected)


@pytest.mark.parametrize(
    "recipe",
    [Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling(disable_stochastic_rounding=True)],
    ids=lambda recipe: type(recipe).__name__,
)
def test_backward_keeps_what_forward_used_in_a_graph_too(recipe) -> None:
    """Backward runs outside of autocast, or inside another one; re-reading the context gave other gradients."""
    layer, x, grad = tejit.Linear(32, 32), torch.randn(4, 32), torch.randn(4, 32)
    other = Float8BlockScaling()
    found = []
    for function in (layer, compiled(layer)[0]):
        for context in (tejit.autocast(enabled=False), tejit.autocast(recipe=other), tejit.autocast(recipe=recipe)):
            a = x.clone().requires_grad_()
            with tejit.autocast(recipe=recipe):
                y = function(a)
            with context:
                y.backward(grad)
            found.append(a.grad)
    for gradient in found[1:]:
        assert torch.equal(gradient, found[0])


def test_the_flatten_context_is_comparable_and_holds_no_tensor() -> None:
    for quantizer in QUANTIZERS.values():
        first, second = (quantizer.quantize(torch.randn(32, 64)).__tensor_flatten__()[1] for _ in range(2))
        assert first == second
        assert first["cls"] is type(quantizer.quantize(torch.randn(32, 64)))
        changed = quantizer.with_usage(columnwise=False).quantize(torch.randn(32, 64)).__tensor_flatten__()[1]
        assert changed != first

        def values(context):
            return [v for value in context.values() for v in (value.values() if isinstance(value, dict) else [value])]

        assert not any(isinstance(value, torch.Tensor) for value in values(first))


def test_a_module_s_quantizer_behind_every_kind_of_source() -> None:
    """Attribute, container, closure and argument; an equal one recompiles nothing."""
    q = Float8CurrentScalingQuantizer()

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.many, self.named = q.replace(), [q.replace()], {"q": q.replace()}

        def forward(self, x, given):
            total = x
            for each in (self.q, self.many[0], self.named["q"], q, given):
                total = total + each.quantize(x).dequantize()
            return total

    holder, x = Holder(), torch.randn(4, 8)
    run, counter = compiled(holder)
    for _ in range(2):
        given = q.replace()  # one object behind two sources would be guarded as one
        assert torch.equal(run(x, given), holder(x, given))
        holder.q, holder.many, holder.named = q.replace(), [q.replace()], {"q": q.replace()}
    assert counter.frame_count == 1


def test_nothing_is_logged_about_renamed_interfaces() -> None:
    """torch 2.14 renamed the registration; its old names log at every use."""
    program = "import tejit; tejit.ops.quantize(__import__('torch').ones(2, 2), tejit.Float8CurrentScalingQuantizer())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert "deprecated" not in done.stderr + done.stdout


def test_a_differentiable_quantized_tensor_leaves_a_graph_only_detached() -> None:
    """torch expects a quantized gradient for a quantized output and gets a plain one: an error, not a guess."""
    q, x = Float8CurrentScalingQuantizer(), torch.randn(4, 8, requires_grad=True)
    t = compiled(lambda x: q.quantize(x))[0](x)
    with pytest.raises(RuntimeError, match=r"tangent|subclass"):
        t.dequantize().sum().backward()
    t, y = compiled(lambda x: ((t := q.quantize(x)).detach(), t.dequantize()))[0](x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert type(t) is tejit.Float8Tensor
