"""LayerNorm and RMSNorm against torch's; gamma that is stored less one against float64, in modules with norms too."""

import contextlib
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tejit
from tests.common import DEVICES, DTYPES, short
from tests.nn.twins import results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("kind", ["LayerNorm", "LayerNorm without bias", "RMSNorm"])
def test_norms_are_torch_s(kind, dtype, device) -> None:
    """Drop-ins: classes, state dicts, bytes."""
    torch.manual_seed(0)
    name, extra = kind.split()[0], {"bias": False} if "without" in kind else {}
    plain = getattr(nn, name)((3, 15), device=device, dtype=dtype, **extra)
    ours = getattr(tejit, name)((3, 15), device=device, dtype=dtype, **extra)
    assert isinstance(ours, getattr(nn, name))
    for p in plain.parameters():
        nn.init.normal_(p)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3, 15, device=device, dtype=dtype)
    grad = torch.randn_like(x)
    with tejit.autocast():
        got = results(ours, ours, x, grad)
    for what, value in results(plain, plain, x, grad).items():
        assert torch.equal(got[what], value), what


def test_norms_take_what_torch_s_take() -> None:
    assert tejit.LayerNorm(4, elementwise_affine=False).weight is None
    assert tejit.RMSNorm([4], elementwise_affine=False, zero_centered_gamma=True).weight is None
    assert tejit.RMSNorm(4).eps is None
    assert tejit.LayerNorm(4, 1e-3, True, False, "meta", torch.float16).weight.device.type == "meta"
    for make in (tejit.LayerNorm, tejit.RMSNorm):
        with pytest.raises(ValueError, match="two names of one argument"):
            make(4, dtype=torch.float16, params_dtype=torch.bfloat16)


WITH_EPS = {
    "LayerNorm": lambda eps: tejit.LayerNorm(8, eps),
    "RMSNorm": lambda eps: tejit.RMSNorm(8, eps),
    "LayerNormLinear": lambda eps: tejit.LayerNormLinear(8, 8, eps),
    "LayerNormMLP": lambda eps: tejit.LayerNormMLP(8, 8, eps, normalization="RMSNorm"),
    "MultiheadAttention": lambda eps: tejit.MultiheadAttention(8, 2, layernorm_epsilon=eps, input_layernorm=True),
    "TransformerLayer": lambda eps: tejit.TransformerLayer(8, 8, 2, layernorm_epsilon=eps),
}


@pytest.mark.parametrize("kind", WITH_EPS)
def test_eps_is_a_number_that_may_be_added(kind) -> None:
    make, name = WITH_EPS[kind], "layernorm_epsilon" if kind in ("MultiheadAttention", "TransformerLayer") else "eps"
    for wrong in (-1, -1e-30, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=rf"{name} is {wrong}; it must be a finite number of 0 or more"):
            make(wrong)
    for wrong in ("1e-5", True, [1e-5]):
        with pytest.raises(TypeError, match=rf"{name} is {re.escape(repr(wrong))}; it must be a number"):
            make(wrong)
    for right in (0, 0.0, 1e-12, 1, np.float32(0.5)):
        module = make(right)
        found = [part.eps for part in module.modules() if hasattr(part, "eps")]
        assert found == [right] * (2 if kind == "TransformerLayer" else 1)
    x = torch.ones(1, 4, 8)
    assert make(1e-3)(x).isfinite().all()


# -- gamma stored less one ----------------------------------------------------------------------------------------
CENTRED = {
    "LayerNorm": lambda **k: tejit.LayerNorm(64, zero_centered_gamma=True, **k),
    "LayerNorm without bias": lambda **k: tejit.LayerNorm(64, bias=False, zero_centered_gamma=True, **k),
    "RMSNorm": lambda **k: tejit.RMSNorm(64, 1e-5, zero_centered_gamma=True, **k),
    "RMSNorm with torch's eps": lambda **k: tejit.RMSNorm(64, zero_centered_gamma=True, **k),
}
BEHIND = {
    f"{make.__name__} with {normalization}": lambda make=make, normalization=normalization, **k: make(
        64, 64, normalization=normalization, zero_centered_gamma=True, return_layernorm_output=True, **k
    )
    for make in (tejit.LayerNormLinear, tejit.LayerNormMLP)
    for normalization in ("LayerNorm", "RMSNorm")
}


def small(kind: str, **arguments) -> nn.Module:
    """A module whose norm's weight is below half a step of 1 in bfloat16."""
    module = {**CENTRED, **BEHIND}[kind](**arguments)
    weight, bias = norm_parameters(module)
    with torch.no_grad():
        weight.uniform_(-(2.0**-9), 2.0**-9)
        if bias is not None:
            bias.normal_()
    return module


def norm_parameters(module: nn.Module):
    prefix = "layer_norm_" if hasattr(module, "layer_norm_weight") else ""
    return getattr(module, f"{prefix}weight"), getattr(module, f"{prefix}bias", None)


def normed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)[1] if hasattr(module, "layer_norm_weight") else module(x)


def wide_results(module: nn.Module, x: torch.Tensor, grad: torch.Tensor):
    """Output and gradients of the norm of x, of the weight and the bias, in float64."""
    weight, bias = norm_parameters(module)
    eps = module.eps if module.eps is not None else torch.finfo(torch.float32).eps
    x, weight, bias = (None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias))
    n = x - x.mean(-1, keepdim=True) if bias is not None or type(module) is tejit.LayerNorm else x
    y = n * (n.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight)
    y = y if bias is None else y + bias
    found = torch.autograd.grad(y, [t for t in (x, weight, bias) if t is not None], grad.double())
    return y.detach(), *found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("kind", [*CENTRED, *BEHIND])
def test_a_small_weight_beside_one_is_not_lost(kind, dtype, compiled, device) -> None:
    """Forward and backward are those of float64, rounded once."""
    torch.manual_seed(0)
    module = small(kind, device=device, dtype=dtype)
    x = torch.randn(16, 64, device=device, dtype=dtype)
    grad = torch.randn_like(x)
    parameters = [p for p in norm_parameters(module) if p is not None]
    leaf = x.clone().requires_grad_()
    torch._dynamo.reset()
    function = torch.compile(normed, backend="aot_eager") if compiled else normed
    y = function(module, leaf)
    got = (y.detach(), *torch.autograd.grad(y, [leaf, *parameters], grad))
    once = torch.finfo(dtype).eps / 2
    for value, want in zip(got, wide_results(module, x, grad), strict=True):
        assert value.dtype == dtype
        error = (value.double() - want).abs()
        assert (error <= 1.001 * once * want.abs() + 1e-5).all(), (error / want.abs()).max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=short)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("kind", CENTRED)
def test_dtypes_are_those_of_torch(kind, dtype, x_dtype, amp, device) -> None:
    """What torch gives for gamma itself, and its values; torch refuses some mixes of dtypes in LayerNorm."""
    torch.manual_seed(0)
    module = small(kind, device=device, dtype=dtype)
    x = torch.randn(8, 64, device=device, dtype=x_dtype, requires_grad=True)
    weight, bias = norm_parameters(module)
    with torch.autocast(device, amp) if amp is not None else contextlib.nullcontext():
        try:
            if "Layer" in kind:
                want = F.layer_norm(x, (64,), 1 + weight.detach(), bias, module.eps)
            else:
                want = F.rms_norm(x, (64,), 1 + weight.detach(), module.eps)
        except RuntimeError:
            pytest.skip("torch refuses this mix of dtypes")
        got = module(x)
    assert got.dtype == want.dtype
    wide = wide_results(module, x, torch.ones_like(x))[0]
    step = torch.finfo(got.dtype).eps
    assert ((got.double() - wide).abs() <= step * wide.abs() + 1e-5).all()
    got.sum().backward()
    assert x.grad.dtype == x_dtype
    assert weight.grad.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("kind", CENTRED)
def test_gamma_begins_at_one(kind, dtype) -> None:
    module = CENTRED[kind](params_dtype=dtype)
    assert (module.weight == 0).all()
    assert module.weight.dtype == dtype
    x = torch.randn(4, 64, dtype=dtype) * 1e-3  # so that eps counts
    torch.testing.assert_close(module(x), getattr(nn, kind.split()[0])(64, module.eps, dtype=dtype)(x))
