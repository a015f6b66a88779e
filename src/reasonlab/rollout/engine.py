"""Continuous batching: a queue of samples, a fixed number of rows, and a row is given on as soon as it is free.

Every prompt is prefilled once for all samples of its group that begin; a rollout that goes on is prefilled together
with the tokens it has. On CUDA the host never waits for the steps it launched last: it sorts finished rows out while
they run. On the CPU several threads, each with its own rows and single-threaded arithmetic, share the work; that scales
better for small models than splitting each tiny product.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from reasonlab.hardware import worker_pool
from reasonlab.model.transformer import Transformer
from reasonlab.rollout.decoder import Admission, Decoder, Prefilled, Reading, Report, Storage
from reasonlab.rollout.operations import RUNNING, STOPPED
from reasonlab.rollout.types import Finish, Request, Rollout, Sampling

REPETITION_INTERVAL = 16
CHECK_INTERVAL = {"cpu": 1, "cuda": 8}  # steps between two looks at which rows are done
# Steps of an interval that are launched before its look is waited for: the device works on while the host sorts rows.
STEPS_AHEAD = {"cpu": 0, "cuda": 2}
MOST_DECODERS = 4  # for each worker: settings that take turns, as training and evaluation do, keep their graphs

_End = tuple[int, Finish]  # how many tokens count, and why there are no more


@dataclass(slots=True)
class _Sample:
    """A sample waiting for a row or occupying one."""

    request: int
    sample: int
    started: Rollout | None = None  # what it had when this call began


@dataclass(slots=True)
class _Context:
    """Tokens to go on from and the samples that do: those of a request that begin, or one rollout that goes on."""

    request: int
    samples: list[int]
    tokens: list[int]
    started: Rollout | None = None


@contextmanager
def _setting(stopped: threading.Event) -> Iterator[None]:
    """After Ctrl-C or an error in one worker the others end too: nobody wants the rest of their answers."""
    try:
        yield
    except BaseException:
        stopped.set()
        raise


class Engine:
    """Generates rollouts with `model`'s weights as they are at the time of the call."""

    def __init__(
        self,
        model: Transformer,
        rows: int = 256,
        workers: int = 1,
        decode_text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.model, self.rows, self.decode_text = model, rows, decode_text
        self.workers = workers if model.embedding.weight.device.type == "cpu" else 1
        self.version = 0
        self.generated = 0  # tokens sampled so far, in all calls
        self._decoders: dict[tuple[int, int, int, Sampling], Decoder] = {}  # the one used last comes last
        self._storage: dict[int, Storage] = {}

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Rollout]]:
        """All samples of all requests, in order. `progress` is called with the number of rollouts just finished.

        Rollouts are whole: what was started comes first, with the logprobs and versions it was sampled with.
        """
        if sampling.stop_strings and self.decode_text is None:
            raise ValueError("stop strings need an engine that was given `decode_text`")
        results = [[_finished_before(rollout) for rollout in _started(request, sampling)] for request in requests]
        shares = [range(worker, len(requests), self.workers) for worker in range(self.workers)]
        stopped = threading.Event()

        def work(worker: int) -> None:
            with torch.inference_mode(), _setting(stopped):
                self._generate_share(worker, shares[worker], requests, sampling, results, progress, stopped)

        if self.workers == 1:
            work(0)
        else:
            with worker_pool(self.workers) as pool, _setting(stopped):
                list(pool.map(work, range(self.workers)))
        rollouts = [[rollout for rollout in group if rollout is not None] for group in results]
        before = sum(len(rollout.ids) for request in requests for rollout in request.started if rollout is not None)
        self.generated += sum(len(rollout.ids) for group in rollouts for rollout in group) - before
        return rollouts

    def _generate_share(
        self,
        worker: int,
        share: Sequence[int],
        requests: Sequence[Request],
        sampling: Sampling,
        results: list[list[Rollout | None]],
        progress: Callable[[int], None] | None,
        stopped: threading.Event,
    ) -> None:
        contexts = [context for i in share for context in _contexts(i, requests[i])]
        if not contexts:
            return
        total = sum(len(context.samples) for context in contexts)
        longest = max(len(requests[context.request].prompt) for context in contexts)
        decoder = self._decoder(worker, min(total, self.rows), longest + sampling.max_tokens, sampling)
        decoder.free(0, decoder.rows)  # an interrupted call may have left rows that run
        waiting = _Waiting(decoder, requests, contexts)
        table = _Table(decoder.rows)
        interval, ahead = CHECK_INTERVAL[decoder.device.type], STEPS_AHEAD[decoder.device.type]
        leaving: _Leaving | None = None

        def steps(count: int) -> None:
            # No row may outgrow its columns between two checks; rows at their limit stop advancing by themselves.
            n = len(table)
            for _ in range(min(count, int(table.left[:n].max()))):
                table.lengths[:n] += 1
                table.left[:n] -= 1
                decoder.step(n, min(int(table.lengths[:n].max()), decoder.columns))

        while (table or waiting or leaving) and not stopped.is_set():
            if waiting and len(table) < decoder.rows:
                waiting.admit(table)
            if table:
                steps(interval - ahead)
                decoder.ask()
                steps(ahead)
            if leaving:
                finished = leaving.collect(requests, self.version, results)
                if progress and finished:
                    progress(finished)
                leaving = None
            ends = self._ends(decoder, table) if table else {}
            if ends:
                rows = sorted(ends)
                reading = decoder.read(rows, max(count for count, _ in ends.values()))
                leaving = _Leaving([table.samples[row] for row in rows], [ends[row] for row in rows], reading)
                table.remove(rows, decoder)

    def _decoder(self, worker: int, rows: int, columns: int, sampling: Sampling) -> Decoder:
        """Buffers (and captured graphs) are kept between calls while they are large enough."""
        rows = min(1 << (rows - 1).bit_length() if rows > 1 else 1, self.rows)
        columns = -(-columns // 64) * 64
        mine = [key for key in list(self._decoders) if key[0] == worker]  # other workers change it meanwhile
        fitting = [key for key in mine if key[1] >= rows and key[2] >= columns and key[3] == sampling]
        key = min(fitting, default=(worker, rows, columns, sampling), key=lambda k: k[1] * k[2])
        decoder = self._decoders.pop(key, None)
        if decoder is None:
            storage = self._storage.get(worker)
            if storage is None or storage.tokens < rows * columns:
                for old in mine:
                    del self._decoders[old]
                storage = None
                self._storage.pop(worker, None)  # before the larger one is made: there may not be room for both
                storage = self._storage[worker] = Storage(self.model, rows * columns)
            elif len(mine) >= MOST_DECODERS:
                del self._decoders[mine[0]]
            seen = max(_stop_string_tail(sampling) if sampling.stop_strings else 0, sampling.repetition_window)
            tail = seen + CHECK_INTERVAL[storage.keys.device.type] if seen else 0
            decoder = Decoder(self.model, rows, columns, sampling, storage, tail)
        self._decoders[key] = decoder
        return decoder

    def _ends(self, decoder: Decoder, table: _Table) -> dict[int, _End]:
        """Rows that are done: how many of their tokens count, and why they ended."""
        report, sampling = decoder.report(), decoder.sampling
        counts, codes = report.counts[: len(table)], report.codes[: len(table)]
        ends: dict[int, _End] = {}
        for row in np.flatnonzero(codes != RUNNING).tolist():
            full: Finish = "length" if counts[row] == sampling.max_tokens else "unfinished"
            ends[row] = (int(counts[row]), "stop" if codes[row] == STOPPED else full)
        if sampling.stop_strings or sampling.repetition_window:
            checked = table.checked[: len(table)]
            early = _repetitions(sampling.repetition_window, report, checked, counts)
            if sampling.stop_strings:
                for row in range(len(table)):
                    count = self._stop_string(sampling, report, row, int(checked[row]))
                    if count is not None and (row not in early or count <= early[row][0]):
                        early[row] = (count, "stop")
            ends.update((row, end) for row, end in early.items() if row not in ends or end[0] <= ends[row][0])
            checked[:] = counts
        return ends

    def _stop_string(self, sampling: Sampling, report: Report, row: int, checked: int) -> int | None:
        """The number of tokens after which a stop string is complete, if that is among the new ones.

        Every prefix counts, whatever the check interval, so results do not depend on it.
        """
        total, first = int(report.counts[row]), max(0, int(report.first[row]))
        ids = report.ids[row, first - report.first[row] : total - report.first[row]].tolist()
        tail = _stop_string_tail(sampling)

        def completed(new: int, end: int) -> bool:
            assert self.decode_text is not None
            text = self.decode_text(ids[max(0, new - tail - first) : end - first])
            return any(stop in text for stop in sampling.stop_strings)

        if total == checked or not completed(checked + 1, total):  # mostly there is none at all
            return None
        return next((count for count in range(checked + 1, total + 1) if completed(count, count)), None)


def _stop_string_tail(sampling: Sampling) -> int:
    """A token has at least one byte, so a stop string of n bytes lies within the last n tokens.

    And a few more, for decoders that drop a space at the beginning or leave special tokens out.
    """
    return 8 + max((len(stop.encode()) for stop in sampling.stop_strings), default=0)


def _repetitions(window: int, report: Report, checked: NDArray[np.int64], counts: NDArray[np.int64]) -> dict[int, _End]:
    """Rows whose last tokens repeat themselves, looked for after every `REPETITION_INTERVAL` tokens."""
    found: dict[int, _End] = {}
    due = (checked // REPETITION_INTERVAL + 1) * REPETITION_INTERVAL
    while window and (due <= counts).any():
        rows = np.flatnonzero((due <= counts) & (due >= window))
        for row in rows[repeating(report.tokens(rows, due[rows], window))].tolist():
            found.setdefault(row, (int(due[row]), "repetition"))
        due += REPETITION_INTERVAL
    return found


class _Table:
    """Which sample is in which row. Running rows are the first ones, without a gap."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.samples: list[_Sample] = []
        self.lengths = np.zeros(rows, np.int64)  # prompt and response tokens in each row
        self.left = np.zeros(rows, np.int64)  # tokens to come, if nothing stops it
        self.checked = np.zeros(rows, np.int64)  # tokens already searched for stop strings and repetition
        self.contexts = np.zeros(rows, np.int64)  # what it goes on from, by number

    def __len__(self) -> int:
        return len(self.samples)

    def add(self, samples: Sequence[_Sample], context: int, length: int, made: int, limit: int) -> None:
        new = slice(len(self), len(self) + len(samples))
        self.lengths[new], self.left[new], self.checked[new], self.contexts[new] = length, limit - made, made, context
        self.samples += samples

    def remove(self, rows: Sequence[int], decoder: Decoder) -> None:
        """Take rows out and close the gaps with rows from the end."""
        before, order = len(self), list(range(len(self)))
        for row in reversed(rows):
            order[row] = order[-1]
            order.pop()
        targets = [row for row in rows if row < len(order)]
        sources = [order[row] for row in targets]
        if targets:
            longest = min(int(self.lengths[sources].max()), decoder.columns)
            decoder.move(sources, targets, longest)
            for column in (self.lengths, self.left, self.checked, self.contexts):
                column[targets] = column[sources]
        decoder.free(len(order), before)
        self.samples = [self.samples[row] for row in order]
        decoder.lead(self.leaders())

    def leaders(self) -> NDArray[np.int64]:
        """Of each row, the first that goes on from the same context."""
        _, first, which = np.unique(self.contexts[: len(self)], return_index=True, return_inverse=True)
        return np.asarray(first[which], np.int64)


@dataclass(slots=True)
class _Leaving:
    """Samples whose rows were given on while their tokens are on the way to the host."""

    samples: list[_Sample]
    ends: list[_End]
    reading: Reading

    def collect(self, requests: Sequence[Request], version: int, results: list[list[Rollout | None]]) -> int:
        """Put the rollouts where they belong; returns how many are finished."""
        ids, logprobs = self.reading.arrays()
        newest = np.full(ids.shape[1], version, np.int32)
        for i, (sample, (count, finish)) in enumerate(zip(self.samples, self.ends, strict=True)):
            versions = newest[:count].copy()
            if sample.started is not None:
                versions[: len(sample.started.ids)] = sample.started.versions
            prompt = list(requests[sample.request].prompt)
            rollout = Rollout(prompt, ids[i, :count].tolist(), logprobs[i, :count].copy(), finish, versions)
            results[sample.request][sample.sample] = rollout
        return sum(finish != "unfinished" for _, finish in self.ends)


class _Waiting:
    """Contexts that wait for rows, prefilled in waves and shared by their samples."""

    def __init__(self, decoder: Decoder, requests: Sequence[Request], contexts: Sequence[_Context]) -> None:
        self.decoder, self.requests = decoder, requests
        self.unfilled = deque(contexts)
        self.ready: deque[tuple[_Context, Prefilled | None]] = deque()
        self.context = 0  # the number of the first ready one
        self.next_sample = 0  # of it
        self.wave_tokens = decoder.wave_tokens()

    def __bool__(self) -> bool:
        return bool(self.ready or self.unfilled)

    def admit(self, table: _Table) -> None:
        """Give the free rows to the next samples."""
        admissions: list[Admission] = []
        while self and len(table) < table.rows:
            if not self.ready:
                self.decoder.admit(admissions)  # one wave's keys and values at a time
                admissions.clear()
                self._prefill_wave()
            context, prefilled = self.ready[0]
            chosen = context.samples[self.next_sample : self.next_sample + table.rows - len(table)]
            seeds = [self.requests[context.request].keys[i] for i in chosen]
            admissions.append(Admission(len(table), context.tokens, seeds, prefilled, context.started))
            made = 0 if context.started is None else len(context.started.ids)
            samples = [_Sample(context.request, i, context.started) for i in chosen]
            table.add(samples, self.context, len(context.tokens) - 1, made, self.decoder.limit(made))
            self.next_sample += len(chosen)
            if self.next_sample == len(context.samples):
                self.ready.popleft()
                self.context += 1
                self.next_sample = 0
        self.decoder.admit(admissions)
        self.decoder.lead(table.leaders())

    def _prefill_wave(self) -> None:
        wave: list[_Context] = []
        tokens = 0
        while self.unfilled and (not wave or tokens + len(self.unfilled[0].tokens) <= self.wave_tokens):
            wave.append(self.unfilled.popleft())
            tokens += len(wave[-1].tokens)
        if all(len(context.tokens) == 1 for context in wave):
            self.ready.extend((context, None) for context in wave)
            return
        computed = self.decoder.prefill([context.tokens for context in wave])
        start = 0
        for context in wave:
            end = start + len(context.tokens) - 1
            self.ready.append((context, Prefilled(computed, start, end)))
            start = end


def _started(request: Request, sampling: Sampling) -> Sequence[Rollout | None]:
    """What there is of each sample of a request, checked."""
    started = request.started or [None] * len(request.keys)
    if len(started) != len(request.keys):
        raise ValueError(f"{len(started)} started rollouts for {len(request.keys)} keys")
    for rollout in started:
        if rollout is not None and rollout.prompt != list(request.prompt):
            raise ValueError("a started rollout has another prompt than its request")
        if rollout is not None and rollout.finish == "unfinished" and len(rollout.ids) >= sampling.max_tokens:
            raise ValueError(f"an unfinished rollout has {len(rollout.ids)} of {sampling.max_tokens} tokens already")
    return started


def _finished_before(rollout: Rollout | None) -> Rollout | None:
    return None if rollout is None or rollout.finish == "unfinished" else rollout


def _contexts(index: int, request: Request) -> Iterator[_Context]:
    """What is to be done for a request: each unfinished rollout for itself, then all new samples together."""
    prompt = list(request.prompt)
    for i, rollout in enumerate(request.started):
        if rollout is not None and rollout.finish == "unfinished":
            yield _Context(index, [i], prompt + rollout.ids, rollout)
    fresh = [i for i in range(len(request.keys)) if not request.started or request.started[i] is None]
    if fresh:
        yield _Context(index, fresh, prompt)


def repeats(ids: NDArray[np.int64]) -> bool:
    """Whether the tokens are one block of at most a quarter of their number, repeated."""
    return bool(repeating(ids[None])[0])


def repeating(windows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """`repeats` of each row of a matrix."""
    found = np.zeros(len(windows), np.bool_)
    for p in range(1, windows.shape[1] // 4 + 1):
        found |= (windows[:, p:] == windows[:, :-p]).all(1)
    return found
