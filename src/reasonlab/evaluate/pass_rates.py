"""What a model can do with the problems of a pool: guesses without reasoning, and pass rates; for `data curate`.

Both are kept in evaluation records (`guesses/` and `samples/` in one directory), so that a killed curation goes on
where it was. A record holds whatever was asked with its settings: another limit, threshold or number of samples asks
only for what is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from reasonlab import __version__
from reasonlab.evaluate.evaluator import Answer, Grader, Task, answers_to, graded_answer
from reasonlab.evaluate.graders import FAMILY, MATHEMATICS, TINY, grader_for, grader_version
from reasonlab.evaluate.opened_model import open_model
from reasonlab.evaluate.panels import QUESTION
from reasonlab.evaluate.record import ABOUT, EvaluationRecord, Place
from reasonlab.evaluate.responder import FAILED, EngineResponder, Responder, Response
from reasonlab.grading.extract import extract
from reasonlab.grading.grade import Grade
from reasonlab.keys import key
from reasonlab.model.text_format import ChatFormat, Prompt, TinyFormat
from reasonlab.problems.curation import of_tiny_world
from reasonlab.problems.problem import Problem
from reasonlab.problems.registry import prompts
from reasonlab.rollout.types import Sampling

EXTRACTION = "explicit"  # of models that are not tiny; what rewards use
GUESS_PROMPT = QUESTION + "\n\nGive only the final answer, within \\boxed{}. Do not reason and do not explain."
TINY_GUESS = "Answer:"  # how the response of a tiny model is made to begin
TINY_GUESS_TOKENS, GUESS_TOKENS = 16, 64  # room for an answer and for little else
LONGEST_BARE_GUESS = 60  # characters of a line that may be an answer without a mark

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Tally:
    """The answers to one problem. Those that never came and those the grader failed on are not graded."""

    correct: int = 0
    graded: int = 0
    failed: int = 0  # never came
    cut: int = 0  # ended by the limit of tokens

    @property
    def rate(self) -> float | None:
        return self.correct / self.graded if self.graded else None

    def take(self, answer: Answer) -> None:
        self.correct += answer.verdict == "correct"
        self.graded += answer.verdict in ("correct", "wrong")
        self.failed += answer.finish == FAILED
        self.cut += answer.finish == "length"


@dataclass(frozen=True, slots=True)
class _Stage:
    """One way of asking."""

    name: str
    template: str
    sampling: Sampling
    grader: Grader
    seed: int
    responder: Callable[[], Responder]


class Examiner:
    """Asks one model, opened once. `arguments` are those of `eval` that concern the model and the sampling."""

    def __init__(self, arguments: argparse.Namespace, directory: Path, progress: Progress) -> None:
        self.model = open_model(arguments)
        self.directory, self.progress, self.seed = directory, progress, int(arguments.seed)
        self.template_arguments = sorted(arguments.template_arg or [])
        extraction = TINY if self.model.tiny else EXTRACTION
        self.graders = {tiny: grader_for(extraction, FAMILY if tiny else MATHEMATICS) for tiny in (True, False)}

    def samples(self, problems: Sequence[Problem], count: int) -> dict[str, Tally]:
        """`count` answers to every problem, as in training."""
        template = QUESTION if self.model.tiny else prompts()["boxed"]
        sampling = self.model.sampling
        stage = _Stage("samples", template, sampling, self._grade, self.seed, lambda: self._responder(sampling))
        return self._ask(stage, problems, count)

    def guesses(self, problems: Sequence[Problem], count: int) -> dict[str, Tally]:
        """`count` answers without reasoning."""
        tokens = TINY_GUESS_TOKENS if self.model.tiny else GUESS_TOKENS
        sampling = replace(self.model.sampling, max_tokens=min(tokens, self.model.sampling.max_tokens))
        stage = _Stage(
            "guesses",
            QUESTION if self.model.tiny else GUESS_PROMPT,
            sampling,
            self._grade if self.model.tiny else self._grade_guess,
            key(self.seed, "guesses"),  # other random numbers than the samples have
            lambda: _without_reasoning(self._responder(sampling)),
        )
        return self._ask(stage, problems, count)

    def _responder(self, sampling: Sampling) -> Responder:
        return self.model.respond_with(sampling, True)

    def _grade(self, problem: Problem, text: str) -> Grade:
        return self.graders[of_tiny_world(problem)](problem, text)

    def _grade_guess(self, problem: Problem, text: str) -> Grade:
        """A model that gives nothing but the answer may leave out the box."""
        bare = text.rpartition("</think>")[2].strip()
        unmarked = extract(text, EXTRACTION) is None and bare and len(bare) <= LONGEST_BARE_GUESS and "\n" not in bare
        return self._grade(problem, f"\\boxed{{{bare.rstrip('.')}}}" if unmarked else text)

    def _ask(self, stage: _Stage, problems: Sequence[Problem], count: int) -> dict[str, Tally]:
        settings = self._settings(stage)
        tallies = {problem.id: Tally() for problem in problems}
        with EvaluationRecord.start(self.directory / stage.name, settings) as record:
            found = _known(record, settings, stage.grader, problems, count)
            for answer in found.values():
                tallies[answer.problem].take(answer)
            tasks = [
                Task(problem, stage.template.replace(QUESTION, problem.question), missing)
                for problem in problems
                if (missing := [i for i in range(count) if (problem.family, problem.id, i) not in found])
            ]
            done, total = len(found), len(problems) * count

            def progress(more: int) -> None:
                nonlocal done
                done += more
                self.progress(stage.name, done, total)

            if tasks:
                responder = stage.responder()
                for answer in answers_to(tasks, responder, stage.sampling, stage.grader, stage.seed, progress):
                    record.append(answer)
                    tallies[answer.problem].take(answer)
        return tallies

    def _settings(self, stage: _Stage) -> dict[str, Any]:
        return {
            "version": 1,
            "stage": stage.name,
            "model": self.model.identity,
            "template": stage.template,
            "template_arguments": self.template_arguments,
            "sampling": {**asdict(stage.sampling), "stop_ids": list(stage.sampling.stop_ids), "stop_strings": []},
            "seed": self.seed,
            ABOUT: {"model": self.model.place, "reasonlab": __version__, "grader": grader_version()},
        }


def _known(
    record: EvaluationRecord, settings: Mapping[str, Any], grader: Grader, problems: Sequence[Problem], count: int
) -> dict[Place, Answer]:
    """The answers of earlier attempts to these very problems, all by the present grader."""
    answers = record.answers()
    if record.settings[ABOUT]["grader"] != settings[ABOUT]["grader"]:
        answers = {place: _regraded(answer, grader) for place, answer in answers.items()}
        record.replace(answers, settings)
    asked = {(problem.family, problem.id): problem for problem in problems}
    return {
        place: replace(answer, text="")  # long, and of no more use here
        for place, answer in answers.items()
        if (problem := asked.get((answer.family, answer.problem))) is not None
        and (answer.question, answer.gold) == (problem.question, problem.answer)
        and answer.sample < count
        and answer.finish != FAILED
    }


def _regraded(answer: Answer, grader: Grader) -> Answer:
    if answer.finish == FAILED:
        return answer
    problem = Problem(answer.problem, answer.question, answer.gold, answer.family, answer.level)
    return graded_answer(problem, answer.sample, Response(answer.text, answer.tokens, answer.finish), grader)


def _without_reasoning(responder: Responder) -> Responder:
    """A responder of ours whose models have no room to think; an endpoint can only be asked for it."""
    if not isinstance(responder, EngineResponder):
        return responder
    if isinstance(responder.format, ChatFormat):
        return EngineResponder(responder.engine, _ThoughtClosed(responder.format), responder.at_once)
    assert isinstance(responder.format, TinyFormat)
    guess = TinyFormat(responder.format.tokenizer, TINY_GUESS)
    return EngineResponder(responder.engine, guess, responder.at_once)


class _ThoughtClosed:
    """A chat format whose answers begin behind an empty thought, for models that know how to think."""

    def __init__(self, inner: ChatFormat) -> None:
        self.inner = inner
        self.thinks = len(inner.tokenizer.encode("<think>")) == 1

    def prompt(self, question: str) -> Prompt:
        return self.prompts([question])[0]

    def prompts(self, questions: Sequence[str]) -> list[Prompt]:
        return [self._closed(*one) for one in zip(questions, self.inner.prompts(questions), strict=True)]

    def _closed(self, question: str, prompt: Prompt) -> Prompt:
        closing = ""
        if prompt.opening:  # the template has opened the thought
            closing = "\n</think>\n\n"
        elif self.thinks and not self.inner.tokenizer.chat_text(question).rstrip().endswith("</think>"):
            closing = "<think>\n\n</think>\n\n"
        return Prompt(prompt.ids + self.inner.tokenizer.encode(closing), prompt.opening + closing)

    def response(self, ids: Sequence[int]) -> str:
        return self.inner.response(ids)

    def responses(self, many: Sequence[Sequence[int]]) -> list[str]:
        return self.inner.responses(many)
