"""Intervals around one benchmark's numbers: scores, means, ratios.

The unit is the question: its answers are averaged first. "Questions like these" is the default estimand (the questions
are a draw); `same_questions_interval` is for the other one, "this benchmark, asked again".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reasonlab.evaluate.distributions import normal_quantile, student_t_quantile
from reasonlab.keys import key

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the confidence interval around it."""

    estimate: float
    low: float
    high: float
    level: float = 0.95


def score_interval(per_question: Iterable[ArrayLike], level: float = 0.95) -> Interval:
    """avg@k: the mean score of a benchmark, with the interval for "questions like these".

    `per_question[i]` holds the grades (0 or 1) of question i's answers; their number may differ by question.
    With question means x_i, m = mean(x) and SE² = Σ (x_i − m)² / (n (n − 1)), the observed scatter is that of

        n_eff = m (1 − m) / SE²

    independent yes/no trials, and the interval is Wilson's for n_eff trials. There are never more trials than
    answers, which also settles the case SE = 0; and at m = 0 or 1 the scatter says nothing, so n_eff = n.
    """
    rows = _rows(per_question)
    means = np.array([row.mean() for row in rows])
    n, mean = len(means), float(means.mean())
    if n == 1 or mean in (0.0, 1.0):
        return wilson(mean, n, level)
    answers = sum(row.size for row in rows)
    squared_error = float(means.var(ddof=1)) / n
    trials = mean * (1 - mean)
    return wilson(mean, trials / max(squared_error, trials / answers), level)


def same_questions_interval(per_question: Iterable[ArrayLike], level: float = 0.95) -> Interval:
    """The score these very questions would have if each were asked infinitely often: only the answers are a draw.

    SE² = Σ s_i²/k_i / n², with s_i² the variance of question i's answers (k_i − 1 below the line), then Wilson's
    interval for m (1 − m) / SE² trials. It needs two answers to every question.
    """
    rows = _rows(per_question)
    if any(row.size < 2 for row in rows):
        raise ValueError("the scatter of a question's answers needs at least two of them")
    mean = float(np.mean([row.mean() for row in rows]))
    answers = sum(row.size for row in rows)
    if mean in (0.0, 1.0):
        return wilson(mean, answers, level)
    squared_error = sum(float(row.var(ddof=1)) / row.size for row in rows) / len(rows) ** 2
    trials = mean * (1 - mean)
    # Questions that are always right or always wrong have no scatter, so here trials may outnumber answers; where
    # none has any, as many trials as answers are granted.
    return wilson(mean, trials / squared_error if squared_error > 0 else answers, level)


def wilson(successes_mean: float, n: float, level: float = 0.95, quantile: float | None = None) -> Interval:
    """Wilson's interval for a proportion m seen in n independent trials (n need not be whole):

    (m + z²/2n ± z √(m (1 − m)/n + z²/4n²)) / (1 + z²/n),   z = normal quantile of (1 + level)/2

    or the `quantile` given, where n is itself estimated from few observations and the normal one is too small.
    """
    m = successes_mean
    z2 = (normal_quantile((1 + level) / 2) if quantile is None else quantile) ** 2
    centre = m + z2 / (2 * n)
    half = math.sqrt(z2 * (m * (1 - m) / n + z2 / (4 * n * n)))
    scale = 1 + z2 / n
    # At m = 0 and m = 1 one end is the estimate itself; rounding must not push it across.
    low, high = (centre - half) / scale, (centre + half) / scale
    return Interval(m, max(0.0, min(m, low)), min(1.0, max(m, high)), level)


def mean_interval(values: ArrayLike, level: float = 0.95) -> Interval:
    """The mean of one value per question, such as its mean answer length: m ± t_{n−1} s/√n.

    A single question says nothing about the others: its interval is infinite.
    """
    x = vector(values)
    mean, error = float(x.mean()), standard_error(x)
    half = student_t_quantile((1 + level) / 2, x.size - 1) * error if x.size > 1 else math.inf
    return Interval(mean, mean - half, mean + half, level)


def ratio_interval(a: ArrayLike, b: ArrayLike, seed: int, level: float = 0.95, resamples: int = 4000) -> Interval:
    """mean(b) / mean(a) for positive values of the same questions, for instance mean lengths.

    Percentile bootstrap: draw n questions with replacement, the same for a and b, and take the ratio of the
    means; the interval runs between the (1 ∓ level)/2 quantiles of the resampled ratios.
    """
    below, above = paired(a, b)
    if not (below > 0).all():
        raise ValueError("mean(b) / mean(a) needs positive values in a")
    means = resampled_means(np.stack([below, above], axis=1), key(seed, "ratio_interval"), resamples)
    low, high = np.quantile(means[:, 1] / means[:, 0], [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(above.sum() / below.sum()), float(low), float(high), level)


def length_text(tokens: Interval) -> str:
    """A mean length and its interval, as they are printed."""
    return f"{tokens.estimate:,.1f}{length_brackets(tokens)}" if math.isfinite(tokens.estimate) else "unknown"


def length_brackets(tokens: Interval) -> str:
    """Lengths are not negative, so the interval ends at 0; an infinite one says nothing and is left out."""
    known = math.isfinite(tokens.high - tokens.low)
    return f" [{max(0.0, tokens.low):,.1f}, {tokens.high:,.1f}]" if known else ""


def resampled_means(values: Floats, seed: int, resamples: int = 4000) -> Floats:
    """Column means of `values` [question, column], for questions drawn with replacement: [resample, column]."""
    n = len(values)
    generator = np.random.default_rng(seed)
    means = []
    # In parts, so that thousands of questions do not need a table of a hundred megabytes.
    for part in np.array_split(np.arange(resamples), max(1, resamples * n // 1_000_000)):
        rows = len(part)
        drawn = generator.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
        times = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
        means.append(times @ values / n)
    return np.concatenate(means)


def standard_error(x: Floats) -> float:
    return float(x.std(ddof=1)) / math.sqrt(x.size) if x.size > 1 else math.inf


def paired(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    x, y = vector(a), vector(b)
    if x.shape != y.shape:
        raise ValueError(f"both sides need the same questions, not {x.size} and {y.size}")
    return x, y


def vector(values: ArrayLike) -> Floats:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"one value per question is needed, not an array of shape {x.shape}")
    return x


def _rows(per_question: Iterable[ArrayLike]) -> list[Floats]:
    rows = [np.asarray(row, dtype=np.float64) for row in per_question]
    if not rows or not all(row.size for row in rows):
        raise ValueError("a score needs at least one question, and at least one answer to each")
    return rows
