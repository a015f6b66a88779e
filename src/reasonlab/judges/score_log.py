"""Scores on the disk as they come, so that scoring goes on where it was killed.

A log is a file of JSON lines: the judge first, then one line for each candidate, named by a hash of what the judge
read. A pool is scored in chunks whose borders depend on the pool alone, and a chunk counts only when it is whole; so
a scoring that was killed and continued ends with the same numbers as one that was not, to the last bit on the CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from reasonlab.errors import UserError
from reasonlab.evaluate.record import lock_file
from reasonlab.judges.opened import JudgeAtWork
from reasonlab.judges.types import Candidate, Progress, Scored
from reasonlab.runs.files import explained, write_all

CHUNK = 1 << 18  # characters, about: seconds of work for a judge that fits its machine


@dataclass(slots=True)
class ScoreLog:
    """An open log: what it knows, and where the next scores go."""

    path: Path
    known: dict[str, Scored]
    descriptor: int

    @classmethod
    @contextmanager
    def open(cls, path: Path, identity: Mapping[str, Any]) -> Iterator[ScoreLog]:
        """Begin a log or continue one of the same judge. One process at a time."""
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
            if not header:
                write_all(descriptor, orjson.dumps({"judge": identity}) + b"\n")
            elif _parsed(header, path, 1).get("judge") != orjson.loads(orjson.dumps(identity)):
                raise UserError(
                    f"{path} holds scores of another judge, or of the same with other settings",
                    "Remove it, or choose another --out",
                )
            yield cls(path, dict(_entry(line, path, number) for number, line in enumerate(lines, 2)), descriptor)
        finally:
            os.close(descriptor)

    def append(self, names: Sequence[str], scored: Sequence[Scored]) -> None:
        lines = [
            orjson.dumps({"name": n, "steps": s.steps, "final": s.final}) for n, s in zip(names, scored, strict=True)
        ]
        with explained(self.path):
            write_all(self.descriptor, b"".join(line + b"\n" for line in lines))
        self.known.update(zip(names, scored, strict=True))


def score_all(
    judging: JudgeAtWork,
    candidates: Sequence[Candidate],
    log: ScoreLog | None = None,
    progress: Progress | None = None,
) -> list[Scored]:
    """The scores of all candidates, in their order: those of the log, and the others now."""
    found: list[Scored] = []
    for chunk in chunks(candidates):
        part = candidates[chunk.start : chunk.stop]
        names = [name_of(candidate) for candidate in part]
        if log is not None and all(name in log.known for name in names):
            found += [log.known[name] for name in names]
            if progress:
                progress(len(part))
            continue
        scored = judging.score(part, progress)
        for candidate, one in zip(part, scored, strict=True):
            if not all(map(math.isfinite, (*one.steps, one.final or 0.0))):
                raise UserError(
                    f"the judge's score of a response to {candidate.problem} is not a number",
                    "Without --bfloat16 it may be one",
                )
        if log is not None:
            log.append(names, scored)
        found += scored
    return found


def chunks(candidates: Sequence[Candidate]) -> Iterator[range]:
    """Runs of about CHUNK characters. Responses to one problem stay together, because a judge shares their beginnings,
    unless there are very many of them."""
    start = size = 0
    for place, candidate in enumerate(candidates):
        new = place == start or candidate.problem != candidates[place - 1].problem
        if (size >= CHUNK and new) or size >= 4 * CHUNK:
            yield range(start, place)
            start, size = place, 0
        size += len(candidate.question) + len(candidate.response)
    if start < len(candidates):
        yield range(start, len(candidates))


def name_of(candidate: Candidate) -> str:
    """A name for what a judge may look at."""
    c = candidate
    read = [c.problem, c.question, c.response, c.answer, c.family, c.level, c.step_ends]
    return blake2b(orjson.dumps(read), digest_size=12).hexdigest()


def _entry(line: bytes, path: Path, number: int) -> tuple[str, Scored]:
    row = _parsed(line, path, number)
    try:
        return row["name"], Scored(tuple(row["steps"]), row["final"])
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
    return UserError(f"line {number} of {path} is no line of scores", "Remove the file and score again")
