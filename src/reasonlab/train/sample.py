"""Sampling a model once, to learn from what it says: warm-up demonstrations, shortest answers, preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reasonlab.evaluate.graders import grade_response
from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.methods.group import Group
from reasonlab.model.checkpoint import load_model
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.problem import Problem
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Rollout, Sampling
from reasonlab.train.measures import Counter, Report


def open_engine(model: Path, device: str, threads: int, rows: int) -> tuple[Engine, TinyTokenizer]:
    """An engine with the fp32 weights of a tiny model."""
    tokenizer = TinyTokenizer.load()
    return Engine(load_model(model).to(prepare(device)), rows, threads, tokenizer.decode), tokenizer


def sample_groups(
    engine: Engine,
    tokenizer: TinyTokenizer,
    problems: Sequence[Problem],
    samples: int,
    sampling: Sampling,
    seed: int,
    report: Report,
    force: str = "",
) -> list[Group]:
    """`samples` graded rollouts of every problem. `force` begins every response and is part of it."""
    forced = tokenizer.encode(force) if force else []
    requests = [
        Request(
            [*tokenizer.encode(prompt_text(problem.question)), *forced],
            [key(seed, "sample", problem.id, i) for i in range(samples)],
        )
        for problem in problems
    ]
    count = Counter(report, f"sampling {samples} answers to each of {len(problems)} problems", len(problems) * samples)
    groups = []
    for problem, rollouts in zip(problems, engine.generate(requests, sampling, count), strict=True):
        whole = [_with_beginning(rollout, len(forced)) for rollout in rollouts]
        grades = [grade_response(problem, tokenizer.decode(rollout.ids)) for rollout in whole]
        group = Group(problem, whole, grades)
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
