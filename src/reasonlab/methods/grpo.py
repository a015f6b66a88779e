r"""GRPO and its family. Every member is one choice of advantage, ratio, surrogate and averaging.

Notation: responses o_i, i = 1..G of one prompt, rewards R_i with group mean μ and standard deviation σ, token ratios
r_{i,t} = π_θ / π_old, advantage A_i for all tokens of a response. Minimised here:

    L(θ) = − average over tokens of  surrogate(r, A)  +  β · k3,     k3 = π_ref/π_θ − log(π_ref/π_θ) − 1

    variant          advantage               ratio      surrogate                     average
    grpo             (R − μ) / σ             token      min(rA, clip(r)A)             (1/G) Σ_i (1/L_i) Σ_t
    dr_grpo          R − μ                   token      clip                          (1/G) Σ_i (1/max_tokens) Σ_t
    dapo             (R − μ) / σ             token      clip, ε_high > ε_low          (1/ΣL) Σ_i Σ_t
    gspo             (R − μ) / σ             sequence   clip of s_i = Π_t r^(1/L_i)   (1/G) Σ_i
    cispo            (R − μ) / σ             token      sg[min(r, 1+ε_h)] A log π     (1/ΣL) Σ_i Σ_t
    rloo             R − mean of the others  –          A log π                       (1/G) Σ_i Σ_t
    reinforce_pp     R, then batch z-score   token      clip                          (1/G) Σ_i (1/L_i) Σ_t
    reinforce_pp_baseline   R − μ, then batch z-score, as above

σ is the unbiased group deviation plus 1e-4 (as in TRL). DAPO's dynamic sampling and overlong shaping belong to the
loop and the reward (`rollout.dynamic_rounds`, `reward.overlong_buffer`). With β > 0 the KL is taken against the
frozen initial model, inside the loss. RLOO and REINFORCE++ put the KL into the reward in their papers: set
`kl_in_reward`, which subtracts β · Σ_t (log π_old − log π_ref) from R.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reasonlab.config import GrpoConfig
from reasonlab.methods.group import Array, Group, example
from reasonlab.train.batch import Example, TokenBatch

SIGMA_GUARD = 1e-4


class Grpo:
    resets_optimizer = False

    def __init__(self, config: GrpoConfig, max_tokens: int) -> None:
        self.config, self.max_tokens = config, max_tokens
        self.needs_reference = config.kl > 0
        self.needs_advantage = config.kl == 0

    def examples(self, groups: Sequence[Group]) -> list[Example]:
        """Rollouts that could not be graded, and truncated ones if `mask_truncated`, are left out of the loss."""
        kept = [group.gradable for group in groups]
        advantages = self.advantages([self._rewards(group)[k] for group, k in zip(groups, kept, strict=True)])
        examples = []
        for group, keep, values in zip(groups, kept, advantages, strict=True):
            for i, advantage in zip(np.flatnonzero(keep), values, strict=True):
                new = example(group.rollouts[i], float(advantage))
                new.reference = group.reference[i] if group.reference is not None else None
                if self.config.mask_truncated and group.rollouts[i].finish == "length":
                    new.mask[:] = False
                examples.append(new)
        return examples

    def _rewards(self, group: Group) -> Array:
        if not self.config.kl_in_reward or group.reference is None:
            return group.rewards
        pairs = zip(group.rollouts, group.reference, strict=True)
        return group.rewards - self.config.kl * np.array([float((r.logprobs - ref).sum()) for r, ref in pairs])

    def advantages(self, rewards: Sequence[Array]) -> list[Array]:
        """One advantage for each reward, group by group."""
        kind = self.config.advantage
        if kind == "group_std":
            return [(r - r.mean()) / (_deviation(r) + SIGMA_GUARD) if len(r) else r for r in rewards]
        if kind == "leave_one_out":
            return [(r - r.mean()) * len(r) / (len(r) - 1) if len(r) > 1 else r * 0 for r in rewards]
        centred = list(rewards) if kind == "batch_std" else [r - r.mean() if len(r) else r for r in rewards]
        if kind == "group_mean" or not any(len(r) for r in centred):
            return centred
        flat = np.concatenate(centred)
        return [(r - flat.mean()) / (_deviation(flat) + SIGMA_GUARD) for r in centred]

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config, advantage = self.config, batch.per_token(batch.advantage)
        log_ratio = logprobs - batch.old
        if config.ratio == "sequence":
            # GSPO: the sequence ratio, with a gradient that reaches every token of the response equally.
            mean = batch.sum_by_sequence(log_ratio * batch.mask) / batch.lengths
            log_ratio = batch.per_token(mean)
        ratio = log_ratio.exp()
        low, high = 1 - config.clip_low, 1 + config.clip_high
        if config.surrogate == "clip":
            objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        elif config.surrogate == "cispo":
            objective = ratio.detach().clamp(max=1 + config.clip_high) * advantage * logprobs
        else:
            objective = advantage * logprobs
        if config.kl > 0 and not config.kl_in_reward:
            if batch.reference is None:
                raise ValueError("the KL term needs the reference model's logprobs in every example")
            gap = batch.reference - logprobs
            objective = objective - config.kl * (gap.exp() - gap - 1)
        clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
        metrics = {
            "clip_ratio": (clipped * batch.mask).sum() / batch.totals.tokens,
            "kl_old": ((ratio - 1 - log_ratio) * batch.mask).sum().detach() / batch.totals.tokens,
        }
        return -self._average(objective * batch.mask, batch), metrics

    def _average(self, of_tokens: Tensor, batch: TokenBatch) -> Tensor:
        match self.config.average:
            case "token":
                return of_tokens.sum() / batch.totals.tokens
            case "sequence":
                return (batch.sum_by_sequence(of_tokens) / batch.lengths).sum() / batch.totals.sequences
            case "constant":
                return of_tokens.sum() / (batch.totals.sequences * self.max_tokens)
            case "sum":
                return of_tokens.sum() / batch.totals.sequences


def _deviation(rewards: Array) -> float:
    return float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0
