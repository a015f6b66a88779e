"""Which keys a token may see: attention for packed sequences (training, prefill). Decoding has its own in `rollout`.

All matrix products outside attention run on flat tokens without padding. Attention itself has two ways. Flash
attention reads sequences of any length as they lie: on CUDA in half precision. Everywhere else it runs on small
padded blocks of sequences of similar length. Padding stands on the right, and a causal query never looks to its
right, so no mask is needed and padded slots never reach a real token.
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

CUDA_WASTE = 0.5
Array = NDArray[np.int64]


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
        if flash_takes(q) and self.ragged is not None:
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


# --- flash attention -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """Where each of several pieces begins and ends in a flat list, as the flash kernels want to know it."""

    bounds: Tensor
    longest: int  # no piece is longer

    @classmethod
    def of(cls, sizes: Array, device: torch.device) -> Span:
        return cls(to_device(bounds_of(sizes), device), int(sizes.max(initial=0)))


def bounds_of(sizes: Array, count: int | None = None) -> NDArray[np.int32]:
    """0 and the end of each piece; pieces of no length fill up to `count` of them."""
    more = 0 if count is None else count - len(sizes)
    return np.cumsum(np.pad(sizes, (1, more))).astype(np.int32)


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


@dataclass(frozen=True, slots=True)
class Ragged:
    """The sequences as they lie: nothing is padded, and of shared tokens no more than their keys is copied.

    The tokens that a sequence is the first to have follow one another: they are its own. Before them it may have a
    beginning that belongs to others, such as a prompt. A query sees the keys of its own sequence causally, and all
    keys of the beginning. The two parts are attended apart, with results o₁, o₂ and l₁, l₂ for log Σ exp(score):

        l = log(exp l₁ + exp l₂),    o = o₁ + σ(l₂ − l₁) (o₂ − o₁).

    The gradient of a part is that of flash attention with the o and l of the whole in place of its own, because the
    weights are exp(score − l) and ∂L/∂score = weight · (∂L/∂o · v − ∂L/∂o · o).
    """

    own: Span
    queries: Span | None = None  # of the beginnings, if there are any
    keys: Span | None = None
    at: Tensor | None = None
    unread: Tensor | None = None  # the entries of `at` that no piece has, where it was filled up to a size

    @classmethod
    def of(cls, pieces: Pieces, device: torch.device) -> Ragged:
        if not pieces.shared:
            return cls(Span.of(pieces.own, device))
        own, queries, keys = (Span.of(sizes, device) for sizes in pieces[:3])
        return cls(own, queries, keys, to_device(pieces.at, device))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed: Tensor = _RaggedAttention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return mixed


class _RaggedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> Tensor:
        own, queries, keys, at = ragged.own, ragged.queries, ragged.keys, ragged.at
        out, total = flash_forward(q, k, v, own, own, causal=True)
        if queries is not None and keys is not None and at is not None:
            others, other_total = flash_forward(
                q, k.index_select(0, at), v.index_select(0, at), queries, keys, causal=False
            )
            # Where there is no beginning, the kernel writes zeros and a total of +∞.
            apart = torch.where(other_total.isposinf(), -torch.inf, other_total) - total  # [heads, tokens]
            out = torch.lerp(out.float(), others.float(), apart.sigmoid().T[:, :, None]).to(out.dtype)
            total = total + F.softplus(apart)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.ragged = ragged
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, total = ctx.saved_tensors
        own, queries, keys, at = ctx.ragged.own, ctx.ragged.queries, ctx.ragged.keys, ctx.ragged.at
        of_q, of_k, of_v = flash_backward(gradient, q, k, v, out, total, own, own, causal=True)
        if queries is not None:
            q_part, k_part, v_part = flash_backward(
                gradient, q, k.index_select(0, at), v.index_select(0, at), out, total, queries, keys, causal=False
            )
            of_q += q_part
            if (unread := ctx.ragged.unread) is not None:  # nobody wrote there
                k_part, v_part = (x.masked_fill(unread[:, None, None], 0.0) for x in (k_part, v_part))
            # A beginning that many share is added up in fp32: bf16 would round at every addition.
            of_k = of_k.float().index_add_(0, at, k_part.float()).to(k.dtype)
            of_v = of_v.float().index_add_(0, at, v_part.float()).to(v.dtype)
        return of_q, of_k, of_v, None


def flash_takes(q: Tensor) -> bool:
    """Whether torch's flash kernels can attend to these heads, [tokens, heads, d]."""
    return (
        q.is_cuda
        and torch.version.hip is None  # there it returns its totals in another layout
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and torch.backends.cuda.is_flash_attention_available()
    )


def flash_forward(q: Tensor, k: Tensor, v: Tensor, queries: Span, keys: Span, causal: bool) -> tuple[Tensor, Tensor]:
    """Mixed values, like q, and log Σ exp(score) of each query, [heads, tokens].

    This calls what `torch.nn.attention.varlen` calls: that function has other arguments in every version of torch,
    the operation below it has not, and only there can the totals of a larger whole be put in (see `Ragged`).
    """
    out, total, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, queries.bounds, keys.bounds, queries.longest, keys.longest, 0.0, causal, False
    )
    return out, total


def flash_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    queries: Span,
    keys: Span,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    of_q, of_k, of_v = torch.ops.aten._flash_attention_backward(
        gradient, q, k, v, out, total, queries.bounds, keys.bounds, queries.longest, keys.longest, 0.0, causal,
        *no_dropout,
    )  # fmt: skip
    return of_q, of_k, of_v


def to_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """The array as a tensor. To CUDA it travels behind the work that waits there, and nobody waits for it."""
    return for_device(array, device).to(device, non_blocking=True)


def for_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """The array on the host, where a copy to the device can begin without anybody waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if torch.device(device).type == "cuda" and tensor.numel() else tensor
