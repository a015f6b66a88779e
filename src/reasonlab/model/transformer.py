"""One decoder-only transformer for Llama, Qwen2 and Qwen3, used unchanged for training, prefill and decoding.

Tokens always come as one flat list, [tokens] without a batch dimension: sequences lie one behind the other and no
padding exists outside attention. What differs between training and decoding is only which keys a token may see, so
the caller passes an `attend` function (see `attention.py`) and the blocks stay the same.

The projections of q, k, v and of gate, up are stored fused, because for small models the time goes into the number
of calls; `checkpoint.py` splits them when it writes the Hugging Face layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reasonlab.model.accumulate import Embedding, Linear
from reasonlab.model.config import ModelConfig
from reasonlab.model.fused import add_norm, residual, rotate_heads, swiglu
from reasonlab.model.rope import inverse_frequencies


class Attend(Protocol):
    """Attention of one layer over flat tokens: q [tokens, heads, d], k and v [tokens, kv_heads, d] -> like q."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class FusedAttention(ABC):
    """Attention that itself makes q, k and v of the projections, as decoding on CUDA does in one kernel."""

    @abstractmethod
    def attend(self, layer: int, qkv: Tensor, module: Attention) -> Tensor:
        """[tokens, (heads + 2 kv_heads) · d] -> [tokens, heads · d]."""


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.output = Linear(config.heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        layer: int,
        attend: Attend | FusedAttention,
        rows: Tensor | None = None,
    ) -> Tensor:
        qkv = self.qkv(x)
        if isinstance(attend, FusedAttention):
            return self.output(attend.attend(layer, qkv, self))  # type: ignore[no-any-return]
        assert cos is not None
        assert sin is not None
        v: Tensor | None = None
        if self.q_norm is not None and self.k_norm is not None:
            shape = (self.heads, self.kv_heads, self.kv_heads)
            q, k, v = qkv.view(x.shape[0], sum(shape), self.head_dim).split(shape, dim=1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1).flatten(1)
        q, k, v = rotate_heads(qkv, cos, sin, self.heads, self.kv_heads, v)
        mixed = attend(layer, q, k, v).reshape(x.shape[0], -1)
        return self.output(mixed if rows is None else mixed.index_select(0, rows))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A layer. Its last sum is left to the norm that follows: it takes and gives the sum so far and what to add."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        branch: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        layer: int,
        attend: Attend | FusedAttention,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, normed = add_norm(x, branch, self.attention_norm)
        mixed = self.attention(normed, cos, sin, layer, attend, rows)
        x, normed = add_norm(x if rows is None else x.index_select(0, rows), mixed, self.feed_forward_norm)
        return x, self.feed_forward(normed)


class Transformer(nn.Module):
    inverse_frequencies: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False  # layers in the backward pass, instead of keeping what they computed
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.head = None if config.tied else Linear(config.hidden_size, config.vocab_size, bias=False)
        frequencies, self.rope_scale = inverse_frequencies(config.head_dim, config.rope, config.max_positions)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        """Moves and casts everything but the frequencies, which only move: rounded to bf16 they bend far positions."""
        exact = self.inverse_frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inverse_frequencies = exact.to(self.inverse_frequencies.device)
        return self

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend | FusedAttention, rows: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the final norm, [tokens, hidden]; multiply by `head_weight` for logits.

        With `rows` only those of the named tokens: the last layer then does no more for the others than being seen.
        """
        x = residual(self.embedding(tokens))
        cos: Tensor | None = None
        sin: Tensor | None = None
        if not isinstance(attend, FusedAttention):  # which turns heads by itself
            angles = positions[:, None].float() * self.inverse_frequencies
            cos = (angles.cos() * self.rope_scale).to(x.dtype)[:, None, :]
            sin = (angles.sin() * self.rope_scale).to(x.dtype)[:, None, :]
        branch: Tensor | None = None
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            inputs = (x, branch, cos, sin, layer, attend, rows if layer == last else None)
            if self.recompute and torch.is_grad_enabled():
                # Nothing is drawn at random in a layer, so no state of a generator has to be kept.
                x, branch = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x, branch = block(*inputs)
        return add_norm(x, branch, self.final_norm)[1]

    def initialise(self, seed: int) -> None:
        """Fresh weights: normal(0, 0.02), output projections scaled down by the square root of the depth."""
        generator = torch.Generator().manual_seed(seed)
        residual_scale = (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            else:
                shrink = residual_scale if name.endswith(("output.weight", "down.weight")) else 1.0
                with torch.no_grad():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02 * shrink)
