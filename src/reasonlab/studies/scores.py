"""Scores of several training seeds on the same questions, and the intervals that claims are judged by.

A quantity is an array [seed, question] of question means. With one seed an interval speaks of questions like these;
with several also of the method trained again (`evaluate/seeds.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reasonlab.evaluate.evaluator import Answer
from reasonlab.evaluate.statistics import (
    Interval,
    mean_interval,
    score_interval,
    seed_mean_interval,
    seed_score_interval,
)
from reasonlab.studies.verdicts import ArmCost

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scores:
    """One arm at one point of training: accuracy and tokens [seed, question], and every single answer's length."""

    problems: tuple[str, ...]
    accuracy: Floats
    tokens: Floats
    lengths: Floats
    samples: int

    @classmethod
    def of(cls, answers: Sequence[Sequence[Answer]]) -> Scores:
        """From the answers of each seed. Questions without a graded answer in some seed are left out of all."""
        tables = [_by_problem(one) for one in answers]
        shared = [problem for problem in tables[0] if all(problem in table for table in tables)]
        kept = set(shared)
        return cls(
            problems=tuple(shared),
            accuracy=np.array([[table[problem][0] for problem in shared] for table in tables]),
            tokens=np.array([[table[problem][1] for problem in shared] for table in tables]),
            lengths=np.array([a.tokens for one in answers for a in one if _question(a) in kept], np.float64),
            samples=max(a.sample for a in answers[0]) + 1,
        )

    @property
    def seeds(self) -> int:
        return len(self.accuracy)

    def only(self, problems: Iterable[str]) -> Scores:
        """The scores of these questions, and the lengths of all answers."""
        kept = set(problems)
        places = [place for place, problem in enumerate(self.problems) if problem in kept]
        if len(places) == len(self.problems):
            return self
        return replace(
            self,
            problems=tuple(self.problems[i] for i in places),
            accuracy=self.accuracy[:, places],
            tokens=self.tokens[:, places],
        )

    def accuracy_interval(self) -> Interval:
        if self.seeds > 1 and len(self.problems) > 1:
            return seed_score_interval(self.accuracy)
        # A mean of k grades counts as k answers: with more of them the score of a question is known better.
        return score_interval([[x] * self.samples for x in self.accuracy.mean(axis=0)])

    def tokens_interval(self) -> Interval:
        return interval(self.tokens)


def _by_problem(answers: Sequence[Answer]) -> dict[str, tuple[float, float]]:
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.verdict in ("correct", "wrong"):
            groups.setdefault(_question(answer), []).append(answer)
    return {
        problem: (float(np.mean([a.verdict == "correct" for a in group])), float(np.mean([a.tokens for a in group])))
        for problem, group in groups.items()
    }


def _question(answer: Answer) -> str:
    """Its problem, named so that problems of two benchmarks with the same id stay two."""
    return f"{answer.family}: {answer.problem}"


def arm_cost(arm: str, scores: Scores, states: Iterable[Path]) -> ArmCost:
    """What an arm reached, and what it took by the files that say so: of runs, or of what was sampled for them."""
    taken = [json.loads(state.read_text()) for state in states]
    return ArmCost(
        arm,
        float(scores.accuracy.mean()),
        float(scores.tokens.mean()),
        sum(one["generated_tokens"] for one in taken),
        round(sum(one["seconds"] for one in taken), 1),
    )


def panels_of(answers: Sequence[Sequence[Answer]], part: Callable[[Answer], str]) -> dict[str, Scores]:
    """The scores of each part of the questions, named by `part`."""
    names = dict.fromkeys(part(answer) for answer in answers[0])
    return {name: Scores.of([[a for a in one if part(a) == name] for one in answers]) for name in names}


def interval(values: Floats) -> Interval:
    """The mean of a quantity [seed, question]; a single question says nothing about others, whatever the seeds."""
    return seed_mean_interval(values) if min(values.shape) > 1 else mean_interval(values.mean(axis=0))


def difference(a: Floats, b: Floats) -> Interval:
    """How much higher b is than a: same questions, runs matched seed by seed."""
    return interval(b - a)


def ratio(a: Floats, b: Floats) -> Interval:
    """R = mean(b) / mean(a), by linearisation: Var R ≈ Var mean((b − R·a) / mean(a)). Unknown if a is all zero."""
    if not a.any():
        return Interval(math.nan, -math.inf, math.inf)
    estimate = float(b.mean() / a.mean())
    around = interval((b - estimate * a) / a.mean())
    return Interval(estimate, estimate + around.low, estimate + around.high)


def points(value: Interval) -> Interval:
    """A difference of fractions in percentage points."""
    return Interval(100 * value.estimate, 100 * value.low, 100 * value.high, value.level)
