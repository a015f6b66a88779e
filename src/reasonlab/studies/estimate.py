"""`reasonlab study NAME --dry-run`: what a study would take, by formula. Nothing is run and nothing downloaded.

The formulas are in `footprint.py`, the machines, models and lengths in `machines.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

import numpy as np

from reasonlab.config import Config
from reasonlab.methods import build_method
from reasonlab.model.ladder import model_name
from reasonlab.studies import long2short, mel_vs_grpo, prm_selection
from reasonlab.studies.footprint import GIB, Memory, Numbers, forward_flops
from reasonlab.studies.machines import Cluster, Setting, ThisMachine, read_about, reflects
from reasonlab.studies.recipe import StudyRecipe
from reasonlab.train.memory import examples_learned, generates

WIDTH = 118


# --- the estimate ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Branch:
    """What Meta-Experience Learning adds to an arm: reflections, their replays, and the NLL of those that are kept."""

    mixed: float  # share of the problems
    reflections: float  # over the whole run
    context: float  # mean tokens of the prompt a reflection is written after,
    reflection: float  # of what is learned after it,
    replay: float  # and of the second attempt
    kept: float  # share of the reflections
    generated_tokens: float
    trained_tokens: float  # in one pass over all iterations
    flops: float  # of a forward pass over them
    seconds: float  # of reading the contexts, writing and replaying


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
    branch: Branch | None = None  # of arms with MEL; counted in what stands above

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
    setting, configs = setting_of(recipe), dict(recipe.arms)
    if study == mel_vs_grpo.name and mel_vs_grpo.MATCHED in configs:
        configs[mel_vs_grpo.MATCHED] = _matched(configs, setting)
    if study == prm_selection.name:
        configs = prm_selection.counted(recipe)
    arms = [_trained(arm, config, setting) for arm, config in configs.items()]
    return arms + [_sampled(*piece, setting) for piece in _other_pieces(study, recipe)]


def _matched(configs: Mapping[str, Config], setting: Setting) -> Config:
    """GRPO with more problems an iteration, as the study sets them: in proportion to what MEL generates."""
    mel, grpo = (_trained(arm, configs[arm], setting).generated_tokens for arm in (mel_vs_grpo.MEL, mel_vs_grpo.GRPO))
    config = configs[mel_vs_grpo.MATCHED]
    rollout = config.rollout.model_copy(update={"prompts": round(config.rollout.prompts * mel / grpo)})
    return config.model_copy(update={"rollout": rollout})


def _trained(arm: str, config: Config, setting: Setting) -> ArmEstimate:
    shape, rollout = setting.shape(config), config.rollout
    means = np.minimum(setting.lengths(arm, np.arange(config.iterations, dtype=float)), rollout.max_tokens)
    sampled = rollout.prompts * rollout.samples if generates(config) else 0
    examples = examples_learned(config)
    # Linear work meets a prompt once for all examples of a group; attention meets it in every example.
    tokens = examples * means.sum() + rollout.prompts * setting.prompt * config.iterations
    squares = examples * (setting.prompt**2 + 2 * setting.prompt * means + means**2 * (1 + setting.spread**2)).sum()
    forward = forward_flops(shape, float(tokens), float(squares))
    updates = config.learner.epochs
    single = config.learner.inner_steps * updates == 1
    measured = config.device == "cuda" and not single  # the logprobs before the update
    passes = 3 * updates + measured + build_method(config).needs_reference
    branch = _branch(config, setting, means) if config.mel.weight > 0 else None
    steps = updates * config.learner.inner_steps  # each has the whole NLL as its second objective

    points = _evaluations(config)
    answers = config.evaluate.problems * config.evaluate.samples
    at = np.minimum(setting.lengths(arm, np.array(points, dtype=float)), rollout.max_tokens)
    seconds = setting.decoding_seconds(config, sampled, means)
    seconds += setting.decoding_seconds(_whole(config), answers, at)
    memory = setting.memory(config)
    update = setting.training_seconds(config, float(tokens) * passes / 3, passes * forward)
    flops, generated, learned = passes * forward, float(sampled * means.sum()), float(tokens * updates)
    if branch:
        update += setting.training_seconds(config, steps * branch.trained_tokens, 3 * steps * branch.flops)
        flops += 3 * steps * branch.flops
        generated += branch.generated_tokens
        learned += steps * branch.trained_tokens
        seconds += branch.seconds
    return ArmEstimate(
        arm=arm,
        model=model_name(config.model.path),
        parameters=shape.parameter_count(),
        memory=memory,
        fits=None if setting.capacity is None else memory.peak <= setting.capacity,
        iterations=config.iterations,
        mean_length=float(means.mean()),
        generated_tokens=generated,
        evaluated_tokens=float(answers * at.sum()),
        trained_tokens=learned,
        flops=flops,
        rollout_seconds=setting.overhead * seconds,
        update_seconds=setting.overhead * update,
        gpus=setting.gpus,
        price=setting.price,
        branch=branch,
    )


def _branch(config: Config, setting: Setting, means: Numbers) -> Branch:
    """MEL beside rollouts of these mean lengths: an attempt and a replay are as long as a rollout.

    A context is the question, the instruction and the attempts shown. Where right rollouts are imitated instead, the
    question is the context and nothing is generated. Where the rule alone is learned, it counts as a whole reflection.
    """
    mel, about, shape = config.mel, setting.reflecting(config), setting.shape(config)
    writes, shown = reflects(config), 2 if config.mel.contrast and reflects(config) else 1
    reflections = about.mixed * config.rollout.prompts * mel.pairs  # in an iteration
    if writes:
        context = setting.prompt + about.instruction + shown * means
        learned = np.full(len(means), min(about.reflection, float(mel.max_tokens)))
    else:
        context, learned = np.full(len(means), setting.prompt), means
    all_kept = not (writes and mel.replay_filter)
    kept = np.ones(len(means)) if all_kept else about.kept_at(np.arange(len(means), dtype=float))
    scatter = shown * (setting.spread * means) ** 2  # the attempts' share of the variance of n
    n = context + learned
    trained, squares = reflections * kept * n, reflections * kept * (n**2 + scatter)
    generated = seconds = 0.0
    if writes:
        read = float(reflections * context.sum())
        reading = forward_flops(shape, read, float(reflections * (context**2 + scatter).sum()))
        short = _limited(config, mel.max_tokens)
        generated = float(reflections * (learned + means).sum())
        seconds = setting.training_seconds(config, read / 3, reading)  # a third of an update
        seconds += setting.decoding_seconds(short, reflections, learned, context)
        seconds += setting.decoding_seconds(_whole(config), reflections, means, setting.prompt + learned)
    return Branch(
        mixed=about.mixed,
        reflections=reflections * len(means),
        context=float(context.mean()),
        reflection=float(learned.mean()),
        replay=float(means.mean()) if writes else 0.0,
        kept=float(kept.mean()),
        generated_tokens=generated,
        trained_tokens=float(trained.sum()),
        flops=forward_flops(shape, float(trained.sum()), float(squares.sum())),
        seconds=seconds,
    )


def _evaluations(config: Config) -> list[int]:
    """The iterations after which a run is evaluated; both ends twice if the forced style is looked at as well."""
    every, last = config.evaluate.every, config.iterations
    if not every:
        return []
    ends = [0, last]
    return [*ends, *range(every, last, every), *(ends if config.evaluate.forced_style else [])]


def _other_pieces(study: str, recipe: StudyRecipe) -> list[tuple[str, Config, int]]:
    """What a study samples beside its arms: name, the settings it samples with, and how many responses."""
    settings, arms = recipe.settings, recipe.arms
    if study == mel_vs_grpo.name:
        models = len([*arms, mel_vs_grpo.BASE])
        return [("test answers", next(iter(arms.values())), models * settings.questions * settings.samples)]
    if study == prm_selection.name:
        return [(what, arms[prm_selection.STUDENT], count) for what, count in prm_selection.sampled(recipe).items()]
    if study != long2short.name:
        return []
    config = arms.get(long2short.LONG, next(iter(arms.values())))
    answers = settings.sampled_problems * settings.sampled_answers
    finished = [arm for arm in long2short.FINISHED if arm in arms or arm == long2short.MERGE]
    references = long2short.references(tiny=True)
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
        model=model_name(config.model.path),
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
    return _limited(config, config.rollout.max_tokens)


def _limited(config: Config, max_tokens: int) -> Config:
    """Whole responses of at most so many tokens."""
    changes = {"segment_tokens": 0, "max_tokens": max_tokens}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)})


# --- the text --------------------------------------------------------------------------------------------------------

FORMULAS = (
    "P parameters, W without norms and input embeddings, h hidden, f feed-forward, q = heads × head size, "
    "k = key-value heads × head size, n tokens of a sequence.",
    "Memory, bytes: weights 4P, gradients 4P (in one process two sets), Adam's moments 8P, engine 2P, its bf16 copy.",
    "Activations of a token and layer: 16h + 4·(heads + 2) + b·(2h + 3q + 3k + 4f), b = 2 in bf16 and 4 in fp32; with "
    "recomputation one layer's, and 4h for every layer. Also the logits of one chunk. If heads are normalised (Qwen3), "
    "another 4·(q + k)·(1 or in bf16 2) + 4·(heads + key-value heads).",
    "Working: bf16 weights in use; if sharded, the embeddings and two layers with their gradients. "
    "Cache: rows × (prompt limit + max_tokens) × 2·layers·k·b.",
    "Update: 6·W·Σn + 6·layers·q·Σn² operations (12·layers·q·n², halved because attention is causal); a third of that "
    "for each further forward pass (logprobs before several steps, reference model).",
    "Decoding step: 2·W bytes and the cache of all rows over the bandwidth, or the operations over the peak, whichever "
    "takes longer; a pass lasts at least as long as its longest response.",
)
MEL_FORMULAS = (
    "MEL: reflections = mixed share × prompts × pairs in an iteration. Generated: reflections × (reflection + replay). "
    "A replay, like both attempts that are shown, is as long as a rollout.",
    "MEL, the NLL: kept share × reflections more sequences in every optimizer step, n = question + instruction + wrong "
    "+ right + reflection, in the Σn and Σn² of the update. Before a reflection is written its context is read, a "
    "forward pass over question + instruction + wrong + right that counts as rollout.",
)
MATCHED_FORMULA = "grpo-matched: round(prompts × tokens generated by mel / by grpo) problems in an iteration."


def estimate(study: str, recipe: StudyRecipe) -> str:
    """The estimate as text: models, memory, work, formulas, assumptions."""
    setting, rows, seeds = setting_of(recipe), estimates(study, recipe), recipe.settings.seeds
    trained = [row for row in rows if row.memory]
    reflecting, matched = any(row.branch for row in rows), any(row.arm == mel_vs_grpo.MATCHED for row in rows)
    formulas = [*FORMULAS, *(MEL_FORMULAS if reflecting else ()), *([MATCHED_FORMULA] if matched else ())]
    parts = [
        f"{study}, scale {recipe.scale}: an estimate by formula. Nothing was run.",
        f"{setting.describe()}\n{_models(trained)}",
        _memory_table(setting, trained),
        _work_table(setting, rows, seeds),
        *([_reflection_table(rows)] if reflecting else []),
        "Formulas\n" + _list(formulas),
        "Assumptions\n" + _list([*setting.assumptions(), *_about_mel(study, recipe, setting), *_left_out(recipe)]),
    ]
    return "\n\n".join(parts)


def _about_mel(study: str, recipe: StudyRecipe, setting: Setting) -> list[str]:
    texts = []
    if with_mel := [config for config in recipe.arms.values() if config.mel.weight > 0]:
        about = setting.reflecting(with_mel[0])
        kept = about.kept if isinstance(about.kept, str) else f"{about.kept:g}"
        texts = [
            f"Mixed problems: {about.mixed:g} of an iteration's ({about.mixed_reason}).",
            f"Reflections: {about.reflection:g} tokens, after an instruction of {about.instruction}; kept: {kept} "
            f"({about.reason}).",
        ]
    if study == mel_vs_grpo.name:
        texts.append("Test answers: those of the base model are counted with every seed, and made once.")
    return texts


def _models(rows: Sequence[ArmEstimate]) -> str:
    arms: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        arms.setdefault((row.model, row.parameters), []).append(row.arm)
    lines = (f"{model}, {count:,} parameters: {', '.join(of)}" for (model, count), of in arms.items())
    return "\n".join(fill(line, WIDTH, subsequent_indent="  ") for line in lines)


def _left_out(recipe: StudyRecipe) -> list[str]:
    if any(config.rollout.dynamic_rounds for config in recipe.arms.values()):
        return ["The extra rounds of dynamic sampling are not counted."]
    if prm_selection.STUDENT in recipe.arms:
        return [prm_selection.LEFT_OUT]
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


def _reflection_table(rows: Sequence[ArmEstimate]) -> str:
    header = ["arm", "mixed", "reflections", "context", "reflection", "replay", "kept"]
    lines = [[*header, "generated", "of all", "trained"]]
    for row in rows:
        if branch := row.branch:
            cells = [row.arm, f"{branch.mixed:.0%}", _count(branch.reflections)]
            lengths = (branch.context, branch.reflection, branch.replay)
            cells += [f"{length:,.0f}" if length else "-" for length in lengths]
            made = branch.generated_tokens
            cells += [f"{branch.kept:.0%}", *([_count(made), f"{made / row.generated_tokens:.0%}"] if made else "--")]
            lines.append([*cells, _count(branch.trained_tokens)])
    return f"Reflections, part of the work above: mean tokens of each, and tokens together\n{_table(lines)}"


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
