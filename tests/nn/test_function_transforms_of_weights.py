"""Row 87: torch.func over quantized weights, without autocast: what the dequantized weights give, or an error that says
what to do."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import tejit
from tejit.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling

pytestmark = pytest.mark.filterwarnings("ignore:tejit. aten")
QUANTIZERS = {
    "current": tejit.Float8CurrentScalingQuantizer(),
    "block": tejit.Float8BlockQuantizer(),
    "mxfp8": tejit.MXFP8Quantizer(),
    "nvfp4": tejit.NVFP4Quantizer(),
    "identity": tejit.IdentityQuantizer(),
    "hybrid": tejit.HybridQuantizer(
        rowwise_quantizer=tejit.MXFP8Quantizer(), columnwise_quantizer=tejit.Float8CurrentScalingQuantizer()
    ),
}
RECIPES = {
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
W = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


def loss(w: Tensor, x: Tensor = X) -> Tensor:
    return F.linear(x, w).square().sum()


OVER_WEIGHTS = {
    "grad": lambda w: grad(loss)(w),
    "grad of x": lambda w: grad(lambda x: loss(w, x))(X),
    "vjp": lambda w: vjp(lambda w: F.linear(X, w), w)[1](X)[0],
    "jvp": lambda w: jvp(lambda w: F.linear(X, w), (w,), (W,))[1],
    "jvp of x": lambda w: jvp(lambda x: F.linear(x, w), (X,), (X,))[1],
    "jacrev": lambda w: jacrev(loss)(w),
    "jacfwd": lambda w: jacfwd(lambda x: loss(w, x))(X),
    "hessian": lambda w: hessian(lambda x: loss(w, x))(X[:1]),
    "vmap of rows": lambda w: vmap(lambda row: row.square().sum())(w),
    "vmap of x": lambda w: vmap(lambda x: F.linear(x, w))(X.reshape(4, 8, 64)),
    "vmap of grad": lambda w: vmap(grad(loss), in_dims=(None, 0))(w, X.reshape(4, 8, 64)),
}


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("transform", OVER_WEIGHTS)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_87_a_transform_over_a_quantized_weight_is_that_over_its_values(quantizer, transform, parameter) -> None:
    w = QUANTIZERS[quantizer](W)
    run = OVER_WEIGHTS[transform]
    want = run(w.dequantize())
    torch.testing.assert_close(run(nn.Parameter(w) if parameter else w), want)


def model(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    with tejit.quantized_model_init(recipe=RECIPES[recipe]):
        return nn.Sequential(tejit.Linear(64, 64), tejit.LayerNormMLP(64, 64), tejit.LayerNormLinear(64, 64))


def plain(module: nn.Module) -> nn.Module:
    """The same module with its weights dequantized."""
    twin = copy.deepcopy(module)
    for each in twin.modules():
        for name, p in list(each.named_parameters(recurse=False)):
            if isinstance(p, tejit.QuantizedTensor):
                setattr(each, name, nn.Parameter(p.detach().dequantize()))
    return twin


OVER_MODULES = {
    "functional_call": lambda m, p: functional_call(m, p, (X,)),
    "grad": lambda m, p: grad(lambda p: functional_call(m, p, (X,)).square().sum())(p),
    "grad of x": lambda m, p: grad(lambda x: m(x).square().sum())(X),
    "vmap": lambda m, p: vmap(m)(X.reshape(4, 8, 64)),
    "grads a sample": lambda m, p: vmap(
        grad(lambda p, x: functional_call(m, p, (x,)).square().sum()), in_dims=(None, 0)
    )(p, X.reshape(4, 8, 64)),
    "jvp": lambda m, p: jvp(m, (X,), (X,)),
    "jacrev": lambda m, p: jacrev(lambda x: m(x).sum(0))(X[:2]),
    "jacfwd": lambda m, p: jacfwd(lambda x: m(x).sum(0))(X[:2]),
    "hessian": lambda m, p: hessian(lambda x: m(x).sum())(X[:1]),
}


@pytest.mark.parametrize("transform", OVER_MODULES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_87_a_transform_over_a_module_is_that_over_its_dequantized_twin(recipe, transform) -> None:
    module = model(recipe)
    twin, run = plain(module), OVER_MODULES[transform]
    got = run(module, {name: p.detach() for name, p in module.named_parameters()})
    want = run(twin, {name: p.detach() for name, p in twin.named_parameters()})
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("recipe", RECIPES)
def test_87_an_ensemble_of_stacked_states(recipe) -> None:
    members = [model(recipe) for _ in range(2)]
    with torch.no_grad():
        members[1][0].weight.copy_(W)
    parameters, buffers = stack_module_state(members)
    got = vmap(lambda p, b: functional_call(members[0], (p, b), (X,)))(parameters, buffers)
    torch.testing.assert_close(got, torch.stack([plain(member)(X) for member in members]))


def test_87_gradients_reach_a_parameter_through_vmap() -> None:
    module = model("mxfp8")
    twin = plain(module)
    for each in (module, twin):
        vmap(each)(X.reshape(4, 8, 64)).square().sum().backward()
    for mine, others in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, others.grad)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_87_a_quantizer_inside_a_transform_is_straight_through_or_says_so(quantizer) -> None:
    q = QUANTIZERS[quantizer]
    values = q(W).dequantize()
    torch.testing.assert_close(grad(lambda w: loss(q(w)))(W), grad(loss)(values))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(lambda w: loss(q(w)), (W,), (W,))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(lambda w: q(w).dequantize(), (W,), (W,))
    for transform in (vmap(lambda w: loss(q(w))), vmap(grad(lambda w: loss(q(w))))):
        with pytest.raises(NotImplementedError, match=r"inside torch\.func\.vmap.*tejit\.ops\.fake_quantize"):
            transform(torch.stack([W, W]))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q(W), X[:1].expand(64, 64).contiguous())
        if isinstance(dual, tejit.QuantizedTensor):
            assert torch.equal(forward_ad.unpack_dual(dual.dequantize()).tangent, X[:1].expand(64, 64))
