r"""Direct preference optimisation (Rafailov et al. 2023), as long2short uses it in the Kimi k1.5 report (§2.4).

For pairs of a chosen response y⁺ and a rejected one y⁻ to the same problem x, with the sequence log-ratio against the
frozen initial model  s(y) = Σ_t [log π_θ(y_t) − log π_ref(y_t)]:

    L(θ) = − (1/P) Σ_pairs log σ( β · (s(y⁺) − s(y⁻)) ),     P = pairs of the optimizer step

The sum over tokens is not divided by length, so a longer rejected response weighs more; that is the published loss.
Which pairs to compare is `long2short.preference_pairs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from reasonlab.config import DpoConfig
from reasonlab.methods.group import Group, example
from reasonlab.train.batch import Example, TokenBatch

CHOSEN, REJECTED = 1.0, -1.0


class Dpo:
    resets_optimizer = False
    needs_reference = True
    needs_advantage = False

    def __init__(self, config: DpoConfig) -> None:
        self.beta = config.beta

    def examples(self, groups: Sequence[Group]) -> list[Example]:
        """A group is a pair: its first rollout was chosen, its second rejected."""
        examples = []
        for number, group in enumerate(groups):
            if group.reference is None:
                raise ValueError("DPO needs the reference model's logprobs")
            for rollout, reference, sign in zip(group.rollouts, group.reference, (CHOSEN, REJECTED), strict=True):
                new = example(rollout, sign)
                new.reference, new.pair = reference, number
                examples.append(new)
        return examples

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if batch.reference is None or batch.pair is None:
            raise ValueError("DPO needs pairs with the reference model's logprobs")
        s = batch.sum_by_sequence((logprobs - batch.reference) * batch.mask)
        pairs = batch.totals.sequences / 2
        margin = torch.zeros(int(batch.pair.max()) + 1, dtype=s.dtype, device=s.device)
        margin = self.beta * margin.index_add(0, batch.pair, batch.advantage * s)
        metrics = {
            "margin": margin.detach().sum() / pairs,
            "preferred": (margin.detach() > 0).sum() / pairs,
        }
        return -F.logsigmoid(margin).sum() / pairs, metrics
