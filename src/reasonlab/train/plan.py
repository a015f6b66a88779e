"""What a run will need, known from its recipe, its texts and the shape of its model: no weight is loaded for it.

The loop plans with it before a run exists, and `reasonlab train --dry-run` does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from reasonlab.config import Config
from reasonlab.errors import UserError
from reasonlab.model.checkpoint import load_config
from reasonlab.model.config import ModelConfig
from reasonlab.model.ladder import resolve_model
from reasonlab.model.lora import check_rank
from reasonlab.model.text_format import open_format
from reasonlab.problems.sources import MissingDataError
from reasonlab.train.exchange import Exchange
from reasonlab.train.experience import longest_reflection
from reasonlab.train.held_out import HeldOut, open_held_out
from reasonlab.train.memory import Workload, check_room, described, free_memory, generates, warned_of_room
from reasonlab.train.prompts import Prompts
from reasonlab.train.sources import fixed_source, longest_prompt, usable_pool


def planned_work(
    config: Config, shape: ModelConfig, exchange: Exchange, held_out: HeldOut, longest: tuple[int, int]
) -> Workload:
    """How long the texts of a run get; refused where the model cannot read them. `longest` is the source's."""
    prompt, example = longest
    question = _longest_question(config, exchange, held_out)
    reflection = longest_reflection(config, exchange, prompt) if config.mel.weight > 0 else 0
    if not exchange.tiny:  # the tiny world's texts are all short
        _check_positions(config, shape.max_positions, prompt if generates(config) else 0, question, reflection)
    answers = held_out.questions * config.evaluate.samples if held_out.panels else None
    return Workload(shape, max(prompt, question), reflection, example, answers)


def _longest_question(config: Config, exchange: Exchange, held_out: HeldOut) -> int:
    """Tokens of the longest held-out prompt; the tiny world's are all short."""
    if exchange.tiny or not config.evaluate.every:
        return 0
    asked = [panel.asked(problem) for panel in held_out.panels for problem in panel.problems]
    return max((len(prompt.ids) for prompt in exchange.format.prompts(asked)), default=0)


def _check_positions(config: Config, room: int, prompt: int, question: int, reflection: int) -> None:
    """`prompt` and `question` are the longest of training and of evaluation, 0 where nothing is sampled."""
    most, longest = max(prompt, question), config.rollout.max_tokens
    if most and most + longest > room:
        shorter = "Lower problems.longest_prompt" if prompt == most else "Evaluate on shorter problems"
        raise UserError(
            f"the longest prompt has {most:,} tokens and responses may have {longest:,}, but the model reads "
            f"{room:,} at most",
            f"Set rollout.max_tokens {room - most}" if most < room else shorter,
        )
    if reflection > room:
        raise UserError(
            f"a reflection and what it is about may have {reflection:,} tokens, but the model reads {room:,}",
            "Lower rollout.max_tokens or problems.longest_prompt, or set mel.contrast false",
        )


def rehearse(config: Config, note: Callable[[str], None]) -> None:
    """Refuse what would refuse the run, and note the memory plan.

    The data of a registered set and a GPU may be elsewhere, where the run will be: their absence is only noted.
    """
    base = resolve_model(config.model.path)
    shape = load_config(base)
    check_rank(shape, config.model.lora_rank)
    text_format = open_format(base, shape.vocab_size, config.model.template_arguments)
    exchange = Exchange(text_format, config.reward.extraction)
    held_out, longest = HeldOut(config.evaluate.suite, []), (0, 0)
    try:
        held_out = open_held_out(config, exchange.tiny, note)
    except MissingDataError as absent:
        note(f"not here, so the plan does not count its questions: {absent}")
    try:
        longest = _longest_texts(config, shape, exchange, held_out, note)
    except MissingDataError as absent:
        note(f"not here, so the plan does not count its prompts: {absent}")
    work = planned_work(config, shape, exchange, held_out, longest)
    elsewhere = config.device == "cuda" and not torch.cuda.is_available()
    if elsewhere:
        note("no CUDA device is here: whether the run fits is for you to compare")
    free = None if elsewhere else free_memory(config)
    note(described(config, work, free))
    if warning := warned_of_room(config, work):
        note(warning)
    check_room(config, work, free)


def _longest_texts(
    config: Config, shape: ModelConfig, exchange: Exchange, held_out: HeldOut, note: Callable[[str], None]
) -> tuple[int, int]:
    source = fixed_source(config, exchange, shape.max_positions, held_out, note)
    if source is not None:
        return source.longest()
    return longest_prompt(Prompts(config, usable_pool(config, exchange, held_out, note)), exchange), 0
