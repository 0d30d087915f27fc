"""Row 83: a gradient in float16 that is infinite or NaN comes out of a quantized backward infinite or NaN, although
the casts saturate, so `torch.amp.GradScaler` skips the steps that it skips for torch's own layers. The oracle is the
same module in high precision."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import tejit
from tejit.formats import (
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
)
from tejit.nn.twins import TransposedLinear
from tejit.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.common import DEVICES
from tests.nn.recipes import RECIPES


def hybrid(role):
    return HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=Float8CurrentScalingQuantizer())


def only_gradients(role):
    return MXFP8Quantizer() if role.tensor_type == "grad_output" else IdentityQuantizer()


ALL = {
    **RECIPES,
    "block 2D gradients": Float8BlockScaling(grad_block_scaling_dim=2),
    "hybrid": CustomRecipe(hybrid),
    "gradients only": CustomRecipe(only_gradients),
    "identity": CustomRecipe(lambda role: IdentityQuantizer()),
    "mixed": MXFP8BlockScaling(overrides=(("part*", Float8CurrentScaling()),)),
}
FEW = {name: ALL[name] for name in ("current", "delayed", "block", "MXFP8", "NVFP4")}
VALUES = {"inf": float("inf"), "-inf": -float("inf"), "nan": float("nan")}
each_value = pytest.mark.parametrize("value", list(VALUES))
each_device = pytest.mark.parametrize("device", DEVICES)


class Grouped(tejit.GroupedLinear):
    def forward(self, x, is_first_microbatch=None):
        return super().forward(x, [3, 0, 2, x.shape[0] - 5], is_first_microbatch)


def transposed(**arguments) -> nn.Module:
    module = TransposedLinear(64, 96, dtype=torch.float16)
    module.weight = nn.Parameter(module.weight.detach().t().contiguous())
    return module


HALF = {"dtype": torch.float16}
MODULES = {
    "Linear": lambda **a: tejit.Linear(64, 96, **HALF, **a),
    "no bias": lambda **a: tejit.Linear(64, 96, bias=False, **HALF, **a),
    "LayerNormLinear": lambda **a: tejit.LayerNormLinear(64, 96, **HALF, **a),
    "RMSNorm": lambda **a: tejit.LayerNormLinear(64, 96, normalization="RMSNorm", **HALF, **a),
    "LayerNormMLP": lambda **a: tejit.LayerNormMLP(64, 96, **HALF, **a),
    "relu MLP": lambda **a: tejit.LayerNormMLP(64, 96, activation="relu", **HALF, **a),
    "swiglu MLP": lambda **a: tejit.LayerNormMLP(64, 96, activation="swiglu", checkpoint=True, **HALF, **a),
    "GroupedLinear": lambda **a: Grouped(4, 64, 96, **HALF, **a),
    "MultiheadAttention": lambda **a: tejit.MultiheadAttention(64, 4, attention_dropout=0.0, **HALF, **a),
    "TransformerLayer": lambda **a: tejit.TransformerLayer(
        64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, **HALF, **a
    ),
}
#: Those whose constructors know the switches.
SWITCHED = ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer"]


def made(kind: str, device: str = "cpu", **arguments) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        module = transposed() if kind == "TransposedLinear" else MODULES[kind](**arguments)
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    return module.to(device)


def rows_of(module: nn.Module, rows: int = 24) -> Tensor:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).to(next(module.parameters()).device)
    deep = isinstance(module, (tejit.MultiheadAttention, tejit.TransformerLayer))
    return (x.view(2, rows // 2, 64) if deep else x).half()


def poisoned_gradient(y: Tensor, value: float) -> Tensor:
    """Finite but for an entry of the sixth token and one of the second-last token."""
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.device, y.dtype)
    flat = grad.view(-1, y.shape[-1])
    flat[5, 7] = flat[-2, 30] = value
    return grad


def gradients_of(module: nn.Module, recipe, value: float, function=None, **options) -> dict[str, Tensor]:
    """Gradients by name, wherever they went."""
    x = rows_of(module).requires_grad_()
    with tejit.autocast(enabled=recipe is not None, recipe=recipe):
        y = (module if function is None else function)(x, **options)
    y.backward(poisoned_gradient(y, value))
    if any(getattr(part, "delay_wgrad_compute", False) for part in module.modules()):
        module.backward_dw()
    found = {"dgrad": x.grad}
    for name, parameter in module.named_parameters():
        found[name] = getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad
    return found


def assert_as_bad(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Wherever `want` is not finite, `got` is not."""
    assert got.keys() == want.keys()
    some = 0
    for name, wanted in want.items():
        bad = ~wanted.isfinite()
        some += int(bad.any())
        missed = bad & got[name].isfinite()
        assert not missed.any(), f"{name}: finite at {missed.nonzero()[:1].tolist()}, and in high precision it is not"
    assert some > 1  # so the test can fail


@each_device
@each_value
@pytest.mark.parametrize("recipe", list(ALL))
def test_83_the_gradients_of_a_linear_layer_are_not_finite_where_those_of_torch_are_not(recipe, value, device):
    module = made("Linear", device)
    module.name = "part"
    want = gradients_of(copy.deepcopy(module), None, VALUES[value])
    got = gradients_of(module, ALL[recipe], VALUES[value])
    assert_as_bad(got, want)
    for name, wanted in want.items():  # and finite where those are
        assert torch.equal(wanted.isfinite(), got[name].isfinite()), name


@each_device
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("recipe", list(FEW))
def test_83_nor_under_a_backward_override(recipe, override, device):
    module = made("Linear", device)
    want = gradients_of(copy.deepcopy(module), None, float("inf"))
    recipe = type(FEW[recipe])(backward_override=override)
    got = gradients_of(module, recipe, float("inf"))
    for name, wanted in want.items():
        assert torch.equal(wanted.isfinite(), got[name].isfinite()), name


@each_device
@pytest.mark.parametrize("recipe", list(FEW))
@pytest.mark.parametrize("kind", [*MODULES, "TransposedLinear"])
def test_83_every_module_passes_an_infinite_gradient_on(kind, recipe, device):
    module = made(kind, device)
    want = gradients_of(copy.deepcopy(module), None, float("inf"))
    got = gradients_of(module, FEW[recipe], float("inf"))
    if kind == "relu MLP":  # which entries ReLU stops depends on the rounding of its input
        want, got = ({name: values.sum() for name, values in found.items()} for found in (want, got))
    assert_as_bad(got, want)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", SWITCHED)
def test_83_wherever_the_gradient_of_a_weight_goes(kind, fused, put_off, dtype, device):
    if not fused and dtype != torch.float16:
        pytest.skip("there is no main_grad")
    want = gradients_of(made(kind, device), None, float("inf"))
    module = made(kind, device, fuse_wgrad_accumulation=fused, delay_wgrad_compute=put_off)
    for parameter in module.parameters():
        if fused and parameter.dim() == 2:
            parameter.main_grad = torch.zeros(parameter.shape, dtype=dtype, device=device)
    got = gradients_of(module, Float8BlockScaling(), float("inf"))
    assert_as_bad(got, want)
    if fused:
        assert all(parameter.grad is None for parameter in module.parameters() if parameter.dim() == 2)


@each_device
@pytest.mark.parametrize("recipe", list(FEW))
def test_83_the_gradient_of_each_group_is_its_own(recipe, device):
    module = made("GroupedLinear", device)
    x = rows_of(module).requires_grad_()
    with tejit.autocast(recipe=FEW[recipe]):
        y = module(x)
    grad = torch.ones_like(y)
    grad[4, 3] = float("inf")  # of the third group
    y.backward(grad)
    assert [bool(module.get_parameter(f"weight{i}").grad.isfinite().all()) for i in range(4)] == [
        True,
        True,
        False,
        True,
    ]
    assert x.grad.isfinite().all(1).tolist() == [row != 4 for row in range(24)]


@each_device
@pytest.mark.parametrize("recipe", ["current", "block", "MXFP8", "NVFP4"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "GroupedLinear", "TransformerLayer"])
def test_83_weights_that_live_quantized(kind, recipe, device):
    want = gradients_of(made(kind, device), None, float("inf"))
    with tejit.quantized_model_init(recipe=FEW[recipe]):
        module = MODULES[kind]().to(device)
    assert any(isinstance(p, tejit.tensor.QuantizedTensor) for p in module.parameters())
    assert_as_bad(gradients_of(module, FEW[recipe], float("inf")), want)


@each_device
@pytest.mark.parametrize("recipe", list(FEW))
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "GroupedLinear"])
def test_83_in_later_microbatches_too(kind, recipe, device):
    module = made(kind, device)
    want = gradients_of(copy.deepcopy(module), None, float("nan"))
    with tejit.autocast(recipe=FEW[recipe]):
        module(rows_of(module).requires_grad_(), is_first_microbatch=True).sum().backward()
    module.zero_grad()
    assert_as_bad(gradients_of(module, FEW[recipe], float("nan"), is_first_microbatch=False), want)


@each_device
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("recipe", ["current", "block", "NVFP4"])
def test_83_under_autocast_to_float16(recipe, save, device):
    """The parameters are float32, the products float16."""
    module = tejit.Linear(64, 96, save_original_input=save, device=device)
    x = torch.randn(10, 64, device=device, requires_grad=True)
    with torch.autocast(device, torch.float16), tejit.autocast(recipe=FEW[recipe]):
        y = module(x)
    assert y.dtype == torch.float16
    grad = torch.ones_like(y)
    grad[2, 9] = float("inf")
    y.backward(grad)
    assert x.grad.isfinite().all(1).tolist() == [row != 2 for row in range(10)]
    assert module.weight.grad.isfinite().all(1).tolist() == [row != 9 for row in range(96)]


@each_device
@pytest.mark.parametrize("rows", [0, 1])
def test_83_no_rows_and_one(rows, device):
    module = tejit.Linear(64, 96, dtype=torch.float16, device=device)
    x = torch.randn(rows, 64, dtype=torch.float16, device=device, requires_grad=True)
    with tejit.autocast(recipe=MXFP8BlockScaling()):
        module(x).backward(torch.full((rows, 96), float("inf"), dtype=torch.float16, device=device))
    assert x.grad.shape == (rows, 64)
    assert not x.grad.isfinite().any() or not rows
    assert bool(module.weight.grad.isfinite().any()) is (rows == 0)


@pytest.mark.parametrize("recipe", list(FEW))
def test_83_finite_gradients_keep_their_bits(recipe):
    """Also -0, and where their sum overflows float16."""
    if recipe == "NVFP4":
        recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    else:
        recipe = FEW[recipe]
    found = []
    for dtype in (torch.float16, torch.float32):
        module = made("no bias").to(dtype)
        with torch.no_grad():
            module.weight.copy_(torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).half() / 1000)
            module.weight[:, 3] = 0
        x = (rows_of(module) / 1000).half().to(dtype)
        x[:, 5] = -0.0
        x.requires_grad_()
        with tejit.autocast(recipe=recipe):
            y = module(x)
        grad = torch.full_like(y, 65504.0)
        grad[::2] *= -1
        y.backward(grad)
        found.append((x.grad, module.weight.grad))
    for half, single in zip(*found, strict=True):
        assert half.isfinite().all()
        assert torch.equal(half.view(torch.int16), single.half().view(torch.int16))


def compiled_cases():
    for backend in ("aot_eager", "inductor"):
        for kind in ("Linear", "LayerNormMLP", "GroupedLinear"):
            for recipe in ("current", "block"):
                marks = [] if recipe == "block" and backend == "aot_eager" else [pytest.mark.full]
                if backend == "inductor":
                    marks.append(pytest.mark.jit)
                yield pytest.param(recipe, kind, backend, marks=marks)


@each_device
@pytest.mark.parametrize(("recipe", "kind", "backend"), list(compiled_cases()))
def test_83_compiled_in_one_graph(recipe, kind, backend, device):
    module = made(kind, device)
    want = gradients_of(copy.deepcopy(module), None, float("inf"))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    assert_as_bad(gradients_of(module, FEW[recipe], float("inf"), compiled), want)
    assert counter.frame_count == 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def steps_taken(net: nn.Module, device: str, recipe) -> list[bool]:
    """Whether GradScaler took each step; every third loss is as large as float16 cannot hold when scaled."""
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    taken = []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(device)
        with torch.autocast(device, torch.float16), tejit.autocast(enabled=recipe is not None, recipe=recipe):
            y = net(x)
        loss = (y[:, 0] if step % 3 == 1 else y).float().mean() * (1e6 if step % 3 == 1 else 1)
        before = [p.detach().clone() for p in net.parameters()]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        taken.append(any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)))
        assert all(p.isfinite().all() for p in net.parameters())
    return taken


@each_device
@pytest.mark.parametrize("recipe", [*FEW, "frozen head"])
def test_83_grad_scaler_skips_the_steps_that_it_skips_for_torch_s_layers(recipe, device):
    torch.manual_seed(0)
    net = Net().to(device)
    twin = copy.deepcopy(net)
    if recipe == "frozen head":  # so that only what is passed on can tell, and no bias
        for each in (net, twin):
            each.two.requires_grad_(False)
            each.one.bias = None
    chosen = FEW.get(recipe, FEW["block"])
    tejit.convert(net, recipe=chosen, filter_fn=lambda module, name: True)
    want = steps_taken(twin, device, None)
    assert want == [True, False, True, True, False, True]
    assert steps_taken(net, device, chosen) == want


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_83_a_skipped_step_leaves_the_scale_of_delayed_scaling_sane(algorithm):
    """While an infinite amax counts the scale stays as it was, and then follows the others again."""
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm)
    module = made("Linear")
    scales, finite = [], []
    for value in (1.0, 1.0, float("inf"), 4.0, 4.0, 4.0):
        module.zero_grad()
        with tejit.autocast(recipe=recipe):
            y = module(rows_of(module))
        y.backward(torch.full_like(y, 2.0 * value))
        scales.append(module._delayed_grad_scale.item())
        finite.append(bool(module.weight.grad.isfinite().all()))
    assert scales == [28672.0] * (5 if algorithm == "max" else 3) + [7168.0] * (1 if algorithm == "max" else 3)
    assert finite == [True, True, False, True, True, True]
