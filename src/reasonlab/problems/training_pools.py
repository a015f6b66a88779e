"""Training pools against benchmarks: the overlap report, and the pool without what it shares with the tests.

A pool is a JSON lines file or a registered set. Reports are JSON, so that an evaluation can read later what the model
it scores had already seen: the report of a pool lies beside it, as `POOL.overlap.json`.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import orjson

from reasonlab.errors import UserError
from reasonlab.problems.benchmarks import compared_text, load_rows
from reasonlab.problems.overlap import Item, Match, OverlapIndex
from reasonlab.problems.registry import OWN_FILE_SUFFIXES, Benchmark, Row, benchmarks, find_benchmark
from reasonlab.problems.sources import MissingDataError, json_lines, local_file, question_column
from reasonlab.problems.suites import SUITES, find_suite
from reasonlab.runs.files import explained, sync_path, write_aside

REPORT_SUFFIX = ".overlap.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a pool shares with one benchmark: counts of its problems, and which they are."""

    problems: int
    exact: int
    overlapping: int  # exact or near
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What a pool shares with each benchmark, and which of its rows do (numbered from 0)."""

    pool: str
    rows: int
    overlapping_rows: tuple[int, ...]
    benchmarks: dict[str, Overlap]


@dataclass(frozen=True, slots=True)
class Report:
    """The pools that were checked, against what; `cleaned` says that the file beside holds none of it any more."""

    pools: tuple[PoolReport, ...]
    checked: dict[str, int]  # benchmark: number of problems
    not_checked: dict[str, str]  # benchmark: how to get its data
    cleaned: bool = False
    format: int = FORMAT

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2) + b"\n"


def check_pools(
    pools: Sequence[str],
    data: str | Path | None = None,
    against: Sequence[str] = (),
    progress: Callable[[str, int], None] = lambda pool, rows: None,
) -> Report:
    """Compare pools with benchmarks: those named in `against` (suites count), or all that have their data."""
    items: list[Item] = []
    checked: dict[str, int] = {}
    not_checked: dict[str, str] = {}
    for entry in _opponents(against):
        try:
            rows = load_rows(entry, data)
        except MissingDataError as error:
            not_checked[entry.name] = str(error)
            continue
        checked[entry.name] = len(rows)
        items += (Item(entry.name, str(row["id"]), compared_text(entry, row)) for row in rows)
    if not items:
        raise UserError("there is no benchmark to compare with", next(iter(not_checked.values()), "Name one"))
    index = OverlapIndex(items)
    reports = [_check_pool(pool, index, checked, data, progress) for pool in pools]
    return Report(tuple(reports), checked, not_checked)


def check_clean_name(out: Path) -> None:
    """A cleaned pool must be found as a pool again, so its name must say what it is."""
    if not out.name.endswith(OWN_FILE_SUFFIXES):
        raise UserError(f"{out} does not end in .jsonl or .jsonl.gz", "Rename it: the cleaned pool is JSON lines")


def write_clean(report: Report, pools: Sequence[str], out: Path, data: str | Path | None = None) -> int:
    """Write the rows that overlap with nothing to `out`, its report beside it; the number of rows written."""
    check_clean_name(out)
    kept = 0
    with _new_file(out) as file:
        for pool, found in zip(pools, report.pools, strict=True):
            dropped = set(found.overlapping_rows)
            for number, (line, _) in enumerate(pool_rows(pool, data)):
                if number not in dropped:
                    file.write(line)
                    kept += 1
    cleaned = Report(report.pools, report.checked, report.not_checked, cleaned=True)
    write_aside(out.with_name(out.name + REPORT_SUFFIX), cleaned.to_json())
    return kept


def seen_problems(pool: Path) -> dict[str, frozenset[str]] | None:
    """Which problems of which benchmark a training pool holds, by the report beside it; None where there is none.

    Benchmarks that were not checked are absent; one that was and is clean has an empty set.
    """
    path = pool.with_name(pool.name + REPORT_SUFFIX)
    if not path.is_file():
        return None
    try:
        report = orjson.loads(path.read_bytes())
        seen: dict[str, set[str]] = {name: set() for name in report["checked"]}
        for found in [] if report["cleaned"] else report["pools"]:
            for name, overlap in found["benchmarks"].items():
                seen[name].update(overlap["ids"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not an overlap report", "Write it again with `reasonlab data check`") from error
    return {name: frozenset(ids) for name, ids in seen.items()}


def pool_rows(pool: str, data: str | Path | None = None) -> Iterator[tuple[bytes, Row]]:
    """The rows of a training pool one at a time, each with its line as it is in the file."""
    entry = find_benchmark(pool)
    path = local_file(entry, data)
    if path is not None:
        for _, line, row in json_lines(path):
            if all(row.get(column) in values for column, values in entry.where.items()):
                yield line.rstrip(b"\r\n") + b"\n", row
    else:
        for row in load_rows(entry, data):
            yield orjson.dumps(row) + b"\n", row


def _check_pool(
    pool: str,
    index: OverlapIndex,
    checked: dict[str, int],
    data: str | Path | None,
    progress: Callable[[str, int], None],
) -> PoolReport:
    rows = 0

    def texts() -> Iterator[str]:
        nonlocal rows
        for _, row in pool_rows(pool, data):
            rows += 1
            question = question_column(row)
            if question is None:
                raise UserError(f"row {rows} of {pool} has no question", f"Its columns are {', '.join(row)}")
            if rows % 1000 == 0:
                progress(pool, rows)
            yield question

    matches = list(index.matches(texts()))
    overlapping = tuple(sorted({match.row for match in matches}))
    return PoolReport(pool, rows, overlapping, dict(_by_benchmark(matches, checked)))


def _by_benchmark(matches: Iterable[Match], checked: dict[str, int]) -> Iterator[tuple[str, Overlap]]:
    exact: dict[str, set[str]] = {name: set() for name in checked}
    both: dict[str, dict[str, None]] = {name: {} for name in checked}
    for match in matches:
        both[match.benchmark][match.problem] = None
        if match.kind == "exact":
            exact[match.benchmark].add(match.problem)
    for name, problems in both.items():
        if problems:
            yield name, Overlap(checked[name], len(exact[name]), len(problems), tuple(sorted(problems)))


def _opponents(against: Sequence[str]) -> list[Benchmark]:
    """The named benchmarks and members of named suites; without names, every set that is not for training."""
    if not against:
        return [entry for entry in benchmarks().values() if entry.role != "train"]
    names = [
        one
        for name in against
        for one in (find_suite(name).benchmarks if name in SUITES or ".toml" in name else (name,))
    ]
    return [find_benchmark(name) for name in dict.fromkeys(names)]


@contextmanager
def _new_file(out: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """A file that appears under its name when it is whole; compressed where the name says so."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with explained(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            # mtime 0: the same rows always make the same file
            with temporary.open("wb") as raw:
                if out.name.endswith(".gz"):
                    with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=6, mtime=0) as packed:
                        yield packed
                else:
                    yield raw
            sync_path(temporary)
            os.replace(temporary, out)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
