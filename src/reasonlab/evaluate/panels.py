"""What an evaluation asks: benchmarks with their problems, the template that puts each question, and the grader."""

from __future__ import annotations

import argparse
import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from reasonlab.errors import UserError
from reasonlab.evaluate.graders import FAMILY, MATHEMATICS, TINY, policy_named
from reasonlab.keys import key
from reasonlab.problems.benchmarks import load_benchmark
from reasonlab.problems.problem import Problem
from reasonlab.problems.registry import find_benchmark, prompts
from reasonlab.problems.sources import ChecksumWarning, MissingDataError
from reasonlab.problems.suites import find_suite
from reasonlab.problems.tiny_world import Split, problem_set
from reasonlab.problems.training_pools import REPORT_SUFFIX, seen_problems

QUESTION = "{question}"
TINY_SUITE = "tiny"
TINY_SPLIT: Split = "validation"
TINY_PROBLEMS = 480


@dataclass(frozen=True, slots=True)
class Panel:
    """One benchmark as it is asked. Its answers carry the family (the benchmark's name, outside the tiny world)."""

    name: str
    problems: list[Problem]
    template: str
    extraction: str
    verifier: str

    @property
    def families(self) -> list[str]:
        return list(dict.fromkeys(problem.family for problem in self.problems))

    def asked(self, problem: Problem) -> str:
        return self.template.replace(QUESTION, problem.question)

    def described(self) -> dict[str, Any]:
        """For the record: what was asked, with a checksum of the problems."""
        digest = hashlib.sha256()
        for problem in self.problems:
            digest.update(orjson.dumps([problem.id, problem.question, problem.answer]) + b"\n")
        return {
            "families": self.families,
            "questions": len(self.problems),
            "sha256": digest.hexdigest(),
            "template": self.template,
            "extraction": self.extraction,
            "verifier": self.verifier,
        }


def chosen_panels(arguments: argparse.Namespace, tiny_model: bool, warn: Callable[[str], None]) -> list[Panel]:
    """The benchmarks of --suite and --benchmark (the tiny suite without either), at most --limit problems of each."""
    panels: list[Panel] = []
    suite = chosen_suite(arguments)
    if suite == TINY_SUITE:
        panels.append(_panel(TINY_SUITE, _tiny_problems(arguments), "tiny", "tiny", FAMILY, tiny_model, arguments))
    elif suite:
        missing = []
        for name in find_suite(suite).benchmarks:
            try:
                panels.append(_benchmark(name, tiny_model, arguments, warn))
            except MissingDataError as error:
                missing.append((name, error))
        if not panels:
            raise _nothing_of(suite, missing)
        for _, absent in missing:
            warn(f"{suite} is not complete: {absent}")
    panels += [_benchmark(name, tiny_model, arguments, warn) for name in arguments.benchmark or ()]
    _check_names(panels)
    return panels


def _tiny_problems(arguments: argparse.Namespace) -> list[Problem]:
    count = TINY_PROBLEMS if arguments.problems is None else arguments.problems
    if count < 1:
        raise UserError(f"--problems {count} leaves nothing to ask", "Give a positive number")
    return problem_set(arguments.split or TINY_SPLIT, count, levels=_levels(arguments))


def chosen_suite(arguments: argparse.Namespace) -> str:
    """The tiny suite where nothing is named; empty where only benchmarks are."""
    return arguments.suite or ("" if arguments.benchmark else TINY_SUITE)


def check_tiny_options(arguments: argparse.Namespace) -> None:
    """Without the tiny suite its options would silently change nothing."""
    given = [name for name in ("split", "problems", "levels") if getattr(arguments, name) not in (None, "")]
    if given and chosen_suite(arguments) != TINY_SUITE:
        raise UserError(f"--{given[0]} is for the suite tiny", "Leave it out, or add --suite tiny")


def _nothing_of(suite: str, missing: Sequence[tuple[str, MissingDataError]]) -> MissingDataError:
    (name, first), *others = missing
    if not others:
        return first
    return MissingDataError(
        f"no set of the suite {suite} has its data here: {', '.join(name for name, _ in missing)}",
        first.remedy.replace("To get it", f"To get {name}"),
    )


def _benchmark(name: str, tiny_model: bool, arguments: argparse.Namespace, warn: Callable[[str], None]) -> Panel:
    entry = find_benchmark(name)
    verifier = FAMILY if entry.family else MATHEMATICS
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ChecksumWarning)
        problems = load_benchmark(name, arguments.data)
    for one in caught:
        warn(str(one.message))
    if not problems:
        raise UserError(f"{name} holds no problems", 'Each line must be an object: {"question": "…", "answer": "…"}')
    return _panel(entry.name, problems, entry.prompt, entry.extraction, verifier, tiny_model, arguments)


def _panel(
    name: str,
    problems: list[Problem],
    prompt: str,
    extraction: str,
    verifier: str,
    tiny_model: bool,
    arguments: argparse.Namespace,
) -> Panel:
    """Tiny models know no instructions, only questions; other models must be told how to mark an answer."""
    if tiny_model:
        template, extraction = QUESTION, TINY
    elif verifier == FAMILY:
        template, extraction = prompts()["boxed"], "explicit"
    else:
        template = prompts()[prompt]
    if arguments.extraction:
        extraction = arguments.extraction
    return Panel(name, _limited(problems, arguments.limit), template, policy_named(extraction), verifier)


def _limited(problems: list[Problem], limit: int | None) -> list[Problem]:
    """A keyed draw, in the set's order: many sets are sorted by subject, and a larger limit keeps a smaller one's."""
    if limit is None or limit >= len(problems):
        return problems
    if limit < 1:
        raise UserError(f"--limit {limit} leaves nothing to ask", "Give a positive number")
    order = sorted(range(len(problems)), key=lambda i: key("limit", problems[i].id))
    return [problems[i] for i in sorted(order[:limit])]


def _check_names(panels: Sequence[Panel]) -> None:
    owners: dict[str, str] = {}
    for panel in panels:
        for family in panel.families:
            if owners.setdefault(family, panel.name) != panel.name or [p.name for p in panels].count(panel.name) > 1:
                raise UserError(
                    f"two of the benchmarks are called {family}",
                    "Name each once (a suite names its own); if both are files, rename one",
                )
        ids = {problem.id for problem in panel.problems}
        if len(ids) < len(panel.problems):
            raise UserError(f"{panel.name} has problems with the same id", "Give each its own, or none at all")


def _levels(arguments: argparse.Namespace) -> tuple[int, ...]:
    if not arguments.levels:
        return (6, 7) if arguments.split == "harder" else (2, 3, 4, 5)
    try:
        return tuple(int(word) for word in arguments.levels.split(","))
    except ValueError:
        raise UserError(
            f"--levels {arguments.levels!r} is not a list of numbers", "For instance --levels 2,3"
        ) from None


def overlap_with(pool: Path, panels: Sequence[Panel]) -> dict[str, Any]:
    """Which of the problems asked lie in a training pool, by family; None for a set that was never compared with it."""
    pool = pool.with_name(pool.name.removesuffix(REPORT_SUFFIX))
    seen = seen_problems(pool)
    if seen is None:
        raise UserError(
            f"there is no overlap report beside {pool}",
            f"Write one: reasonlab data check {pool} --json > {pool}{REPORT_SUFFIX}",
        )
    found: dict[str, list[str] | None] = {}
    for panel in panels:
        known = seen.get(panel.name)
        for family in panel.families:
            mine = {problem.id for problem in panel.problems if problem.family == family}
            found[family] = None if known is None else sorted(mine & known)
    return {"pool": pool.name, "problems": found}
