"""Error bars for small benchmarks: the question, not the answer, is the unit that is drawn at random.

Sampling k answers to each of n questions gives n independent observations, the question means, not n·k:
pooling the answers makes intervals several times too narrow. So every function here works on questions;
comparisons are paired by question; and the intervals of scores stay inside [0, 1] and keep a width at 0 % and
100 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    """The mean score of a benchmark, with the interval for "questions like these".

    `per_question[i]` holds the grades (0 or 1) of question i's answers; their number may differ by question.
    With question means x_i, m = mean(x) and SE² = Σ (x_i − m)² / (n (n − 1)), the observed scatter is that of

        n_eff = m (1 − m) / SE²

    independent yes/no trials, and the interval is Wilson's for n_eff trials. There are never more trials than
    answers, which also settles the case SE = 0; and at m = 0 or 1 the scatter says nothing, so n_eff = n.
    """
    rows = [np.asarray(row, dtype=np.float64) for row in per_question]
    if not rows or not all(row.size for row in rows):
        raise ValueError("a score needs at least one question, and at least one answer to each")
    means = np.array([row.mean() for row in rows])
    n, mean = len(means), float(means.mean())
    if n == 1 or mean in (0.0, 1.0):
        return wilson(mean, n, level)
    answers = sum(row.size for row in rows)
    squared_error = float(means.var(ddof=1)) / n
    trials = mean * (1 - mean)
    return wilson(mean, trials / max(squared_error, trials / answers), level)


def wilson(successes_mean: float, n: float, level: float = 0.95) -> Interval:
    """Wilson's interval for a proportion m seen in n independent trials (n need not be whole):

    (m + z²/2n ± z √(m (1 − m)/n + z²/4n²)) / (1 + z²/n),   z = normal quantile of (1 + level)/2
    """
    m = successes_mean
    z2 = normal_quantile((1 + level) / 2) ** 2
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
    x = _vector(values)
    mean, error = float(x.mean()), _standard_error(x)
    half = student_t_quantile((1 + level) / 2, x.size - 1) * error if x.size > 1 else math.inf
    return Interval(mean, mean - half, mean + half, level)


def paired_difference(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> tuple[Interval, float]:
    """How much higher b is than a on the same questions, and the two-sided p-value of the paired t test.

    With d_i = b_i − a_i (question means, same order) the interval is mean(d) ± t_{n−1} s_d/√n, and
    p = P(|T_{n−1}| ≥ |mean(d)| √n/s_d).

    The difficulty of a question is in both a_i and b_i and cancels, which is what makes small gains visible.
    Where all d_i are equal the interval has no width; p is then 1 for no difference and 0 for any other.
    """
    before, after = _paired(a, b)
    d = after - before
    interval = mean_interval(d, level)
    if d.size == 1 or interval.estimate == 0:
        return interval, 1.0
    error = _standard_error(d)
    return interval, _t_two_sided(interval.estimate / error, d.size - 1) if error > 0 else 0.0


def ratio_interval(a: ArrayLike, b: ArrayLike, seed: int, level: float = 0.95, resamples: int = 4000) -> Interval:
    """mean(b) / mean(a) for positive values of the same questions, for instance mean lengths.

    Percentile bootstrap: draw n questions with replacement, the same for a and b, and take the ratio of the
    means; the interval runs between the (1 ∓ level)/2 quantiles of the resampled ratios.
    """
    below, above = _paired(a, b)
    if not (below > 0).all():
        raise ValueError("mean(b) / mean(a) needs positive values in a")
    generator = np.random.default_rng(key(seed, "ratio_interval"))
    ratios = np.empty(resamples)
    for i in range(resamples):
        drawn = generator.integers(below.size, size=below.size)
        ratios[i] = above[drawn].sum() / below[drawn].sum()
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(above.sum() / below.sum()), float(low), float(high), level)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k answers is right, estimated without bias from c right ones among n:

    pass@k = 1 − C(n − c, k) / C(n, k)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def normal_quantile(p: float) -> float:
    """z with P(Z <= z) = p for a standard normal Z."""
    return NormalDist().inv_cdf(p)


@lru_cache(maxsize=1024)
def student_t_quantile(p: float, dof: float) -> float:
    """t with P(T <= t) = p for Student's T, found by bisection on the two-sided tail; 0 < p < 1, dof > 0."""
    if not (0 < p < 1 and dof > 0):
        raise ValueError(f"no Student t quantile for p={p}, dof={dof}")
    tail = 2 * min(p, 1 - p)
    low, high = 0.0, 1.0
    while _t_two_sided(high, dof) > tail:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _t_two_sided(middle, dof) > tail else (low, middle)
    return math.copysign(low, p - 0.5)


def _t_two_sided(t: float, dof: float) -> float:
    """P(|T| >= |t|) = I_x(dof/2, 1/2) with x = dof / (dof + t²)."""
    total = dof + t * t
    return _incomplete_beta(dof / total, t * t / total, dof / 2, 0.5)


def _incomplete_beta(x: float, y: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b); y = 1 − x is given apart so that no digits are lost.

    I_x(a, b) = x^a y^b / (a B(a, b)) / (1 + d_1/(1 + d_2/(1 + …))), which converges fast for
    x < (a + 1)/(a + b + 2); beyond that, I_x(a, b) = 1 − I_y(b, a).
    """
    if x == 0 or y == 0:
        return float(y == 0)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(y, x, b, a)
    log_front = a * math.log(x) + b * math.log(y) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_front) / (a * _beta_fraction(x, a, b))


def _beta_fraction(x: float, a: float, b: float) -> float:
    """1 + d_1/(1 + d_2/(1 + …)) by Lentz's method, until a further term changes nothing, where

    d_2m = m (b − m) x / ((a + 2m − 1)(a + 2m)),   d_2m+1 = −(a + m)(a + b + m) x / ((a + 2m)(a + 2m + 1))
    """
    value = upper = 1.0
    lower = 0.0
    for j in range(1, 10_000):
        m = j // 2
        if j % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / (1 + d * lower)
        upper = 1 + d / upper
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            return value
    raise ArithmeticError(f"the incomplete beta function did not converge at x={x}, a={a}, b={b}")


def _standard_error(x: Floats) -> float:
    return float(x.std(ddof=1)) / math.sqrt(x.size) if x.size > 1 else math.inf


def _paired(a: ArrayLike, b: ArrayLike) -> tuple[Floats, Floats]:
    x, y = _vector(a), _vector(b)
    if x.shape != y.shape:
        raise ValueError(f"both sides need the same questions, not {x.size} and {y.size}")
    return x, y


def _vector(values: ArrayLike) -> Floats:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"one value per question is needed, not an array of shape {x.shape}")
    return x
