"""The learner: weights and optimizer; turns examples and a loss into an update. It knows no method.

One optimizer step: examples are packed into micro-batches by token budget, each gives the sum of its losses divided
by one count that was taken over the whole step, gradients are added in a fixed order, clipped, and AdamW moves the
fp32 weights (on CUDA the arithmetic runs in bf16 autocast). On the CPU micro-batches are shared out to threads that
each compute single-threaded; the order of the sum does not depend on them, so neither does the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reasonlab.config import LearnerConfig
from reasonlab.hardware import worker_pool
from reasonlab.model.attention import PackedCausal
from reasonlab.model.transformer import Transformer
from reasonlab.train.batch import Example, Layout, TokenBatch, Totals, micro_batches, pack

Loss = Callable[[Tensor, TokenBatch], tuple[Tensor, dict[str, Tensor]]]
# Of one micro-batch: loss, entropy, mismatch, metrics, gradients.
GradientPart = tuple[float, float, float, dict[str, float], list[Tensor]]
HEAD_ELEMENTS = 1 << 24  # logits held at once: 64 MiB in fp32


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss over examples, divided by its own totals. An optimizer step minimises a sum of objectives."""

    examples: Sequence[Example]
    loss: Loss
    totals: Totals


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did. Metrics are sums over the step, already divided by its counts."""

    loss: float
    grad_norm: float
    lr: float
    entropy: float  # mean over the tokens of the examples that took part
    mismatch: float  # largest |logprob now − logprob when sampled|
    nonfinite: int
    metrics: dict[str, float]


class Learner:
    def __init__(self, model: Transformer, config: LearnerConfig, workers: int = 1, temperature: float = 1.0) -> None:
        self.model, self.config, self.temperature = model, config, temperature
        self.device = model.embedding.weight.device
        self.workers = workers if self.device.type == "cpu" else 1
        self.parameters = list(model.parameters())
        self.steps = 0
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    # --- updates -----------------------------------------------------------------------------------------------

    def step(self, examples: Sequence[Example], loss: Loss, totals: Totals | None = None) -> StepResult:
        """One optimizer step. `totals` may count examples that were left out because they contribute nothing."""
        return self.step_on([Objective(examples, loss, totals or Totals.of(examples))])

    def step_on(self, objectives: Sequence[Objective]) -> StepResult:
        """One optimizer step on the sum of the objectives. Entropy and mismatch are those of the first."""
        lr = self.config.lr * schedule(self.config, self.steps)
        even = 4 if self.device.type == "cpu" else 1
        packs = [
            (examples, objective)
            for objective in objectives
            for examples in micro_batches(objective.examples, self.config.token_budget, even)
        ]
        sums: dict[str, float] = {}
        gradients: list[Tensor] | None = None
        nonfinite = 0
        entropies, mismatch, tokens = 0.0, 0.0, Totals.of(objectives[0].examples).tokens
        for (_, objective), (value, entropy, difference, metrics, parts) in zip(
            packs, self.gradients(packs), strict=True
        ):
            if not math.isfinite(value):
                nonfinite += 1
                continue
            if objective is objectives[0]:
                entropies, mismatch = entropies + entropy, max(mismatch, difference)
            for name, number in {"loss": value, **metrics}.items():
                sums[name] = sums.get(name, 0.0) + number
            if gradients is None:
                gradients = parts
            else:
                torch._foreach_add_(gradients, parts)
        grad_norm = 0.0
        if gradients is not None:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            grad_norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_grad_norm))
            if math.isfinite(grad_norm):
                self.optimizer.param_groups[0]["lr"] = lr
                self.optimizer.step()
            else:
                nonfinite += 1
            self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return StepResult(sums.pop("loss", 0.0), grad_norm, lr, entropies / tokens, mismatch, nonfinite, sums)

    def reset_optimizer(self) -> None:
        """Forget the moments: the next step starts Adam afresh."""
        self.optimizer.state.clear()

    def gradients(self, packs: Sequence[tuple[Sequence[Example], Objective]]) -> Iterator[GradientPart]:
        """Of each micro-batch: its share of the loss, entropy, mismatch, metrics and gradients. No weight moves."""

        def work(one: tuple[Sequence[Example], Objective]) -> GradientPart:
            examples, objective = one
            batch = pack(examples, objective.totals, self.device)
            logprobs, entropy = self._forward(examples, with_entropy=True)
            value, metrics = objective.loss(logprobs, batch)
            gradients = list(torch.autograd.grad(value, self.parameters))
            total_entropy = float((entropy * batch.mask).sum())
            difference = float(((logprobs.detach() - batch.old) * batch.mask).abs().max())
            sums = {k: float(v) for k, v in metrics.items()}
            return float(value.detach()), total_entropy, difference, sums, gradients

        if self.workers == 1 or len(packs) == 1:
            yield from map(work, packs)
        else:
            with worker_pool(self.workers) as pool:
                yield from pool.map(work, packs)

    # --- forward -----------------------------------------------------------------------------------------------

    def logprobs(self, examples: Sequence[Example]) -> list[NDArray[np.float32]]:
        """Logprobs of the response tokens under the present weights, without gradients, in the order given."""
        result: dict[int, NDArray[np.float32]] = {}
        with torch.no_grad():
            for examples_of_pack in micro_batches(examples, self.config.token_budget):
                flat, _ = self._forward(examples_of_pack, with_entropy=False)
                parts = flat.cpu().numpy()
                start = 0
                for example in examples_of_pack:
                    end = start + len(example.response)
                    result[id(example)] = parts[start:end].astype(np.float32)
                    start = end
        return [result[id(example)] for example in examples]

    def _forward(self, examples: Sequence[Example], with_entropy: bool) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of all response tokens of a pack, flat."""
        layout = Layout.of(examples)
        attend = PackedCausal(layout.lengths, self.device, layout.sequences)
        ids, readers, targets = (
            torch.from_numpy(x).to(self.device) for x in (layout.ids, layout.readers, layout.targets)
        )
        with self._autocast():
            hidden = self.model(ids, attend.positions, attend).index_select(0, readers)
            return token_logprobs(hidden, self.model.head_weight, targets, self.temperature, with_entropy)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.device.type == "cuda" and self.config.bfloat16:
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float = 1.0, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """log π(target) and the entropy at each position, computing the logits of a bounded chunk at a time.

    The logits of a chunk are thrown away and computed again in the backward pass.
    """

    def chunk(h: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = (F.linear(h, head).float() / temperature).log_softmax(-1)
        entropy = torch.zeros_like(target, dtype=torch.float32)
        if with_entropy:
            detached = logprobs.detach()
            entropy = -(detached.exp() * detached).sum(-1)
        return logprobs.gather(1, target[:, None]).squeeze(1), entropy

    size = max(1, HEAD_ELEMENTS // head.shape[0])
    if len(targets) <= size:
        return chunk(hidden, targets)
    parts = [
        checkpoint(chunk, h, t, use_reentrant=False) if torch.is_grad_enabled() else chunk(h, t)
        for h, t in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def schedule(config: LearnerConfig, step: int) -> float:
    """Factor on the learning rate: linear warm-up, then constant, linear or cosine decay to `final_lr_ratio`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.decay_steps == 0:
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.decay_steps - config.warmup_steps))
    falling = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_lr_ratio + (1 - config.final_lr_ratio) * falling
