"""What the steps of a response are worth, whoever says so, and where two who say so agree.

Four sources give `StepLabels`:

    exact_labels.py   the tiny world, where true steps are known
    monte_carlo.py    a policy goes on from the end of each step, and how often it arrives is counted
    llm_labels.py     a language model behind an endpoint reads the steps
    label_data.py     data that people labelled: PRM800K, ProcessBench
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from reasonlab.judges.types import Candidate, Labelled

ALL_RIGHT = -1
HALF = 0.5  # a step worth less than this is wrong


@dataclass(frozen=True, slots=True)
class StepLabels:
    """One value in [0, 1] for each step (1 is right), and the index of the first wrong step, -1 if there is none.

    The two are not the same thing said twice: a step after the first wrong one can be right by itself, and a labeller
    may place the error without grading every step.
    """

    values: tuple[float, ...]
    first_wrong: int

    def __post_init__(self) -> None:
        if not all(0 <= value <= 1 for value in self.values):  # also refuses nan
            raise ValueError(f"step labels lie in [0, 1], unlike {self.values}")
        if not ALL_RIGHT <= self.first_wrong < len(self.values):
            raise ValueError(f"the first wrong step is {self.first_wrong}, but there are {len(self.values)} steps")

    @classmethod
    def of(cls, values: Sequence[float], below: float = HALF) -> Self:
        """The first wrong step is the first whose value is less than `below`."""
        return cls(tuple(map(float, values)), next((i for i, value in enumerate(values) if value < below), ALL_RIGHT))

    @classmethod
    def until(cls, first_wrong: int, steps: int) -> Self:
        """For labels that only place the first error (ProcessBench): right before it, and nothing from there on counts
        as right, because it stands on what is wrong."""
        right = steps if first_wrong == ALL_RIGHT else first_wrong
        return cls((1.0,) * right + (0.0,) * (steps - right), first_wrong)

    @property
    def all_right(self) -> bool:
        return self.first_wrong == ALL_RIGHT

    def labelled(self, candidate: Candidate, final: float | None = None) -> Labelled:
        """An example to train a judge with."""
        return Labelled(candidate, self.values, final)


@dataclass(frozen=True, slots=True)
class Consensus:
    """Which candidates two labellers agree on: the indices that are kept, and how the others differ."""

    kept: tuple[int, ...]
    total: int
    disagreements: dict[str, int]

    @property
    def share(self) -> float:
        return len(self.kept) / self.total if self.total else math.nan

    def __str__(self) -> str:
        others = ", ".join(f"{count} {what}" for what, count in self.disagreements.items() if count)
        return f"{len(self.kept)} of {self.total} kept" + (f"; left out: {others}" if others else "")


def consensus(first: Sequence[StepLabels | None], second: Sequence[StepLabels | None]) -> Consensus:
    """Keep a candidate only where both labellers place the first error at the same step, or both see none.

    The filter of Qwen2.5-Math-PRM, with Monte-Carlo labels and those of a judge: each is wrong often, but seldom in the
    same place. A candidate that one of them could not label (None) is left out and counted.
    """
    kept = []
    apart: Counter[str] = Counter(
        dict.fromkeys(("not labelled", "wrong for the first only", "wrong for the second only", "at another step"), 0)
    )
    for index, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        if mine is None or theirs is None:
            apart["not labelled"] += 1
        elif len(mine.values) != len(theirs.values):
            raise ValueError(
                f"candidate {index} has {len(mine.values)} steps for one and {len(theirs.values)} for the other"
            )
        elif mine.first_wrong == theirs.first_wrong:
            kept.append(index)
        elif theirs.all_right:
            apart["wrong for the first only"] += 1
        elif mine.all_right:
            apart["wrong for the second only"] += 1
        else:
            apart["at another step"] += 1
    return Consensus(tuple(kept), len(first), dict(apart))
