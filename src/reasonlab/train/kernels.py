"""The Triton kernel of `adamw.py`, which says what it computes and what its table holds.

It waits for memory alone, so it reads and writes 16 bytes at a time. Roots and quotients are the device's fast ones,
right to about 2 units in the last place.

Import this module only where Triton is installed; with TRITON_INTERPRET=1 in the environment it also runs on the CPU,
slowly, which is how the tests compare it with torch.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc, no-untyped-call"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a chunk that one program handles at a time
WARPS = 8  # of a program: 4 elements of a block for each thread, which it reads at once


def adamw(
    table: Tensor,
    chunk: int,
    step: Tensor,
    scale: Tensor,
    found_inf: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Move everything in the table, in one launch. Differences are taken here, in double precision."""
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    _adamw[(len(table),)](
        table, step, scale, found_inf, lr, lr * weight_decay, 1 - betas[0], betas[1], 1 - betas[1], *logs, eps,
        chunk, min(chunk, BLOCK), num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _adamw(
    table, step, scale, found_inf, lr, decay, new1, old2, new2, log1, log2, eps,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0).to(tl.int64) * 6
    p = _tensor(row, tl.float32, 16)
    g = _tensor(row + 1, tl.float32, 16)
    m = _tensor(row + 2, tl.float32, 16)
    v = _tensor(row + 3, tl.float32, 16)
    copy = _tensor(row + 4, tl.bfloat16, 8)  # more would split the threads' elements differently than fp32 wants it
    copied = tl.load(row + 4) != 0
    count = tl.load(row + 5)
    if tl.load(found_inf) == 0:
        # 1 − βᵗ = 1 − exp(t ln β), in fp64: nearly all digits cancel where β is near 1.
        t = tl.load(step).to(tl.float64)
        rate = lr / (1.0 - tl.exp(t * log1)).to(tl.float32)
        root = tl.sqrt((1.0 - tl.exp(t * log2)).to(tl.float32))
        divisor = tl.load(scale)
        # The same twice: with a bound that the compiler knows, no group of 4 elements is cut and all are read at once.
        if count == CHUNK:
            _chunk(p, g, m, v, copy, copied, CHUNK, divisor, rate, root, decay, new1, old2, new2, eps, CHUNK, BLOCK)
        else:
            _chunk(p, g, m, v, copy, copied, count, divisor, rate, root, decay, new1, old2, new2, eps, CHUNK, BLOCK)


@triton.jit
def _tensor(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """What lies at the address that is stored there, a multiple of `ALIGNED` bytes."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(DTYPE)), ALIGNED)


@triton.jit
def _chunk(
    p, g, m, v, copy, copied, count, divisor, rate, root, decay, new1, old2, new2, eps,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for start in range(0, CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        gradient = tl.load(g + at, mask=inside, other=0.0) / divisor
        weight = tl.load(p + at, mask=inside, other=0.0)
        mean = tl.load(m + at, mask=inside, other=0.0)
        square = tl.load(v + at, mask=inside, other=0.0)
        mean += new1 * (gradient - mean)
        square = old2 * square + new2 * gradient * gradient
        weight -= decay * weight
        weight -= rate * mean / (tl.sqrt(square) / root + eps)
        tl.store(p + at, weight, mask=inside)
        tl.store(m + at, mean, mask=inside)
        tl.store(v + at, square, mask=inside)
        tl.store(copy + at, weight.to(tl.bfloat16), mask=inside & copied)
