"""Which keys a token may see: attention for packed sequences (training, prefill). Decoding has its own in `rollout`.

All matrix products outside attention run on flat tokens without padding. Attention itself has two ways. Kernels of our
own read sequences of any length as they lie: on CUDA in half precision. Everywhere else it runs on small padded blocks
of sequences of similar length. Padding stands on the right, and a causal query never looks to its right, so no mask is
needed and padded slots never reach a real token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from reasonlab.hardware import triton_installed

CUDA_WASTE = 0.5
BLOCK = 64  # queries and keys that a kernel compares at a time
Array = NDArray[np.int64]
Table = NDArray[np.int32]


class PackedCausal:
    """Causal attention inside each of several sequences that lie one behind the other in one flat token list.

    Sequences may share tokens, as the samples of a group share their prompt: `tokens` then names the flat token at
    each place of the sequences written out one behind the other. A shared token sees the same keys in every sequence.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu", tokens: Array | None = None) -> None:
        self.device = torch.device(device)
        self.sizes = np.asarray(lengths, dtype=np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.within = np.arange(self.sizes.sum()) - np.repeat(self.starts, self.sizes)
        self.tokens = np.arange(self.sizes.sum()) if tokens is None else tokens
        self.count = int(self.tokens.max()) + 1 if len(self.tokens) else 0
        positions = np.zeros(self.count, np.int64)
        positions[self.tokens] = self.within
        self.positions = to_device(positions, self.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if takes_ragged(q) and self.ragged is not None:
            return self.ragged(q, k, v)
        return self.padded(q, k, v)

    @cached_property
    def pieces(self) -> Pieces | None:
        return Pieces.of(self.sizes, self.tokens, self.count)

    @cached_property
    def ragged(self) -> Ragged | None:
        return None if self.pieces is None else Ragged.of(self.pieces, self.device)

    @cached_property
    def padded(self) -> Padded:
        return Padded(self)


# --- padded blocks ---------------------------------------------------------------------------------------------------


class Padded:
    """The sequences in right-padded grids, one for each group of similar lengths."""

    def __init__(self, packed: PackedCausal) -> None:
        sizes, starts, tokens, device = packed.sizes, packed.starts, packed.tokens, packed.device
        # How much shorter than its block's width a sequence may be: padding costs time on a CPU, launches on a GPU.
        waste = 0.15 if device.type == "cpu" else CUDA_WASTE
        self.blocks: list[tuple[int, int]] = []  # rows and width of grids that follow one another
        row_starts = np.zeros_like(sizes)  # the slot of each sequence's first token
        contents: list[Array] = []  # the token in each slot
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
        slot_of_place = np.repeat(row_starts, sizes) + packed.within
        contents_flat = np.concatenate(contents) if contents else np.zeros(0, np.int64)
        contents_flat[slot_of_place] = tokens
        slot_of_token = np.zeros(packed.count, np.int64)
        slot_of_token[tokens] = slot_of_place
        self.plain = len(self.blocks) == 1 and slots == packed.count  # the grid is a view of the flat tokens
        self.token_in_slot, self.slot_of_token = to_device(contents_flat, device), to_device(slot_of_token, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.plain:
            return self._attend(*self.blocks[0], q, k, v)
        sizes = [rows * width for rows, width in self.blocks]
        grids = zip(*(x.index_select(0, self.token_in_slot).split(sizes) for x in (q, k, v)), strict=True)
        parts = [self._attend(*block, *qkv) for block, qkv in zip(self.blocks, grids, strict=True)]
        return torch.cat(parts).index_select(0, self.slot_of_token)

    @staticmethod
    def _attend(rows: int, width: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(rows, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        if q.is_cuda and q.dtype == torch.float32 and k.shape[1] != q.shape[1]:
            # No kernel takes grouped fp32 heads: torch would hold all scores, width² for every head.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return out.transpose(1, 2).reshape(rows * width, out.shape[1], out.shape[3])


# --- ragged ----------------------------------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """How sequences lie in a flat list of tokens (see `Ragged`): sizes of pieces that follow one another."""

    own: Array  # the tokens that each sequence is the first to have
    queries: Array  # the same tokens, cut where the beginning before them is another one
    keys: Array  # how long those beginnings are; of no length where there is none
    at: Array  # the tokens of all beginnings

    @property
    def shared(self) -> bool:
        return len(self.at) > 0

    @classmethod
    def of(cls, sizes: Array, tokens: Array, count: int) -> Pieces | None:
        """None if the sequences do not lie in this way."""
        starts = np.cumsum(sizes) - sizes
        within = np.arange(len(tokens)) - np.repeat(starts, sizes)
        before = np.maximum.accumulate(np.concatenate((np.full(1, -1), tokens)))[:-1]
        new = tokens > before
        sequence = np.repeat(np.arange(len(sizes)), sizes)
        own = np.bincount(sequence[new], minlength=len(sizes))
        begun = sizes - own  # how long the beginning of each sequence is
        in_order = np.array_equal(tokens[new], np.arange(count))
        if not count or not in_order or not np.array_equal(new, within >= np.repeat(begun, sizes)):
            return None
        some = own > 0  # a sequence of which others have everything needs no computing
        own, begun, starts = own[some], begun[some], starts[some]
        # A token has the same beginning wherever it stands, so the last token of a beginning says which one it is.
        # Neighbours with the same one ask together.
        last = np.where(begun > 0, tokens[starts + begun - 1], -1)
        first = np.flatnonzero(np.concatenate((np.ones(1, bool), last[1:] != last[:-1])))
        asked = begun[first]
        places = np.repeat(starts[first] - (np.cumsum(asked) - asked), asked) + np.arange(asked.sum())
        return cls(own, np.add.reduceat(own, first), asked, tokens[places])

    def query_blocks(self, count: int | None = None) -> Table:
        """At most BLOCK queries of a sequence each: their first token, where the sequence's own tokens begin and end,
        and where its beginning does in `at`. The longest work comes first; empty blocks fill up to `count`.
        """
        starts, ends = _bounds(self.own)
        sequence, first = _blocks(self.own)
        piece = np.searchsorted(np.cumsum(self.queries), starts, side="right")
        asked, asked_end = (x[piece][sequence] for x in _bounds(self.keys))
        starts, ends = starts[sequence], ends[sequence]
        return _table((first, starts, ends, asked, asked_end), first - starts + asked_end - asked, count)

    def key_blocks(self, count: int | None = None) -> Table:
        """At most BLOCK keys of a beginning each: from where to where they lie in `at`, and the queries that ask them.
        The longest work comes first; empty blocks fill up to `count`.
        """
        piece, first = _blocks(self.keys)
        _, ends = _bounds(self.keys)
        query, query_end = (x[piece] for x in _bounds(self.queries))
        return _table((first, ends[piece], query, query_end), query_end - query, count)


def _bounds(sizes: Array) -> tuple[Array, Array]:
    ends = np.cumsum(sizes)
    return ends - sizes, ends


def _blocks(sizes: Array) -> tuple[Array, Array]:
    """Pieces cut into blocks: which piece each block belongs to, and where it begins."""
    counts = -(-sizes // BLOCK)
    piece = np.repeat(np.arange(len(sizes)), counts)
    return piece, _bounds(sizes)[0][piece] + (np.arange(len(piece)) - _bounds(counts)[0][piece]) * BLOCK


def _table(columns: tuple[Array, ...], work: Array, count: int | None) -> Table:
    """The entries by falling work, and empty ones behind them."""
    table = np.stack(columns)[:, np.argsort(-work, kind="stable")]
    more = 0 if count is None else count - table.shape[1]
    return np.ascontiguousarray(np.pad(table, ((0, 0), (0, more))), np.int32)


@dataclass(frozen=True, slots=True)
class Ragged:
    """The sequences as they lie: nothing is padded or copied.

    The tokens that a sequence is the first to have follow one another: they are its own. Before them it may have a
    beginning that belongs to others, such as a prompt. A query sees the keys of its own sequence causally, and all
    keys of the beginning. The gradient of such keys is added up over all who see them.
    """

    blocks: Tensor  # `Pieces.query_blocks`
    at: Tensor | None = None  # the tokens of the beginnings, if there are any
    key_blocks: Tensor | None = None

    @classmethod
    def of(cls, pieces: Pieces, device: torch.device) -> Ragged:
        blocks = to_device(pieces.query_blocks(), device)
        if not pieces.shared:
            return cls(blocks)
        return cls(blocks, to_device(pieces.at, device), to_device(pieces.key_blocks(), device))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed: Tensor = _RaggedAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return mixed


class _RaggedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> Tensor:
        out, total = ragged_forward(q, k, v, ragged)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.ragged = ragged
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, total = ctx.saved_tensors
        return *ragged_backward(gradient, q, k, v, out, total, ctx.ragged), None


def takes_ragged(q: Tensor) -> bool:
    """Whether the kernels can attend to these heads, [tokens, heads, d].

    Larger heads would not leave their tiles room on a multiprocessor, and fp32 would be slow: both are padded.
    """
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 128 and triton_installed()


def ragged_forward(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor]:
    """Mixed values, like q, and log Σ exp(score) of each query, [heads, tokens]."""
    from reasonlab.model import attention_kernels

    return attention_kernels.forward(q, k, v, ragged)


def ragged_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, ragged: Ragged
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    from reasonlab.model import attention_kernels

    return attention_kernels.backward(gradient, q, k, v, out, total, ragged)


def to_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """The array as a tensor. To CUDA it travels behind the work that waits there, and nobody waits for it."""
    return for_device(array, device).to(device, non_blocking=True)


def for_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """The array on the host, where a copy to the device can begin without anybody waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if torch.device(device).type == "cuda" and tensor.numel() else tensor
