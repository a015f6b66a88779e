"""The decoding step: rows of a key-value cache that each advance by one token.

All state lives in fixed buffers, and a step on the first n rows and s cache columns is a fixed list of tensor
operations. On the CPU it simply runs; on CUDA it is captured once for each bucket of (n, s) and replayed, because a
small model's step is shorter than the time Python needs to launch it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from reasonlab.model.attention import PackedCausal
from reasonlab.model.transformer import Transformer
from reasonlab.rollout.sampling import sample_tokens
from reasonlab.rollout.types import Rollout, Sampling

RUNNING, STOPPED, FULL = 0, 1, 2


class Decoder:
    """`rows` slots, each with room for `columns` tokens of prompt and response."""

    def __init__(self, model: Transformer, rows: int, columns: int, sampling: Sampling) -> None:
        config, weight = model.config, model.embedding.weight
        self.model, self.rows, self.columns, self.sampling = model, rows, columns, sampling
        self.device, dtype = weight.device, weight.dtype
        shape = (config.layers, rows, config.kv_heads, columns, config.head_dim)
        self.keys_cache = torch.zeros(shape, dtype=dtype, device=self.device)
        self.values_cache = torch.zeros(shape, dtype=dtype, device=self.device)
        self.group = config.heads // config.kv_heads

        def state(dtype: torch.dtype, *more: int) -> Tensor:
            return torch.zeros(rows, *more, dtype=dtype, device=self.device)

        self.tokens = state(torch.int64)  # the token each row feeds next
        self.positions = state(torch.int64)  # its position
        self.seeds = state(torch.int64)
        self.counts = state(torch.int64)  # tokens generated so far
        self.limits = state(torch.int64)  # and where this call ends
        self.finish = state(torch.int64)
        # One spare column: a row that is done but not yet taken away writes there and spoils nothing.
        self.ids = state(torch.int64, sampling.max_tokens + 1)
        self.logprobs = state(torch.float32, sampling.max_tokens + 1)
        self.stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=self.device)
        self.row_index = torch.arange(rows, device=self.device)
        self.column_index = torch.arange(columns, device=self.device)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.finish.fill_(FULL)  # empty rows are not running

    # --- contexts ----------------------------------------------------------------------------------------------

    def prefill(self, contexts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens but the last of each context: [layers, tokens, kv_heads, d] each."""
        bodies = [list(context[:-1]) for context in contexts if len(context) > 1]
        capture = _CapturingAttention([len(body) for body in bodies], self.device)
        flat = torch.tensor([token for body in bodies for token in body], device=self.device)
        self.model(flat, capture.packed.positions, capture)
        return torch.stack(capture.keys), torch.stack(capture.values)

    def admit(
        self,
        rows: Sequence[int],
        context: Sequence[int],
        seeds: Sequence[int],
        keys: Tensor | None,
        values: Tensor | None,
        started: Rollout | None = None,
    ) -> None:
        """Start one sample in each given row. The context's last token is fed by the first step.

        The context is the prompt, followed by the tokens of `started` if it is a rollout that goes on. Those tokens
        take their places in the row, so that from here on it is as if they had just been sampled.
        """
        where = torch.tensor(rows, device=self.device)
        body = len(context) - 1
        made = 0 if started is None else len(started.ids)
        if keys is not None and values is not None:
            self.keys_cache[:, where, :, :body] = keys.transpose(1, 2)[:, None]
            self.values_cache[:, where, :, :body] = values.transpose(1, 2)[:, None]
        if started is not None:
            self.ids[where, :made] = torch.tensor(started.ids, dtype=torch.int64, device=self.device)
            self.logprobs[where, :made] = torch.tensor(started.logprobs, device=self.device)
        self.tokens[where] = int(context[-1])
        self.positions[where] = body
        self.seeds[where] = torch.tensor(seeds, dtype=torch.int64, device=self.device)
        self.counts[where] = made
        segment = self.sampling.segment_tokens or self.sampling.max_tokens
        self.limits[where] = min(made + segment, self.sampling.max_tokens)
        self.finish[where] = RUNNING

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a running row into a free slot so that running rows stay contiguous; the source becomes free."""
        self.keys_cache[:, target, :, :length] = self.keys_cache[:, source, :, :length]
        self.values_cache[:, target, :, :length] = self.values_cache[:, source, :, :length]
        numbers = (self.tokens, self.positions, self.seeds, self.counts, self.limits, self.finish)
        for state in (*numbers, self.ids, self.logprobs):
            state[target] = state[source]
        self.finish[source] = FULL

    # --- steps -------------------------------------------------------------------------------------------------

    def step(self, rows: int, columns: int) -> None:
        """Advance the first `rows` rows by one token; none of them is longer than `columns`."""
        if self.device.type != "cuda":
            self._step(rows, columns)
            return
        bucket = (_next_power_of_two(rows, self.rows), min(_round_up(columns, 64), self.columns))
        if bucket not in self.graphs:
            self.graphs[bucket] = self._capture(*bucket)
        self.graphs[bucket].replay()

    def _step(self, n: int, columns: int) -> None:
        tokens, positions, counts, finish = (x[:n] for x in (self.tokens, self.positions, self.counts, self.finish))
        visible = self.column_index[None, :columns] <= positions[:, None]
        bias = torch.where(visible, 0.0, -math.inf).to(self.keys_cache.dtype)
        rows = self.row_index[:n]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys_cache[layer, :n], self.values_cache[layer, :n]
            keys[rows, :, positions] = k
            values[rows, :, positions] = v
            grouped = q.reshape(-1, self.group, q.shape[-1]) * q.shape[-1] ** -0.5
            scores = torch.bmm(grouped, keys[:, :, :columns].flatten(0, 1).transpose(1, 2))
            weights = (scores.view(n, -1, columns) + bias[:, None]).softmax(-1)
            return torch.bmm(weights.view_as(scores), values[:, :, :columns].flatten(0, 1)).view_as(q)

        hidden = self.model(tokens, positions, attend)
        logits = F.linear(hidden, self.model.head_weight).float()
        chosen, logprobs = sample_tokens(logits, self.seeds[:n], counts, self.sampling)
        self.ids[:n].scatter_(1, counts[:, None], chosen[:, None])
        self.logprobs[:n].scatter_(1, counts[:, None], logprobs[:, None])
        running = finish == RUNNING
        counts += running
        positions += running
        tokens.copy_(chosen)
        stopped = (chosen[:, None] == self.stop_ids).any(-1)
        full = counts >= self.limits[:n]
        finish += running * torch.where(stopped, STOPPED, torch.where(full, FULL, RUNNING))

    def _capture(self, rows: int, columns: int) -> torch.cuda.CUDAGraph:
        """Record one step as a CUDA graph. Warm-up runs change the state, so it is put back afterwards."""
        state = (self.tokens, self.positions, self.counts, self.finish, self.ids, self.logprobs)
        saved = [x.clone() for x in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(rows, columns)
                for x, kept in zip(state, saved, strict=True):
                    x.copy_(kept)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(rows, columns)
        for x, kept in zip(state, saved, strict=True):
            x.copy_(kept)
        return graph


class _CapturingAttention:
    """Packed causal attention that keeps the keys and values it sees."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.packed = PackedCausal(lengths, device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        return self.packed(layer, q, k, v)


def _next_power_of_two(n: int, most: int) -> int:
    return min(1 << max(n - 1, 0).bit_length(), most)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
