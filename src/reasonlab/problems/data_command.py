"""`reasonlab data`: what benchmarks there are, whether a training pool contains any of them, and what to train on."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from reasonlab.options import Parser
from reasonlab.problems import curate_command
from reasonlab.problems.registry import Benchmark, benchmarks
from reasonlab.problems.sources import DATA_VARIABLE, ChecksumWarning, data_directory, local_file
from reasonlab.problems.suites import SUITES
from reasonlab.problems.training_pools import REPORT_SUFFIX, Report, check_clean_name, check_pools, write_clean
from reasonlab.train import sample_command

_EXAMPLES = """example: reasonlab data list

more:
  reasonlab data list --data ~/benchmarks
  reasonlab data check dapo_math_17k --data ~/benchmarks --against mel5 --clean clean/dapo.jsonl.gz
  reasonlab data curate tiny --model tiny-1m --out curated.jsonl
  reasonlab data sample tiny-1m --keep shortest --out shortest.jsonl"""


def run(words: list[str]) -> int:
    """Entry point of the command."""
    arguments = _parser().parse_args(words)
    with _warnings_in_one_line():
        if arguments.what == "curate":
            return curate_command.run(arguments, words)
        if arguments.what == "sample":
            return sample_command.run(arguments)
        return _list(arguments) if arguments.what == "list" else _check(arguments)


def _parser() -> argparse.ArgumentParser:
    shape: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(prog="reasonlab data", description=__doc__, epilog=_EXAMPLES, **shape)
    parts = parser.add_subparsers(dest="what", required=True, metavar="list|check|curate|sample")
    listing = parts.add_parser(
        "list",
        description="Every benchmark and training set: size, whether its data is here, answers, licence.",
        epilog="example: reasonlab data list --data ~/benchmarks",
        **shape,
    )
    check = parts.add_parser(
        "check",
        description="Exact and near overlap of training pools with benchmarks, and pools without it.",
        epilog="example: reasonlab data check my-pool.jsonl dapo_math_17k --data ~/benchmarks --clean clean.jsonl",
        **shape,
    )
    check.add_argument("train", nargs="+", metavar="TRAIN", help="a .jsonl or .jsonl.gz file, or a registered set")
    check.add_argument(
        "--against", default="", metavar="NAMES", help="only these benchmarks or suites, comma-separated (default: all)"
    )
    check.add_argument(
        "--clean",
        type=Path,
        metavar="OUT",
        help=f"write the rows without overlap to this .jsonl or .jsonl.gz file, and the report to OUT{REPORT_SUFFIX}",
    )
    curate = parts.add_parser("curate", description=curate_command.DESCRIPTION, epilog=curate_command.EXAMPLES, **shape)
    curate_command.add_arguments(curate)
    sample = parts.add_parser("sample", description=sample_command.DESCRIPTION, epilog=sample_command.EXAMPLES, **shape)
    sample_command.add_arguments(sample)
    for part in (listing, check):
        part.add_argument("--data", help=f"directory with the files, or hub (default: ${DATA_VARIABLE})")
        part.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _list(arguments: argparse.Namespace) -> int:
    entries = [(entry, _availability(entry, arguments.data)) for entry in benchmarks().values()]
    if arguments.json:
        rows = [entry.model_dump(mode="json") | {"available": available} for entry, available in entries]
        suites = {name: suite.benchmarks for name, suite in SUITES.items()}
        sys.stdout.buffer.write(
            orjson.dumps({"benchmarks": rows, "suites": suites}, option=orjson.OPT_INDENT_2) + b"\n"
        )
        sys.stdout.flush()
        return 0
    table: list[tuple[str, ...]] = [("name", "role", "size", "here", "answer", "licence")]
    table += [(e.name, e.role, f"{e.size:,}", available, e.answer, e.licence) for e, available in entries]
    _print_table(table)
    directory = data_directory(arguments.data)
    if directory is not None and all(available != "yes" for _, available in entries):
        print(f"\nnone of these sets was found in {directory} (math500, for instance, is math500.jsonl there)")
    print("\nsuites:")
    _print_table([(f"  {suite.name}", suite.title) for suite in SUITES.values()])
    return 0


def _availability(entry: Benchmark, data: str | None) -> str:
    if entry.family:
        return "bundled"
    if local_file(entry, data):
        return "yes"
    return "on the hub" if entry.hub else "no"


def _check(arguments: argparse.Namespace) -> int:
    if arguments.clean:
        check_clean_name(arguments.clean)
    against = [name for name in arguments.against.split(",") if name]
    with _progress() as progress:
        report = check_pools(arguments.train, arguments.data, against, progress)
    if arguments.json:
        sys.stdout.buffer.write(report.to_json())
        sys.stdout.flush()
    else:
        _print_report(report)
    if arguments.clean:
        kept = write_clean(report, arguments.train, arguments.clean, arguments.data)
        rows = sum(pool.rows for pool in report.pools)
        text = (
            f"wrote {kept:,} of {rows:,} rows to {arguments.clean}, and {arguments.clean.name}{REPORT_SUFFIX} beside it"
        )
        print(text, file=sys.stderr if arguments.json else sys.stdout)
    return 0


def _print_report(report: Report) -> None:
    found = [name for name in report.checked if any(name in pool.benchmarks for pool in report.pools)]
    if found:
        print("problems of each benchmark that are in the pool: exactly / exactly or nearly\n")
        table = [("benchmark", "problems", *(pool.pool for pool in report.pools))]
        for name in found:
            overlaps = (pool.benchmarks.get(name) for pool in report.pools)
            cells = (f"{o.exact}/{o.overlapping}" if o else "-" for o in overlaps)
            table.append((name, f"{report.checked[name]:,}", *cells))
        _print_table(table)
        print()
    for pool in report.pools:
        print(f"{pool.pool}: {len(pool.overlapping_rows):,} of {pool.rows:,} rows overlap with a benchmark")
    clean = [name for name in report.checked if name not in found]
    if clean:
        print(f"no overlap: {', '.join(clean)}")
    if report.not_checked:
        print(f"not checked, no data: {', '.join(report.not_checked)}")


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """A line that counts the rows, for a person who waits; nothing in pipes and logs."""
    if not sys.stderr.isatty():
        yield lambda pool, rows: None
        return
    from rich.console import Console

    with Console(stderr=True).status("reading the benchmarks") as status:
        yield lambda pool, rows: status.update(f"{pool}: {rows:,} rows")


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always", ChecksumWarning)
        warnings.showwarning = lambda message, *place, **more: print(f"warning: {message}", file=sys.stderr)
        yield
