"""Estimates of `study --dry-run` for the tests: by arm, and for recipes with a setting or an assumption changed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from reasonlab.studies.estimate import ArmEstimate, Branch, estimates
from reasonlab.studies.footprint import Memory
from reasonlab.studies.recipe import StudyRecipe

MEL = "mel-vs-grpo"
SEVEN, THIRTY_TWO = "models/Qwen2.5-7B-Instruct", "models/Qwen2.5-32B-Instruct"
EIGHT = "models/Qwen3-8B-Base"
ROOT = Path(__file__).parents[1]


def by_arm(study: str, recipe: StudyRecipe) -> dict[str, ArmEstimate]:
    return {row.arm: row for row in estimates(study, recipe)}


def memory_of(row: ArmEstimate) -> Memory:
    assert row.memory is not None
    return row.memory


def branch_of(row: ArmEstimate) -> Branch:
    assert row.branch is not None
    return row.branch


def changed(recipe: StudyRecipe, path: str, value: Any) -> StudyRecipe:
    """The recipe with one key of its [about] table set, named `table|key`; None removes it."""
    about = copy.deepcopy(dict(recipe.about))
    *tables, last = path.split("|")
    table: Any = about
    for name in tables:
        table = table[name]
    if value is None:
        del table[last]
    else:
        table[last] = value
    return replace(recipe, about=about)


def configured(recipe: StudyRecipe, section: str, **changes: Any) -> StudyRecipe:
    """The recipe with keys of one section changed in every arm."""
    arms = {
        name: config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})
        for name, config in recipe.arms.items()
    }
    return replace(recipe, arms=arms)
