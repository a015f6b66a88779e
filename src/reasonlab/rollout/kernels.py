"""The Triton kernels of decoding; `operations.py` says in torch what they compute. `model/kernels.py` has the model's.

All of them read what differs between rows (position, count, seed, whether it still runs) from memory, so a captured
graph depends on the number of rows alone, and rows that have ended cost next to nothing. Sums are in fp32 whatever
the dtype of the weights. Import this module only where Triton is installed; with TRITON_INTERPRET=1 in the
environment it also runs on the CPU, slowly, which is how the tests compare it with the reference.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from reasonlab.model.attention import to_device
from reasonlab.model.transformer import Attention, FusedAttention, Transformer
from reasonlab.rollout.operations import FULL, RUNNING, STOPPED, Cache, Place, Rows, TorchOperations
from reasonlab.rollout.sampling import GOLDEN, MIX_1, MIX_2
from reasonlab.rollout.types import Sampling


@dataclass(slots=True)
class Tuning:
    """What to measure on a new device (`benchmarks/rollout.py --tune`)."""

    attention_keys: int = 64  # keys read at a time
    attention_warps: int = 2
    attention_stages: int = 2
    attention_programs: int = 132  # split long rows until there are so many: one for each multiprocessor of an H200
    most_splits: int = 16
    vocabulary_block: int = 2048
    vocabulary_warps: int = 2


TUNING = Tuning()
STORED_TOKENS = 64  # of a context that one program copies
SORTED_LOGITS = 1 << 25  # at once; each takes about 30 bytes


class Kernels:
    """`Operations` on CUDA."""

    reads_columns = False

    def __init__(self, model: Transformer, columns: int) -> None:
        angles = torch.arange(columns, device=model.inverse_frequencies.device)[:, None] * model.inverse_frequencies
        self.cos, self.sin = angles.cos() * model.rope_scale, angles.sin() * model.rope_scale

    def store(self, cache: Cache, wave: Cache, places: Sequence[Place]) -> None:
        first, counts, begins, ends = np.array(places, np.int64).T
        # Each row by itself: its number, where its tokens begin in the wave, and how many they are.
        table = np.repeat(np.stack((first, begins, ends - begins)), counts, axis=1)
        table[0] += np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows, begin, length = to_device(table, wave.keys.device)
        layers, _, kv_heads, d = wave.keys.shape
        _store[(len(rows), layers * kv_heads, triton.cdiv(int(table[2].max()), STORED_TOKENS))](
            wave.keys, wave.values, cache.keys, cache.values, rows, begin, length,
            wave.keys.stride(0), *cache.keys.stride()[:3],
            kv_heads, d, triton.next_power_of_2(d), STORED_TOKENS, num_warps=4,
        )  # fmt: skip

    def attention(self, cache: Cache, rows: Rows, columns: int) -> FusedAttention:
        return KernelAttention(self.cos, self.sin, cache, rows)

    def draw(self, logits: Tensor, rows: Rows, stop_ids: Tensor, sampling: Sampling) -> None:
        n, vocabulary = logits.shape
        temperature, greedy = sampling.temperature or 1.0, sampling.temperature == 0
        if sampling.top_k and not greedy:
            # Sorting takes many times the memory of the logits, so it is done for a part of the rows at a time.
            at_once = max(1, SORTED_LOGITS // vocabulary)
            for start in range(0, n, at_once):
                part = slice(start, start + at_once)
                some = Rows(rows.numbers[:, part], rows.ids[part], rows.logprobs[part])
                TorchOperations().draw(logits[part], some, stop_ids, sampling)
            return
        block = min(TUNING.vocabulary_block, triton.next_power_of_2(vocabulary))
        blocks = triton.cdiv(vocabulary, block)
        tops, masses = torch.empty(2, n, blocks, dtype=torch.float32, device=logits.device)
        nucleus, shift = sampling.top_p < 1 and not greedy, 16 if logits.dtype == torch.bfloat16 else 0
        kept = torch.empty_like(masses) if nucleus else masses
        cuts, ties = (
            torch.empty((n, width) if nucleus else 1, dtype=torch.int64, device=logits.device) for width in (2, blocks)
        )
        _masses[(n, blocks)](
            logits, rows.finish, tops, masses, vocabulary, temperature, block, num_warps=TUNING.vocabulary_warps
        )
        if nucleus:
            _nucleus[(n,)](
                logits, rows.finish, tops, masses, kept, cuts, ties, vocabulary, blocks, temperature, sampling.top_p,
                shift, block, triton.next_power_of_2(blocks),
                num_warps=TUNING.vocabulary_warps,
            )  # fmt: skip
        _draw[(n,)](
            logits, tops, masses, kept, cuts, ties, *rows.numbers[:6].unbind(), rows.ids, rows.logprobs, stop_ids,
            rows.ids.stride(0), vocabulary, blocks, temperature,
            greedy, nucleus, shift, len(stop_ids), triton.next_power_of_2(max(1, len(stop_ids))), block,
            triton.next_power_of_2(blocks),
            num_warps=TUNING.vocabulary_warps,
        )  # fmt: skip


@dataclass(slots=True)
class KernelAttention(FusedAttention):
    """Norms, rotation, the write into the cache and attention to it, all in one kernel (two where rows are split)."""

    cos: Tensor  # of every position, [positions, head_dim / 2]
    sin: Tensor
    cache: Cache
    rows: Rows

    def attend(self, layer: int, qkv: Tensor, module: Attention) -> Tensor:
        n, rows, keys, values = len(qkv), self.rows, self.cache.keys[layer], self.cache.values[layer]
        heads, kv_heads, d = module.heads, module.kv_heads, module.head_dim
        q_norm, k_norm = module.q_norm, module.k_norm
        splits = attention_splits(n * kv_heads, keys.shape[2])
        out = torch.empty(n, heads * d, dtype=qkv.dtype, device=qkv.device)
        # With one split a program writes the result; with several each writes its share, to be put together.
        shares = torch.empty((n, heads, splits, d) if splits > 1 else 1, dtype=torch.float32, device=qkv.device)
        sums = torch.empty((n, heads, splits, 2) if splits > 1 else 1, dtype=torch.float32, device=qkv.device)
        block_d = max(16, triton.next_power_of_2(d))
        _attend[(n, kv_heads, splits)](
            qkv, qkv if q_norm is None else q_norm.weight, qkv if k_norm is None else k_norm.weight,
            self.cos, self.sin, keys, values, rows.positions, rows.finish, rows.leaders, rows.shared, out, shares, sums,
            keys.stride(0), keys.stride(1), splits, 0.0 if q_norm is None else q_norm.eps, d**-0.5,
            heads, kv_heads, d, q_norm is not None, splits > 1,
            max(16, triton.next_power_of_2(heads // kv_heads)), block_d, TUNING.attention_keys,
            num_warps=TUNING.attention_warps, num_stages=TUNING.attention_stages,
        )  # fmt: skip
        if splits > 1:
            _join[(n, heads)](shares, sums, rows.finish, out, d, splits, block_d, num_warps=1)
        return out


def attention_splits(programs: int, columns: int) -> int:
    """In how many parts each row's keys are read: more than one where rows are few and long."""
    wanted = triton.next_power_of_2(triton.cdiv(TUNING.attention_programs, programs))
    useful = triton.next_power_of_2(triton.cdiv(columns, 4 * TUNING.attention_keys))
    return int(min(wanted, useful, TUNING.most_splits))


# --- kernels ---------------------------------------------------------------------------------------------------------

_RUNNING, _STOPPED, _FULL = (tl.constexpr(code) for code in (RUNNING, STOPPED, FULL))
_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(number) for number in (GOLDEN, MIX_1, MIX_2))


@triton.jit
def _store(
    wave_keys, wave_values, keys, values, rows, begins, lengths,
    wave_stride, layer_stride, row_stride, head_stride,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One head of one layer for some tokens of a row: cache[layer, row, head, c] = wave[layer, begin + c, head]."""
    which = tl.program_id(0)
    layer, head = (tl.program_id(1) // KV_HEADS).to(tl.int64), tl.program_id(1) % KV_HEADS
    row, begin, length = tl.load(rows + which), tl.load(begins + which), tl.load(lengths + which)
    place = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (place < length) & (column < HEAD_DIM)
    source = layer * wave_stride + ((begin + place) * KV_HEADS + head) * HEAD_DIM + column
    target = layer * layer_stride + row * row_stride + head * head_stride + place * HEAD_DIM + column
    tl.store(keys + target, tl.load(wave_keys + source, mask=inside), mask=inside)
    tl.store(values + target, tl.load(wave_values + source, mask=inside), mask=inside)


@triton.jit
def _head(x, other, weight, cos, sin, column, partner, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Heads, [heads, BLOCK_D], normalised and rotated: x_i cos_i ∓ x_{i ± d/2} sin_i, with x_{i ± d/2} in `other`."""
    x, other = x.to(tl.float32), other.to(tl.float32)
    if NORM:
        real = column < HEAD_DIM
        size = tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x / size * tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :]
        other = other / size * tl.load(weight + partner, mask=real, other=0.0).to(tl.float32)[None, :]
    signed = tl.where(column < HEAD_DIM // 2, -sin, sin)
    return x * cos[None, :] + other * signed[None, :]


@triton.jit
def _attend(
    qkv, q_weight, k_weight, cos_table, sin_table, keys, values, positions, finish, leaders, shared, out, shares, sums,
    row_stride, head_stride, splits, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NORM: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row, one head of keys and the group of queries that read it, one part of the keys.

    The softmax is accumulated while the keys go by. The new key and value never come from the cache: the first part
    ends with them and writes them there, so no program waits for what another writes. A program is over in a few
    microseconds, so what it waits for counts: all that does not depend on the position is asked for at once, and
    nothing but the queries is computed before the first keys are asked for. What rows of a group have in common all of
    them read in the same row: it comes from memory once, and then from the device's cache.
    """
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    column = tl.arange(0, BLOCK_D)
    real = column < HEAD_DIM
    partner = (column + HEAD_DIM // 2) % HEAD_DIM
    state = tl.load(finish + row)
    position = tl.load(positions + row).to(tl.int32)
    leader, common = tl.load(leaders + row), tl.load(shared + row).to(tl.int32)
    first = row * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    member = tl.arange(0, BLOCK_G)
    query = first + (kv_head * GROUP + member)[:, None] * HEAD_DIM
    asked = (member < GROUP)[:, None] & real[None, :]
    q = tl.load(qkv + query + column[None, :], mask=asked, other=0.0)
    q_other = tl.load(qkv + query + partner[None, :], mask=asked, other=0.0)
    new = qkv + first + (HEADS + kv_head) * HEAD_DIM
    new_k = tl.load(new + column, mask=real, other=0.0)
    k_other = tl.load(new + partner, mask=real, other=0.0)
    new_v = tl.load(new + KV_HEADS * HEAD_DIM + column, mask=real, other=0.0)
    if state != _RUNNING:
        return
    angle = position * (HEAD_DIM // 2) + column % (HEAD_DIM // 2)
    cos = tl.load(cos_table + angle, mask=real, other=0.0).to(tl.float32)
    sin = tl.load(sin_table + angle, mask=real, other=0.0).to(tl.float32)
    q = _head(q, q_other, q_weight, cos, sin, column, partner, eps, HEAD_DIM, NORM).to(out.dtype.element_ty)

    here = row * row_stride + kv_head * head_stride
    there = leader * row_stride + kv_head * head_stride
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    begin = 0
    end = position
    if SPLIT:
        part = tl.cdiv(tl.cdiv(position, BLOCK_N), splits) * BLOCK_N
        begin = tl.program_id(2) * part
        end = tl.minimum(begin + part, position)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        tile = (tl.where(key < common, there, here) + key * HEAD_DIM)[:, None] + column[None, :]
        seen = (key < end)[:, None] & real[None, :]
        k = tl.load(keys + tile, mask=seen, other=0.0)
        v = tl.load(values + tile, mask=seen, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((key < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        mass = mass * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher

    if tl.program_id(2) == 0:
        turned = _head(
            new_k[None, :], k_other[None, :], k_weight, cos, sin, column, partner, eps, HEAD_DIM, NORM
        )  # fmt: skip
        new_k = tl.sum(turned, 0).to(keys.dtype.element_ty)
        tl.store(keys + here + position * HEAD_DIM + column, new_k, mask=real)
        tl.store(values + here + position * HEAD_DIM + column, new_v, mask=real)
        score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
        higher = tl.maximum(top, score)
        weight, shrink = tl.exp(score - higher), tl.exp(top - higher)
        mass = mass * shrink + weight
        mixed = mixed * shrink[:, None] + weight[:, None] * new_v.to(tl.float32)[None, :]
        top = higher

    head = row * HEADS + kv_head * GROUP + member
    if SPLIT:
        share = head * splits + tl.program_id(2)
        tl.store(shares + share[:, None] * HEAD_DIM + column[None, :], mixed, mask=asked)
        tl.store(sums + share * 2, top, mask=member < GROUP)
        tl.store(sums + share * 2 + 1, mass, mask=member < GROUP)
    else:
        result = (mixed / mass[:, None]).to(out.dtype.element_ty)
        tl.store(out + head[:, None] * HEAD_DIM + column[None, :], result, mask=asked)


@triton.jit
def _join(shares, sums, finish, out, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Put the parts of one head together: each counts exp(its highest score − the highest of all)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(finish + row) != _RUNNING:
        return
    at = row * tl.num_programs(1) + head
    split = at * SPLITS + tl.arange(0, SPLITS)
    column = tl.arange(0, BLOCK_D)
    tops = tl.load(sums + split * 2)
    factors = tl.exp(tops - tl.max(tops, 0))
    mass = tl.sum(tl.load(sums + split * 2 + 1) * factors, 0)
    real = column < HEAD_DIM
    parts = tl.load(shares + split[:, None] * HEAD_DIM + column[None, :], mask=real[None, :], other=0.0)
    mixed = tl.sum(parts * factors[:, None], 0) / mass
    tl.store(out + at * HEAD_DIM + column, mixed.to(out.dtype.element_ty), mask=real)


@triton.jit
def _masses(logits, finish, tops, masses, vocabulary, temperature, BLOCK: tl.constexpr):
    """Of one block of a row's vocabulary: the highest logit and the sum of exp(logit − highest)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(finish + row) != _RUNNING:
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    x = x / temperature
    top = tl.max(x, 0)
    reference = tl.maximum(top, -1e30)  # a block without a possible token has no mass, and no NaN either
    at = row * tl.num_programs(1) + block
    tl.store(tops + at, top)
    tl.store(masses + at, tl.sum(tl.exp(x - reference), 0))


@triton.jit
def _shifted(z, bits: tl.constexpr):
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _keyed_uniform(key, counter):
    """`sampling.keyed_uniform`."""
    z = key + (counter + 1) * _GOLDEN
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    z = z ^ _shifted(z, 31)
    return _shifted(z, 40).to(tl.float32) * (1.0 / (1 << 24))


@triton.jit
def _first_above(masses, threshold, BLOCK: tl.constexpr):
    """The first index at which the running sum of the masses exceeds the threshold, and the sum before it.

    Never one without mass, however the sums are rounded.
    """
    index = tl.arange(0, BLOCK)
    running = tl.cumsum(masses, 0)
    last = tl.max(tl.where(masses > 0, index, 0), 0)
    chosen = tl.min(tl.where((running > threshold) & (masses > 0), index, last), 0)
    before = tl.max(tl.where(index < chosen, running, 0.0), 0)
    return chosen, before


@triton.jit
def _rank(x, SHIFT: tl.constexpr):
    """Integers in the order of some logits. The last 16 bits of what was bf16 say nothing and are dropped."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _logit(rank, SHIFT: tl.constexpr):
    """The logit that has this rank."""
    bits = (rank << SHIFT).to(tl.int32)
    bits = tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _nucleus(
    logits, finish, tops, masses, kept, cuts, ties, vocabulary, blocks, temperature, top_p,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Which tokens of a row top-p leaves, without sorting: those whose betters have less than top_p of all mass.

    With m(t) = Σ exp(logit) over the logits above t, that are all logits above the least t with m(t) < top_p · m(−∞),
    and of those equal to t as many as are needed, the first ones first. t is found by bisection, so it is exact.
    Written down: t and that number, and for each block the mass that is left and the number of such ties before it.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(finish + row) != _RUNNING:
        return
    block = tl.arange(0, BLOCKS)
    there = block < blocks
    block_top = tl.load(tops + row * blocks + block, mask=there, other=float("-inf"))
    top = tl.max(block_top, 0)
    mass = tl.load(masses + row * blocks + block, mask=there, other=0.0) * tl.exp(block_top - top)
    wanted = tl.sum(mass, 0) * top_p
    inner = tl.arange(0, BLOCK)
    low = tl.full([], -0x80000000 >> SHIFT, tl.int64)  # has at least the mass above it, and `high` has less
    high = tl.full([], 0x7F800000 >> SHIFT, tl.int64)
    above = 0.0
    while high - low > 1:
        middle = (low + high) >> 1
        least = _logit(middle, SHIFT) / temperature
        part = tl.zeros([BLOCK], tl.float32)
        for number in range(blocks):
            if tl.load(tops + row * blocks + number) >= least:  # which few blocks are, once the search is near its end
                at = number * BLOCK + inner
                x = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
                part += tl.where(_rank(x, SHIFT) > middle, tl.exp(x / temperature - top), 0.0)
        found = tl.sum(part, 0)
        enough = found >= wanted
        above = tl.where(enough, above, found)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    each = tl.exp(_logit(high, SHIFT) / temperature - top)  # the mass of one token with that very logit
    needed = tl.where(each > 0, tl.ceil((wanted - above) / each), 0.0)
    needed = tl.minimum(needed, vocabulary).to(tl.int64)
    tl.store(cuts + row * 2, high)
    tl.store(cuts + row * 2 + 1, needed)
    before = tl.zeros([], tl.int64)
    for number in range(blocks):
        token = number * BLOCK + inner
        x = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        rank = _rank(x, SHIFT)
        equal = tl.sum((rank == high).to(tl.int64), 0)
        some = tl.minimum(tl.maximum(needed - before, 0), equal)
        better = tl.sum(tl.where(rank > high, tl.exp(x / temperature - top), 0.0), 0)
        tl.store(kept + row * blocks + number, better + some.to(tl.float32) * each)
        tl.store(ties + row * blocks + number, before)
        before += equal


@triton.jit
def _draw(
    logits, tops, masses, kept, cuts, ties, tokens, positions, seeds, counts, limits, finish, ids, logprobs, stop_ids,
    ids_stride, vocabulary, blocks, temperature,
    GREEDY: tl.constexpr, NUCLEUS: tl.constexpr, SHIFT: tl.constexpr, STOPS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token at which the cumulative distribution of one row passes its uniform number; then the row's books.

    The block is found from the masses of all blocks, the token by summing inside that block alone.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(finish + row) != _RUNNING:
        return
    count = tl.load(counts + row)
    block = tl.arange(0, BLOCKS)
    there = block < blocks
    block_top = tl.load(tops + row * blocks + block, mask=there, other=float("-inf"))
    top = tl.max(block_top, 0)
    mass = tl.load(masses + row * blocks + block, mask=there, other=0.0) * tl.exp(block_top - top)
    total = tl.sum(mass, 0)
    inner = tl.arange(0, BLOCK)
    if GREEDY:
        chosen_block = tl.argmax(block_top, 0)
        token = chosen_block * BLOCK + inner
        x = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        # Of logits that are all NaN the padding would win: a token that does not exist would end the process.
        chosen = tl.minimum(chosen_block * BLOCK + tl.argmax(x, 0), vocabulary - 1)
    else:
        if NUCLEUS:
            mass = tl.load(kept + row * blocks + block, mask=there, other=0.0)
        threshold = _keyed_uniform(tl.load(seeds + row), count) * tl.sum(mass, 0)
        chosen_block, before = _first_above(mass, threshold, BLOCKS)
        token = chosen_block * BLOCK + inner
        x = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        weights = tl.exp(x / temperature - top)
        if NUCLEUS:
            rank, cut = _rank(x, SHIFT), tl.load(cuts + row * 2)
            equal = rank == cut
            number = tl.load(ties + row * blocks + chosen_block) + tl.cumsum(equal.to(tl.int32), 0)
            left = (rank > cut) | (equal & (number <= tl.load(cuts + row * 2 + 1)))
            weights = tl.where(left, weights, 0.0)
        within, _ = _first_above(weights, threshold - before, BLOCK)
        chosen = chosen_block * BLOCK + within
    logit = tl.load(logits + row * vocabulary + chosen).to(tl.float32) / temperature

    tl.store(ids + row * ids_stride + count, chosen.to(tl.int64))
    tl.store(logprobs + row * ids_stride + count, logit - top - tl.log(total))
    tl.store(counts + row, count + 1)
    tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(tokens + row, chosen.to(tl.int64))
    state = tl.where(count + 1 >= tl.load(limits + row), _FULL, _RUNNING)
    if STOPS > 0:
        stop = tl.arange(0, BLOCK_S)
        hits = tl.load(stop_ids + stop, mask=stop < STOPS, other=-1) == chosen
        state = tl.where(tl.max(hits.to(tl.int32), 0) > 0, _STOPPED, state)
    tl.store(finish + row, state.to(tl.int64))
