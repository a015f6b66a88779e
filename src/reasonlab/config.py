"""Every setting of a training run, with its default, its meaning and its limits. Imports nothing heavy.

A recipe is a TOML file with these keys; unknown keys are errors that name the nearest known one. `load_recipe` reads
one, `apply_overrides` lays dotted command-line overrides over it, `to_toml` writes the resolved configuration.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reasonlab.errors import UserError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    path: str = "tiny-1m"
    """A bundled model's name, a Hugging Face checkpoint directory or a GGUF file."""
    template_arguments: dict[str, bool | int | float | str] = {}
    """For the chat template of a language model, for instance { enable_thinking = false }."""
    lora_rank: int = Field(default=0, ge=0)
    """Train LoRA adapters of this rank on every projection, and nothing else (0: train all weights)."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """Adapters are scaled by alpha / rank."""


class ProblemsConfig(Section):
    """Which problems to train on."""

    families: tuple[str, ...] = ()
    """Families of the tiny world; none named means all."""
    levels: tuple[int, ...] = (2, 3, 4, 5)
    pool: int = Field(default=4096, ge=1)
    """How many distinct training problems to draw from."""
    path: str = ""
    """A JSON-lines file, such as `reasonlab data curate` writes, or a registered training set (`gsm8k_train`); it takes
    the place of families, levels and pool."""
    longest_prompt: int = Field(default=0, ge=0)
    """Leave out problems whose prompt has more tokens: one long prompt makes the cache of all rows long (0: none)."""
    sampling: Literal["uniform", "prioritised"] = "uniform"
    """Prioritised: in proportion to 1 − the problem's running success rate."""
    curriculum_from: int = Field(default=0, ge=0)
    """From this iteration on only hard problems (0: all problems, always)."""
    hard_level: int = 4
    """A problem is hard from this level on, or, in a curated set, at or below the pass rate that follows."""
    hard_pass_rate: float = Field(default=0.5, ge=0, le=1)


class RolloutConfig(Section):
    prompts: int = Field(default=32, ge=1)
    """Problems in each iteration."""
    samples: int = Field(default=8, ge=1)
    """Rollouts of each problem."""
    max_tokens: int = Field(default=160, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    repetition_window: int = Field(default=64, ge=0)
    rows: int = Field(default=256, ge=1)
    """Rollouts decoded at the same time by each worker."""
    dynamic_rounds: int = Field(default=0, ge=0)
    """DAPO's dynamic sampling: replace groups that are all right or all wrong, in at most so many extra rounds."""
    segment_tokens: int = Field(default=0, ge=0)
    """Partial rollouts: new tokens of a response in one iteration; the rest follows in the next (0: no limit)."""
    stale: Literal["mask", "anchor"] = "mask"
    """Tokens of earlier iterations: left out of the loss, or trained against the logprobs they were sampled with."""

    @model_validator(mode="after")
    def _segments_and_rounds(self) -> RolloutConfig:
        if self.segment_tokens and self.dynamic_rounds:
            raise ValueError("partial rollouts and dynamic sampling exclude each other: set one of them to 0")
        return self


class RewardConfig(Section):
    length_weight: float = Field(default=0.0, ge=0, lt=2)
    """Weight of the Kimi k1.5 length reward (below 2 keeps correct above wrong)."""
    length_from: int = Field(default=0, ge=0)
    """First iteration with the length reward."""
    overlong_buffer: int = Field(default=0, ge=0)
    """DAPO's soft overlong punishment over so many tokens before max_tokens (0: off)."""
    extraction: Literal["boxed", "tag", "hash", "marker", "explicit"] = "explicit"
    """Which marks make the answer of a language model; explicit: the first of the four that is there."""
    repetition_penalty: float = Field(default=0.0, ge=0)
    """Taken from the reward of a rollout that was cut because it repeated itself."""
    judge: str = ""
    """The directory of a judge whose score becomes part of the reward (`judges/`)."""
    judge_weight: float = Field(default=0.0, ge=0, le=1)
    """β of (1 − β)·outcome + β·judge; the released code of ReasonFlux-PRM has 0.75."""
    judge_form: Literal["steps", "single"] = "steps"
    """What the judge says: the mean of its steps plus its score of the whole, or one number at the end."""

    @model_validator(mode="after")
    def _weight_needs_judge(self) -> RewardConfig:
        if self.judge_weight > 0 and not self.judge:
            raise ValueError("judge_weight needs a judge: name its directory in reward.judge")
        return self


class SftConfig(Section):
    type: Literal["sft"]
    styles: dict[Literal["answer", "worked", "checked"], float] = {"worked": 1.0}
    """Shares of the solution styles to imitate."""
    data: str = ""
    """Demonstrations to imitate instead: JSON lines of {question, response}, or a file of `reasonlab data sample`.
    Without it, a language model imitates the `solution` column of problems.path."""


class DpoConfig(Section):
    type: Literal["dpo"]
    data: str
    """Preference pairs: a JSON-lines file of `reasonlab data sample --keep pairs`."""
    beta: float = Field(default=0.1, gt=0)


class RestConfig(Section):
    type: Literal["rest"]
    keep: Literal["best", "correct"] = "best"


class MirrorDescentConfig(Section):
    type: Literal["mirror_descent"] = "mirror_descent"
    tau: float = Field(default=0.1, gt=0)
    per_token: bool = False
    reset_optimizer: bool = True


Variant = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "group_mean", "average": "constant"},
    "dapo": {"average": "token", "clip_high": 0.28},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"surrogate": "cispo", "average": "token", "clip_high": 4.0},
    "rloo": {"advantage": "leave_one_out", "surrogate": "reinforce", "average": "sum"},
    "reinforce_pp": {"advantage": "batch_std"},
    "reinforce_pp_baseline": {"advantage": "group_mean_batch_std"},
}


class GrpoConfig(Section):
    """`variant` sets the four choices below it; a choice named in the recipe wins over the variant's."""

    type: Literal["grpo"]
    variant: Variant = "grpo"
    advantage: Literal["group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std"] = "group_std"
    ratio: Literal["token", "sequence"] = "token"
    surrogate: Literal["clip", "cispo", "reinforce"] = "clip"
    average: Literal["sequence", "token", "constant", "sum"] = "sequence"
    clip_low: float = Field(default=0.2, ge=0)
    clip_high: float = Field(default=0.2, ge=0)
    kl: float = Field(default=0.0, ge=0)
    kl_in_reward: bool = False
    mask_truncated: bool = False

    @model_validator(mode="before")
    @classmethod
    def _fill_variant(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            return {**VARIANTS.get(str(values.get("variant", "grpo")), {}), **values}
        return values


METHODS = (SftConfig, RestConfig, MirrorDescentConfig, GrpoConfig, DpoConfig)
METHOD_TYPES = tuple(get_args(method.model_fields["type"].annotation)[0] for method in METHODS)
MethodConfig = Annotated[
    SftConfig | RestConfig | MirrorDescentConfig | GrpoConfig | DpoConfig, Field(discriminator="type")
]


class MelConfig(Section):
    """Meta-Experience Learning on top of the method (`methods/mel.py`); off while `weight` is 0."""

    weight: float = Field(default=0.0, ge=0)
    """Of the NLL of kept reflections beside the method's loss, in every optimizer step; the paper's is 1."""
    pairs: int = Field(default=1, ge=1)
    """Contrastive pairs of each mixed group."""
    max_tokens: int = Field(default=64, ge=1)
    """Longest reflection."""
    normalise: Literal["problems", "kept"] = "problems"
    """Divide by all problems of the iteration, or by those with a kept reflection."""
    length: Literal["own", "mean"] = "own"
    """Divide the log-likelihood of a reflection by its own length (the paper), or by the iteration's mean length."""
    replay_filter: bool = True
    """Ablation: keep reflections whatever their replay says."""
    contrast: bool = True
    """Ablation: reflect on the wrong answer alone."""
    learn: Literal["reflection", "heuristic", "correct"] = "reflection"
    """Ablations: only the rule of a reflection is hint and lesson, or the right rollout is imitated (RFT mixed in)."""


class LearnerConfig(Section):
    lr: float = Field(default=1e-4, gt=0)
    inner_steps: int = Field(default=1, ge=1)
    """Optimizer steps for each iteration: the groups are dealt out to so many mini-batches, if there are so many."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the iteration's groups."""
    token_budget: int = Field(default=4096, ge=1)
    """Tokens in one micro-batch. Gradients do not depend on it."""
    clip_grad_norm: float = Field(default=1.0, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int = Field(default=0, ge=0)
    """Optimizer steps, those of the warm-up included, until the learning rate is at `final_lr_ratio` of `lr` (0: all of
    the run: iterations × inner_steps × epochs)."""
    final_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    bfloat16: bool = True
    """On CUDA: sample and differentiate with one bf16 copy of the weights; they and the optimizer stay fp32."""
    recompute: bool = False
    """Keep only the input of each layer and compute the rest again when it is needed: less memory, more work."""


class EvaluateConfig(Section):
    every: int = Field(default=5, ge=0)
    """Evaluate after every so many iterations, and at both ends (0: never)."""
    suite: str = "tiny"
    """What is asked: the tiny world, a suite (`acemath7`), or benchmarks, comma-separated (`gsm8k_test,math500`)."""
    problems: int = Field(default=480, ge=1)
    """At most so many; of a suite or list, of each benchmark."""
    samples: int = Field(default=1, ge=1)
    levels: tuple[int, ...] = (2, 3, 4, 5)
    split: Literal["validation", "test", "harder"] = "validation"
    """Of the tiny world, as are the levels."""
    temperature: float = Field(default=1.0, ge=0)
    forced_style: bool = True
    """Also evaluate with the worked style forced, at both ends: the control that separates style from skill."""


class CheckpointConfig(Section):
    every: int = Field(default=10, ge=1)
    keep: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay on disk."""


class Config(Section):
    seed: int = 0
    iterations: int = Field(default=50, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = Field(default=2, ge=1)
    """CPU worker threads; each computes single-threaded."""
    data: str = ""
    """Directory with the registered sets, or hub (empty: $REASONLAB_DATA)."""
    model: ModelSection = ModelSection()
    problems: ProblemsConfig = ProblemsConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    method: MethodConfig = MirrorDescentConfig()
    mel: MelConfig = MelConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run, where none is left out for want of something to learn from."""
        return self.iterations * self.learner.inner_steps * self.learner.epochs

    @model_validator(mode="after")
    def _reflections_need_rollouts(self) -> Config:
        if self.mel.weight > 0 and self.method.type in ("sft", "dpo"):
            raise ValueError(f"{self.method.type} has no rollouts to reflect on: set mel.weight to 0")
        return self

    @model_validator(mode="after")
    def _groups_can_differ(self) -> Config:
        """What is learnt from the differences within a group needs some; a baseline over the batch does not."""
        method, rollout = self.method, self.rollout
        over_the_batch = isinstance(method, GrpoConfig) and method.advantage == "batch_std"
        if over_the_batch or not isinstance(method, GrpoConfig | MirrorDescentConfig):
            return self
        learns = f"{method.type} learns from how the rollouts of one problem differ"
        if rollout.samples == 1:
            raise ValueError(f"{learns}, and there is only one: set rollout.samples to 2 or more, for instance 8")
        if rollout.temperature == 0 or rollout.top_k == 1:
            key, value = ("temperature", "1") if rollout.temperature == 0 else ("top_k", "0")
            now = getattr(rollout, key)
            raise ValueError(f"{learns}, and with rollout.{key} {now:g} all are the same: set it to {value}")
        return self


def load_recipe(path: Path) -> Config:
    """Read and check a recipe; every mistake becomes one line that says what to do."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"recipe {path} does not exist", "Give a TOML file, for instance recipes/smoke.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} cannot be read ({error})", "Give the path of a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}", "Mend the line it names") from None
    return validate(raw, str(path))


def validate(raw: Mapping[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{source}: {_first_problem(error)}", "Run `reasonlab train --help` for all keys") from None


_FIRST = {"method.type": 0, "method.variant": 1}


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Lay `--learner.lr 1e-4`, `--learner.lr=1e-4` or `--rollout.samples 16` over a configuration."""
    raw = config.model_dump(mode="json")
    # A type or variant brings its own defaults, so it goes first: what else is named wins over it in any order.
    for name, text in sorted(override_pairs(overrides), key=lambda pair: _FIRST.get(pair[0], len(_FIRST))):
        target, *path, last = [raw, *name.split(".")]
        for part in path:
            if not isinstance(target.get(part), dict):
                raise UserError(f"unknown key {name!r}", _suggest(name))
            target = target[part]
        if name == "method.type":
            target.clear()
        elif name == "method.variant":
            for choice in ("advantage", "ratio", "surrogate", "average", "clip_low", "clip_high"):
                target.pop(choice, None)
        elif last not in target and not name.startswith("method."):  # which keys a method has, its own class checks
            raise UserError(f"unknown key {name!r}", _suggest(name))
        target[last] = override_value(text)
    return validate(raw, "command line")


def override_pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names and texts of `--name text` and `--name=text`."""
    rest = iter(overrides)
    for word in rest:
        if not word.startswith("--"):
            raise UserError(f"unexpected argument {word!r}", "Overrides look like --learner.lr 1e-4")
        name, equals, value = word[2:].partition("=")
        if not equals:
            following = next(rest, None)
            if following is None or following.startswith("--"):
                raise UserError(f"--{name} needs a value", f"For instance --{name} VALUE")
            value = following
        yield name, value


def override_value(text: str) -> Any:
    """A TOML value, or the bare text: `1e-4`, `true`, `[2, 3]`, `dapo`."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """All dotted keys, method keys of every method included."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if prefix == "" and name == "method":
            for method in METHODS:
                yield from keys(method, "method.")
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from keys(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def describe() -> str:
    """All keys with their defaults, one line each, for `--help`."""
    defaults = {
        f"{section}.{key}" if isinstance(value, dict) else section: item
        for section, value in Config().model_dump(mode="json").items()
        for key, item in (value.items() if isinstance(value, dict) else [("", value)])
    }
    for method in (SftConfig, RestConfig, GrpoConfig, DpoConfig):
        kind = get_args(method.model_fields["type"].annotation)[0]
        required = {name: "(required)" for name, field in method.model_fields.items() if field.is_required()}
        own = method.model_validate({**required, "type": kind}).model_dump(mode="json")
        defaults |= {f"method.{key} ({kind})": value for key, value in own.items() if key != "type"}
    defaults["method.type"] = "mirror_descent | grpo | rest | sft | dpo"
    return "\n".join(f"  {key:<38} {value}" for key, value in sorted(defaults.items()))


def to_toml(config: Config) -> str:
    """The resolved configuration as a recipe that loads again."""
    raw = config.model_dump(mode="json")
    lines = [f"{key} = {_toml(value)}" for key, value in raw.items() if not isinstance(value, dict)]
    for name, section in raw.items():
        if isinstance(section, dict):
            lines += ["", f"[{name}]"] + [f"{key} = {_toml(value)}" for key, value in section.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):  # TOML knows neither JSON's surrogate pairs nor a bare DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, float) else json.dumps(value)


def _suggest(name: str) -> str:
    known = sorted(set(keys()))
    if name in known:
        return "It belongs to another method: set method.type as well"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    last = [k for k in known if k.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
    match = (last or near)[:1]
    return f"Perhaps you meant {match[0]!r}" if match else "Run `reasonlab train --help` for all keys"


def _first_problem(error: ValidationError) -> str:
    """One sentence about the first thing pydantic found."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"] if part not in METHOD_TYPES)
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):  # only the method has types
        given = first["input"].get("type")
        said = f"there is no method {given!r}" if given is not None else "the method has no type"
        return f"method.type: {said}; there are {', '.join(METHOD_TYPES)}"
    if first["type"] == "extra_forbidden":
        return f"unknown key {name!r}. {_suggest(name)}"
    if first["type"] == "value_error":  # a sentence of ours about several keys
        return (f"{name}: " if name else "") + first["msg"].removeprefix("Value error, ")
    return f"{name}: {first['msg']} (got {first.get('input')!r})"
