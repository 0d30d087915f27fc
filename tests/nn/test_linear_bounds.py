"""Linear against torch.nn.Linear under every recipe: output, dgrad and wgrad each within the bound of its format."""

import warnings

import pytest
import torch
from torch import nn

import tejit
from tests.common import DEVICES, DTYPES, short
from tests.nn.bounds import STATELESS, bounds, recipe, relative_error


def made(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXFP8 with HYBRID warns
        return recipe(name)


def layers(i, o, dtype, device):
    torch.manual_seed(0)
    # Weights from N(0, 1), as the bounds say; torch's default is uniform.
    plain = nn.Linear(i, o, device=device, dtype=dtype)
    nn.init.normal_(plain.weight)
    ours = tejit.Linear(i, o, device=device, dtype=dtype)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def check(name, plain, ours, x, dtype) -> None:
    frozen = not ours.weight.requires_grad
    grad = torch.randn(*x.shape[:-1], plain.out_features, device=x.device, dtype=dtype)
    results = {}
    for kind, module in (("ours", ours), ("plain", plain)):
        value = x.clone().requires_grad_()
        with tejit.autocast(recipe=made(name)):
            y = module(value)
        y.backward(grad)
        results[kind] = {"y": y.detach(), "dgrad": value.grad, "wgrad": module.weight.grad, "bias": module.bias.grad}
    got, want = results["ours"], results["plain"]
    assert (got["wgrad"] is None) == frozen
    for product, bound in bounds(name, dtype).items():
        if product == "wgrad" and frozen:
            continue
        assert got[product].shape == want[product].shape
        assert got[product].dtype == dtype
        assert type(got[product]) is torch.Tensor
        error = relative_error(got[product], want[product])
        assert 0 < error < bound, f"{product}: {error:.4f}, bound {bound:.4f}"
    assert torch.allclose(got["bias"].float(), want["bias"].float(), rtol=1e-2, atol=1e-2)


#: Sizes that fit no block (pytorch/ao#3233, vllm#7550, torchtitan#1703), with 1 to 3 leading dimensions.
ODD = [(127, 61, (5, 7)), (40, 5461, (3,)), (512, 16, (2, 3, 3)), (31, 33, (129,))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("i", "o", "lead"), ODD, ids=lambda v: short(v))
def test_each_product_is_within_its_format_s_bound(i, o, lead, dtype, name, device) -> None:
    plain, ours = layers(i, o, dtype, device)
    check(name, plain, ours, torch.randn(*lead, i, device=device, dtype=dtype), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["current", pytest.param("block", marks=pytest.mark.full), "MXFP8", "NVFP4"])
def test_767_to_3072_with_2048_rows(name, device) -> None:
    """TransformerEngine#688."""
    rows = 2048 if device == "cuda" or name == "MXFP8" else 200
    plain, ours = layers(767, 3072, torch.bfloat16, device)
    check(name, plain, ours, torch.randn(rows, 767, device=device, dtype=torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_quantized_weights_are_within_it_too(dtype, name, frozen, device) -> None:
    plain, ours = layers(96, 64, dtype, device)
    quantizer = made(name).linear.weight.both.replace(internal=False)
    ours.weight = nn.Parameter(quantizer(plain.weight.detach()))
    for module in (plain, ours):
        module.weight.requires_grad_(not frozen)
    check(name, plain, ours, torch.randn(4, 33, 96, device=device, dtype=dtype), dtype)


@pytest.mark.parametrize("name", [name for name in STATELESS if "HYBRID" in name or name.startswith("current")])
def test_hybrid_gradients_are_each_within_a_tenth(name) -> None:
    """TransformerEngine#3342: a loss hides a wrong gradient."""
    assert max(bounds(name, torch.bfloat16).values()) < 0.1
