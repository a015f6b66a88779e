"""What a study is asked to do, and what every study offers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from reasonlab.config import Config
from reasonlab.model.ladder import MODELS, bundled_models
from reasonlab.studies.recipe import StudyRecipe
from reasonlab.studies.runner import Piece
from reasonlab.studies.verdicts import Outcome


@dataclass(frozen=True, slots=True)
class Plan:
    """One study at one scale: its recipe, its seeds and where its results go."""

    study: str
    recipe: StudyRecipe
    seeds: tuple[int, ...]
    out: Path
    command: Sequence[str]

    def config(self, arm: str, seed: int) -> Config:
        return self.recipe.arms[arm].model_copy(update={"seed": seed})

    def run(self, arm: str, seed: int) -> Path:
        return self.out / "runs" / f"seed-{seed}" / arm

    @property
    def device(self) -> str:
        return next(iter(self.recipe.arms.values())).device


def base_pieces(models: Iterable[str], device: str) -> dict[str, Piece]:
    """For each rung of the ladder that does not ship: the piece that takes it from the cache or trains it."""
    missing = [model for model in dict.fromkeys(models) if model in MODELS and model not in bundled_models()]
    return {model: Piece(model, _make_base, (model, device)) for model in missing}


def _make_base(model: str, device: str) -> None:
    from reasonlab.train.pretrain import ladder_model  # with torch

    ladder_model(model, device)


class Study(Protocol):
    """`check` refuses a recipe that would fail later, `pieces` is the work, `found` reads what it left, writes the
    tables of the figures and judges the claims.

    Of its arms, a recipe must have those that are `needed`."""

    name: str
    arms: tuple[str, ...]
    needed: tuple[str, ...]

    def check(self, plan: Plan) -> None: ...
    def pieces(self, plan: Plan) -> list[Piece]: ...
    def found(self, plan: Plan) -> Outcome: ...
