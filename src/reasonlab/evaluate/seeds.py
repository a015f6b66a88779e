"""Several training seeds on the same questions: intervals for "this method, trained again, on questions like these".

Seeds and questions are crossed: x_sq = μ + question_q + seed_s + rest_sq. The mean over both has variance
(MS_q + MS_s − MS_rest) / (S·Q), of which the seeds' part rests on a handful of numbers. Each part therefore brings the
Student quantile of its own degrees of freedom, weighted by its share of the variance (Cochran and Cox). Satterthwaite's
degrees of freedom were tried as well: with three seeds they cover 92–93 % where seeds dominate; these cover 94–97 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from reasonlab.evaluate.distributions import student_t_quantile
from reasonlab.evaluate.intervals import Floats, Interval, wilson

_LITTLE = 0.05  # an interval narrowed by less than this share is not worth more sampling


def seed_score_interval(scores: ArrayLike, level: float = 0.95) -> Interval:
    """The score of a method, from question means [seed, question] in [0, 1]; Wilson's form, as in `score_interval`."""
    x = _crossed(scores)
    mean = float(x.mean())
    if mean in (0.0, 1.0):
        return wilson(mean, x.shape[1], level)
    variance, quantile = _combined(_parts(x), level)
    trials = mean * (1 - mean)
    return wilson(mean, trials / max(variance, trials / x.size), level, quantile)


def seed_mean_interval(values: ArrayLike, level: float = 0.95) -> Interval:
    """The mean of any quantity [seed, question], such as tokens, or a difference between two methods whose runs are
    matched seed by seed."""
    x = _crossed(values)
    return _symmetric(float(x.mean()), _parts(x), level)


def seed_difference(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> Interval:
    """How much higher method b is than method a: [seed, question] each, same questions, independent training seeds.

    The questions' part is that of the differences of question means. The seeds' parts of both methods are added, with
    the degrees of freedom of Welch's test between their seed means.
    """
    x, y = _crossed(a), _crossed(b)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"both sides need the same questions, not {x.shape[1]} and {y.shape[1]}")
    d = y.mean(axis=0) - x.mean(axis=0)
    seeds = _parts(x)[1][0] + _parts(y)[1][0]
    parts = [(float(d.var(ddof=1)) / d.size, d.size - 1.0), (seeds, _welch(x.mean(axis=1), y.mean(axis=1)))]
    return _symmetric(float(d.mean()), parts, level)


def seeds_for_half_width(values: ArrayLike, half_width: float, most: int = 1000, level: float = 0.95) -> int | None:
    """How many seeds would make the interval of `seed_mean_interval` at most so wide to each side, on the same number
    of questions; None if no number of them would."""
    x = _crossed(values)
    seeds, questions = x.shape
    of_questions, of_seeds, rest = _mean_squares(x)
    question, seed = max(0.0, of_questions - rest) / seeds, max(0.0, of_seeds - rest) / questions
    for count in range(2, most + 1):
        parts = [((question + rest / count) / questions, questions - 1.0), (seed / count, count - 1.0)]
        variance, quantile = _combined(parts, level)
        if quantile * math.sqrt(variance) <= half_width:
            return count
    return None


@dataclass(frozen=True, slots=True)
class VarianceSplit:
    """Where the uncertainty of a mean score comes from: variances of a single draw of each kind.

    With one seed, `seed` and `question_seed` are unknown (nan): what a seed does is hidden inside `question`.
    """

    question: float
    seed: float
    question_seed: float
    within: float
    questions: int
    seeds: int
    answers: float

    def squared_error(self, answers: float | None = None) -> float:
        """The variance of the mean score, if each question had this many answers (default: as many as it has)."""
        return sum(self._parts(self.answers if answers is None else answers).values())

    def shares(self) -> dict[str, float]:
        """What part of the mean score's variance is owed to what; they add up to 1."""
        parts = self._parts(self.answers)
        total = sum(parts.values())
        return {name: part / total if total else 0.0 for name, part in parts.items()}

    def advice(self) -> str:
        """Whether more answers a question would help, and what would."""
        now = self.squared_error()
        if now == 0:
            return "No scatter at all: more answers a question will not help."
        twice, endless = (1 - math.sqrt(self.squared_error(k) / now) for k in (2 * self.answers, math.inf))
        shares = self.shares()
        largest = max(shares, key=lambda name: shares[name])
        origin = f"{100 * shares[largest]:.0f} % of the variance is {largest}"
        if endless < _LITTLE:
            remedy = "more seeds" if "seeds" in largest else "more questions"
            return f"More k will not help ({origin}); {remedy} would."
        return (
            f"More k will help: twice as many answers narrow the interval by {100 * twice:.0f} %, "
            f"no number of them by more than {100 * endless:.0f} % ({origin})."
        )

    def _parts(self, answers: float) -> dict[str, float]:
        cells = self.seeds * self.questions
        parts = {
            "between questions": self.question / self.questions,
            "between seeds": self.seed / self.seeds,
            "between seeds by question": self.question_seed / cells,
            "within questions": self.within / (cells * answers),
        }
        return {name: part for name, part in parts.items() if not math.isnan(part)}


def variance_split(values: ArrayLike) -> VarianceSplit:
    """Analysis of variance of values [seed, question, answer] or [question, answer]; nan where an answer is missing.

    Estimates below zero are zero. It needs two answers to some question, or two seeds; with one answer a question,
    what changes from seed to seed on a question is all counted as `within`.
    """
    x = np.asarray(values, dtype=np.float64)
    x = x[None] if x.ndim == 2 else x
    counts = (~np.isnan(x)).sum(axis=2)
    x, counts = x[:, counts.all(axis=0)], counts[:, counts.all(axis=0)]
    seeds, questions, _ = x.shape
    spare = int((counts - 1).sum())
    if questions < 2 or (seeds < 2 and not spare):
        raise ValueError("a split needs two questions, and two answers to some question or two seeds")
    cells = np.nanmean(x, axis=2)
    inverse = float((1 / counts).mean())
    within = float(np.nansum((x - cells[:, :, None]) ** 2)) / spare if spare else math.nan
    if seeds < 2:
        between = float(cells[0].var(ddof=1))
        question, seed, question_seed = max(0.0, between - within * inverse), math.nan, math.nan
    else:
        of_questions, of_seeds, rest = _mean_squares(cells)
        within = rest if math.isnan(within) else within
        question = max(0.0, (of_questions - rest) / seeds)
        seed = max(0.0, (of_seeds - rest) / questions)
        question_seed = max(0.0, rest - within * inverse)
    return VarianceSplit(question, seed, question_seed, within, questions, seeds, 1 / inverse)


def _parts(x: Floats) -> list[tuple[float, float]]:
    """What questions and seeds contribute to the variance of the mean, each with its degrees of freedom."""
    seeds, questions = x.shape
    of_questions, of_seeds, rest = _mean_squares(x)
    return [(of_questions / x.size, questions - 1), (max(0.0, of_seeds - rest) / x.size, seeds - 1)]


def _welch(a: Floats, b: Floats) -> float:
    """(v_a + v_b)² / (v_a²/(n_a − 1) + v_b²/(n_b − 1)) with v = s²/n."""
    va, vb = float(a.var(ddof=1)) / a.size, float(b.var(ddof=1)) / b.size
    if va + vb == 0:
        return a.size + b.size - 2
    return (va + vb) ** 2 / (va**2 / (a.size - 1) + vb**2 / (b.size - 1))


def _mean_squares(x: Floats) -> tuple[float, float, float]:
    """Mean squares of questions, of seeds, and of what neither explains."""
    seeds, questions = x.shape
    by_question, by_seed = x.mean(axis=0), x.mean(axis=1)
    rest = x - by_question - by_seed[:, None] + x.mean()
    return (
        seeds * float(by_question.var(ddof=1)),
        questions * float(by_seed.var(ddof=1)),
        float((rest**2).sum()) / ((seeds - 1) * (questions - 1)),
    )


def _combined(parts: list[tuple[float, float]], level: float) -> tuple[float, float]:
    """The sum of the variances, and the mean of their Student quantiles weighted by them."""
    variance = sum(part for part, _ in parts)
    quantiles = [student_t_quantile((1 + level) / 2, dof) for _, dof in parts]
    if variance == 0:
        return 0.0, quantiles[0]
    return variance, sum(part * t for (part, _), t in zip(parts, quantiles, strict=True)) / variance


def _symmetric(mean: float, parts: list[tuple[float, float]], level: float) -> Interval:
    variance, quantile = _combined(parts, level)
    half = quantile * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half, level)


def _crossed(values: ArrayLike) -> Floats:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 2 or min(x.shape) < 2:
        raise ValueError(f"an array [seed, question] with at least two of each is needed, not shape {x.shape}")
    return x
