"""How well a judge picks answers: rm@k beside majority and oracle, best-of-N and weighted-majority curves.

rm@k is the accuracy of the best-scored of k answers to a question. It is published (AceMath-RewardBench) as the mean
over 100 seeds, each with one draw of 8 out of 64 answers a question. The same number has an exact value, the mean over
all subsets, which needs no seeds (`evaluate/curves.py`); both are given, and differ by the noise of the draws alone.
Intervals are over questions: the answers to one question are not independent pieces of evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reasonlab.errors import UserError
from reasonlab.evaluate.curves import maj_at_k, pass_at_k, rm_at_k
from reasonlab.evaluate.intervals import Interval, resampled_means, wilson
from reasonlab.grading.extract import extract
from reasonlab.grading.grade import extract_answer
from reasonlab.judges.types import Candidate
from reasonlab.keys import key

PUBLISHED_K, PUBLISHED_SEEDS = 8, 100

Floats = NDArray[np.float64]
Vote = Hashable | None


class Question(NamedTuple):
    """The answers to one question: what a judge says, whether they are right, and what they answer."""

    name: str
    scores: Floats
    correct: Floats
    votes: list[Vote]


def answer_given(candidate: Candidate) -> str | None:
    """What a response votes for; None where it marks no answer."""
    answer = extract_answer(candidate.response)
    if answer is None and (found := extract(candidate.response)):
        answer = found.answer
    return "".join(answer.split()) if answer else None


@dataclass(frozen=True, slots=True)
class Questions:
    """A pool by family and question, and how many candidates were left out because nobody knows if they are right."""

    families: dict[str, list[Question]]
    ungraded: int


def by_question(
    candidates: Sequence[Candidate], scores: ArrayLike, vote: Callable[[Candidate], Vote] = answer_given
) -> Questions:
    """Group a scored pool; families and questions in the order in which they come."""
    values = np.asarray(scores, dtype=np.float64)
    if values.shape != (len(candidates),) or np.isnan(values).any():
        raise UserError(f"{len(candidates)} candidates need as many scores, and no nan", "Score this very pool")
    rows: dict[str, dict[str, list[int]]] = {}
    ungraded = 0
    for i, candidate in enumerate(candidates):
        if candidate.correct is None:
            ungraded += 1
        else:
            rows.setdefault(candidate.family, {}).setdefault(candidate.problem, []).append(i)
    families = {
        family: [
            Question(
                problem,
                values[places],
                np.array([float(bool(candidates[i].correct)) for i in places]),
                [vote(candidates[i]) for i in places],
            )
            for problem, places in problems.items()
        ]
        for family, problems in rows.items()
    }
    return Questions(families, ungraded)


# --- rm@k --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """A score by draws: its mean over seeds, and the standard deviation from seed to seed."""

    mean: float
    deviation: float
    seeds: int

    @property
    def error(self) -> float:
        """The standard error of the mean: how far it may lie from the exact value."""
        return self.deviation / math.sqrt(self.seeds)


def rm_by_draws(
    questions: Sequence[Question], k: int = PUBLISHED_K, seeds: int = PUBLISHED_SEEDS, seed: int = 0
) -> Drawn:
    """rm@k as published: for each seed draw k of a question's answers, take the best-scored, average over questions."""
    if seeds < 2:
        raise ValueError("the scatter over seeds needs at least two of them")
    picked = np.stack([_best_of_draws(question, k, seeds, seed) for question in questions])
    means = picked.mean(axis=0)
    return Drawn(float(means.mean()), float(means.std(ddof=1)), seeds)


def _best_of_draws(question: Question, k: int, seeds: int, seed: int) -> Floats:
    """Whether the best of k is right, for each seed."""
    draws = _draws(question, k, seeds, seed, "rm")
    best = question.scores[draws].argmax(axis=1)  # of equal scores the first, and their order is a draw as well
    chosen: Floats = question.correct[draws[np.arange(seeds), best]]
    return chosen


def _draws(question: Question, k: int, times: int, seed: int, what: str) -> NDArray[np.int64]:
    """k answers of a question in random order, again and again; the draws depend on its name, not on its company."""
    generator = np.random.default_rng(key(seed, what, question.name, k))
    return generator.random((times, len(question.scores))).argsort(axis=1)[:, :k]


@dataclass(frozen=True, slots=True)
class RewardBench:
    """One family's row of a reward benchmark. `short` counts questions left out for having fewer than k answers."""

    k: int
    rm: Interval
    rm_drawn: Drawn
    majority: Interval
    oracle: Interval
    single: Interval  # a random answer: where k = 1 starts
    questions: int
    short: int


def reward_bench(
    questions: Mapping[str, Sequence[Question]],
    k: int = PUBLISHED_K,
    seeds: int = PUBLISHED_SEEDS,
    seed: int = 0,
    average: str = "average",
) -> dict[str, RewardBench]:
    """rm@k, maj@k, pass@k (the oracle) and a random answer for each family, and their plain mean over families."""
    values: dict[str, Floats] = {}
    drawn: dict[str, Drawn] = {}
    short: dict[str, int] = {}
    for family, its in questions.items():
        long_enough = [question for question in its if len(question.scores) >= k]
        short[family] = len(its) - len(long_enough)
        if not long_enough:
            raise UserError(f"no question of {family or 'the pool'} has {k} graded answers", "Choose a smaller k")
        values[family] = np.array([_exact(question, k) for question in long_enough])
        drawn[family] = rm_by_draws(long_enough, k, seeds, seed)
    rows = {
        family: _row(k, [values[family]], drawn[family], short[family], key(seed, "bench", family)) for family in values
    }
    if len(rows) > 1:
        means = [one.mean for one in drawn.values()]
        deviation = math.sqrt(sum(one.deviation**2 for one in drawn.values())) / len(drawn)
        together = Drawn(float(np.mean(means)), deviation, seeds)
        rows[average] = _row(k, list(values.values()), together, sum(short.values()), key(seed, "bench-average"))
    return rows


def _exact(question: Question, k: int) -> tuple[float, float, float, float]:
    """rm@k, maj@k, pass@k and the accuracy of a random answer, each the mean over all subsets."""
    n, right = len(question.scores), question.correct
    return (
        float(rm_at_k(question.scores, right)[k - 1]),
        float(maj_at_k(question.votes, right)[k - 1]),
        pass_at_k(n, int(right.sum()), k),
        float(right.mean()),
    )


def _row(k: int, families: Sequence[Floats], drawn: Drawn, short: int, seed: int) -> RewardBench:
    rm, majority, oracle, single = intervals(families, seed)
    return RewardBench(k, rm, drawn, majority, oracle, single, sum(map(len, families)), short)


def intervals(families: Sequence[Floats], seed: int, level: float = 0.95) -> list[Interval]:
    """For every column of [question, column] tables the mean over families of their means, with a bootstrap interval
    over questions, drawn anew within each family."""
    estimate = np.mean([table.mean(axis=0) for table in families], axis=0)
    resampled = np.mean([resampled_means(table, key(seed, place)) for place, table in enumerate(families)], axis=0)
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2], axis=0)
    number = sum(map(len, families))
    # Where all questions are at 0 or all at 1 every resample is too, which says nothing about other questions.
    return [
        wilson(float(mean), number, level) if mean in (0.0, 1.0) else Interval(float(mean), float(a), float(b), level)
        for mean, a, b in zip(estimate, low, high, strict=True)
    ]


# --- curves ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SelectionCurves:
    """Accuracy against the number of answers, with intervals over questions."""

    n: tuple[int, ...]
    best_of_n: tuple[Interval, ...]
    weighted_majority: tuple[Interval, ...]
    majority: tuple[Interval, ...]
    oracle: tuple[Interval, ...]


def selection_curves(
    questions: Sequence[Question],
    n: Sequence[int] = (1, 2, 4, 8, 16),
    weight: Literal["score", "sigmoid"] = "score",
    draws: int = 200,
    seed: int = 0,
) -> SelectionCurves:
    """Best-of-N, weighted majority, majority and oracle. All but the weighted majority are exact; that one is the mean
    over `draws` subsets of each question, all answers where N is their number."""
    if not questions:
        raise UserError("curves need at least one question", "Give a pool with graded answers")
    fewest = min(len(question.scores) for question in questions)
    if not n or min(n) < 1 or max(n) > fewest:
        raise UserError(f"N must lie between 1 and {fewest}, the fewest answers of a question", "Choose other N")
    columns: dict[str, list[list[float]]] = {"best": [], "weighted": [], "majority": [], "oracle": []}
    for question in questions:
        best, majority = rm_at_k(question.scores, question.correct), maj_at_k(question.votes, question.correct)
        size, right = len(question.scores), int(question.correct.sum())
        columns["best"].append([float(best[k - 1]) for k in n])
        columns["majority"].append([float(majority[k - 1]) for k in n])
        columns["oracle"].append([pass_at_k(size, right, k) for k in n])
        columns["weighted"].append([weighted_majority(question, k, weight, draws, seed) for k in n])
    bands = {name: tuple(intervals([np.array(table)], key(seed, "curves", name))) for name, table in columns.items()}
    return SelectionCurves(tuple(n), bands["best"], bands["weighted"], bands["majority"], bands["oracle"])


def weighted_majority(
    question: Question, k: int, weight: Literal["score", "sigmoid"] = "score", draws: int = 200, seed: int = 0
) -> float:
    """The chance that argmax_a Σ_i 1[a_i = a] w_i of k answers is right, where w is the score or its logistic function.

    All right answers are one answer; an answer without a vote counts for nothing; between equal sums a draw decides.
    """
    w = 1 / (1 + np.exp(-question.scores)) if weight == "sigmoid" else question.scores
    if (w < 0).any():
        raise UserError(
            f"a vote for {question.name} has the negative weight {w.min():.3g}", "Use the weight sigmoid for raw scores"
        )
    names: dict[Vote, int] = {}
    right_name = ("right",)  # a tuple, so that no answer is called the same
    group = [
        -1 if vote is None and not right else names.setdefault(right_name if right else vote, len(names))
        for vote, right in zip(question.votes, question.correct, strict=True)
    ]
    if right_name not in names:
        return 0.0
    belongs = np.eye(len(names) + 1)[group][:, :-1]  # [answer, distinct answer]; those without a vote belong nowhere
    if k == len(group):
        drawn = np.ones((1, k))
    else:
        drawn = np.zeros((draws, len(group)))
        np.put_along_axis(drawn, _draws(question, k, draws, seed, "weighted"), 1.0, axis=1)
    sums = np.where(drawn @ belongs > 0, (drawn * w) @ belongs, -1.0)
    # Equal sums of weights that were added in another order differ in the last digits.
    winners = (sums >= 0) & (sums >= sums.max(axis=1, keepdims=True) * (1 - 1e-12))
    share = winners[:, names[right_name]] / np.maximum(winners.sum(axis=1), 1)  # no vote at all is a loss
    return float(share.mean())
