"""Which problems of a pool are worth training on, as in Kimi k1.5 (§2.1); everything but the answers of the model.

    pool ─> fit for rewards? ─> guessable? ─> too easy? ─> families balanced ─> curated file ─> `load_problems`

A row that is taken out keeps the reason. Draws are keyed by the seed and the problem's id: the choice does not depend
on the order of the pool, and the same pass rates give the same file. `evaluate/pass_rates.py` gets the answers.
"""

from __future__ import annotations

import difflib
import gzip
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import orjson

from reasonlab.errors import UserError
from reasonlab.keys import key
from reasonlab.problems.benchmarks import load_rows, problems_of, question_of
from reasonlab.problems.families import FAMILIES
from reasonlab.problems.problem import Problem
from reasonlab.problems.question_kinds import MULTIPLE_CHOICE, NO_GOLD, PROOF, TRUE_FALSE, UNREADABLE_GOLD, unfit
from reasonlab.problems.registry import OWN_FILE_SUFFIXES, Benchmark, Row, benchmarks, find_benchmark
from reasonlab.problems.sources import json_lines, own_columns
from reasonlab.problems.tiny_world import problem_set
from reasonlab.runs.files import write_aside

TINY = "tiny"
FAMILY_COLUMNS = ("family", "subject", "domain", "category")  # the first that a row has says what it is about
MARKED_ANSWERS = ("choice", "index", "rating")  # kinds of gold that are one of a few marks

TWO_GOLDS, REPEATED = "two golds", "repeated"
GUESSABLE, NOT_MEASURED, TRIVIAL, UNSOLVED = "guessable", "not measured", "trivial", "unsolved"
FAMILY_CAP, BEYOND_SIZE = "above the family cap", "beyond the size"
STRUCTURE = (MULTIPLE_CHOICE, TRUE_FALSE, PROOF, NO_GOLD, UNREADABLE_GOLD, TWO_GOLDS, REPEATED)
REASONS = (*STRUCTURE, GUESSABLE, NOT_MEASURED, TRIVIAL, UNSOLVED, FAMILY_CAP, BEYOND_SIZE)  # in the order of the steps

# 0 and 1 stand alone: all answers of such a group earn the same, and training gets nothing from it.
BINS = ("0", "(0,0.25]", "(0.25,0.5]", "(0.5,0.75]", "(0.75,1)", "1")
UNKNOWN_BIN = "unknown"

T = TypeVar("T")


@dataclass(slots=True)
class Candidate:
    """A problem of the pool, its row, what the model made of it, and why it was taken out (None while it is in)."""

    problem: Problem
    row: Row
    removed: str | None = None
    guessed: int | None = None  # right guesses without reasoning
    pass_rate: float | None = None

    def curated_row(self) -> Row:
        """The row as it is written: our columns first, then what else the pool had."""
        problem = self.problem
        ours = {
            "id": problem.id,
            "question": problem.question,
            "answer": problem.answer,
            "family": problem.family,
            "level": problem.level,
            "pass_rate": self.pass_rate,
            "guessed": self.guessed,
        }
        return ours | {name: value for name, value in self.row.items() if name not in ours and name != "problem"}


# --- reading ---------------------------------------------------------------------------------------------------------


def read_pool(
    name: str, data: str | Path | None = None, tiny_problems: int = 400, tiny_levels: Sequence[int] = (2, 3, 4, 5)
) -> list[Candidate]:
    """The rows of a JSON lines file, of a registered training set, or of the tiny world's train split."""
    if name == TINY:
        return [Candidate(problem, {}) for problem in problem_set("train", tiny_problems, levels=tiny_levels)]
    entry = find_benchmark(name)
    if name in benchmarks() and entry.role != "train":
        raise UserError(
            f"{name} is a benchmark: a model trained on it can no longer be judged by it",
            "`reasonlab data list` shows which sets are for training",
        )
    marked = MULTIPLE_CHOICE if entry.answer in MARKED_ANSWERS else None
    candidates = [Candidate(_problem(entry, row), row, marked) for row in load_rows(entry, data)]
    if not candidates:
        raise UserError(f"{name} holds no problems", 'Each line must be an object, {"question": …, "answer": …}')
    twice = [identity for identity, count in Counter(c.problem.id for c in candidates).items() if count > 1]
    if twice:
        raise UserError(f"{name} has several rows with the id {twice[0]!r}", "Give each its own, or none at all")
    return candidates


def load_problems(path: Path) -> list[tuple[Problem, float | None]]:
    """The problems of a curated file, each with its pass rate (None where the file has none).

    Any JSON lines file with questions and answers will do. Problems of the tiny world come back equal to those that
    `problem_set` gives.
    """
    if not path.name.endswith(OWN_FILE_SUFFIXES):
        sets = [name for name, entry in benchmarks().items() if entry.role == "train"]
        if not path.exists() and (near := difflib.get_close_matches(str(path), sets, n=1)):
            remedy = f"Perhaps you meant {near[0]!r}; a file of your own must end in .jsonl or .jsonl.gz"
            raise UserError(f"there is no training set {str(path)!r}", remedy)
        raise UserError(f"{path} does not end in .jsonl or .jsonl.gz", "Give what `reasonlab data curate` wrote")
    entry = find_benchmark(str(path))
    found: dict[str, tuple[Problem, float | None]] = {}
    for line in json_lines(path):
        problem = _problem(entry, own_columns(line, path))
        where = f"line {line.number} of {path}"
        if not problem.question or not problem.answer:
            empty = "answer" if problem.question else "question"
            raise UserError(f"{where} has an empty {empty}", "Mend the row, or take it out")
        if problem.id in found:
            raise UserError(f"{where} has the id {problem.id!r} of an earlier row", "Give each row its own")
        found[problem.id] = problem, _pass_rate(line.row.get("pass_rate"), where)
    if not found:
        remedy = 'Each line must be an object, {"question": …, "answer": …}; if it was curated, use milder filters'
        raise UserError(f"{path} is empty", remedy)
    return list(found.values())


def of_tiny_world(problem: Problem) -> bool:
    """Whether a problem is the tiny world's own, to be judged by its family's rule."""
    return problem.family in FAMILIES and problem.id.startswith(f"{problem.family}/{problem.level}/")


def _problem(entry: Benchmark, row: Row) -> Problem:
    """A row's problem, under the family its columns name; a row without a gold has an empty answer."""
    problem = next(problems_of(entry, [row]), None)
    if problem is None:
        problem = Problem(str(row["id"]), question_of(entry, row), "", entry.name)
    for column in FAMILY_COLUMNS:
        value = row.get(column)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, str) and value.strip():
            return replace(problem, family=value.strip())
    return problem


def _pass_rate(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"{where} has the pass rate {value!r}", "It is a number from 0 to 1, or null")
    return float(value)


# --- filters ---------------------------------------------------------------------------------------------------------


def remaining(candidates: Iterable[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.removed is None]


def limited(candidates: Sequence[Candidate], limit: int) -> list[Candidate]:
    """A keyed draw of the pool, in its order; a larger limit keeps what a smaller one has drawn."""
    chosen = sorted(range(len(candidates)), key=lambda i: key("limit", candidates[i].problem.id))[:limit]
    return [candidates[i] for i in sorted(chosen)]


def remove_unfit(candidates: Sequence[Candidate]) -> None:
    """Take out what cannot be rewarded by its final answer, and questions that are there twice.

    Of a question with one gold the first row stays; of one with several golds none, because some of them are wrong.
    """
    for candidate in remaining(candidates):
        candidate.removed = unfit(candidate.problem.question, candidate.problem.answer, candidate.row)
    for same in _grouped(remaining(candidates), lambda c: " ".join(c.problem.question.split())).values():
        golds = {"".join(candidate.problem.answer.split()).strip("$") for candidate in same}
        for candidate in same if len(golds) > 1 else same[1:]:
            candidate.removed = TWO_GOLDS if len(golds) > 1 else REPEATED


def remove_guessable(candidates: Sequence[Candidate]) -> None:
    for candidate in remaining(candidates):
        candidate.removed = GUESSABLE if candidate.guessed else None


def remove_by_pass_rate(candidates: Sequence[Candidate], easy: float, drop_unsolved: bool) -> None:
    """Take out problems whose pass rate is above `easy`, and with `drop_unsolved` those nobody solved."""
    for candidate in remaining(candidates):
        rate = candidate.pass_rate
        if rate is None:
            candidate.removed = NOT_MEASURED
        elif rate > easy:
            candidate.removed = TRIVIAL
        elif rate == 0 and drop_unsolved:
            candidate.removed = UNSOLVED


def balance(candidates: Sequence[Candidate], ratio: float, seed: int) -> None:
    """No family keeps more than `ratio` times the median of the families' sizes; who goes is drawn by key."""
    families = _grouped(remaining(candidates), lambda candidate: candidate.problem.family)
    if not families:
        return
    cap = int(ratio * median(map(len, families.values())))
    for members in families.values():
        for candidate in _shuffled(members, seed)[max(1, cap) :]:
            candidate.removed = FAMILY_CAP


def cut_to_size(candidates: Sequence[Candidate], size: int, seed: int) -> None:
    """Keep `size` problems, spread evenly over the families and in each family over the bins of the pass rate."""
    families = _grouped(remaining(candidates), lambda candidate: candidate.problem.family)
    shares = even_shares({family: len(members) for family, members in families.items()}, size)
    for family, members in families.items():
        bins = _grouped(members, lambda candidate: bin_of(candidate.pass_rate))
        parts = even_shares({name: len(cell) for name, cell in bins.items()}, shares[family])
        for name, cell in bins.items():
            for candidate in _shuffled(cell, seed)[parts[name] :]:
                candidate.removed = BEYOND_SIZE


def even_shares(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` dealt out as evenly as the sizes allow: small cells give all they have, the others make up for it."""
    shares: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        shares[name] = min(sizes[name], (total - sum(shares.values())) // (len(sizes) - len(shares)))
    return shares


def _shuffled(candidates: Sequence[Candidate], seed: int) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: key(seed, "curate", candidate.problem.id))


def _grouped(items: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(name(item), []).append(item)
    return groups


# --- what comes out --------------------------------------------------------------------------------------------------


def bin_of(pass_rate: float | None) -> str:
    if pass_rate is None:
        return UNKNOWN_BIN
    return BINS[0] if pass_rate == 0 else BINS[-1] if pass_rate == 1 else BINS[min(4, 1 + int(4 * pass_rate - 1e-9))]


def counts(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Rows in and out by reason, and the pass rates before and after the filters that use them."""
    reasons = Counter(candidate.removed for candidate in candidates)
    measured = [candidate for candidate in candidates if candidate.pass_rate is not None]
    return {
        "rows": len(candidates),
        "removed": {reason: reasons[reason] for reason in REASONS},
        "kept": reasons[None],
        "pass_rate": {"measured": _rates(measured), "kept": _rates(remaining(measured))},
    }


def counts_by_family(candidates: Sequence[Candidate]) -> dict[str, Any]:
    families = _grouped(candidates, lambda candidate: candidate.problem.family)
    return {family: counts(families[family]) for family in sorted(families)}


def _rates(candidates: Sequence[Candidate]) -> dict[str, Any]:
    rates = [candidate.pass_rate for candidate in candidates if candidate.pass_rate is not None]
    histogram = Counter(map(bin_of, rates))
    return {"mean": fmean(rates) if rates else None, "histogram": {name: histogram[name] for name in BINS}}


def write_curated(candidates: Sequence[Candidate], out: Path) -> int:
    """Write the rows that remain, whole or not at all; how many they are."""
    rows = [candidate.curated_row() for candidate in remaining(candidates)]
    data = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    # mtime 0: the same rows always make the same file
    write_aside(out, gzip.compress(data, mtime=0) if out.name.endswith(".gz") else data)
    return len(rows)
