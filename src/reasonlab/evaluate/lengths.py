"""Answer lengths: split by correct and wrong, honest about answers that were cut off, and priced per correct answer.

An answer that ran into the token limit, or was stopped for repeating itself, is censored: its true length is at least
what was counted. A mean with such answers in it is a lower bound, and is marked as one wherever it is printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from reasonlab.evaluate.distributions import student_t_quantile
from reasonlab.evaluate.intervals import Floats, Interval, length_text, mean_interval, vector, wilson


@dataclass(frozen=True, slots=True)
class MeanLength:
    """Mean tokens of some answers, and the share of those answers that were cut off before their end."""

    tokens: Interval
    answers: int
    censored: float

    @property
    def is_lower_bound(self) -> bool:
        return self.censored > 0

    def __str__(self) -> str:
        return f"{'≥ ' if self.is_lower_bound else ''}{length_text(self.tokens)}"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a set of answers. `correct` and `wrong` are None where there are none; ungraded ones are in neither.

    `per_correct` is what one correct answer costs: mean tokens / accuracy, wrong answers paid for.
    """

    every: MeanLength
    correct: MeanLength | None
    wrong: MeanLength | None
    per_correct: Interval


def lengths(
    correct: Sequence[ArrayLike], tokens: Sequence[ArrayLike], cut: Sequence[ArrayLike], level: float = 0.95
) -> Lengths:
    """Three rows for each question, one entry an answer: its grade (1, 0, or nan), its tokens, whether it was cut."""
    grades = [vector(row) for row in correct]
    counts = [vector(row) for row in tokens]
    cuts = [vector(row) for row in cut]
    if (
        not grades
        or [len(r) for r in grades] != [len(r) for r in counts]
        or [len(r) for r in counts] != list(map(len, cuts))
    ):
        raise ValueError("every answer needs a grade, a number of tokens, and whether it was cut off")
    answers = sum(map(len, counts))
    means = np.array([row.mean() for row in counts])
    accuracy = np.array([np.nanmean(g) if not np.isnan(g).all() else np.nan for g in grades])
    graded = ~np.isnan(accuracy)
    return Lengths(
        every=MeanLength(mean_interval(means, level), answers, sum(float(row.sum()) for row in cuts) / answers),
        correct=_of_kind([g == 1 for g in grades], counts, cuts, level),
        wrong=_of_kind([g == 0 for g in grades], counts, cuts, level),
        per_correct=tokens_per_correct(accuracy[graded], means[graded], level),
    )


def tokens_per_correct(accuracy: ArrayLike, tokens: ArrayLike, level: float = 0.95) -> Interval:
    """Σ tokens / Σ correct from the question means of both; infinite where nothing is correct.

    The interval is r · exp(± t_{n−1} SE_r / r): on a logarithmic scale, because costs are skewed and positive. With
    nothing correct there is still a least cost, from the highest accuracy Wilson's interval allows.
    """
    right, spent = vector(accuracy), vector(tokens)
    if right.sum() == 0:
        return Interval(math.inf, float(spent.mean()) / wilson(0.0, right.size, level).high, math.inf, level)
    ratio, error = _ratio(spent, right)
    if right.size == 1 or ratio == 0:
        return Interval(ratio, 0.0, math.inf, level)
    factor = math.exp(min(700.0, student_t_quantile((1 + level) / 2, right.size - 1) * error / ratio))
    return Interval(ratio, ratio / factor, ratio * factor, level)


def _of_kind(chosen: list[Floats], tokens: list[Floats], cut: list[Floats], level: float) -> MeanLength | None:
    """The mean length of the chosen answers, each question with as much weight as its share of chosen answers."""
    weights = np.array([row.mean() for row in chosen])
    amounts = np.array([(row * count).mean() for row, count in zip(chosen, tokens, strict=True)])
    answers = sum(int(row.sum()) for row in chosen)
    if not answers:
        return None
    has_some = weights > 0
    ratio, error = _ratio(amounts[has_some], weights[has_some])
    questions = int(has_some.sum())
    half = student_t_quantile((1 + level) / 2, questions - 1) * error if questions > 1 else math.inf
    censored = sum(float((row * c).sum()) for row, c in zip(chosen, cut, strict=True)) / answers
    return MeanLength(Interval(ratio, ratio - half, ratio + half, level), answers, censored)


def _ratio(above: Floats, below: Floats) -> tuple[float, float]:
    """r = Σ a_i / Σ b_i and its standard error over questions, √(n/(n−1) Σ (a_i − r b_i)²) / Σ b_i."""
    ratio = float(above.sum() / below.sum())
    n = above.size
    residual = float(((above - ratio * below) ** 2).sum())
    return ratio, math.sqrt(n / max(n - 1, 1) * residual) / float(below.sum())
