"""Lengths, censoring, costs, and the joint region of accuracy and length."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reasonlab.evaluate.statistics import dominance, joint, lengths, tokens_per_correct, wilson


def test_lengths_by_hand() -> None:
    """Two questions; the second has a wrong answer that was cut off and one that could not be graded."""
    found = lengths(
        correct=[[1, 0], [1, 0, math.nan, 1]],
        tokens=[[10, 30], [20, 160, 40, 60]],
        cut=[[0, 0], [0, 1, 0, 0]],
    )
    assert found.every.tokens.estimate == pytest.approx((20 + 70) / 2)
    assert found.every.answers == 6
    assert found.every.censored == pytest.approx(1 / 6)
    assert found.correct is not None
    assert found.wrong is not None
    # Questions weigh by their share of such answers: (10/2 + 80/4) / (1/2 + 2/4), (30/2 + 160/4) / (1/2 + 1/4).
    assert found.correct.tokens.estimate == pytest.approx(25)
    assert found.wrong.tokens.estimate == pytest.approx(55 / 0.75)
    assert (found.correct.is_lower_bound, found.wrong.is_lower_bound) == (False, True)
    assert str(found.wrong).startswith("≥ 73.3")
    assert not str(found.correct).startswith("≥")
    assert found.per_correct.estimate == pytest.approx(90 / (1 / 2 + 2 / 3))


def test_kinds_that_do_not_occur_are_none() -> None:
    found = lengths([[1, 1], [1, math.nan]], [[5, 5], [5, 7]], [[0, 0], [0, 0]])
    assert found.wrong is None
    assert found.correct is not None
    assert found.correct.answers == 3
    with pytest.raises(ValueError, match="every answer needs"):
        lengths([[1, 1]], [[5]], [[0, 0]])


def test_the_interval_of_a_length_by_verdict_covers() -> None:
    """Hard questions are answered longer and less often right, so the weights are random too."""
    generator = np.random.default_rng(0)

    def benchmark(n: int) -> tuple[np.ndarray, np.ndarray]:
        chance = generator.beta(1, 1, size=(n, 1))
        return generator.random((n, 4)) < chance, generator.gamma(4, 100 * (1.5 - chance), size=(n, 4))

    right, tokens = benchmark(200_000)
    truth = tokens[right].mean()
    held = 0
    for _ in range(1000):
        right, tokens = benchmark(50)
        found = lengths(right.astype(float), tokens, np.zeros((50, 4))).correct
        assert found is not None
        held += found.tokens.low <= truth <= found.tokens.high
    assert 0.925 <= held / 1000 <= 0.97


def test_the_interval_of_tokens_per_correct_answer_covers() -> None:
    generator = np.random.default_rng(1)
    held = {0.35: 0, 0.15: 0}
    for mean in held:
        for _ in range(1500):
            chance = generator.beta(4 * mean, 4 * (1 - mean), size=60)
            right = generator.binomial(4, chance) / 4
            tokens = generator.gamma(5, 60 * (1.5 - chance))
            # E tokens = 300 (1.5 − E chance), so the cost of a correct answer is that over E chance.
            cost = tokens_per_correct(right, tokens)
            held[mean] += cost.low <= 300 * (1.5 - mean) / mean <= cost.high
    assert all(0.925 <= count / 1500 <= 0.975 for count in held.values())


def test_nothing_correct_still_has_a_least_cost() -> None:
    cost = tokens_per_correct(np.zeros(30), np.full(30, 200.0))
    assert cost.estimate == cost.high == math.inf
    assert cost.low == pytest.approx(200 / wilson(0.0, 30).high)


def test_the_joint_ellipse_covers_both_means_at_once() -> None:
    generator = np.random.default_rng(2)
    n, benchmarks = 30, 3000
    chance = generator.beta(0.35, 0.65, size=(benchmarks, n))
    right = generator.binomial(8, chance) / 8
    tokens = generator.gamma(5, 60 * (1.5 - chance))
    regions = [joint(x, y) for x, y in zip(right, tokens, strict=True)]
    held = np.mean([region.contains(0.35, 300 * 1.15) for region in regions])
    assert 0.92 <= held <= 0.965
    assert all(region.covariance[0][1] < 0 for region in regions[:20])  # right answers are short here


def test_the_ellipse_is_the_border_of_the_region() -> None:
    generator = np.random.default_rng(3)
    region = joint(generator.random(20), generator.gamma(3, 100, size=20))
    around = region.ellipse(level=0.9, points=50)
    centre = np.array([region.accuracy, region.tokens])
    assert around[0] == pytest.approx(around[-1])
    assert all(region.contains(*(centre + 0.999 * (point - centre)), level=0.9) for point in around)
    assert not any(region.contains(*(centre + 1.001 * (point - centre)), level=0.9) for point in around)
    with pytest.raises(ValueError, match="three questions"):
        joint([0.0, 1.0], [1.0, 2.0])


def test_dominance_counts_ties_as_no_loss_but_needs_one_gain() -> None:
    right, tokens = np.array([1.0, 0.0, 1.0, 1.0]), np.array([10.0, 20.0, 30.0, 40.0])
    same = dominance(right, tokens, right, tokens)
    assert (same.a, same.b, same.neither) == (0.0, 0.0, 1.0)
    shorter = dominance(right, tokens, right, tokens - 1)
    assert (shorter.a, shorter.b) == (0.0, 1.0)
    traded = dominance(right, tokens, right - 0.1, tokens - 1)
    assert traded.neither == 1.0


def test_dominance_is_the_chance_of_a_quadrant() -> None:
    """Two independent normal changes with means half and one standard error: P = Φ(0.5) Φ(1)."""
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(4)
    noise = generator.normal(size=(2, 400))
    noise = np.linalg.qr((noise - noise.mean(axis=1, keepdims=True)).T)[0].T * math.sqrt(400)
    zero = np.zeros(400)
    found = dominance(zero, zero, noise[0] + 0.5 / 20, noise[1] - 1 / 20, resamples=20_000)
    assert found.b == pytest.approx(stats.norm.cdf(0.5) * stats.norm.cdf(1), abs=0.015)
    assert found.a == pytest.approx(stats.norm.cdf(-0.5) * stats.norm.cdf(-1), abs=0.015)
    assert found == dominance(zero, zero, noise[0] + 0.5 / 20, noise[1] - 1 / 20, resamples=20_000)
