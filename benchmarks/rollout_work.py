"""The rollouts that are asked for in a measurement: random prompts, keyed seeds, lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reasonlab.keys import key
from reasonlab.rollout.types import Request, Sampling

MEAN_RAGGED = 150


@dataclass(frozen=True)
class Work:
    rows: int
    prompt: int
    new: int
    group: int
    ragged: bool

    def requests(self, vocabulary: int) -> list[Request]:
        rollouts = self.rows * (4 if self.ragged else 1)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, vocabulary, (-(-rollouts // self.group), self.prompt), generator=generator).tolist()
        return [
            Request(prompt, [key("speed", i, j) for j in range(min(self.group, rollouts - i * self.group))])
            for i, prompt in enumerate(prompts)
        ]

    def sampling(self, vocabulary: int) -> Sampling:
        stops = tuple(range(0, vocabulary, MEAN_RAGGED)) if self.ragged else ()
        return Sampling(max_tokens=self.new, stop_ids=stops)
