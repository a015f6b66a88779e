"""Where the graded groups of an iteration come from: rollouts of the present policy, or a fixed set of examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np

from reasonlab.config import Config, DpoConfig, SftConfig
from reasonlab.errors import UserError
from reasonlab.evaluate.graders import grade_response
from reasonlab.grading.grade import grade
from reasonlab.judges.types import Candidate, Judge
from reasonlab.keys import key
from reasonlab.methods.group import Array, Group, judge_reward, length_reward, overlong_penalty, with_judge
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.curation import of_tiny_world
from reasonlab.problems.families.steps import render
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import solution_of
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.partial import PartialRollouts
from reasonlab.rollout.types import Request, Sampling
from reasonlab.train.measures import Counter, Report
from reasonlab.train.prompts import Prompts
from reasonlab.train.recorded import RecordedResponses, given

MISTAKES_SHOWN = 0.06  # in checked demonstrations for SFT, as in the base model's corpus


class Source(Protocol):
    """`state` is what a checkpoint must hold so that a resumed run goes on with the same groups."""

    def groups(self, number: int) -> list[Group]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


def build_source(
    config: Config, engine: Engine, tokenizer: TinyTokenizer, sampling: Sampling, report: Report
) -> Source:
    match config.method:
        case SftConfig(data=""):
            return WorkedSolutions(config, tokenizer)
        case SftConfig(data=data) | DpoConfig(data=data):
            return RecordedResponses(config, Path(data).expanduser(), pairs=isinstance(config.method, DpoConfig))
        case _:
            return Rollouts(config, engine, tokenizer, sampling, report)


class Rollouts:
    """Groups sampled from the present policy, graded and rewarded."""

    def __init__(
        self, config: Config, engine: Engine, tokenizer: TinyTokenizer, sampling: Sampling, report: Report
    ) -> None:
        self.config, self.engine, self.tokenizer = config, engine, tokenizer
        self.sampling, self.report = sampling, report
        self.prompts = Prompts(config)
        self.partial = PartialRollouts()
        self.judge = _judge(config) if config.reward.judge_weight > 0 else None

    def groups(self, number: int) -> list[Group]:
        """With partial rollouts: the groups that are complete by now; each iteration starts as many new ones."""
        groups = self._dynamic(number) if self.config.rollout.dynamic_rounds else self._fresh(number)
        while not groups:  # every group still waits for a member: go on with the same weights
            groups = self._sample(number, [])
        return groups

    def state(self) -> dict[str, Any]:
        return {"prompts": self.prompts.state(), "partial": self.partial.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.prompts.restore(state["prompts"])
        self.partial.restore(state["partial"])

    def _fresh(self, number: int) -> list[Group]:
        return self._sample(number, self.prompts.draw(number, self.config.rollout.prompts))

    def _dynamic(self, number: int) -> list[Group]:
        """Groups without a spread of rewards are replaced, as long as rounds and problems last."""
        wanted, drawn = self.config.rollout.prompts, list[Problem]()
        kept: list[Group] = []
        spare: list[Group] = []
        for _ in range(1 + self.config.rollout.dynamic_rounds):
            problems = self.prompts.draw(number, wanted - len(kept), drawn)
            drawn += problems
            for group in self._sample(number, problems):
                useful = 0 < group.correct.sum() < group.gradable.sum()
                (kept if useful else spare).append(group)
            if len(kept) == wanted or not problems:
                break
        return kept or spare[:1]  # an update needs a group, even one that teaches nothing

    def _sample(self, number: int, problems: Sequence[Problem]) -> list[Group]:
        samples = self.config.rollout.samples
        new = [
            (
                problem,
                Request(
                    prompt=self.tokenizer.encode(prompt_text(problem.question)),
                    keys=[key(self.config.seed, "rollout", number, problem.id, i) for i in range(samples)],
                ),
            )
            for problem in problems
        ]
        total = len(problems) * samples + self.partial.pending_rollouts
        count = Counter(self.report, f"iteration {number}: rollouts", total)
        groups = []
        for problem, rollouts in self.partial.generate(self.engine, new, self.sampling, count):
            grades = [grade_response(problem, self.tokenizer.decode(r.ids)) for r in rollouts]
            groups.append(Group(problem, rollouts, grades))
        if self.judge is not None:
            self._ask(self.judge, groups)
        for group in groups:
            group.rewards = self._reward(number, group)
        self.prompts.learn(groups)
        return groups

    def _ask(self, judge: Judge, groups: Sequence[Group]) -> None:
        """Give every rollout what the judge says of it. It does not see the right answer."""
        scores = iter(
            judge.score(
                [
                    Candidate(group.problem.id, group.problem.question, self.tokenizer.decode(rollout.ids))
                    for group in groups
                    for rollout in group.rollouts
                ]
            )
        )
        for group in groups:
            group.judged = judge_reward([next(scores) for _ in group.rollouts], self.config.reward.judge_form)

    def _reward(self, number: int, group: Group) -> Array:
        config = self.config.reward
        rewards = group.correct.astype(np.float64)
        if group.judged is not None:
            rewards = with_judge(rewards, group.judged, config.judge_weight)
        if config.length_weight > 0 and number >= config.length_from:
            rewards += config.length_weight * length_reward(group.lengths, group.correct)
        if config.overlong_buffer > 0:
            rewards += overlong_penalty(group.lengths, self.config.rollout.max_tokens, config.overlong_buffer)
        if config.repetition_penalty > 0:
            rewards -= config.repetition_penalty * np.array([r.finish == "repetition" for r in group.rollouts])
        return rewards


def _judge(config: Config) -> Judge:
    from reasonlab.judges.published import open_judge  # only where a judge is named

    return open_judge(config.reward.judge, device=config.device, workers=config.threads)


class WorkedSolutions:
    """For SFT: the worked solutions of the iteration's problems, in the styles the recipe asks for. No state."""

    def __init__(self, config: Config, tokenizer: TinyTokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.prompts = Prompts(config)
        if other := [problem for problem in self.prompts.pool if not of_tiny_world(problem)]:
            raise UserError(
                f"{other[0].id} has no worked solution to imitate: it is no problem of the tiny world",
                "Give demonstrations with method.data, or train by RL",
            )

    def groups(self, number: int) -> list[Group]:
        method = self.config.method
        assert isinstance(method, SftConfig)
        groups = []
        for problem in self.prompts.draw(number, self.config.rollout.prompts):
            rng = Random(key(self.config.seed, "style", number, problem.id))
            style = rng.choices(list(method.styles), list(method.styles.values()))[0]
            text = render(solution_of(problem), style, rng, MISTAKES_SHOWN) + "<eos>"
            prompt = self.tokenizer.encode(prompt_text(problem.question))
            rollout = given(prompt, self.tokenizer.encode(text))
            groups.append(Group(problem, [rollout], [grade(problem, text)], np.ones(1)))
        return groups

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass
