"""Long2short (Kimi k1.5 §2.4): what to learn from samples of a long-thinking model so that it thinks shorter.

Four ways lead from the long model to a short one. Merging (`merge.py`) needs no samples. The other three do:

- *shortest rejection sampling*: SFT on the shortest correct one of n = 8 samples (`shortest_correct`);
- *DPO*: the shortest correct sample is chosen over longer wrong ones and over correct ones at least 1.5 times as long
  (`preference_pairs`, `dpo.py`);
- *long2short RL*: a second RL phase with the length reward on and a reduced token limit: mirror descent as before,
  with `reward.length_weight` and `rollout.max_tokens`.

Not in the report, so ours: the report says "1.5 times longer", read here as a threshold; it sets no number of pairs
for each problem, and `most_pairs` keeps problems with many long samples from outweighing the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from reasonlab.methods.group import Group
from reasonlab.problems.problem import Problem
from reasonlab.rollout.types import Rollout

LONGER = 1.5


def shortest_correct(groups: Iterable[Group]) -> list[tuple[Problem, Rollout]]:
    """The shortest correct rollout of every group that has one; the first among equals."""
    kept = []
    for group in groups:
        correct = [rollout for rollout, right in zip(group.rollouts, group.correct, strict=True) if right]
        if correct:
            kept.append((group.problem, min(correct, key=lambda rollout: len(rollout.ids))))
    return kept


def preference_pairs(groups: Iterable[Group], most_pairs: int = 4) -> list[Group]:
    """Pairs as groups of two, the chosen rollout first: the shortest correct one.

    Rejected are wrong rollouts that are longer, and correct ones at least `LONGER` times as long; the longest first.
    Rollouts that could not be graded are in no pair.
    """
    pairs = []
    for group in groups:
        lengths, correct = group.lengths, group.correct
        if not correct.any():
            continue
        chosen = min(np.flatnonzero(correct), key=lambda i: (lengths[i], i))
        too_long = np.where(correct, lengths >= LONGER * lengths[chosen], lengths > lengths[chosen])
        rejected = sorted(np.flatnonzero(too_long & group.gradable), key=lambda i: (-lengths[i], i))
        pairs += [
            Group(group.problem, [group.rollouts[i] for i in pair], [group.grades[i] for i in pair])
            for pair in ((chosen, other) for other in rejected[:most_pairs])
        ]
    return pairs
