"""The test answers of finished models, kept on disk: what several studies ask them, and how it is read back."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import orjson

from reasonlab.config import Config
from reasonlab.evaluate.control import SUITE
from reasonlab.evaluate.evaluator import Answer
from reasonlab.model.text_format import TinyFormat
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import FAMILY_NAMES, problem_set
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Sampling
from reasonlab.runs.files import write_aside
from reasonlab.studies.recipe import StudySettings
from reasonlab.studies.scores import Scores
from reasonlab.terminal import make_observer
from reasonlab.train.exchange import Exchange
from reasonlab.train.held_out import HeldOut, open_held_out
from reasonlab.train.sample import open_sampler

STATE = Path("trainer/state.json")  # of a checkpoint: what its run took


def final(run: Path) -> Path:
    return run / "checkpoints" / "final"


def answers_file(root: Path, arm: str) -> Path:
    return root / "answers" / f"{arm}.jsonl.gz"


def asked_problems(config: Config, settings: StudySettings) -> list[Problem]:
    families = config.problems.families or FAMILY_NAMES
    return problem_set(settings.split, settings.questions, 0, families, config.evaluate.levels)


def asks_tiny_world(config: Config) -> bool:
    return config.evaluate.suite == SUITE


def open_model(model: str, config: Config) -> tuple[Engine, Exchange]:
    """An engine for a study's model, and how to talk with it: as its runs do."""
    machine = (config.device, config.threads, config.rollout.rows)
    return open_sampler(model, *machine, config.reward.extraction, config.model.template_arguments)


def held_out(config: Config, settings: StudySettings, tiny_model: bool) -> HeldOut:
    """What finished models are asked: the suite of the runs, with as many questions as the study says."""
    asked = config.evaluate.model_copy(update={"every": 1, "problems": settings.questions, "split": settings.split})
    return open_held_out(config.model_copy(update={"evaluate": asked}), tiny_model, print)


def answer(model: str, config: Config, settings: StudySettings, out: Path, force: str) -> None:
    """The test answers of a finished model; those of a tiny model can be made to begin with `force`."""
    if out.exists():
        return
    engine, exchange = open_model(model, config)
    asked = held_out(config, settings, exchange.tiny)
    text_format = TinyFormat(TinyTokenizer.load(), force) if force else exchange.format
    sampling = Sampling(
        temperature=settings.temperature,
        max_tokens=config.rollout.max_tokens,
        stop_ids=exchange.stop_ids,
        # As in the runs and in `reasonlab eval`: only tiny models are cut when they repeat themselves.
        repetition_window=config.rollout.repetition_window if exchange.tiny else 0,
    )
    with make_observer(1, out.name.removesuffix(".jsonl.gz")) as observer:
        done = 0

        def progress(more: int) -> None:
            nonlocal done
            done += more
            observer.progress("test answers", done, asked.questions * settings.samples)

        answers = asked.evaluate(engine, text_format, sampling, settings.samples, progress)
    lines = b"".join(orjson.dumps(one.row()) + b"\n" for one in answers)
    write_aside(out, gzip.compress(lines, mtime=0))


def read_answers(path: Path) -> list[Answer]:
    return [Answer(**orjson.loads(line)) for line in gzip.decompress(path.read_bytes()).splitlines()]


def on_shared_questions(scores: Mapping[str, Scores]) -> dict[str, Scores]:
    """A question that could not be graded for one arm is left out of all, so that every pair is of one question."""
    kept = set.intersection(*(set(one.problems) for one in scores.values()))
    return {arm: one.only(kept) for arm, one in scores.items()}
