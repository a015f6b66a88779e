"""The Triton kernels of `fused.py`, which says in torch what each of them computes. Decoding has its own in `rollout`.

All of them read and write each number once, in the dtype of the tensors, and compute in fp32. Import this module only
where Triton is installed; with TRITON_INTERPRET=1 in the environment it also runs on the CPU, slowly, which is how
the tests compare it with the reference.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # of a row that one program handles, where rows may be cut
VOCABULARY = 4096  # logits read at a time
COLUMNS = 32  # that one program adds up
ROWS = 128  # of them at a time
SUMMED_ROWS = 2048  # that are added up at once
PART_ROWS = 512  # and of more, in each part
NORM_PROGRAMS = 1056  # that go over the rows in the backward pass of a norm, 8 for each of 132 multiprocessors


# --- residual sum and norm -------------------------------------------------------------------------------------------


def add_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if branch is None:
        return x, _Norm.apply(x, weight, eps)
    total, normed = _AddNorm.apply(x, branch, weight, eps)
    return total, normed


class _AddNorm(torch.autograd.Function):
    """y = x + b, n = y / r with r = √(mean(y²) + ε), out = n · w. With e = ∂L/∂out · w:

    ∂L/∂x = ∂L/∂b = ∂L/∂y + (e − n · mean(e n)) / r,    ∂L/∂w = Σ_tokens ∂L/∂out · n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, normed, inverse = _norm_forward(x, branch, weight, eps)
        ctx.save_for_backward(total, weight, inverse)
        ctx.branch_dtype = branch.dtype
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(
        ctx: Any, of_total: Tensor | None, of_normed: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if of_normed is None:
            return of_total, None if of_total is None else of_total.to(ctx.branch_dtype), None, None
        total, weight, inverse = ctx.saved_tensors
        return *_norm_backward(total, weight, inverse, of_normed, of_total, ctx.branch_dtype), None


class _Norm(torch.autograd.Function):
    """The same without a branch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        total, normed, inverse = _norm_forward(x, None, weight, eps)
        ctx.save_for_backward(total, weight, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, of_normed: Tensor) -> tuple[Tensor, Tensor, None]:
        total, weight, inverse = ctx.saved_tensors
        of_x, _, of_weight = _norm_backward(total, weight, inverse, of_normed, None, None)
        return of_x, of_weight, None


def _norm_forward(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, its norm, and 1/r of each row."""
    x = x.contiguous()
    total = x if branch is None else torch.empty_like(x)
    normed = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    inverse = torch.empty(len(x), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    if len(x):
        _add_norm_forward[(len(x),)](
            x, x if branch is None else branch.contiguous(), weight, total, normed, inverse, x.shape[1], eps,
            branch is not None, block, num_warps=_warps(block),
        )  # fmt: skip
    return total, normed, inverse


def _norm_backward(
    total: Tensor,
    weight: Tensor,
    inverse: Tensor,
    of_normed: Tensor,
    of_total: Tensor | None,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of x, of the branch in its own dtype, and of the weight."""
    tokens, width = total.shape
    of_x = torch.empty_like(total)
    of_branch = None if branch_dtype is None else torch.empty_like(total, dtype=branch_dtype)
    programs = min(max(1, tokens), NORM_PROGRAMS)
    parts = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(width)
    _add_norm_backward[(programs,)](
        total, weight, inverse, of_normed.contiguous(), of_x if of_total is None else of_total.contiguous(),
        of_x, of_x if of_branch is None else of_branch, parts, tokens, width, programs,
        of_total is not None, of_branch is not None, block, num_warps=_warps(block),
    )  # fmt: skip
    return of_x, of_branch, column_sum(parts, weight.dtype)


@triton.jit
def _add_norm_forward(
    x, branch, weight, total, normed, inverse, width, eps, WITH_BRANCH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if WITH_BRANCH:
        y += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, y.to(total.dtype.element_ty), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(y * y) / width + eps)
    tl.store(inverse + row, scale)
    out = y * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, out.to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "programs"])  # they change with every micro-batch
def _add_norm_backward(
    total, weight, inverse, of_normed, of_total, of_x, of_branch, parts, tokens, width, programs,
    WITH_TOTAL: tl.constexpr, WITH_BRANCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    for turn in range(0, tl.cdiv(tokens, programs)):
        row = program + turn * programs
        inside = (column < width) & (row < tokens)
        at = row * width + column
        scale = tl.load(inverse + row, mask=row < tokens, other=0.0)
        n = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * scale
        d = tl.load(of_normed + at, mask=inside, other=0.0).to(tl.float32)
        of_weight += d * n
        e = d * w
        gradient = (e - n * (tl.sum(e * n) / width)) * scale
        if WITH_TOTAL:
            gradient += tl.load(of_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_x + at, gradient.to(of_x.dtype.element_ty), mask=inside)
        if WITH_BRANCH:
            tl.store(of_branch + at, gradient.to(of_branch.dtype.element_ty), mask=inside)
    tl.store(parts + program * width + column, of_weight, mask=column < width)


# --- sums of columns ------------------------------------------------------------------------------------------------


def column_sum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x.sum(0), [rows, columns] -> [columns]: in parts of the rows first, if they are many."""
    dtype, rows = dtype or x.dtype, x.shape[0]
    if rows > SUMMED_ROWS:
        return column_sum(_sum_rows(x, torch.float32, PART_ROWS), dtype)
    return _sum_rows(x, dtype, max(1, rows))[0]


def _sum_rows(x: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """The sum of each so many rows."""
    x = x.contiguous()
    count, width = x.shape
    parts = triton.cdiv(count, rows)
    out = torch.empty(max(1, parts), width, dtype=dtype, device=x.device)
    if not count:
        return out.zero_()
    _column_sum[(triton.cdiv(width, COLUMNS), parts)](x, out, count, width, rows, COLUMNS, ROWS, num_warps=4)
    return out


@triton.jit(do_not_specialize=["count", "rows"])
def _column_sum(x, out, count, width, rows, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * rows
    end = tl.minimum(first + rows, count)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (column < width)[None, :]
        total += tl.load(x + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    at = tl.program_id(1) * width + column
    tl.store(out + at, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < width)


# --- rotary positions ------------------------------------------------------------------------------------------------


def rotate_heads(qkv: Tensor, cos: Tensor, sin: Tensor, turned: int, head_dim: int) -> Tensor:
    """`qkv` itself, [tokens, heads · head_dim], with its first `turned` heads turned by their positions."""
    shape = (len(qkv), head_dim // 2)
    cos, sin = (x.to(torch.float32).reshape(shape).contiguous() for x in (cos, sin))
    rotated: Tensor = _RotateHeads.apply(qkv, cos, sin, turned)
    return rotated


class _RotateHeads(torch.autograd.Function):
    """A rotation: its gradient is turned back. The heads that are not turned pass through."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
        if not qkv.is_contiguous():
            raise ValueError("heads are turned in place, so they must lie one behind the other")
        ctx.save_for_backward(cos, sin)
        ctx.turned = turned
        ctx.mark_dirty(qkv)
        _rotate_into(qkv, qkv, cos, sin, turned, turned, 1.0)
        return qkv

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        gradient = gradient.contiguous()
        back = torch.empty_like(gradient)
        _rotate_into(back, gradient, cos, sin, ctx.turned, gradient.shape[1] // (2 * cos.shape[1]), -1.0)
        return back, None, None, None


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, turned: int, heads: int, sign: float) -> None:
    """Write the first `heads` heads of x into out, of which the first `turned` are turned."""
    tokens, half = cos.shape
    block_half = triton.next_power_of_2(half)
    block_heads = min(triton.next_power_of_2(heads), max(1, 2048 // block_half))
    if tokens:
        _rotate[(tokens, triton.cdiv(heads, block_heads))](
            out, x, cos, sin, x.shape[1], turned, heads, half, sign, block_heads, block_half, num_warps=4
        )


@triton.jit
def _rotate(out, x, cos, sin, width, turned, heads, half, sign, HEADS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    c = tl.load(cos + token * half + column, mask=column < half, other=0.0)[None, :]
    s = tl.load(sin + token * half + column, mask=column < half, other=0.0)[None, :] * sign
    turns = (head < turned)[:, None]
    c, s = tl.where(turns, c, 1.0), tl.where(turns, s, 0.0)
    inside = (head < heads)[:, None] & (column < half)[None, :]
    at = token * width + head[:, None] * (2 * half) + column[None, :]
    first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


# --- SwiGLU ----------------------------------------------------------------------------------------------------------


def swiglu(gate_up: Tensor) -> Tensor:
    out: Tensor = _SwiGLU.apply(gate_up)
    return out


class _SwiGLU(torch.autograd.Function):
    """out = g σ(g) u:  ∂out/∂u = g σ(g),  ∂out/∂g = u σ(g) (1 + g (1 − σ(g)))."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[1] // 2
        out = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
        if len(gate_up):
            _swiglu_forward[(len(gate_up), triton.cdiv(width, ELEMENTS))](gate_up, out, width, ELEMENTS, num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        width = gate_up.shape[1] // 2
        gradient = torch.empty_like(gate_up)
        if len(gate_up):
            _swiglu_backward[(len(gate_up), triton.cdiv(width, ELEMENTS))](
                gate_up, of_out.contiguous(), gradient, width, ELEMENTS, num_warps=4
            )
        return gradient


@triton.jit
def _swiglu_forward(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up, of_out, gradient, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(of_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(gradient + at, of_gate.to(gradient.dtype.element_ty), mask=inside)
    tl.store(gradient + at + width, (d * gate * sigmoid).to(gradient.dtype.element_ty), mask=inside)


# --- the head --------------------------------------------------------------------------------------------------------


def read_logits(
    logits: Tensor, targets: Tensor, temperature: float, logprobs: Tensor, entropies: Tensor, totals: Tensor
) -> None:
    if len(logits):
        block = min(VOCABULARY, triton.next_power_of_2(logits.shape[1]))
        _read_logits[(len(logits),)](
            logits, targets, logprobs, entropies, totals, logits.shape[1], 1 / temperature, block, num_warps=8
        )


def turn_logits(logits: Tensor, targets: Tensor, temperature: float, totals: Tensor, slopes: Tensor) -> None:
    if len(logits):
        vocabulary = logits.shape[1]
        block = min(VOCABULARY, triton.next_power_of_2(vocabulary))
        _turn_logits[(len(logits), triton.cdiv(vocabulary, block))](
            logits, targets, totals, slopes.contiguous(), vocabulary, 1 / temperature, block, num_warps=8
        )


@triton.jit
def _read_logits(logits, targets, logprobs, entropies, totals, vocabulary, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * vocabulary
    # Of what was read so far: the largest x, and with z = x − largest the sums of exp(z) and of z exp(z), each place of
    # a block for itself: only the largest must be known to all of them.
    largest = -1e30
    masses = tl.zeros((BLOCK,), tl.float32)
    moments = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocabulary
        x = tl.load(at + column, mask=inside, other=-1e30).to(tl.float32) * factor
        new = tl.maximum(largest, tl.max(x))
        z, shift = tl.where(inside, x - new, 0.0), largest - new
        weight = tl.where(inside, tl.exp(z), 0.0)
        old = tl.exp(shift)
        moments = old * (moments + shift * masses) + z * weight
        masses = old * masses + weight
        largest = new
    mass, moment = tl.sum(masses), tl.sum(moments)
    chosen = tl.load(at + tl.load(targets + row)).to(tl.float32) * factor
    tl.store(totals + row, largest + tl.log(mass))
    tl.store(logprobs + row, chosen - largest - tl.log(mass))
    tl.store(entropies + row, tl.log(mass) - moment / mass)


@triton.jit
def _turn_logits(logits, targets, totals, slopes, vocabulary, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    at = logits + row * vocabulary + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32) * factor
    slope = tl.load(slopes + row).to(tl.float32) * factor
    hit = tl.where(column == tl.load(targets + row), 1.0, 0.0)
    gradient = slope * (hit - tl.exp(x - tl.load(totals + row)))
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)


def _warps(block: int) -> int:
    """A warp for every 256 elements of a row that one program reads: 8 for each thread."""
    return min(16, max(1, block // 256))
