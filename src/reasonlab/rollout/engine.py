"""Continuous batching: a queue of samples, a fixed number of rows, and a row is given on as soon as it is free.

Every prompt is prefilled once for all samples of its group. On the CPU several threads, each with its own rows and
single-threaded arithmetic, share the work; that scales better for small models than splitting each tiny product.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
CUDA_CHECK_INTERVAL = 8  # decoding steps between two looks at which rows are done: each look waits for the device


@dataclass(slots=True)
class _Sample:
    """A sample waiting for a row or occupying one."""

    request: int
    sample: int
    checked: int = 0  # tokens already searched for stop strings and repetition


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
        self._decoders: dict[tuple[int, int, int, Sampling], Decoder] = {}

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Rollout]]:
        """All samples of all requests, in order. `progress` is called with the number of rollouts just finished."""
        if sampling.stop_strings and self.decode_text is None:
            raise ValueError("stop strings need an engine that was given `decode_text`")
        results: list[list[Rollout | None]] = [[None] * len(request.keys) for request in requests]
        shares = [range(worker, len(requests), self.workers) for worker in range(self.workers)]

        def work(worker: int) -> None:
            with torch.inference_mode():
                self._generate_share(worker, shares[worker], requests, sampling, results, progress)

        if self.workers == 1:
            work(0)
        else:
            with worker_pool(self.workers) as pool:
                list(pool.map(work, range(self.workers)))
        return [[rollout for rollout in group if rollout is not None] for group in results]

    def _generate_share(
        self,
        worker: int,
        share: Sequence[int],
        requests: Sequence[Request],
        sampling: Sampling,
        results: list[list[Rollout | None]],
        progress: Callable[[int], None] | None,
    ) -> None:
        if not share:
            return
        total = sum(len(requests[i].keys) for i in share)
        longest = max(len(requests[i].prompt) for i in share)
        decoder = self._decoder(worker, min(total, self.rows), longest + sampling.max_tokens, sampling)
        waiting = _Prompts(decoder, requests, share)
        active: list[_Sample] = []
        lengths = np.zeros(decoder.rows, np.int64)  # prompt and response tokens in each row
        interval = 1 if decoder.device.type == "cpu" else CUDA_CHECK_INTERVAL
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
                results[sample.request][sample.sample] = self._rollout(
                    requests[sample.request], decoder, row, count, finish
                )
                last = len(active) - 1
                if row != last:
                    decoder.move(last, row, min(int(lengths[last]), decoder.columns))
                    active[row], lengths[row] = active[last], lengths[last]
                else:
                    decoder.finish[row] = STOPPED
                active.pop()
            if progress and done:
                progress(len(done))

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
            done[row] = (int(counts[row]), "stop" if codes[row] == STOPPED else "length")
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

    def _rollout(self, request: Request, decoder: Decoder, row: int, count: int, finish: Finish) -> Rollout:
        return Rollout(
            prompt=list(request.prompt),
            ids=decoder.ids[row, :count].tolist(),
            logprobs=decoder.logprobs[row, :count].cpu().numpy().copy(),
            finish=finish,
            versions=np.full(count, self.version, np.int32),
        )


class _Prompts:
    """Prompts that wait for rows, prefilled in waves and shared by the samples of their group."""

    def __init__(self, decoder: Decoder, requests: Sequence[Request], share: Sequence[int]) -> None:
        self.decoder, self.requests = decoder, requests
        self.unfilled = deque(i for i in share if len(requests[i].keys) > 0)
        self.ready: deque[tuple[int, Tensor | None, Tensor | None]] = deque()
        self.next_sample = 0  # of the first ready request

    def __bool__(self) -> bool:
        return bool(self.ready or self.unfilled)

    def admit(self, first_row: int, room: int) -> tuple[list[_Sample], int]:
        """Give free rows, from `first_row` on, to the next samples of one request; also returns its prompt's length."""
        if not self.ready:
            self._prefill_wave()
        index, keys, values = self.ready[0]
        request = self.requests[index]
        chosen = range(self.next_sample, min(self.next_sample + room, len(request.keys)))
        rows = list(range(first_row, first_row + len(chosen)))
        self.decoder.admit(rows, request.prompt, [request.keys[i] for i in chosen], keys, values)
        self.next_sample = chosen.stop
        if self.next_sample == len(request.keys):
            self.ready.popleft()
            self.next_sample = 0
        return [_Sample(index, i) for i in chosen], len(request.prompt) - 1

    def _prefill_wave(self) -> None:
        wave: list[int] = []
        tokens = 0
        while self.unfilled and (not wave or tokens + len(self.requests[self.unfilled[0]].prompt) <= PREFILL_TOKENS):
            wave.append(self.unfilled.popleft())
            tokens += len(self.requests[wave[-1]].prompt)
        if all(len(self.requests[i].prompt) == 1 for i in wave):
            self.ready.extend((i, None, None) for i in wave)
            return
        keys, values = self.decoder.prefill([self.requests[i].prompt for i in wave])
        start = 0
        for i in wave:
            end = start + len(self.requests[i].prompt) - 1
            self.ready.append((i, keys[:, start:end], values[:, start:end]))
            start = end


def repeats(ids: NDArray[np.int64]) -> bool:
    """Whether the tokens are one block of at most a quarter of their number, repeated."""
    return any(bool((ids[p:] == ids[:-p]).all()) for p in range(1, len(ids) // 4 + 1))
