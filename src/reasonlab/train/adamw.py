"""AdamW, whose step also writes the copy of the weights that does the computing.

For the gradient g, divided by a scale, and the number t of the step

    m ← m + (1 − β₁)(g − m),    v ← β₂ v + (1 − β₂) g²,
    p ← p − lr λ p,             p ← p − lr · m̂ / (√v̂ + ε),    m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ),

which is torch's AdamW, with torch's state under torch's names: a checkpoint does not show which of the two wrote it.
Torch's own step, and a copy behind it, is what runs on the CPU and where Triton is not installed. On CUDA one kernel
(`kernels.py`) reads g, p, m, v and writes p, m, v and the bf16 copy of p, 30 bytes for each weight, in a single launch
for all tensors: a table tells it where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from reasonlab.model import fused
from reasonlab.model.attention import to_device

MOMENTS = ("exp_avg", "exp_avg_sq")
CHUNK = 8192
"""Elements that a row of the table stands for, and one program of the kernel moves. 500M weights have 3 MB of rows."""
ALIGNED = 16
"""Bytes that the kernel reads at once. Every address is a multiple: those of chunks are if that of their tensor is."""
BYTES = (4, 4, 4, 4, 2)  # of an element of p, g, m, v and the copy


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, for one group of parameters that are always moved together."""

    _places: list[list[int]] | None = None  # addresses of all p, g, m, v and copies when the table was made
    _table: Tensor | None = None  # None if the kernel cannot take what lies there
    _together = True  # whether all parameters have made as many steps

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    def step_and_copy(self, copies: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> None:
        """A step with the gradients divided by `scale`. Then the copies are the parameters, each in its own dtype.

        Where `found_inf` is 1 nothing moves and no step is counted. Both are fp32 numbers on the device, and nobody
        waits for them. There are as many copies as parameters, or none. The gradients lie as their parameters do
        (`laid_as`) and may be overwritten.
        """
        parameters: list[Tensor] = self.param_groups[0]["params"]
        pairs = list(zip(copies, parameters, strict=True)) if copies else []
        table = self._table_of(copies) if parameters and fused.uses_kernels(parameters[0]) else None
        if table is None:
            self.grad_scale, self.found_inf = scale, found_inf
            self.step()
        else:
            self._step_by_kernel(table, scale, found_inf)
            increment_version([*parameters, *copies])  # autograd does not see what a kernel writes
            pairs = [pair for pair in pairs if not _kernel_writes(pair[0])]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([copied for copied, _ in pairs], [weight for _, weight in pairs])

    @torch.optim.Optimizer.profile_hook_step  # calls whoever asked to be told of steps
    def _step_by_kernel(self, table: Tensor, scale: Tensor, found_inf: Tensor) -> None:
        from reasonlab.train import kernels

        group = self.param_groups[0]
        steps = [self.state[p]["step"] for p in group["params"]]
        torch._foreach_add_(steps, [1 - found_inf] * len(steps))  # a single number would be read on the host
        options = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
        kernels.adamw(table, CHUNK, steps[0], scale, found_inf, *options)

    def _table_of(self, copies: Sequence[Tensor]) -> Tensor | None:
        """The table, made anew if anything lies elsewhere than before; None if the kernel cannot take it."""
        parameters: list[Tensor] = self.param_groups[0]["params"]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if len(gradients) < len(parameters) or not self._begun(parameters):
            return None
        states = [self.state[p] for p in parameters]
        tensors = [parameters, gradients, *([s[name] for s in states] for name in MOMENTS)]
        places = [[x.data_ptr() for x in some] for some in tensors]
        places.append([x.data_ptr() if _kernel_writes(x) else 0 for x in copies] or [0] * len(parameters))
        if places != self._places:
            plain = all(x.dtype == torch.float32 and x.is_contiguous() for some in tensors for x in some)
            aligned = not any(place % ALIGNED for some in places for place in some)
            sizes, device = [p.numel() for p in parameters], parameters[0].device
            self._places, self._table = places, chunk_table(places, sizes, device) if plain and aligned else None
        return self._table

    def _begun(self, parameters: Sequence[Tensor]) -> bool:
        """Make the state that a first step finds, as torch does it. False if some began before others: the kernel
        reads one counter for all."""
        new = [p for p in parameters if not self.state.get(p)]
        if len(new) == len(parameters):
            for p in parameters:
                moments = {name: torch.zeros_like(p, requires_grad=False) for name in MOMENTS}
                self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}
            self._together = True
        elif new:
            self._together = False
        return self._together


def laid_as(weight: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, lying in memory as its weight does. Neither the kernel nor torch's fused step looks at strides."""
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _kernel_writes(copied: Tensor) -> bool:
    return copied.dtype == torch.bfloat16 and copied.is_contiguous()


def chunk_table(places: Sequence[Sequence[int]], sizes: Sequence[int], device: torch.device | str) -> Tensor:
    """For every chunk of every tensor: where p, g, m, v and the copy begin (0: no copy), and how many elements it has.

    `places` are the addresses of all p, of all g and so on, `sizes` the elements of each tensor. Only these travel: the
    rows are made on the device, since gradients may lie elsewhere in every step.
    """
    begins, elements, width = (to_device(np.array(x), device) for x in (places, sizes, BYTES))
    counts = (elements + CHUNK - 1) // CHUNK
    rows = sum(-(-size // CHUNK) for size in sizes)
    owner = torch.arange(len(sizes), device=device).repeat_interleave(counts, output_size=rows)
    start = (torch.arange(rows, device=device) - (counts.cumsum(0) - counts)[owner]) * CHUNK
    begin = begins.T[owner]
    addresses = torch.where(begin == 0, 0, begin + start[:, None] * width)
    return torch.column_stack([addresses, (elements[owner] - start).clamp(max=CHUNK)])
