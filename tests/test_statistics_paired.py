"""Paired tests against enumeration and scipy; their size and power against the table they were chosen by."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from reasonlab.evaluate.statistics import (
    accuracy_difference,
    holm,
    mcnemar,
    minimum_detectable_effect,
    paired_difference,
    sign_flip,
    varies,
)


def flips_written_out(d: NDArray[np.float64]) -> float:
    sums = [abs(np.dot(signs, d)) for signs in itertools.product([1, -1], repeat=len(d))]
    return float(np.mean(np.array(sums) >= abs(d.sum()) - 1e-9))


@pytest.mark.parametrize("k", [1, 2, 8, 64, 0])
def test_sign_flip_is_exact_for_few_questions(k: int) -> None:
    """Multiples of 1/k, and (k = 0) numbers on no lattice."""
    generator = np.random.default_rng(k)
    for n in (1, 2, 5, 11):
        d = generator.integers(-k, k + 1, size=n) / k if k else generator.normal(0.3, 1, size=n)
        assert sign_flip(d) == pytest.approx(flips_written_out(d), abs=1e-12)


def test_sign_flip_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    d = np.random.default_rng(0).normal(0.4, 1, size=10)
    theirs = stats.permutation_test((d,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip(d) == pytest.approx(theirs.pvalue, abs=1e-12)


def test_random_flips_agree_with_exact_ones_and_are_keyed() -> None:
    d = np.random.default_rng(1).integers(-8, 11, size=40) / 8
    exact, drawn = sign_flip(d), sign_flip(d * math.pi)
    assert drawn == pytest.approx(exact, abs=0.01)
    assert drawn == sign_flip(d * math.pi)
    assert drawn != sign_flip(d * math.pi, seed=1)
    assert sign_flip(np.full(40, math.pi)) == pytest.approx(1 / 20_001)  # never zero


def test_with_one_answer_a_question_sign_flip_is_mcnemar() -> None:
    for gained, lost, same in [(0, 0, 5), (3, 0, 5), (9, 2, 100), (150, 121, 1000)]:
        d = np.repeat([1.0, -1.0, 0.0], [gained, lost, same])
        assert sign_flip(d) == pytest.approx(mcnemar(gained, lost), abs=1e-9)


def test_mcnemar_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for gained, lost in [(0, 1), (1, 1), (7, 2), (2, 7), (40, 22), (900, 1000)]:
        assert mcnemar(gained, lost) == pytest.approx(stats.binomtest(gained, gained + lost).pvalue, rel=1e-9)


@pytest.mark.parametrize("common", [0.0, 0.25, -1.0])
def test_equal_differences_exclude_only_what_would_rarely_give_them(common: float) -> None:
    """At the ends of the interval, a share u of questions at −1 or 1 goes unseen with chance 5 %."""
    n = 12
    before = np.linspace(0.25, 0.5, n) if common >= 0 else np.ones(n)
    found = accuracy_difference(before, before + common)  # equal but for the last bits
    u = 1 - 0.05 ** (1 / n)
    assert (found.low, found.high) == pytest.approx(((1 - u) * common - u, (1 - u) * common + u))
    assert found.estimate == pytest.approx(common)
    assert -1 <= found.low < found.high <= 1
    other = np.where(np.arange(n) == 3, before, before + common + 0.125)
    assert accuracy_difference(before, other) == paired_difference(before, other)[0]
    assert not varies(np.array([0.1 + 0.2, 0.3]))
    assert varies(np.array([0.25, 0.26]))


def test_holm_is_closed_testing_with_bonferroni() -> None:
    """p of one hypothesis is the largest |S| min(p in S) over all sets S that contain it."""
    generator = np.random.default_rng(2)
    for m in range(1, 6):
        p = generator.random(m) ** 3
        sets = [s for size in range(1, m + 1) for s in itertools.combinations(range(m), size)]
        closed = [max(min(1.0, len(s) * p[list(s)].min()) for s in sets if i in s) for i in range(m)]
        assert holm(list(p)) == pytest.approx(closed)
    assert holm([]) == []


def logit_shift(chances: NDArray[np.float64], shift: float) -> NDArray[np.float64]:
    odds = chances / (1 - chances) * math.exp(shift)
    return odds / (1 + odds)


def shift_worth(gain: float) -> float:
    """The shift on the logit scale that raises the mean of Beta(.35, .65) by so much."""
    chances = np.random.default_rng(9).beta(0.35, 0.65, size=200_000).clip(1e-9, 1 - 1e-9)
    low, high = 0.0, 3.0
    for _ in range(30):
        middle = (low + high) / 2
        is_low = (logit_shift(chances, middle) - chances).mean() < gain
        low, high = (middle, high) if is_low else (low, middle)
    return low


@pytest.mark.parametrize(
    ("n", "k", "gain", "power"),
    [
        (30, 1, 0.05, 0.08),
        (30, 8, 0.05, 0.34),
        (30, 32, 0.05, 0.84),
        (30, 64, 0.05, 0.99),
        (30, 64, 0.02, 0.40),
        (500, 4, 0.02, 0.46),
        (1319, 1, 0.01, 0.11),
    ],
)
def test_size_and_power_of_the_paired_t_test(n: int, k: int, gain: float, power: float) -> None:
    """Size 4–6 % without a difference; power as planned for. AIME-like questions, k answers from either side."""
    generator = np.random.default_rng(n + k)
    benchmarks = 4000 if n < 100 else 2500
    chances = generator.beta(0.35, 0.65, size=(benchmarks, n)).clip(1e-9, 1 - 1e-9)
    a, same = (generator.binomial(k, chances) / k for _ in range(2))
    better = generator.binomial(k, logit_shift(chances, shift_worth(gain))) / k

    def found(b: NDArray[np.float64]) -> float:
        return float(np.mean([paired_difference(x, y)[1] < 0.05 for x, y in zip(a, b, strict=True)]))

    assert 0.04 <= found(same) <= 0.06
    assert found(better) == pytest.approx(power, abs=0.04)


def test_sign_flip_keeps_its_size_and_nearly_the_power_of_t() -> None:
    """It is exact, so never above 5 %; with 32 answers a question hardly below."""
    generator = np.random.default_rng(3)
    chances = generator.beta(0.35, 0.65, size=(2000, 30)).clip(1e-9, 1 - 1e-9)
    a, same = (generator.binomial(32, chances) / 32 for _ in range(2))
    better = generator.binomial(32, logit_shift(chances, shift_worth(0.05))) / 32
    size, power = (np.mean([sign_flip(d) <= 0.05 for d in b - a]) for b in (same, better))
    assert 0.04 <= size <= 0.06
    assert power == pytest.approx(0.84, abs=0.04)


def test_the_minimum_detectable_effect_is_found_four_times_in_five() -> None:
    """Shift normal differences by the effect their true scatter makes detectable."""
    generator = np.random.default_rng(4)
    for n in (8, 30, 200):
        pattern = generator.normal(size=n)
        unit = (pattern - pattern.mean()) / pattern.std(ddof=1)
        effect = minimum_detectable_effect(unit)
        d = generator.normal(effect, 1, size=(3000, n))
        found = np.mean([paired_difference(np.zeros(n), row)[1] < 0.05 for row in d])
        assert found == pytest.approx(0.80, abs=0.03)
    assert minimum_detectable_effect([0.3]) == math.inf
