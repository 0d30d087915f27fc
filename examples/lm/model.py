"""A small pre-norm transformer over bytes, of plain torch modules: `tejit.convert` does the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """What fixes a model: `context` is the longest input in bytes, `width` a multiple of `2 * heads`."""

    layers: int
    width: int
    heads: int
    context: int


def parameter_count(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LanguageModel(shape).parameters())


class Rotary(nn.Module):
    """Rotary positions: turns each pair of channels by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, context: int) -> None:
        super().__init__()
        frequency = 10000.0 ** -(torch.arange(0, head_width, 2) / head_width)
        angle = torch.arange(context)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., length, head_width), any float dtype, which the result keeps."""
        cos, sin = (table[: x.shape[-2]].to(x.dtype) for table in (self.cos, self.sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.rotary = Rotary(shape.width // shape.heads, shape.context)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Bytes (batch, length) to logits (batch, length, 256).

    The matrices in `blocks` are what is trained in low precision. Embedding and head stay plain: they are
    small, and their errors reach the loss directly.
    """

    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.initialize(shape, seed)

    @torch.no_grad()
    def initialize(self, shape: Shape, seed: int) -> None:
        """Weights that depend on `seed` alone, not on what was drawn before."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            if name in ("embedding.weight", "head.weight"):
                std = 0.02
            else:
                std = 0.5 / math.sqrt(parameter.shape[1])
                if name.endswith("out.weight"):  # 2 * layers of these add up in the residual stream
                    std /= math.sqrt(2 * shape.layers)
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
