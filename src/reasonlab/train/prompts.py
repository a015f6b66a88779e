"""Which problems an iteration trains on: uniform, with a curriculum, prioritised (Kimi k1.5 §2.3.4).

- *Curriculum*: all problems at first, only the hard ones from `problems.curriculum_from` on.
- *Prioritised*: problem i is drawn in proportion to max(1 − s_i, floor). s_i is its running success rate, the mean of
  the last estimate and the present group's; before the first visit the pass rate of a curated set, else 0.

The report leaves open what is hard, how s_i is averaged and where it starts; these are our choices. The draws are
keyed by iteration; the success rates are state and travel with the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from reasonlab.config import Config
from reasonlab.errors import UserError
from reasonlab.keys import key
from reasonlab.methods.group import Group
from reasonlab.problems.curation import load_problems, read_pool
from reasonlab.problems.problem import Problem
from reasonlab.problems.registry import benchmarks
from reasonlab.problems.tiny_world import FAMILY_NAMES, problem_set

PRIORITY_FLOOR = 0.05  # least weight of a problem in prioritised sampling: what is solved stays reachable


Rated = tuple[Problem, float | None]  # a problem and its pass rate, where that was measured


class Prompts:
    """The pool of training problems and what is known of each."""

    def __init__(self, config: Config, pool: Sequence[Rated] | None = None) -> None:
        """`pool` is the recipe's, unless a part of it was left out."""
        self.config, self.seed = config.problems, config.seed
        pool = training_pool(config) if pool is None else pool
        self.pool = [problem for problem, _ in pool]
        self.pass_rate = {problem.id: rate for problem, rate in pool if rate is not None}
        self.success: dict[str, float] = {}
        self.hard = [problem for problem in self.pool if self.is_hard(problem)]
        if self.config.curriculum_from and not self.hard:
            raise UserError(
                "the pool holds no hard problem for the curriculum",
                "Lower problems.hard_level, raise problems.hard_pass_rate, or set problems.curriculum_from 0",
            )

    def is_hard(self, problem: Problem) -> bool:
        if problem.id in self.pass_rate:
            return self.pass_rate[problem.id] <= self.config.hard_pass_rate
        return problem.level >= self.config.hard_level

    def draw(self, iteration: int, count: int, without: Sequence[Problem] = ()) -> list[Problem]:
        """`count` problems of this iteration, none twice and none of `without` (fewer if the pool has no more)."""
        late = 0 < self.config.curriculum_from <= iteration
        pool = self.hard if late else self.pool
        names: tuple[str | int, ...] = ("prompts", iteration)
        if without:
            taken = {problem.id for problem in without}
            pool, names = [problem for problem in pool if problem.id not in taken], (*names, len(without))
        rng = Random(key(self.seed, *names))
        size = min(count, len(pool))
        if self.config.sampling == "uniform":
            return rng.sample(pool, size)
        # Weighted draws without replacement: the smallest of independent waiting times with rates w_i.
        waiting = [-math.log(1 - rng.random()) / self.weight(problem) for problem in pool]
        return [pool[i] for i in sorted(range(len(pool)), key=waiting.__getitem__)[:size]]

    def weight(self, problem: Problem) -> float:
        return max(1 - self.rate(problem, unseen=0.0), PRIORITY_FLOOR)

    def rate(self, problem: Problem, unseen: float) -> float:
        """What is known of a problem: its running success, else its pass rate in the curated set, else `unseen`."""
        return self.success.get(problem.id, self.pass_rate.get(problem.id, unseen))

    def learn(self, groups: Sequence[Group]) -> None:
        """Take the success of finished groups into account."""
        for group in groups:
            if group.gradable.any():
                now = float(group.correct.sum() / group.gradable.sum())
                self.success[group.problem.id] = (self.rate(group.problem, unseen=now) + now) / 2

    def state(self) -> dict[str, Any]:
        return {"success": self.success}

    def restore(self, state: dict[str, Any]) -> None:
        self.success = dict(state["success"])


def training_pool(config: Config) -> list[Rated]:
    """The problems that a recipe trains on, with their pass rates where they were measured."""
    name = config.problems.path
    if name in benchmarks():  # a few rows of published sets have no gold, and nothing to reward
        return [(one.problem, None) for one in read_pool(name, config.data or None) if one.problem.answer]
    if name:
        return load_problems(Path(name).expanduser())
    families = config.problems.families or FAMILY_NAMES
    return [(p, None) for p in problem_set("train", config.problems.pool, 0, families, config.problems.levels)]
