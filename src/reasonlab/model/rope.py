"""Rotary position embeddings: inverse frequencies for the scaling rules that Llama and Qwen models use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, rope: Mapping[str, Any] | None, max_positions: int) -> tuple[Tensor, float]:
    """Frequencies θ_i and the factor by which cos and sin are scaled (1 except for YaRN).

    default  θ_i = base^(−2i/d)
    linear   θ_i / factor
    llama3   long wavelengths divided by factor, short ones kept, a smooth ramp between
    yarn     the same idea with the ramp over dimensions, and attention scaled by 0.1·ln(factor) + 1
    """
    rope = rope or {}
    base, kind = float(rope.get("rope_theta", 10000.0)), rope.get("rope_type", "default")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / base**exponents
    if kind == "default":
        return frequencies, 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return frequencies / factor, 1.0
    trained_length = float(rope.get("original_max_position_embeddings") or max_positions)
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        turns = trained_length * frequencies / (2 * math.pi)  # full turns within the trained length
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / factor), 1.0
    return _yarn(frequencies, head_dim, base, factor, trained_length, rope)


def _yarn(
    frequencies: Tensor, head_dim: int, base: float, factor: float, trained_length: float, rope: Mapping[str, Any]
) -> tuple[Tensor, float]:
    def dimension_of(turns: float) -> float:
        return head_dim * math.log(trained_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(float(rope.get("beta_fast") or 32)), dimension_of(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    scaled = frequencies / factor * ramp + frequencies * (1 - ramp)

    def attention_gain(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = rope.get("attention_factor")
    if scale is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        scale = attention_gain(float(rope["mscale"])) / attention_gain(float(rope["mscale_all_dim"]))
    return scaled, float(scale) if scale is not None else attention_gain()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+d/2}) of every head: x is [tokens, heads, d], cos and sin are [tokens, 1, d/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
