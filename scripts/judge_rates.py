"""Learning rates for the judges of `rm-scaling`, tried on validation problems: the test problems stay untouched.

    python scripts/judge_rates.py tiny-1m=1e-4,3e-4 tiny-0.3m=3e-4,1e-3 --scale cpu --jobs 2 --out runs/judge-rates

Each of these arms is trained with each of its rates for one epoch on the study's lists, and chooses among 8 of 64
answers to validation problems. A line for each: rm@8 over the epoch in percent, and the mean loss of its quarters.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from reasonlab.config import Config
from reasonlab.judges.types import read_pool
from reasonlab.runs import RunReader
from reasonlab.studies import rm_scaling
from reasonlab.studies.plan import Plan
from reasonlab.studies.recipe import StudyRecipe, StudySettings, study_recipe
from reasonlab.studies.rm_judges import POOL, TEST, TRAIN, judge_config, measure, read_measured
from reasonlab.studies.runner import Piece, run_pieces, train_judge


def tried(arm: str, config: Config, settings: StudySettings, out: Path) -> None:
    run, rate = out / "runs" / f"{arm} at {config.learner.lr:g}", config.learner.lr
    train_judge(judge_config(config, settings, out / "pools" / TRAIN), run, [])
    measure(run, out / "pools" / TEST, config.device, config.threads)
    panels = rm_scaling.panels_of(read_pool(out / "pools" / TEST / POOL))
    losses = np.array([row["train/loss"] for row in RunReader(run).metrics()])
    measured = read_measured(run)
    found = {
        "arm": arm,
        "rate": rate,
        "lists": measured[-1].lists,
        "rm@8": [round(100 * panels.average_of(one.rm[None]).estimate, 2) for one in measured],
        "loss": [round(float(part.mean()), 4) for part in np.array_split(losses, 4)],
        "majority@8": round(100 * panels.average_of(panels.majority[None]).estimate, 2),
        "one answer": round(100 * panels.average_of(panels.single[None]).estimate, 2),
    }
    keep(out / "rates.jsonl", found)


def keep(path: Path, found: Mapping[str, object]) -> None:
    """Add a line, once: what was finished before is found again when a killed script continues."""
    line = json.dumps(found)
    if not path.exists() or line not in path.read_text().splitlines():
        with path.open("a") as file:
            file.write(line + "\n")
    print(line, flush=True)


def on_device(arms: Mapping[str, Config], device: str | None) -> Mapping[str, Config]:
    return {arm: config.model_copy(update={"device": device}) for arm, config in arms.items()} if device else arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tries", nargs="+", metavar="ARM=RATE,…")
    parser.add_argument("--device", help="cpu or cuda; by default the recipe's")
    parser.add_argument("--scale", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--questions", type=int, default=240)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    recipe, out = study_recipe(rm_scaling.name, arguments.scale), arguments.out.resolve()
    changes = {"split": "validation", "questions": arguments.questions, "judge_checkpoints": 4}
    settings = recipe.settings.model_copy(update=changes)
    arms = on_device(recipe.arms, arguments.device)
    plan = Plan(rm_scaling.name, StudyRecipe(recipe.scale, arms, settings, {}), (0,), out, [])
    pools = [piece for piece in rm_scaling.pieces(plan) if piece.work not in (train_judge, measure)]
    ready = tuple(piece.name for piece in pools)
    work = []
    for arm, rates in (text.split("=") for text in arguments.tries):
        config = plan.config(arm, 0)
        for rate in map(float, rates.split(",")):
            learner = config.learner.model_copy(update={"lr": rate})
            one = config.model_copy(update={"learner": learner})
            work.append(Piece(f"{arm} at {rate:g}", tried, (arm, one, settings, out), ready))
    run_pieces([*pools, *work], arguments.jobs)


if __name__ == "__main__":
    main()
