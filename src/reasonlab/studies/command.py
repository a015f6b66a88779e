"""`reasonlab study`: run a study, draw its figures, judge the claims of its source."""

from __future__ import annotations

import argparse
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from reasonlab.config import Config, validate
from reasonlab.errors import UserError
from reasonlab.figures.record import BEGUN, VERDICTS
from reasonlab.hardware import prepare
from reasonlab.runs.files import write_aside
from reasonlab.studies import k15_dynamics, long2short, mel_vs_grpo, prm_selection, rm_scaling
from reasonlab.studies.answers import asks_tiny_world
from reasonlab.studies.plan import Plan
from reasonlab.studies.recipe import StudyRecipe, own_recipe, study_recipe
from reasonlab.studies.runner import first_difference, run_pieces
from reasonlab.studies.verdicts import record, table

STUDIES: dict[str, ModuleType] = {
    study.name: study for study in (k15_dynamics, long2short, mel_vs_grpo, rm_scaling, prm_selection)
}


NOT_THE_RECIPE = {"seed", "threads"}


def run(arguments: argparse.Namespace) -> int:
    recipe = _adjusted(
        own_recipe(arguments.recipe) if arguments.recipe else study_recipe(arguments.study, arguments.scale), arguments
    )
    study = STUDIES[arguments.study]
    if unknown := [arm for arm in recipe.arms if arm not in study.arms]:
        raise UserError(f"the study {arguments.study} has no arm {unknown[0]!r}", f"It has {', '.join(study.arms)}")
    if missing := [arm for arm in study.needed if arm not in recipe.arms]:
        raise UserError(f"the study {arguments.study} needs the arm {missing[0]}", "Add it to the recipe or to --arms")
    seeds = tuple(range(arguments.seed, arguments.seed + recipe.settings.seeds))
    scale = recipe.scale.removeprefix(f"{arguments.study}-")  # a recipe of one's own may name the study already
    out = arguments.out or Path("runs") / f"{arguments.study}-{scale}"
    command = ["study", *arguments.words]
    plan = Plan(arguments.study, recipe, seeds, out.resolve(), command)  # its models are named by where they lie
    if arguments.dry_run:
        if not recipe.about:  # which names models that are not here
            study.check(plan)
            if not all(map(asks_tiny_world, recipe.arms.values())):
                remedy = "Try it with few iterations; a run's memory is planned before its first step"
                raise UserError("how long a language model's answers will be is not known beforehand", remedy)
        from reasonlab.studies.estimate import estimate

        own = getattr(study, "estimate", None)  # of a study whose arms are not trained by the loop
        print(own(recipe) if own else estimate(arguments.study, recipe))
        return 0
    if recipe.about:
        raise UserError(
            f"the scale {recipe.scale} is a recipe for machines and models beyond this one",
            "Look at what it needs with --dry-run, and run --scale cpu or gpu here",
        )
    pieces = study.pieces(plan)
    chosen = arguments.device or arguments.recipe
    prepare(plan.device, "--device cpu" if chosen else "--scale cpu")  # a missing device is found before any writing
    keep_recipe(plan)
    try:
        run_pieces(pieces, arguments.jobs)
    except KeyboardInterrupt:
        print("\nsaved. The same command continues the study.")
        return 130
    found = study.found(plan)
    content = record(arguments.study, recipe.scale, seeds, shown(command), plan.device, found)
    write_aside(out / VERDICTS, (json.dumps(content, indent=1) + "\n").encode())
    from reasonlab.figures.redraw import redraw

    files = redraw(out, out)
    print(table(content))
    print(f"\n{out / VERDICTS}, tables and figures ({', '.join(f.name for f in files if f.suffix == '.png')})")
    return 0


def shown(command: Sequence[str]) -> str:
    """The command as it is typed."""
    return shlex.join(["reasonlab", *command])


def _adjusted(recipe: StudyRecipe, arguments: argparse.Namespace) -> StudyRecipe:
    """With the machine's settings from the command line laid over every arm, and only the arms and as many seeds as
    were asked for."""
    changes = {name: value for name in ("device", "threads") if (value := getattr(arguments, name)) is not None}
    changes |= {"data": arguments.data} if arguments.data else {}
    shared, count = Counter(config.model.path for config in recipe.arms.values()).most_common(1)[0]
    if arguments.model and count < min(2, len(recipe.arms)):
        raise UserError("--model takes the place of a model that arms share; here each has its own", "Write a --recipe")

    def adjusted(config: Config) -> Config:
        content = {**config.model_dump(mode="json"), **changes}
        if arguments.model and config.model.path == shared:  # an arm that names its own model keeps it
            content["model"] = {**content["model"], "path": arguments.model}
        return validate(content, "command line")

    arms = {name: adjusted(config) for name, config in recipe.arms.items()}
    if arguments.arms:
        wanted: Sequence[str] = [arm.strip() for arm in arguments.arms.split(",")]
        if unknown := [arm for arm in wanted if arm not in arms]:
            raise UserError(f"there is no arm {unknown[0]!r}", f"Choose from {', '.join(arms)}")
        arms = {arm: arms[arm] for arm in wanted}
    settings = recipe.settings.model_copy(update={"seeds": arguments.seeds or recipe.settings.seeds})
    return StudyRecipe(recipe.scale, arms, settings, recipe.about)


def keep_recipe(plan: Plan) -> None:
    """Samples and answers do not say what they were made with, so study.json does: another recipe is refused where a
    study was begun. Seeds and arms may be added. Its command is for whoever finds the study unfinished."""
    path = plan.out / BEGUN
    now: dict[str, Any] = {
        "name": plan.study,
        "study": plan.recipe.settings.model_dump(mode="json", exclude={"seeds"}),
        "arms": {
            arm: config.model_dump(mode="json", exclude=NOT_THE_RECIPE) for arm, config in plan.recipe.arms.items()
        },
    }
    before = json.loads(path.read_bytes()) if path.exists() else now
    before.pop("command", None)
    shared = {arm: config for arm, config in before["arms"].items() if arm in now["arms"]}
    if difference := first_difference({**before, "arms": shared}, now):
        raise UserError(f"the study in {plan.out} was begun with {difference}", "Choose another --out")
    content = {**now, "arms": {**before["arms"], **now["arms"]}, "command": shown(plan.command)}
    write_aside(path, (json.dumps(content, indent=1) + "\n").encode())
