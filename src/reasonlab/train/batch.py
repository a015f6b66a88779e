"""Training examples, and the flat tensors that a method's loss sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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
        return cls(tokens=max(1, sum(int(e.mask.sum()) for e in examples)), sequences=len(examples))


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

    def flat(arrays: list[NDArray[np.generic]], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device=device, dtype=dtype)

    mask = flat([e.mask for e in examples], torch.float32)
    sizes = torch.tensor([len(e.response) for e in examples])
    sequence = torch.repeat_interleave(torch.arange(len(examples)), sizes).to(device)
    reference = None
    if all(e.reference is not None for e in examples):
        reference = flat([e.reference for e in examples if e.reference is not None], torch.float32)
    pair = None
    if all(e.pair >= 0 for e in examples):
        pair = torch.from_numpy(np.unique([e.pair for e in examples], return_inverse=True)[1]).to(device)
    return TokenBatch(
        old=flat([e.logprobs for e in examples], torch.float32),
        mask=mask,
        sequence=sequence,
        advantage=torch.tensor([e.advantage for e in examples], dtype=torch.float32, device=device),
        lengths=torch.tensor([max(1, int(e.mask.sum())) for e in examples], dtype=torch.float32, device=device),
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
        sequences, readers, size = [], [], 0
        for e in examples:
            prompt = e.prompt.tobytes()
            if prompt not in prompt_starts:
                prompt_starts[prompt] = size
                parts.append(e.prompt)
                size += len(e.prompt)
            start = prompt_starts[prompt]
            end = size + len(e.response) - 1
            parts.append(e.response[:-1])
            sequences.append(np.concatenate((np.arange(start, start + len(e.prompt)), np.arange(size, end))))
            readers.append(sequences[-1][len(e.prompt) - 1 :])
            size = end
        return cls(
            ids=np.concatenate(parts),
            lengths=[len(sequence) for sequence in sequences],
            sequences=np.concatenate(sequences),
            readers=np.concatenate(readers),
            targets=np.concatenate([e.response for e in examples]),
        )


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
