"""Suites: benchmarks that are evaluated together, the built-in ones and those a user writes down in TOML.

A user's file looks like this, and its suites are named `FILE.toml:mine`, or `FILE.toml` where it has only one:

    [suites.mine]
    title = "What we look at every week"
    benchmarks = ["math500", "tiny/sum", "our-problems.jsonl"]     # files relative to the TOML file
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonlab.errors import UserError
from reasonlab.problems.benchmarks import load_benchmark
from reasonlab.problems.families import FAMILIES
from reasonlab.problems.problem import Problem
from reasonlab.problems.registry import OWN_FILE_SUFFIXES, TINY_PREFIX, find_benchmark
from reasonlab.problems.sources import MissingDataError


@dataclass(frozen=True, slots=True)
class Suite:
    """Names of benchmarks, in the order of the panels they become."""

    name: str
    title: str
    benchmarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadedSuite:
    """The problems of a suite by benchmark, and for each benchmark without data what is to be done about it."""

    suite: Suite
    problems: dict[str, list[Problem]]
    missing: dict[str, str]


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "k15",
            "The public panels of the Kimi k1.5 figure; GAOKAO-Bench stands in for its school sciences",
            (
                *("omni_math_500", "math500", "aime24", "gaokao_math_fill", "gpqa_diamond"),
                *("gaokao_biology", "gaokao_chemistry", "gaokao_physics", "kaoyan"),
            ),
        ),
        Suite(
            "acemath7",
            "The seven sets of AceMath-RewardBench",
            (
                *("gsm8k_test", "math500", "minerva_math", "gaokao2023en"),
                *("olympiadbench", "college_math", "mmlu_stem"),
            ),
        ),
        Suite("mel5", "The five sets of MEL", ("aime24", "aime25", "amc23", "math500", "olympiadbench")),
        Suite("reasonflux4", "The four sets of ReasonFlux-PRM", ("aime24", "aime25", "math500", "gpqa_diamond")),
        Suite("tiny", "The families of the tiny world", tuple(TINY_PREFIX + family for family in FAMILIES)),
    )
}


def find_suite(name: str) -> Suite:
    """A built-in suite, or one of a user's TOML file."""
    if name in SUITES:
        return SUITES[name]
    file, _, chosen = name.rpartition(":") if not name.endswith(".toml") else (name, "", "")
    if file.endswith(".toml"):
        return _chosen(read_suites(Path(file)), chosen, file)
    near = difflib.get_close_matches(name, SUITES, n=1)
    hint = f"Perhaps you meant {near[0]!r}" if near else f"There are {', '.join(SUITES)}"
    raise UserError(f"there is no suite {name!r}", f"{hint}; your own are named FILE.toml:NAME")


def load_suite(name: str, data: str | Path | None = None, strict: bool = False) -> LoadedSuite:
    """The problems of every benchmark whose data is there; an error only where none is."""
    suite = find_suite(name)
    loaded = LoadedSuite(suite, {}, {})
    for benchmark in suite.benchmarks:
        try:
            loaded.problems[find_benchmark(benchmark).name] = load_benchmark(benchmark, data, strict)
        except MissingDataError as error:
            loaded.missing[benchmark] = str(error)
    if not loaded.problems:
        raise UserError(f"no benchmark of the suite {suite.name} has its data", next(iter(loaded.missing.values())))
    return loaded


def read_suites(path: Path) -> dict[str, Suite]:
    """The suites of a TOML file, every name in them checked."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})", "Check its name") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}", "See docs/benchmarks.md for an example") from None
    suites = tables.pop("suites", None)
    if not isinstance(suites, dict) or not suites or tables:
        raise UserError(f"{path} must hold [suites.NAME] tables and nothing else", "See docs/benchmarks.md")
    return {name: _suite(name, table, path) for name, table in suites.items()}


def _suite(name: str, table: Any, path: Path) -> Suite:
    table = table if isinstance(table, dict) else {}
    names, title = table.get("benchmarks"), table.get("title", name)
    if unknown := set(table) - {"benchmarks", "title"}:
        raise UserError(f"suite {name} of {path} has the unknown key {min(unknown)!r}", "It takes benchmarks and title")
    if not isinstance(names, list) or not names or not all(isinstance(item, str) for item in names):
        raise UserError(f"suite {name} of {path} names no benchmarks", 'For instance benchmarks = ["math500"]')
    found = [str(path.parent / item) if item.endswith(OWN_FILE_SUFFIXES) else item for item in names]
    for item in found:
        find_benchmark(item)
    return Suite(name, str(title), tuple(found))


def _chosen(suites: dict[str, Suite], name: str, file: str) -> Suite:
    if not name and len(suites) == 1:
        return next(iter(suites.values()))
    if name not in suites:
        said = f"has no suite {name!r}" if name else "has several suites"
        raise UserError(f"{file} {said}", f"Name one: {', '.join(f'{file}:{one}' for one in suites)}")
    return suites[name]
