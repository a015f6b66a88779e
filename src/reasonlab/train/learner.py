"""The learner: weights and optimizer; turns examples and a loss into an update. It knows no method.

One optimizer step: examples are packed into micro-batches by token budget, each gives the sum of its losses divided
by one count that was taken over the whole step, gradients are added in a fixed order in fp32, clipped, and AdamW
moves the fp32 weights. On CUDA in bf16 a copy of the weights does the computing (`working`): gradients are taken
with respect to it, and each step writes it anew (`adamw.py`). The engine samples with the same copy. Forward and
backward pass are captured as CUDA graphs there (`graphs.py`). Nothing waits for the device between the first
micro-batch and the norm of the gradient, but to capture. On the CPU micro-batches are shared out to threads that each
compute single-threaded; the order of the sum does not depend on them, so neither does the result.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reasonlab.config import LearnerConfig
from reasonlab.hardware import worker_pool
from reasonlab.model import attention
from reasonlab.model.attention import PackedCausal, to_device
from reasonlab.model.fused import head_logprobs, uses_kernels
from reasonlab.model.transformer import Attend, Transformer
from reasonlab.train import graphs
from reasonlab.train.adamw import AdamW, laid_as
from reasonlab.train.batch import Example, Layout, TokenBatch, Totals, micro_batches, pack

Loss = Callable[[Tensor, TokenBatch], tuple[Tensor, dict[str, Tensor]]]
HEAD_ELEMENTS = 1 << 24  # logits held at once: 64 MiB in fp32


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss over examples, divided by its own totals. An optimizer step minimises a sum of objectives."""

    examples: Sequence[Example]
    loss: Loss
    totals: Totals


class GradientPart(NamedTuple):
    """What one micro-batch adds to a step. The numbers stay on the device until the step is whole."""

    loss: Tensor
    entropy: Tensor  # summed over the tokens in the loss, like the mismatch
    mismatch: Tensor
    largest_mismatch: Tensor
    metrics: dict[str, Tensor]
    # With respect to the working weights; zero if the loss is not finite. Empty if they are in the step's sums already.
    gradients: list[Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did. Metrics are sums over the step, already divided by its counts."""

    loss: float
    grad_norm: float
    lr: float
    entropy: float  # mean over the tokens of the examples that took part
    mismatch: float | None  # largest |logprob now − logprob when sampled|; None if others than the policy have sampled
    nonfinite: int
    metrics: dict[str, float]
    mean_mismatch: float | None = 0.0


class Learner:
    def __init__(self, model: Transformer, config: LearnerConfig, workers: int = 1, temperature: float = 1.0) -> None:
        self.model, self.config, self.temperature = model, config, temperature
        self.device = model.embedding.weight.device
        self.workers = workers if self.device.type == "cpu" else 1
        low = self.device.type == "cuda" and config.bfloat16 and model.embedding.weight.dtype == torch.float32
        self.working = working_copy(model) if low else model
        for part in transformers_in(self.working):
            part.recompute = config.recompute
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.working_parameters = [p for p in self.working.parameters() if p.requires_grad]
        self.graphs = self.new_graphs() if self._captures() else None
        self.steps = 0
        self.optimizer = AdamW(self.parameters, config.lr, config.betas, config.eps, config.weight_decay)

    def _captures(self) -> bool:
        """Whether everything that an update launches can be captured."""
        model = self.working
        if model is self.model or not isinstance(model, Transformer):
            return False
        heads = model.embedding.weight.new_empty(1, 1, model.config.head_dim)
        asked_for = graphs.CAPTURE and not self.config.recompute and bool(self.working_parameters)
        return asked_for and uses_kernels(heads) and attention.takes_ragged(heads)

    def new_graphs(self) -> graphs.UpdateGraphs:
        compute = partial(read_pack, self.working, self.temperature, True, True)
        return graphs.UpdateGraphs(self.working, self.working_parameters, compute)

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
        parts: list[tuple[Objective, GradientPart]] = []
        gradients: list[Tensor] | None = None
        for (_, objective), part in zip(packs, self.gradients(packs), strict=True):
            if self.graphs is None:
                gradients = add_in_fp32(gradients, part.gradients)
                part.gradients.clear()
            else:
                gradients = self.graphs.sums
            parts.append((objective, part))
        norm = self._move(gradients, [part.loss for _, part in parts], lr) if gradients is not None else None
        sums: dict[str, float] = {}
        entropies, mismatches, mismatch, nonfinite = 0.0, 0.0, 0.0, 0
        readings = read_numbers([part for _, part in parts])
        for (objective, _), ((loss, entropy, distance, largest), metrics) in zip(parts, readings, strict=True):
            if not math.isfinite(loss):
                nonfinite += 1
                continue
            if objective is objectives[0]:
                entropies, mismatches, mismatch = entropies + entropy, mismatches + distance, max(mismatch, largest)
            for name, number in {"loss": loss, **metrics}.items():
                sums[name] = sums.get(name, 0.0) + number
        grad_norm = 0.0 if norm is None else float(norm)
        nonfinite += not math.isfinite(grad_norm)
        self.steps += 1
        tokens = Totals.of(objectives[0].examples).tokens
        return StepResult(
            loss=sums.pop("loss", 0.0),
            grad_norm=grad_norm,
            lr=lr,
            entropy=entropies / tokens,
            mismatch=mismatch,
            nonfinite=nonfinite,
            metrics=sums,
            mean_mismatch=mismatches / tokens,
        )

    def _move(self, gradients: Sequence[Tensor], losses: Sequence[Tensor], lr: float) -> Tensor:
        """Clip the gradients and step; returns their norm. Nothing moves unless some loss and the norm are finite.

        On CUDA nobody waits to see that: the optimizer itself divides by the scale and stops at `found_inf`, and so
        everything is launched while the device still computes the gradients.
        """
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = laid_as(parameter, gradient)
        self.optimizer.param_groups[0]["lr"] = lr
        some_finite = torch.stack([loss.float() for loss in losses]).isfinite().any()
        most = self.config.clip_grad_norm
        if self.device.type == "cuda":
            norm = torch.nn.utils.get_total_norm(gradients)
            scale = ((norm + 1e-6) / most).clamp(min=1.0)
            found_inf = (~(norm.isfinite() & some_finite)).float()
            copies = [] if self.working is self.model else self.working_parameters
            self.optimizer.step_and_copy(copies, scale, found_inf)
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, most)
            if norm.isfinite() and some_finite:
                self.optimizer.step()
                self.refresh()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def refresh(self) -> None:
        """Write the whole working copy anew: after a step on the CPU, or after somebody else changed the weights."""
        if self.working is not self.model:
            with torch.no_grad():
                torch._foreach_copy_(list(self.working.parameters()), list(self.model.parameters()))

    def reset_optimizer(self) -> None:
        """Forget the moments: the next step starts Adam afresh."""
        self.optimizer.state.clear()

    def gradients(self, packs: Sequence[tuple[Sequence[Example], Objective]]) -> Iterator[GradientPart]:
        """Of each micro-batch: its share of the loss, entropy, mismatch, metrics and gradients. No weight moves."""

        def work(one: tuple[Sequence[Example], Objective]) -> GradientPart:
            examples, objective = one
            batch = pack(examples, objective.totals, self.device)
            forward = None if self.graphs is None else self.graphs.forward(Layout.of(examples))
            logprobs, entropy = self._forward(examples, with_entropy=True) if forward is None else forward[:2]
            value, metrics = objective.loss(logprobs, batch)
            distance = ((logprobs.detach() - batch.old) * batch.mask).abs()
            part = GradientPart(
                loss=value.detach(),
                entropy=(entropy * batch.mask).sum(),
                mismatch=distance.sum(),
                largest_mismatch=distance.max(),
                metrics={name: metric.detach() for name, metric in metrics.items()},
                gradients=[],
            )
            if forward is not None:
                forward.backward(*finite_slopes(value, [logprobs]))
                return part
            gradients = finite_gradients(value, [logprobs], self.working_parameters)
            if self.graphs is None:
                return part._replace(gradients=gradients)
            torch._foreach_add_(self.graphs.sums, gradients)
            return part

        if self.graphs is not None:
            self.graphs.begin()
        if self.workers == 1 or len(packs) == 1:
            yield from map(work, packs)
        else:
            with worker_pool(self.workers) as pool:
                yield from pool.map(work, packs)

    # --- forward -----------------------------------------------------------------------------------------------

    def logprobs(self, examples: Sequence[Example]) -> list[NDArray[np.float32]]:
        """Logprobs of the response tokens under the present weights, without gradients, in the order given."""
        packs = micro_batches(examples, self.config.token_budget)
        if not packs:
            return []
        with torch.no_grad():
            flat = torch.cat([self._forward(some, with_entropy=False)[0] for some in packs]).float().cpu().numpy()
        ordered = [example for some in packs for example in some]
        parts = np.split(flat, np.cumsum([len(example.response) for example in ordered])[:-1])
        result = {id(example): part.copy() for example, part in zip(ordered, parts, strict=True)}
        return [result[id(example)] for example in examples]

    def _forward(self, examples: Sequence[Example], with_entropy: bool) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of all response tokens of a pack, flat."""
        layout = Layout.of(examples)
        attend = PackedCausal(layout.lengths, self.device, layout.sequences)
        ids, readers, targets = (to_device(x, self.device) for x in (layout.ids, layout.readers, layout.targets))
        keep = not self.config.recompute
        return read_pack(
            self.working, self.temperature, with_entropy, keep, ids, attend.positions, attend, readers, targets
        )


def read_pack(
    model: Transformer,
    temperature: float,
    with_entropy: bool,
    keep_logits: bool,
    ids: Tensor,
    positions: Tensor,
    attend: Attend,
    readers: Tensor,
    targets: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logprobs of the targets and entropies, as predicted at the readers among the tokens."""
    hidden = model(ids, positions, attend).index_select(0, readers)
    return token_logprobs(hidden, model.head_weight, targets, temperature, with_entropy, keep_logits)


def transformers_in(model: nn.Module) -> list[Transformer]:
    return [module for module in model.modules() if isinstance(module, Transformer)]


def working_copy(model: Transformer) -> Transformer:
    """The same weights in bf16, to compute with. What stands around a transformer, such as a judge's head, stays."""
    twin = copy.deepcopy(model)
    for part in transformers_in(twin):
        part.to(torch.bfloat16)
    return twin


def finite_gradients(value: Tensor, outputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a loss that depends on the parameters through the outputs alone; zero if it is not finite.

    To ask on the host whether a loss is finite would be to wait for it. Instead its slope at the outputs, which are
    small, is replaced by zero on the device. What the network itself makes infinite stays so: it ends in the norm.
    """
    outputs = [output for output in outputs if output.requires_grad]
    slopes = finite_slopes(value, outputs)
    return list(torch.autograd.grad(outputs, parameters, slopes, materialize_grads=True))


def finite_slopes(value: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """∂value/∂output of each output; zero if the value is not finite."""
    slopes = torch.autograd.grad(value, outputs, materialize_grads=True)
    sound = value.detach().isfinite()
    return [torch.where(sound, slope, 0.0) for slope in slopes]


def add_in_fp32(total: list[Tensor] | None, parts: Sequence[Tensor]) -> list[Tensor]:
    """The sum of the gradients so far and those of one more micro-batch."""
    if total is not None:
        torch._foreach_add_(total, list(parts))
        return total
    if all(part.dtype == torch.float32 for part in parts):
        return list(parts)
    total = [torch.empty_like(part, dtype=torch.float32) for part in parts]
    torch._foreach_copy_(total, list(parts))
    return total


def read_numbers(parts: Sequence[GradientPart]) -> list[tuple[list[float], dict[str, float]]]:
    """The numbers of all parts, fetched from the device at once: loss, entropy, both mismatches; and the metrics."""
    numbers = [[*part[:4], *part.metrics.values()] for part in parts]
    if not numbers:
        return []
    values = iter(torch.stack([x.detach().double() for of_part in numbers for x in of_part]).tolist())
    return [([next(values) for _ in range(4)], {name: next(values) for name in part.metrics}) for part in parts]


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = True,
    keep_logits: bool = True,
) -> tuple[Tensor, Tensor]:
    """log π(target) and the entropy at each position, computing the logits of a bounded chunk at a time.

    The logits of a chunk are thrown away and computed again in the backward pass. Where there are kernels they do the
    same in fewer passes, and keep the logits if they may and there is room.
    """
    if uses_kernels(hidden) and hidden.dtype == head.dtype:
        return head_logprobs(hidden, head, targets, temperature, keep_logits)

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
