"""Drawing tokens with keyed randomness, as tensor operations that a CUDA graph can capture."""

from __future__ import annotations

import torch
from torch import Tensor

from reasonlab.rollout.types import Sampling

GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit number
MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def keyed_uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) that depend on (key, counter) alone: SplitMix64 of key + (counter + 1)·golden ratio."""
    z = keys + (counters + 1) * GOLDEN
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 40).to(torch.float32) * 2.0**-24


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 shifts copy the sign bit, which SplitMix64 must not see."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def sample_tokens(logits: Tensor, keys: Tensor, counters: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token for each row of fp32 logits, by inverting the cumulative distribution, and its logprob."""
    if sampling.temperature == 0:
        chosen = logits.argmax(-1)
        return chosen, logits.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)
    logprobs = (logits / sampling.temperature if sampling.temperature != 1 else logits).log_softmax(-1)
    cumulative = _truncate(logprobs.exp(), sampling).cumsum(-1)
    # The last entry is the total mass: multiplying by it renormalises, and rounding can never run past the end.
    threshold = keyed_uniform(keys, counters)[:, None] * cumulative[:, -1:]
    chosen = (cumulative <= threshold).sum(-1).clamp_(max=logits.shape[-1] - 1)
    return chosen, logprobs.gather(1, chosen[:, None]).squeeze(1)


def _truncate(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """Zero what top-k leaves out, and then what top-p leaves out of the rest (the most likely token always stays)."""
    if sampling.top_k == 0 and sampling.top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        ordered = ordered * keep
        keep &= ordered.cumsum(-1) - ordered < sampling.top_p * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(1, order, ordered * keep)
