"""torch.func and forward-mode differentiation: plain without autocast; under it right, or an error, and never a lost
gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import tejit
from tejit import compat

MODULES = {
    "Linear": lambda: tejit.Linear(32, 48),
    "LayerNormLinear": lambda: tejit.LayerNormLinear(32, 48),
    "LayerNormMLP": lambda: tejit.LayerNormMLP(32, 48),
    "GroupedLinear": lambda: tejit.GroupedLinear(2, 32, 48),
}


def called(module: nn.Module, x: torch.Tensor, parameters=None) -> torch.Tensor:
    arguments = (x, [1, 3]) if isinstance(module, tejit.GroupedLinear) else (x,)
    return torch.func.functional_call(module, parameters or {}, arguments)


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_inside_torch_func_are_refused_by_name(kind) -> None:
    module, x = MODULES[kind](), torch.randn(4, 32)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters, x):
        return called(module, x, parameters).square().sum()

    found = torch.func.grad(loss)(parameters, x)
    want = torch.autograd.grad(loss(dict(module.named_parameters()), x), list(module.parameters()))
    for mine, others in zip(found.values(), want, strict=True):
        torch.testing.assert_close(mine, others)
    with tejit.autocast(), pytest.raises(NotImplementedError, match=r"cannot be taken inside torch\.func"):
        torch.func.grad(loss)(parameters, x)


@pytest.mark.parametrize("kind", MODULES)
def test_a_tangent_is_never_lost(kind) -> None:
    """Of a frozen module above all, which has nothing to save."""
    module, x = MODULES[kind]().requires_grad_(False), torch.randn(4, 32)
    tangent = torch.randn_like(x)
    _, got = torch.func.jvp(lambda x: called(module, x), (x,), (tangent,))
    delta = 1e-3
    want = (called(module, x + delta * tangent) - called(module, x - delta * tangent)) / (2 * delta)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)
    with tejit.autocast():
        called(module, x)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(lambda x: called(module, x), (x,), (tangent,))
        with forward_ad.dual_level():
            with pytest.raises(NotImplementedError, match="forward-mode"):
                called(module, forward_ad.make_dual(x, tangent))
            called(module, x)  # nothing is differentiated here


@pytest.mark.skipif(compat.TORCH_VERSION < (2, 13), reason="torch 2.11 has no rule for view(dtype) and says so")
def test_a_batch_under_vmap_without_gradients_is_each_sample_s_own() -> None:
    module, x = tejit.Linear(32, 48), torch.randn(3, 4, 32)
    with tejit.autocast(), torch.no_grad():
        assert torch.equal(torch.func.vmap(module)(x), torch.stack([module(sample) for sample in x]))
