r"""ReST, the baseline of the Kimi k1.5 report (Fig. 10): fit the good samples, never push the bad ones down.

    L(θ) = − (1/N) Σ_{i : kept} Σ_t log π_θ(y_{i,t} | x_i, y_{i,<t}),   N = tokens of the kept responses

`keep = "best"` fits one response for each problem, the one with the highest reward (the first among equals: a choice by
length would favour lucky short answers), if it is correct; `keep = "correct"` fits every correct response. The report
gives no hyper-parameters; both are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from reasonlab.config import RestConfig
from reasonlab.methods.group import Group, example
from reasonlab.methods.sft import sft_loss
from reasonlab.train.batch import Example, TokenBatch


class Rest:
    resets_optimizer = False
    needs_reference = False
    needs_advantage = False

    def __init__(self, config: RestConfig) -> None:
        self.config = config

    def examples(self, groups: Sequence[Group]) -> list[Example]:
        kept = []
        for group in groups:
            correct = [i for i, right in enumerate(group.correct) if right]
            if self.config.keep == "best" and correct:
                correct = [max(correct, key=lambda i: (group.rewards[i], -i))]
            kept += [example(group.rollouts[i], advantage=1.0) for i in correct]
        return kept

    def loss(self, logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return sft_loss(logprobs, batch)
