"""The template-guided reward of a whole trajectory (ReasonFlux-PRM): is its strategy one that others can carry out?

1. The strategy of a response is written down as a template, without its concrete calculations.
2. A policy answers the question N times, following the template.
3. r^final = (1/N) Σ_j 1[y^(j) is right].

In the tiny world a template is the operations of the steps that the response stands by, without their numbers. A tiny
policy is made to follow it (`follow_operations`): it chooses the numbers and calculates, and wherever it has written an
operation the template's takes its place. A policy that was taught to use hints may get the template as one instead
(`tiny_guide`); the bundled models were not, and a hint only confuses them. For real models a language model writes the
template, and the prompt asks to follow it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from reasonlab.judges.prompt_files import filled
from reasonlab.judges.steps import steps_of
from reasonlab.judges.types import Candidate, Progress
from reasonlab.keys import key
from reasonlab.model.tiny_tokenizer import END_THINK, EOS, THINK, TinyTokenizer
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.problem import Problem
from reasonlab.rollout.endpoint import Endpoint, Job
from reasonlab.rollout.types import Request, Sampling

if TYPE_CHECKING:  # these modules import torch
    from reasonlab.evaluate.evaluator import Grader
    from reasonlab.evaluate.responder import Responder
    from reasonlab.rollout.engine import Engine

SAMPLING = Sampling(temperature=0.6, top_p=0.95, max_tokens=1024)
MOST_TAKEN_BACK = 4  # steps of one answer
_OPERATION = re.compile(r"[0-9]+([-+*/%])[0-9]+=")
_TAKEN_BACK = re.compile(r" no\b")

Guide = Callable[[str, str], str]  # question and template -> what the policy is asked


@dataclass(frozen=True, slots=True)
class TemplateReward:
    """How many of the answers that follow a template could be graded, and how many of those are right."""

    right: int
    graded: int

    @property
    def share(self) -> float | None:
        """None if no answer could be graded."""
        return self.right / self.graded if self.graded else None


def tiny_template(candidate: Candidate) -> str:
    """The operations of the steps that are not taken back, like `rule * * +`; nothing for a response without steps."""
    steps = [step for step in steps_of(candidate, "tiny") if not _TAKEN_BACK.search(step)]
    operations = [found[1] for step in steps if (found := _OPERATION.match(step.removeprefix("<think>")))]
    return f"rule {' '.join(operations)}" if operations else ""


def tiny_guide(question: str, template: str) -> str:
    """The question with the template as a hint: what `problems/reflections.py` writes, but for the beginning token."""
    return f"{question}\nhint {template}" if template else question


def language_guide(question: str, template: str) -> str:
    return filled("follow_template.txt", question=question, template=template)


def extract_templates(
    candidates: Sequence[Candidate], endpoint: Endpoint, sampling: Sampling = SAMPLING, seed: int = 0
) -> list[str | None]:
    """A template for each candidate from a language model; None where it gave none."""
    jobs = [
        Job(
            filled("extract_template.txt", question=one.question, response=one.response),
            key(seed, "template", one.problem, one.response),
        )
        for one in candidates
    ]
    found: list[str | None] = [None] * len(candidates)
    for number, completion in endpoint.complete_all(jobs, sampling):
        text = completion.text.rpartition("</think>")[2].strip()
        if text and not completion.failure and completion.finish != "length":
            found[number] = text
    return found


def template_rewards(
    candidates: Sequence[Candidate],
    templates: Sequence[str | None],
    responder: Responder,
    guide: Guide,
    grader: Grader,
    sampling: Sampling,
    samples: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[TemplateReward | None]:
    """The reward of each candidate's template; None where there is no template.

    Candidates of one problem that share a template share the answers: a sample's key names problem and template.
    """
    from reasonlab.evaluate.responder import FAILED, Ask

    distinct = _distinct(candidates, templates)
    names = list(distinct)
    asks = [
        Ask(guide(one.question, template), [key(seed, "follow", problem, template, j) for j in range(samples)])
        for (problem, template), one in distinct.items()
    ]
    verdicts: dict[tuple[str, str], list[str]] = {name: [] for name in names}
    for number, _, response in chain.from_iterable(responder.respond(asks, sampling, progress)):
        if response.finish != FAILED:
            verdicts[names[number]].append(_verdict(distinct[names[number]], response.text, grader))
    return _rewards(candidates, templates, verdicts)


@dataclass(slots=True)
class _Follower:
    """One answer on its way through a template."""

    name: tuple[str, str]
    sample: int
    operations: list[str]
    ids: list[int]
    response_from: int
    done: int = 0  # operations
    taken_back: int = 0  # steps
    lost: bool = False


def follow_operations(
    candidates: Sequence[Candidate],
    templates: Sequence[str | None],
    engine: Engine,
    tokenizer: TinyTokenizer,
    grader: Grader,
    sampling: Sampling,
    samples: int = 8,
    seed: int = 0,
) -> list[TemplateReward | None]:
    """The reward of templates of the tiny world, by a policy that is made to follow them.

    Step by step it writes until its first operation, which the template's replaces, and on to the end of the step. A
    step that it takes back itself is done again, a few times. After the last operation the thought is closed and the
    answer asked for. Whoever does not get to an operation or to the end of a step, or outgrows the model, has failed to
    follow. An empty template forces nothing: the policy answers as it likes.
    """
    distinct = _distinct(candidates, templates)
    followers = []
    for (problem, template), candidate in distinct.items():
        operations, prompt = template.split()[1:], tokenizer.encode(prompt_text(candidate.question))
        opened = prompt + tokenizer.encode(THINK) if operations else prompt
        followers += [_Follower((problem, template), j, operations, list(opened), len(prompt)) for j in range(samples)]
    operators = {tokenizer.encode(sign)[0]: sign for sign in "+-*/%"}
    ends = {tokenizer.encode(end)[0]: end for end in (";", END_THINK)}

    def go_on(active: Sequence[_Follower], until: Sequence[int], stage: str) -> None:
        room = engine.model.config.max_positions - sampling.max_tokens
        for one in active:
            one.lost = one.lost or len(one.ids) > room
        active = [one for one in active if not one.lost]
        stops = replace(sampling, stop_ids=(*until, tokenizer.encode(EOS)[0]))
        requests = [Request(one.ids, [key(seed, "follow", *one.name, one.sample, stage)]) for one in active]
        for one, (rollout,) in zip(active, engine.generate(requests, stops), strict=True):
            one.ids = one.ids + rollout.ids
            one.lost = rollout.finish != "stop" or one.ids[-1] not in until

    turn = 0
    while active := [one for one in followers if one.done < len(one.operations) and not one.lost]:
        starts = [len(one.ids) for one in active]
        go_on(active, tuple(operators), f"operands {turn}")
        for one in active:
            one.ids[-1] = tokenizer.encode(one.operations[one.done])[0]
        go_on(active, tuple(ends), f"result {turn}")
        for one, start in zip(active, starts, strict=True):
            if _TAKEN_BACK.search(tokenizer.decode(one.ids[start:])):
                one.taken_back += 1
                one.lost = one.lost or one.taken_back > MOST_TAKEN_BACK
            else:
                one.done += 1
            one.ids[-1:] = tokenizer.encode(";" if one.done < len(one.operations) else f"{END_THINK}Answer:")
        turn += 1
    go_on([one for one in followers if not one.lost], (tokenizer.encode(EOS)[0],), "answer")
    verdicts: dict[tuple[str, str], list[str]] = {name: [] for name in distinct}
    for one in followers:
        text = tokenizer.decode(one.ids[one.response_from :])
        verdicts[one.name].append("wrong" if one.lost else _verdict(distinct[one.name], text, grader))
    return _rewards(candidates, templates, verdicts)


def tiny_rewards(
    candidates: Sequence[Candidate],
    engine: Engine,
    tokenizer: TinyTokenizer,
    sampling: Sampling,
    samples: int = 8,
    seed: int = 0,
) -> list[TemplateReward]:
    """The reward of each candidate's own template by the tiny world's rule; `sampling` limits the tokens of a step."""
    from reasonlab.evaluate.graders import grade_response

    templates = [tiny_template(candidate) for candidate in candidates]
    found = follow_operations(candidates, templates, engine, tokenizer, grade_response, sampling, samples, seed)
    return [reward for reward in found if reward is not None]  # all of them: a tiny template is never missing


def _distinct(candidates: Sequence[Candidate], templates: Sequence[str | None]) -> dict[tuple[str, str], Candidate]:
    """A candidate for each problem and template."""
    pairs = zip(candidates, templates, strict=True)
    return {(one.problem, template): one for one, template in pairs if template is not None}


def _verdict(candidate: Candidate, text: str, grader: Grader) -> str:
    problem = Problem(candidate.problem, candidate.question, candidate.answer, candidate.family, candidate.level)
    return grader(problem, text).verdict


def _rewards(
    candidates: Sequence[Candidate], templates: Sequence[str | None], verdicts: Mapping[tuple[str, str], list[str]]
) -> list[TemplateReward | None]:
    counted = {
        name: TemplateReward(its.count("correct"), its.count("correct") + its.count("wrong"))
        for name, its in verdicts.items()
    }
    pairs = zip(candidates, templates, strict=True)
    return [None if template is None else counted[one.problem, template] for one, template in pairs]
