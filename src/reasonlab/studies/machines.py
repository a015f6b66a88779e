"""Where a study would run: its models, the lengths to expect, memory and speed. Used by `estimate.py`.

Recipes without an [about] table run here, in one process: `ThisMachine` takes the rates that were measured with the
tiny models. A recipe with [about] (scale `paper`) describes models and machines beyond this one: `Cluster` reads them,
and its times come from the data sheet and the shares of it that the table assumes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import Field, ValidationError, model_validator

from reasonlab.config import Config, Section
from reasonlab.errors import UserError
from reasonlab.figures.published import kimi_k15, mel
from reasonlab.methods import build_method
from reasonlab.model.config import ModelConfig
from reasonlab.model.ladder import MODELS, resolve_model, tiny_config
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.studies.footprint import (
    BF16,
    FP32,
    GIB,
    Memory,
    Numbers,
    activation_bytes,
    cache_bytes,
    decoding_rate,
    gathered_bytes,
)
from reasonlab.train.memory import Workload, generates, largest_micro_batch, planned_memory

USABLE = 0.9  # of a GPU's memory: the rest is the allocator's slack, communication and what the formulas leave out


# --- the [about] table -----------------------------------------------------------------------------------------------


class Shape(Section):
    """A real model, as its public configuration file describes it."""

    hub: str
    architecture: Literal["llama", "qwen2", "qwen3"]
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    feed_forward: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    tied: bool
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share one engine."""

    def config(self) -> ModelConfig:
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            tied=self.tied,
            qkv_bias=self.architecture == "qwen2",
            qk_norm=self.architecture == "qwen3",
        )


class Hardware(Section):
    gpu: str
    gpus: int = Field(ge=1)
    memory_gib: float = Field(gt=0)
    peak_tflops: float = Field(gt=0)
    bandwidth_tb: float = Field(gt=0)
    training_utilisation: float = Field(gt=0, le=1)
    """Operations of the formula (recomputation not counted) over the peak."""
    training_reason: str
    decoding_utilisation: float = Field(gt=0, le=1)
    """Of the memory bandwidth."""
    decoding_reason: str
    recompute: bool = True
    """Keep the layers' inputs only and compute each layer again in the backward pass."""
    overhead: float = Field(default=1.0, ge=1)
    """Factor on the time, for all that is neither decoding nor an update."""
    price: float = Field(ge=0)
    """US dollars for one GPU and hour."""


Length = Annotated[float, Field(gt=0, strict=True)] | str | Annotated[tuple[str, ...], Field(min_length=1)]


class Lengths(Section):
    prompt: float = Field(ge=0)
    prompt_limit: int = Field(ge=0)
    spread: float = Field(ge=0)
    """Standard deviation of response lengths over their mean."""
    mean: dict[str, Length]
    """Response tokens by arm: a number, a published curve, or several whose mean is taken."""
    reason: str = (
        "Figures are those of the Kimi k1.5 report, with mean lengths on its tests; lengths in training and of these "
        "models are not known"
    )


Share = Annotated[float, Field(ge=0, le=1)]


class Reflecting(Section):
    """What Meta-Experience Learning has to reflect on, and how much it writes."""

    mixed: Share
    """Share of the problems of an iteration with right and wrong rollouts."""
    mixed_reason: str
    reflection: float = Field(gt=0)
    """Tokens of a reflection."""
    instruction: int = Field(ge=0)
    """Tokens of its prompt beside the question and the attempts."""
    kept: Annotated[float, Field(ge=0, le=1, strict=True)] | str
    """Share of reflections whose replay is right: a number, or a published curve."""
    reason: str
    """Where the last three are from."""

    def kept_at(self, iterations: Numbers) -> Numbers:
        if isinstance(self.kept, str):
            return published_retention(self.kept, iterations)
        return np.full(len(iterations), self.kept)


class About(Section):
    data: tuple[str, ...] = ()
    preparation: str = "curated"
    """What is done to the data before training."""
    suites: tuple[str, ...] = ()
    models: dict[str, Shape]
    models_reason: str = "The sizes of the report's models are undisclosed; these are our choice"
    hardware: Hardware
    lengths: Lengths
    mel: Reflecting | None = None
    """Needed if an arm has reflections."""

    @model_validator(mode="after")
    def _engines_fill_the_machine(self) -> About:
        for name, shape in self.models.items():
            if self.hardware.gpus % shape.tensor_parallel:
                raise ValueError(f"hardware.gpus is no multiple of tensor_parallel of {name}")
        return self


def read_about(raw: Mapping[str, Any]) -> About:
    try:
        return About.model_validate(raw)
    except ValidationError as error:
        # A misspelt key before the one that is missing because of it.
        first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        name = ".".join(map(str, ("about", *first["loc"])))
        hint = "It is not a key of the table" if first["type"] == "extra_forbidden" else "Mend that key of the recipe"
        raise UserError(f"{name}: {first['msg']}", hint) from None


def published_lengths(name: str, iterations: Numbers) -> Numbers:
    """Mean response tokens of the Kimi k1.5 report after so many iterations; the last point is held.

    `figure 5` is the total's curve, `figure 8, large` the larger model's checkpoints, taken as four iterations apart,
    and `figure 7, NAME` the mean of the two panels for one of its models.
    """
    data = kimi_k15()
    if name == "figure 5":
        total = data["dynamics"]["panels"]["total"]
        return np.asarray(np.interp(iterations, total["iteration"], total["tokens"]))
    if name == "figure 8, large":
        tokens = [point[0] for point in data["sizes"]["panels"]["OMNI-MATH500"]["large"]]
        return np.asarray(np.interp(iterations, 4 * np.arange(len(tokens)), tokens))
    panels = data["long2short"]["panels"].values()
    model = name.removeprefix("figure 7, ")
    if model == name or not all(model in panel for panel in panels):
        known = ", ".join(model for model in next(iter(panels)) if model.startswith("k1.5"))
        raise UserError(
            f"about.lengths.mean: {name!r} is no published length",
            f"Give a number, 'figure 5', 'figure 8, large' or 'figure 7, NAME' with NAME one of {known}",
        )
    return np.full(len(iterations), np.mean([panel[model][0] for panel in panels]))


def published_retention(name: str, iterations: Numbers) -> Numbers:
    """Share of reflections that the MEL paper keeps after so many steps: `figure 9, SIZE`; the last point is held."""
    curves = mel()["retention"]["curves"]
    size = name.removeprefix("figure 9, ")
    if size == name or size not in curves:
        known = ", ".join(curves)
        raise UserError(
            f"about.mel.kept: {name!r} is no published share",
            f"Give a number, or 'figure 9, SIZE' with SIZE one of {known}",
        )
    steps, shares = zip(*curves[size], strict=True)
    return np.asarray(np.interp(iterations, steps, shares))


# --- where it would run ----------------------------------------------------------------------------------------------


class Setting(Protocol):
    """A machine, the models on it and the lengths to expect."""

    gpus: int
    capacity: float | None  # bytes of one GPU that may be used
    price: float | None
    overhead: float
    prompt: float
    spread: float

    def shape(self, config: Config) -> ModelConfig: ...
    def lengths(self, piece: str, iterations: Numbers) -> Numbers: ...
    def reflecting(self, config: Config) -> Reflecting: ...
    def memory(self, config: Config) -> Memory: ...
    def decoding_seconds(
        self, config: Config, rollouts: float, means: Numbers, given: Numbers | float | None = None
    ) -> float:
        """Of so many responses in each pass, with these mean lengths, after `given` tokens (default: a problem)."""
        ...

    def training_seconds(self, config: Config, tokens: float, flops: float) -> float: ...
    def describe(self) -> str: ...
    def assumptions(self) -> list[str]: ...


class ThisMachine:
    """One process with a tiny model, at rates measured with such models: two CPU cores, or one H200.

    CPU, tiny-1m, two threads that other work disturbed: 8,000 sampled and 10,000 trained tokens a second in runs of
    the demo and of long2short. Between 0.2 and 10 million parameters both fall about as P^-0.75. CUDA: whole RL
    iterations of tiny-10m made 43,000 tokens a second, pre-training it 397,000, hence decoding 48,000. Decoding waits
    for launches, whatever the size; pre-training falls as P^-0.4 (0.3 to 29 million parameters).
    """

    gpus = 1
    overhead = 1.0
    prompt, prompt_limit, spread = 15.0, 40, 0.6  # measured on the tiny world, levels 2 to 5
    # Tokens a second, the parameters of the model they were measured with, and the power of P they go with.
    SAMPLED: ClassVar = {"cpu": (8e3, 1.013e6, -0.75), "cuda": (48e3, 9.546e6, 0.0)}
    TRAINED: ClassVar = {"cpu": (10e3, 1.013e6, -0.75), "cuda": (397e3, 9.546e6, -0.4)}
    MEAN = 50.0
    OTHER_MEANS: ClassVar = {  # one run of long2short at cpu scale, and:
        "warm-up data": 64.0,
        "warm-up": 86.0,
        "samples": 59.0,
        "shortest": 31.0,
        "merged samples": 43.0,
        "merge+rs": 21.0,
        "rl": 42.0,
        "test answers": 45.0,
        **dict.fromkeys(("grpo", "mel", "grpo-matched", "mel-wrong-only", "rft-mix"), 40.0),  # mel-vs-grpo, gpu scale
    }

    REFLECTING: ClassVar = {
        "cpu": Reflecting(
            mixed=0.54,
            mixed_reason="mean over 60 iterations of the arm mel at cpu scale, one seed",
            reflection=28,
            instruction=4,
            kept=0.61,
            reason="the same; in 26 earlier iterations replays had 34 tokens, wrong attempts 34 and right ones 45",
        ),
        "cuda": Reflecting(
            mixed=0.46,
            mixed_reason="mean over 120 iterations of the arm mel at gpu scale, three seeds: 0.3 to 0.6",
            reflection=24,
            instruction=4,
            kept=0.64,
            reason="the same iterations, where replays had 42 tokens",
        ),
    }

    def __init__(self) -> None:
        self.capacity: float | None = None
        self.price: float | None = None

    def shape(self, config: Config) -> ModelConfig:
        name = config.model.path
        if name in MODELS:  # also one that was not trained yet; misled ones have the shape of their rung
            name = name.removesuffix("-misled")
            tokenizer = TinyTokenizer.load()
            return tiny_config(name, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
        return ModelConfig.from_hf(json.loads((resolve_model(name) / "config.json").read_text()))

    def lengths(self, piece: str, iterations: Numbers) -> Numbers:
        return np.full(len(iterations), self.OTHER_MEANS.get(piece, self.MEAN))

    def reflecting(self, config: Config) -> Reflecting:
        return self.REFLECTING[config.device]

    def memory(self, config: Config) -> Memory:
        longest = longest_reflection(config, self.prompt_limit, self.reflecting(config))
        return planned_memory(config, Workload(self.shape(config), self.prompt_limit, longest))

    def decoding_seconds(
        self, config: Config, rollouts: float, means: Numbers, given: Numbers | float | None = None
    ) -> float:
        return float(rollouts * means.sum() / self._rate(config, self.SAMPLED))

    def training_seconds(self, config: Config, tokens: float, flops: float) -> float:
        return tokens / self._rate(config, self.TRAINED)

    def _rate(self, config: Config, measured: Mapping[str, tuple[float, float, float]]) -> float:
        rate, parameters, power = measured[config.device]
        workers = config.threads / 2 if config.device == "cpu" else 1.0
        return float(rate * workers * (self.shape(config).parameter_count() / parameters) ** power)

    def describe(self) -> str:
        return "one process; engine and learner side by side"

    def assumptions(self) -> list[str]:
        other = ", ".join(f"{piece} {mean:.0f}" for piece, mean in self.OTHER_MEANS.items())
        return [
            f"Response tokens, measured on the tiny world: {self.MEAN:.0f} on average, {other}. Prompts: "
            f"{self.prompt:.0f} on average, at most {self.prompt_limit}.",
            "CPU: tiny-1m samples 8,000 and trains on 10,000 tokens/s with two threads, measured on two busy cores; "
            "proportional to threads, and to parameters^-0.75 (fitted from 0.2 to 10 million).",
            "CUDA: 397,000 trained tokens/s for tiny-10m, for others in proportion to parameters^-0.4, measured in "
            "pre-training; 48,000 sampled tokens/s at any size, which is what 43,000 tokens/s in whole RL iterations "
            "of tiny-10m leave for decoding. One H200 that other runs shared; other machines have other rates.",
            "Pre-training of rungs that do not ship (minutes each on a GPU, once) is not counted.",
        ]


class Cluster:
    """The machines and models of an [about] table: training sharded over all GPUs, one engine for every
    `tensor_parallel` GPUs, both on the same GPUs in turn."""

    def __init__(self, about: About) -> None:
        self.about, self.hardware = about, about.hardware
        self.gpus, self.overhead = self.hardware.gpus, self.hardware.overhead
        self.price: float | None = self.hardware.price
        self.capacity: float | None = USABLE * self.hardware.memory_gib * GIB
        self.prompt, self.spread = about.lengths.prompt, about.lengths.spread

    def _shape(self, config: Config) -> Shape:
        if config.model.path not in self.about.models:
            raise UserError(
                f"about.models has no shape for {config.model.path!r}",
                f'Add [about.models."{config.model.path}"], or use {", ".join(self.about.models)}',
            )
        return self.about.models[config.model.path]

    def shape(self, config: Config) -> ModelConfig:
        return self._shape(config).config()

    def lengths(self, piece: str, iterations: Numbers) -> Numbers:
        mean = self.about.lengths.mean.get(piece)
        if mean is None:
            raise UserError(f"about.lengths.mean has no entry {piece!r}", "Add one: a number or a published length")
        if isinstance(mean, float):
            return np.full(len(iterations), mean)
        names = (mean,) if isinstance(mean, str) else mean
        return np.asarray(np.mean([published_lengths(name, iterations) for name in names], axis=0))

    def reflecting(self, config: Config) -> Reflecting:
        if self.about.mel is None:
            raise UserError(
                "[about.mel] is missing, and an arm has reflections",
                f"Add it, with {', '.join(Reflecting.model_fields)}",
            )
        return self.about.mel

    def memory(self, config: Config) -> Memory:
        shape, limit = self.shape(config), self.about.lengths.prompt_limit
        parameters, engine = shape.parameter_count(), self._shape(config).tensor_parallel
        samples = generates(config) or config.evaluate.every > 0
        slots = config.rollout.rows * (limit + config.rollout.max_tokens) if samples else 0
        longest = 0
        if reflects(config):
            longest = longest_reflection(config, limit, self.reflecting(config))
            reflections = config.rollout.prompts * config.mel.pairs  # all problems may be mixed
            slots = max(slots, min(config.rollout.rows, math.ceil(reflections * engine / self.gpus)) * longest)
        micro_batch = largest_micro_batch(config, Workload(shape, limit, longest))
        return Memory(
            weights=FP32 * parameters / self.gpus,
            gradients=FP32 * parameters / self.gpus,
            moments=2 * FP32 * parameters / self.gpus,
            activations=activation_bytes(shape, micro_batch, True, self.hardware.recompute),
            working=gathered_bytes(shape),
            reference=BF16 * parameters / self.gpus if build_method(config).needs_reference else 0,
            engine=BF16 * parameters / engine if samples else 0,
            cache=slots * cache_bytes(shape, BF16) / min(engine, shape.kv_heads),
            shared=False,
        )

    def decoding_seconds(
        self, config: Config, rollouts: float, means: Numbers, given: Numbers | float | None = None
    ) -> float:
        """The tokens over the rate of all engines; no pass ends before its longest response."""
        if not rollouts:
            return 0.0
        size, hardware = self._shape(config).tensor_parallel, self.hardware
        engines = self.gpus / size
        rows = min(float(config.rollout.rows), max(1.0, rollouts / engines))
        # A response of n tokens is met n times, at a context of n/2 on average: E[n²] / 2E[n].
        context = (self.prompt if given is None else given) + means * (1 + self.spread**2) / 2
        bandwidth = size * hardware.bandwidth_tb * 1e12 * hardware.decoding_utilisation
        compute = size * hardware.peak_tflops * 1e12 * hardware.training_utilisation
        rate, step = decoding_rate(self.shape(config), rows, context, bandwidth, compute)
        limit = min(config.rollout.segment_tokens or config.rollout.max_tokens, config.rollout.max_tokens)
        longest = np.minimum(means * (1 + self.spread * math.log(rollouts)), limit)
        return float(np.maximum(rollouts * means / (rate * engines), longest * step).sum())

    def training_seconds(self, config: Config, tokens: float, flops: float) -> float:
        return flops / (self.gpus * self.hardware.peak_tflops * 1e12 * self.hardware.training_utilisation)

    def describe(self) -> str:
        hardware = self.hardware
        return f"{hardware.gpus} × {hardware.gpu}, {hardware.memory_gib:g} GiB each; training sharded over all of them"

    def assumptions(self) -> list[str]:
        hardware, lengths = self.hardware, self.about.lengths
        models = "; ".join(
            f"{shape.hub} ({shape.layers} layers, hidden {shape.hidden}, {shape.heads} query and {shape.kv_heads} "
            f"key-value heads, feed-forward {shape.feed_forward}, {shape.vocabulary:,} tokens), an engine on "
            f"{shape.tensor_parallel} GPU{'s' * (shape.tensor_parallel > 1)}"
            for shape in self.about.models.values()
        )
        means = "; ".join(f"{piece}: {_named(mean)}" for piece, mean in lengths.mean.items())
        return [
            f"Models: {models}. {self.about.models_reason}.",
            f"Data: {', '.join(self.about.data)}, {self.about.preparation}; evaluated on "
            f"{', '.join(self.about.suites)}.",
            f"Response tokens: {means}. {lengths.reason}.",
            f"Lengths deviate by {lengths.spread:g} × mean, the longest of N is mean × (1 + {lengths.spread:g}·ln N). "
            f"Prompts: {lengths.prompt:g} tokens on average, at most {lengths.prompt_limit:,}.",
            f"Training: {hardware.training_utilisation:g} of {hardware.peak_tflops:g} TFLOP/s bf16 a GPU, recomputed "
            f"activations {'not counted' if hardware.recompute else 'off'} ({hardware.training_reason}).",
            f"Decoding: {hardware.decoding_utilisation:g} of {hardware.bandwidth_tb:g} TB/s a GPU "
            f"({hardware.decoding_reason}).",
            f"Time × {hardware.overhead:g} for prefill, weight transfer, grading, checkpoints and waiting. "
            f"{hardware.price:g} US dollars for one GPU and hour.",
            f"A peak fits if it is at most {USABLE:.0%} of a GPU's memory. The cache has room for all rows at full "
            "length; a paged cache holds more rows in the same memory.",
            "reasonlab's own loop is one process on one device and trains tiny models: sharding, engines on other GPUs "
            "and the real model's tokenizer in training are assumed, not present.",
        ]


def _named(mean: Length) -> str:
    if isinstance(mean, tuple):
        prefix = "figure 7, "
        together = all(name.startswith(prefix) for name in mean)
        return prefix + ", ".join(n.removeprefix(prefix) for n in mean) if together else ", ".join(mean)
    return mean if isinstance(mean, str) else f"{mean:g}"


def reflects(config: Config) -> bool:
    """Whether reflections are written: imitating right rollouts instead writes none."""
    return config.mel.weight > 0 and config.mel.learn != "correct"


def longest_reflection(config: Config, prompt_limit: int, about: Reflecting) -> int:
    """Tokens of the longest example of MEL: question, instruction, attempts and reflection; 0 without reflections."""
    if not reflects(config):
        return 0
    attempts = (2 if config.mel.contrast else 1) * config.rollout.max_tokens
    return prompt_limit + about.instruction + attempts + config.mel.max_tokens
