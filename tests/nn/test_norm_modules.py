"""LayerNormLinear and LayerNormMLP against their compositions in torch."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tejit
from tejit import Float8CurrentScalingQuantizer, LayerNormLinear, LayerNormMLP
from tejit.nn.fused import ACTIVATIONS
from tejit.recipe import (
    CustomRecipe,
    Float8CurrentScaling,
    Format,
)
from tests.common import DEVICES, DTYPES, short
from tests.nn import twins
from tests.nn.bounds import STATELESS, bounds, recipe, relative_error
from tests.nn.twins import made, results

pytestmark = pytest.mark.filterwarnings("ignore:MXFP8BlockScaling")


#: Modules that begin with a norm: `linear` or an activation, by name, and what they are in torch's functions.
KINDS = ["linear", *ACTIVATIONS]


def both(module, twin, x, grad, chosen, seed=0):
    """`results` of the module under the recipe and of the twin without one."""
    want = results(lambda x: twin(module, x), module, x, grad)
    torch.manual_seed(seed)
    with tejit.autocast(recipe=chosen):
        return results(module, module, x, grad), want


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_autocast_they_are_the_composition(kind, normalization, zero_centered, dtype, device) -> None:
    module, twin = made(
        kind, 31, 17, device=device, dtype=dtype, normalization=normalization, zero_centered_gamma=zero_centered
    )
    x = torch.randn(2, 5, 31, device=device, dtype=dtype)
    grad = torch.randn_like(twin(module, x))
    want = results(lambda x: twin(module, x), module, x, grad)
    with tejit.autocast(), tejit.autocast(enabled=False):
        got = results(module, module, x, grad)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def chained(kind: str, name: str, dtype: torch.dtype) -> dict[str, float]:
    """Bounds of `LayerNormMLP`'s errors from those of one product, whose variances add along the way.

    The activation's input is off by `y`. A smooth activation passes that on at most doubled in variance (a product of
    two of its outputs is as uncertain as both), and so is its derivative. ReLU's derivative is a step: of inputs from
    N(0, 1) a share `y / pi` changes its sign, each of which is an error as large as itself, among half of the elements.
    """
    one = bounds(name, dtype)
    passed = 2 * one["y"] ** 2
    derivative = 2 * one["y"] / math.pi if ACTIVATIONS[kind] == "relu" else passed
    return {
        "y": math.sqrt(one["y"] ** 2 + passed),
        "dgrad": math.sqrt(2 * one["dgrad"] ** 2 + derivative),
        "fc1_weight": math.sqrt(one["dgrad"] ** 2 + one["wgrad"] ** 2 + derivative),
        "fc2_weight": math.sqrt(one["wgrad"] ** 2 + passed),
        "fc1_bias": math.sqrt(one["dgrad"] ** 2 + derivative),
    }


#: Gradients of biases and of the norm are sums over the rows: of few numbers, whose errors vary more about the mean.
SPREAD = 1.4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("kind", ["linear", "gelu", "swiglu", "reglu", "qgelu", "qgeglu", "sreglu", "glu"])
@pytest.mark.parametrize(("i", "o", "lead"), [(127, 141, (5, 27)), (192, 128, (128,))])
def test_error_of_each_gradient_is_that_of_the_format(i, o, lead, kind, name, dtype, device) -> None:
    module, twin = made(kind, i, o, device=device, dtype=dtype, normalization="LayerNorm" if o % 2 else "RMSNorm")
    torch.manual_seed(1)
    x = torch.randn(*lead, i, device=device, dtype=dtype)
    grad = torch.randn_like(twin(module, x))
    got, want = both(module, twin, x, grad, recipe(name))
    one = bounds(name, dtype)
    bound = {**one, "weight": one["wgrad"]} if kind == "linear" else chained(kind, name, dtype)
    for what, value in want.items():
        assert (got[what].shape, got[what].dtype) == (value.shape, value.dtype), what
        found = relative_error(got[what], value)
        if what in ("bias", "fc2_bias"):
            assert found < 1e-2  # not quantized
        else:
            spread = 1 if value.dim() > 1 else SPREAD
            assert 0 < found < spread * bound[what if what in bound else "dgrad"], f"{what}: {found:.4f}"


class Parts(nn.Module):
    """The module's parts one after another, on its parameters: torch's norm and activation and `tejit.Linear`."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        layers = ["fc1_", "fc2_"] if isinstance(module, LayerNormMLP) else [""]
        self.layers = []
        for layer in layers:
            weight, bias = getattr(module, f"{layer}weight"), getattr(module, f"{layer}bias")
            linear = tejit.Linear(weight.shape[1], weight.shape[0], device=weight.device)
            linear.weight, linear.bias = weight, bias
            self.layers.append(linear)

    def forward(self, x):
        # torch's functions on float32, as ours, so that one rounding is all that differs
        y = twins.norm(self.module, x.float()).to(x.dtype)
        y = self.layers[0](y)
        if len(self.layers) > 1:
            y = self.layers[1](twins.ACTIVATIONS[self.module.activation](y.float()).to(x.dtype))
        return y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("kind", ["linear", "gelu", "srelu", "reglu", "swiglu", "qgelu", "qgeglu", "sreglu", "glu"])
def test_with_a_recipe_they_are_their_parts_with_it(kind, name, device) -> None:
    """Output, dgrad and every gradient are those of the norm, then `Linear`, and so on, each under the recipe.

    A last bit of the norm that differs moves a code to its neighbour now and then: 2^-3 of one element in thousands.
    """
    chosen = recipe(name)
    if "NVFP4" in name:
        chosen = dataclasses.replace(chosen, disable_stochastic_rounding=True)  # draws have no order across layers
    module, _ = made(kind, 63, 50, device=device, zero_centered_gamma=True)
    parts = Parts(module)
    x = torch.randn(3, 11, 63, device=device)
    grad = torch.randn_like(parts(x))
    with tejit.autocast(recipe=chosen):
        got, want = results(module, module, x, grad), results(parts, module, x, grad)
    for what, value in want.items():
        assert relative_error(got[what], value) < (0.02 if "NVFP4" in name else 0.005), what


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("kind", ["linear", "swiglu"])
@pytest.mark.parametrize("shape", [(5, 16), (1, 16), (2, 3, 16), (2, 1, 3, 16), (16,), (0, 16), (3, 0, 16)], ids=short)
def test_any_leading_shape(shape, kind, dtype, device) -> None:
    module, twin = made(kind, 16, 24, device=device, dtype=dtype)
    x = torch.randn(shape, device=device, dtype=dtype)
    grad = torch.randn_like(twin(module, x))
    got, want = both(module, twin, x, grad, Float8CurrentScaling())
    for name, value in want.items():
        assert (got[name].shape, got[name].dtype) == (value.shape, value.dtype), name
        assert relative_error(got[name], value) < 0.25 if x.numel() else (got[name] == 0).all(), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "i", "o", "extra"),
    [("linear", 64, 96, 64 * 2 + 8), ("gelu", 64, 96, 64 * 2 + 96 * 2 + 8 + 96 + 64 * 96 + 8)],
)
def test_saved_for_backward_are_the_quantized_operands(kind, i, o, extra, device) -> None:
    """Beside the input in two bytes an element, mean and rstd of each row and the norm's weight: one byte an element
    of every operand, and one scale. For the MLP also the activation's input, in two."""
    module, _ = made(kind, i, o, device=device, dtype=torch.bfloat16)
    x = torch.randn(32, i, device=device, dtype=torch.bfloat16, requires_grad=True)
    saved = []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), tejit.autocast(recipe=Float8CurrentScaling()):
        y = module(x)
    inputs = 32 * (i * 2 + 8) + i * 2
    operands = (32 * i + 4) + (i * o + 4)
    if kind != "linear":
        operands += (32 * o + 4) + (o * i + 4) + 32 * o * 2
    assert sum(saved) == inputs + operands
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), tejit.autocast(), torch.no_grad():
        module(x)
    assert saved == []
    y.sum().backward()


@pytest.mark.parametrize("frozen", ["all", "norm", "fc1", "fc2", "weights", "input and norm", "input, norm, fc1"])
def test_frozen_parts_change_no_other_gradient(frozen) -> None:
    module, _ = made("swiglu", 32, 48)
    x, grad = torch.randn(8, 32), torch.randn(8, 32)
    with tejit.autocast():
        want = results(module, module, x, grad)
        parts = {"all": ("",), "weights": ("fc1_weight", "fc2_weight")}.get(frozen)
        parts = parts or tuple(p for p in ("layer_norm", "fc1", "fc2") if p in frozen or p == f"layer_{frozen}")
        if "norm" in frozen:
            parts += ("layer_norm",)
        for name, p in module.named_parameters():
            p.requires_grad_(not name.startswith(parts))
        if "input" in frozen:
            y = module(x)
            y.backward(grad)
            got = {"y": y.detach(), **{n: p.grad for n, p in module.named_parameters() if p.requires_grad}}
        else:
            got = results(module, module, x, grad)
    assert len(got) > 1
    for name, value in got.items():
        assert torch.equal(value, want[name]), name


def test_only_a_bias_is_trained() -> None:
    module, twin = made("gelu", 32, 48)
    for name, p in module.named_parameters():
        p.requires_grad_(name == "fc1_bias")
    x = torch.randn(8, 32)
    with tejit.autocast():
        module(x).sum().backward()
    (want,) = torch.autograd.grad(twin(module, x).sum(), module.fc1_bias)
    assert relative_error(module.fc1_bias.grad, want) < 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("kind", ["linear", "geglu"])
def test_inside_torch_autocast_they_take_the_amp_dtype(kind, x_dtype, device) -> None:
    module, twin = made(kind, 32, 48, device=device)
    x = torch.randn(8, 32, device=device, dtype=x_dtype)
    grad = torch.randn(8, 48 if kind == "linear" else 32, device=device, dtype=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        got, want = both(module, twin, x, grad, Float8CurrentScaling(fp8_format=Format.E4M3))
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert relative_error(got[name], value) < 0.15, name
    parts = Parts(module)
    with torch.autocast(device, torch.bfloat16), tejit.autocast():
        assert relative_error(module(x), parts(x)) < 0.01


@pytest.mark.parametrize("kind", ["linear", "swiglu"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["autocast in the function", "autocast around the checkpoint"])
def test_activation_checkpointing_is_bit_equal(inside, reentrant, kind) -> None:
    module, _ = made(kind, 16, 24)
    x = torch.randn(8, 16)
    with tejit.autocast():
        grad = torch.randn_like(module(x))
        want = results(module, module, x, grad)

    def run(value):
        with tejit.autocast():
            return module(value)

    def checkpointed(value):
        with tejit.autocast(enabled=not inside):
            return checkpoint(run if inside else module, value, use_reentrant=reentrant)

    x = x.requires_grad_()
    y = checkpointed(x)
    y.backward(grad)
    got = {"y": y, "dgrad": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("chosen", [None, Float8CurrentScaling()], ids=["high precision", "current"])
def test_mlp_that_checkpoints_itself_is_bit_equal_and_saves_its_input_alone(chosen) -> None:
    module, _ = made("swiglu", 16, 24, return_bias=True, return_layernorm_output=True)
    x, saved = torch.randn(8, 16), []

    def run(x):
        with tejit.autocast(enabled=chosen is not None, recipe=chosen):
            y, bias, norm = module(x)
        return y + bias + norm

    grad = torch.randn(8, 16)
    want = results(run, module, x, grad)
    module.checkpoint = True
    got = results(run, module, x, grad)
    for name, value in want.items():
        assert torch.equal(got[name], value), name
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        run(x.requires_grad_())
    assert {shape for shape in saved if 0 not in shape} == {(8, 16)}  # torch 2.11 saves an empty tensor besides


def test_products_of_the_mlp_have_names() -> None:
    """`name.fc1` and `name.fc2`: a pattern may keep one of them, or both, in high precision."""
    module, twin = made("gelu", 32, 48, name="blocks.0.mlp")
    x, asked = torch.randn(8, 32), []
    assert torch.equal(_under(module, x, (("blocks.*.mlp", None),)), twin(module, x))
    assert torch.equal(_under(module, x, (("*.fc?", None),)), twin(module, x))
    first, second = _under(module, x, (("*.fc1", None),)), _under(module, x, (("*.fc2", None),))
    errors = [relative_error(y, twin(module, x)) for y in (first, second, _under(module, x, ()))]
    assert min(errors) > 0.01
    assert errors[2] > max(errors[:2])
    with tejit.autocast(recipe=CustomRecipe(lambda role: asked.append(role) or Float8CurrentScalingQuantizer())):
        module(x)
    assert [(r.name, r.tensor_type) for r in asked] == [
        (f"blocks.0.mlp.{product}", tensor)
        for product in ("fc1", "fc2")
        for tensor in ("input", "weight", "grad_output")
    ]


def _under(module, x, overrides):
    with tejit.autocast(recipe=Float8CurrentScaling(overrides=overrides)):
        return module(x)


@pytest.mark.parametrize(
    ("make", "weights"), [(LayerNormLinear, ["weight"]), (LayerNormMLP, ["fc1_weight", "fc2_weight"])]
)
def test_arguments(make, weights) -> None:
    assert {p.dtype for p in make(4, 6, params_dtype=torch.float16).parameters()} == {torch.float16}
    with pytest.raises(ValueError, match="two names of one argument"):
        make(4, 6, dtype=torch.float16, params_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"normalization is 'BatchNorm'; it must be one of 'LayerNorm', 'RMSNorm'"):
        make(4, 6, normalization="BatchNorm")
    with pytest.raises(ValueError, match="needs bias=True"):
        make(4, 6, bias=False, return_bias=True)
    assert "layer_norm_bias" not in dict(make(4, 6, normalization="RMSNorm").named_parameters())
    assert make(4, 6, bias=False)(torch.randn(2, 4)).isfinite().all()
    torch.manual_seed(0)
    module, layers = make(4, 6), []
    torch.manual_seed(0)
    for name in weights:  # initialised as torch's, in order
        weight = getattr(module, name)
        layers.append(nn.Linear(weight.shape[1], weight.shape[0]))
        assert torch.equal(weight, layers[-1].weight)
        assert torch.equal(getattr(module, name.replace("weight", "bias")), layers[-1].bias)
    assert (make(4, 6, init_method=nn.init.zeros_).state_dict()[weights[0]] == 0).all()
    deferred = make(4, 6, device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    deferred.reset_parameters()
    for name, value in module.state_dict().items():
        assert torch.equal(deferred.state_dict()[name], value), name
    with tejit.autocast():
        with pytest.raises(ValueError, match=r"\(3, 5\).*(in_features|hidden_size) = 4"):
            module(torch.randn(3, 5))
        with pytest.raises(TypeError, match=r"torch\.bfloat16 and the weight torch\.float32"):
            module(torch.randn(3, 4, dtype=torch.bfloat16))
        with pytest.raises(TypeError, match=r"torch\.float64"):
            module.double()(torch.randn(3, 4, dtype=torch.float64))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activation is 'mish'; it must be one of 'gelu', 'relu', 'silu', 'srelu'"):
        LayerNormMLP(4, 8, activation="mish")
    assert (LayerNormMLP(4, 8, output_layer_init_method=nn.init.ones_).fc2_weight == 1).all()


@pytest.mark.parametrize("kind", ["linear", "gelu"])
def test_second_derivatives_are_refused(kind) -> None:
    module, _ = made(kind, 16, 16)
    x = torch.randn(4, 16, requires_grad=True)
    with tejit.autocast():
        y = module(torch.tanh(x)).square().sum()
    with pytest.raises(NotImplementedError, match="first derivative only"):
        torch.autograd.grad(y, x, create_graph=True)
