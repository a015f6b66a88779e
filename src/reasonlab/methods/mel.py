r"""Meta-Experience Learning (arXiv 2602.10224): learn from one's own reflections that proved helpful.

On top of a host method (GRPO in the paper). For every *mixed* group, one with right and wrong rollouts:

    (y⁺, y⁻)  one right and one wrong rollout                                        `contrastive_pairs`
    M       ~ π(· | I, x, y⁻, y⁺)      a reflection: where y⁻ leaves the right path, why, and a rule
    y_val   ~ π(· | x, M)              the problem again, with M as a hint
    keep M iff y_val is right

and the kept reflections M* are imitated under the context they were written in, C = [I, x, y⁻, y⁺]:

    L(θ) = L_host(θ) − w · (1/B) Σ_x (1/N_x) Σ_{M* of x} (1/|M*|) Σ_t log π_θ(M*_t | C, M*_<t)

B counts all problems of the iteration, with or without a kept reflection, and N_x the kept reflections of x: Eq. 10 as
an expectation over problems. `normalise = "kept"` divides by the problems that kept one instead. The paper's weight
is w = 1. At test time nothing is added to the prompt.

Where the paper is silent we choose: N = 1 pair for each problem, drawn uniformly; one reflection a pair and one replay
a reflection, at the rollouts' temperature. Bifurcation point, critique and heuristic are one generation, as in the
paper's prompt. Ablations are settings: `replay_filter`, `contrast`, `learn`, `length`.

What the second term teaches. M is drawn from the very policy that then imitates it, so in expectation

    E[ (k/|M|) ∇log π(M | C) ] = ∇ E[ k/|M| ],   k = 1 if the replay was right, else 0

(k and |M| do not depend on θ once M is drawn; the replay's own policy is held fixed; for one pair a problem, without
top-p or top-k, and where M itself is imitated, not its rule). It is the policy gradient of a reward k/|M| for *writing
reflections*: helpful ones, and short ones. Without the replay filter only the shortness is left, and with
`length = "mean"` and many kept reflections only the helpfulness. Solving is touched through shared parameters alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from torch import Tensor

from reasonlab.config import MelConfig
from reasonlab.grading.grade import Grade
from reasonlab.methods.group import Group
from reasonlab.methods.sft import demonstration
from reasonlab.problems.problem import Problem
from reasonlab.rollout.types import Rollout
from reasonlab.train.batch import Example, TokenBatch, Totals


@dataclass(slots=True)
class Experience:
    """A reflection on one pair of rollouts, and what became of it."""

    problem: Problem
    success: float  # share of right rollouts in the group: how often the replay would be right anyway
    wrong: Rollout
    right: Rollout
    written: Rollout  # the reflection; empty where none is generated
    reflection: Rollout  # what is imitated, of it or instead of it; its prompt is the retrospective context
    text: str  # what was put into the hint
    replay: Rollout
    verdict: Grade

    @property
    def helped(self) -> bool:
        return self.verdict.verdict == "correct"


def contrastive_pairs(group: Group, count: int, rng: Random) -> list[tuple[Rollout, Rollout]]:
    """`count` different pairs (right, wrong) of a mixed group, fewer if it has no more; none of any other group."""
    right = [rollout for rollout, grade in zip(group.rollouts, group.grades, strict=True) if grade.verdict == "correct"]
    wrong = [rollout for rollout, grade in zip(group.rollouts, group.grades, strict=True) if grade.verdict == "wrong"]
    places = rng.sample(range(len(right) * len(wrong)), min(count, len(right) * len(wrong)))
    return [(right[place // len(wrong)], wrong[place % len(wrong)]) for place in places]


def internalised(
    config: MelConfig, experiences: Sequence[Experience], problems: int
) -> tuple[list[Example], Totals] | None:
    """The examples of the second term and what its loss is divided by; None if nothing was kept."""
    kept = [one for one in experiences if one.reflection.ids and (one.helped or not config.replay_filter)]
    if not kept or config.weight == 0:
        return None
    of_problem: dict[str, int] = {}
    for one in kept:
        of_problem[one.problem.id] = of_problem.get(one.problem.id, 0) + 1
    mean_length = sum(len(one.reflection.ids) for one in kept) / len(kept)
    examples = []
    for one in kept:
        new = demonstration(one.reflection.prompt, one.reflection.ids)
        length = len(one.reflection.ids) if config.length == "own" else mean_length
        new.advantage = config.weight / (of_problem[one.problem.id] * length)
        examples.append(new)
    divided_by = problems if config.normalise == "problems" else len(of_problem)
    return examples, Totals(tokens=sum(len(e.response) for e in examples), sequences=divided_by)


def nll(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ over tokens of weight × −log π, divided by the number of problems; also the plain mean over tokens."""
    weight = batch.per_token(batch.advantage) * batch.mask
    loss = -(weight * logprobs).sum() / batch.totals.sequences
    plain = -(logprobs.detach() * batch.mask).sum() / batch.totals.tokens
    return loss, {"mel/nll": plain, "mel/loss": loss.detach()}


def metrics(groups: Sequence[Group], experiences: Sequence[Experience]) -> dict[str, float]:
    """What the branch did in an iteration, and what it cost."""
    mixed = [group for group in groups if 0 < group.correct.sum() < group.gradable.sum()]
    lengths = [len(one.written.ids) for one in experiences]
    extra = sum(lengths) + sum(len(one.replay.ids) for one in experiences)
    return {
        "mel/mixed_frac": len(mixed) / len(groups),
        "mel/reflections": float(len(experiences)),
        "mel/retention": float(np.mean([one.helped for one in experiences])) if experiences else 0.0,
        "mel/reflection_length": float(np.mean(lengths)) if lengths else 0.0,
        "mel/extra_tokens": float(extra),
    }
