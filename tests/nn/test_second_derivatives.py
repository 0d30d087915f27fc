"""Row 73: a second derivative through quantized operands is refused, never a constant, whoever asks for it."""

import dataclasses
import itertools

import pytest
import torch
import torch._functorch.config
from torch.autograd import functional
from torch.utils.checkpoint import checkpoint

import tejit
from tejit.nn.twins import TransposedLinear
from tejit.recipe import CustomRecipe, Float8CurrentScaling, NVFP4BlockScaling
from tests.nn.recipes import RECIPES

REFUSED = "first derivative only"


class Grouped(tejit.GroupedLinear):
    def forward(self, x):
        return super().forward(x, [3, 0, x.shape[0] - 3])


class Attention(tejit.MultiheadAttention):
    def forward(self, x):
        out = super().forward(x.unsqueeze(0))
        return (out[0] if isinstance(out, tuple) else out).squeeze(0)


class Layer(tejit.TransformerLayer):
    def forward(self, x):
        return super().forward(x.unsqueeze(0)).squeeze(0)


MODULES = {
    "Linear": lambda: tejit.Linear(32, 32),
    "Linear frozen": lambda: tejit.Linear(32, 32, bias=False).requires_grad_(False),
    "Linear quantized": lambda: quantized(lambda: tejit.Linear(32, 32)),
    "Linear main_grad": lambda: with_main_grad(tejit.Linear(32, 32, fuse_wgrad_accumulation=True)),
    "LayerNormLinear": lambda: tejit.LayerNormLinear(32, 32),
    "RMSNormLinear": lambda: tejit.LayerNormLinear(32, 32, normalization="RMSNorm"),
    "LayerNormMLP": lambda: tejit.LayerNormMLP(32, 64, activation="swiglu"),
    "LayerNormMLP checkpoint": lambda: tejit.LayerNormMLP(32, 64, checkpoint=True),
    "GroupedLinear": lambda: Grouped(3, 32, 32),
    "TransposedLinear": lambda: transposed(),
    "MultiheadAttention": lambda: Attention(32, 2, attention_dropout=0.0),
    "TransformerLayer": lambda: Layer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0),
}


def quantized(make):
    with tejit.quantized_model_init(recipe=Float8CurrentScaling()):
        return make()


def with_main_grad(module):
    module.weight.main_grad = torch.zeros_like(module.weight)
    return module


def transposed():
    module = tejit.Linear(32, 32)
    module.__class__ = TransposedLinear
    return module


def built(name):
    torch.manual_seed(0)
    return MODULES[name]()


def applied(function, recipe):
    def loss(x):
        with tejit.autocast(recipe=recipe):
            return function(x).square().sum()

    return loss


def by_grad(loss, x):
    torch.autograd.grad(loss(x), x, create_graph=True)


def by_sum(loss, x):
    """The gradient of the output is a constant, which requires no grad."""
    torch.autograd.grad(loss(x) * 1.0, x, create_graph=True)


def by_penalty(loss, x):
    (slope,) = torch.autograd.grad(loss(x), x, create_graph=True)
    (slope.norm() - 1).square().backward()


WAYS = {
    "grad": by_grad,
    "sum": by_sum,
    "penalty": by_penalty,
    "backward": lambda loss, x: loss(x).backward(create_graph=True),
    "hessian": functional.hessian,
    "hvp": lambda loss, x: functional.hvp(loss, x, torch.ones_like(x)),
    "vhp": lambda loss, x: functional.vhp(loss, x, torch.ones_like(x)),
    "jvp": lambda loss, x: functional.jvp(loss, x, torch.ones_like(x)),
    "jacobian of a gradient": lambda loss, x: functional.jacobian(loss, x, create_graph=True),
    "func.hessian": lambda loss, x: torch.func.hessian(loss)(x),
    "func.jvp": lambda loss, x: torch.func.jvp(loss, (x,), (torch.ones_like(x),)),
    "func.hvp": lambda loss, x: torch.func.jvp(torch.func.grad(loss), (x,), (torch.ones_like(x),)),
}


def points():
    torch.manual_seed(1)
    return torch.randn(8, 32, requires_grad=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_73_second_derivatives_raise(name, way) -> None:
    kind, expected = NotImplementedError, REFUSED
    if way.startswith("func."):
        expected = "torch.func|forward-mode"
        if "checkpoint" in name:
            kind, expected = RuntimeError, None  # torch refuses checkpoints, in words of its own
    with pytest.raises(kind, match=expected):
        WAYS[way](applied(built(name), Float8CurrentScaling()), points())


@pytest.mark.parametrize(
    ("recipe", "override"),
    [
        pytest.param(name, override, marks=() if name in ("delayed", "MXFP8") else pytest.mark.full)
        for name, override in itertools.product(RECIPES, (None, "high_precision", "dequantized"))
        if override is None or RECIPES[name].backward_override is None
    ],
)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_73_under_every_recipe_and_override(name, recipe, override) -> None:
    try:
        asked = dataclasses.replace(RECIPES[recipe], backward_override=override)
    except ValueError:
        pytest.skip("the recipe takes no override")
    with pytest.raises(NotImplementedError, match=REFUSED):
        by_grad(applied(built(name), asked), points())


def test_73_under_a_custom_recipe_and_where_one_product_stays_in_high_precision() -> None:
    quantizer = tejit.Float8CurrentScalingQuantizer()
    custom = CustomRecipe(qfactory=lambda role: quantizer)
    mixed = Float8CurrentScaling(overrides=(("*fc1*", None),))
    named = tejit.LayerNormMLP(32, 64, name="mlp")
    for module, recipe in ((built("Linear"), custom), (built("LayerNormMLP"), custom), (named, mixed)):
        with pytest.raises(NotImplementedError, match=REFUSED):
            by_grad(applied(module, recipe), points())


@pytest.mark.parametrize("reentrant", [False, True])
def test_73_first_derivatives_go_on_in_checkpoints(reentrant) -> None:
    """The inner backward of a reentrant checkpoint is one of its own; retain_graph=True keeps a graph, no more."""
    module, x = built("Linear"), points()
    with tejit.autocast():
        plain, kept = module(x), checkpoint(module, x, use_reentrant=reentrant)
    (want,) = torch.autograd.grad(plain.square().sum(), x)
    loss = kept.square().sum()
    for _ in range(2):
        x.grad = None
        loss.backward(retain_graph=True)
        assert torch.equal(x.grad, want)
    if not reentrant:
        with pytest.raises(NotImplementedError, match=REFUSED):
            loss.backward(create_graph=True)


@pytest.mark.parametrize("name", MODULES)
def test_73_without_autocast_second_derivatives_are_there(name) -> None:
    """The way out that the error names: outside of autocast they are torch's, as a central difference finds."""
    module = built(name).double() if name != "Linear quantized" else built(name)
    dtype = next(module.parameters()).dtype
    x, direction = points().detach().to(dtype), points().detach().flip(0).to(dtype)

    def loss(x):
        with tejit.autocast(enabled=False):
            return module(x).pow(3).sum()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the one that torch differentiates twice
        _, found = functional.hvp(loss, x, direction)
    step = 1e-4 if dtype == torch.float64 else 1e-2

    def slope(x):
        x = x.requires_grad_()
        return torch.autograd.grad(loss(x), x)[0]

    want = (slope(x + step * direction) - slope(x - step * direction)) / (2 * step)
    torch.testing.assert_close(found, want, rtol=1e-4 if dtype == torch.float64 else 2e-2, atol=1e-4 * want.abs().max())


def test_73_main_grad_without_autocast_is_right_or_raises() -> None:
    plain, fused = built("Linear"), built("Linear main_grad")
    fused.load_state_dict(plain.state_dict())
    for module in (plain, fused):
        x = points()
        (slope,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        slope.square().sum().backward(inputs=[module.weight])
    assert plain.weight.grad.abs().max() > 0
    torch.testing.assert_close(fused.weight.main_grad, plain.weight.grad)
    with pytest.raises(NotImplementedError, match="main_grad"):
        fused(points()).sum().backward(create_graph=True)


def test_73_quantizing_is_straight_through_twice() -> None:
    """Second derivatives of what is around a quantizer are there, and its own is 0."""
    q, x = tejit.Float8CurrentScalingQuantizer(), points()
    for values in (lambda x: q(x).dequantize(), lambda x: torch.ops.tejit.fake_quantize(x, q)):
        (slope,) = torch.autograd.grad(values(x.square()).pow(3).sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(slope.sum(), x)
        v = values(x.detach().square())
        # d/dx of 3 v^2 2x with dv/dx = 2x.
        torch.testing.assert_close(found, 6 * v * 4 * x.detach().square() + 6 * v.square(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
@pytest.mark.parametrize("recipe", ["current", pytest.param("delayed", marks=pytest.mark.full), "MXFP8"])
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=() if (name, backend) in FAST else pytest.mark.full)
        for FAST in [{("Linear frozen", "aot_eager"), ("Linear", "aot_eager"), ("LayerNormMLP", "aot_eager")}]
        for name, backend in itertools.product(
            ["Linear", "Linear frozen", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"], ["aot_eager", "inductor"]
        )
    ],
)
def test_73_compiled(name, backend, recipe, donated) -> None:
    """In one graph. Where AOTAutograd donates buffers, or changes state in backward, it refuses by itself, before."""
    torch._dynamo.reset()
    module, x = built(name), points()
    with torch._functorch.config.patch(donated_buffer=donated):
        loss = applied(torch.compile(module, backend=backend, fullgraph=True), RECIPES[recipe])
        torch.autograd.grad(loss(x), x)
        expected = f"{REFUSED}|donated buffers|input mutations"
        if not donated and recipe != "delayed":
            expected = REFUSED
        with pytest.raises(RuntimeError, match=expected):
            torch.autograd.grad(loss(x), x, create_graph=True)
        if not donated and recipe != "delayed":  # retain_graph=True keeps a graph, no more
            value = loss(x)
            want = torch.autograd.grad(value, x, retain_graph=True)
            assert torch.equal(*want, *torch.autograd.grad(value, x))


def test_73_compiled_in_parts() -> None:
    torch._dynamo.reset()
    module = built("Linear")

    def broken(x):
        y = module(x)
        torch._dynamo.graph_break()
        return module(y)

    with torch._functorch.config.patch(donated_buffer=False), pytest.raises(NotImplementedError, match=REFUSED):
        by_grad(applied(torch.compile(broken, backend="aot_eager"), NVFP4BlockScaling()), points())
