"""TransformerLayer and MultiheadAttention against their composition in torch, and rotary embeddings against complex
numbers."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tejit
from tejit import MultiheadAttention, RotaryPositionEmbedding, TransformerLayer
from tejit.nn.attention import apply_rotary_pos_emb
from tejit.recipe import Float8CurrentScaling, MXFP8BlockScaling
from tests.common import DEVICES, DTYPES, short
from tests.nn import twins
from tests.nn.bounds import STATELESS, bounds, recipe, relative_error
from tests.nn.twins import randomised, results

VARIANTS = {
    "plain": {},
    "groups": {"num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    "one group, own head size": {"num_gqa_groups": 1, "kv_channels": 8, "activation": "sreglu"},
    "no mask": {"self_attn_mask_type": "no_mask", "zero_centered_gamma": True, "activation": "glu"},
    "residual behind the norm": {"apply_residual_connection_post_layernorm": True, "activation": "qgelu"},
}

pytestmark = pytest.mark.filterwarnings("ignore:MXFP8BlockScaling")


def layer(variant="plain", **arguments):
    made = TransformerLayer(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, **VARIANTS[variant], **arguments)
    return randomised(made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_without_autocast_it_is_the_composition(variant, dtype, rotary, device) -> None:
    module = layer(variant, device=device, dtype=dtype)
    angles = RotaryPositionEmbedding(module.self_attention.kv_channels, device=device)(11) if rotary else None
    x, grad = (torch.randn(2, 7, 64, device=device, dtype=dtype) for _ in range(2))
    want = results(lambda x: twins.transformer(module, x, angles), module, x, grad)
    got = results(lambda x: module(x, rotary_pos_emb=angles), module, x, grad)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def parts(module, x, angles):
    """The layer's modules one after another, with attention written out between them."""
    after, attention = module.apply_residual_connection_post_layernorm, module.self_attention
    y = attention.layernorm_qkv(x)
    y, residual = y if after else (y, x)
    x = residual + attention.proj(twins.attended(attention, y, angles))
    y = module.layernorm_mlp(x)
    y, residual = y if after else (y, x)
    return residual + y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_with_a_recipe_it_is_its_modules_with_it(variant, name, device) -> None:
    module, chosen = layer(variant, device=device), recipe(name)
    if "NVFP4" in name:
        chosen = dataclasses.replace(chosen, disable_stochastic_rounding=True)
    angles = RotaryPositionEmbedding(module.self_attention.kv_channels, device=device)(9)
    x, grad = (torch.randn(3, 9, 64, device=device) for _ in range(2))
    with tejit.autocast(recipe=chosen):
        want = results(lambda x: parts(module, x, angles), module, x, grad)
        got = results(lambda x: module(x, rotary_pos_emb=angles), module, x, grad)
    for what, value in want.items():
        assert torch.equal(got[what], value), what


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", STATELESS)
def test_error_under_recipes(name, dtype, device) -> None:
    """Each of four products in forward, and of the twelve of a training step, adds its variance at most."""
    module = layer("groups", device=device, dtype=dtype)
    torch.manual_seed(0)
    x, grad = (torch.randn(3, 33, 64, device=device, dtype=dtype) for _ in range(2))
    want = results(lambda x: twins.transformer(module, x), module, x, grad)
    with tejit.autocast(recipe=recipe(name)):
        got = results(module, module, x, grad)
    one = bounds(name, dtype)
    for what, value in want.items():
        bound = math.sqrt(4) * one["y"] if what == "y" else math.sqrt(12) * one["dgrad"]
        assert 0 < relative_error(got[what], value) < bound, what


def test_what_is_ahead_is_not_seen() -> None:
    module = layer("groups")
    x = torch.randn(1, 8, 64)
    changed = x.clone()
    changed[:, 5:] += 1
    with tejit.autocast(recipe=MXFP8BlockScaling()):  # no scale spans several positions
        first, second = module(x), module(changed)
    assert torch.equal(first[:, :5], second[:, :5])
    assert not torch.equal(first[:, 5:], second[:, 5:])


def test_dropout_is_there_in_training_only() -> None:
    module = TransformerLayer(64, 96, 4)
    x = torch.randn(2, 5, 64)
    for p in (0.1, 0.0):
        module.hidden_dropout, module.self_attention.attention_dropout = p, 0.0
        assert torch.equal(module(x), module(x)) == (p == 0)
        module.self_attention.attention_dropout = p
        assert torch.equal(module(x), module(x)) == (p == 0)
        assert torch.equal(module.eval()(x), module(x))
        module.train()
    module.hidden_dropout = 1.0  # all that is added is dropped
    assert torch.equal(module(x), x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 5, 64), (2, 0, 64), (1, 1, 64)], ids=short)
def test_empty_and_single(shape, device) -> None:
    module = layer("groups", device=device)
    x = torch.randn(shape, device=device, requires_grad=True)
    with tejit.autocast():
        y = module(x)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape
    assert module.layernorm_mlp.fc1_weight.grad.isfinite().all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_bit_equal(reentrant) -> None:
    """With dropout, too: the recomputation draws the same numbers."""
    module = layer("groups")
    module.hidden_dropout = module.self_attention.attention_dropout = 0.2
    x, grad, found = torch.randn(2, 6, 64), torch.randn(2, 6, 64), []
    for how in ("plain", "checkpointed"):
        torch.manual_seed(1)
        x = x.detach().requires_grad_()
        module.zero_grad()
        with tejit.autocast():
            y = module(x) if how == "plain" else checkpoint(module, x, use_reentrant=reentrant)
        y.backward(grad)
        found.append([y, x.grad, *[p.grad for p in module.parameters()]])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
def test_inside_torch_autocast(device) -> None:
    module = layer(device=device)
    x, grad = (torch.randn(2, 6, 64, device=device) for _ in range(2))
    with torch.autocast(device, torch.bfloat16):
        want = results(lambda x: twins.transformer(module, x), module, x, grad)
        plain = results(module, module, x, grad)
        with tejit.autocast():
            got = results(module, module, x, grad)
    for name, value in want.items():
        assert torch.equal(plain[name], value), name
        assert got[name].dtype == value.dtype, name
        assert relative_error(got[name], value) < 0.2, name


def test_names_of_parts_and_parameters() -> None:
    module = TransformerLayer(64, 96, 4, name="layers.3")
    names = {m.name for m in module.modules() if getattr(m, "name", None)}
    assert names == {
        "layers.3",
        "layers.3.self_attention",
        "layers.3.self_attention.layernorm_qkv",
        "layers.3.self_attention.proj",
        "layers.3.layernorm_mlp",
    }
    unnamed = tejit.name_modules(nn.ModuleDict({"layers": nn.ModuleList([TransformerLayer(64, 96, 4)])}))
    assert unnamed["layers"][0].self_attention.proj.name == "layers.0.self_attention.proj"
    assert [name for name, _ in module.named_parameters()] == [
        f"self_attention.layernorm_qkv.{p}" for p in ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
    ] + ["self_attention.proj.weight", "self_attention.proj.bias"] + [
        f"layernorm_mlp.{p}" for p in ("layer_norm_weight", "layer_norm_bias")
    ] + [f"layernorm_mlp.{p}" for p in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")]
    module.train(False)
    x = torch.randn(1, 4, 64)
    want = module(x)
    with tejit.autocast(recipe=Float8CurrentScaling(overrides=(("layers.3*", None),))):
        assert torch.equal(module(x), want)
    with tejit.autocast(recipe=Float8CurrentScaling(overrides=(("layers.4*", None),))):
        assert not torch.equal(module(x), want)


def test_attention_without_a_norm_and_what_it_returns() -> None:
    module = randomised(MultiheadAttention(64, 4, attention_dropout=0.0, return_bias=True, name="a"))
    x = torch.randn(2, 5, 64)
    y, bias = module(x)
    want = twins.attention(module, nn.functional.linear(x, module.qkv.weight, module.qkv.bias), None)
    assert bias is module.proj.bias
    torch.testing.assert_close(y + bias, want)
    assert module.qkv.name == "a.qkv"
    normed = randomised(
        MultiheadAttention(64, 4, attention_dropout=0.0, input_layernorm=True, return_layernorm_output=True)
    )
    for context in (tejit.autocast(enabled=False), tejit.autocast()):
        with context:
            y, norm = normed(x)
        torch.testing.assert_close(norm, twins.norm(normed.layernorm_qkv, x))
        assert y.shape == x.shape


def test_errors_name_the_value() -> None:
    with pytest.raises(ValueError, match=r"num_attention_heads is 5; it must divide hidden_size = 64"):
        TransformerLayer(64, 96, 5)
    with pytest.raises(ValueError, match=r"num_gqa_groups is 3; it must divide num_attention_heads = 4"):
        TransformerLayer(64, 96, 4, 3)
    with pytest.raises(ValueError, match=r"attn_mask_type is 'padding'; it must be one of 'causal', 'no_mask'"):
        TransformerLayer(64, 96, 4, self_attn_mask_type="padding")
    with pytest.raises(ValueError, match="needs input_layernorm=True"):
        MultiheadAttention(64, 4, return_layernorm_output=True)
    module = TransformerLayer(64, 96, 4)
    with pytest.raises(ValueError, match=r"\(4, 64\); it must be \(batch, sequence, hidden_size\)"):
        module(torch.randn(4, 64))
    rotary = RotaryPositionEmbedding(16)
    with pytest.raises(ValueError, match=r"\(3, 1, 1, 16\); for 4 positions and 16 features"):
        module(torch.randn(1, 4, 64), rotary_pos_emb=rotary(3))
    with pytest.raises(ValueError, match="turn 5 features"):
        RotaryPositionEmbedding(10, 0.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_rotary_embedding_is_a_product_of_complex_numbers(dtype, interleaved, device) -> None:
    """Su et al. 2021: pair i at position p is multiplied by exp(1j * p * base^(-2 i / dim)); in float64."""
    t = torch.randn(2, 9, 3, 20, device=device).to(dtype)
    rotary = RotaryPositionEmbedding(20, 0.6, 100.0, interleaved, device=device)
    got = apply_rotary_pos_emb(t, rotary(9, offset=4), interleaved)
    assert got.dtype == dtype
    assert torch.equal(got[..., 12:], t[..., 12:])
    head = t[..., :12].double()
    first, second = (head[..., ::2], head[..., 1::2]) if interleaved else (head[..., :6], head[..., 6:])
    position = torch.arange(4, 13, device=device, dtype=torch.float64)
    angle = position[:, None] * 100.0 ** (-torch.arange(6, device=device, dtype=torch.float64) * 2 / 12)
    product = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None]
    parts = (product.real, product.imag)
    want = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        got[..., :12].double(), want, rtol=tolerance, atol=4e-6 if dtype == torch.float32 else 1e-4
    )


def test_angles_stay_float32_and_survive_to_empty() -> None:
    want = RotaryPositionEmbedding(16)(300)
    assert torch.equal(RotaryPositionEmbedding(16).bfloat16()(300), want)
    assert torch.equal(RotaryPositionEmbedding(16, device="meta").to_empty(device="cpu")(300), want)
    assert RotaryPositionEmbedding(16).state_dict() == {}
