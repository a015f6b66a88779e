"""From a benchmark's name to its problems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reasonlab.errors import UserError
from reasonlab.problems.problem import Problem
from reasonlab.problems.registry import LETTERS, TINY_LEVELS, TINY_SIZE, Benchmark, Row, find_benchmark
from reasonlab.problems.sources import read_rows
from reasonlab.problems.tiny_world import problem_set


def load_benchmark(name: str, data: str | Path | None = None, strict: bool = False) -> list[Problem]:
    """The problems of a set, in its own order; `data` is a directory, or `hub` (see `sources`).

    A checksum that differs is a warning, with `strict` an error; a size that differs is always an error.
    """
    entry = find_benchmark(name)
    if entry.family:
        return _tiny_problems(entry.family)
    rows = read_rows(entry, data, strict)
    problems = list(problems_of(entry, rows))
    if entry.size is None and len(problems) < len(rows):
        raise UserError(f"{len(rows) - len(problems)} rows of {name} have an empty answer", "Take them out of the file")
    return problems


def load_rows(benchmark: str | Benchmark, data: str | Path | None = None, strict: bool = False) -> list[Row]:
    """A set's rows with all their columns (`id`, `problem`, `answer`, …), for judges and for overlap checks."""
    entry = find_benchmark(benchmark) if isinstance(benchmark, str) else benchmark
    if entry.family:
        problems = _tiny_problems(entry.family)
        return [{"id": p.id, "problem": p.question, "answer": p.answer, "level": p.level} for p in problems]
    return read_rows(entry, data, strict)


def problems_of(entry: Benchmark, rows: Iterable[Row]) -> Iterator[Problem]:
    """Problems in the order of the rows, without those that have no gold."""
    for row in rows:
        gold = row.get("rating") if entry.layout == "step" else row.get("answer")
        answer = "" if gold is None else str(gold).strip()
        if answer:
            yield Problem(str(row["id"]), question_of(entry, row), answer, entry.name, _level(row.get("level")))


def question_of(entry: Benchmark, row: Row) -> str:
    """A row's question as the model sees it: choices, the solution to judge, or the step to rate come with it."""
    problem = str(row["problem"]).strip()
    if entry.layout == "choices":
        return "\n".join([problem, *(f"{letter}. {c}" for letter, c in zip(LETTERS, row["choices"], strict=False))])
    if entry.layout == "solution":
        paragraphs = (f"[{number}] {step}" for number, step in enumerate(row["steps"]))
        return "\n\n".join([f"Problem: {problem}", "Solution, in numbered paragraphs:", *paragraphs])
    if entry.layout == "step":
        return "\n\n".join([f"Problem: {problem}", "Steps so far:", *row["prev_steps"], "Last step:", str(row["step"])])
    return problem


def compared_text(entry: Benchmark, row: Row) -> str:
    """What an overlap check compares: the problem, with its choices, but without a solution somebody wrote to it."""
    return question_of(entry, row) if entry.layout == "choices" else str(row["problem"])


def _tiny_problems(family: str) -> list[Problem]:
    return problem_set("test", TINY_SIZE, families=[family], levels=TINY_LEVELS)


def _level(value: Any) -> int:
    """A level as a whole number; 0 where a source has none, or has `?` for it."""
    if isinstance(value, str):
        value = value.removeprefix("Level ").strip()  # as MATH writes it on the hub
    try:
        return int(float(value))
    except (TypeError, ValueError):
        return 0
