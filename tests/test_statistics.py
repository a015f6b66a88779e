"""The statistics against scipy, against brute force, and against the coverage and size they promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from reasonlab.evaluate.statistics import (
    Interval,
    mean_interval,
    normal_quantile,
    paired_difference,
    pass_at_k,
    ratio_interval,
    same_questions_interval,
    score_interval,
    student_t_quantile,
    wilson,
)

LEVELS = [1e-6, 0.005, 0.025, 0.2, 0.4999, 0.5, 0.6, 0.9, 0.975, 0.995, 0.99999]


@pytest.mark.parametrize("dof", [1, 2, 3, 4.5, 10, 29, 30, 499, 1318, 100_000])
def test_student_t_quantile_agrees_with_scipy(dof: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    for p in LEVELS:
        assert student_t_quantile(p, dof) == pytest.approx(stats.t.ppf(p, dof), rel=1e-8, abs=1e-8)


def test_normal_quantile_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for p in LEVELS:
        assert normal_quantile(p) == pytest.approx(stats.norm.ppf(p), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize(("p", "dof"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_student_t_quantile_refuses_what_does_not_exist(p: float, dof: float) -> None:
    with pytest.raises(ValueError, match="no Student t quantile"):
        student_t_quantile(p, dof)


@pytest.mark.parametrize("k", [8, 64])
def test_score_interval_covers_where_pooling_does_not(k: int) -> None:
    """AIME-like questions, mostly right or mostly wrong: Beta(.35, .65), 30 of them, 2,000 benchmarks."""
    generator = np.random.default_rng(k)
    n, truth, benchmarks = 30, 0.35, 2000
    chances = generator.beta(0.35, 0.65, size=(benchmarks, n))
    grades = generator.random((benchmarks, n, k)) < chances[:, :, None]

    def coverage(intervals: list[Interval]) -> float:
        return float(np.mean([interval.low <= truth <= interval.high for interval in intervals]))

    assert 0.93 <= coverage([score_interval(benchmark) for benchmark in grades]) <= 0.97
    assert coverage([wilson(benchmark.mean(), n * k) for benchmark in grades]) < 0.7


@pytest.mark.parametrize("k", [8, 64])
def test_same_questions_interval_covers_this_benchmark_and_is_narrow(k: int) -> None:
    """The other estimand: the score of these 30 questions, asked for ever. Target and questions change every time."""
    generator = np.random.default_rng(k)
    chances = generator.beta(0.35, 0.65, size=(2000, 30))
    grades = generator.random((2000, 30, k)) < chances[:, :, None]
    intervals = [same_questions_interval(benchmark) for benchmark in grades]
    held = [i.low <= truth <= i.high for i, truth in zip(intervals, chances.mean(axis=1), strict=True)]
    assert 0.93 <= np.mean(held) <= 0.97
    if k == 64:
        assert np.mean([i.high - i.low for i in intervals]) / 2 == pytest.approx(0.015, abs=0.002)


def test_same_questions_interval_at_the_ends_and_without_scatter() -> None:
    assert same_questions_interval(np.ones((30, 4))) == wilson(1.0, 120)
    assert same_questions_interval([[1, 1], [0, 0]]) == wilson(0.5, 4)
    with pytest.raises(ValueError, match="at least two"):
        same_questions_interval([[1], [0, 1]])


def test_score_interval_by_hand() -> None:
    # Question means 1, 1/2, 0, 1/2: m = 1/2, SE² = (1/2)/(4·3) = 1/24, n_eff = (1/4)/(1/24) = 6.
    by_question = [[1, 1], [1, 0], [0, 0], [0, 1]]
    interval, expected = score_interval(by_question), wilson(0.5, 6)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


def test_score_interval_takes_questions_with_different_numbers_of_answers() -> None:
    interval = score_interval([[1], [0, 0, 0, 1], [1, 1]])
    assert interval.estimate == pytest.approx((1 + 0.25 + 1) / 3)
    assert 0 < interval.low < interval.estimate < interval.high < 1


@pytest.mark.parametrize("grade", [0, 1])
def test_score_interval_keeps_a_width_at_the_ends(grade: int) -> None:
    interval = score_interval(np.full((30, 64), grade))
    assert interval == wilson(grade, 30)
    far_end = interval.high if grade == 0 else 1 - interval.low
    assert far_end == pytest.approx(0.1135, abs=1e-4)
    assert interval.estimate in (interval.low, interval.high)


def test_score_interval_never_counts_more_trials_than_answers() -> None:
    assert score_interval([[0, 1]] * 20) == wilson(0.5, 40)


def test_a_single_question_counts_as_one_trial() -> None:
    assert score_interval([[1, 0, 1, 1]]) == wilson(0.75, 1)


@pytest.mark.parametrize("nothing", [[], [[1], []]])
def test_score_interval_refuses_questions_without_answers(nothing: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        score_interval(nothing)


def test_wilson_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for successes, n, level in [(0, 30, 0.95), (7, 30, 0.95), (30, 30, 0.95), (123, 500, 0.8)]:
        theirs = stats.binomtest(successes, n).proportion_ci(level, method="wilson")
        ours = wilson(successes / n, n, level)
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_mean_interval_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    lengths = np.random.default_rng(0).gamma(2, 500, size=30)
    theirs = stats.ttest_1samp(lengths, 0).confidence_interval(0.9)
    ours = mean_interval(lengths, level=0.9)
    assert ours.estimate == pytest.approx(lengths.mean())
    assert ours.level == 0.9
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-10)


def test_the_mean_of_one_question_says_nothing_about_others() -> None:
    assert mean_interval([120.0]) == Interval(120.0, -math.inf, math.inf)


def test_paired_difference_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(1)
    a = generator.random(30)
    b = a + generator.normal(0.1, 0.2, size=30)
    interval, p_value = paired_difference(a, b)
    theirs = stats.ttest_rel(b, a)
    limits = theirs.confidence_interval(0.95)
    assert interval.estimate == pytest.approx((b - a).mean())
    assert (interval.low, interval.high) == pytest.approx((limits.low, limits.high), rel=1e-10)
    assert p_value == pytest.approx(theirs.pvalue, rel=1e-9)


def test_paired_t_has_its_nominal_size() -> None:
    """Two samples of eight answers of the same model: about 5 % of comparisons may look significant."""
    generator = np.random.default_rng(2)
    chances = generator.beta(0.35, 0.65, size=(2000, 30))
    a, b = (generator.binomial(8, chances) / 8 for _ in range(2))
    results = [paired_difference(x, y) for x, y in zip(a, b, strict=True)]
    significant = np.array([p_value < 0.05 for _, p_value in results])
    assert 0.03 <= significant.mean() <= 0.07
    excludes_zero = np.array([not interval.low <= 0 <= interval.high for interval, _ in results])
    assert (significant == excludes_zero).all()


def test_paired_difference_without_scatter() -> None:
    assert paired_difference([0.25, 0.5], [0.25, 0.5]) == (Interval(0.0, 0.0, 0.0), 1.0)
    assert paired_difference([0.25, 0.5], [0.5, 0.75]) == (Interval(0.25, 0.25, 0.25), 0.0)
    assert paired_difference([0.25], [0.5]) == (Interval(0.25, -math.inf, math.inf), 1.0)


def test_paired_difference_refuses_different_questions() -> None:
    with pytest.raises(ValueError, match="same questions"):
        paired_difference([0.1, 0.2], [0.1])


def test_ratio_interval_is_exact_where_every_question_shrinks_alike() -> None:
    lengths = np.array([100.0, 900.0, 250.0, 4000.0])
    interval = ratio_interval(lengths, 0.5 * lengths, seed=0)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((0.5, 0.5, 0.5))


def test_ratio_interval_agrees_with_the_delta_method() -> None:
    generator = np.random.default_rng(3)
    a = generator.gamma(4, 100, size=400)
    b = a * generator.normal(0.7, 0.2, size=400)
    ratio = b.mean() / a.mean()
    half = 1.96 * (b - ratio * a).std(ddof=1) / math.sqrt(400) / a.mean()
    interval = ratio_interval(a, b, seed=0)
    assert interval.estimate == pytest.approx(ratio)
    assert (interval.low, interval.high) == pytest.approx((ratio - half, ratio + half), abs=0.15 * half)
    assert interval == ratio_interval(a, b, seed=0)
    assert interval != ratio_interval(a, b, seed=1)


def test_ratio_interval_refuses_a_zero_below_the_line() -> None:
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([0.0, 1.0], [1.0, 1.0], seed=0)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, c, k)
