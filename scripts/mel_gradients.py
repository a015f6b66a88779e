"""Which way do the two terms of Meta-Experience Learning pull? Their gradients at one checkpoint, compared.

python scripts/mel_gradients.py tiny-1m-misled --prompts 256

Prints the norms of three gradients and the cosines between them: GRPO's, that of the NLL of kept reflections, and that
of the NLL of true worked solutions of other problems, which points to where both should lead.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from random import Random

import torch
from torch import Tensor

from reasonlab.config import validate
from reasonlab.methods import mel
from reasonlab.methods.sft import demonstration, sft_loss
from reasonlab.problems.corpus import prompt_text
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
    with make_observer(1, "gradients") as observer:
        trainer = Trainer(config, observer)
        groups = trainer.source.groups(1)
        experiences = trainer.reflections.on(1, groups)
    kept = mel.internalised(config.mel, experiences, len(groups))
    if kept is None:
        raise SystemExit("no reflection was kept: take more --prompts")
    examples = trainer.method.examples(groups)
    useful = [e for e in examples if e.advantage != 0]
    truth = [
        demonstration(
            trainer.tokenizer.encode(prompt_text(problem.question)),
            trainer.tokenizer.encode(render(solution_of(problem), "worked", Random(0)) + "<eos>"),
        )
        for problem in problem_set("validation", 512, 0, levels=(2, 3, 4, 5))
    ]
    gradients = {
        "GRPO": gradient(trainer.learner, Objective(useful, on_policy(trainer.method.loss), Totals.of(examples))),
        "reflections": gradient(trainer.learner, Objective(kept[0], mel.nll, kept[1])),
        "true solutions": gradient(trainer.learner, Objective(truth, sft_loss, Totals.of(truth))),
    }
    helped = sum(one.helped for one in experiences)
    print(f"{len(groups)} problems, {len(experiences)} mixed, {helped} reflections kept")
    for name, values in gradients.items():
        print(f"norm of {name}: {float(values.norm()):.4g}")
    for one, other in combinations(gradients, 2):
        cosine = torch.nn.functional.cosine_similarity(gradients[one], gradients[other], dim=0)
        print(f"cosine of {one} and {other}: {float(cosine):+.4f}")


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
