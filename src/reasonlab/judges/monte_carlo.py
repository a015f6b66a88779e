"""Step labels by Monte-Carlo rollouts (Math-Shepherd): a policy goes on from the end of each step, n times.

With c of the n completions from the end of step t ending in the right answer,

    hard label  1 if c > 0, else 0          soft label  c / n

and the first wrong step is the first from which nobody arrives. So a label speaks of the policy as much as of the step:
a strong one recovers from a wrong step, a weak one loses its way after a right one. The last step is not gone on from;
it is worth what the grader says of the response.

All steps of all candidates are one batch for the engine. A beginning that several responses share is gone on from
once: a completion's key names the problem, the text so far and the sample, so labels do not depend on the rest of the
pool or on its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import Grader
from reasonlab.evaluate.graders import grade_response
from reasonlab.evaluate.responder import Progress
from reasonlab.judges.labels import ALL_RIGHT, StepLabels
from reasonlab.judges.steps import Rule, spans_of
from reasonlab.judges.types import Candidate
from reasonlab.keys import key
from reasonlab.model.text_format import TextFormat
from reasonlab.problems.problem import Problem
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling


class Encodes(Protocol):
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class MonteCarlo:
    """For each step: how many completions were graded, and how many of those are right.

    Fewer are graded than were sampled where the grader itself failed.
    """

    right: tuple[int, ...]
    graded: tuple[int, ...]

    def labels(self, kind: Literal["hard", "soft"] = "hard") -> StepLabels | None:
        """None if a step has no graded completion: then nothing is known of it."""
        if not all(self.graded):
            return None
        first_wrong = next((i for i, right in enumerate(self.right) if right == 0), ALL_RIGHT)
        shares = [c / n for c, n in zip(self.right, self.graded, strict=True)]
        return StepLabels(tuple(float(c > 0) for c in self.right) if kind == "hard" else tuple(shares), first_wrong)


def monte_carlo(
    candidates: Sequence[Candidate],
    engine: Engine,
    text_format: TextFormat,
    tokenizer: Encodes,
    sampling: Sampling,
    completions: int = 8,
    rule: Rule = "tiny",
    grader: Grader = grade_response,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[MonteCarlo]:
    """Go on from every step of every candidate; `progress` is called with the number of completions just sampled."""
    if completions < 1:
        raise UserError("Monte-Carlo labels need at least one completion a step", "Eight are usual")
    ends = [[span.end for span in spans_of(candidate, rule)] for candidate in candidates]
    beginnings: dict[tuple[str, str], Candidate] = {
        (candidate.problem, candidate.response[:end]): candidate
        for candidate, its_ends in zip(candidates, ends, strict=True)
        for end in its_ends[:-1]
    }
    requests = []
    for (problem, text), candidate in beginnings.items():
        prompt = _prompt(candidate, text, text_format, tokenizer)
        _check_room(candidate, len(prompt), sampling, engine)
        requests.append(
            Request(prompt, [key(seed, "monte-carlo", problem, text, sample) for sample in range(completions)])
        )
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    groups = engine.generate(requests, sampling, progress)
    for ((name, text), candidate), group in zip(beginnings.items(), groups, strict=True):
        whole = [text + text_format.response(rollout.ids) for rollout in group]
        counts[name, text] = _counted(candidate, whole, grader)
    found = []
    for candidate, its_ends in zip(candidates, ends, strict=True):
        pairs = [counts[candidate.problem, candidate.response[:end]] for end in its_ends[:-1]]
        pairs += [_counted(candidate, [candidate.response], grader)] if its_ends else []
        found.append(MonteCarlo(tuple(right for right, _ in pairs), tuple(graded for _, graded in pairs)))
    return found


def _prompt(candidate: Candidate, text: str, text_format: TextFormat, tokenizer: Encodes) -> list[int]:
    """The question and the beginning of the response. A template may have opened the response already."""
    prompt = text_format.prompt(candidate.question)
    if not text.startswith(prompt.opening):
        raise UserError(
            f"a response to {candidate.problem} does not begin with {prompt.opening!r}, as this model's responses do",
            "Label it with a model of the kind that wrote it",
        )
    return prompt.ids + tokenizer.encode(text.removeprefix(prompt.opening))


def _check_room(candidate: Candidate, tokens: int, sampling: Sampling, engine: Engine) -> None:
    room = engine.model.config.max_positions
    if tokens + sampling.max_tokens > room:
        raise UserError(
            f"a response to {candidate.problem} has {tokens:,} tokens at the end of a step and completions may have "
            f"{sampling.max_tokens:,}, but the model reads {room:,} at most",
            "Allow shorter completions, or leave this response out",
        )


def _counted(candidate: Candidate, texts: Sequence[str], grader: Grader) -> tuple[int, int]:
    problem = Problem(candidate.problem, candidate.question, candidate.answer, candidate.family, candidate.level)
    verdicts = [grader(problem, text).verdict for text in texts]
    return verdicts.count("correct"), verdicts.count("correct") + verdicts.count("wrong")
