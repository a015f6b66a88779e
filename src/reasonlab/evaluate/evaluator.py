"""The one evaluator: sample answers to problems, grade them, and summarise accuracy and length together.

Sample seeds depend on the problem and the sample number alone, not on the model or the training step: two
checkpoints answer with common random numbers, which makes their paired difference sharper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reasonlab.evaluate.responder import FAILED, Ask, EngineResponder, Placed, Progress, Responder, Response
from reasonlab.evaluate.statistics import Interval, length_text, mean_interval, score_interval
from reasonlab.grading.grade import Grade, grade
from reasonlab.grading.pool import shared_pool
from reasonlab.keys import key
from reasonlab.model.text_format import TextTokenizer, TinyFormat
from reasonlab.problems.problem import Problem
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Sampling
from reasonlab.wording import counted

FORCED_STYLE = "<think>"  # what the forced-style control appends to the prompt

Grader = Callable[[Problem, str], Grade]


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer, complete enough to grade it again without the model. Forced tokens count as tokens.

    `tokens` is -1 where an endpoint did not count them; `finish` is "error" where no answer came at all.
    """

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
    rule: str = ""

    def row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Task:
    """A problem, the question as its template puts it, and which samples of it are wanted."""

    problem: Problem
    question: str
    samples: Sequence[int]


@dataclass(frozen=True, slots=True)
class Summary:
    """Accuracy and length of a set of answers, with question-level 95 % intervals."""

    accuracy: Interval
    tokens: Interval
    questions: int
    samples: int
    truncated: float
    ungraded: int
    failed: int = 0  # of the ungraded: answers that never came

    def sentence(self, name: str, temperature: float, max_tokens: int, top_p: float = 1.0) -> str:
        a = self.accuracy
        nucleus = f", top-p {top_p:g}" if top_p < 1 else ""
        text = (
            f"{name} avg@{self.samples} = {100 * a.estimate:.1f} % [{100 * a.low:.1f}, {100 * a.high:.1f}] "
            f"({counted(self.questions, 'question')}, T={temperature:g}{nucleus}, {max_tokens} tokens at most, "
            f"{100 * self.truncated:.1f} % truncated, {length_text(self.tokens)} tokens/answer)"
        )
        text += f", {counted(self.failed, 'answer')} never came" if self.failed else ""
        rest = self.ungraded - self.failed
        return text + (f", {rest} answers could not be graded" if rest else "")


def evaluate(
    engine: Engine,
    tokenizer: TextTokenizer,
    problems: Sequence[Problem],
    sampling: Sampling,
    samples: int = 1,
    seed: int = 0,
    force: str = "",
    progress: Progress | None = None,
) -> list[Answer]:
    """`samples` answers to every problem of the tiny world, in order.

    `force` is a beginning of the response that every answer is made to have.
    """
    responder = EngineResponder(engine, TinyFormat(tokenizer, force))
    tasks = [Task(problem, problem.question, range(samples)) for problem in problems]
    return list(answers_to(tasks, responder, sampling, grade, seed, progress))


def answers_to(
    tasks: Sequence[Task],
    responder: Responder,
    sampling: Sampling,
    grader: Grader,
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[Answer]:
    """The answers in the responder's order, each once it is graded.

    Those that come together are graded side by side: what exact rules do not settle waits for math-verify's workers.
    The responder is asked for more only when all of them were handed out, so that whoever keeps them loses none.
    """
    asks = [
        Ask(task.question, [key(seed, "evaluate", task.problem.id, sample) for sample in task.samples])
        for task in tasks
    ]

    def graded(placed: Placed) -> Answer:
        number, place, response = placed
        task = tasks[number]
        return graded_answer(task.problem, task.samples[place], response, grader)

    with ThreadPoolExecutor(shared_pool().size) as threads:
        for together in responder.respond(asks, sampling, progress):
            yield from map(graded, together) if len(together) == 1 else threads.map(graded, together)


def graded_answer(problem: Problem, sample: int, response: Response, grader: Grader) -> Answer:
    failed = response.finish == FAILED
    verdict = Grade("error", None, f"no answer: {response.failure}") if failed else grader(problem, response.text)
    return Answer(
        problem=problem.id,
        family=problem.family,
        level=problem.level,
        question=problem.question,
        gold=problem.answer,
        sample=sample,
        verdict=verdict.verdict,
        extracted=verdict.extracted,
        tokens=response.tokens,
        finish=response.finish,
        text=response.text,
        rule=verdict.rule,
    )


def summarise(answers: Sequence[Answer]) -> Summary:
    """Answers that could not be graded are left out of the accuracy and counted; those that never came also have no
    length and are not truncated."""
    correct, tokens = by_question(answers)
    graded = [row[~np.isnan(row)] for row in correct]
    lengths = [float(row[~np.isnan(row)].mean()) for row in tokens if not np.isnan(row).all()]
    came = [answer for answer in answers if answer.finish != FAILED]
    return Summary(
        accuracy=score_interval(kept)
        if (kept := [row for row in graded if len(row)])
        else Interval(math.nan, 0.0, 1.0),
        tokens=mean_interval(lengths) if lengths else Interval(math.nan, math.nan, math.nan),
        questions=len(tokens),
        samples=max(len(row) for row in tokens),
        truncated=sum(a.finish == "length" for a in came) / max(len(came), 1),
        ungraded=sum(a.verdict in ("error", "timeout") for a in answers),
        failed=len(answers) - len(came),
    )


def by_question(answers: Sequence[Answer]) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Correctness (nan where ungraded) and tokens (nan where unknown), one array for each question in order of first
    appearance."""
    groups: dict[tuple[str, str], list[Answer]] = {}
    for answer in answers:
        groups.setdefault((answer.family, answer.problem), []).append(answer)
    score = {"correct": 1.0, "wrong": 0.0}
    correct = [np.array([score.get(a.verdict, np.nan) for a in group]) for group in groups.values()]
    return correct, [np.array([_tokens(a) for a in group]) for group in groups.values()]


def _tokens(answer: Answer) -> float:
    return float(answer.tokens) if answer.finish != FAILED and answer.tokens >= 0 else math.nan
