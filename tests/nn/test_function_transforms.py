"""torch.func and forward-mode differentiation: plain without autocast; under it right, or an error, and never a lost
gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

import tejit
from tejit import compat
from tejit.recipe import Float8CurrentScaling

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


DIFFERENTIATED = {
    **MODULES,
    "RMSNorm and Linear": lambda: tejit.LayerNormLinear(32, 48, normalization="RMSNorm", zero_centered_gamma=True),
    "swiglu": lambda: tejit.LayerNormMLP(32, 48, activation="swiglu", return_layernorm_output=True),
    "MultiheadAttention": lambda: tejit.MultiheadAttention(32, 4, attention_dropout=0.0),
    "TransformerLayer": lambda: tejit.TransformerLayer(32, 48, 4, hidden_dropout=0.0, attention_dropout=0.0),
}
OPERANDS = [
    (kind, name) for kind, make in DIFFERENTIATED.items() for name in ("x", *dict(make().named_parameters()).keys())
]
FC2_ALONE = Float8CurrentScaling(overrides=(("*.fc1", None),))


def of_operand(module: nn.Module, name: str, dtype: torch.dtype = torch.float32):
    """A function of one operand of a module, the operand and a tangent."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 4, 32) if isinstance(module, (tejit.MultiheadAttention, tejit.TransformerLayer)) else (4, 32)
    x = torch.randn(shape, dtype=dtype, generator=generator)
    operand = x if name == "x" else module.get_parameter(name).detach().to(dtype)

    def function(value: torch.Tensor) -> torch.Tensor:
        out = called(module, value) if name == "x" else called(module, x, {name: value})
        return torch.cat(out, -1) if isinstance(out, tuple) else out

    return function, operand, torch.randn(operand.shape, dtype=dtype, generator=generator)


@pytest.mark.parametrize(("kind", "name"), OPERANDS)
def test_tangents_without_a_recipe_are_the_finite_differences(kind, name) -> None:
    module = DIFFERENTIATED[kind]().double().requires_grad_(False)
    function, operand, tangent = of_operand(module, name, torch.float64)
    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels of attention have no forward mode, and say so
        _, got = torch.func.jvp(function, (operand,), (tangent,))
    delta = 1e-6
    want = (function(operand + delta * tangent) - function(operand - delta * tangent)) / (2 * delta)
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize(("kind", "name"), OPERANDS)
def test_a_tangent_is_never_lost(kind, name, frozen) -> None:
    """Of any operand, under any nesting of transforms; of a frozen module above all, which has nothing to save."""
    module = DIFFERENTIATED[kind]().requires_grad_(not frozen)
    function, operand, tangent = of_operand(module, name)
    one = torch.ones(())

    def inner(transform):
        """The operand's tangent passes through another transform, of which the operand is no argument."""
        return lambda value: transform(lambda factor: function(value).sum() * factor)(one)

    transforms = {
        "plain": function,
        "grad": inner(torch.func.grad),
        "jvp": inner(lambda f: lambda z: torch.func.jvp(f, (z,), (z,))[1]),
        "vmap": lambda value: torch.func.vmap(lambda factor: function(value) * factor)(torch.ones(2)),
    }
    # A module in front of the operand's own may be the first to refuse: its weights require gradients.
    refused = "forward-mode" if frozen else r"forward-mode|cannot be taken inside torch\.func"
    with tejit.autocast():
        for grad_mode in (True, False):
            with torch.set_grad_enabled(grad_mode):
                function(operand)
                for transform in transforms.values():
                    with pytest.raises(NotImplementedError, match=refused):
                        torch.func.jvp(transform, (operand,), (tangent,))
                with pytest.raises(NotImplementedError, match=refused):
                    torch.func.jacfwd(function)(operand)
        with forward_ad.dual_level(), torch.no_grad():
            with pytest.raises(NotImplementedError, match="forward-mode"):
                function(forward_ad.make_dual(operand, tangent))
            function(operand)  # nothing is differentiated here


@pytest.mark.parametrize("name", dict(MODULES["LayerNormMLP"]().named_parameters()))
def test_a_tangent_is_not_lost_where_one_product_is_quantized(name) -> None:
    module = tejit.LayerNormMLP(32, 48, name="m").requires_grad_(False)
    function, operand, tangent = of_operand(module, name)
    with tejit.autocast(recipe=FC2_ALONE), pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(function, (operand,), (tangent,))


def test_what_is_not_differentiated_may_stand_inside_jvp() -> None:
    module, x = tejit.Linear(32, 48).requires_grad_(False), torch.randn(4, 32)
    with tejit.autocast():
        want = module(x)
        _, got = torch.func.jvp(lambda factor: module(x) * factor, (torch.ones(()),), (torch.ones(()),))
        assert torch.equal(got, want)

        def inner(factor):
            return torch.func.grad(lambda other: (module(x) * other * factor).sum())(factor)

        _, nested = torch.func.jvp(inner, (torch.ones(()),), (torch.ones(()),))
    torch.testing.assert_close(nested, want.sum())


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_a_tangent_is_not_lost_in_a_graph(kind) -> None:
    """Neither of a transform that is compiled nor of a compiled module that is transformed."""
    module = MODULES[kind]().requires_grad_(False)
    function, x, tangent = of_operand(module, "x")

    def derivative(x):
        return torch.func.jvp(function, (x,), (tangent,))[1]

    def loses(run) -> None:
        torch._dynamo.reset()
        with tejit.autocast(), pytest.raises(NotImplementedError, match="forward-mode"):
            run()

    loses(lambda: torch.compile(derivative, backend="aot_eager")(x))
    compiled = torch.compile(function, backend="aot_eager")
    loses(lambda: torch.func.jvp(compiled, (x,), (tangent,)))
    with tejit.autocast():
        want = function(x)
        assert torch.equal(compiled(x), want)  # the graph that is made here is not taken below
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            compiled(forward_ad.make_dual(x, tangent))


@pytest.mark.skipif(compat.TORCH_VERSION < (2, 13), reason="torch 2.11 has no rule for view(dtype) and says so")
def test_a_batch_under_vmap_without_gradients_is_each_sample_s_own() -> None:
    module, x = tejit.Linear(32, 48), torch.randn(3, 4, 32)
    with tejit.autocast(), torch.no_grad():
        assert torch.equal(torch.func.vmap(module)(x), torch.stack([module(sample) for sample in x]))
