"""Intervals over training seeds by simulation; the variance split by construction; the price of picking the best."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from reasonlab.evaluate.statistics import (
    best_checkpoint,
    mean_interval,
    score_interval,
    seed_difference,
    seed_mean_interval,
    seed_score_interval,
    seeds_for_half_width,
    variance_split,
    wilson,
)

Array = NDArray[np.float64]


def trained(
    generator: np.random.Generator, shape: tuple[int, int, int], k: int, by_seed: float, by_cell: float
) -> Array:
    """Question means [study, seed, question]: AIME-like questions, moved on the logit scale by seed and by cell."""
    studies, seeds, questions = shape
    chance = generator.beta(0.35, 0.65, size=(studies, 1, questions)).clip(1e-9, 1 - 1e-9)
    logit = np.log(chance / (1 - chance)) + by_seed * generator.normal(size=(studies, seeds, 1))
    logit = logit + by_cell * generator.normal(size=shape)
    return generator.binomial(k, 1 / (1 + np.exp(-logit))) / k


def true_mean(by_seed: float, by_cell: float) -> float:
    """The mean over a million questions, each with a seed of its own."""
    generator = np.random.default_rng(99)
    chance = generator.beta(0.35, 0.65, size=1_000_000).clip(1e-9, 1 - 1e-9)
    spread = math.hypot(by_seed, by_cell) * generator.normal(size=chance.size)
    return float((1 / (1 + (1 - chance) / chance * np.exp(-spread))).mean())


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize(("questions", "k"), [(30, 8), (240, 1)])
@pytest.mark.parametrize("by_seed", [0.0, 0.3, 0.8])
def test_seed_score_interval_covers(seeds: int, questions: int, k: int, by_seed: float) -> None:
    """From seeds that do not matter to seeds that are nearly all that matters."""
    generator = np.random.default_rng(seeds * questions)
    studies = trained(generator, (4000, seeds, questions), k, by_seed, 0.5)
    truth = true_mean(by_seed, 0.5)
    intervals = [seed_score_interval(study) for study in studies]
    assert 0.93 <= np.mean([i.low <= truth <= i.high for i in intervals]) <= 0.973


def test_ignoring_seeds_or_ignoring_questions_does_not_cover() -> None:
    """What the crossed interval is for: either shortcut fails on data where the other part matters."""
    generator = np.random.default_rng(0)
    studies = trained(generator, (1500, 3, 240), 4, 0.8, 0.5)
    truth = true_mean(0.8, 0.5)
    pooled = [score_interval(study.T) for study in studies]
    assert np.mean([i.low <= truth <= i.high for i in pooled]) < 0.7
    alike = trained(generator, (1500, 3, 30), 8, 0.0, 0.5)
    truth = true_mean(0.0, 0.5)
    by_seed = [mean_interval(study.mean(axis=1)) for study in alike]
    assert np.mean([i.low <= truth <= i.high for i in by_seed]) < 0.7


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("by_seed", [0.0, 0.3, 0.8])
def test_seed_difference_of_two_equal_methods_covers_zero(seeds: int, by_seed: float) -> None:
    """Same questions, independent seeds."""
    generator = np.random.default_rng(seeds)
    both = trained(generator, (1200, 2 * seeds, 100), 4, by_seed, 0.5)
    intervals = [seed_difference(study[:seeds], study[seeds:]) for study in both]
    assert 0.93 <= np.mean([i.low <= 0 <= i.high for i in intervals]) <= 0.98


def test_seed_mean_interval_by_hand() -> None:
    """No seed effect beyond the rest: only the questions' part remains, with their own degrees of freedom."""
    x = np.array([[1.0, 2.0, 3.0, 6.0], [2.0, 1.0, 4.0, 5.0]])
    expected = mean_interval(x.mean(axis=0))
    found = seed_mean_interval(x)
    assert (found.estimate, found.low, found.high) == pytest.approx((expected.estimate, expected.low, expected.high))


def exactly(seeds: int, questions: int, question: float, seed: float, rest: float) -> Array:
    """Values [seed, question] whose mean squares are what variances of this size give on average, to the last digit."""
    generator = np.random.default_rng(5)

    def scaled(x: Array, mean_square: float, freedom: int) -> Array:
        return x * math.sqrt(mean_square * freedom / float((x**2).sum()))

    by_question = generator.normal(size=questions)
    by_seed, cell = generator.normal(size=seeds), generator.normal(size=(seeds, questions))
    by_question, by_seed = by_question - by_question.mean(), by_seed - by_seed.mean()
    cell = cell - cell.mean(axis=0) - cell.mean(axis=1, keepdims=True) + cell.mean()
    return (
        0.1
        + scaled(by_question, question + rest / seeds, questions - 1)
        + scaled(by_seed, seed + rest / questions, seeds - 1)[:, None]
        + scaled(cell, rest, (seeds - 1) * (questions - 1))
    )


def half_width(values: Array) -> float:
    interval = seed_mean_interval(values)
    return (interval.high - interval.low) / 2


@pytest.mark.parametrize("had", [2, 3, 6])
@pytest.mark.parametrize(
    ("question", "seed", "rest", "wanted"),
    [
        (0.04, 0.0004, 0.1, 0.03),  # about what two tiny models differ by
        (0.02, 0.001, 0.1, 0.02),
        (0.0, 0.002, 0.05, 0.02),
        (0.02, 0.0, 0.2, 0.016),
        (0.02, 0.0, 0.2, 0.5),  # two are enough
    ],
)
def test_seeds_for_a_half_width_by_trying_every_number(
    had: int, question: float, seed: float, rest: float, wanted: float
) -> None:
    """From few seeds the number that, with the same variances, first makes the interval so narrow."""
    tried = [half_width(exactly(count, 400, question, seed, rest)) for count in range(2, 60)]
    expected = next(count for count, half in enumerate(tried, start=2) if half <= wanted)
    assert expected < 59
    assert seeds_for_half_width(exactly(had, 400, question, seed, rest), wanted) == expected


def test_no_number_of_seeds_makes_up_for_few_questions() -> None:
    values = exactly(3, 30, 0.2, 0.001, 0.05)
    assert seeds_for_half_width(values, 0.16, most=200) is None  # questions alone: 2.05 · √(0.2 / 30) = 0.167
    assert seeds_for_half_width(values, 0.2) is not None
    assert seeds_for_half_width(exactly(3, 400, 0.0, 0.01, 0.05), 0.01, most=20) is None
    assert seeds_for_half_width(np.ones((3, 30)), 0.001) == 2, "without any scatter two are plenty"


def test_the_promised_half_width_is_reached_on_average() -> None:
    """Pilots of six seeds say how many are needed, and new studies with so many are that wide."""
    generator = np.random.default_rng(6)

    def studies(count: int, seeds: int) -> Array:
        parts = [(0.15, (count, 1, 300)), (0.03, (count, seeds, 1)), (0.3, (count, seeds, 300))]
        return sum((sd * generator.normal(size=shape) for sd, shape in parts), start=np.zeros((count, seeds, 300)))

    needed = [seeds_for_half_width(pilot, 0.03) for pilot in studies(300, 6)]
    assert None not in needed
    middle = int(np.median([count for count in needed if count is not None]))
    assert np.mean([half_width(study) for study in studies(300, middle)]) == pytest.approx(0.03, rel=0.15)


def test_seed_intervals_at_the_ends_and_what_they_refuse() -> None:
    assert seed_score_interval(np.ones((3, 30))) == wilson(1.0, 30)
    for wrong in (np.ones((1, 30)), np.ones(30)):
        with pytest.raises(ValueError, match="at least two of each"):
            seed_score_interval(wrong)
    with pytest.raises(ValueError, match="same questions"):
        seed_difference(np.ones((3, 30)), np.ones((3, 31)))


def test_variance_split_finds_what_was_put_in() -> None:
    generator = np.random.default_rng(1)
    splits = []
    for _ in range(300):
        x = (
            2.0 * generator.normal(size=(1, 40, 1))
            + 1.0 * generator.normal(size=(6, 1, 1))
            + 0.7 * generator.normal(size=(6, 40, 1))
            + 1.5 * generator.normal(size=(6, 40, 5))
        )
        splits.append(variance_split(x))
    assert np.mean([s.question for s in splits]) == pytest.approx(4.0, rel=0.06)
    assert np.mean([s.seed for s in splits]) == pytest.approx(1.0, rel=0.1)
    assert np.mean([s.question_seed for s in splits]) == pytest.approx(0.49, rel=0.06)
    assert np.mean([s.within for s in splits]) == pytest.approx(2.25, rel=0.02)
    assert np.mean([s.squared_error() for s in splits]) == pytest.approx(
        4 / 40 + 1 / 6 + 0.49 / 240 + 2.25 / 1200, rel=0.1
    )
    assert sum(splits[0].shares().values()) == pytest.approx(1.0)


def test_variance_split_of_one_seed_and_of_missing_answers() -> None:
    values = [[1.0, 0.0, np.nan], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [np.nan] * 3]
    split = variance_split(values)
    assert split.questions == 3
    assert split.within == pytest.approx((0.5 + 0 + 2 / 3) / (1 + 2 + 2))
    assert math.isnan(split.seed)
    # One answer a cell: what is not question or seed is all counted as within.
    single = variance_split(np.arange(12.0).reshape(3, 4, 1) % 5)
    assert single.question_seed == 0.0
    with pytest.raises(ValueError, match="two seeds"):
        variance_split([[1.0], [0.0]])


def test_advice_on_more_answers() -> None:
    generator = np.random.default_rng(2)
    settled = generator.random((30, 1)) < 0.5
    assert "will not help" in variance_split(np.repeat(settled, 64, axis=1)).advice()
    alike = generator.random((100, 2)) < 0.5
    assert "More k will help" in variance_split(alike).advice()
    by_seed = generator.normal(size=(3, 1, 1)) + 0.1 * generator.normal(size=(3, 100, 8))
    assert "more seeds would" in variance_split(by_seed).advice()
    assert "No scatter" in variance_split(np.ones((4, 2))).advice()


def test_the_best_of_equal_checkpoints_is_biased_and_the_cross_fitted_score_is_not() -> None:
    """Twenty checkpoints of the same skill, 30 questions, one answer each: the best looks about ten points better."""
    generator = np.random.default_rng(3)
    seen, honest = [], []
    for study in range(400):
        chance = generator.beta(0.35, 0.65, size=30)
        grades = generator.random((20, 30)) < chance
        found = best_checkpoint(dict(enumerate(grades)), seed=study)
        seen.append(found.selected.estimate)
        honest.append(found.honest)
    assert np.mean(seen) > 0.35 + 0.08
    assert np.mean(honest) == pytest.approx(0.35, abs=0.015)
    assert "best of 20" in str(found)
    assert "biased upward" in str(found)


def test_a_clear_best_checkpoint_is_chosen_and_keeps_its_score() -> None:
    scores = {10: np.zeros(20), 20: np.r_[np.ones(15), np.zeros(5)], 30: np.r_[np.ones(5), np.zeros(15)]}
    found = best_checkpoint(scores)
    assert (found.step, found.looks) == (20, 3)
    assert found.honest == found.selected.estimate == 0.75
    alone = best_checkpoint({7: np.ones(4)})
    assert alone.honest == alone.selected.estimate
    assert "only evaluation" in str(alone)


def test_the_split_is_right_for_every_order_of_seeds_and_questions() -> None:
    x = np.random.default_rng(4).random((3, 5, 2))
    expected = variance_split(x)
    for seeds in itertools.permutations(range(3)):
        assert variance_split(x[list(seeds)][:, ::-1]).squared_error() == pytest.approx(expected.squared_error())
