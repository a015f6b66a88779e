"""Two systems on the same questions: differences, tests, and how small a difference could have been seen.

The difficulty of a question is in both of its scores and cancels in their difference, which is what makes small gains
visible: on 30 questions with 32 answers each, a true gain of 5 points is found 84 times in 100, and unpaired never.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reasonlab.evaluate.distributions import fair_coin_tails, student_t_quantile, student_t_tails
from reasonlab.evaluate.intervals import Floats, Interval, mean_interval, paired, standard_error, vector
from reasonlab.keys import key

_ENUMERATED = 16  # differences of which all 2^n sign patterns are tried
_FINEST_LATTICE = 256  # differences of question means are multiples of 1/k: k up to this is recognised
_LATTICE_WORK = 50_000_000  # additions worth spending on an exact answer: a fraction of a second


def paired_difference(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> tuple[Interval, float]:
    """How much higher b is than a on the same questions, and the two-sided p-value of the paired t test.

    With d_i = b_i − a_i (question means, same order) the interval is mean(d) ± t_{n−1} s_d/√n, and
    p = P(|T_{n−1}| ≥ |mean(d)| √n/s_d).

    Where all d_i are equal the interval has no width; p is then 1 for no difference and 0 for any other. Neither
    says anything about further questions: `varies` tells the case, `accuracy_difference` has an interval for it.
    """
    before, after = paired(a, b)
    d = after - before
    interval = mean_interval(d, level)
    if d.size == 1 or interval.estimate == 0:
        return interval, 1.0
    error = standard_error(d)
    return interval, student_t_tails(interval.estimate / error, d.size - 1) if error > 0 else 0.0


def accuracy_difference(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> Interval:
    """The interval of `paired_difference` for scores between 0 and 1, with a width also where all d_i are equal.

    If a question differs from the common d with chance π, none of n does with chance (1 − π)^n, and that is less than
    1 − level for every π > u = 1 − (1 − level)^{1/n}. The others lie between −1 and 1, so the true difference is in

        (1 − u) d ± u

    which for d = 0 is ± u, about ± 3/n at 95 %.
    """
    before, after = paired(a, b)
    d = after - before
    if d.size == 1 or varies(d):
        return mean_interval(d, level)
    mean, u = float(d.mean()), 1 - (1 - level) ** (1 / d.size)
    return Interval(mean, (1 - u) * mean - u, (1 - u) * mean + u, level)


def varies(values: ArrayLike) -> bool:
    """Whether there is any scatter. Means of the same numbers may differ in the last bits; that is none."""
    x = vector(values)
    return bool(np.ptp(x) > 1e-9 * (1 + np.abs(x).max()))


def sign_flip(differences: ArrayLike, seed: int = 0, resamples: int = 20_000) -> float:
    """Two-sided p-value of the sign-flip permutation test that the d_i are as likely to be −d_i.

    p = P(|Σ ± d_i| ≥ |Σ d_i|) over all 2^n patterns of signs: exact where the d_i are multiples of some 1/k, as
    differences of accuracies are (the distribution of the sum is built up one question at a time), and for few
    questions; otherwise from keyed random patterns, the observed one counted among them.
    """
    d = vector(differences)
    d = d[d != 0]
    if not d.size:
        return 1.0
    whole = _on_lattice(d)
    if whole is not None and d.size * int(np.abs(whole).sum()) <= _LATTICE_WORK:
        return _lattice_tails(whole)
    observed = abs(d.sum()) * (1 - 1e-12)  # the observed pattern itself must count, whatever the order of summation
    if d.size <= _ENUMERATED:
        sums = np.zeros(1)
        for value in d:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= observed).mean())
    generator = np.random.default_rng(key(seed, "sign_flip"))
    beyond = 0
    for part in np.array_split(np.arange(resamples), 20):
        signs = 1.0 - 2.0 * generator.integers(2, size=(len(part), d.size))
        beyond += int((np.abs(signs @ d) >= observed).sum())
    return (1 + beyond) / (1 + resamples)


def _on_lattice(d: Floats) -> NDArray[np.int64] | None:
    """d as whole numbers of the coarsest unit 1/k that fits all of them; None if none does."""
    for k in range(1, _FINEST_LATTICE + 1):
        whole = np.rint(k * d)
        if np.abs(k * d - whole).max() < 1e-9 * k:
            return whole.astype(np.int64)
    return None


def _lattice_tails(whole: NDArray[np.int64]) -> float:
    """P(|Σ ± w_i| ≥ |Σ w_i|). The flipped sum is 2 S − T with S the sum of a random subset and T = Σ |w_i|."""
    sizes = np.abs(whole)
    total = int(sizes.sum())
    chance = np.zeros(total + 1)
    chance[0] = 1.0
    for size in sizes:
        chance *= 0.5
        chance[size:] += chance[: total + 1 - size].copy()
    beyond = np.abs(2 * np.arange(total + 1) - total) >= abs(int(whole.sum()))
    return min(1.0, float(chance[beyond].sum()))


def mcnemar(gained: int, lost: int) -> float:
    """McNemar's exact test for one answer a question: without a difference, gains and losses are fair coin tosses."""
    return fair_coin_tails(gained, lost)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for looking at several benchmarks at once: p_(i) ← max_{j ≤ i} min(1, (m − j + 1) p_(j))."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def minimum_detectable_effect(differences: ArrayLike, power: float = 0.8, alpha: float = 0.05) -> float:
    """The smallest true difference that a paired t test with this scatter would find with the given power:

    (t_{n−1, 1 − α/2} + t_{n−1, power}) s_d/√n
    """
    d = vector(differences)
    if d.size == 1:
        return float("inf")
    dof = d.size - 1
    return (student_t_quantile(1 - alpha / 2, dof) + student_t_quantile(power, dof)) * standard_error(d)
