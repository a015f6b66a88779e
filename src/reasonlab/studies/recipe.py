"""Study recipes: one TOML file a study and scale. A training recipe, what each arm changes in it, and the study's own
settings:

    iterations = 60            # the recipe that all arms share
    [method]
    type = "mirror_descent"

    [arms.rest.method]         # an arm lays its keys over it; a method of another type takes the place of the first
    type = "rest"

    [study]                    # seeds, and what the study samples and evaluates outside its runs
    seeds = 3
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, ValidationError

from reasonlab.config import Config, Section, validate
from reasonlab.errors import UserError

SCALES = ("cpu", "gpu", "paper")


class Writer(Section):
    """A policy that writes candidates for judges (rm-scaling, prm-selection)."""

    model: str
    temperature: float = Field(default=1.0, gt=0)
    thinking: bool = False
    """Whether it is made to think before it answers."""


class StudySettings(Section):
    seeds: int = Field(default=1, ge=1)
    questions: int = Field(default=480, ge=1)
    """Test problems every finished model answers (long2short, mel-vs-grpo)."""
    samples: int = Field(default=2, ge=1)
    """Answers to each of them."""
    temperature: float = Field(default=1.0, ge=0)
    """Of these answers."""
    split: Literal["validation", "test"] = "test"
    warmup_problems: int = Field(default=512, ge=1)
    """Training problems sampled for the long-CoT warm-up."""
    warmup_samples: int = Field(default=8, ge=1)
    sampled_problems: int = Field(default=512, ge=1)
    """Training problems sampled for shortest rejection sampling and DPO."""
    sampled_answers: int = Field(default=8, ge=2)
    """n of shortest rejection sampling; the report has 8."""
    pairs: int = Field(default=4, ge=1)
    """Preference pairs of one problem at most."""
    long_model: str = ""
    """A model that thinks long already, to shorten in place of one trained by the study (long2short)."""
    merge_weight: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the long model in the merge; the report averages."""

    # rm-scaling: judges learn from lists of 6 candidates for one of `sampled_problems` training problems, and choose
    # among `samples` candidates by each writer for each of `questions` test problems.
    writers: tuple[Writer, ...] = ()
    list_answers: int = Field(default=2, ge=1)
    """Candidates for a training problem by each writer."""
    list_batch: int = Field(default=16, ge=1)
    """Lists in one optimizer step of a judge."""
    judge_checkpoints: int = Field(default=10, ge=2)
    """Points of the epoch at which a judge is measured."""
    sorter: str = ""
    """The directory of another judge, whose scores switch on score-sorted sampling of the lists."""

    # prm-selection: the `writers` take turns with the problems, a trace for each; judges choose what students learn.
    pool: int = Field(default=4608, ge=1)
    """Traces to choose from; the source has 59k."""
    judge_traces: int = Field(default=4608, ge=1)
    """Traces of other problems that the judges learn from."""
    selected: tuple[int, ...] = Field(default=(250, 1000, 2000), min_length=1)
    """How many traces students learn from, rising; the source has 1,000, 5,000 and 10,000."""
    per_family: Literal["any", "even"] = "any"
    """Whether families share a selection evenly; the source says nothing of it."""
    judge_models: tuple[str, str] = ("tiny-0.3m", "tiny-1m")
    """The smaller and the larger judge."""
    judge_batch: int = Field(default=32, ge=1)
    judge_epochs: int = Field(default=2, ge=1)
    judge_lr: tuple[PositiveFloat, PositiveFloat] = (5e-4, 5e-4)
    """Of the smaller and of the larger judge."""
    completions: int = Field(default=2, ge=1)
    """Answers that follow a trace's strategy, and completions from each step, for the targets of judges."""
    best_of: int = Field(default=16, ge=2)
    """Answers that judges pick the best of."""
    best_of_questions: int = Field(default=160, ge=2)
    rl_seeds: int = Field(default=1, ge=1)
    """Of the arms with a judge's reward."""


@dataclass(frozen=True, slots=True)
class StudyRecipe:
    scale: str
    arms: Mapping[str, Config]
    settings: StudySettings
    about: Mapping[str, Any]  # for `paper`: the real model and data, and what they need; see `estimate.py`


def study_recipe(study: str, scale: str) -> StudyRecipe:
    """The packaged recipe of a study at a scale."""
    name = f"{study}.{scale}.toml"
    text = (files("reasonlab.studies") / "recipes" / name).read_text(encoding="utf-8")
    return parse_study(text, scale, name)


def own_recipe(path: Path) -> StudyRecipe:
    """A recipe of the user's."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the study recipe {path} cannot be read ({error})", "Give the path of a TOML file") from None
    return parse_study(text, path.stem, str(path))


def parse_study(text: str, scale: str, source: str) -> StudyRecipe:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source} is not valid TOML: {error}", "Mend the line it names") from None
    arms, settings, about = (raw.pop(name, {}) for name in ("arms", "study", "about"))
    if not isinstance(arms, dict) or not arms:
        raise UserError(f"{source} names no arms", "Add a table such as [arms.NAME] for each arm of the study")
    if wrong := [name for name, arm in arms.items() if not isinstance(arm, dict)]:
        raise UserError(f"{source}: the arm {wrong[0]} is no table", f"Write [arms.{wrong[0]}] and its keys below")
    try:
        checked = StudySettings.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, ("study", *first["loc"])))
        raise UserError(
            f"{source}: {name}: {first['msg']}", f"Known: {', '.join(StudySettings.model_fields)}"
        ) from None
    configs = {name: validate(_laid_over(raw, arm), f"{source}, arm {name}") for name, arm in arms.items()}
    return StudyRecipe(scale, configs, checked, about)


def _laid_over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in changes.items():
        below = result.get(name)
        if isinstance(value, dict) and isinstance(below, dict) and value.get("type") in (None, below.get("type")):
            result[name] = _laid_over(below, value)
        else:
            result[name] = value
    return result
