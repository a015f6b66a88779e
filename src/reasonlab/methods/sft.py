r"""Supervised fine-tuning: maximise the likelihood of given responses.

    L(θ) = − (1/N) Σ_i Σ_t log π_θ(y_{i,t} | x_i, y_{i,<t}),   N = all response tokens of the optimizer step

The sum runs over response tokens only. Each example may carry a weight in `advantage` (1 for plain SFT).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from reasonlab.methods.group import Group
from reasonlab.train.batch import Example, TokenBatch


def sft_loss(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    weight = batch.per_token(batch.advantage) * batch.mask
    return -(weight * logprobs).sum() / batch.totals.tokens, {}


def demonstration(prompt: ArrayLike, response: Sequence[int] | NDArray[np.int64]) -> Example:
    """An example of weight 1 that no policy sampled."""
    ids = np.asarray(prompt, np.int64), np.asarray(response, np.int64)
    return Example(*ids, np.zeros(len(response), np.float32), np.ones(len(response), bool), advantage=1.0)


class SupervisedFineTuning:
    """SFT on demonstrations: the loop hands over groups whose rollouts are the worked solutions themselves."""

    resets_optimizer = False
    needs_reference = False
    needs_advantage = False

    def examples(self, groups: Sequence[Group]) -> list[Example]:
        return [demonstration(r.prompt, r.ids) for group in groups for r in group.rollouts]

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return sft_loss(logprobs, batch)
