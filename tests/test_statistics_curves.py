"""pass@k, maj@k and rm@k against the mean over every subset of k answers, written out."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from reasonlab.evaluate.statistics import (
    maj_at_k,
    maj_curve,
    pass_at_k,
    pass_curve,
    rm_at_k,
    rm_curve,
    score_interval,
    wilson,
)


def majority_is_right(votes: list[str | None], right: list[int]) -> float:
    """One subset: the commonest answer, a draw among equals; right answers are one answer."""
    names = ["right" if r else v for v, r in zip(votes, right, strict=True)]
    counts = Counter(name for name in names if name is not None)
    winners = [name for name, count in counts.items() if count == max(counts.values())] if counts else []
    return winners.count("right") / len(winners) if winners else 0.0


def best_is_right(scores: list[float], right: list[int]) -> float:
    tied = [r for s, r in zip(scores, right, strict=True) if s == max(scores)]
    return sum(tied) / len(tied)


def test_maj_at_k_is_the_mean_over_all_subsets() -> None:
    generator = np.random.default_rng(0)
    for _ in range(60):
        n = int(generator.integers(1, 9))
        right = [int(r) for r in generator.random(n) < generator.random()]
        votes = [None if v == 0 else f"{v}" for v in generator.integers(0, 4, size=n)]
        curve = maj_at_k(votes, right)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(range(n), k))
            expected = np.mean([majority_is_right([votes[i] for i in s], [right[i] for i in s]) for s in subsets])
            assert curve[k - 1] == pytest.approx(expected, abs=1e-12)


def test_maj_at_k_of_many_answers_agrees_with_random_subsets() -> None:
    generator = np.random.default_rng(1)
    right = np.repeat([1, 0, 0, 0, 0], [20, 18, 12, 8, 6])
    votes = np.repeat([0, 1, 2, 3, -1], [20, 18, 12, 8, 6])
    drawn = np.array([generator.permutation(64)[:15] for _ in range(20_000)])
    counts = np.stack([(votes[drawn] == v).sum(axis=1) for v in range(4)], axis=1)
    winners = counts == counts.max(axis=1, keepdims=True)
    simulated = (winners[:, 0] / winners.sum(axis=1)).mean()
    exact = maj_at_k([None if v < 0 else int(v) for v in votes], right)
    assert exact[14] == pytest.approx(simulated, abs=0.012)
    assert exact[0] == pytest.approx(20 / 64)
    assert exact[63] == 1.0


def test_answers_without_a_vote_do_not_outvote() -> None:
    assert maj_at_k([None, None, None, "7"], [0, 0, 0, 1]) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert maj_at_k(["3", "3", "3", "7"], [0, 0, 0, 1]) == pytest.approx([0.25, 0.25, 0.0, 0.0])


def test_rm_at_k_is_the_mean_over_all_subsets_with_ties_shared() -> None:
    generator = np.random.default_rng(2)
    for _ in range(60):
        n = int(generator.integers(1, 9))
        right = [int(r) for r in generator.random(n) < 0.5]
        scores = [float(s) for s in generator.integers(0, 4, size=n)]
        curve = rm_at_k(scores, right)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(range(n), k))
            expected = np.mean([best_is_right([scores[i] for i in s], [right[i] for i in s]) for s in subsets])
            assert curve[k - 1] == pytest.approx(expected, abs=1e-12)


def test_a_perfect_judge_gives_pass_at_k_and_an_empty_one_gives_avg() -> None:
    right = np.array([0, 1, 0, 0, 1, 0])
    perfect = [pass_at_k(6, 2, k) for k in range(1, 7)]
    assert rm_at_k(right, right) == pytest.approx(perfect)
    assert rm_at_k(np.zeros(6), right) == pytest.approx([1 / 3] * 6)


def test_pass_curve_is_unbiased_for_fresh_answers() -> None:
    """Chances known: the curve from 16 answers must be 1 − E (1 − p)^k, also at k = 16."""
    generator = np.random.default_rng(3)
    chances = generator.beta(0.35, 0.65, size=5_000)
    grades = generator.random((5_000, 16)) < chances[:, None]
    curve = pass_curve(grades)
    for k in (1, 4, 8, 16):
        assert curve.at(k).estimate == pytest.approx((1 - (1 - chances) ** k).mean(), abs=0.015)
    assert curve.reliable_k == 8


def test_curves_start_at_avg_and_their_band_covers() -> None:
    """300 benchmarks of 40 questions: the band at k = 4 holds the true pass@4 about 95 % of the time."""
    generator = np.random.default_rng(4)
    truth = (1 - (1 - generator.beta(0.35, 0.65, size=400_000)) ** 4).mean()
    held = 0
    for benchmark in range(300):
        chances = generator.beta(0.35, 0.65, size=40)
        grades = (generator.random((40, 8)) < chances[:, None]).astype(float)
        curve = pass_curve(grades, seed=benchmark)
        point = curve.at(4)
        held += point.low <= truth <= point.high
    assert curve.at(1).estimate == pytest.approx(score_interval(grades).estimate)
    assert 0.91 <= held / 300 <= 0.98


def test_curves_go_as_far_as_every_question_allows() -> None:
    correct = [[1, 0, 0], [0, 1, 1, 1, 0]]
    votes = [["a", "b", "c"], ["d", "a", "a", "a", "e"]]
    scores = [[0.3, 0.2, 0.1], [0.0, 0.9, 0.5, 0.5, 0.1]]
    for curve in (pass_curve(correct), maj_curve(votes, correct), rm_curve(scores, correct)):
        assert len(curve.points) == curve.answers == 3
        assert curve.at(1).estimate == pytest.approx((1 / 3 + 3 / 5) / 2)
        with pytest.raises(ValueError, match="k=4"):
            curve.at(4)


def test_a_band_keeps_its_width_where_every_question_is_solved() -> None:
    curve = pass_curve([[1, 0, 1]] * 30)
    assert curve.at(3) == wilson(1.0, 30)
    assert curve == pass_curve([[1, 0, 1]] * 30)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pass_curve([[1, np.nan]]), "could not be graded"),
        (lambda: pass_curve([]), "at least one question"),
        (lambda: maj_at_k(["a"], [1, 0]), "one vote for each"),
        (lambda: rm_at_k([np.nan, 1.0], [1, 0]), "no nan"),
        (lambda: maj_at_k(["a"] * 1001, [0] * 1001), "too many"),
    ],
)
def test_curves_refuse_what_they_cannot_count(call: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()  # type: ignore[operator]
