"""A model of tejit's modules as transformers has models, for the tests of loaders."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

import tejit


class Config(PretrainedConfig):
    model_type = "tejit-test"

    def __init__(self, hidden_size: int = 64, **more: Any) -> None:
        self.hidden_size = hidden_size
        super().__init__(**more)


class Model(PreTrainedModel):
    """One of each kind of module."""

    config_class = Config
    base_model_prefix = "inner"
    _no_split_modules = ("TransformerLayer",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.linear = tejit.Linear(size, size)
        self.norm = tejit.RMSNorm(size)
        self.norm_linear = tejit.LayerNormLinear(size, size, normalization="RMSNorm")
        self.mlp = tejit.LayerNormMLP(size, 2 * size)
        self.grouped = tejit.GroupedLinear(2, size, size)
        self.rope = tejit.RotaryPositionEmbedding(16)
        self.layer = tejit.TransformerLayer(size, 2 * size, 4, hidden_dropout=0.0, attention_dropout=0.0)
        self.head = nn.Linear(size, 8)
        self.post_init()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm_linear(self.norm(self.linear(x)))
        x = self.mlp(x)
        rows = x.shape[0] * x.shape[1]
        x = self.grouped(x, [rows // 2, rows - rows // 2])
        x = self.layer(x, rotary_pos_emb=self.rope(x.shape[1]).to(x.device))
        return self.head(x)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of delayed scaling, what recomputation reads too."""
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "_delayed" in name}


def data(step: int = 0) -> torch.Tensor:
    return torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(step)) * (step + 1)


def train(model: nn.Module, recipe: Any, steps: int = 3) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        with tejit.autocast(recipe=recipe):
            y = model(data(step).to(next(model.parameters()).dtype))
        y.float().square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad.clamp(-1, 1), alpha=0.01)
                parameter.grad = None


def output(model: nn.Module, recipe: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model.eval()
    with torch.no_grad(), tejit.autocast(recipe=recipe):
        return model(data(5).to(torch.float32))
