"""The decoding step: rows of a key-value cache that each advance by one token.

All state lives in fixed buffers, and a step on the first n rows is a fixed list of operations. On the CPU it simply
runs; on CUDA it is captured once for each bucket of rows and replayed, because a small model's step is shorter than
the time Python needs to launch it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from reasonlab.model.attention import PackedCausal
from reasonlab.model.transformer import Transformer
from reasonlab.rollout.operations import FULL, RUNNING, Cache, Place, Rows, operations_for
from reasonlab.rollout.types import Rollout, Sampling

MOVED_BYTES = 1 << 28  # of keys that a move copies at a time
WAVE_TOKENS = {"cpu": 8192, "cuda": 65536}  # prefilled at once, at most
# Of a GPU's free memory, for a wave. On one that is nearly full waves get smaller, but not so small that the device
# waits for the host.
WAVE_SHARE = 4
LEAST_WAVE_TOKENS = 2048


class Storage:
    """Memory for keys and values, and for what lies inside captured steps; decoders use it one after the other."""

    def __init__(self, model: Transformer, tokens: int) -> None:
        config, weight = model.config, model.embedding.weight
        self.per_token = (config.layers, config.kv_heads, config.head_dim)
        self.tokens = tokens
        size = tokens * config.layers * config.kv_heads * config.head_dim
        self.keys = torch.zeros(size, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        on_cuda = weight.device.type == "cuda"
        self.graph_memory = torch.cuda.graph_pool_handle() if on_cuda else None
        # To warm up and to capture. Their own, because matrix products keep a workspace for every stream, which graphs
        # of another engine must not share; and two, so that a captured workspace lies in the graphs' memory.
        self.streams = [torch.cuda.Stream() for _ in range(2)] if on_cuda else []

    def cache(self, rows: int, columns: int) -> Cache:
        layers, kv_heads, head_dim = self.per_token
        shape = (layers, rows, kv_heads, columns, head_dim)
        size = layers * rows * kv_heads * columns * head_dim
        return Cache(self.keys[:size].view(shape), self.values[:size].view(shape))


@dataclass(slots=True)
class Prefilled:
    """The tokens from `begin` to before `end` of a wave."""

    wave: Cache
    begin: int
    end: int


@dataclass(slots=True)
class Admission:
    """Samples that begin together in neighbouring rows: the context they share and what they go on from."""

    first_row: int
    context: Sequence[int]
    seeds: Sequence[int]
    prefilled: Prefilled | None  # all tokens of the context but the last
    started: Rollout | None = None


class Decoder:
    """`rows` slots, each with room for `columns` tokens of prompt and response."""

    def __init__(
        self,
        model: Transformer,
        rows: int,
        columns: int,
        sampling: Sampling,
        storage: Storage | None = None,
        tail: int = 0,
    ) -> None:
        """`tail`: how many of a row's last tokens a report must be able to show."""
        self.tail = tail
        self.model, self.rows, self.columns, self.sampling = model, rows, columns, sampling
        self.device = model.embedding.weight.device
        self.storage = storage or Storage(model, rows * columns)
        self.cache = self.storage.cache(rows, columns)
        self.operations = operations_for(model, columns)
        self.state = Rows.empty(rows, sampling.max_tokens, self.device)
        self.stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=self.device)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.reports = _HostReports(self.state, tail) if self.device.type == "cuda" else None

    # --- contexts ----------------------------------------------------------------------------------------------

    def wave_tokens(self) -> int:
        """How many tokens to prefill at once.

        On CUDA a forward pass over few is bound by the host, so a wave is as large as a part of the free memory allows.
        Powers of two, so that a little more or less free memory does not change what is computed together.
        """
        most = WAVE_TOKENS[self.device.type]
        if self.device.type == "cpu":
            return most
        config, size = self.model.config, self.cache.keys.element_size()
        kept = 2 * config.layers * config.kv_heads * config.head_dim * size
        heads = (config.heads + 2 * config.kv_heads) * config.head_dim
        # At its widest place a layer holds the fp32 sum before and after, gate and up and their product.
        passing = 12 * config.hidden_size + size * (2 * heads + 3 * config.intermediate_size)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + unused
        room = free // WAVE_SHARE // (kept + passing)
        return min(max(1 << room.bit_length() >> 1, LEAST_WAVE_TOKENS), most)

    def prefill(self, contexts: Sequence[Sequence[int]]) -> Cache:
        """Keys and values of all tokens but the last of each context."""
        lengths = [len(context) - 1 for context in contexts if len(context) > 1]
        capture = _CapturingAttention(self.model, lengths)
        bodies = chain.from_iterable(context[:-1] for context in contexts)
        flat = _to(self.device, torch.from_numpy(np.fromiter(bodies, np.int64, sum(lengths))))
        nobody = torch.empty(0, dtype=torch.int64, device=self.device)  # is asked for its hidden state
        self.model(flat, capture.packed.positions, capture, nobody)
        return capture.seen

    def limit(self, made: int) -> int:
        """How many tokens a rollout may have at the end of this call if it has `made` already."""
        return min(made + (self.sampling.segment_tokens or self.sampling.max_tokens), self.sampling.max_tokens)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Start samples. The last token of a context is fed by the first step.

        A context is the prompt, followed by the tokens of `started` if it is a rollout that goes on. Those tokens take
        their places in the row, so that from here on it is as if they had just been sampled.
        """
        if not admissions:
            return
        self.store_contexts(admissions)
        counts = [len(new.seeds) for new in admissions]
        started = [0 if new.started is None else len(new.started.ids) for new in admissions]
        for new, made in zip(admissions, started, strict=True):
            if new.started is not None:
                rows = slice(new.first_row, new.first_row + len(new.seeds))
                self.state.ids[rows, :made] = _to(self.device, torch.tensor(new.started.ids))
                self.state.logprobs[rows, :made] = _to(self.device, torch.from_numpy(new.started.logprobs))
        shared = [
            (new.first_row, new.context[-1], last := len(new.context) - 1, 0, made, self.limit(made), RUNNING, 0, last)
            for new, made in zip(admissions, started, strict=True)
        ]  # by the samples of an admission; their seeds come below, and rows follow one another
        table = np.repeat(np.array(shared, np.int64).T, counts, axis=1)
        table[0] += np.arange(sum(counts)) - np.repeat(np.cumsum(counts) - counts, counts)
        table[3] = np.fromiter(chain.from_iterable(new.seeds for new in admissions), np.int64, sum(counts))
        table[7] = table[0]  # until `lead` says more, each is its own leader
        places = _to(self.device, torch.from_numpy(table))
        self.state.numbers[:, places[0]] = places[1:]

    def store_contexts(self, admissions: Sequence[Admission]) -> None:
        """Write the keys and values of the contexts into the rows, all of a wave together."""
        waves: dict[int, tuple[Cache, list[Place]]] = {}
        for new in admissions:
            if (tokens := new.prefilled) is not None and tokens.end > tokens.begin:
                place = Place(new.first_row, len(new.seeds), tokens.begin, tokens.end)
                waves.setdefault(id(tokens.wave), (tokens.wave, []))[1].append(place)
        for wave, places in waves.values():
            self.operations.store(self.cache, wave, places)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy rows of at most `length` tokens into free slots. `lead` must follow."""
        source, target = _to(self.device, torch.tensor([sources, targets]))
        for cached in self.cache:
            used = cached[:, :, :, :length]
            if self.device.type == "cpu":
                for row, slot in zip(sources, targets, strict=True):
                    used[:, slot] = used[:, row]
            else:
                at_once = max(1, MOVED_BYTES // (used[:, 0].numel() * used.element_size()))
                for rows, slots in zip(source.split(at_once), target.split(at_once), strict=True):
                    used[:, slots] = used[:, rows]
        self.state.numbers[:, target] = self.state.numbers[:, source]
        self.state.ids[target] = self.state.ids[source]
        self.state.logprobs[target] = self.state.logprobs[source]

    def lead(self, leaders: NDArray[np.int64]) -> None:
        """In which row each of the first rows is to read the context that it shares with it."""
        self.state.leaders[: len(leaders)] = _to(self.device, torch.from_numpy(leaders))

    def free(self, first: int, end: int) -> None:
        """The rows from `first` to before `end` are empty."""
        self.state.finish[first:end] = FULL

    # --- what the host wants to know ---------------------------------------------------------------------------

    def ask(self) -> None:
        """Have the state after the steps asked for so far reported to the host."""
        if self.reports is not None:
            self.reports.ask()

    def report(self) -> Report:
        """What was asked for: waits for the device, but not for steps that came after."""
        if self.reports is not None:
            return self.reports.answer()
        counts, codes, ids = (x.numpy() for x in (self.state.counts, self.state.finish, self.state.ids))
        return Report(counts, codes, ids, np.zeros_like(counts))

    def read(self, rows: Sequence[int], tokens: int) -> Reading:
        """Have the first tokens of some rows and their logprobs brought to the host before the rows change."""
        where = _to(self.device, torch.tensor(rows))
        return Reading(self.state.ids[:, :tokens][where], self.state.logprobs[:, :tokens][where])

    # --- steps -------------------------------------------------------------------------------------------------

    def step(self, rows: int, columns: int) -> None:
        """Advance the first `rows` rows by one token; none of them is longer than `columns`."""
        if self.device.type != "cuda":
            self._step(rows, columns)
            return
        columns = min(_round_up(columns, 64), self.columns) if self.operations.reads_columns else self.columns
        bucket = (row_bucket(rows, self.rows), columns)
        if bucket not in self.graphs:
            self.graphs[bucket] = self._capture(*bucket)
        self.graphs[bucket].replay()

    def _step(self, n: int, columns: int) -> None:
        rows = self.state.first(n)
        attention = self.operations.attention(self.cache, rows, columns)
        logits = F.linear(self.model(rows.tokens, rows.positions, attention), self.model.head_weight)
        self.operations.draw(logits, rows, self.stop_ids, self.sampling)

    def _capture(self, rows: int, columns: int) -> torch.cuda.CUDAGraph:
        """Record one step as a CUDA graph. Warm-up runs change the state, so it is put back afterwards.

        All graphs use the same memory for what lies between their operations: only one of them runs at a time.
        """
        state = self.state.changing()
        saved = [x.clone() for x in state]
        stream, capturing = self.storage.streams
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(rows, columns)
                for x, kept in zip(state, saved, strict=True):
                    x.copy_(kept)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.storage.graph_memory, stream=capturing):
            self._step(rows, columns)
        for x, kept in zip(state, saved, strict=True):
            x.copy_(kept)
        return graph


@dataclass(slots=True)
class Report:
    """How far the rows are. The token with number t of row r is `ids[r, t - first[r]]`, if t ≥ first[r]."""

    counts: NDArray[np.int64]
    codes: NDArray[np.int64]
    ids: NDArray[np.int64]
    first: NDArray[np.int64]

    def tokens(self, rows: NDArray[np.int64], ends: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """The `width` tokens of each row before its end: [rows, width]."""
        columns = (ends - self.first[rows])[:, None] + np.arange(-width, 0)
        return np.asarray(self.ids[rows[:, None], columns])


class _HostReports:
    """Pinned memory into which the device writes reports in passing, so that nobody waits for a copy."""

    def __init__(self, state: Rows, tail: int) -> None:
        self.state, self.tail = state, tail
        self.numbers = torch.empty_like(state.numbers, device="cpu", pin_memory=True)
        self.ids = torch.empty(state.numbers.shape[1], tail, dtype=torch.int64, pin_memory=True)
        self.offsets = torch.arange(-tail, 0, device=state.numbers.device)
        self.ready = torch.cuda.Event()

    def ask(self) -> None:
        self.numbers.copy_(self.state.numbers, non_blocking=True)
        if self.tail:
            numbers = (self.state.counts[:, None] + self.offsets).clamp_(min=0)
            self.ids.copy_(self.state.ids.gather(1, numbers), non_blocking=True)
        self.ready.record()

    def answer(self) -> Report:
        self.ready.synchronize()
        counts, codes = self.numbers[3].numpy(), self.numbers[5].numpy()
        return Report(counts, codes, self.ids.numpy(), counts - self.tail)


class Reading:
    """Tokens and logprobs of some rows on their way to the host."""

    def __init__(self, ids: Tensor, logprobs: Tensor) -> None:
        self.event = torch.cuda.Event() if ids.device.type == "cuda" else None
        self.ids, self.logprobs = (self._to_host(x) for x in (ids, logprobs))
        if self.event is not None:
            self.event.record()

    def _to_host(self, x: Tensor) -> Tensor:
        if self.event is None:
            return x
        return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if self.event is not None:
            self.event.synchronize()
        return self.ids.numpy(), self.logprobs.numpy()


class _CapturingAttention:
    """Packed causal attention that keeps the keys and values it sees."""

    def __init__(self, model: Transformer, lengths: Sequence[int]) -> None:
        config, weight = model.config, model.embedding.weight
        self.packed = PackedCausal(lengths, weight.device)
        shape = (config.layers, self.packed.count, config.kv_heads, config.head_dim)
        self.seen = Cache(*(torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in range(2)))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen.keys[layer], self.seen.values[layer] = k, v
        if layer == len(self.seen.keys) - 1:
            return q  # nobody looks at what this layer mixes
        return self.packed(layer, q, k, v)


def _to(device: torch.device, x: Tensor) -> Tensor:
    """Bring a tensor from the host without waiting for the device."""
    return x.to(device) if device.type == "cpu" or not x.numel() else x.pin_memory().to(device, non_blocking=True)


def row_bucket(n: int, most: int) -> int:
    """The number of rows that a captured step has for n running ones: powers of two, then multiples of 64 and of 256.

    Rows too many cost little, since all but the matrix products pass over them.
    """
    if n <= 64:
        return min(1 << max(n - 1, 0).bit_length(), most)
    return min(_round_up(n, 64 if n <= 512 else 256), most)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
