"""`reasonlab study rm-scaling --dry-run`: what the judges would take, by formula. Nothing is run.

Machines, models and lengths are those of `machines.py`, the formulas those of `footprint.py` for a model without its
language head. A list is six answers to one question, which is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from reasonlab.config import Config
from reasonlab.judges.lists import LIST_SIZE
from reasonlab.studies.footprint import GIB, Memory, forward_flops
from reasonlab.studies.machines import Setting
from reasonlab.studies.recipe import StudyRecipe

PUBLISHED_SIZES = ("0.5b", "1.5b", "3b", "7b", "14b", "32b")
COMPUTED = 0.39  # of the tokens of 64 candidates of tiny models, measured: many are equal or begin alike
LISTS, CANDIDATES = "lists", "candidates"  # the names of their lengths in [about.lengths.mean]

FORMULAS = (
    "P parameters without a language head, W those of the layers' matrices, q = heads × head size, n tokens of an "
    "answer with its question, m those of the answer alone.",
    "Memory, bytes: weights 4P, gradients 4P (in one process two sets), Adam's moments 8P, and the activations of one "
    "micro-batch, which holds at least one whole list at full length.",
    "Training: Σ over lists of (question + 6·m) tokens, 6·W a token and 6·layers·q·n² an answer. Scoring a checkpoint: "
    "a third of that for every candidate, questions once; in the tiny world 0.39 of these tokens are computed, because "
    "many answers begin alike or are equal.",
)


@dataclass(frozen=True, slots=True)
class JudgeEstimate:
    """One judge and seed."""

    arm: str
    model: str
    parameters: int
    memory: Memory
    fits: bool | None
    steps: int
    trained_tokens: float
    scored_tokens: float
    flops: float  # of training and scoring
    training_seconds: float
    scoring_seconds: float


@dataclass(frozen=True, slots=True)
class SamplingEstimate:
    """The candidates of one policy; made once, whatever the seeds."""

    policy: str
    responses: int
    tokens: float
    seconds: float


def judge_estimate(arm: str, config: Config, recipe: StudyRecipe, setting: Setting) -> JudgeEstimate:
    settings, lists = recipe.settings, recipe.settings.sampled_problems
    whole_list = round(setting.prompt) + LIST_SIZE * config.rollout.max_tokens
    learner = config.learner.model_copy(update={"token_budget": max(config.learner.token_budget, whole_list)})
    rollout = config.rollout.model_copy(update={"prompts": settings.list_batch, "samples": LIST_SIZE})
    config = config.model_copy(update={"learner": learner, "rollout": rollout})  # a step learns from a batch of lists
    shape = setting.shape(config)
    memory = replace(setting.memory(config), engine=0.0, cache=0.0, reference=0.0)

    def forward(questions: int, answers: int, piece: str) -> tuple[float, float]:
        """Tokens and operations of reading so many answers to each of so many questions."""
        prompt, mean = setting.prompt, float(setting.lengths(piece, np.zeros(1))[0])
        tokens = questions * (prompt + answers * mean)
        squares = questions * answers * (prompt**2 + 2 * prompt * mean + mean**2 * (1 + setting.spread**2))
        return tokens, forward_flops(shape, tokens, squares) - 2.0 * shape.vocab_size * shape.hidden_size * tokens

    trained, learning = forward(lists, LIST_SIZE, LISTS)
    policies = len(settings.writers) or 1
    scored, reading = forward(settings.questions, policies * settings.samples, CANDIDATES)
    share = COMPUTED if setting.capacity is None else 1.0
    scored, reading = settings.judge_checkpoints * scored, share * settings.judge_checkpoints * reading
    return JudgeEstimate(
        arm=arm,
        model=Path(config.model.path).name,
        parameters=shape.parameter_count(),
        memory=memory,
        fits=None if setting.capacity is None else memory.update <= setting.capacity,
        steps=-(-lists // settings.list_batch),
        trained_tokens=trained,
        scored_tokens=scored,
        flops=3 * learning + reading,
        training_seconds=setting.overhead * setting.training_seconds(config, trained, 3 * learning),
        scoring_seconds=setting.overhead * setting.training_seconds(config, share * scored / 3, reading),
    )


def sampling_estimates(recipe: StudyRecipe, setting: Setting) -> list[SamplingEstimate]:
    settings, config = recipe.settings, next(iter(recipe.arms.values()))
    responses = settings.sampled_problems * settings.list_answers + settings.questions * settings.samples
    found = []
    for policy in settings.writers:
        writer = config.model_copy(update={"model": config.model.model_copy(update={"path": policy.model})})
        means = setting.lengths(CANDIDATES, np.zeros(1))
        seconds = setting.overhead * setting.decoding_seconds(writer, responses, means)
        thinking = ", thinking" * policy.thinking
        name = f"{Path(policy.model).name} at {policy.temperature:g}{thinking}"
        found.append(SamplingEstimate(name, responses, responses * float(means[0]), seconds))
    return found


def estimate(recipe: StudyRecipe) -> str:
    """The estimate as text."""
    from reasonlab.studies.estimate import _list, setting_of

    setting, seeds = setting_of(recipe), recipe.settings.seeds
    judges = [judge_estimate(arm, config, recipe, setting) for arm, config in recipe.arms.items()]
    policies = sampling_estimates(recipe, setting)
    sampling = "Candidates: published ones are used, none are sampled"
    parts = [
        f"rm-scaling, scale {recipe.scale}: an estimate by formula. Nothing was run.",
        setting.describe()
        + "\n"
        + "\n".join(f"{one.model}, {one.parameters:,} parameters: {one.arm}" for one in judges),
        _memory_table(setting, judges),
        _work_table(setting, judges, policies, seeds),
        _sampling_table(policies) if policies else sampling,
        "Formulas\n" + _list(FORMULAS),
        "Assumptions\n" + _list([*setting.assumptions(), *_own_assumptions(recipe)]),
    ]
    return "\n\n".join(parts)


def _own_assumptions(recipe: StudyRecipe) -> list[str]:
    settings = recipe.settings
    candidates = (len(settings.writers) or 1) * settings.samples
    return [
        f"Every one of {settings.sampled_problems:,} training problems makes a list; those whose candidates are all "
        "right or all wrong drop out, so this is the most.",
        f"{settings.judge_checkpoints} checkpoints each score {candidates} candidates for {settings.questions:,} "
        "questions.",
    ]


def _memory_table(setting: Setting, judges: Sequence[JudgeEstimate]) -> str:
    from reasonlab.studies.estimate import _table

    unit, name = (2**20, "MiB") if setting.capacity is None else (GIB, "GiB")
    lines = [["judge", "weights", "gradients", "moments", "activations", "working", "peak"]]
    lines[0] += ["fits"] if setting.capacity else []
    for one in judges:
        memory = one.memory
        held = (memory.weights, memory.gradients, memory.moments, memory.activations, memory.working, memory.update)
        fits = [] if one.fits is None else ["yes" if one.fits else "NO"]
        lines.append([one.arm, *(f"{size / unit:,.1f}" if size else "-" for size in held), *fits])
    where = "the process" if setting.capacity is None else "one GPU"
    return f"Memory of {where} in training, {name}\n{_table(lines)}"


def _work_table(
    setting: Setting, judges: Sequence[JudgeEstimate], policies: Sequence[SamplingEstimate], seeds: int
) -> str:
    from reasonlab.studies.estimate import _count, _duration, _plain, _table

    price = setting.price
    header = ["judge", "steps", "trained", "scored", "FLOP", "training", "scoring"]
    lines = [header + (["time"] if price is None else ["GPU-hours", "US dollars"])]

    def time(seconds: float) -> list[str]:
        if price is None:
            return [_duration(seconds)]
        hours = setting.gpus * seconds / 3600
        return [_plain(hours), _plain(hours * price)]

    for one in judges:
        work = [one.arm, f"{one.steps:,}", _count(one.trained_tokens), _count(one.scored_tokens), f"{one.flops:.1e}"]
        both = one.training_seconds, one.scoring_seconds
        lines.append([*work, *map(_duration, both), *time(sum(both))])
    training, scoring = (
        seeds * sum(getattr(one, f"{what}_seconds") for one in judges) for what in ("training", "scoring")
    )
    trained, scored, flops = (
        seeds * sum(getattr(one, what) for one in judges) for what in ("trained_tokens", "scored_tokens", "flops")
    )
    total = [_count(trained), _count(scored), f"{flops:.1e}", _duration(training), _duration(scoring)]
    seconds = training + scoring + sum(one.seconds for one in policies)
    label = f"all{f', {seeds} seeds' * (seeds > 1)}{', and sampling' * bool(policies)}"
    lines.append([label, "", *total, *time(seconds)])
    where = "on all GPUs together" if setting.gpus > 1 else "one after the other"
    return f"Work of one seed: tokens of training and of all checkpoints' scoring, time {where}\n{_table(lines)}"


def _sampling_table(policies: Sequence[SamplingEstimate]) -> str:
    from reasonlab.studies.estimate import _count, _duration, _table

    lines = [["policy", "responses", "tokens", "time"]]
    lines += [[one.policy, f"{one.responses:,}", _count(one.tokens), _duration(one.seconds)] for one in policies]
    return f"Candidates, training and test, sampled once for all seeds\n{_table(lines)}"
