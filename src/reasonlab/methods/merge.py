r"""Merging models by arithmetic on their weights, one tensor at a time (Kimi k1.5 report, §2.4, "long2short").

k1.5 averages the weights of a model that thinks long and of one that answers short, without any training; that is
`linear` with equal weights. With θ_i a tensor of model i, θ_0 that of the base model, w_i the weights and λ the scale:

    linear            θ = Σ_i w_i θ_i / Σ_i w_i                              (Wortsman et al. 2022, model soups)
    slerp             θ = [sin((1−t)Ω) θ_1 + sin(tΩ) θ_2] / sin Ω            (Shoemake 1985)
    task arithmetic   θ = θ_0 + λ Σ_i w_i τ_i,      τ_i = θ_i − θ_0          (Ilharco et al. 2023)
    TIES              θ = θ_0 + λ mean of the trimmed τ_i that have the elected sign  (Yadav et al. 2023)

Precision. Tensors are walked in blocks. A block is widened to fp64, whatever it is stored in, summed there in the order
of the models, rounded to fp32 and from there to the dtype of the first model. So the average of two models is the one
that fp32 gives, a model merged with itself is itself bit for bit under any weights (in fp32, 0.3 θ + 0.7 θ need not be
θ), and nothing but a few blocks is held beside the inputs and the result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 16  # elements: 512 KiB in fp64, which stays in the cache; 8 MiB are several times slower
NEARLY_PARALLEL = 0.9995  # |cos Ω| from which slerp is linear, as in mergekit: sin Ω is going to zero


def linear(models: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """θ = Σ_i w_i θ_i / Σ_i w_i. Weights may be negative (extrapolation) as long as their sum is not zero."""
    total = math.fsum(weights)
    return _weighted_sum(models, [weight / total for weight in weights])


def cosine(a: Tensor, b: Tensor) -> float:
    """cos Ω = a·b / |a||b| of the flattened tensors; 1 where one of them is zero and has no direction."""
    dot = square_a = square_b = 0.0
    for x, y in zip(_blocks(a), _blocks(b), strict=True):
        x, y = x.double(), y.double()
        dot += float(x @ y)
        square_a += float(x @ x)
        square_b += float(y @ y)
    norms = math.sqrt(square_a) * math.sqrt(square_b)
    return max(-1.0, min(1.0, dot / norms)) if norms else 1.0


def slerp(a: Tensor, b: Tensor, t: float, cos: float) -> Tensor:
    """θ = [sin((1−t)Ω) a + sin(tΩ) b] / sin Ω, with cos Ω = `cosine(a, b)`; t = 0 is a, t = 1 is b.

    Each tensor is one flattened vector. As in mergekit, the angle is that of the directions and its coefficients
    multiply the tensors as they are: with |a| = |b| the result has their norm, otherwise its norm changes smoothly
    from |a| to |b|, but not linearly in t. Where |cos Ω| > 0.9995 (nearly parallel or opposite) the
    result is (1−t) a + t b.
    """
    if abs(cos) > NEARLY_PARALLEL:
        return _weighted_sum([a, b], [1 - t, t])
    angle = math.acos(cos)
    return _weighted_sum([a, b], [math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)])


def task_arithmetic(base: Tensor, models: Sequence[Tensor], weights: Sequence[float], scale: float) -> Tensor:
    """θ = θ_0 + λ Σ_i w_i (θ_i − θ_0). The weights are not normalised: each task vector is added as it is."""

    def formula(theta_0: Tensor, *theta: Tensor) -> Tensor:
        return _moved(theta_0, scale * _dot(weights, [theta_i - theta_0 for theta_i in theta]))

    return _blockwise(formula, [base, *models], models[0].dtype)


class Trim(NamedTuple):
    """What is left of one task vector: entries of at least this magnitude, and how many of them are not zero."""

    threshold: float
    kept: int


def trim(base: Tensor, model: Tensor, density: float) -> Trim:
    """The first step of TIES: keep the `density` share of τ = θ − θ_0 that is largest in magnitude, at least one.

    The threshold is the k-th largest |τ| of this tensor, k = max(1, ⌊density · n⌋). All entries of exactly that
    magnitude are kept, as in the paper's code: between equal changes there is nothing to choose. Changes of bf16
    weights are multiples of few step sizes, so there the kept share can be well above the density; it is counted.
    """
    magnitudes = _blockwise(_distance, [base, model], torch.float32).flatten().numpy()
    if not magnitudes.size:
        return Trim(0.0, 0)
    smallest_kept = magnitudes.size - max(1, int(density * magnitudes.size))
    magnitudes.partition(smallest_kept)  # in place: one fp32 copy of the tensor is all this needs
    threshold = float(magnitudes[smallest_kept])
    smallest_change = max(threshold, 2.0**-149)  # the smallest number of fp32: zeros do not count as kept
    return Trim(threshold, int(np.count_nonzero(magnitudes >= np.float32(smallest_change))))


def ties(
    base: Tensor, models: Sequence[Tensor], weights: Sequence[float], thresholds: Sequence[float], scale: float
) -> Tensor:
    """TIES after the trim: elect a sign for every entry, and average the task vectors that have it.

        τ̂_i = τ_i where |τ_i| ≥ threshold_i, else 0
        γ   = + where Σ_i w_i τ̂_i ≥ 0, else −                       the sign with the larger mass; + on a draw
        θ   = θ_0 + λ Σ_{i: sgn τ̂_i = γ} w_i τ̂_i / Σ_{i: sgn τ̂_i = γ} w_i         and θ_0 where no model agrees

    This is mergekit's convention. Weights are not negative and only their ratios matter.
    """

    def formula(theta_0: Tensor, *theta: Tensor) -> Tensor:
        # Magnitudes are compared in fp32, because the threshold was found there.
        tau = [
            torch.where(_distance(theta_0, theta_i).float() >= threshold, theta_i - theta_0, 0.0)
            for theta_i, threshold in zip(theta, thresholds, strict=True)
        ]
        elected = torch.where(_dot(weights, tau) >= 0, 1.0, -1.0)
        agrees = [(tau_i.sign() == elected).double() for tau_i in tau]
        agreed = _dot(weights, [agrees_i * tau_i for agrees_i, tau_i in zip(agrees, tau, strict=True)])
        agreeing = _dot(weights, agrees)
        return _moved(theta_0, scale * agreed / torch.where(agreeing > 0, agreeing, 1.0))

    return _blockwise(formula, [base, *models], models[0].dtype)


def is_finite(tensor: Tensor) -> bool:
    """Neither NaN nor infinite anywhere: both show in the smallest and the largest entry."""
    return not tensor.numel() or all(math.isfinite(float(end)) for end in torch.aminmax(tensor))


def _weighted_sum(models: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    return _blockwise(lambda *theta: _dot(coefficients, theta), models, models[0].dtype)


def _dot(coefficients: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    """Σ_i c_i x_i, added in the order of the models."""
    terms = (coefficient * tensor for coefficient, tensor in zip(coefficients, tensors, strict=True))
    return functools.reduce(torch.add, terms)


def _moved(theta: Tensor, change: Tensor) -> Tensor:
    """θ + change; an entry that does not change keeps its bits, which −0 + 0 would not."""
    return torch.where(change == 0, theta, theta + change)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (b - a).abs()


def _blockwise(formula: Callable[..., Tensor], tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`formula` of tensors of one shape, entry by entry: each block in fp64, rounded to fp32 and then to `dtype`."""
    result = torch.empty(tensors[0].shape, dtype=dtype)
    for target, *sources in zip(_blocks(result), *map(_blocks, tensors), strict=True):
        target.copy_(formula(*(source.double() for source in sources)).float())
    return result


def _blocks(tensor: Tensor) -> Sequence[Tensor]:
    blocks: tuple[Tensor, ...] = tensor.view(-1).split(BLOCK)
    return blocks
