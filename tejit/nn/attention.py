"""``MultiheadAttention`` and ``RotaryPositionEmbedding``, batch first."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tejit.nn import inputs, provenance
from tejit.nn.arguments import checked_eps, one_of
from tejit.nn.linear import Linear
from tejit.nn.module import checked_dtype
from tejit.nn.naming import Named, checked_name
from tejit.nn.norm_linear import LayerNormLinear
from tejit.nn.normed_module import Init

MASKS = ("causal", "no_mask")


class MultiheadAttention(Named, nn.Module):
    """Self-attention: a projection to queries, keys and values, ``scaled_dot_product_attention``, a projection back.

    The two projections quantize under ``tejit.autocast``; the attention between them is torch's own, in the input's
    dtype.

    Args:
        hidden_size: features of input and output.
        num_attention_heads: heads of the queries.
        kv_channels: features of a head; None is ``hidden_size / num_attention_heads``.
        attention_dropout: probability with which an attention weight is dropped, in training.
        layernorm_epsilon, normalization, zero_centered_gamma: of the norm in front, as in ``LayerNormLinear``.
        init_method, output_layer_init_method: called with the first and second projection's weight instead of
            ``nn.Linear``'s initialisation.
        num_gqa_groups: heads of keys and values, each of which serves as many query heads as the next; None is one
            for each query head.
        attn_mask_type: ``causal`` (a position sees itself and what is before it) or ``no_mask``.
        input_layernorm: normalise the input first.
        return_layernorm_output: return the norm's output too.
        bias: whether the projections add a bias.
        return_bias: return the second projection's bias too and do not add it.
        fuse_wgrad_accumulation, delay_wgrad_compute: of both projections, as in ``Linear``.
        rotary_pos_interleaved: rotate neighbouring features (0 and 1, 2 and 3) instead of those half a head apart.
        device, dtype: of the parameters; None is torch's default. ``params_dtype`` is another name of ``dtype``.
        name: what recipes call the module; its projections are ``name.layernorm_qkv`` or ``name.qkv``, and
            ``name.proj``.

    Raises:
        ValueError: heads that do not divide ``hidden_size`` (without ``kv_channels``) or groups that do not divide the
            heads; another ``attn_mask_type``; ``return_layernorm_output`` without ``input_layernorm``;
            ``layernorm_epsilon`` below zero, infinite or NaN; and what the projections raise.

    Submodules: ``layernorm_qkv`` (a ``LayerNormLinear``) or, without ``input_layernorm``, ``qkv`` (a ``Linear``), the
    rows of its weight being those of all queries, then of all keys, then of all values, head after head; ``proj``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        *,
        num_gqa_groups: int | None = None,
        attn_mask_type: str = "causal",
        input_layernorm: bool = False,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
        bias: bool = True,
        return_bias: bool = False,
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
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.kv_channels = _head_size(hidden_size, num_attention_heads) if kv_channels is None else kv_channels
        if num_attention_heads % self.num_gqa_groups:
            raise ValueError(
                f"num_gqa_groups is {num_gqa_groups}; it must divide num_attention_heads = {num_attention_heads}"
            )
        if return_layernorm_output and not input_layernorm:
            raise ValueError("return_layernorm_output=True needs input_layernorm=True: there would be no norm")
        layernorm_epsilon = checked_eps(layernorm_epsilon, "layernorm_epsilon")
        self.attention_dropout = attention_dropout
        self.attn_mask_type = one_of("attn_mask_type", attn_mask_type, MASKS)
        self.input_layernorm, self.return_layernorm_output = input_layernorm, return_layernorm_output
        self.return_bias = return_bias
        self.rotary_pos_interleaved = rotary_pos_interleaved
        rows = (num_attention_heads + 2 * self.num_gqa_groups) * self.kv_channels
        common: dict[str, Any] = {
            "bias": bias,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "delay_wgrad_compute": delay_wgrad_compute,
            "device": device,
            "dtype": checked_dtype(dtype, params_dtype),
        }
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size,
                rows,
                layernorm_epsilon,
                normalization=normalization,
                zero_centered_gamma=zero_centered_gamma,
                return_layernorm_output=return_layernorm_output,
                init_method=init_method,
                name=part(name, "layernorm_qkv"),
                **common,
            )
        else:
            self.qkv = Linear(hidden_size, rows, init_method=init_method, name=part(name, "qkv"), **common)
        self.proj = Linear(
            num_attention_heads * self.kv_channels,
            hidden_size,
            init_method=output_layer_init_method,
            return_bias=return_bias,
            name=part(name, "proj"),
            **common,
        )

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor | None = None, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """``(batch, sequence, hidden_size)`` to the same; then, as asked for, the bias and the norm's output. A jagged
        nested tensor gives one, each sequence by itself.

        Args:
            hidden_states: the input.
            rotary_pos_emb: angles by which queries and keys are turned, ``(at least sequence, 1, 1, at most
                kv_channels)``, as ``RotaryPositionEmbedding`` makes them.
            is_first_microbatch: as in ``Linear.forward``.
        """
        other = inputs.other_forward(
            MultiheadAttention.forward,
            self,
            hidden_states,
            rotary_pos_emb=rotary_pos_emb,
            is_first_microbatch=is_first_microbatch,
            quantizes=False,
        )
        if other is not inputs.PLAIN:
            return other
        if hidden_states.dim() != 3:
            raise ValueError(
                f"the input has shape {tuple(hidden_states.shape)}; it must be (batch, sequence, hidden_size)"
            )
        norm_output: tuple[Tensor, ...] = ()
        if self.input_layernorm:
            qkv = self.layernorm_qkv(hidden_states, is_first_microbatch)
            if self.return_layernorm_output:
                qkv, *norm_output = qkv
        else:
            qkv = self.qkv(hidden_states, is_first_microbatch)
        if qkv.layout is torch.jagged:
            # Sequence by sequence: torch's attention of nested tensors has no form on the CPU.
            parts = [self._attended(part[None], rotary_pos_emb).squeeze(0) for part in qkv.unbind()]
            context = inputs.nested_like(qkv, torch.cat(parts))
        else:
            context = self._attended(qkv, rotary_pos_emb)
        projected = self.proj(context, is_first_microbatch)
        found = (*(projected if self.return_bias else (projected,)), *norm_output)
        return found if len(found) > 1 else found[0]

    def _attended(self, qkv: Tensor, rotary_pos_emb: Tensor | None) -> Tensor:
        """``(batch, sequence, heads * kv_channels)`` of queries, keys and values side by side."""
        heads = qkv.unflatten(-1, (-1, self.kv_channels))
        q, k, v = heads.split((self.num_attention_heads, self.num_gqa_groups, self.num_gqa_groups), 2)
        if rotary_pos_emb is not None:
            q = apply_rotary_pos_emb(q, rotary_pos_emb, self.rotary_pos_interleaved)
            k = apply_rotary_pos_emb(k, rotary_pos_emb, self.rotary_pos_interleaved)
        context = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=self.attn_mask_type == "causal",
            enable_gqa=self.num_gqa_groups != self.num_attention_heads,
        )
        return context.transpose(1, 2).flatten(2)

    def backward_dw(self) -> None:
        """Compute the gradients that backward put off (``delay_wgrad_compute``), of both projections."""
        (self.layernorm_qkv if self.input_layernorm else self.qkv).backward_dw()
        self.proj.backward_dw()


class RotaryPositionEmbedding(inputs.Whole, nn.Module):
    """The angles of rotary position embeddings (Su et al. 2021).

    Args:
        dim: features of a head.
        rotary_percent: the share of them that is turned, the first ones.
        rotary_base: position ``p`` turns pair ``i`` by ``p / rotary_base ** (2 i / dim)``.
        interleaved: pairs are neighbouring features (0 and 1, 2 and 3) instead of those half of ``dim`` apart; tell
            the attention too (``rotary_pos_interleaved``).
        device: of the angles; None is torch's default.

    The angles are float32 whatever dtype the module is moved to: positions beyond 256 are no bfloat16 numbers.

    Raises ``ValueError`` where the features that are turned are odd in number, or none.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = int(dim * rotary_percent)
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(
                f"dim = {dim} and rotary_percent = {rotary_percent} turn {self.dim} features; they must be pairs"
            )
        self.rotary_base = float(rotary_base)
        self.interleaved = interleaved
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        """On meta, those of the CPU: nobody else could give the buffer its values, and it moves with the module."""
        place = torch.empty(0, device=device).device
        device = "cpu" if place.type == "meta" else place
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        return 1.0 / self.rotary_base**exponents

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryPositionEmbedding:
        if self.inv_freq.is_meta:  # somebody put it there, from where nothing can be moved
            self.inv_freq = torch.empty(0, device=provenance.device_after(fn))
        else:
            super()._apply(fn, recurse)
        self.inv_freq = self._frequencies(self.inv_freq.device)  # neither rounded nor what to_empty left there
        return self

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of positions ``offset`` to ``offset + max_seq_len - 1``: ``(max_seq_len, 1, 1, dim)`` float32."""
        other = inputs.other_forward(RotaryPositionEmbedding.forward, self, max_seq_len, offset, quantizes=False)
        if other is not inputs.PLAIN:
            return other
        # The buffer says where; its values are computed again, since loaders of models replace buffers that no file has
        # by memory as it is found.
        device = self.inv_freq.device
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=device) + offset
        angles = positions[:, None] * self._frequencies(device)
        pairs = torch.stack((angles, angles), -1) if self.interleaved else torch.stack((angles, angles), -2)
        return pairs.reshape(max_seq_len, 1, 1, self.dim)


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
    """Turn pairs of features by angles, in float32, rounded once.

    Args:
        t: ``(batch, sequence, heads, features)``.
        freqs: ``(at least sequence, 1, 1, turned)`` float32 angles; the first ``turned`` features are turned.
        interleaved: pairs are neighbours instead of half of ``turned`` apart.

    Returns:
        The shape and dtype of ``t``.

    Raises:
        ValueError: there are fewer positions in ``freqs`` than in ``t``, or more features.
    """
    sequence, turned = t.shape[1], freqs.shape[-1]
    if freqs.dim() != 4 or freqs.shape[0] < sequence or turned > t.shape[-1]:
        raise ValueError(
            f"rotary_pos_emb has shape {tuple(freqs.shape)}; for {sequence} positions and {t.shape[-1]} features it"
            f" must be (at least {sequence}, 1, 1, at most {t.shape[-1]})"
        )
    angles = freqs[:sequence, 0].to(t.device if t.is_meta else freqs.device, torch.float32)
    x, rest = t[..., :turned].float(), t[..., turned:]
    if interleaved:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        other = torch.stack((-second, first), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    found = (x * angles.cos() + other * angles.sin()).to(t.dtype)
    return torch.cat((found, rest), -1) if turned < t.shape[-1] else found


def part(name: str | None, child: str) -> str | None:
    """The qualified name of a module's child; None below a module without one."""
    return None if name is None else f"{name}.{child}"


def _head_size(hidden_size: int, heads: int) -> int:
    if hidden_size % heads:
        raise ValueError(
            f"num_attention_heads is {heads}; it must divide hidden_size = {hidden_size}, or give kv_channels"
        )
    return hidden_size // heads
