"""What judges minimise. Pure functions of logits and targets; every sum is divided by a count of the whole step.

r is the logit of a response (an outcome judge's score), σ the logistic function, y ∈ {0, 1} whether it is right.

    list-wise     (1/P) Σ_problems −1/(k(n−k)) Σ_right Σ_wrong log σ(r⁺ − r⁻)
    pair-wise     the same with one right and one wrong response drawn for each problem: −(1/P) Σ log σ(r⁺ − r⁻)
    cross-entropy −(1/N) Σ_responses y log σ(r) + (1−y) log σ(−r)
    squared error (1/N) Σ_responses (r − y)²

For process judges ŝ_t = σ(logit) at the end of step t and ŝ at the end of the whole, with targets s_t and s:

    squared error (1/N) Σ_responses λ_step (1/T) Σ_t (ŝ_t − s_t)² + λ_final (ŝ − s)²
    cross-entropy λ_step (1/S) Σ_steps CE(s_t, ŝ_t) + λ_final (1/N) Σ_responses CE(s, ŝ), where s_t ∈ {0, 1} and only
                  the steps up to the first wrong one count: nobody knows what a step after it is worth

P problems, N responses and S counted steps are those of the whole optimizer step (`JudgeTotals`), however it is cut
into micro-batches. A response without a target for the whole adds nothing to that term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from reasonlab.train.batch import Totals

Metrics = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class JudgeTotals(Totals):
    """Counts over one optimizer step. `tokens` are those at which counted steps are read, `sequences` responses."""

    lists: int = 1


@dataclass(slots=True)
class Targets:
    """What the responses of a micro-batch should score."""

    steps: Tensor  # [steps], one for each step of each response
    counted: Tensor  # [steps], 1 for the steps that enter the loss
    owner: Tensor  # [steps], which response a step belongs to
    finals: Tensor  # [responses]; outcome judges: 1 for right, 0 for wrong
    has_final: Tensor  # [responses], 1 where there is a target for the whole
    lists: Tensor  # [responses], which list a response belongs to
    totals: JudgeTotals


JudgeLoss = Callable[[Tensor, Tensor, Targets], tuple[Tensor, Metrics]]  # logits of steps, of responses; targets


def bradley_terry(steps: Tensor, finals: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
    """List-wise; a list of one right and one wrong response is pair-wise. A list must lie in one micro-batch."""
    right = targets.finals > 0.5
    same = targets.lists[:, None] == targets.lists[None, :]
    better, worse = (same & right[:, None] & ~right[None, :]).nonzero(as_tuple=True)
    pairs = (same & right[:, None]).sum(0) * (same & ~right[:, None]).sum(0)  # k(n − k) of each response's list
    weight = 1 / (pairs[better] * targets.totals.lists)
    margin = finals[better] - finals[worse]
    detached = margin.detach()
    metrics = {"pair_accuracy": (weight * (detached > 0)).sum(), "margin": (weight * detached).sum()}
    return -(weight * F.logsigmoid(margin)).sum(), metrics


def outcome_cross_entropy(steps: Tensor, finals: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
    total = F.binary_cross_entropy_with_logits(finals, targets.finals, reduction="sum")
    return total / targets.totals.sequences, _accuracy(finals, targets, 0.0)


def outcome_squared_error(steps: Tensor, finals: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
    return (finals - targets.finals).square().sum() / targets.totals.sequences, _accuracy(finals, targets, 0.5)


def process_squared_error(of_step: float = 1.0, of_final: float = 1.0) -> JudgeLoss:
    def loss(steps: Tensor, finals: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
        responses = targets.totals.sequences
        squares = (steps.sigmoid() - targets.steps).square() * targets.counted
        count = torch.zeros_like(finals).index_add(0, targets.owner, targets.counted).clamp(min=1)
        step_part = (squares / count[targets.owner]).sum() / responses
        final_part = ((finals.sigmoid() - targets.finals).square() * targets.has_final).sum() / responses
        metrics = {"step_error": step_part.detach(), "final_error": final_part.detach()}
        return of_step * step_part + of_final * final_part, metrics

    return loss


def process_cross_entropy(of_step: float = 1.0, of_final: float = 1.0) -> JudgeLoss:
    def loss(steps: Tensor, finals: Tensor, targets: Targets) -> tuple[Tensor, Metrics]:
        each = F.binary_cross_entropy_with_logits(steps, targets.steps, reduction="none")
        whole = F.binary_cross_entropy_with_logits(finals, targets.finals, reduction="none")
        step_part = (each * targets.counted).sum() / targets.totals.tokens
        final_part = (whole * targets.has_final).sum() / targets.totals.sequences
        agree = ((steps.detach() > 0) == (targets.steps > 0.5)) * targets.counted
        metrics = {
            "step_loss": step_part.detach(),
            "final_loss": final_part.detach(),
            "step_accuracy": agree.sum() / targets.totals.tokens,
        }
        return of_step * step_part + of_final * final_part, metrics

    return loss


def until_first_wrong(labels: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which of a response's hard step labels count: all up to and including the first 0."""
    wrong = np.flatnonzero(labels == 0)
    return np.arange(len(labels)) <= (wrong[0] if len(wrong) else len(labels))


def _accuracy(finals: Tensor, targets: Targets, border: float) -> Metrics:
    agree = (finals.detach() > border) == (targets.finals > 0.5)
    return {"accuracy": agree.sum() / targets.totals.sequences}
