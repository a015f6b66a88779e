"""Where the graded groups of an iteration come from: rollouts of the present policy, or a fixed set of examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar

import numpy as np

from reasonlab.config import Config, DpoConfig, SftConfig
from reasonlab.errors import UserError
from reasonlab.judges.types import Candidate, Judge
from reasonlab.keys import key
from reasonlab.methods.group import Array, Group, judge_reward, length_reward, overlong_penalty, with_judge
from reasonlab.problems.curation import of_tiny_world
from reasonlab.problems.families.steps import render
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import solution_of
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.partial import PartialRollouts
from reasonlab.rollout.types import Request, Sampling
from reasonlab.train.exchange import Exchange
from reasonlab.train.held_out import HeldOut
from reasonlab.train.measures import Counter, Report
from reasonlab.train.prompts import Prompts, Rated, training_pool
from reasonlab.train.recorded import RecordedResponses, demonstration, read_responses
from reasonlab.train.solutions import solutions_of_pool

MISTAKES_SHOWN = 0.06  # in checked demonstrations for SFT, as in the base model's corpus


Note = Callable[[str], None]
T = TypeVar("T")


class Source(Protocol):
    """`state` is what a checkpoint must hold so that a resumed run goes on with the same groups."""

    def groups(self, number: int) -> list[Group]: ...
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest prompt, and of the longest example where the examples are known."""
        ...

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


def build_source(
    config: Config,
    engine: Engine,
    exchange: Exchange,
    sampling: Sampling,
    report: Report,
    held_out: HeldOut | None = None,
    note: Note = lambda text: None,
) -> Source:
    """`held_out` are problems that must not be trained on; `note` is told what was left out, and why."""
    fixed = fixed_source(config, exchange, engine.model.config.max_positions, held_out, note)
    if fixed is not None:
        return fixed
    pool = usable_pool(config, exchange, held_out, note)
    return Rollouts(config, engine, exchange, sampling, report, pool)


def fixed_source(config: Config, exchange: Exchange, room: int, held_out: HeldOut | None, note: Note) -> Source | None:
    """What a method that samples nothing learns from, of a model that reads `room` tokens; None for other methods."""
    match config.method:
        case SftConfig(data="") if exchange.tiny:
            return WorkedSolutions(config, exchange)
        case SftConfig(data=""):
            rows = solutions_of_pool(_with_pool(config), exchange, note)
        case SftConfig(data=data) | DpoConfig(data=data):
            rows = read_responses(Path(data).expanduser(), isinstance(config.method, DpoConfig), exchange)
        case _:
            return None
    rows = Unseen(held_out, note).only(rows, lambda group: group.problem.question)
    return RecordedResponses(config, _readable(rows, room, note), exchange)


def longest_prompt(prompts: Prompts, exchange: Exchange) -> int:
    """In tokens."""
    return max(exchange.prompt_lengths(prompts.pool))


def usable_pool(config: Config, exchange: Exchange, held_out: HeldOut | None, note: Note) -> list[Rated]:
    """The problems to sample: none that is held out, and none with too long a prompt."""
    pool = Unseen(held_out, note).only(training_pool(config), lambda one: one[0].question)
    return _short(pool, config.problems.longest_prompt, exchange, note)


def _with_pool(config: Config) -> Config:
    if not config.problems.path:
        raise UserError(
            "SFT of a language model needs responses to imitate",
            "Name them with method.data, or a pool with solutions with problems.path, for instance gsm8k_train",
        )
    return config


def _short(pool: list[Rated], most: int, exchange: Exchange, note: Note) -> list[Rated]:
    """The problems whose prompt has at most so many tokens; all of them where there is no limit."""
    if not most:
        return pool
    lengths = exchange.prompt_lengths([problem for problem, _ in pool])
    kept = [one for one, length in zip(pool, lengths, strict=True) if length <= most]
    if not kept:
        raise UserError(f"every prompt has more than {most:,} tokens", "Raise problems.longest_prompt")
    if len(kept) < len(pool):
        note(f"{len(pool) - len(kept):,} of {len(pool):,} prompts have more than {most:,} tokens and are left out")
    return kept


def _readable(rows: list[Group], room: int, note: Note) -> list[Group]:
    """The examples that the model can read whole."""
    kept = [group for group in rows if all(len(r.prompt) + len(r.ids) <= room for r in group.rollouts)]
    if len(kept) < len(rows):
        note(f"{len(rows) - len(kept)} examples are longer than the {room:,} tokens the model reads and are left out")
    if not kept:
        raise UserError(f"every example is longer than the {room:,} tokens the model reads", "Give shorter ones")
    return kept


@dataclass(frozen=True, slots=True)
class Unseen:
    """Keeps what is trained on apart from what is evaluated."""

    held_out: HeldOut | None
    note: Note

    def only(self, items: list[T], question: Callable[[T], str]) -> list[T]:
        """The items whose question is none of the held-out problems, exactly or nearly."""
        shared = self.held_out.shared_with([question(item) for item in items]) if self.held_out else {}
        if not shared:
            return items
        names = ", ".join(sorted({name for found in shared.values() for name in found}))
        if len(shared) == len(items):
            raise UserError(
                f"every training problem is one of {names}, which the run is evaluated on",
                "Train on another pool, or evaluate on another benchmark",
            )
        self.note(
            f"{len(shared):,} of {len(items):,} training problems are also in {names}, which the run is evaluated on; "
            f"they are not trained on"
        )
        return [item for place, item in enumerate(items) if place not in shared]


class Rollouts:
    """Groups sampled from the present policy, graded and rewarded."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        exchange: Exchange,
        sampling: Sampling,
        report: Report,
        pool: Sequence[Rated] | None = None,
    ) -> None:
        self.config, self.engine, self.exchange = config, engine, exchange
        self.sampling, self.report = sampling, report
        self.prompts = Prompts(config, pool)
        self.partial = PartialRollouts()
        self.judge = _judge(config) if config.reward.judge_weight > 0 else None

    def groups(self, number: int) -> list[Group]:
        """With partial rollouts: the groups that are complete by now; each iteration starts as many new ones."""
        groups = self._dynamic(number) if self.config.rollout.dynamic_rounds else self._fresh(number)
        while not groups:  # every group still waits for a member: go on with the same weights
            groups = self._sample(number, [])
        return groups

    def longest(self) -> tuple[int, int]:
        return longest_prompt(self.prompts, self.exchange), 0

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
                    prompt=prompt.ids,
                    keys=[key(self.config.seed, "rollout", number, problem.id, i) for i in range(samples)],
                ),
            )
            for problem, prompt in zip(problems, self.exchange.prompts(problems), strict=True)
        ]
        total = len(problems) * samples + self.partial.pending_rollouts
        count = Counter(self.report, f"iteration {number}: rollouts", total)
        done = self.partial.generate(self.engine, new, self.sampling, count)
        graded = zip(done, self.exchange.grades(done), strict=True)
        groups = [Group(problem, rollouts, grades) for (problem, rollouts), grades in graded]
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
                    Candidate(group.problem.id, group.problem.question, self.exchange.text(rollout.ids))
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
    """For SFT of tiny models: worked solutions of the iteration's problems, in the recipe's styles. No state."""

    def __init__(self, config: Config, exchange: Exchange) -> None:
        self.config, self.exchange = config, exchange
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
            text = render(solution_of(problem), style, rng, MISTAKES_SHOWN)
            rollout = demonstration(problem, text, self.exchange)
            groups.append(Group(problem, [rollout], [self.exchange.grade(problem, text)], np.ones(1)))
        return groups

    def longest(self) -> tuple[int, int]:
        return longest_prompt(self.prompts, self.exchange), 0

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass
