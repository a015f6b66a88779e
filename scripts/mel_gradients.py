"""Which way do the two terms of Meta-Experience Learning pull? Their gradients at one checkpoint, compared.

python scripts/mel_gradients.py tiny-1m-misled --prompts 256 --batches 4

For each batch of problems three gradients: GRPO's, that of the NLL of kept reflections, and that of the NLL of true
worked solutions of other problems, which points to where both should lead. Printed are their norms and the mean cosines
over all pairs of different batches. The cosine of a gradient with itself on another batch says how much of it is not
noise; √(self · self) is the most that can be expected of two different ones.
"""

from __future__ import annotations

import argparse
from itertools import combinations_with_replacement
from random import Random

import numpy as np
import torch
from torch import Tensor

from reasonlab.config import validate
from reasonlab.methods import mel
from reasonlab.methods.sft import demonstration, sft_loss
from reasonlab.problems.families.steps import render
from reasonlab.problems.tiny_world import problem_set, solution_of
from reasonlab.terminal import make_observer
from reasonlab.train.batch import Totals, micro_batches
from reasonlab.train.learner import Learner, Objective
from reasonlab.train.loop import Trainer, on_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a bundled model or a checkpoint directory")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    config = validate(
        {
            "seed": arguments.seed,
            "device": arguments.device,
            "model": {"path": arguments.model},
            "rollout": {"prompts": arguments.prompts},
            "method": {"type": "grpo"},
            "mel": {"weight": 1.0},
        },
        "mel_gradients",
    )
    found: dict[str, list[Tensor]] = {"GRPO": [], "reflections": [], "true solutions": []}
    with make_observer(arguments.batches, "gradients") as observer:
        trainer = Trainer(config, observer)
        for number in range(1, arguments.batches + 1):
            for name, values in gradients(trainer, number).items():
                found[name].append(values)
    for name, batches in found.items():
        print(f"norm of {name}: {', '.join(f'{float(values.norm()):.3g}' for values in batches)}")
    for one, other in combinations_with_replacement(found, 2):
        cosines = [
            float(torch.nn.functional.cosine_similarity(a, b, dim=0))
            for i, a in enumerate(found[one])
            for j, b in enumerate(found[other])
            if (i < j if one == other else i != j)
        ]
        print(f"cosine of {one} and {other}: {np.mean(cosines):+.4f} ± {np.std(cosines):.4f} over {len(cosines)} pairs")


def gradients(trainer: Trainer, number: int) -> dict[str, Tensor]:
    """The three gradients of a batch, each on problems of its own number."""
    groups = trainer.source.groups(number)
    experiences = trainer.reflections.on(number, groups)
    kept = mel.internalised(trainer.config.mel, experiences, len(groups))
    if kept is None:
        raise SystemExit("no reflection was kept: take more --prompts")
    counts = f"{len(groups)} problems, {len(experiences)} mixed, {len(kept[0])} reflections kept"
    print(f"batch {number}: {counts}", flush=True)
    examples = trainer.method.examples(groups)
    useful = [e for e in examples if e.advantage != 0]
    truth = [
        demonstration(
            trainer.exchange.prompt(problem).ids,
            trainer.exchange.response_ids(render(solution_of(problem), "worked", Random(0))),
        )
        for problem in problem_set("validation", 512, number, levels=(2, 3, 4, 5))
    ]
    return {
        "GRPO": gradient(trainer.learner, Objective(useful, on_policy(trainer.method.loss), Totals.of(examples))),
        "reflections": gradient(trainer.learner, Objective(kept[0], mel.nll, kept[1])),
        "true solutions": gradient(trainer.learner, Objective(truth, sft_loss, Totals.of(truth))),
    }


def gradient(learner: Learner, objective: Objective) -> Tensor:
    """Of one objective, flat; the weights stay as they are."""
    packs = micro_batches(objective.examples, learner.config.token_budget)
    total = None
    for *_, parts in learner.gradients([(examples, objective) for examples in packs]):
        flat = torch.cat([part.flatten() for part in parts]).cpu()
        total = flat if total is None else total + flat
    assert total is not None
    return total


if __name__ == "__main__":
    main()
