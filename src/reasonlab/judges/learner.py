"""Gradients of judges: the learner of policies with another forward pass.

Micro-batches, threads, the order of sums, clipping, AdamW and the learning rate are those of `train/learner.py`; here
is what a judge's example is and how a micro-batch of them becomes a loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from reasonlab.config import LearnerConfig
from reasonlab.hardware import worker_pool
from reasonlab.judges.formats import Encoded
from reasonlab.judges.losses import JudgeLoss, JudgeTotals, Targets
from reasonlab.judges.network import JudgeModel, Pack, common_beginning
from reasonlab.model.attention import to_device
from reasonlab.model.transformer import Transformer
from reasonlab.train.batch import Example
from reasonlab.train.learner import GradientPart, Learner, Loss, Objective, StepResult, finite_gradients


@dataclass(slots=True, kw_only=True)
class JudgedExample(Example):
    """One response and what it should score. Of an `Example` it has the tokens, for packing.

    `mask` says which steps enter the loss; `pair` is the number of its list, which shares a micro-batch.
    """

    encoded: Encoded
    steps: NDArray[np.float32]  # a target for each step
    final: float | None  # and for the whole


def judged(
    encoded: Encoded, final: float | None, steps: Sequence[float] = (), counted: NDArray[np.bool_] | None = None
) -> JudgedExample:
    """An example by itself: the response to a question."""
    return _example(encoded, encoded.prompt, -1, np.array(steps, np.float32), counted, final)


def judged_list(encoded: Sequence[Encoded], correct: Sequence[bool], number: int) -> list[JudgedExample]:
    """The responses of a list, which stay together because packing keeps the examples of one prompt together.

    So all of them get the same prompt, the beginning they have in common: the question, whatever tokens straddle its
    end in some of them.
    """
    common = min(common_beginning(encoded[0].ids, one.ids) for one in encoded)
    none = np.zeros(0, np.float32)
    return [
        _example(one, common, number, none, None, float(right)) for one, right in zip(encoded, correct, strict=True)
    ]


def _example(
    encoded: Encoded,
    prompt: int,
    number: int,
    steps: NDArray[np.float32],
    counted: NDArray[np.bool_] | None,
    final: float | None,
) -> JudgedExample:
    if len(steps) != len(encoded.steps):
        raise ValueError(f"{len(steps)} labels for {len(encoded.steps)} steps")
    return JudgedExample(
        prompt=encoded.ids[:prompt],
        response=encoded.ids[prompt:],
        logprobs=np.zeros(0, np.float32),
        mask=np.ones(len(steps), bool) if counted is None else counted,
        pair=number,
        encoded=encoded,
        steps=steps,
        final=final,
    )


def totals_of(examples: Sequence[JudgedExample]) -> JudgeTotals:
    """The only denominators of an optimizer step on these examples."""
    counted = sum(int(e.mask.sum()) for e in examples)
    return JudgeTotals(max(1, counted), max(1, len(examples)), max(1, len({e.pair for e in examples})))


class JudgeLearner(Learner):
    def __init__(self, judge: JudgeModel, config: LearnerConfig, workers: int = 1) -> None:
        # Of its model the learner's constructor asks for the parameters and their device; the rest is below.
        super().__init__(cast(Transformer, judge), config, workers)
        self.judge = judge

    def learn(self, examples: Sequence[JudgedExample], loss: JudgeLoss) -> StepResult:
        """One optimizer step."""
        return self.step_on([Objective(examples, cast(Loss, loss), totals_of(examples))])

    def gradients(self, packs: Sequence[tuple[Sequence[Example], Objective]]) -> Iterator[GradientPart]:
        def work(one: tuple[Sequence[Example], Objective]) -> GradientPart:
            # Sorted by their tokens, responses that begin alike are neighbours, which a pack computes once.
            examples = sorted(cast(Sequence[JudgedExample], one[0]), key=lambda e: e.encoded.ids.tobytes())
            loss, totals = cast(JudgeLoss, one[1].loss), cast(JudgeTotals, one[1].totals)
            steps, finals = self.working(Pack.of([e.encoded for e in examples]))
            value, metrics = loss(steps, finals, targets_of(examples, totals, self.device))
            gradients = finite_gradients(value, [steps, finals], self.working_parameters)
            nothing = torch.zeros((), device=self.device)
            return GradientPart(value.detach(), nothing, nothing, nothing, metrics, gradients)

        if self.workers == 1 or len(packs) == 1:
            yield from map(work, packs)
        else:
            with worker_pool(self.workers) as pool:
                yield from pool.map(work, packs)


def targets_of(examples: Sequence[JudgedExample], totals: JudgeTotals, device: torch.device | str) -> Targets:
    numbers = np.unique([e.pair for e in examples], return_inverse=True)[1]
    owner = np.repeat(np.arange(len(examples)), [len(e.steps) for e in examples])

    def flat(arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.float32]:
        return np.concatenate([np.zeros(0, np.float32), *arrays], dtype=np.float32)

    def tensor(array: NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, device)

    return Targets(
        steps=tensor(flat([e.steps for e in examples])),
        counted=tensor(flat([e.mask for e in examples])),
        owner=tensor(owner),
        finals=tensor(np.array([e.final or 0.0 for e in examples], np.float32)),
        has_final=tensor(np.array([e.final is not None for e in examples], np.float32)),
        lists=tensor(numbers),
        totals=totals,
    )
