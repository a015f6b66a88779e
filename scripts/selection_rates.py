"""Learning rates for the judges and the students of `prm-selection`. Nothing here looks at test problems, nor at which
traces of the pool are right.

    python scripts/selection_rates.py judges --scale cpu --rates 1e-4,3e-4,1e-3 --jobs 2 --out runs/selection-rates
    python scripts/selection_rates.py students --scale cpu --rates 1e-4,3e-4 --jobs 2 --out runs/selection-rates

Judges learn from nine tenths of the labelled traces and rank the others: AUC of right against wrong ones, and how many
of the best-scored twentieth are right. Students learn from every set of the study and answer validation problems. One
rate serves all sets, and the best mean over them favours none: bad traces alone would ask for a rate that hardly
learns, curated ones for a rate that forgives no mistake. A line for each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from judge_rates import keep, on_device

from reasonlab.config import Config
from reasonlab.judges.scoring import ModelJudge
from reasonlab.judges.types import read_labels, write_labels
from reasonlab.studies import prm_judges, prm_selection
from reasonlab.studies.answers import answer, answers_file, final, read_answers
from reasonlab.studies.plan import Plan
from reasonlab.studies.prm_judges import JudgeName, judge_directory, labels_file
from reasonlab.studies.prm_selection import STUDENT, Set, on_data, set_file, sets_of
from reasonlab.studies.recipe import StudyRecipe, StudySettings, study_recipe
from reasonlab.studies.runner import Piece, run_pieces, train


def auc(scores: np.ndarray, right: np.ndarray) -> float:
    """The chance that a right one scores higher than a wrong one; equal scores count half."""
    above = scores[right][:, None] - scores[~right][None]
    return float((above > 0).mean() + 0.5 * (above == 0).mean())


def split(kind: str, root: Path, out: Path) -> None:
    labelled = read_labels(labels_file(root, kind))
    write_labels(labels_file(out, kind), [one for place, one in enumerate(labelled) if place % 10])
    write_labels(labels_file(out / "held out", kind), labelled[::10])


def try_judge(judge: JudgeName, rate: float, config: Config, settings: StudySettings, root: Path) -> None:
    out = root / "judges at" / f"{rate:g}" / str(judge)
    split(judge.kind, root, out)
    prm_judges.train_judge(judge, config, settings.model_copy(update={"judge_lr": (rate, rate)}), out, [])
    traces = [one.candidate for one in read_labels(labels_file(out / "held out", judge.kind))]
    scored = ModelJudge.open(judge_directory(out, judge), config.device, config.threads).score(traces)
    scores = np.array([prm_judges.overall(judge, one) for one in scored])
    right = np.array([bool(one.correct) for one in traces])
    best = np.argsort(-scores, kind="stable")[: max(1, len(traces) // 20)]
    found = {"judge": str(judge), "rate": rate, "traces": len(traces), "right": round(float(right.mean()), 4)}
    keep(
        root / "rates.jsonl",
        {**found, "auc": round(auc(scores, right), 4), "right of the best": round(float(right[best].mean()), 4)},
    )


def try_student(chosen: Set, rate: float, config: Config, settings: StudySettings, plan: Plan) -> None:
    run = plan.out / "students at" / f"{rate:g}" / str(chosen)
    learner = config.learner.model_copy(update={"lr": rate})
    fitted = on_data(config.model_copy(update={"learner": learner}), set_file(plan.run("", 0), chosen))
    train(fitted, run, [])
    where = answers_file(run / "validation", str(chosen))
    answer(str(final(run)), fitted, settings, where, "")
    right = [one.verdict == "correct" for one in read_answers(where)]
    keep(
        plan.out / "rates.jsonl", {"student on": str(chosen), "rate": rate, "accuracy": round(float(np.mean(right)), 4)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("judges", "students"))
    parser.add_argument("--scale", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--device", help="cpu or cuda; by default the recipe's")
    parser.add_argument("--rates", default="1e-4,3e-4,1e-3")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    recipe, out = study_recipe(prm_selection.name, arguments.scale), arguments.out.resolve()
    settings = recipe.settings.model_copy(update={"split": "validation"})
    arms = on_device(recipe.arms, arguments.device)
    plan = Plan(prm_selection.name, StudyRecipe(recipe.scale, arms, settings, {}), (0,), out, [])
    config, rates = plan.config(STUDENT, 0), [float(rate) for rate in arguments.rates.split(",")]
    study = {piece.name: piece for piece in prm_selection.pieces(plan)}
    if arguments.what == "judges":
        tried = [one for one in prm_judges.judges_of(settings) if one.trained == one]
        needed = [f"labels for {one.kind}" for one in tried]
        work = [
            Piece(f"{one} at {rate:g}", try_judge, (one, rate, config, settings, out), (f"labels for {one.kind}",))
            for one in tried
            for rate in rates
        ]
    else:
        needed = ["sets 0"]
        work = [
            Piece(f"{one} at {rate:g}", try_student, (one, rate, config, settings, plan), ("sets 0",))
            for one in sets_of(settings)
            for rate in rates
        ]
    ready: list[str] = []
    while needed:  # what the study does before, and what that needs
        name = needed.pop()
        ready.append(name)
        needed += [other for other in study[name].needs if other not in ready]
    run_pieces([*(piece for piece in study.values() if piece.name in ready), *work], arguments.jobs)


if __name__ == "__main__":
    main()
