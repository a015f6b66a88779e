"""Sampling a model once, to learn from what it says: warm-up demonstrations, shortest answers, preference pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.methods.group import Group
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.text_format import open_format
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.problem import Problem
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Rollout, Sampling
from reasonlab.train.exchange import Exchange
from reasonlab.train.measures import Counter, Report


def open_sampler(
    name: str,
    device: str | None,
    threads: int,
    rows: int,
    extraction: str = "explicit",
    template_arguments: Mapping[str, Any] | None = None,
) -> tuple[Engine, Exchange]:
    """An engine with any model, and how to talk with it. On CUDA a language model is sampled in bf16."""
    directory, place = resolve_model(name), prepare(device)
    model = load_model(directory)
    exchange = Exchange(open_format(directory, model.config.vocab_size, template_arguments), extraction)
    low = place.type == "cuda" and not exchange.tiny
    model = model.to(place, torch.bfloat16 if low else torch.float32)
    return Engine(model, rows, threads, exchange.format.response), exchange


def open_engine(model: Path, device: str | None, threads: int, rows: int) -> tuple[Engine, TinyTokenizer]:
    """An engine with the fp32 weights of a tiny model."""
    tokenizer = TinyTokenizer.load()
    return Engine(load_model(model).to(prepare(device)), rows, threads, tokenizer.decode), tokenizer


def sample_groups(
    engine: Engine,
    exchange: Exchange,
    problems: Sequence[Problem],
    samples: int,
    sampling: Sampling,
    seed: int,
    report: Report,
    force: str = "",
) -> list[Group]:
    """`samples` graded rollouts of every problem. `force` begins every response and is part of it."""
    forced = exchange.format.tokenizer.encode(force) if force else []
    requests = [
        Request(
            [*exchange.prompt(problem).ids, *forced],
            [key(seed, "sample", problem.id, i) for i in range(samples)],
        )
        for problem in problems
    ]
    count = Counter(report, f"sampling {samples} answers to each of {len(problems)} problems", len(problems) * samples)
    sampled = [
        (problem, [_with_beginning(rollout, len(forced)) for rollout in rollouts])
        for problem, rollouts in zip(problems, engine.generate(requests, sampling, count), strict=True)
    ]
    groups = []
    for (problem, rollouts), grades in zip(sampled, exchange.grades(sampled), strict=True):
        group = Group(problem, rollouts, grades)
        group.rewards = group.correct.astype(np.float64)
        groups.append(group)
    return groups


def _with_beginning(rollout: Rollout, forced: int) -> Rollout:
    """The forced tokens moved from the end of the prompt to the beginning of the response; no policy sampled them."""
    if not forced:
        return rollout
    cut = len(rollout.prompt) - forced
    return Rollout(
        rollout.prompt[:cut],
        rollout.prompt[cut:] + rollout.ids,
        np.concatenate([np.zeros(forced, np.float32), rollout.logprobs]),
        rollout.finish,
        np.concatenate([np.full(forced, -1, np.int32), rollout.versions]),
    )
