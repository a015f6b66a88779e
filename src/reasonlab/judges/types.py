"""What judges read and what they say: candidates, labels, scores, and the JSON-lines files that hold them.

A *pool* is a file with one candidate a line; a file of labels adds what each step is worth; a file of scores runs
parallel to its pool. Files whose name ends in `.gz` are written compressed; reading looks at the bytes.
"""

from __future__ import annotations

import difflib
import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson

from reasonlab.errors import UserError
from reasonlab.runs.files import write_aside

Progress = Callable[[int], None]  # called with the number of candidates that were just finished
Aggregate = Literal["mean", "min", "product", "last"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One response to one problem; a line of a pool."""

    problem: str  # id
    question: str
    response: str
    answer: str = ""  # the problem's right answer, where known
    correct: bool | None = None
    family: str = ""  # benchmark or family
    level: int = 0
    source: str = ""  # which policy wrote it
    step_ends: tuple[int, ...] = ()  # where each step ends in the response, if given; else the judge's own rule cuts


@dataclass(frozen=True, slots=True)
class Labelled:
    """A candidate and what it is worth: one number in [0, 1] for each step (1 is right), and one for the whole.

    The steps are those of `judges/steps.py` under the rule of the judge to be trained, or of `candidate.step_ends`.
    """

    candidate: Candidate
    steps: tuple[float, ...]
    final: float | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """What a judge says of a candidate."""

    steps: tuple[float, ...]  # one for each step; empty for an outcome judge
    final: float | None  # outcome or trajectory score; None if the judge has none

    def overall(self, alpha: float = 1.0, steps: Aggregate = "mean") -> float:
        """One number to rank by: aggregate(steps) + alpha·final (ReasonFlux); either alone where there is no other."""
        if not self.steps and self.final is None:
            raise ValueError("this judge said nothing: neither steps nor a final score")
        if not self.steps:
            return float(self.final or 0.0)
        together = aggregate(self.steps, steps)
        return together if self.final is None else together + alpha * self.final


class Judge(Protocol):
    """Whoever scores candidates: a trained judge, a published one, an exact checker."""

    def score(self, candidates: Sequence[Candidate], progress: Progress | None = None) -> list[Scored]: ...


def aggregate(steps: Sequence[float], how: Aggregate) -> float:
    """One number for the steps of a response."""
    match how:
        case "mean":
            return math.fsum(steps) / len(steps)
        case "min":
            return min(steps)
        case "product":
            return math.prod(steps)
        case "last":
            return steps[-1]
    raise UserError(f"there is no aggregate {how!r} of steps", "Use mean, min, product or last")


# --- files -------------------------------------------------------------------------------------------------------


def read_pool(path: Path) -> list[Candidate]:
    return list(iterate_pool(path))


def iterate_pool(path: Path) -> Iterator[Candidate]:
    """The candidates of a pool one by one; a mistake names its line."""
    for number, row in _rows(path):
        yield _candidate(row, path, number)


def write_pool(path: Path, candidates: Iterable[Candidate]) -> int:
    """Write a pool that appears whole; returns how many candidates it holds."""
    return _write(path, (_plain(candidate) for candidate in candidates))


def read_labels(path: Path) -> list[Labelled]:
    """Rows of a pool with `step_labels` (numbers in [0, 1], or true and false) and perhaps `final_label`."""
    found = []
    for number, row in _rows(path):
        steps, final = row.pop("step_labels", None), row.pop("final_label", None)
        candidate = _candidate(row, path, number)
        if not isinstance(steps, list) or not all(map(_in_unit, steps)):
            raise _mistake(path, number, "step_labels is not a list of numbers in [0, 1]")
        if final is not None and not _in_unit(final):
            raise _mistake(path, number, "final_label is not a number in [0, 1]")
        found.append(Labelled(candidate, tuple(map(float, steps)), None if final is None else float(final)))
    return found


def write_labels(path: Path, labelled: Iterable[Labelled]) -> int:
    return _write(
        path,
        (
            {**_plain(one.candidate), "step_labels": one.steps}
            | ({} if one.final is None else {"final_label": one.final})
            for one in labelled
        ),
    )


def write_scores(path: Path, candidates: Sequence[Candidate], scored: Sequence[Scored]) -> int:
    """One line for each candidate of a pool, in its order."""
    pairs = zip(candidates, scored, strict=True)
    return _write(path, ({"problem": c.problem, "steps": s.steps, "final": s.final} for c, s in pairs))


def read_scores(path: Path, candidates: Sequence[Candidate]) -> list[Scored]:
    """The scores of exactly these candidates; a file that belongs to another pool is refused."""
    found: list[Scored] = []
    for number, row in _rows(path):
        final, steps = row.get("final"), row.get("steps")
        if not isinstance(steps, list) or not all(map(_is_number, steps)) or not (final is None or _is_number(final)):
            remedy = "Give what `reasonlab judge score` wrote for this pool"
            what = "not a line of scores: `steps` is a list of numbers, `final` a number or null"
            raise _mistake(path, number, what, remedy)
        if len(found) >= len(candidates) or row.get("problem") != candidates[len(found)].problem:
            expected = candidates[len(found)].problem if len(found) < len(candidates) else "the end of the file"
            raise UserError(
                f"{path}, line {number} scores {row.get('problem')!r} where the pool has {expected!r}",
                "Score the pool again: its lines and those of the scores must run in parallel",
            )
        found.append(Scored(tuple(map(float, steps)), None if final is None else float(final)))
    if len(found) != len(candidates):
        raise UserError(f"{path} scores {len(found)} of {len(candidates)} candidates", "Score the whole pool again")
    return found


_REQUIRED = ("problem", "question", "response")
_TYPES: dict[str, tuple[type, ...]] = {
    "problem": (str,),
    "question": (str,),
    "response": (str,),
    "answer": (str,),
    "correct": (bool, type(None)),
    "family": (str,),
    "level": (int,),
    "source": (str,),
    "step_ends": (list,),
}
assert tuple(_TYPES) == tuple(field.name for field in fields(Candidate))


def _candidate(row: dict[str, Any], path: Path, number: int) -> Candidate:
    for name in _REQUIRED:
        if name not in row:
            raise _mistake(path, number, f"the key {name!r} is missing")
    for name, value in row.items():
        if name not in _TYPES:
            near = difflib.get_close_matches(name, _TYPES, 1)
            raise _mistake(path, number, f"unknown key {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
        if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and bool not in _TYPES[name]):
            raise _mistake(path, number, f"{name!r} is {value!r}, which is no {_TYPES[name][0].__name__}")
    ends = tuple(row.get("step_ends", ()))
    if ends and not _are_ends(ends, len(row["response"])):
        raise _mistake(path, number, "step_ends are not rising positions of which the last is the response's end")
    return Candidate(**{**row, "step_ends": ends})


def _are_ends(ends: Sequence[Any], length: int) -> bool:
    whole = all(isinstance(end, int) and not isinstance(end, bool) for end in ends)
    return whole and all(a < b for a, b in zip((0, *ends), ends, strict=False)) and ends[-1] == length


def _plain(candidate: Candidate) -> dict[str, Any]:
    """The row of a candidate, without what it does not say."""
    return {f.name: value for f in fields(candidate) if (value := getattr(candidate, f.name)) is not f.default}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _in_unit(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def _mistake(path: Path, number: int, what: str, remedy: str = "") -> UserError:
    return UserError(f"{path}, line {number}: {what}", remedy or f"A line of a pool has the keys {', '.join(_TYPES)}")


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file with their line numbers; blank lines are skipped."""
    try:
        with path.open("rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise _mistake(path, number, f"not JSON ({error})") from None
                if not isinstance(row, dict):
                    raise _mistake(path, number, "not a JSON object")
                yield number, row
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is a broken gzip file ({error})", "Fetch or make it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", "Give a file of JSON lines") from None


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    lines = [orjson.dumps(row) + b"\n" for row in rows]
    data = b"".join(lines)
    write_aside(path, gzip.compress(data, compresslevel=6, mtime=0) if path.name.endswith(".gz") else data)
    return len(lines)
