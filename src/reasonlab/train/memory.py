"""The memory plan of a run: what it will need, before it needs it, and what to change where it does not fit.

The formulas are those of `studies/footprint.py`; here they meet a recipe, a model and the longest prompt.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from reasonlab.config import Config, DpoConfig, RestConfig, SftConfig
from reasonlab.errors import UserError
from reasonlab.methods import build_method
from reasonlab.model.config import ModelConfig
from reasonlab.studies.footprint import BF16, FP32, GIB, Memory, activation_bytes, cache_bytes

SLACK = 1.05  # the allocator's rounding, workspaces of libraries, what the formulas leave out
MOST_CHANGES = 3


@dataclass(frozen=True, slots=True)
class Workload:
    """What decides the memory beside the recipe: the model's shape, and the longest prompts in tokens."""

    shape: ModelConfig
    prompt: int
    reflection: int = 0  # the longest example of MEL, its context included
    example: int = 0  # the longest example, where they are known beforehand
    answers: int | None = None  # of one evaluation, where its questions are counted


def planned_memory(config: Config, work: Workload) -> Memory:
    """Bytes of one process that samples and learns, on one device."""
    shape, cuda = work.shape, config.device == "cuda"
    low = cuda and config.learner.bfloat16
    parameters, workers = shape.parameter_count(), 1 if cuda else config.threads
    trained = trained_parameters(config, shape)
    adapters = trained < parameters
    activations = activation_bytes(shape, largest_micro_batch(config, work), low, config.learner.recompute)
    return Memory(
        weights=FP32 * parameters,
        gradients=_gradients(trained, low),
        moments=2 * FP32 * trained,
        activations=workers * activations,
        working=BF16 * parameters if low else 0,  # the copy that computes, in the learner as in the engine
        reference=(FP32 + (BF16 if low else 0)) * parameters if build_method(config).needs_reference else 0,
        engine=(BF16 if low else FP32) * parameters if adapters else 0,  # with the adapters merged in
        cache=workers * cache_slots(config, work) * cache_bytes(shape, BF16 if low else FP32),
        shared=True,
    )


def _gradients(trained: int, low: bool) -> int:
    """The sum, and the gradients of the newest micro-batch in the dtype that computes.

    This is the most there can be: a captured update adds the gradients of matrices to the sum as they are computed
    (`model/accumulate.py`) and holds at most one of them. But whether an update is captured is known only on its GPU.
    """
    return (FP32 + (BF16 if low else FP32)) * trained


def trained_parameters(config: Config, shape: ModelConfig) -> int:
    """All, or those of the adapters: r·(in + out) for each of the seven projections of a layer."""
    if not config.model.lora_rank:
        return shape.parameter_count()
    h, f = shape.hidden_size, shape.intermediate_size
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return config.model.lora_rank * shape.layers * (2 * (h + q) + 2 * (h + k) + 3 * (h + f))


def cache_slots(config: Config, work: Workload) -> int:
    """Rows times columns of one worker's cache: a power of two (or `rollout.rows`) times a multiple of 64."""
    workers = 1 if config.device == "cuda" else config.threads
    # Those of several iterations may still be unfinished when new ones begin.
    rollouts = segments(config) * config.rollout.prompts * config.rollout.samples if generates(config) else 0
    most = config.evaluate.problems * config.evaluate.samples if work.answers is None else work.answers
    answers = most if config.evaluate.every else 0
    reflections = config.rollout.prompts * config.mel.pairs if work.reflection else 0  # all problems may be mixed

    def slots(responses: int, columns: int) -> int:
        share = math.ceil(responses / workers)
        rows = min(config.rollout.rows, 2 ** math.ceil(math.log2(share))) if share else 0
        return rows * 64 * math.ceil(columns / 64)

    whole = slots(max(rollouts, answers), work.prompt + config.rollout.max_tokens)
    return max(whole, slots(reflections, work.reflection))


def segments(config: Config) -> int:
    """In how many iterations a rollout is sampled, at most."""
    return math.ceil(config.rollout.max_tokens / (config.rollout.segment_tokens or config.rollout.max_tokens))


def largest_micro_batch(config: Config, work: Workload) -> int:
    """Tokens: the budget, or all examples of an iteration at full length if these are fewer; at least one response
    (DPO: a pair; MEL: an example)."""
    together = 2 if isinstance(config.method, DpoConfig) else 1
    example = work.example or work.prompt + config.rollout.max_tokens
    examples = segments(config) * examples_learned(config)  # groups begun in several iterations may end in one
    reflections = config.rollout.prompts * config.mel.pairs
    most = max(examples * example, reflections * work.reflection)
    return max(min(config.learner.token_budget, most), together * example, work.reflection)


def examples_learned(config: Config) -> int:
    """How many examples an iteration learns from, where no group is left out."""
    match config.method:
        case SftConfig() | RestConfig(keep="best"):
            return config.rollout.prompts
        case DpoConfig():
            return 2 * config.rollout.prompts
        case _:
            return config.rollout.prompts * config.rollout.samples


def generates(config: Config) -> bool:
    """Whether the method samples rollouts."""
    return not isinstance(config.method, SftConfig | DpoConfig)


def described(config: Config, work: Workload, free: float | None = None) -> str:
    """The plan in one paragraph. `free` is what the device has left, where that is known."""
    memory = planned_memory(config, work)
    workers = 1 if config.device == "cuda" else config.threads
    tokens, slots = largest_micro_batch(config, work), workers * cache_slots(config, work)
    columns = 64 * math.ceil((work.prompt + config.rollout.max_tokens) / 64)
    how = ", layers recomputed" if config.learner.recompute else ""
    parts = {
        "weights": memory.weights,
        "optimizer": memory.moments,
        "gradients": memory.gradients,
        f"activations of {tokens:,} tokens{how}": memory.activations,
        "bf16 copy to compute with": memory.working,
        "engine's copy with the adapters": memory.engine,
        f"key-value cache, {slots // columns:,} rows of {columns:,} tokens": memory.cache,
        "reference model": memory.reference,
    }
    text = "; ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
    room = "" if free is None else f", {_size(free)} are free"
    return f"memory plan for {work.shape.parameter_count():,} parameters, {_size(memory.peak)} at most{room}: {text}"


def physical_memory() -> float:
    """Bytes of the machine's memory; unlimited where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def free_memory(config: Config) -> float | None:
    """Bytes of the GPU that this process can have: the free ones, and those torch holds for it; None on the CPU."""
    if config.device != "cuda":
        return None
    return float(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())


def check_room(config: Config, work: Workload, free: float | None) -> None:
    """Refuse a run that cannot fit, with the changes that help most."""
    if free is not None and SLACK * planned_memory(config, work).peak > free:
        needed = _size(SLACK * planned_memory(config, work).peak)
        raise UserError(f"the run needs about {needed}, and {_size(free)} are free", advice(config, work))


def warned_of_room(config: Config, work: Workload) -> str:
    """On a CPU the plan only warns: memory is shared with others there, and swapped."""
    there = physical_memory()
    if config.device != "cpu" or planned_memory(config, work).peak <= there:
        return ""
    return f"the memory plan is more than the {_size(there)} of this machine. {advice(config, work)}"


def out_of_memory(config: Config, work: Workload) -> UserError:
    """What is said instead of a crash, where the plan was too optimistic or others took the memory."""
    planned = _size(planned_memory(config, work).peak)
    return UserError(f"the GPU ran out of memory; {planned} were planned", advice(config, work))


def advice(config: Config, work: Workload) -> str:
    """The three changes of the recipe that free most, each by itself."""
    before = planned_memory(config, work).peak
    freed = [(before - planned_memory(*changed).peak, text) for text, changed in _changes(config, work)]
    best = sorted((one for one in freed if one[0] > 0), key=lambda one: -one[0])[:MOST_CHANGES]
    if not best:
        return "Use a smaller model, or a GPU with more memory" if config.device == "cuda" else "Use a smaller model"
    return "Change " + ", or ".join(f"{text} (frees {_size(size)})" for size, text in best)


def _changes(config: Config, work: Workload) -> Iterator[tuple[str, tuple[Config, Workload]]]:
    """What can be changed, and what would then be planned for: half of what there is, or none of it."""
    halves: dict[str, int] = {
        "rollout.rows": config.rollout.rows // 2,
        "learner.token_budget": min(config.learner.token_budget, largest_micro_batch(config, work)) // 2,
        "rollout.max_tokens": config.rollout.max_tokens // 2,
    }
    for name, value in halves.items():
        if value:
            yield f"{name} = {value}", (_with(config, name, value), work)
    if work.prompt > 1 and generates(config):
        shorter = replace(work, prompt=work.prompt // 2)
        yield f"problems.longest_prompt = {shorter.prompt}", (config, shorter)
    if not config.learner.recompute:
        yield "learner.recompute = true", (_with(config, "learner.recompute", True), work)
    if not config.model.lora_rank:
        yield "model.lora_rank = 16", (_with(config, "model.lora_rank", 16), work)
    if getattr(config.method, "kl", 0.0) > 0:
        yield "method.kl = 0", (_with(config, "method.kl", 0.0), work)


def _with(config: Config, name: str, value: Any) -> Config:
    section, key = name.split(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})


def _size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"
