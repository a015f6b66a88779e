"""Scores and labels on the disk as they come, so that scoring and labelling go on where they were killed.

A log is a file of JSON lines: first whose work it is, then one line for each candidate, named by a hash of what was
read. A pool is worked on in chunks whose borders depend on the pool alone, and a chunk counts only when it is whole; so
work that was killed and continued ends with the same numbers as work that was not, to the last bit on the CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson

from reasonlab.errors import UserError
from reasonlab.evaluate.record import differences, lock_file
from reasonlab.judges.opened import JudgeAtWork
from reasonlab.judges.types import Candidate, Progress, Scored
from reasonlab.runs.files import explained, write_all

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CHUNK = 1 << 18  # characters, about: seconds of work for a judge that fits its machine
Entry = TypeVar("Entry", bound="DataclassInstance")  # of numbers, texts and tuples of them


@dataclass(slots=True)
class Log(Generic[Entry]):
    """An open log: what it knows, and where the next entries go."""

    path: Path
    known: dict[str, Entry]
    descriptor: int

    def append(self, names: Sequence[str], entries: Sequence[Entry]) -> None:
        lines = [orjson.dumps({"name": name, **asdict(one)}) for name, one in zip(names, entries, strict=True)]
        with explained(self.path):
            write_all(self.descriptor, b"".join(line + b"\n" for line in lines))
        self.known.update(zip(names, entries, strict=True))


@contextmanager
def open_log(path: Path, whose: Mapping[str, Any], kind: type[Entry]) -> Iterator[Log[Entry]]:
    """Begin a log, or continue one of the same judge or labeller with the same settings. One process at a time."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        lock_file(descriptor, path)
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # a line without its end
            os.ftruncate(descriptor, whole)
        header, *lines = data[:whole].splitlines() or [b""]
        if not lines:  # a beginning that came to nothing is nobody's
            os.ftruncate(descriptor, 0)
            write_all(descriptor, orjson.dumps(whose) + b"\n")
        elif told := differences(_parsed(header, path, 1), orjson.loads(orjson.dumps(whose))):
            raise UserError(f"{path} was begun with other settings: {told}", "Remove it, or choose another --out")
        yield Log(path, dict(_entry(line, path, number, kind) for number, line in enumerate(lines, 2)), descriptor)
    finally:
        os.close(descriptor)


def score_all(
    judging: JudgeAtWork,
    candidates: Sequence[Candidate],
    log: Log[Scored] | None = None,
    progress: Progress | None = None,
) -> list[Scored]:
    """The scores of all candidates, in their order: those of the log, and the others now."""

    def score(part: Sequence[Candidate]) -> list[Scored]:
        scored = judging.score(part, progress)
        for candidate, one in zip(part, scored, strict=True):
            if not all(map(math.isfinite, (*one.steps, one.final or 0.0))):
                raise UserError(
                    f"the judge's score of a response to {candidate.problem} is not a number",
                    "Without --bfloat16 it may be one",
                )
        return scored

    return in_chunks(candidates, score, log, CHUNK, progress)


def in_chunks(
    candidates: Sequence[Candidate],
    work: Callable[[Sequence[Candidate]], Sequence[Entry]],
    log: Log[Entry] | None,
    size: int,
    known: Progress | None = None,
) -> list[Entry]:
    """An entry for each candidate, in their order: those of the log, and the others by `work`, chunk by chunk. `known`
    is told how many were in the log."""
    found: list[Entry] = []
    for chunk in chunks(candidates, size):
        part = candidates[chunk.start : chunk.stop]
        names = [name_of(candidate) for candidate in part]
        if log is not None and all(name in log.known for name in names):
            found += [log.known[name] for name in names]
            if known:
                known(len(part))
            continue
        entries = work(part)
        if log is not None:
            log.append(names, entries)
        found += entries
    return found


def chunks(candidates: Sequence[Candidate], most: int) -> Iterator[range]:
    """Runs of about `most` characters. Responses to one problem stay together, because a judge shares their beginnings,
    unless there are very many of them."""
    start = size = 0
    for place, candidate in enumerate(candidates):
        new = place == start or candidate.problem != candidates[place - 1].problem
        if (size >= most and new) or size >= 4 * most:
            yield range(start, place)
            start, size = place, 0
        size += len(candidate.question) + len(candidate.response)
    if start < len(candidates):
        yield range(start, len(candidates))


def kept_beside(pool: Path, judge: Mapping[str, Any]) -> Path:
    """Where the scores of a judge (its identity) stay beside a pool, or among the files of an evaluation."""
    name = f"judged-{blake2b(orjson.dumps(judge, option=orjson.OPT_SORT_KEYS), digest_size=6).hexdigest()}"
    return pool / f"{name}.jsonl" if pool.is_dir() else pool.with_name(f"{pool.name}.{name}")


def name_of(candidate: Candidate) -> str:
    """A name for what a judge may look at."""
    c = candidate
    read = [c.problem, c.question, c.response, c.answer, c.family, c.level, c.step_ends]
    return blake2b(orjson.dumps(read), digest_size=12).hexdigest()


def _entry(line: bytes, path: Path, number: int, kind: type[Entry]) -> tuple[str, Entry]:
    row = _parsed(line, path, number)
    try:
        name: str = row.pop("name")
        return name, kind(**{field: tuple(value) if isinstance(value, list) else value for field, value in row.items()})
    except (KeyError, TypeError):
        raise _damaged(path, number) from None


def _parsed(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = None
    if not isinstance(row, dict):
        raise _damaged(path, number)
    return row


def _damaged(path: Path, number: int) -> UserError:
    return UserError(f"line {number} of {path} is damaged", "Remove the file and start anew")
