"""The selection guard: the best of many checkpoints looks better than it is, because luck was selected as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from reasonlab.evaluate.intervals import Interval, score_interval
from reasonlab.keys import key


@dataclass(frozen=True, slots=True)
class Selection:
    """The best of several looks. `selected` is its score as seen, biased upward; `honest` is the cross-fitted one,
    without an interval: the folds share their choices, so one over questions would be too narrow (89 %, not 95)."""

    step: int
    looks: int
    selected: Interval
    honest: float

    def __str__(self) -> str:
        seen = f"step {self.step}: {100 * self.selected.estimate:.1f} %"
        if self.looks == 1:
            return f"{seen}, the only evaluation"
        return (
            f"{seen}, selected as the best of {self.looks} evaluations, so biased upward; choosing on some questions "
            f"and scoring on the others gives {100 * self.honest:.1f} %. Re-evaluate it on fresh samples"
        )


def best_checkpoint(grades: Mapping[int, Sequence[ArrayLike]], seed: int = 0, folds: int = 5) -> Selection:
    """Choose the step with the highest score; `grades[step]` has a row for each question, as in `score_interval`, the
    same questions in the same order at every step.

    The honest score is cross-fitted: questions are dealt into folds, and each fold is scored at the step that is best
    on the others, so no question is scored by a choice it took part in. Of equal steps the earliest is chosen.
    """
    steps = sorted(grades)
    table = np.array([[np.asarray(row, dtype=np.float64).mean() for row in grades[step]] for step in steps])
    questions = table.shape[1]
    fold = np.random.default_rng(key(seed, "best_checkpoint")).permutation(questions) % min(folds, questions)
    held_out = np.empty(questions)
    for number in range(fold.max() + 1):
        inside = fold == number
        chosen = int(table[:, ~inside].mean(axis=1).argmax()) if not inside.all() else 0
        held_out[inside] = table[chosen, inside]
    best = int(table.mean(axis=1).argmax())
    return Selection(steps[best], len(steps), score_interval(grades[steps[best]]), float(held_out.mean()))
