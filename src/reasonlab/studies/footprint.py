r"""What a model needs, by formula from its shape: memory, arithmetic and memory traffic. Nothing is allocated.

P   parameters
W   weights that a token is multiplied with: all but norms and biases, and of the embeddings the head alone
ℓ   layers,  h hidden size,  f feed-forward size,  q = heads · head size,  k = key-value heads · head size
n   tokens of a sequence; Σn and Σn² run over the sequences of a batch

Weights in fp32 4P, gradients 4P, Adam's moments 8P bytes. A forward pass is 2·W·Σn + 2·ℓ·q·Σn² operations (scores and
sums of values are 4·ℓ·q·n², and a causal query sees half of the keys); a backward pass is twice that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reasonlab.model.config import ModelConfig
from reasonlab.train.learner import HEAD_ELEMENTS

FP32, BF16 = 4, 2
GIB = 2**30

Numbers = NDArray[np.float64]


def block_weights(shape: ModelConfig) -> int:
    """Weights of the matrices of one layer: h·(q + 2k) + q·h + 3·h·f."""
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return shape.hidden_size * (2 * q + 2 * k + 3 * shape.intermediate_size)


def multiplied_weights(shape: ModelConfig) -> int:
    """W: the matrices of all layers and the head."""
    return shape.layers * block_weights(shape) + shape.vocab_size * shape.hidden_size


def forward_flops(shape: ModelConfig, tokens: float, squares: float) -> float:
    """2·W·Σn + 2·ℓ·q·Σn²."""
    attention = 2 * shape.layers * shape.heads * shape.head_dim
    return 2.0 * multiplied_weights(shape) * tokens + attention * squares


def cache_bytes(shape: ModelConfig, size: int) -> int:
    """Keys and values of one token, `size` bytes each number: 2·ℓ·k·size."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * size


def layer_activation_bytes(shape: ModelConfig, bfloat16: bool) -> int:
    """What one layer keeps of one token for the backward pass.

    The residual stream and the normalised stream at both norms (4h), the inputs of the two fused projections (2h), q, k
    and v, the rotated q and k, and the attention's output (3q + 3k), gate, up, silu(gate) and the product (4f), and one
    number for each head and norm. With bf16 autocast the streams stay fp32, the rest is bf16. Where every head of q and
    k is normalised (Qwen3), also the normalised ones in fp32 and one number for each head of both; from bf16 the norm
    makes an fp32 copy of what it is given, and keeps it too.
    """
    h, f = shape.hidden_size, shape.intermediate_size
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    low = BF16 if bfloat16 else FP32
    kept = FP32 * 4 * h + low * (2 * h + 3 * q + 3 * k + 4 * f) + FP32 * (shape.heads + 2)
    if shape.qk_norm:
        kept += FP32 * ((2 if bfloat16 else 1) * (q + k) + shape.heads + shape.kv_heads)
    return kept


def activation_bytes(shape: ModelConfig, tokens: int, bfloat16: bool, recompute: bool) -> int:
    """Of a micro-batch: every layer's, or with recomputation every layer's input (4h) and one layer's in full; and the
    logits of the chunk at work, three times in fp32 (logits, log-softmax, their gradient)."""
    layer = layer_activation_bytes(shape, bfloat16)
    kept = layer + FP32 * shape.hidden_size * shape.layers if recompute else layer * shape.layers
    chunk = max(shape.vocab_size, min(tokens * shape.vocab_size, HEAD_ELEMENTS))
    return kept * tokens + 3 * FP32 * chunk


def gathered_bytes(shape: ModelConfig) -> int:
    """Full sharding puts weights together where they are used, in bf16 and with their gradients: the embeddings, the
    layer at work and the next one."""
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    return 2 * BF16 * (embeddings + 2 * block_weights(shape))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one GPU, or of the process."""

    weights: float  # fp32; these, moments and reference are there all the time
    moments: float
    reference: float
    gradients: float  # these three in the update
    activations: float
    working: float  # bf16 weights of the forward and backward pass
    engine: float  # these two in the rollout: the engine's own copy of the weights,
    cache: float  # and keys and values of all rows at full length
    shared: bool  # one process keeps them during the update

    @property
    def update(self) -> float:
        held = self.engine + self.cache if self.shared else 0.0
        state = self.weights + self.moments + self.reference
        return state + self.gradients + self.activations + self.working + held

    @property
    def rollout(self) -> float:
        return self.weights + self.moments + self.reference + self.engine + self.cache

    @property
    def peak(self) -> float:
        return max(self.update, self.rollout)


def decoding_rate(
    shape: ModelConfig, rows: float, context: Numbers, bandwidth: float, flops: float
) -> tuple[Numbers, float]:
    """Roofline of one engine: tokens a second at each mean context, and the seconds of a step with a single row.

    A step reads W weights in bf16 and the cache of every row, and computes 2·W + 4·ℓ·q·context for every row; it lasts
    as long as the slower of the two.
    """
    weights = BF16 * multiplied_weights(shape)
    moved = weights + rows * context * cache_bytes(shape, BF16)
    attention = 4.0 * shape.layers * shape.heads * shape.head_dim
    computed = rows * (2.0 * multiplied_weights(shape) + attention * context)
    return rows / np.maximum(moved / bandwidth, computed / flops), weights / bandwidth
