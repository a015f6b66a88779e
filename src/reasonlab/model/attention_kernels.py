"""The Triton kernels of `attention.py`: attention in packs of sequences that may share their beginnings.

Every program reads from a table (`Pieces.query_blocks`, `Pieces.key_blocks`) what it works on, so that no program is
idle and a captured graph depends on the size of the tables alone. With S = q kᵀ / √d, P = exp(S − l), l = log Σ exp S
over all keys that a query sees, and D = Σ_d g o for the slope g at the output o:

    o = P v,    ∂L/∂v = Pᵀ g,    ∂L/∂S = P · (g vᵀ − D),    ∂L/∂q = ∂L/∂S k / √d,    ∂L/∂k = (∂L/∂S)ᵀ q / √d.

Import this module only where Triton is installed; with TRITON_INTERPRET=1 in the environment it also runs on the CPU,
slowly, which is how the tests compare it with padded attention.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reasonlab.model.attention import BLOCK, Ragged

BUSY = 528
"""Programs that keep an H200 busy: two at a time on each multiprocessor, twice. With fewer, heads are not added up in
one program but apart."""
STAGES = 2  # of tiles that are fetched ahead; more cost more memory than they gain


def forward(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor]:
    """Mixed values, [tokens, heads, d], and log Σ exp(score) of each query, [heads, tokens]."""
    q, k, v = (_lines(x) for x in (q, k, v))
    tokens, heads, d = q.shape
    out = torch.empty(tokens, heads, d, dtype=q.dtype, device=q.device)
    total = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    blocks, at = ragged.blocks, ragged.at
    if blocks.numel():
        _packed_forward[(blocks.shape[1], heads)](
            q, k, v, out, total, blocks, blocks if at is None else at,
            tokens, blocks.shape[1], q.stride(0), k.stride(0), v.stride(0), d**-0.5,
            heads, k.shape[1], d, _padded(d), BLOCK, at is not None, num_warps=_warps(d), num_stages=STAGES,
        )  # fmt: skip
    return out, total


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, ragged: Ragged
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, gradient = (_lines(x) for x in (q, k, v, gradient))
    tokens, heads, d = q.shape
    kv_heads, blocks, at = k.shape[1], ragged.blocks, ragged.at
    # One behind the other, as the projection has them: whoever split it need not put them together again.
    whole = torch.empty(tokens, heads + 2 * kv_heads, d, dtype=q.dtype, device=q.device)
    of_q, of_k, of_v = whole.split((heads, kv_heads, kv_heads), dim=1)
    along = torch.empty_like(total)  # D
    strides = (gradient.stride(0), q.stride(0), k.stride(0), v.stride(0))
    sizes = (heads, kv_heads, d, _padded(d), BLOCK)
    if not blocks.numel():
        return of_q, of_k, of_v
    _packed_of_queries[(blocks.shape[1], heads)](
        gradient, q, k, v, out, total, along, of_q, blocks, blocks if at is None else at,
        tokens, blocks.shape[1], *strides, whole.stride(0), d**-0.5, *sizes, at is not None,
        num_warps=_warps(d), num_stages=STAGES,
    )  # fmt: skip

    def of_keys(table: Tensor, per: int, of_k: Tensor, of_v: Tensor, beginning: bool) -> None:
        """The gradients of keys and values, one for every `per` heads, in rows of their own or in those of `at`."""
        _packed_of_keys[(table.shape[1], heads // per)](
            gradient, q, k, v, total, along, of_k, of_v, table, table if at is None else at,
            tokens, table.shape[1], *strides, of_k.stride(0), d**-0.5, *sizes, per, beginning,
            num_warps=_warps(d), num_stages=STAGES,
        )  # fmt: skip

    group = heads // kv_heads
    if group == 1 or tokens // BLOCK * kv_heads >= BUSY:
        of_keys(blocks, group, of_k, of_v, False)
    else:
        parts = torch.empty(2, tokens, heads, d, dtype=k.dtype, device=q.device)
        of_keys(blocks, 1, parts[0], parts[1], False)
        _add_groups[(tokens, 2 * kv_heads)](
            parts, of_k, parts.stride(0), whole.stride(0),
            kv_heads, group, d, triton.next_power_of_2(group), _padded(d), num_warps=1,
        )  # fmt: skip
    if at is not None and ragged.key_blocks is not None:
        # A beginning that many share is added up in fp32: bf16 would round at every addition.
        # The rows that only fill `at` up are nobody's, and stay zero.
        parts = torch.zeros(len(at), 2, heads, d, dtype=torch.float32, device=q.device)
        of_keys(ragged.key_blocks, 1, parts[:, 0], parts[:, 1], True)
        added = parts.view(len(at), 2 * kv_heads, group, d).sum(2)
        both = whole[:, heads:]  # keys, then values
        both.copy_(both.float().index_add_(0, at, added))
    return of_q, of_k, of_v


def _lines(x: Tensor) -> Tensor:
    """The heads of a token must lie one behind the other."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _padded(d: int) -> int:
    return int(max(16, triton.next_power_of_2(d)))


def _warps(d: int) -> int:
    return 4 if d <= 64 else 8


# --- kernels ---------------------------------------------------------------------------------------------------------

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(x, row, inside, column, stride, HEAD_DIM: tl.constexpr):
    """Rows of one head, [rows, BLOCK_D]; zeros where there are none."""
    mask = inside[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store(x, row, inside, column, stride, values, HEAD_DIM: tl.constexpr):
    mask = inside[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(x + row.to(tl.int64)[:, None] * stride + column[None, :], values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _see(queries, keys, values, factor, visible, top, mass, mixed, MASKED: tl.constexpr):
    """The softmax goes on over some more keys: highest score, Σ exp(score − highest), Σ exp(score − highest) value."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * factor
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    mass = mass * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return higher, mass, mixed


@triton.jit(do_not_specialize=["tokens", "size"])  # they change with every micro-batch
def _packed_forward(
    q, k, v, out, total, blocks, at, tokens, size, q_stride, k_stride, v_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Some queries of one sequence and one head: first the keys of its beginning, then its own up to themselves."""
    entry, head = blocks + tl.program_id(0), tl.program_id(1)
    first, start, end = tl.load(entry), tl.load(entry + size), tl.load(entry + 2 * size)
    if first >= end:
        return
    kv_head = head // (HEADS // KV_HEADS)
    column, step = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    row = first + step
    inside = row < end
    everything = step >= 0
    k, v = k + kv_head * HEAD_DIM, v + kv_head * HEAD_DIM
    queries = _load(q + head * HEAD_DIM, row, inside, column, q_stride, HEAD_DIM)
    factor = scale * _LOG2E
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    if SHARED:
        asked_end = tl.load(entry + 4 * size)
        for place in range(tl.load(entry + 3 * size), asked_end, BLOCK):
            seen = place + step < asked_end
            key = tl.load(at + place + step, mask=seen, other=0)
            keys = _load(k, key, seen, column, k_stride, HEAD_DIM)
            values = _load(v, key, seen, column, v_stride, HEAD_DIM)
            top, mass, mixed = _see(queries, keys, values, factor, seen[None, :], top, mass, mixed, True)
    for place in range(start, first, BLOCK):
        keys = _load(k, place + step, everything, column, k_stride, HEAD_DIM)
        values = _load(v, place + step, everything, column, v_stride, HEAD_DIM)
        top, mass, mixed = _see(queries, keys, values, factor, everything[None, :], top, mass, mixed, False)
    keys = _load(k, row, inside, column, k_stride, HEAD_DIM)
    values = _load(v, row, inside, column, v_stride, HEAD_DIM)
    top, mass, mixed = _see(queries, keys, values, factor, row[:, None] >= row[None, :], top, mass, mixed, True)
    _store(out + head * HEAD_DIM, row, inside, column, HEADS * HEAD_DIM, mixed / mass[:, None], HEAD_DIM)
    tl.store(total + head * tokens + row, top / _LOG2E + tl.log(mass), mask=inside)


@triton.jit
def _turn(queries, slopes, keys, values, factor, level, along, visible, of_queries, MASKED: tl.constexpr):
    """Add what some keys give to ∂L/∂q, but for the factor 1/√d."""
    weights = tl.exp2(tl.dot(queries, tl.trans(keys), input_precision="ieee") * factor - level[:, None])
    if MASKED:
        weights = tl.where(visible, weights, 0.0)
    of_scores = weights * (tl.dot(slopes, tl.trans(values), input_precision="ieee") - along[:, None])
    return of_queries + tl.dot(of_scores.to(keys.dtype), keys, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens", "size"])
def _packed_of_queries(
    gradient, q, k, v, out, total, along, of_q, blocks, at, tokens, size,
    gradient_stride, q_stride, k_stride, v_stride, result_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """As `_packed_forward`; also writes D."""
    entry, head = blocks + tl.program_id(0), tl.program_id(1)
    first, start, end = tl.load(entry), tl.load(entry + size), tl.load(entry + 2 * size)
    if first >= end:
        return
    kv_head = head // (HEADS // KV_HEADS)
    column, step = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    row = first + step
    inside = row < end
    everything = step >= 0
    k, v = k + kv_head * HEAD_DIM, v + kv_head * HEAD_DIM
    queries = _load(q + head * HEAD_DIM, row, inside, column, q_stride, HEAD_DIM)
    slopes = _load(gradient + head * HEAD_DIM, row, inside, column, gradient_stride, HEAD_DIM)
    mixed = _load(out + head * HEAD_DIM, row, inside, column, HEADS * HEAD_DIM, HEAD_DIM)
    inner = tl.sum(slopes.to(tl.float32) * mixed.to(tl.float32), 1)
    tl.store(along + head * tokens + row, inner, mask=inside)
    level = tl.load(total + head * tokens + row, mask=inside, other=0.0) * _LOG2E
    factor = scale * _LOG2E
    result = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    if SHARED:
        asked_end = tl.load(entry + 4 * size)
        for place in range(tl.load(entry + 3 * size), asked_end, BLOCK):
            seen = place + step < asked_end
            key = tl.load(at + place + step, mask=seen, other=0)
            keys = _load(k, key, seen, column, k_stride, HEAD_DIM)
            values = _load(v, key, seen, column, v_stride, HEAD_DIM)
            result = _turn(queries, slopes, keys, values, factor, level, inner, seen[None, :], result, True)
    for place in range(start, first, BLOCK):
        keys = _load(k, place + step, everything, column, k_stride, HEAD_DIM)
        values = _load(v, place + step, everything, column, v_stride, HEAD_DIM)
        result = _turn(queries, slopes, keys, values, factor, level, inner, everything[None, :], result, False)
    keys = _load(k, row, inside, column, k_stride, HEAD_DIM)
    values = _load(v, row, inside, column, v_stride, HEAD_DIM)
    result = _turn(queries, slopes, keys, values, factor, level, inner, row[:, None] >= row[None, :], result, True)
    _store(of_q + head * HEAD_DIM, row, inside, column, result_stride, result * scale, HEAD_DIM)


@triton.jit(do_not_specialize=["tokens", "size"])
def _packed_of_keys(
    gradient, q, k, v, total, along, of_k, of_v, table, at, tokens, size,
    gradient_stride, q_stride, k_stride, v_stride, result_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    PER: tl.constexpr, BEGINNING: tl.constexpr,
):  # fmt: skip
    """Some keys of one sequence, or of a beginning, and PER heads of queries that read them, one after the other."""
    # The longest work first: the first keys of a sequence are seen by most queries, and its last queries see most keys.
    entry, share = table + tl.program_id(0), tl.program_id(1)
    if not BEGINNING:
        entry = table + tl.num_programs(0) - 1 - tl.program_id(0)
    column, step = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    if BEGINNING:
        first, end = tl.load(entry), tl.load(entry + size)
        query, query_end = tl.load(entry + 2 * size), tl.load(entry + 3 * size)
    else:
        first, end = tl.load(entry), tl.load(entry + 2 * size)
        query, query_end = first, end
    if first >= end:
        return
    target = first + step
    inside = target < end
    key = target
    if BEGINNING:
        key = tl.load(at + target, mask=inside, other=0)
    kv_head = share * PER // (HEADS // KV_HEADS)
    keys = _load(k + kv_head * HEAD_DIM, key, inside, column, k_stride, HEAD_DIM)
    values = _load(v + kv_head * HEAD_DIM, key, inside, column, v_stride, HEAD_DIM)
    factor = scale * _LOG2E
    result_k = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    result_v = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    turns = tl.cdiv(query_end - query, BLOCK)
    for turn in range(0, turns * PER):
        head = share * PER + turn // turns
        row = query + turn % turns * BLOCK + step
        asks = row < query_end
        queries = _load(q + head * HEAD_DIM, row, asks, column, q_stride, HEAD_DIM)
        slopes = _load(gradient + head * HEAD_DIM, row, asks, column, gradient_stride, HEAD_DIM)
        level = tl.load(total + head * tokens + row, mask=asks, other=float("inf")) * _LOG2E
        inner = tl.load(along + head * tokens + row, mask=asks, other=0.0)
        weights = tl.exp2(tl.dot(keys, tl.trans(queries), input_precision="ieee") * factor - level[None, :])
        if not BEGINNING:
            weights = tl.where(row[None, :] >= target[:, None], weights, 0.0)
        result_v += tl.dot(weights.to(slopes.dtype), slopes, input_precision="ieee")
        of_scores = weights * (tl.dot(values, tl.trans(slopes), input_precision="ieee") - inner[None, :])
        result_k += tl.dot(of_scores.to(queries.dtype), queries, input_precision="ieee")
    _store(of_k + share * HEAD_DIM, target, inside, column, result_stride, result_k * scale, HEAD_DIM)
    _store(of_v + share * HEAD_DIM, target, inside, column, result_stride, result_v, HEAD_DIM)


@triton.jit
def _add_groups(
    parts, out, part_stride, out_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The gradients that the heads of a group have for one key or value, added up. Keys come first, then values."""
    row, target = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member, column = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = target % KV_HEADS * GROUP + member
    at = target // KV_HEADS * part_stride + (row * KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + column[None, :]
    inside = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    total = tl.sum(tl.load(parts + at, mask=inside, other=0.0).to(tl.float32), 0)
    tl.store(
        out + row * out_stride + target * HEAD_DIM + column, total.to(out.dtype.element_ty), mask=column < HEAD_DIM
    )
