"""What lies between two matrix products of the transformer, and what follows the last one.

On CUDA each of these is one kernel (`kernels.py`), forward and backward; here is what it means, in plain torch, which
is what runs on the CPU and where Triton is not installed. With kernels the residual sum is kept in fp32 whatever the
dtype of the weights, as in decoding, so that sampling and training round alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reasonlab.hardware import triton_installed
from reasonlab.model.accumulate import add_product, sum_of
from reasonlab.model.rope import rotate

LOGIT_BYTES = 1 << 30
"""Of the logits that are computed at a time, where those of a pack are too many to be kept for the backward pass."""
KEPT_SHARE = 16
"""Logits are kept if they take at most this part of the device's memory; else they are computed a second time."""


def uses_kernels(x: Tensor) -> bool:
    return x.is_cuda and triton_installed()


def residual(x: Tensor) -> Tensor:
    """Embeddings in the precision in which the layers add to them."""
    return x.float() if uses_kernels(x) else x


def add_norm(x: Tensor, branch: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """x + branch, and its RMSNorm: x / √(mean(x²) + ε) · weight."""
    if uses_kernels(x):
        from reasonlab.model import kernels

        return kernels.add_norm(x, branch, norm.weight, norm.eps or 0.0)
    x = x if branch is None else x + branch
    return x, norm(x)


def rotate_heads(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, v: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k turned by their positions, and v, each [tokens, heads of its own, d].

    They come as one projection, [tokens, (heads + 2 kv_heads) · d], or as q and k with v apart. The kernel turns them
    where they lie: nobody else may need `x`.
    """
    sizes = [heads, kv_heads, kv_heads] if v is None else [heads, kv_heads]
    if uses_kernels(x):
        from reasonlab.model import kernels

        x = kernels.rotate_heads(x, cos, sin, heads + kv_heads, cos.shape[-1] * 2)
        q, k, *rest = split_heads(x.view(len(x), sum(sizes), -1), sizes)
        v = rest[0] if v is None else v
        return q.to(v.dtype), k.to(v.dtype), v
    qk = x.view(len(x), sum(sizes), -1)
    if v is None:
        qk, v = qk.split((heads + kv_heads, kv_heads), dim=1)
    q, k = rotate(qk, cos, sin).to(v.dtype).split((heads, kv_heads), dim=1)
    return q, k, v


def split_heads(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """x.split(sizes, 1), whose gradients need not be put together where they lie side by side already."""
    parts: tuple[Tensor, ...] = _SplitHeads.apply(x, sizes)  # type: ignore[no-untyped-call]
    return parts


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = x.split(sizes, 1)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return side_by_side(gradients), None


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat(parts, 1), without a copy if they follow one another in every row of one tensor."""
    first, heads = parts[0], sum(part.shape[1] for part in parts)
    place = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.stride() != first.stride() or part.storage_offset() != place:
            return torch.cat(list(parts), 1)
        place += part.shape[1] * part.stride(1)
    return first.as_strided((len(first), heads, *first.shape[2:]), first.stride())


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, both halves of the last dimension."""
    if uses_kernels(gate_up):
        from reasonlab.model import kernels

        return kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def column_sum(x: Tensor) -> Tensor:
    """The sum of all rows, in fp32 and then rounded."""
    if uses_kernels(x):
        from reasonlab.model import kernels

        return kernels.column_sum(x)
    return x.sum(0)


# --- the head --------------------------------------------------------------------------------------------------------


def head_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """log π(target) and the entropy of π at each position, for π = softmax(hidden · headᵀ / temperature).

    Logits are held in the dtype of the head and summed in fp32. One pass over them gives, with x = logit/temperature,

        log π(t) = z_t − log Σ_v exp(z_v),    H = log Σ_v exp(z_v) − Σ_v π_v z_v,    z = x − max x.

    The backward pass writes ∂L/∂logit_v = g · ([v = t] − π_v) / temperature over them, for the slope g = ∂L/∂log π(t),
    and multiplies twice. It does so with the logits of the forward pass if they may be kept and are few enough, else
    with those of a chunk at a time, computed again. The gradient of the head is added to its sum where it has one
    (`accumulate.py`). The entropy has no gradient.
    """
    rows, keep = logit_rows(len(targets), head, keep and torch.is_grad_enabled())
    logprobs, entropies = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, temperature, rows, keep, sum_of(head)
    )
    return logprobs, entropies


def logit_rows(tokens: int, head: Tensor, keep: bool) -> tuple[int, bool]:
    """How many positions have their logits computed at a time, and whether those are kept."""
    row = head.shape[0] * head.element_size()
    if keep and head.is_cuda:
        memory = torch.cuda.get_device_properties(head.device).total_memory
        if tokens * row <= memory // KEPT_SHARE:
            return max(1, tokens), True
    return max(1, LOGIT_BYTES // row), False


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        rows: int,
        keep: bool,
        head_sum: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, totals = (
            torch.empty(len(targets), dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        kept = []
        for start in range(0, len(targets), rows):
            here = slice(start, start + rows)
            logits = hidden[here] @ head.T
            read_logits(logits, targets[here], temperature, logprobs[here], entropies[here], totals[here])
            if keep:
                kept.append(logits)
        ctx.save_for_backward(hidden, head, targets, totals, *kept)
        ctx.temperature, ctx.rows, ctx.head_sum = temperature, rows, head_sum
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, slopes: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, targets, totals, *kept = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_head: Tensor | None = None
        for number, start in enumerate(range(0, len(targets), ctx.rows)):
            here = slice(start, start + ctx.rows)
            logits = kept[number] if kept else hidden[here] @ head.T
            turn_logits(logits, targets[here], ctx.temperature, totals[here], slopes[here])
            if of_hidden is not None:
                torch.mm(logits, head, out=of_hidden[here])
            if wants_head and ctx.head_sum is not None:
                add_product(ctx.head_sum, logits, hidden[here])
            elif wants_head and len(targets) <= ctx.rows:
                of_head = logits.T @ hidden
            elif wants_head:  # many chunks are added up in fp32
                of_head = torch.zeros_like(head, dtype=torch.float32) if of_head is None else of_head
                of_head += logits.T @ hidden[here]
        return of_hidden, of_head if of_head is None else of_head.to(head.dtype), None, None, None, None, None


def read_logits(
    logits: Tensor, targets: Tensor, temperature: float, logprobs: Tensor, entropies: Tensor, totals: Tensor
) -> None:
    """Write log π(target), the entropy and log Σ exp(logit/temperature) of each row into the last three."""
    if uses_kernels(logits):
        from reasonlab.model import kernels

        kernels.read_logits(logits, targets, temperature, logprobs, entropies, totals)
        return
    x = logits.float() / temperature
    largest = x.amax(-1, keepdim=True)
    z = x - largest
    weights = z.exp()
    mass = weights.sum(-1)
    totals.copy_(largest.squeeze(1) + mass.log())
    logprobs.copy_(z.gather(1, targets[:, None]).squeeze(1) - mass.log())
    entropies.copy_(mass.log() - (weights * z).sum(-1) / mass)


def turn_logits(logits: Tensor, targets: Tensor, temperature: float, totals: Tensor, slopes: Tensor) -> None:
    """Write the gradient over the logits: slope · ([v = target] − π_v) / temperature."""
    if uses_kernels(logits):
        from reasonlab.model import kernels

        kernels.turn_logits(logits, targets, temperature, totals, slopes)
        # Autograd does not see what a kernel writes: a second backward pass through kept logits must be an error.
        torch.autograd.graph.increment_version(logits)
        return
    slopes = slopes.float()[:, None] / temperature
    gradient = -(logits.float() / temperature - totals[:, None]).exp() * slopes
    gradient.scatter_add_(1, targets[:, None], slopes)
    logits.copy_(gradient)
