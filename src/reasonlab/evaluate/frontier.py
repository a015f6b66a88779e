"""Accuracy and length together: one draw of questions moves both, so their uncertainty is a region, not two bars."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from reasonlab.evaluate.intervals import Floats, paired, resampled_means
from reasonlab.keys import key


@dataclass(frozen=True, slots=True)
class Joint:
    """Mean accuracy and mean tokens of the same questions, with the covariance of the two means."""

    accuracy: float
    tokens: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    questions: int

    def contains(self, accuracy: float, tokens: float, level: float = 0.95) -> bool:
        """Whether a true point would be inside the ellipse, which covers it in `level` of all draws of questions."""
        away = np.array([accuracy - self.accuracy, tokens - self.tokens])
        return bool(away @ np.linalg.solve(np.array(self.covariance), away) <= self._squared_radius(level))

    def ellipse(self, level: float = 0.95, points: int = 120) -> Floats:
        """The confidence ellipse as points (accuracy, tokens) around it, the last equal to the first."""
        angles = np.linspace(0, 2 * np.pi, points)
        circle = np.stack([np.cos(angles), np.sin(angles)])
        values, axes = np.linalg.eigh(np.array(self.covariance))
        scaled = axes @ (np.sqrt(np.maximum(values, 0))[:, None] * circle)
        around: Floats = np.array([self.accuracy, self.tokens]) + np.sqrt(self._squared_radius(level)) * scaled.T
        return around

    def _squared_radius(self, level: float) -> float:
        """Hotelling's T² quantile, 2 (n − 1)/(n − 2) · F_{2, n−2}, which for two dimensions has a closed form."""
        n = self.questions
        return float((n - 1) * ((1 - level) ** (-2 / (n - 2)) - 1))


@dataclass(frozen=True, slots=True)
class Dominance:
    """How often, over draws of questions, one side is at least as accurate and no longer, and better in one."""

    a: float
    b: float

    @property
    def neither(self) -> float:
        return max(0.0, 1.0 - self.a - self.b)


def joint(accuracy: ArrayLike, tokens: ArrayLike) -> Joint:
    """One point of an accuracy–length plot, from question means; at least three questions.

    The covariance is S/n, with S that of the question means: what a bootstrap over questions converges to, times
    n/(n − 1), without its noise.
    """
    right, length = paired(accuracy, tokens)
    n = right.size
    if n < 3:
        raise ValueError(f"an ellipse needs at least three questions, not {n}")
    (aa, at), (_, tt) = np.cov(right, length) / n
    return Joint(float(right.mean()), float(length.mean()), ((float(aa), float(at)), (float(at), float(tt))), n)


def dominance(
    accuracy_a: ArrayLike,
    tokens_a: ArrayLike,
    accuracy_b: ArrayLike,
    tokens_b: ArrayLike,
    seed: int = 0,
    resamples: int = 4000,
) -> Dominance:
    """Bootstrap over questions, the same draw for both sides and both measures; the four are question means."""
    right = np.subtract(*paired(accuracy_b, accuracy_a))
    length = np.subtract(*paired(tokens_b, tokens_a))
    means = resampled_means(np.stack(paired(right, length), axis=1), key(seed, "dominance"), resamples)
    # Sums of the same numbers in another order may differ in the last bits; such differences are none.
    size = 1e-9 * (1 + np.abs(np.stack([right, length], axis=1)).max(axis=0))
    gain, growth = np.where(np.abs(means) < size, 0.0, means).T
    differs = (gain != 0) | (growth != 0)
    return Dominance(
        a=float(((gain <= 0) & (growth >= 0) & differs).mean()),
        b=float(((gain >= 0) & (growth <= 0) & differs).mean()),
    )
