"""One graph: no break, no recompile, and eager's result."""

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import tejit
from tejit import backend
from tejit.recipe import Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, NVFP4BlockScaling
from tests.common import DEVICES, short

torch._dynamo.config.cache_size_limit = 64


def model(dtype: torch.dtype, device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        tejit.Linear(48, 64, device=device, dtype=dtype),
        nn.GELU(),
        tejit.Linear(64, 40, device=device, dtype=dtype),
    )


def results(function, module, x, grad):
    y = function(x)
    y.backward(grad)
    named = {"y": y.detach(), "dgrad": x.grad.clone()}
    named.update({name: p.grad.clone() for name, p in module.named_parameters()})
    x.grad = None
    module.zero_grad()
    return named


def close(got: torch.Tensor, want: torch.Tensor, exact: bool) -> bool:
    """Equal to the bit, or under inductor within 1e-5 (float32) or 2 ulp (bf16) of the tensor's maximum."""
    if exact:
        return torch.equal(got, want)
    tolerance = 1e-5 if want.dtype == torch.float32 else 2 * torch.finfo(want.dtype).eps
    return ((got.double() - want.double()).abs().max() <= tolerance * want.double().abs().max()).item()


#: Where the fast tier compiles, with the kernels in bfloat16 and with plain torch in float32; the full tier everywhere.
FAST = [
    ("aot_eager", "context inside", "kernels"),
    ("aot_eager", "context outside", "kernels"),
    ("aot_eager", "context outside", "torch"),
    ("inductor", "context inside", "kernels"),
    ("inductor", "context outside", "torch"),
]
PLACES = [
    pytest.param(
        compiler,
        dtype,
        where,
        how,
        marks=() if dtype == usual and (compiler, where, how) in FAST else pytest.mark.full,
        id=f"{compiler}-{short(dtype)}-{where}-{how}",
    )
    for compiler in ("aot_eager", "inductor")
    for dtype in (torch.float32, torch.bfloat16)
    for where in ("context outside", "context inside")
    for how, usual in (("kernels", torch.bfloat16), ("torch", torch.float32))
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("compiler", "dtype", "where", "how"), PLACES)
@pytest.mark.parametrize("make_recipe", [Float8CurrentScaling, Float8BlockScaling])
def test_one_graph_and_eager_s_result(compiler, make_recipe, dtype, where, how, device, need_kernels) -> None:
    """Ten steps with changing data and weights, batch sizes 4, 6, 10 marked dynamic."""
    if how == "kernels":
        need_kernels(device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = model(dtype, device)
    recipe = make_recipe()

    def inside(x):
        with tejit.autocast(recipe=recipe):
            return module(x)

    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    compiled = torch.compile(inside if where == "context inside" else module, backend=counter, fullgraph=True)
    with backend(how):
        for step in range(10):
            x = (torch.randn(4 + 2 * (step % 3) + (step % 3 == 2) * 2, 48, dtype=dtype) * (step + 1)).to(device)
            x.requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)
            grad = torch.randn(x.shape[0], 40, dtype=dtype).to(device)
            want = results(inside, module, x, grad)
            with tejit.autocast(recipe=recipe):
                got = results(compiled, module, x, grad)
            for name in want:
                assert close(got[name], want[name], compiler == "aot_eager"), f"step {step}: {name}"
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(torch.randn_like(p), alpha=0.01)
    assert counter.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]


SMALL_BLOCKS = {
    "MXFP8": MXFP8BlockScaling(),
    "MXFP8 2D": MXFP8BlockScaling(enable_2d_quantization=True),
    "NVFP4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "NVFP4 stochastic": NVFP4BlockScaling(),
    "NVFP4 rows 4over6": NVFP4BlockScaling(
        disable_stochastic_rounding=True, row_scaled_activation=True, four_over_six="all"
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        # TorchDynamo needs half a minute for NVFP4's random numbers in plain torch.
        pytest.param(name, how, marks=() if (name, how) in fast else pytest.mark.full, id=f"{name}-{how}")
        for fast in [(("MXFP8", "kernels"), ("MXFP8", "torch"), ("NVFP4 stochastic", "kernels"))]
        for name in SMALL_BLOCKS
        for how in ("kernels", "torch")
    ],
)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_small_blocks_pad_in_one_graph(compiler, name, how, device, need_kernels) -> None:
    """Features and batches that fit and that do not: the padding is arithmetic, so they share a graph.

    Ten steps with changing data and weights; stochastic rounding draws the same numbers from the same seed.
    """
    if how == "kernels":
        need_kernels(device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = model(torch.bfloat16, device)
    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with backend(how), tejit.autocast(recipe=SMALL_BLOCKS[name]):
        # In plain torch one block of rows is a dimension of size 1, which torch specialises: another graph.
        sizes = (6, 32, 33) if how == "kernels" else (40, 64, 33)
        for step in range(10):
            rows = sizes[step % 3]
            x = torch.randn(rows, 48, dtype=torch.bfloat16, device=device).requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)
            grad = torch.randn(rows, 40, dtype=torch.bfloat16, device=device)
            found = []
            for function in (module, compiled):
                torch.manual_seed(step)
                found.append(results(function, module, x, grad))
            want, got = found
            for product in want:
                assert got[product].shape == want[product].shape
                if "stochastic" not in name or compiler == "aot_eager":  # inductor draws from a generator of its own
                    assert close(got[product], want[product], compiler == "aot_eager"), f"step {step}: {product}"
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(torch.randn_like(p), alpha=0.01)
    assert counter.frame_count == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("how", ["kernels", "torch"])
def test_switching_recipes_and_returning_recompiles_nothing(how, need_kernels) -> None:
    if how == "kernels":
        need_kernels("cpu")
    torch._dynamo.reset()
    module = model(torch.float32, "cpu")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    x = torch.randn(4, 48)
    recipes = [Float8CurrentScaling(), Float8CurrentScaling(fp8_format=Format.E4M3), None]

    def call(recipe):
        with backend(how), tejit.autocast(enabled=recipe is not None, recipe=recipe):
            out, want = compiled(x), module(x)
            assert torch.equal(out, want)
            out.sum().backward()

    for recipe in recipes:
        call(recipe)
    graphs = counter.frame_count
    assert graphs == 3
    for recipe in recipes * 2:
        call(recipe)
    call(Float8CurrentScaling())  # an equal recipe, not the same object
    assert counter.frame_count == graphs


def test_nested_contexts_in_one_graph() -> None:
    torch._dynamo.reset()
    layers = nn.ModuleList([tejit.Linear(16, 16) for _ in range(4)])
    outer, inner = Float8CurrentScaling(), Float8CurrentScaling(force_pow_2_scales=True)

    def run(x):
        with tejit.autocast(recipe=outer):
            x = layers[0](x)
            with tejit.autocast(recipe=inner):
                x = layers[1](x)
                with tejit.autocast(enabled=False):
                    x = layers[2](x)
            return layers[3](x)

    x = torch.randn(4, 16)
    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x))
    assert tejit.recipe.current_recipe() is None


def test_torch_autocast_in_the_graph() -> None:
    torch._dynamo.reset()
    module = model(torch.float32, "cpu")

    def run(x):
        with torch.autocast("cpu", torch.bfloat16), tejit.autocast():
            return module(x)

    x, grad = torch.randn(4, 48, requires_grad=True), torch.randn(4, 40, dtype=torch.bfloat16)
    want = results(run, module, x, grad)
    got = results(torch.compile(run, backend="aot_eager", fullgraph=True), module, x, grad)
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_quantize_after_a_fused_producer_sees_rounded_values(compiler) -> None:
    """inductor drops the rounding to bfloat16 between fused operations; quantized bytes must not notice."""
    from tejit.kernels import fp8

    def run(x):
        y = torch.nn.functional.gelu(x) * 1.37
        return y, *quantize(y)

    def quantize(y):
        return fp8.quantize_current(y, 0, True, True, False, 0.0)

    for how in ("torch", "auto"):
        with backend(how):
            for dtype in (torch.bfloat16, torch.float16):
                x = torch.randn(64, 200, dtype=dtype)
                torch._dynamo.reset()
                y, *got = torch.compile(run, backend=compiler, fullgraph=True)(x)
                for one, other in zip(got, quantize(y), strict=True):
                    assert torch.equal(one, other)


def test_quantized_tensors_through_a_graph() -> None:
    torch._dynamo.reset()
    q = tejit.Float8CurrentScalingQuantizer()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def run(x, w):
        t = q.quantize(x)
        return t, t.view(-1, 8).dequantize() + w.dequantize().sum()

    w = q(torch.randn(3, 3))
    for rows in (4, 6, 10):
        x = torch.randn(rows, 16)
        torch._dynamo.mark_dynamic(x, 0)
        t, y = run(x, w)
        want = q(x)
        assert type(t) is tejit.Float8Tensor
        assert torch.equal(t._data, want._data)
        assert torch.equal(t._transpose, want._transpose)
        assert torch.equal(y, want.view(-1, 8).dequantize() + w.dequantize().sum())
    assert counter.frame_count == 1


def test_an_equal_quantizer_recompiles_nothing_a_changed_one_once() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = tejit.Float8CurrentScalingQuantizer()

        def forward(self, x):
            return self.q.quantize(x).dequantize()

    holder = Holder()
    compiled = torch.compile(holder, backend=counter, fullgraph=True)
    x = torch.randn(4, 16)
    compiled(x)
    holder.q = tejit.Float8CurrentScalingQuantizer()
    compiled(x)
    assert counter.frame_count == 1
    holder.q = tejit.Float8CurrentScalingQuantizer(force_pow_2_scales=True)
    assert torch.equal(compiled(x), holder.q(x).dequantize())
    assert counter.frame_count == 2
