"""Which keys a token may see: attention for packed sequences (training, prefill). Decoding has its own in `rollout`.

All matrix products outside attention run on flat tokens without padding. Attention itself runs on small padded
blocks of sequences of similar length. Padding stands on the right, and a causal query never looks to its right, so
no mask is needed and padded slots never reach a real token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

CUDA_WASTE = 0.5


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences of similar length: flat token `tokens[i]` lies in slot `slots[i]` of the padded [rows × width] grid."""

    rows: int
    width: int
    tokens: Tensor
    slots: Tensor
    exact: bool  # every sequence has the full width: the grid is a plain view of the flat tokens


class PackedCausal:
    """Causal attention inside each of several sequences that lie one behind the other in one flat token list."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        # How much shorter than its block's width a sequence may be: padding costs time on a CPU, launches on a GPU.
        waste = 0.15 if torch.device(device).type == "cpu" else CUDA_WASTE
        sizes = np.asarray(lengths, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        self.positions = _on(np.arange(sizes.sum()) - np.repeat(starts, sizes), device)
        self.blocks: list[_Block] = []
        order = np.argsort(-sizes, kind="stable")
        while len(order):
            width = sizes[order[0]]
            size = int(np.searchsorted(-sizes[order], -width * (1 - waste), side="right"))
            members, order = np.sort(order[:size]), order[size:]
            self.blocks.append(_block(sizes[members], starts[members], int(width), device))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(self.blocks) == 1 and self.blocks[0].exact:
            return self._attend(self.blocks[0], q, k, v)
        output = torch.zeros_like(q)
        for block in self.blocks:
            part = self._attend(block, *(self._to_grid(block, x) for x in (q, k, v)))
            output = output.index_copy(0, block.tokens, part if block.exact else part.index_select(0, block.slots))
        return output

    @staticmethod
    def _to_grid(block: _Block, x: Tensor) -> Tensor:
        rows = x.index_select(0, block.tokens)
        if block.exact:
            return rows
        return x.new_zeros(block.rows * block.width, *x.shape[1:]).index_copy(0, block.slots, rows)

    @staticmethod
    def _attend(block: _Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(block.rows, block.width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(block.rows * block.width, out.shape[1], out.shape[3])


def _block(sizes: NDArray[np.int64], starts: NDArray[np.int64], width: int, device: torch.device | str) -> _Block:
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    tokens = np.repeat(starts, sizes) + within
    slots = np.repeat(np.arange(len(sizes)) * width, sizes) + within
    return _Block(len(sizes), width, _on(tokens, device), _on(slots, device), len(tokens) == len(sizes) * width)


def _on(array: NDArray[np.int64], device: torch.device | str) -> Tensor:
    return torch.from_numpy(array).to(device)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Grouped-query attention: each of the [rows, kv_heads, n, d] key heads serves heads / kv_heads query heads."""
    rows, kv_heads, n, d = x.shape
    if kv_heads == heads:
        return x
    return x[:, :, None].expand(rows, kv_heads, heads // kv_heads, n, d).reshape(rows, heads, n, d)
