"""Linear under what surrounds it: checkpointing, deferred initialisation, hooks, torch.autocast, shapes."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tejit
from tejit.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.common import DEVICES, DTYPES, short
from tests.nn.test_quantized_weights import RECIPES, quantizer_of


def blocks(device="cpu", dtype=torch.float32, **arguments) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        tejit.Linear(32, 64, device=device, dtype=dtype, **arguments),
        nn.GELU(),
        tejit.Linear(64, 32, device=device, dtype=dtype, **arguments),
    )


def gradients(model, x):
    named = {"x": x.grad}
    for name, p in model.named_parameters():
        named[name] = getattr(p, "main_grad", p.grad)
    return named


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("feature", ["plain", "quantized weights", "microbatches", "main_grad", "original input"])
@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()], ids=lambda r: type(r).__name__
)
def test_checkpointing_changes_no_bit(recipe, feature, reentrant, device) -> None:
    """Backward outside of autocast; every gradient equals the one without checkpointing."""
    switches = {"main_grad": "fuse_wgrad_accumulation", "original input": "save_original_input"}
    found = []
    for checkpointed in (False, True):
        model = blocks(device, **({switches[feature]: True} if feature in switches else {}))
        for module in (model[0], model[2]):
            if feature == "main_grad":
                module.weight.main_grad = torch.zeros_like(module.weight)
            if feature == "quantized weights":
                module.weight = nn.Parameter(quantizer_of(recipe)(module.weight.detach()))

        def run(value, first, model=model):
            if feature != "microbatches":
                return model(value)
            return model[2](model[1](model[0](value, is_first_microbatch=first)), is_first_microbatch=first)

        torch.manual_seed(1)
        x = torch.randn(8, 32, device=device, requires_grad=True)
        for first in (True, False):
            with tejit.autocast(recipe=recipe):
                y = checkpoint(run, x, first, use_reentrant=reentrant) if checkpointed else run(x, first)
            torch.manual_seed(2)  # stochastic rounding; recomputation draws nothing, inputs are rounded to nearest
            y.pow(2).sum().backward()
        found.append(gradients(model, x))
    for name, want in found[0].items():
        assert torch.equal(found[1][name], want), name
        assert want.abs().sum() > 0


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), NVFP4BlockScaling()], ids=lambda r: type(r).__name__)
def test_deferred_initialisation(recipe) -> None:
    """On meta, then memory, then values: as if made in place; the workspace is no hindrance."""
    model = blocks("meta", init_method=lambda weight: nn.init.constant_(weight, 0.5))
    x = torch.randn(4, 32, device="meta")
    with tejit.autocast(recipe=recipe):
        assert model(x).shape == (4, 32)
        model[0](x, is_first_microbatch=True)
    model.to_empty(device="cpu")
    for module in (model[0], model[2]):
        module.reset_parameters()
        assert (module.weight == 0.5).all()
        assert module.weight.device.type == "cpu"
    x = torch.randn(4, 32)
    with tejit.autocast(recipe=recipe):
        y = model(x)
        with pytest.raises(RuntimeError, match="is_first_microbatch=True"):  # what was there is gone
            model[0](x, is_first_microbatch=False)
        assert torch.equal(model[0](x, is_first_microbatch=True), model[0](x))
    y.sum().backward()
    assert y.isfinite().all()
    assert model[0].weight.grad.shape == (64, 32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantized", [False, True], ids=["weight", "quantized weight"])
@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_leading_dimensions_change_nothing_and_may_be_empty(dtype, name, quantized, device) -> None:
    recipe = RECIPES[name]
    module = tejit.Linear(32, 64, device=device, dtype=dtype)
    if quantized:
        module.weight = nn.Parameter(quantizer_of(recipe)(module.weight.detach()))
    flat = torch.randn(24, 32, device=device, dtype=dtype)
    with tejit.autocast(recipe=recipe):
        want = module(flat)
        for lead in ((4, 6), (2, 3, 4), (24, 1)):
            assert torch.equal(module(flat.reshape(*lead, 32)), want.reshape(*lead, 64))
        assert module(flat[0]).shape == (64,)
        for lead in ((0,), (3, 0), (2, 0, 5)):
            module.zero_grad()
            x = torch.zeros(*lead, 32, device=device, dtype=dtype, requires_grad=True)
            y = module(x)
            assert y.shape == (*lead, 64)
            y.sum().backward()
            assert x.grad.shape == x.shape
            assert (module.weight.grad == 0).all()
            assert (module.bias.grad == 0).all()


def test_non_contiguous_inputs_and_gradients() -> None:
    module = tejit.Linear(32, 64)
    wide, grad = torch.randn(24, 64), torch.randn(64, 24)
    results = []
    for x, g in ((wide[:, ::2], grad.t()), (wide[:, ::2].contiguous(), grad.t().contiguous())):
        module.zero_grad()
        x = x.detach().requires_grad_()
        with tejit.autocast(recipe=Float8BlockScaling()):
            y = module(x)
        y.backward(g)
        results.append((y.detach(), x.grad, module.weight.grad))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_hooks_run_as_in_torch() -> None:
    """Of the module before and after, forward and backward, of tensors and parameters; gradients seen are torch's."""
    order: dict[str, list[str]] = {}
    for kind, make in (("torch", nn.Linear), ("ours", tejit.Linear)):
        module, seen = make(16, 16), order.setdefault(kind, [])
        module.register_forward_pre_hook(lambda m, args, seen=seen: seen.append("before"))
        module.register_forward_hook(lambda m, args, out, seen=seen: seen.append("after"))
        module.register_full_backward_pre_hook(lambda m, g, seen=seen: seen.append("backward begins"))
        module.register_full_backward_hook(lambda m, i, o, seen=seen: seen.append("backward ends"))
        module.bias.register_hook(lambda g, seen=seen: seen.append("bias"))
        module.weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append("weight"))
        module.weight.register_hook(lambda g: g * 2)
        with tejit.autocast():
            module(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert sorted(order["ours"]) == sorted(order["torch"])
    assert order["ours"][:3] == ["before", "after", "backward begins"]


def test_torch_autocast_with_every_feature() -> None:
    """Input, weight and output take the AMP dtype; gradients go back in the parameters' own, or into main_grad."""
    x = torch.randn(8, 32, requires_grad=True)
    results = []
    for arguments in ({}, {"save_original_input": True}, {"fuse_wgrad_accumulation": True}):
        torch.manual_seed(0)
        module = tejit.Linear(32, 16, **arguments)
        module.weight.main_grad = torch.zeros(16, 32)
        for first in (None, True, False):
            module.zero_grad()
            module.weight.main_grad.zero_()
            with torch.autocast("cpu", torch.bfloat16), tejit.autocast():
                y = module(x, is_first_microbatch=first)
            assert y.dtype == torch.bfloat16
            y.float().pow(2).sum().backward()
            grad = module.weight.main_grad if arguments.get("fuse_wgrad_accumulation") else module.weight.grad
            assert grad.dtype == torch.float32
            results.append(grad.clone())
    for grad in results[1:6]:
        assert torch.equal(grad, results[0])
    for grad in results[6:]:  # main_grad has it before it was rounded to bfloat16
        assert torch.equal(grad.bfloat16().float(), results[0])


def test_frozen_parameters_get_nothing_and_the_rest_everything() -> None:
    for frozen in ({"weight"}, {"bias"}, {"weight", "bias"}, {"x"}, {"x", "weight"}):
        plain, ours = nn.Linear(16, 16), tejit.Linear(16, 16)
        ours.load_state_dict(plain.state_dict())
        for module in (plain, ours):
            x = torch.ones(4, 16, requires_grad="x" not in frozen)
            for name, p in module.named_parameters():
                p.requires_grad_(name not in frozen)
            with tejit.autocast():
                y = module(x)
            y.sum().backward()
            for name, tensor in (("x", x), *module.named_parameters()):
                assert (tensor.grad is None) == (name in frozen), name
    with tejit.autocast():
        ours.bias.requires_grad_(False)
        assert not ours(torch.ones(4, 16)).requires_grad


@pytest.mark.parametrize(
    "make", [lambda: tejit.Linear(32, 32), lambda: tejit.GroupedLinear(2, 32, 32), lambda: tejit.LayerNormMLP(32, 32)]
)
def test_parametrized_modules_train_and_copy(make) -> None:
    """The parametrized weight is what torch computes; a deep copy has parameters of its own and the same values."""
    torch.manual_seed(0)
    module = make()
    weight = next(name for name, p in module.named_parameters() if p.dim() == 2)
    torch.nn.utils.parametrizations.weight_norm(module, weight)
    twin, x = copy.deepcopy(module), torch.randn(8, 32)
    found = []
    for m in (module, twin):
        with tejit.autocast():
            y = m(x, [3, 5]) if isinstance(m, tejit.GroupedLinear) else m(x)
        y.square().sum().backward()
        found.append([y, *[p.grad for p in m.parameters()]])
    for mine, others in zip(*found, strict=True):
        assert torch.equal(mine, others)
    assert not {id(p) for p in module.parameters()} & {id(p) for p in twin.parameters()}
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert all(p.any() for name, p in module.named_parameters() if "bias" not in name)
