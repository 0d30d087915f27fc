"""The modules with norms, written out in torch's own functions on the modules' parameters: what they must equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tejit import LayerNormLinear, LayerNormMLP

#: Torch's activations by the names of ours.
ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "srelu": lambda x: F.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "reglu": lambda x: F.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "sreglu": lambda x: F.relu(x.chunk(2, -1)[0]).square() * x.chunk(2, -1)[1],
    "qgeglu": lambda x: x.chunk(2, -1)[0] * torch.sigmoid(1.702 * x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "glu": lambda x: torch.sigmoid(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


def norm(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight, bias = m.layer_norm_weight, m.layer_norm_bias
    if not m.zero_centered_gamma:
        return _norm(m, x, weight, bias)
    wide = torch.promote_types(x.dtype, torch.float32)  # a small weight is nothing beside 1 in two bytes
    return _norm(m, x.to(wide), 1 + weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


def _norm(m: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if m.normalization == "LayerNorm":
        return F.layer_norm(x, weight.shape, weight, bias, m.eps)
    return F.rms_norm(x, weight.shape, weight, m.eps)


def norm_linear(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(norm(m, x), m.weight, m.bias)


def norm_mlp(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.linear(ACTIVATIONS[m.activation](F.linear(norm(m, x), m.fc1_weight, m.fc1_bias)), m.fc2_weight, m.fc2_bias)


def turned(t: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `(batch, sequence, heads, features)`, pairs half apart, all features."""
    half = t.shape[-1] // 2
    a, b = t[..., :half].float(), t[..., half:].float()
    cos, sin = (f(angles[: t.shape[1], 0, :, :half])[None] for f in (torch.cos, torch.sin))
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(t.dtype)


def attended(m: nn.Module, y: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
    """Attention of `y`, which holds queries, keys and values."""
    batch, sequence, _ = y.shape
    size, heads, groups = m.kv_channels, m.num_attention_heads, m.num_gqa_groups
    q = y[..., : heads * size].reshape(batch, sequence, heads, size)
    k = y[..., heads * size : (heads + groups) * size].reshape(batch, sequence, groups, size)
    v = y[..., (heads + groups) * size :].reshape(batch, sequence, groups, size)
    if angles is not None:
        q, k = turned(q, angles), turned(k, angles)
    causal = m.attn_mask_type == "causal"
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != groups)
    return found.transpose(1, 2).reshape(batch, sequence, heads * size)


def attention(m: nn.Module, y: torch.Tensor, angles: torch.Tensor | None) -> torch.Tensor:
    """`attended`, and the projection back."""
    return F.linear(attended(m, y, angles), m.proj.weight, m.proj.bias)


def transformer(m: nn.Module, x: torch.Tensor, angles: torch.Tensor | None = None) -> torch.Tensor:
    """Without dropout."""
    after = m.apply_residual_connection_post_layernorm
    qkv, mlp = m.self_attention.layernorm_qkv, m.layernorm_mlp
    y = norm(qkv, x)
    x = (y if after else x) + attention(m.self_attention, F.linear(y, qkv.weight, qkv.bias), angles)
    y = norm(mlp, x)
    h = ACTIVATIONS[mlp.activation](F.linear(y, mlp.fc1_weight, mlp.fc1_bias))
    return (y if after else x) + F.linear(h, mlp.fc2_weight, mlp.fc2_bias)


def results(
    function, module: nn.Module, x: torch.Tensor, grad: torch.Tensor, dynamic: tuple[int, ...] = ()
) -> dict[str, torch.Tensor]:
    """`y`, `dgrad` and the gradient of each parameter that requires one, by name; some sizes of `x` marked dynamic."""
    x = x.detach().clone().requires_grad_()
    for dimension in dynamic:
        torch._dynamo.mark_dynamic(x, dimension)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    y = function(x)
    found = torch.autograd.grad(y, [x, *parameters.values()], grad)
    return {"y": y.detach(), **dict(zip(["dgrad", *parameters], found, strict=True))}


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Norm parameters and biases are not what they begin as; weights keep unit variance through the layers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            value = torch.randn(p.shape, generator=generator)
            if p.dim() > 1:
                value *= p.shape[1] ** -0.5
            elif name.endswith("layer_norm_weight"):
                value = 1 + value / 4
            p.copy_(value)
    return module


def made(kind: str, i: int, o: int, **arguments):
    """A module that begins with a norm and its twin: `LayerNormLinear` where `kind` is `linear`, else an MLP with the
    activation of that name."""
    if kind == "linear":
        return randomised(LayerNormLinear(i, o, **arguments)), norm_linear
    return randomised(LayerNormMLP(i, o, activation=kind, **arguments)), norm_mlp
