"""The one evaluator: sample answers to problems, grade them, and summarise accuracy and length together.

Sample seeds depend on the problem and the sample number alone, not on the model or the training step: two
checkpoints answer with common random numbers, which makes their paired difference sharper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from reasonlab.evaluate.statistics import Interval, mean_interval, score_interval
from reasonlab.grading.grade import grade
from reasonlab.keys import key
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.problem import Problem
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling

FORCED_STYLE = "<think>"  # what the forced-style control appends to the prompt


class TextTokenizer(Protocol):
    eos_id: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer, complete enough to grade it again without the model. Forced tokens count as tokens."""

    problem: str
    family: str
    level: int
    question: str
    gold: str
    sample: int
    verdict: str
    extracted: str | None
    tokens: int
    finish: str
    text: str

    def row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Summary:
    """Accuracy and length of a set of answers, with question-level 95 % intervals."""

    accuracy: Interval
    tokens: Interval
    questions: int
    samples: int
    truncated: float
    ungraded: int

    def sentence(self, name: str, temperature: float, max_tokens: int) -> str:
        a, t = self.accuracy, self.tokens
        text = (
            f"{name} avg@{self.samples} = {100 * a.estimate:.1f} % [{100 * a.low:.1f}, {100 * a.high:.1f}] "
            f"({self.questions} questions, T={temperature:g}, {max_tokens} tokens at most, "
            f"{100 * self.truncated:.1f} % truncated, {t.estimate:.1f} [{t.low:.1f}, {t.high:.1f}] tokens/answer)"
        )
        return text + (f", {self.ungraded} answers could not be graded" if self.ungraded else "")


def evaluate(
    engine: Engine,
    tokenizer: TextTokenizer,
    problems: Sequence[Problem],
    sampling: Sampling,
    samples: int = 1,
    seed: int = 0,
    force: str = "",
    progress: Callable[[int], None] | None = None,
) -> list[Answer]:
    """`samples` answers to every problem. `force` is a beginning of the response that every answer is made to have."""
    forced = tokenizer.encode(force) if force else []
    requests = [
        Request(
            prompt=tokenizer.encode(prompt_text(problem.question)) + forced,
            keys=[key(seed, "evaluate", problem.id, sample) for sample in range(samples)],
        )
        for problem in problems
    ]
    answers = []
    for problem, group in zip(problems, engine.generate(requests, sampling, progress), strict=True):
        for sample, rollout in enumerate(group):
            text = force + tokenizer.decode(rollout.ids)
            verdict = grade(problem, text)
            answers.append(
                Answer(
                    problem=problem.id,
                    family=problem.family,
                    level=problem.level,
                    question=problem.question,
                    gold=problem.answer,
                    sample=sample,
                    verdict=verdict.verdict,
                    extracted=verdict.extracted,
                    tokens=len(forced) + len(rollout.ids),
                    finish=rollout.finish,
                    text=text,
                )
            )
    return answers


def summarise(answers: Sequence[Answer]) -> Summary:
    """Answers that could not be graded are left out of the accuracy and counted."""
    correct, tokens = by_question(answers)
    graded = [row[~np.isnan(row)] for row in correct]
    return Summary(
        accuracy=score_interval([row for row in graded if len(row)]),
        tokens=mean_interval([float(row.mean()) for row in tokens]),
        questions=len(tokens),
        samples=max(len(row) for row in tokens),
        truncated=sum(a.finish == "length" for a in answers) / len(answers),
        ungraded=sum(a.verdict in ("error", "timeout") for a in answers),
    )


def by_question(answers: Sequence[Answer]) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Correctness (nan where ungraded) and tokens, one array for each question in order of first appearance."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.problem, []).append(answer)
    score = {"correct": 1.0, "wrong": 0.0}
    correct = [np.array([score.get(a.verdict, np.nan) for a in group]) for group in groups.values()]
    return correct, [np.array([float(a.tokens) for a in group]) for group in groups.values()]
