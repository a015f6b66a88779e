"""`reasonlab eval`: score a model with the same evaluator that training uses."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import orjson

from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import FORCED_STYLE, Answer, evaluate, summarise
from reasonlab.hardware import prepare
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.tiny_world import problem_set
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Sampling
from reasonlab.runs.files import write_aside
from reasonlab.terminal import make_observer


def evaluate_model(arguments: argparse.Namespace) -> int:
    device = prepare(arguments.device)
    tokenizer = TinyTokenizer.load()
    model = load_model(resolve_model(arguments.model)).to(device)
    if model.config.vocab_size != tokenizer.vocab_size:
        raise UserError(f"{arguments.model} does not use the tiny world's tokenizer", "Give a tiny model")
    problems = problem_set(arguments.split, arguments.problems, levels=_levels(arguments))
    sampling = Sampling(
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        stop_ids=(tokenizer.eos_id,),
        repetition_window=64,
    )
    engine = Engine(model, 256, arguments.threads)
    force = FORCED_STYLE if arguments.force else ""
    with make_observer(0, f"eval {arguments.model}", quiet=arguments.json) as observer:
        done = 0

        def progress(more: int) -> None:
            nonlocal done
            done += more
            observer.progress("answers", done, len(problems) * arguments.k)

        answers = evaluate(engine, tokenizer, problems, sampling, arguments.k, 0, force, progress)
    _print(answers, arguments)
    if arguments.out:
        write_aside(arguments.out, b"".join(orjson.dumps(a.row()) + b"\n" for a in answers))
    return 0


def _levels(arguments: argparse.Namespace) -> tuple[int, ...]:
    if not arguments.levels:
        return (6, 7) if arguments.split == "harder" else (2, 3, 4, 5)
    try:
        return tuple(int(word) for word in arguments.levels.split(","))
    except ValueError:
        raise UserError(
            f"--levels {arguments.levels!r} is not a list of numbers", "For instance --levels 2,3"
        ) from None


def _print(answers: list[Answer], arguments: argparse.Namespace) -> None:
    families = list(dict.fromkeys(answer.family for answer in answers))
    panels = {arguments.suite: answers} | {f: [a for a in answers if a.family == f] for f in families}
    if arguments.json:
        scores = {name: asdict(summarise(part)) for name, part in panels.items()}
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
        print(json.dumps({"settings": settings, "scores": scores}, indent=1))
        return
    for name, part in panels.items():
        print(summarise(part).sentence(name, arguments.temperature, arguments.max_tokens))
