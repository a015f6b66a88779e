"""Continuous batching: a queue of samples, a fixed number of rows, and a row is given on as soon as it is free.

Every prompt is prefilled once for all samples of its group that begin; a rollout that goes on is prefilled together
with the tokens it has. On the CPU several threads, each with its own rows and
single-threaded arithmetic, share the work; that scales better for small models than splitting each tiny product.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reasonlab.hardware import worker_pool
from reasonlab.model.transformer import Transformer
from reasonlab.rollout.decoder import RUNNING, STOPPED, Decoder
from reasonlab.rollout.types import Finish, Request, Rollout, Sampling

PREFILL_TOKENS = 8192
REPETITION_INTERVAL = 16
CHECK_INTERVAL = {"cpu": 1, "cuda": 8}  # steps between two looks at which rows are done: each waits for the device


@dataclass(slots=True)
class _Sample:
    """A sample waiting for a row or occupying one."""

    request: int
    sample: int
    started: Rollout | None = None  # what it had when this call began
    checked: int = 0  # tokens already searched for stop strings and repetition


@dataclass(slots=True)
class _Context:
    """Tokens to go on from and the samples that do: those of a request that begin, or one rollout that goes on."""

    request: int
    samples: list[int]
    tokens: list[int]
    started: Rollout | None = None


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
        self._decoders: dict[tuple[int, int, int, Sampling], Decoder] = {}

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

        def work(worker: int) -> None:
            with torch.inference_mode():
                self._generate_share(worker, shares[worker], requests, sampling, results, progress)

        if self.workers == 1:
            work(0)
        else:
            with worker_pool(self.workers) as pool:
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
    ) -> None:
        contexts = [context for i in share for context in _contexts(i, requests[i])]
        if not contexts:
            return
        total = sum(len(context.samples) for context in contexts)
        longest = max(len(requests[context.request].prompt) for context in contexts)
        decoder = self._decoder(worker, min(total, self.rows), longest + sampling.max_tokens, sampling)
        waiting = _Waiting(decoder, requests, contexts)
        active: list[_Sample] = []
        lengths = np.zeros(decoder.rows, np.int64)  # prompt and response tokens in each row
        interval = CHECK_INTERVAL[decoder.device.type]
        while active or waiting:
            while waiting and len(active) < decoder.rows:
                samples, length = waiting.admit(len(active), decoder.rows - len(active))
                lengths[len(active) : len(active) + len(samples)] = length
                active += samples
            # No row may outgrow its columns between two checks; rows at their limit stop advancing by themselves.
            for _ in range(interval):
                lengths[: len(active)] += 1
                decoder.step(len(active), min(int(lengths[: len(active)].max()), decoder.columns))
            done = self._finished(decoder, active)
            for row in sorted(done, reverse=True):
                sample, (count, finish) = active[row], done[row]
                prompt = requests[sample.request].prompt
                results[sample.request][sample.sample] = self._rollout(prompt, sample, decoder, row, count, finish)
                last = len(active) - 1
                if row != last:
                    decoder.move(last, row, min(int(lengths[last]), decoder.columns))
                    active[row], lengths[row] = active[last], lengths[last]
                else:
                    decoder.finish[row] = STOPPED
                active.pop()
            finished = sum(finish != "unfinished" for _, finish in done.values())
            if progress and finished:
                progress(finished)

    def _decoder(self, worker: int, rows: int, columns: int, sampling: Sampling) -> Decoder:
        """Buffers (and captured graphs) are kept between calls while they are large enough."""
        rows = 1 << (rows - 1).bit_length() if rows > 1 else 1
        wanted = (worker, min(rows, self.rows), -(-columns // 64) * 64, sampling)
        if wanted not in self._decoders:
            for old in [key for key in list(self._decoders) if key[0] == worker]:  # other workers change it meanwhile
                del self._decoders[old]
            self._decoders[wanted] = Decoder(self.model, *wanted[1:])
        return self._decoders[wanted]

    def _finished(self, decoder: Decoder, active: list[_Sample]) -> dict[int, tuple[int, Finish]]:
        """Rows that are done: how many of their tokens count, and why they ended."""
        codes = decoder.finish[: len(active)].cpu().numpy()
        done: dict[int, tuple[int, Finish]] = {}
        inspect = bool(decoder.sampling.stop_strings) or decoder.sampling.repetition_window > 0
        if not inspect and not codes.any():
            return done
        counts = decoder.counts[: len(active)].cpu().numpy()
        for row in np.flatnonzero(codes != RUNNING).tolist():
            full: Finish = "length" if counts[row] == decoder.sampling.max_tokens else "unfinished"
            done[row] = (int(counts[row]), "stop" if codes[row] == STOPPED else full)
        if inspect:
            ids = decoder.ids[: len(active)].cpu().numpy()
            for row, sample in enumerate(active):
                cut = self._early_end(decoder.sampling, ids[row, : counts[row]], sample)
                if cut is not None and (row not in done or cut[0] <= done[row][0]):
                    done[row] = cut
                sample.checked = int(counts[row])
        return done

    def _early_end(self, sampling: Sampling, ids: NDArray[np.int64], sample: _Sample) -> tuple[int, Finish] | None:
        """The first point among the new tokens at which a stop string is complete or the text repeats itself.

        Every prefix is examined exactly once, whatever the check interval, so results do not depend on it.
        """
        # A token has at least one byte, so a stop string of n bytes lies within the last n tokens (and a few more for
        # decoders that drop a space at the beginning or leave special tokens out).
        tail_tokens = 8 + max((len(stop.encode()) for stop in sampling.stop_strings), default=0)
        for count in range(sample.checked + 1, len(ids) + 1):
            if sampling.stop_strings and self.decode_text is not None:
                tail = self.decode_text(ids[max(0, count - tail_tokens) : count].tolist())
                if any(stop in tail for stop in sampling.stop_strings):
                    return count, "stop"
            window = sampling.repetition_window
            if window and count >= window and count % REPETITION_INTERVAL == 0 and repeats(ids[count - window : count]):
                return count, "repetition"
        return None

    def _rollout(
        self, prompt: Sequence[int], sample: _Sample, decoder: Decoder, row: int, count: int, finish: Finish
    ) -> Rollout:
        versions = np.full(count, self.version, np.int32)
        if sample.started is not None:
            versions[: len(sample.started.ids)] = sample.started.versions
        return Rollout(
            prompt=list(prompt),
            ids=decoder.ids[row, :count].tolist(),
            logprobs=decoder.logprobs[row, :count].cpu().numpy().copy(),
            finish=finish,
            versions=versions,
        )


class _Waiting:
    """Contexts that wait for rows, prefilled in waves and shared by their samples."""

    def __init__(self, decoder: Decoder, requests: Sequence[Request], contexts: Sequence[_Context]) -> None:
        self.decoder, self.requests = decoder, requests
        self.unfilled = deque(contexts)
        self.ready: deque[tuple[_Context, Tensor | None, Tensor | None]] = deque()
        self.next_sample = 0  # of the first ready context

    def __bool__(self) -> bool:
        return bool(self.ready or self.unfilled)

    def admit(self, first_row: int, room: int) -> tuple[list[_Sample], int]:
        """Give free rows, from `first_row` on, to the next samples of one context; also returns its cached length."""
        if not self.ready:
            self._prefill_wave()
        context, keys, values = self.ready[0]
        chosen = context.samples[self.next_sample : self.next_sample + room]
        rows = list(range(first_row, first_row + len(chosen)))
        seeds = [self.requests[context.request].keys[i] for i in chosen]
        self.decoder.admit(rows, context.tokens, seeds, keys, values, context.started)
        self.next_sample += len(chosen)
        if self.next_sample == len(context.samples):
            self.ready.popleft()
            self.next_sample = 0
        checked = 0 if context.started is None else len(context.started.ids)
        return [_Sample(context.request, i, context.started, checked) for i in chosen], len(context.tokens) - 1

    def _prefill_wave(self) -> None:
        wave: list[_Context] = []
        tokens = 0
        while self.unfilled and (not wave or tokens + len(self.unfilled[0].tokens) <= PREFILL_TOKENS):
            wave.append(self.unfilled.popleft())
            tokens += len(wave[-1].tokens)
        if all(len(context.tokens) == 1 for context in wave):
            self.ready.extend((context, None, None) for context in wave)
            return
        keys, values = self.decoder.prefill([context.tokens for context in wave])
        start = 0
        for context in wave:
            end = start + len(context.tokens) - 1
            self.ready.append((context, keys[:, start:end], values[:, start:end]))
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
    return any(bool((ids[p:] == ids[:-p]).all()) for p in range(1, len(ids) // 4 + 1))
