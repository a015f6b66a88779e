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


def preference_pairs(groups: Iterable[Group], most_pairs: int = 4) -> list[tuple[Problem, Rollout, Rollout]]:
    """(problem, chosen, rejected): chosen is the shortest correct rollout.

    Rejected are wrong rollouts that are longer, and correct ones at least `LONGER` times as long; the longest first.
    Rollouts that could not be graded are in no pair.
    """
    pairs = []
    for group in groups:
        for problem, chosen in shortest_correct([group]):
            short, long = len(chosen.ids), LONGER * len(chosen.ids)
            rejected = [
                rollout
                for rollout, right, graded in zip(group.rollouts, group.correct, group.gradable, strict=True)
                if graded and (len(rollout.ids) >= long if right else len(rollout.ids) > short)
            ]
            rejected.sort(key=lambda rollout: -len(rollout.ids))
            pairs += [(problem, chosen, rollout) for rollout in rejected[:most_pairs]]
    return pairs
