"""Every setting of a judge's training, with its default and its limits. Imports nothing heavy."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, ValidationError, model_validator

from reasonlab.config import Config, Section, override_pairs, override_value, to_toml
from reasonlab.errors import UserError

LOSSES: dict[str, tuple[str, ...]] = {"outcome": ("list_bt", "pair_bt", "ce", "mse"), "process": ("ce", "mse")}


class JudgeConfig(Section):
    model: str = "tiny-1m"
    """The backbone: a bundled model's name, a Hugging Face checkpoint directory or a GGUF file."""
    kind: Literal["outcome", "process"] = "outcome"
    loss: Literal["list_bt", "pair_bt", "ce", "mse"] = "list_bt"
    """Bradley–Terry on whole lists or on one drawn pair a problem, cross-entropy, squared error (`losses.py`)."""
    data: str = ""
    """A graded pool or evaluation for outcome judges, JSON lines with `step_labels` for process judges (`types.py`)."""
    scores: str = ""
    """Scores of another judge for the pool: switches on score-sorted sampling of the lists (`lists.py`)."""
    steps: Literal["auto", "tiny", "blank_line", "newline"] = "auto"
    """Where a process judge's steps end; auto: as in the tiny world for its models, else at blank lines."""
    list_size: int = Field(default=6, ge=2)
    top: int = Field(default=14, ge=1)
    """Of score-sorted sampling: right responses come from so many best-scored, wrong ones from so many worst-scored."""
    shared_steps: Literal["each", "once"] = "each"
    """Of process judges: a step that several responses begin with alike counts in each of them, or in the first only
    (data that branch from a common beginning at every step, as PRM800K's do, would else repeat its labels)."""
    step_weight: float = Field(default=1.0, ge=0)
    final_weight: float = Field(default=1.0, ge=0)
    """λ_step and λ_final of process judges."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What to do with responses beyond the model's positions; dropping is counted and reported."""
    batch: int = Field(default=32, ge=1)
    """Lists (outcome) or responses (process) in one optimizer step."""
    epochs: int = Field(default=1, ge=1)
    checkpoints: int = Field(default=10, ge=1)
    """Kept at equal fractions of the training; the last is its end."""
    lr: float = Field(default=3e-4, gt=0)
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps with a rising learning rate; then it falls as a cosine."""
    final_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_grad_norm: float = Field(default=1.0, gt=0)
    token_budget: int = Field(default=4096, ge=1)
    """Tokens in one micro-batch. Gradients do not depend on it; a list is never split."""
    bfloat16: bool = True
    """On CUDA: bf16 autocast for the arithmetic; weights and optimizer stay fp32."""
    seed: int = 0
    """Of the new head, the drawn lists and pairs, and the order of the epoch."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = Field(default=2, ge=1)
    """CPU worker threads; each computes single-threaded."""

    @model_validator(mode="after")
    def _fitting(self) -> JudgeConfig:
        if self.loss not in LOSSES[self.kind]:
            raise ValueError(f"{self.kind} judges learn with {' or '.join(LOSSES[self.kind])}, not {self.loss}")
        if self.scores and self.kind == "process":
            raise ValueError("scores are for the lists of outcome judges")
        return self


def judge_config(raw: Mapping[str, Any], source: str) -> JudgeConfig:
    """Check settings from a recipe or a command line; the first mistake becomes one line that says what to do."""
    try:
        return JudgeConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        name, remedy = ".".join(map(str, first["loc"])), f"The keys are {', '.join(JudgeConfig.model_fields)}"
        if first["type"] != "extra_forbidden":
            text = f"{name}: {first['msg']} (got {first['input']!r})" if name else first["msg"]
            raise UserError(f"{source}: {text.replace('Value error, ', '')}", "Mend it and start again") from None
        if near := difflib.get_close_matches(name, JudgeConfig.model_fields, 1):
            remedy = f"Perhaps you meant {near[0]!r}"
        raise UserError(f"{source}: unknown key {name!r}", remedy) from None


def overridden(config: JudgeConfig, words: Sequence[str]) -> JudgeConfig:
    """Lay `--lr 1e-4` or `--lr=1e-4` over the settings. A kind brings its own first loss, unless one is named."""
    named = {name: override_value(text) for name, text in override_pairs(words)}
    raw = {**config.model_dump(mode="json"), **named}
    if "kind" in named and "loss" not in named and raw["loss"] not in LOSSES.get(raw["kind"], (raw["loss"],)):
        raw["loss"] = LOSSES[raw["kind"]][0]
    return judge_config(raw, "command line")


def described() -> str:
    """All keys with their defaults, one line each, for `--help`."""
    return "\n".join(f"  {name:<18} {value}" for name, value in JudgeConfig().model_dump(mode="json").items())


def load_judge_recipe(path: Path) -> JudgeConfig:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} cannot be read ({error})", "Give a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}", "Mend the line it names") from None
    return judge_config(raw, str(path))


def judge_toml(config: JudgeConfig) -> str:
    """The resolved settings as a recipe that loads again."""
    return to_toml(cast(Config, config))  # which writes the keys of any section
