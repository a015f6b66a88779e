"""`reasonlab study NAME --dry-run`: what a study would take, by formula. Nothing is run and nothing downloaded.

The formulas are in `footprint.py`, the machines, models and lengths in `machines.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import numpy as np

from reasonlab.config import Config, DpoConfig, RestConfig, SftConfig
from reasonlab.methods import build_method
from reasonlab.studies import long2short
from reasonlab.studies.footprint import GIB, Memory, forward_flops
from reasonlab.studies.machines import Cluster, Setting, ThisMachine, generates, read_about
from reasonlab.studies.recipe import StudyRecipe

WIDTH = 118


# --- the estimate ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArmEstimate:
    """One arm and seed, or one other piece of a study's work (sampling, test answers), which has no iterations."""

    arm: str
    model: str
    parameters: int
    memory: Memory | None  # of the arms that are trained
    fits: bool | None
    iterations: int
    mean_length: float
    generated_tokens: float
    evaluated_tokens: float
    trained_tokens: float
    flops: float  # of the updates
    rollout_seconds: float
    update_seconds: float
    gpus: int
    price: float | None

    @property
    def seconds(self) -> float:
        return self.rollout_seconds + self.update_seconds

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.seconds / 3600

    @property
    def cost(self) -> float | None:
        return None if self.price is None else self.gpu_hours * self.price


def setting_of(recipe: StudyRecipe) -> Setting:
    return Cluster(read_about(recipe.about)) if recipe.about else ThisMachine()


def estimates(study: str, recipe: StudyRecipe) -> list[ArmEstimate]:
    """Every arm once, and what the study samples outside its arms; for one seed."""
    setting = setting_of(recipe)
    arms = [_trained(arm, config, setting) for arm, config in recipe.arms.items()]
    return arms + [_sampled(*piece, setting) for piece in _other_pieces(study, recipe)]


def _trained(arm: str, config: Config, setting: Setting) -> ArmEstimate:
    shape, rollout = setting.shape(config), config.rollout
    means = np.minimum(setting.lengths(arm, np.arange(config.iterations, dtype=float)), rollout.max_tokens)
    sampled = rollout.prompts * rollout.samples if generates(config) else 0
    match config.method:
        case SftConfig() | RestConfig(keep="best"):
            examples = rollout.prompts
        case DpoConfig():
            examples = 2 * rollout.prompts
        case _:
            examples = rollout.prompts * rollout.samples
    # Linear work meets a prompt once for all examples of a group; attention meets it in every example.
    tokens = examples * means.sum() + rollout.prompts * setting.prompt * config.iterations
    squares = examples * (setting.prompt**2 + 2 * setting.prompt * means + means**2 * (1 + setting.spread**2)).sum()
    forward = forward_flops(shape, float(tokens), float(squares))
    updates = config.learner.epochs
    single = config.learner.inner_steps * updates == 1
    measured = config.device == "cuda" and not single  # the logprobs before the update
    passes = 3 * updates + measured + build_method(config).needs_reference

    points = _evaluations(config)
    answers = config.evaluate.problems * config.evaluate.samples
    at = np.minimum(setting.lengths(arm, np.array(points, dtype=float)), rollout.max_tokens)
    seconds = setting.decoding_seconds(config, sampled, means)
    seconds += setting.decoding_seconds(_whole(config), answers, at)
    memory = setting.memory(config)
    update = setting.training_seconds(config, float(tokens) * passes / 3, passes * forward)
    return ArmEstimate(
        arm=arm,
        model=Path(config.model.path).name,
        parameters=shape.parameter_count(),
        memory=memory,
        fits=None if setting.capacity is None else memory.peak <= setting.capacity,
        iterations=config.iterations,
        mean_length=float(means.mean()),
        generated_tokens=float(sampled * means.sum()),
        evaluated_tokens=float(answers * at.sum()),
        trained_tokens=float(tokens * updates),
        flops=passes * forward,
        rollout_seconds=setting.overhead * seconds,
        update_seconds=setting.overhead * update,
        gpus=setting.gpus,
        price=setting.price,
    )


def _evaluations(config: Config) -> list[int]:
    """The iterations after which a run is evaluated; both ends twice if the forced style is looked at as well."""
    every, last = config.evaluate.every, config.iterations
    if not every:
        return []
    ends = [0, last]
    return [*ends, *range(every, last, every), *(ends if config.evaluate.forced_style else [])]


def _other_pieces(study: str, recipe: StudyRecipe) -> list[tuple[str, Config, int]]:
    """What long2short samples between its arms: name, the settings it samples with, and how many responses."""
    if study != long2short.name:
        return []
    settings, arms = recipe.settings, recipe.arms
    config = arms.get(long2short.LONG, next(iter(arms.values())))
    answers = settings.sampled_problems * settings.sampled_answers
    finished = [arm for arm in long2short.FINISHED if arm in arms or arm == long2short.MERGE]
    references = (long2short.BASE, long2short.BASE_FORCED)
    pieces = [
        ("warm-up data", long2short.WARM_UP in arms, settings.warmup_problems * settings.warmup_samples),
        ("samples", long2short.SHORTEST in arms or long2short.DPO in arms, answers),
        ("merged samples", long2short.MERGE_RS in arms, answers),
        ("test answers", True, len([*finished, *references]) * settings.questions * settings.samples),
    ]
    return [(name, config, count) for name, present, count in pieces if present]


def _sampled(name: str, config: Config, responses: int, setting: Setting) -> ArmEstimate:
    means = np.minimum(setting.lengths(name, np.zeros(1)), config.rollout.max_tokens)
    return ArmEstimate(
        arm=name,
        model=Path(config.model.path).name,
        parameters=setting.shape(config).parameter_count(),
        memory=None,
        fits=None,
        iterations=0,
        mean_length=float(means[0]),
        generated_tokens=float(responses * means[0]),
        evaluated_tokens=0.0,
        trained_tokens=0.0,
        flops=0.0,
        rollout_seconds=setting.overhead * setting.decoding_seconds(_whole(config), responses, means),
        update_seconds=0.0,
        gpus=setting.gpus,
        price=setting.price,
    )


def _whole(config: Config) -> Config:
    """Without partial rollouts, which belong to training."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"segment_tokens": 0})})


# --- the text --------------------------------------------------------------------------------------------------------

FORMULAS = (
    "P parameters, W without norms and input embeddings, h hidden, f feed-forward, q = heads × head size, "
    "k = key-value heads × head size, n tokens of a sequence.",
    "Memory, bytes: weights 4P, gradients 4P (in one process two sets), Adam's moments 8P, engine 2P, its bf16 copy.",
    "Activations of a token and layer: 16h + 4·(heads + 2) + b·(2h + 3q + 3k + 4f), b = 2 in bf16 and 4 in fp32; with "
    "recomputation one layer's, and 4h for every layer. Also the logits of one chunk.",
    "Working: bf16 weights in use; if sharded, the embeddings and two layers with their gradients. "
    "Cache: rows × (prompt limit + max_tokens) × 2·layers·k·b.",
    "Update: 6·W·Σn + 6·layers·q·Σn² operations (12·layers·q·n², halved because attention is causal); a third of that "
    "for each further forward pass (logprobs before several steps, reference model).",
    "Decoding step: 2·W bytes and the cache of all rows over the bandwidth, or the operations over the peak, whichever "
    "takes longer; a pass lasts at least as long as its longest response.",
)


def estimate(study: str, recipe: StudyRecipe) -> str:
    """The estimate as text: models, memory, work, formulas, assumptions."""
    setting, rows, seeds = setting_of(recipe), estimates(study, recipe), recipe.settings.seeds
    trained = [row for row in rows if row.memory]
    parts = [
        f"{study}, scale {recipe.scale}: an estimate by formula. Nothing was run.",
        f"{setting.describe()}\n{_models(trained)}",
        _memory_table(setting, trained),
        _work_table(setting, rows, seeds),
        "Formulas\n" + _list(FORMULAS),
        "Assumptions\n" + _list([*setting.assumptions(), *_left_out(recipe)]),
    ]
    return "\n\n".join(parts)


def _models(rows: Sequence[ArmEstimate]) -> str:
    arms: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        arms.setdefault((row.model, row.parameters), []).append(row.arm)
    return "\n".join(f"{model}, {count:,} parameters: {', '.join(of)}" for (model, count), of in arms.items())


def _left_out(recipe: StudyRecipe) -> list[str]:
    if any(config.rollout.dynamic_rounds for config in recipe.arms.values()):
        return ["The extra rounds of dynamic sampling are not counted."]
    return []


def _memory_table(setting: Setting, rows: Sequence[ArmEstimate]) -> str:
    unit, name = (2**20, "MiB") if setting.capacity is None else (GIB, "GiB")
    header = ["arm", "weights", "gradients", "moments", "activations", "working", "engine", "cache", "reference"]
    lines = [[*header, "update", "rollout", *(["fits"] if setting.capacity else [])]]
    for row in rows:
        memory = row.memory
        assert memory is not None
        held = [memory.weights, memory.gradients, memory.moments, memory.activations, memory.working, memory.engine]
        held += [memory.cache, memory.reference, memory.update, memory.rollout]
        fits = [] if row.fits is None else ["yes" if row.fits else "NO"]
        lines.append([row.arm, *(f"{size / unit:,.1f}" if size else "-" for size in held), *fits])
    where = "the process" if setting.capacity is None else "one GPU"
    return f"Memory of {where}, {name}: the parts, then the peaks in update and rollout\n{_table(lines)}"


def _work_table(setting: Setting, rows: Sequence[ArmEstimate], seeds: int) -> str:
    paid = setting.price is not None
    header = ["arm", "iterations", "length", "generated", "evaluated", "trained", "FLOP", "rollout", "update"]
    lines = [header + (["GPU-hours", "US dollars"] if paid else ["time"])]

    def work(work: Sequence[float], hours: float, cost: float | None) -> list[str]:
        """Tokens generated, evaluated and trained on, operations, seconds of rollout and update; what it costs."""
        cells = [_count(number) if number else "-" for number in work[:3]]
        cells += [f"{work[3]:.1e}" if work[3] else "-", *(_duration(s) if s else "-" for s in work[4:])]
        return cells + ([_duration(work[4] + work[5])] if cost is None else [_plain(hours), _plain(cost)])

    names = ("generated_tokens", "evaluated_tokens", "trained_tokens", "flops", "rollout_seconds", "update_seconds")
    parts = [[float(getattr(row, name)) for name in names] for row in rows]
    for row, part in zip(rows, parts, strict=True):
        about = [row.arm, str(row.iterations or "-"), f"{row.mean_length:,.0f}"]
        lines.append(about + work(part, row.gpu_hours, row.cost))
    hours, cost = seeds * sum(row.gpu_hours for row in rows), seeds * sum(row.cost or 0 for row in rows)
    total = [seeds * sum(column) for column in zip(*parts, strict=True)]
    label = "all" if seeds == 1 else f"all, {seeds} seeds"
    lines.append([label, "", "", *work(total, hours, cost if paid else None)])
    where = "on all GPUs together" if setting.gpus > 1 else "one run after the other"
    return f"Work of one seed: mean response tokens, tokens, operations of the updates, time {where}\n{_table(lines)}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    """The first column on the left, numbers on the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def row(first: str, *numbers: str) -> str:
        right = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
        return "  ".join((first.ljust(widths[0]), *right))

    return "\n".join(row(*line) for line in lines)


def _list(texts: Sequence[str]) -> str:
    return "\n".join(fill(text.strip(), WIDTH, initial_indent="- ", subsequent_indent="  ") for text in texts)


def _count(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{_plain(seconds / 60)} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
