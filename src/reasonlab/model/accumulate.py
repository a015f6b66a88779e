"""Weight gradients that are added to the sums of an optimizer step as they are computed.

A step adds up the gradients of many micro-batches in fp32. Written down in bf16 first, and then added, each costs two
more passes over the memory of all weights. Here the backward pass adds to the sum itself:

    y = x Wᵀ        sum_W += gᵀ x         with g = ∂L/∂y: one matrix product with the sum as its start
    y_t = W[i_t]    sum_W[i_t] += g_t     row by row; the other rows of the vocabulary are not touched

This holds for operations of a forward pass inside `into`, which names the weights and their sums. Autograd is then told
of no gradient for such a weight; what it does return for a weight is a part that is in no sum yet. Everywhere else the
operations are the ordinary ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SUMS: ContextVar[Mapping[Tensor, Tensor] | None] = ContextVar("sums of gradients", default=None)


@contextmanager
def into(sums: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """What is computed here with one of these weights will add its gradient to the weight's sum, in fp32.

    Not for layers that are computed again in the backward pass (`recompute`): that happens outside.
    """
    before = _SUMS.set(sums)
    try:
        yield
    finally:
        _SUMS.reset(before)


def sum_of(weight: Tensor) -> Tensor | None:
    """Where the gradient of a weight goes, if not to autograd."""
    if not torch.is_grad_enabled():
        return None
    if torch.compiler.is_compiling():  # the compiler cannot read the variable; autograd's gradient is as good
        return None
    sums = _SUMS.get()
    return None if sums is None else sums.get(weight)


# --- layers ----------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """y = x Wᵀ + b. Only the gradient of W can go to a sum: biases are small."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        total = sum_of(weight)
        if total is None:
            return F.linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, total)  # type: ignore[no-any-return, no-untyped-call]


class Embedding(nn.Embedding):
    """The rows of a flat list of ids."""

    def forward(self, ids: Tensor) -> Tensor:
        total = sum_of(self.weight)
        if total is None:
            return super().forward(ids)
        return _Embedding.apply(ids, self.weight, total)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        from reasonlab.model.fused import column_sum  # which imports this module

        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        if of_weight:
            add_product(ctx.total, g, x)
        return g @ weight if of_x else None, None, column_sum(g) if of_bias else None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.total = total
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        add_rows(ctx.total, ids, g)
        return None, None, None


# --- sums ------------------------------------------------------------------------------------------------------------


def add_product(total: Tensor, g: Tensor, x: Tensor) -> None:
    """total += gᵀ x, for g [tokens, out] and x [tokens, in]."""
    if addmm_takes(x.device, x.dtype):
        _addmm(total, g, x)
    else:
        total += g.T @ x


def add_rows(total: Tensor, ids: Tensor, g: Tensor) -> None:
    """total[ids[t]] += g[t] for all t, with the same bits each time.

    On CUDA `index_add_` adds the rows of one id in any order. So they are added up before, in a fixed order, at the
    place of one of these tokens, whichever it is; the others then add zeros.
    """
    one_of = ids.new_empty(len(total)).scatter_(0, ids, torch.arange(len(ids), device=ids.device))
    rows = torch.ops.aten.embedding_dense_backward(g.float(), one_of[ids], len(ids), -1, False)
    total.index_add_(0, ids, rows)


@cache
def addmm_takes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch adds a product of such matrices to an fp32 sum in one call.

    Only some versions do, on some devices. It is tried with numbers that are exact in fp32 and not in bf16. The first
    call of a process must not be inside the capture of a CUDA graph, since it waits for the device.
    """
    g, x = ((torch.arange(64 * 32, device=device) % n - n // 2).view(64, 32).to(dtype) for n in (37, 23))
    start = torch.arange(32 * 32, device=device).view(32, 32) / 8
    total = start.clone()
    try:
        _addmm(total, g, x)
    except Exception:  # older versions know no `out_dtype`, or want the sum in the dtype of the matrices
        return False
    return torch.equal(total, start + g.float().T @ x.float())


def _addmm(total: Tensor, g: Tensor, x: Tensor) -> None:
    torch.addmm(total, g.T, x, out_dtype=torch.float32, out=total)
