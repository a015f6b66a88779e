"""Graded groups, the rewards made from them, and the interface that every method keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reasonlab.grading.grade import Grade
from reasonlab.judges.types import Scored
from reasonlab.problems.problem import Problem
from reasonlab.rollout.types import Rollout
from reasonlab.train.batch import Example, TokenBatch

Array = NDArray[np.float64]


@dataclass(slots=True)
class Group:
    """The rollouts of one problem in one iteration, with their grades and, once computed, their rewards."""

    problem: Problem
    rollouts: list[Rollout]
    grades: list[Grade]
    rewards: Array = field(default_factory=lambda: np.zeros(0))
    reference: list[NDArray[np.float32]] | None = None  # logprobs under the frozen initial model
    judged: Array | None = None  # what a judge says of each rollout, where it is part of the reward

    @property
    def correct(self) -> NDArray[np.bool_]:
        return np.array([grade.verdict == "correct" for grade in self.grades])

    @property
    def gradable(self) -> NDArray[np.bool_]:
        """Rollouts whose grade says something: an error or a timeout of the grader is not a wrong answer."""
        return np.array([grade.verdict in ("correct", "wrong") for grade in self.grades])

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(rollout.ids) for rollout in self.rollouts])


class Method(Protocol):
    """What the loop asks of a method."""

    resets_optimizer: bool
    """Whether Adam's moments are forgotten at the start of each iteration."""
    needs_reference: bool
    """Whether examples need the logprobs of the frozen initial model."""
    needs_advantage: bool
    """Whether an example without advantage adds nothing to the gradient of any step: then it is only counted."""

    def examples(self, groups: Sequence[Group]) -> list[Example]:
        """What to learn from."""
        ...

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The part of the loss that these tokens contribute, and metrics that add up in the same way."""
        ...


def example(rollout: Rollout, advantage: float) -> Example:
    return Example(
        prompt=np.array(rollout.prompt),
        response=np.array(rollout.ids),
        logprobs=rollout.logprobs,
        mask=np.ones(len(rollout.ids), bool),
        advantage=advantage,
        versions=rollout.versions,
    )


def length_reward(lengths: NDArray[np.int64], correct: NDArray[np.bool_]) -> Array:
    """Kimi k1.5 §2.3.3. λ_i = ½ − (len_i − min) / (max − min) over the group.

    Correct answers get λ, wrong ones min(0, λ). All zero when the lengths are equal. Correct answers outrank wrong
    ones for every weight below 2.
    """
    shortest, longest = lengths.min(), lengths.max()
    if shortest == longest:
        return np.zeros(len(lengths))
    spread: Array = 0.5 - (lengths - shortest) / (longest - shortest)
    return np.where(correct, spread, np.minimum(0.0, spread))


def overlong_penalty(lengths: NDArray[np.int64], longest: int, buffer: int) -> Array:
    """DAPO's soft punishment: 0 up to `longest − buffer` tokens, then falling linearly to −1 at `longest`."""
    return np.clip((longest - buffer - lengths) / buffer, -1.0, 0.0)


def judge_reward(scored: Sequence[Scored], form: Literal["steps", "single"]) -> Array:
    """What a judge says of each rollout, as one number (ReasonFlux-PRM).

        steps    r̂ = (1/T) Σ_t ŝ_t + ŝ   the paper's, α = 1: in [0, 2] for a judge of steps and of the whole
        single   r̂ = ŝ                   the released code's: the response is one step, and one score in (0, 1) is read
                                          at its end. A judge without a score of the whole gives that of the last step.

    An outcome judge has ŝ alone, whatever the form; a response without any step has no mean of steps.
    """
    if form == "steps":
        return np.array([one.overall(1.0) for one in scored])
    return np.array([one.overall(1.0, "last") if one.final is None else one.final for one in scored])


def with_judge(outcome: Array, judged: Array, weight: float) -> Array:
    """r = (1 − β)·outcome + β·judge."""
    mixed: Array = (1 - weight) * outcome + weight * judged
    return mixed
