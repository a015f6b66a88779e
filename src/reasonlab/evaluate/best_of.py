"""Choosing among the answers of an evaluation with a judge: best-of-N, weighted majority, majority, oracle.

The judge's scores lie beside the answers (`judged-….jsonl`, one file a judge), so that an evaluation that was killed
goes on, and another N or another aggregate of steps costs nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import Answer
from reasonlab.evaluate.intervals import Interval
from reasonlab.evaluate.responder import FAILED
from reasonlab.wording import counted

if TYPE_CHECKING:
    from reasonlab.judges.bench import Question
    from reasonlab.judges.opened import JudgeAtWork
    from reasonlab.judges.types import Aggregate

SEED = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """What N answers to each question are worth when one is chosen. `short` questions have fewer than N graded ones."""

    n: int
    questions: int
    short: int
    best: Interval
    weighted_majority: Interval
    majority: Interval
    oracle: Interval

    def sentence(self, name: str) -> str:
        parts = {
            "best": self.best,
            "weighted-majority": self.weighted_majority,
            "maj": self.majority,
            "pass": self.oracle,
        }
        told = ", ".join(
            f"{what}@{self.n} = {100 * i.estimate:.1f} % [{100 * i.low:.1f}, {100 * i.high:.1f}]"
            for what, i in parts.items()
        )
        left_out = f", {self.short} left out with fewer than {self.n} graded answers" if self.short else ""
        return f"{name} {told} ({counted(self.questions, 'question')}{left_out})"


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of a judge by benchmark, the total first."""

    judge: str
    identity: dict[str, Any]
    ranked_by: dict[str, Any]
    weight: str
    by_name: dict[str, Choice]

    def sentences(self) -> list[str]:
        lines = [choice.sentence(name) for name, choice in self.by_name.items()]
        votes = "the score" if self.weight == "score" else "the logistic function of the score"
        return [*lines, f"chosen by {self.judge}; votes weighted by {votes}"]

    def data(self) -> dict[str, Any]:
        return {
            "judge": {"place": self.judge, **self.identity},
            "ranked_by": self.ranked_by,
            "weight": self.weight,
            "scores": {name: asdict(choice) for name, choice in self.by_name.items()},
        }


@dataclass(slots=True)
class Chooser:
    """An opened judge and how it is used. Opened before anything is asked, so that mistakes show at once."""

    judging: JudgeAtWork
    n: int
    steps: Aggregate
    alpha: float
    failure: UserError | None = None  # why it could not choose

    def choose(
        self, answers: Sequence[Answer], settings: Mapping[str, Any], directory: Path | None, quiet: bool
    ) -> Choices:
        """Score all answers that came, continuing the scores in the directory, and measure."""
        from reasonlab.judges.bench import selection_curves
        from reasonlab.judges.inputs import candidate_of, scored_by
        from reasonlab.judges.score_log import kept_beside

        came = [answer for answer in answers if answer.finish != FAILED]
        log = None if directory is None else kept_beside(directory, self.judging.identity)
        scored = scored_by(self.judging, [candidate_of(answer.row()) for answer in came], log, quiet)
        values = [one.overall(self.alpha, self.steps) for one in scored]
        questions = _questions(came, values)
        families = dict.fromkeys(family for family, _ in questions)
        panels = {family: [q for (f, _), q in questions.items() if f == family] for family in families}
        if len(panels) > 1 or settings["suite"]:
            panels = {settings["suite"] or "total": list(questions.values()), **panels}
        weight = "score" if self.judging.probability else "sigmoid"
        by_name: dict[str, Choice] = {}
        for name, panel in panels.items():
            kept = [question for question in panel if len(question.scores) >= self.n]
            if kept:
                curves = selection_curves(kept, [self.n], "score" if weight == "score" else "sigmoid", seed=SEED)
                parts = (curves.best_of_n, curves.weighted_majority, curves.majority, curves.oracle)
                by_name[name] = Choice(self.n, len(kept), len(panel) - len(kept), *(part[0] for part in parts))
        if not by_name:
            raise UserError(f"no question has {self.n} graded answers", "Choose a smaller --best-of")
        ranked_by = {"steps": self.steps, "alpha": self.alpha}
        return Choices(self.judging.place, self.judging.identity, ranked_by, weight, by_name)


def open_chooser(arguments: argparse.Namespace, k: int) -> Chooser | None:
    """The judge of --judge, checked against the k answers there are to each question; None without one."""
    if arguments.judge is None:
        if arguments.best_of is not None:
            raise UserError("--best-of needs a judge that chooses", "Give --judge J")
        return None
    n = k if arguments.best_of is None else arguments.best_of
    if not 2 <= n <= k:
        raise UserError(f"nothing can be chosen: --best-of {n} of --k {k} answers", "Give 2 <= best-of <= k")
    from reasonlab.judges.opened import open_at_work

    judging = open_at_work(arguments.judge, arguments.judge_kind, device=arguments.device, threads=arguments.threads)
    return Chooser(judging, n, arguments.steps, arguments.alpha)


def _questions(answers: Sequence[Answer], values: Sequence[float]) -> dict[tuple[str, str], Question]:
    """The graded answers of each question. A vote is what the grader extracted."""
    from reasonlab.judges.bench import Question

    groups: dict[tuple[str, str], list[tuple[Answer, float]]] = {}
    for answer, value in zip(answers, values, strict=True):
        mine = groups.setdefault((answer.family, answer.problem), [])
        if answer.verdict in ("correct", "wrong"):
            mine.append((answer, value))
    return {
        place: Question(
            "/".join(place),
            np.array([value for _, value in group]),
            np.array([float(answer.verdict == "correct") for answer, _ in group]),
            ["".join(answer.extracted.split()) if answer.extracted else None for answer, _ in group],
        )
        for place, group in groups.items()
    }
