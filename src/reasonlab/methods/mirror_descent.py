r"""Kimi k1.5 policy optimisation: online mirror descent with a squared surrogate (report §2.3, eq. 3).

At iteration i the current policy π_i is the reference. The optimum of  E[r] − τ KL(π‖π_i)  satisfies, for every
response y,  r − τ log Z = τ log π*(y|x)/π_i(y|x); τ log Z is estimated by the mean reward r̄ of the k responses.
With A_j = r_j − r̄ and the sequence log-ratio  s_j = Σ_t [log π_θ(y_t) − log π_i(y_t)]  the loss is

    L(θ) = (1/N) Σ_j [ − A_j log π_θ(y_j|x) + (τ/2) s_j² ],     N = responses of the optimizer step

whose gradient is that of (A_j − τ s_j)² / 2τ: each response is pulled to the log-ratio A_j / τ and then let go. The
first step of an iteration is REINFORCE with the group mean as baseline; τ matters from the second step on.

Faithful to the report: no clipping, no division by the group's standard deviation or by length, the squared SUM over
tokens, the optimizer reset at each iteration. Options that depart from it: `per_token` replaces s_j² by Σ_t (Δlogπ)²
and divides by tokens (the form of several ports and of Kimi K2.5); `reset_optimizer = false`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from reasonlab.config import MirrorDescentConfig
from reasonlab.methods.group import Group, example
from reasonlab.train.batch import Example, TokenBatch


class MirrorDescent:
    needs_reference = False
    needs_advantage = False

    def __init__(self, config: MirrorDescentConfig) -> None:
        self.config = config
        self.resets_optimizer = config.reset_optimizer

    def examples(self, groups: Sequence[Group]) -> list[Example]:
        """A_j = r_j − r̄; rollouts that could not be graded are left out of the group and of its mean."""
        examples = []
        for group in groups:
            graded = group.gradable
            baseline = group.rewards[graded].mean() if graded.any() else 0.0
            for i in range(len(group.rollouts)):
                if graded[i]:
                    examples.append(example(group.rollouts[i], float(group.rewards[i] - baseline)))
        return examples

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        tau, log_ratio = self.config.tau, (logprobs - batch.old) * batch.mask
        s = batch.sum_by_sequence(log_ratio)
        if self.config.per_token:
            policy = -(batch.per_token(batch.advantage) * batch.mask * logprobs).sum()
            loss = (policy + tau / 2 * (log_ratio**2).sum()) / batch.totals.tokens
        else:
            log_pi = batch.sum_by_sequence(logprobs * batch.mask)
            loss = (-batch.advantage * log_pi + tau / 2 * s**2).sum() / batch.totals.sequences
        return loss, {"log_ratio_abs": s.detach().abs().sum() / batch.totals.sequences}
