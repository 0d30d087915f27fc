"""Ops that take a whole quantizer: the quantizer's own bytes, in graphs and transforms too."""

import pytest
import torch
import torch._dynamo.testing

import tejit
from tejit import Float8CurrentScalingQuantizer, NVFP4Quantizer, Quantizer, ops
from tejit.dynamo import TensorSpec
from tejit.ops import schema
from tests.common import assert_bitwise_equal, poisoned_memory
from tests.dynamo.samples import QUANTIZERS, SHAPE

USAGES = [(True, True), (True, False), (False, True)]


def own_inner(quantizer: Quantizer, x: torch.Tensor) -> list[torch.Tensor]:
    """The buffers of what the quantizer makes: the oracle, by the way that does not pass the op."""
    return [tensor for tensor in quantizer.quantize(x.detach())._inner() if tensor is not None]


@pytest.mark.parametrize("usage", USAGES, ids=lambda u: "row" * u[0] + "col" * u[1])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_bytes_order_and_round_trip(name, usage) -> None:
    quantizer = QUANTIZERS[name].with_usage(rowwise=usage[0], columnwise=usage[1])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(SHAPE, dtype=dtype, requires_grad=True)
        with poisoned_memory():
            inner = ops.quantize(x, quantizer)
        want = quantizer.quantize(x.detach())
        for got, expected in zip(inner, own_inner(quantizer, x), strict=True):
            assert_bitwise_equal(got, expected)
            assert not got.requires_grad
        names = TensorSpec(SHAPE, dtype, quantizer, device="cpu").inner_names()
        for got, attribute in zip(inner, names, strict=True):
            assert_bitwise_equal(got, getattr(want, attribute), attribute)
        for to in (torch.float32, dtype):
            assert torch.equal(ops.dequantize(inner, SHAPE, quantizer, to, nominal=dtype), want.dequantize(to))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_in_one_graph_over_batch_sizes(compiler) -> None:
    torch._dynamo.reset()
    first, second = QUANTIZERS["current"], QUANTIZERS["block_1d"].with_usage(columnwise=False)
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)

    def run(x):
        whole = ops.quantize(x, first)
        parts = ops.quantize_split(x, [2, x.shape[0] - 2], [first, second])
        values = ops.dequantize(whole, x.shape, first, torch.float32)
        return [*whole, *[tensor for part in parts for tensor in part], values, ops.fake_quantize(x, second)]

    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for rows in (4, 6, 10):
        x = torch.randn(rows, 64)
        torch._dynamo.mark_dynamic(x, 0)
        for got, want in zip(compiled(x), run(x), strict=True):
            assert_bitwise_equal(got, want)
    assert counter.frame_count == 1


def test_split_is_the_sections_quantized_alone() -> None:
    x = torch.randn(8, 64)
    quantizers = [QUANTIZERS["current"], QUANTIZERS["block_2d"], QUANTIZERS["hybrid"]]
    for part, quantizer, rows in zip(ops.quantize_split(x, [2, 5, 1], quantizers), quantizers, (2, 5, 1), strict=True):
        piece, x = x[:rows], x[rows:]
        for got, want in zip(part, own_inner(quantizer, piece), strict=True):
            assert_bitwise_equal(got, want)
    with pytest.raises(ValueError, match="do not add up to the first dimension"):
        ops.quantize_split(torch.randn(8, 64), [2, 5], quantizers[:2])
    with pytest.raises(ValueError, match="1 sections and 2 quantizers"):
        ops.quantize_split(torch.randn(8, 64), [8], quantizers[:2])


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_fake_quantize_is_straight_through(compiler) -> None:
    torch._dynamo.reset()
    quantizer = QUANTIZERS["current"]
    x, grad = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    run = torch.compile(lambda x, q: ops.fake_quantize(x, q), backend=compiler, fullgraph=True)
    for q, want in ((quantizer, quantizer.quantize(x.detach()).dequantize()), (None, x.detach())):
        x.grad = None
        y = run(x, q)
        assert torch.equal(y, want)
        assert y.data_ptr() != x.data_ptr()
        y.backward(grad)
        assert torch.equal(x.grad, grad)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_vmap_quantizes_each_example_by_itself(name) -> None:
    quantizer = QUANTIZERS[name]
    x = torch.randn(3, *SHAPE) * torch.tensor([1.0, 100.0, 0.01]).view(3, 1, 1)

    def run(example):
        inner = ops.quantize(example, quantizer)
        return [*inner, ops.dequantize(inner, SHAPE, quantizer, torch.float32), ops.fake_quantize(example, quantizer)]

    alone = [run(example) for example in x]
    for batched in (torch.vmap(run)(x), torch.vmap(run, in_dims=2)(x.movedim(0, 2).contiguous())):
        for index, got in enumerate(batched):
            assert_bitwise_equal(got, torch.stack([each[index] for each in alone]))
    nested = torch.vmap(torch.vmap(lambda v: ops.fake_quantize(v, quantizer)))(x.expand(2, *x.shape))
    assert torch.equal(nested[1], torch.stack([each[-1] for each in alone]))
    x.requires_grad_()
    torch.vmap(lambda v: ops.fake_quantize(v, quantizer))(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_vmap_over_no_examples(name) -> None:
    quantizer = QUANTIZERS[name]
    inner = ops.quantize(torch.zeros(SHAPE), quantizer)
    none = torch.vmap(lambda x: tuple(ops.quantize(x, quantizer)))(torch.empty(0, *SHAPE))
    assert [(tuple(t.shape), t.dtype) for t in none] == [((0, *t.shape), t.dtype) for t in inner]
    fake = torch.vmap(lambda x: ops.fake_quantize(x, quantizer), in_dims=1)(torch.empty(SHAPE[0], 0, *SHAPE[1:]))
    assert tuple(fake.shape) == (0, *SHAPE)


@pytest.mark.parametrize("device_type", ["cpu"])
def test_autocast_leaves_dtypes_alone(device_type) -> None:
    quantizer = QUANTIZERS["identity"]  # its buffer shows the dtype in which an op computed
    x = torch.randn(4, 8)
    with torch.autocast(device_type, torch.bfloat16):
        (data,) = ops.quantize(x, quantizer)
        assert data.dtype == ops.fake_quantize(x, quantizer).dtype == torch.float32
        assert torch.equal(data, x)
        values = ops.dequantize(ops.quantize(x, QUANTIZERS["current"]), (4, 8), QUANTIZERS["current"], torch.float32)
    assert values.dtype == torch.float32


def test_errors_name_the_argument() -> None:
    class Unregistered(Float8CurrentScalingQuantizer):
        pass

    x, q = torch.randn(4, 8), QUANTIZERS["current"]
    for wrong, message in ((3, "an op got 3 of type int"), (Unregistered(), "a Unregistered, whose class is not")):
        with pytest.raises(TypeError, match=message):
            ops.quantize(x, wrong)
    with pytest.raises(TypeError, match=r"torch\.float64"):
        ops.quantize(x.double(), q)
    with pytest.raises(ValueError, match="neither rowwise nor columnwise"):
        ops.quantize(x, q.with_usage(rowwise=False, columnwise=False))
    inner = ops.quantize(x, q)
    with pytest.raises(ValueError, match=r"2 inner tensors were given.*_scale_inv"):
        ops.dequantize(inner[:2], (4, 8), q, torch.float32)
    with pytest.raises(ValueError, match=r"inner tensor _data is torch.uint8 of shape \(4, 8\).*\(8, 4\)"):
        ops.dequantize(inner, (8, 4), q, torch.float32)
    with pytest.raises(ValueError, match="inner tensor _transpose is on meta and the first one on cpu"):
        ops.dequantize([inner[0], inner[1].to("meta"), inner[2]], (4, 8), q, torch.float32)
    with pytest.raises(TypeError, match="cannot quantize a NoneType"):
        ops.quantize_split(None, [1], [q])
    with pytest.raises(ValueError, match="negative number of rows"):
        ops.quantize_split(x, [6, -2], [q, q])
    with pytest.raises(TypeError, match="name of a type in schemas"):
        schema._QuantizerType()


@pytest.mark.parametrize("how", ["kernels", "torch"])
def test_the_backend_decides_how_the_op_computes(how, need_kernels) -> None:
    if how == "kernels":
        need_kernels("cpu")
    x = torch.randn(SHAPE)
    with tejit.backend(how):
        for got, want in zip(ops.quantize(x, QUANTIZERS["hybrid"]), own_inner(QUANTIZERS["hybrid"], x), strict=True):
            assert_bitwise_equal(got, want)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_stochastic_rounding_draws_at_each_call_in_one_graph(compiler) -> None:
    """Equal calls are not made one, and a graph that runs again draws again."""
    torch._dynamo.reset()
    q, x = NVFP4Quantizer(stochastic_rounding=True), torch.randn(32, 64)
    run = torch.compile(lambda x: (ops.fake_quantize(x, q), ops.fake_quantize(x, q)), backend=compiler, fullgraph=True)
    drawn = [*run(x), *run(x)]
    for index, values in enumerate(drawn):
        assert not any(torch.equal(values, other) for other in drawn[:index])
        assert (values - x).norm() < 0.3 * x.norm()
