"""What a run is evaluated on while it trains: the tiny world's held-out split, or real benchmarks.

No training problem may be among them. The tiny world's splits are disjoint by construction; a pool from elsewhere is
compared with the benchmarks (`problems/overlap.py`), and what it shares with the held-out ones is not trained on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reasonlab.config import Config
from reasonlab.errors import UserError
from reasonlab.evaluate.control import SUITE
from reasonlab.evaluate.evaluator import Answer, Task, answers_to
from reasonlab.evaluate.graders import FAMILY, TINY, grader_for
from reasonlab.evaluate.panels import QUESTION, Panel, chosen_panels
from reasonlab.evaluate.responder import EngineResponder, Progress
from reasonlab.model.text_format import TextFormat
from reasonlab.problems.overlap import Item, OverlapIndex
from reasonlab.problems.registry import OWN_FILE_SUFFIXES, benchmarks, prompts
from reasonlab.problems.sources import data_directory
from reasonlab.problems.suites import SUITES
from reasonlab.problems.tiny_world import FAMILY_NAMES, problem_set
from reasonlab.problems.training_pools import check_pools, seen_problems
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Sampling


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The benchmarks of an evaluation, under the name they have in the record."""

    suite: str
    panels: list[Panel]

    @property
    def questions(self) -> int:
        return sum(len(panel.problems) for panel in self.panels)

    def evaluate(
        self, engine: Engine, text_format: TextFormat, sampling: Sampling, samples: int, progress: Progress
    ) -> list[Answer]:
        """`samples` answers to every problem, with the seeds that `reasonlab eval` uses."""
        responder = EngineResponder(engine, text_format)
        answers: list[Answer] = []
        for panel in self.panels:
            tasks = [Task(problem, panel.asked(problem), range(samples)) for problem in panel.problems]
            grader = grader_for(panel.extraction, panel.verifier)
            answers += answers_to(tasks, responder, sampling, grader, 0, progress)
        return answers

    def shared_with(self, questions: Sequence[str]) -> dict[int, list[str]]:
        """Which of these questions (by number) are problems of the benchmarks, exactly or nearly, and of which."""
        items = [
            Item(panel.name, problem.id, problem.question)
            for panel in self.panels
            if panel.verifier != FAMILY
            for problem in panel.problems
        ]
        found: dict[int, list[str]] = {}
        if items:
            for match in OverlapIndex(items).matches(questions):
                found.setdefault(match.row, []).append(match.benchmark)
        return found


def open_held_out(config: Config, tiny_model: bool, warn: Callable[[str], None]) -> HeldOut:
    """The problems that `evaluate.suite` names, at most `evaluate.problems` of each benchmark.

    A benchmark that is named is held out also from a run that never asks it.
    """
    chosen = config.evaluate
    if not chosen.every and chosen.suite == SUITE:
        return HeldOut(SUITE, [])
    if chosen.suite == SUITE:
        families = config.problems.families or FAMILY_NAMES
        problems = problem_set(chosen.split, chosen.problems, 0, families, chosen.levels)
        how = (QUESTION, TINY) if tiny_model else (prompts()["boxed"], "explicit")
        return HeldOut(SUITE, [Panel(SUITE, problems, *how, FAMILY)])
    names = [_registered(name.strip()) for name in chosen.suite.split(",")]
    is_suite = len(names) == 1 and (names[0] in SUITES or ".toml" in names[0])
    arguments = argparse.Namespace(
        suite=names[0] if is_suite else None,
        benchmark=[] if is_suite else names,
        data=config.data or None,
        limit=chosen.problems,
        extraction="",
    )
    panels = chosen_panels(arguments, tiny_model, warn)
    return HeldOut(names[0] if is_suite else ",".join(panel.name for panel in panels), panels)


def _registered(name: str) -> str:
    """`gsm8k` means the part of it that is for testing."""
    return f"{name}_test" if name not in benchmarks() and f"{name}_test" in benchmarks() else name


def known_overlap(config: Config) -> dict[str, int]:
    """How many problems of each benchmark the training pool holds: by the report beside it, or counted now.

    Counting needs the benchmarks, so it is done where there is a directory of them.
    """
    pool = config.problems.path
    seen = seen_problems(Path(pool).expanduser()) if pool.endswith(OWN_FILE_SUFFIXES) else None
    if seen is not None:
        return {name: len(problems) for name, problems in seen.items() if problems}
    if not pool or data_directory(config.data or None) is None:
        return {}
    found = check_pools([str(Path(pool).expanduser())], config.data or None).pools[0]
    shared = {name: overlap.overlapping for name, overlap in found.benchmarks.items()}
    if 2 * len(found.overlapping_rows) > found.rows:
        names = ", ".join(name for name, count in shared.items() if count)
        raise UserError(
            f"{len(found.overlapping_rows):,} of the {found.rows:,} problems of {pool} are in benchmarks ({names})",
            "Train on other problems, and keep these for evaluation",
        )
    return shared
