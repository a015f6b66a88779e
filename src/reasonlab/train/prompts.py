"""Which problems an iteration trains on."""

from __future__ import annotations

from random import Random

from reasonlab.config import Config
from reasonlab.keys import key
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import FAMILY_NAMES, problem_set


class UniformPrompts:
    """Every problem of the pool is equally likely; none comes twice in an iteration. Stateless: keyed by iteration."""

    def __init__(self, config: Config) -> None:
        self.seed = config.seed
        families = config.problems.families or FAMILY_NAMES
        self.pool = problem_set("train", config.problems.pool, 0, families, config.problems.levels)

    def draw(self, iteration: int, count: int, already: int = 0) -> list[Problem]:
        """`count` problems, skipping the first `already` of this iteration's order (for dynamic sampling's refills)."""
        chosen = Random(key(self.seed, "prompts", iteration)).sample(self.pool, min(already + count, len(self.pool)))
        return chosen[already:]
