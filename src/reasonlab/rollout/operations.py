"""What a decoding step adds to the transformer, in plain torch; `kernels.py` does the same on CUDA in a few kernels.

That is attention to the cache, and the draw of a token with the bookkeeping of a row; and before the first step, the
way of prefilled keys and values into the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from reasonlab.model.fused import uses_kernels
from reasonlab.model.transformer import Attend, FusedAttention, Transformer
from reasonlab.rollout.sampling import sample_tokens
from reasonlab.rollout.types import Sampling

RUNNING, STOPPED, FULL = 0, 1, 2


class Cache(NamedTuple):
    """Keys and values: [layers, rows, kv_heads, columns, d] each, or [layers, tokens, kv_heads, d] of a wave."""

    keys: Tensor
    values: Tensor


class Place(NamedTuple):
    """Where the tokens from `begin` to before `end` of a wave go: to the first columns of `rows` neighbouring rows."""

    first_row: int
    rows: int
    begin: int
    end: int


@dataclass(slots=True)
class Rows:
    """What is known of each row. The numbers are views of one table, so that a row is moved and read in one go."""

    numbers: Tensor  # [8, rows]
    ids: Tensor  # [rows, max_tokens + 1]
    logprobs: Tensor
    tokens: Tensor = field(init=False)  # the token each row feeds next
    positions: Tensor = field(init=False)  # its position
    seeds: Tensor = field(init=False)
    counts: Tensor = field(init=False)  # tokens generated so far
    limits: Tensor = field(init=False)  # and where this call ends
    finish: Tensor = field(init=False)
    # Its first `shared` keys and values are also those of the row `leaders`. Rows of a group that read them there find
    # them in the device's cache; the reference reads each row's own.
    leaders: Tensor = field(init=False)
    shared: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.positions, self.seeds, self.counts = self.numbers[:4].unbind()
        self.limits, self.finish, self.leaders, self.shared = self.numbers[4:].unbind()

    @classmethod
    def empty(cls, rows: int, max_tokens: int, device: torch.device) -> Rows:
        numbers = torch.zeros(8, rows, dtype=torch.int64, device=device)
        numbers[5] = FULL  # empty rows are not running
        # One spare column: a row that is done but not yet taken away writes there and spoils nothing.
        ids = torch.zeros(rows, max_tokens + 1, dtype=torch.int64, device=device)
        return cls(numbers, ids, torch.zeros_like(ids, dtype=torch.float32))

    def first(self, n: int) -> Rows:
        return Rows(self.numbers[:, :n], self.ids[:n], self.logprobs[:n])

    def changing(self) -> tuple[Tensor, ...]:
        """The tensors that a step writes to."""
        return self.numbers, self.ids, self.logprobs


class Operations(Protocol):
    reads_columns: bool
    """Whether the cost of attention depends on the `columns` it is given, not on the lengths of the rows alone."""

    def store(self, cache: Cache, wave: Cache, places: Sequence[Place]) -> None:
        """Copy contexts into the cache from a prefilled wave, whose tensors are [layers, tokens, kv_heads, d]."""
        ...

    def attention(self, cache: Cache, rows: Rows, columns: int) -> Attend | FusedAttention:
        """Attention of one step: the new keys and values go into the cache at each row's position, and all up to there
        is attended to. No row is longer than `columns`."""
        ...

    def draw(self, logits: Tensor, rows: Rows, stop_ids: Tensor, sampling: Sampling) -> None:
        """Draw a token for each row, write it down with its logprob, and see which rows have ended."""
        ...


def operations_for(model: Transformer, columns: int) -> Operations:
    """For rows of at most `columns` tokens."""
    if uses_kernels(model.embedding.weight):
        from reasonlab.rollout.kernels import Kernels

        return Kernels(model, columns)
    return TorchOperations()


class TorchOperations:
    """The reference, and what runs on the CPU."""

    reads_columns = True

    def store(self, cache: Cache, wave: Cache, places: Sequence[Place]) -> None:
        for place in places:
            rows, columns = slice(place.first_row, place.first_row + place.rows), place.end - place.begin
            for cached, computed in zip(cache, wave, strict=True):
                cached[:, rows, :, :columns] = computed[:, place.begin : place.end].transpose(1, 2)[:, None]

    def attention(self, cache: Cache, rows: Rows, columns: int) -> Attend:
        n, positions = len(rows.positions), rows.positions
        index = torch.arange(n, device=positions.device)
        visible = torch.arange(columns, device=positions.device) <= positions[:, None]
        bias = torch.where(visible, 0.0, -math.inf).to(cache.keys.dtype)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer, :n], cache.values[layer, :n]
            keys[index, :, positions] = k
            values[index, :, positions] = v
            grouped = q.reshape(n * k.shape[1], -1, q.shape[-1]) * q.shape[-1] ** -0.5
            scores = torch.bmm(grouped, keys[:, :, :columns].flatten(0, 1).transpose(1, 2))
            weights = (scores.view(n, -1, columns) + bias[:, None]).softmax(-1)
            return torch.bmm(weights.view_as(scores), values[:, :, :columns].flatten(0, 1)).view_as(q)

        return attend

    def draw(self, logits: Tensor, rows: Rows, stop_ids: Tensor, sampling: Sampling) -> None:
        chosen, logprobs = sample_tokens(logits.float(), rows.seeds, rows.counts, sampling)
        rows.ids.scatter_(1, rows.counts[:, None], chosen[:, None])
        rows.logprobs.scatter_(1, rows.counts[:, None], logprobs[:, None])
        running = rows.finish == RUNNING
        rows.counts += running
        rows.positions += running
        rows.tokens.copy_(chosen)
        stopped = (chosen[:, None] == stop_ids).any(-1)
        full = rows.counts >= rows.limits
        rows.finish += running * torch.where(stopped, STOPPED, torch.where(full, FULL, RUNNING))
