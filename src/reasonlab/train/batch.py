"""Training examples, and the flat tensors that a method's loss sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reasonlab.model.attention import to_device


@dataclass(slots=True)
class Example:
    """One prompt with one response to learn from.

    `logprobs` are those of the policy that sampled the response; `mask` says which response tokens enter the loss.
    """

    prompt: NDArray[np.int64]
    response: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    mask: NDArray[np.bool_]
    advantage: float = 0.0
    reference: NDArray[np.float32] | None = None  # logprobs under the reference model, where a method asks for them
    versions: NDArray[np.int32] | None = None  # the policy that sampled each response token
    pair: int = -1  # examples with the same number (not -1) are compared by the loss and share a micro-batch

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)

    def sampled_by(self, version: int) -> NDArray[np.bool_]:
        """Which response tokens this version of the policy sampled."""
        return np.zeros(len(self.response), bool) if self.versions is None else self.versions == version


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over all examples of one optimizer step, computed once: the only denominators a loss may use."""

    tokens: int  # in the loss; at least 1, so that a step whose tokens are all masked is a step of zero loss
    sequences: int

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Totals:
        return cls(tokens=max(1, sum(int(np.count_nonzero(e.mask)) for e in examples)), sequences=len(examples))


@dataclass(slots=True)
class TokenBatch:
    """Response tokens of several whole sequences, flat: [tokens] tensors, and [sequences] tensors beside them."""

    old: Tensor  # logprobs of the sampling policy
    mask: Tensor  # 1 where a token enters the loss
    sequence: Tensor  # which sequence a token belongs to
    advantage: Tensor  # one number for each sequence
    lengths: Tensor  # tokens in the loss of each sequence, at least 1
    totals: Totals
    reference: Tensor | None = None
    pair: Tensor | None = None  # for each sequence: which pair it belongs to, counted from 0

    def per_token(self, of_sequences: Tensor) -> Tensor:
        return of_sequences[self.sequence]

    def sum_by_sequence(self, of_tokens: Tensor) -> Tensor:
        return torch.zeros_like(self.advantage, dtype=of_tokens.dtype).index_add(0, self.sequence, of_tokens)


def pack(examples: Sequence[Example], totals: Totals, device: torch.device | str) -> TokenBatch:
    """The tensors for a loss over these examples, whose response tokens come one behind the other."""

    def flat(arrays: list[NDArray[np.generic]]) -> NDArray[np.float32]:
        return np.concatenate(arrays, dtype=np.float32, casting="unsafe")

    mask = flat([e.mask for e in examples])
    sequence = np.repeat(np.arange(len(examples)), [len(e.response) for e in examples])
    counted = np.bincount(sequence, weights=mask, minlength=len(examples))
    reference = pair = None
    if all(e.reference is not None for e in examples):
        reference = to_device(flat([e.reference for e in examples if e.reference is not None]), device)
    if all(e.pair >= 0 for e in examples):
        pair = to_device(np.unique([e.pair for e in examples], return_inverse=True)[1], device)
    return TokenBatch(
        old=to_device(flat([e.logprobs for e in examples]), device),
        mask=to_device(mask, device),
        sequence=to_device(sequence, device),
        advantage=to_device(np.array([e.advantage for e in examples], np.float32), device),
        lengths=to_device(counted.clip(1).astype(np.float32), device),
        totals=totals,
        reference=reference,
        pair=pair,
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """The tokens of several examples in one flat list that holds each distinct prompt once.

    The last token of a response predicts nothing that is asked for, so it is left out.
    """

    ids: NDArray[np.int64]
    lengths: list[int]  # tokens of each sequence, prompt included
    sequences: NDArray[np.int64]  # the flat token at each place of each sequence
    readers: NDArray[np.int64]  # the flat token whose hidden state predicts each response token
    targets: NDArray[np.int64]  # those response tokens

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Layout:
        parts: list[NDArray[np.int64]] = []
        prompt_starts: dict[bytes, int] = {}
        starts: list[int] = []  # where the prompt of each example begins, and then its own tokens
        sizes: list[int] = []  # and how long they are
        size = 0
        for e in examples:
            prompt = e.prompt.tobytes()
            if prompt not in prompt_starts:
                prompt_starts[prompt] = size
                parts.append(e.prompt)
                size += len(e.prompt)
            parts.append(e.response[:-1])
            starts += (prompt_starts[prompt], size)
            sizes += (len(e.prompt), len(e.response) - 1)
            size += len(e.response) - 1
        pieces, lengths = (np.array(numbers, dtype=np.int64).reshape(-1, 2) for numbers in (starts, sizes))
        # The first token of a response is read at the last of its prompt, the others at the one before them.
        read_at, read = pieces.copy(), lengths.copy()
        read_at[:, 0] += lengths[:, 0] - 1
        read[:, 0] = 1
        return cls(
            ids=np.concatenate(parts),
            lengths=lengths.sum(1).tolist(),
            sequences=_ranges(pieces.ravel(), lengths.ravel()),
            readers=_ranges(read_at.ravel(), read.ravel()),
            targets=np.concatenate([e.response for e in examples]),
        )

    def filled(self, tokens: int, readers: int, longest: int) -> Layout:
        """With so many tokens and readers. Those that are added stand last, and nobody should want to know of them.

        The added tokens are sequences of their own, none longer than `longest`. They repeat the ids there are, and the
        added readers are spread over all tokens: where many have the same, their gradients wait for one another.
        """
        size, more = len(self.ids), readers - len(self.readers)
        return Layout(
            ids=np.resize(self.ids, tokens),
            lengths=[*self.lengths, *(min(longest, tokens - start) for start in range(size, tokens, longest))],
            sequences=np.concatenate((self.sequences, np.arange(size, tokens))),
            readers=np.concatenate((self.readers, np.arange(more) % tokens)),
            targets=np.pad(self.targets, (0, more)),
        )


def _ranges(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, … of each pair, one behind the other."""
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def micro_batches(examples: Sequence[Example], token_budget: int, even: int = 1) -> list[list[Example]]:
    """Split into packs of similar size and at most `token_budget` tokens (a longer sequence gets a pack of its own).

    Examples of one prompt stay together, because a pack computes each prompt once; a pair is never split. The number
    of packs is a multiple of `even` where possible, so that threads get equal shares. The split depends on the
    examples alone, never on the number of workers: results stay bit-identical.
    """
    longest: dict[bytes, int] = {}
    for e in examples:
        prompt = e.prompt.tobytes()
        longest[prompt] = max(e.length, longest.get(prompt, 0))

    def place(e: Example) -> tuple[int, bytes, int, int]:
        prompt = e.prompt.tobytes()
        return -longest[prompt], prompt, e.pair, -e.length

    total = sum(e.length for e in examples)
    share = total / max(1, even * math.ceil(total / token_budget / even))
    packs: list[list[Example]] = []
    used, previous = 0, -1
    for example in sorted(examples, key=place):
        with_partner = example.pair >= 0 and example.pair == previous
        if not packs or (not with_partner and (used >= share or used + example.length > token_budget)):
            packs.append([])
            used = 0
        previous = example.pair
        packs[-1].append(example)
        used += example.length
    return packs
