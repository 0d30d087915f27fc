"""``TransformerLayer``: attention and MLP, each behind a norm and beside a residual connection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tejit.nn import inputs
from tejit.nn.attention import MultiheadAttention, part
from tejit.nn.module import checked_dtype
from tejit.nn.naming import Named, checked_name
from tejit.nn.norm_mlp import LayerNormMLP
from tejit.nn.normed_module import Init


class TransformerLayer(Named, nn.Module):
    """``x = x + attention(norm(x)); x = x + mlp(norm(x))``, with dropout on what is added.

    The four linear layers quantize under ``tejit.autocast``, and the norms in front of them with them.

    Args:
        hidden_size: features of input and output.
        ffn_hidden_size: features inside the MLP.
        num_attention_heads, num_gqa_groups, kv_channels, attention_dropout: as in ``MultiheadAttention``.
        layernorm_epsilon, normalization, zero_centered_gamma: of both norms, as in ``LayerNormLinear``.
        hidden_dropout: probability with which an element of what is added is dropped, in training.
        init_method: called with the weights of the first linear layers of attention and MLP instead of ``nn.Linear``'s
            initialisation, ``output_layer_init_method`` with those of the second ones.
        self_attn_mask_type: ``causal`` or ``no_mask``.
        activation: as in ``LayerNormMLP``.
        bias: whether the linear layers add a bias.
        apply_residual_connection_post_layernorm: add to the norm's output instead of its input.
        rotary_pos_interleaved: as in ``MultiheadAttention``.
        fuse_wgrad_accumulation, delay_wgrad_compute: of all linear layers, as in ``Linear``.
        device, dtype: of the parameters; None is torch's default. ``params_dtype`` is another name of ``dtype``.
        name: what recipes call the layer; its linear layers are ``name.self_attention.layernorm_qkv``,
            ``name.self_attention.proj``, ``name.layernorm_mlp.fc1`` and ``name.layernorm_mlp.fc2``.

    Raises ``ValueError`` for what ``MultiheadAttention`` and ``LayerNormMLP`` refuse.

    Submodules: ``self_attention`` (a ``MultiheadAttention`` with ``layernorm_qkv`` and ``proj``), ``layernorm_mlp``.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        *,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        bias: bool = True,
        zero_centered_gamma: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        rotary_pos_interleaved: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.name = checked_name(name)
        self.hidden_dropout = hidden_dropout
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        common: dict[str, Any] = {
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "normalization": normalization,
            "bias": bias,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": apply_residual_connection_post_layernorm,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "delay_wgrad_compute": delay_wgrad_compute,
            "device": device,
            "dtype": checked_dtype(dtype, params_dtype),
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            num_gqa_groups=num_gqa_groups,
            attn_mask_type=self_attn_mask_type,
            input_layernorm=True,
            rotary_pos_interleaved=rotary_pos_interleaved,
            name=part(name, "self_attention"),
            **common,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            name=part(name, "layernorm_mlp"),
            **common,
        )

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor | None = None, is_first_microbatch: bool | None = None
    ) -> Tensor:
        """``(batch, sequence, hidden_size)`` to the same; the other arguments are as in
        ``MultiheadAttention.forward``."""
        other = inputs.other_forward(
            TransformerLayer.forward,
            self,
            hidden_states,
            rotary_pos_emb=rotary_pos_emb,
            is_first_microbatch=is_first_microbatch,
            quantizes=False,
        )
        if other is not inputs.PLAIN:
            return other
        attended = self.self_attention(
            hidden_states, rotary_pos_emb=rotary_pos_emb, is_first_microbatch=is_first_microbatch
        )
        hidden_states = self._added(attended, hidden_states)
        return self._added(self.layernorm_mlp(hidden_states, is_first_microbatch), hidden_states)

    def backward_dw(self) -> None:
        """Compute the gradients that backward put off (``delay_wgrad_compute``), of all linear layers."""
        self.layernorm_mlp.backward_dw()
        self.self_attention.backward_dw()

    def _added(self, found: Any, residual: Tensor) -> Tensor:
        if self.apply_residual_connection_post_layernorm:
            found, residual = found
        return residual + F.dropout(found, self.hidden_dropout, self.training)
