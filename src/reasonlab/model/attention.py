"""Which keys a token may see: attention for packed sequences (training, prefill). Decoding has its own in `rollout`.

All matrix products outside attention run on flat tokens without padding. Attention itself runs on small padded
blocks of sequences of similar length. Padding stands on the right, and a causal query never looks to its right, so
no mask is needed and padded slots never reach a real token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

CUDA_WASTE = 0.5


class PackedCausal:
    """Causal attention inside each of several sequences that lie one behind the other in one flat token list.

    Sequences may share tokens, as the samples of a group share their prompt: `tokens` then names the flat token at
    each place of the sequences written out one behind the other. A shared token sees the same keys in every sequence.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device | str = "cpu", tokens: NDArray[np.int64] | None = None
    ) -> None:
        # How much shorter than its block's width a sequence may be: padding costs time on a CPU, launches on a GPU.
        waste = 0.15 if torch.device(device).type == "cpu" else CUDA_WASTE
        sizes = np.asarray(lengths, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        within = np.arange(sizes.sum()) - np.repeat(starts, sizes)
        tokens = np.arange(sizes.sum()) if tokens is None else tokens
        self.blocks: list[tuple[int, int]] = []  # rows and width of padded grids that follow one another
        row_starts = np.zeros_like(sizes)  # the slot of each sequence's first token
        contents: list[NDArray[np.int64]] = []  # the token in each slot
        slots = 0
        order = np.argsort(-sizes, kind="stable")
        while len(order):
            width = int(sizes[order[0]])
            rows = int(np.searchsorted(-sizes[order], -width * (1 - waste), side="right"))
            members, order = np.sort(order[:rows]), order[rows:]
            self.blocks.append((rows, width))
            row_starts[members] = slots + np.arange(rows) * width
            contents.append(np.repeat(tokens[starts[members]], width))  # padding: any token of the same sequence
            slots += rows * width
        slot_of_place = np.repeat(row_starts, sizes) + within
        contents_flat = np.concatenate(contents) if contents else np.zeros(0, np.int64)
        contents_flat[slot_of_place] = tokens
        count = int(tokens.max()) + 1 if len(tokens) else 0
        positions, slot_of_token = np.zeros(count, np.int64), np.zeros(count, np.int64)
        positions[tokens], slot_of_token[tokens] = within, slot_of_place
        self.positions = _on(positions, device)
        self.plain = len(self.blocks) == 1 and slots == count  # the grid is a view of the flat tokens
        self.token_in_slot, self.slot_of_token = _on(contents_flat, device), _on(slot_of_token, device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.plain:
            return self._attend(*self.blocks[0], q, k, v)
        sizes = [rows * width for rows, width in self.blocks]
        grids = zip(*(x.index_select(0, self.token_in_slot).split(sizes) for x in (q, k, v)), strict=True)
        parts = [self._attend(*block, *qkv) for block, qkv in zip(self.blocks, grids, strict=True)]
        return torch.cat(parts).index_select(0, self.slot_of_token)

    @staticmethod
    def _attend(rows: int, width: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(rows, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return out.transpose(1, 2).reshape(rows * width, out.shape[1], out.shape[3])


def _on(array: NDArray[np.int64], device: torch.device | str) -> Tensor:
    return torch.from_numpy(array).to(device)
