"""How a training problem is put to the model, and how a response is read and graded: the same for every source.

Tiny models get the bare question and mark their answer with `Answer:`. Language models get the instruction that
evaluation gives them, inside their chat template, and mark it with a box (or as `reward.extraction` says).
"""

from __future__ import annotations

from collections.abc import Sequence

from reasonlab.evaluate.graders import FAMILY, MATHEMATICS, TINY, grader_for
from reasonlab.evaluate.panels import QUESTION
from reasonlab.grading.grade import Grade
from reasonlab.grading.pool import side_by_side
from reasonlab.model.text_format import ModelFormat, Prompt, TinyFormat
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.curation import of_tiny_world
from reasonlab.problems.problem import Problem
from reasonlab.problems.registry import prompts
from reasonlab.rollout.types import Rollout

INSTRUCTION = "boxed"  # of the registry's prompts: reason step by step, final answer in a box


class Exchange:
    """Question, response and grade, for one model."""

    def __init__(self, text_format: ModelFormat, extraction: str = "explicit") -> None:
        self.format = text_format
        self.tiny = isinstance(text_format, TinyFormat)
        self.template = QUESTION if self.tiny else prompts()[INSTRUCTION]
        extraction = TINY if self.tiny else extraction
        self._graders = {own: grader_for(extraction, FAMILY if own else MATHEMATICS) for own in (True, False)}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.format.stop_ids

    def prompt(self, problem: Problem) -> Prompt:
        return self.format.prompt(self._asked(problem))

    def prompts(self, problems: Sequence[Problem]) -> list[Prompt]:
        return self.format.prompts([self._asked(problem) for problem in problems])

    def prompt_lengths(self, problems: Sequence[Problem]) -> list[int]:
        """In tokens."""
        return [len(prompt.ids) for prompt in self.prompts(problems)]

    def _asked(self, problem: Problem) -> str:
        return self.template.replace(QUESTION, problem.question)

    def written_prompt(self, text: str) -> list[int]:
        """The tokens of a prompt that is not just a question; a tiny model's is written with its special tokens."""
        return self.format.tokenizer.encode(text) if self.tiny else self.format.prompt(text).ids

    def response_ids(self, text: str) -> list[int]:
        """The tokens of a written response, its end token included."""
        ids = self.format.response_ids(text)
        if isinstance(self.format, TinyFormat) and TinyTokenizer.unknown_id in ids:
            raise ValueError("it is not in the tiny models' language")
        return ids

    @property
    def fingerprint(self) -> str:
        """Of the tokenizer; empty for the tiny models', which all have the same."""
        return "" if isinstance(self.format, TinyFormat) else self.format.tokenizer.fingerprint

    def text(self, ids: Sequence[int]) -> str:
        """A whole response: what the prompt has opened of it, and its tokens."""
        return self.format.opening + self.format.response(ids)

    def texts(self, rollouts: Sequence[Rollout]) -> list[str]:
        """The whole responses of many rollouts."""
        return [self.format.opening + text for text in self.format.responses([r.ids for r in rollouts])]

    def grade(self, problem: Problem, text: str) -> Grade:
        return self._graders[of_tiny_world(problem)](problem, text)

    def grades(self, groups: Sequence[tuple[Problem, Sequence[Rollout]]]) -> list[list[Grade]]:
        """The grades of all rollouts. What exact rules do not settle waits for math-verify's workers side by side."""
        problems = [problem for problem, rollouts in groups for _ in rollouts]
        texts = self.texts([rollout for _, rollouts in groups for rollout in rollouts])
        pairs = list(zip(problems, texts, strict=True))
        if all(of_tiny_world(problem) for problem, _ in groups):
            flat = iter([self.grade(*pair) for pair in pairs])
        else:
            flat = iter(side_by_side(lambda pair: self.grade(*pair), pairs))
        return [[next(flat) for _ in rollouts] for _, rollouts in groups]


def tiny_exchange(tokenizer: TinyTokenizer | None = None) -> Exchange:
    return Exchange(TinyFormat(tokenizer or TinyTokenizer.load()))
