"""What the judges' commands read and show: a pool (or an evaluation, which is one), its scores, and progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from reasonlab.errors import UserError
from reasonlab.evaluate.intervals import Interval
from reasonlab.judges.opened import JudgeAtWork, open_at_work
from reasonlab.judges.score_log import open_log, score_all
from reasonlab.judges.types import Candidate, Scored, read_pool, read_scores
from reasonlab.problems.sources import json_lines

ABOUT_SUFFIX = ".judge.json"  # beside a file of scores: whose they are
LOG_SUFFIX = ".scoring"  # beside a file in the making: the scores so far


def read_candidates(path: Path) -> list[Candidate]:
    """The candidates of a pool, or the answers of an evaluation that came."""
    file = path / "answers.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no pool {file}", "Give a file of JSON lines, or the directory of an evaluation")
    found = _answers(file) if _holds_answers(file) else read_pool(file)
    if not found:
        raise UserError(f"{file} holds no candidates", "Give a pool with some")
    return found


def candidate_of(answer: dict[str, Any]) -> Candidate:
    """An answer of an evaluation as a candidate; `correct` is open where it could not be graded."""
    return Candidate(
        problem=answer["problem"],
        question=answer["question"],
        response=answer["text"],
        answer=answer["gold"],
        correct={"correct": True, "wrong": False}.get(answer["verdict"]),
        family=answer["family"],
        level=answer["level"],
    )


def _holds_answers(file: Path) -> bool:
    first = next(iter(json_lines(file)), None)
    return first is not None and {"verdict", "text", "gold"} <= first.row.keys()


def _answers(file: Path) -> list[Candidate]:
    rows = [(line.number, line.row) for line in json_lines(file)]
    try:
        return [candidate_of(row) for _, row in rows if row["finish"] != "error"]
    except KeyError as missing:
        raise UserError(f"an answer in {file} lacks the key {missing}", "Evaluate again with this version") from None


def open_from(arguments: argparse.Namespace) -> JudgeAtWork:
    """The judge of the command line."""
    return open_at_work(
        arguments.judge,
        arguments.kind,
        arguments.long,
        arguments.device,
        arguments.threads,
        arguments.bfloat16,
    )


def scored_by(
    judging: JudgeAtWork, candidates: Sequence[Candidate], log: Path | None, quiet: bool = False
) -> list[Scored]:
    """Score with a bar; where a log is named, continue it."""
    with progress_bar("scoring", len(candidates), quiet) as progress:
        if log is None:
            found = score_all(judging, candidates, None, progress)
        else:
            with open_log(log, {"judge": judging.identity}, Scored) as opened:
                found = score_all(judging, candidates, opened, progress)
    if notice := judging.notice():
        print(f"note: {notice}", file=sys.stderr)
    return found


def given_or_scored(
    arguments: argparse.Namespace,
    candidates: Sequence[Candidate],
    log_of: Callable[[JudgeAtWork], Path | None],
    quiet: bool = False,
) -> tuple[list[Scored], bool | None, str]:
    """The scores of --scores or of --judge, whether they are probabilities (None: unknown), and whose they are."""
    if (arguments.judge is None) == (arguments.scores is None):
        raise UserError("give either --judge or --scores", "--scores is a file of `reasonlab judge score`")
    if arguments.scores is None:
        judging = open_from(arguments)
        return scored_by(judging, candidates, log_of(judging), quiet), judging.probability, judging.place
    scored = read_scores(arguments.scores, candidates)
    about = read_about(arguments.scores)
    return scored, about.get("probability"), str(about.get("place", arguments.scores))


def read_about(scores: Path) -> dict[str, Any]:
    """What stands beside a file of scores; {} where nothing does."""
    try:
        about = orjson.loads(scores.with_name(scores.name + ABOUT_SUFFIX).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return about if isinstance(about, dict) else {}


@contextmanager
def progress_bar(what: str, total: int, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar for a person who waits, gone at the end; nothing in pipes and logs. Takes what was just finished."""
    if quiet or not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda more: progress.advance(task, more)


def as_report(advance: Callable[[int], None]) -> Callable[[str, int, int], None]:
    """A bar for those who say how far they are, instead of how much further."""
    done = 0

    def report(what: str, so_far: int, total: int) -> None:
        nonlocal done
        advance(so_far - done)
        done = so_far

    return report


def percent(interval: Interval) -> str:
    return f"{100 * interval.estimate:.1f} % [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
