"""Where benchmark rows come from: a directory of JSON lines files, or the Hugging Face hub.

A source is named by one string: a directory, `hub` for the hub itself (extra `hub`), or `hub:DIR` for a directory that
mirrors it (`DIR/owner/name` being a dataset repository). None means the directory in the environment variable
REASONLAB_DATA. Whatever the source, rows leave here with the same columns.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import orjson

from reasonlab.errors import UserError
from reasonlab.keys import key
from reasonlab.problems.registry import LETTERS, QUESTION_COLUMNS, Benchmark, Hub, Row

DATA_VARIABLE = "REASONLAB_DATA"
HUB = "hub"


class MissingDataError(UserError):
    """A set's data is not where it was looked for; the remedy says how to get it."""


class ChecksumWarning(UserWarning):
    """A file is not the one the registry describes."""


def read_rows(entry: Benchmark, data: str | Path | None = None, strict: bool = False) -> list[Row]:
    """All rows of a set, checked against the registry's size (and checksum, for files)."""
    path = local_file(entry, data)
    if path is not None:
        _check_sum(entry, path, strict)
        rows = [own_columns(line, path) for line in json_lines(path)]
        expected = entry.size
        where = str(path)
    elif _is_hub(data) and entry.hub:
        rows = _hub_rows(entry, entry.hub, _mirror(str(data)))
        expected = entry.hub.size or entry.size
        where = f"{entry.hub.repo} on the hub"
    else:
        raise _missing(entry, data)
    rows = [row for row in rows if all(row.get(column) in values for column, values in entry.where.items())]
    if expected is not None and len(rows) != expected:
        raise UserError(
            f"{entry.name} must have {expected:,} rows, but {where} has {len(rows):,}",
            "The file is cut, or it is another version of the set; fetch it again",
        )
    return rows


def local_file(entry: Benchmark, data: str | Path | None = None) -> Path | None:
    """The file of a set in the data directory, compressed or not; None where it is not there."""
    if entry.file is None:
        return None
    file = Path(entry.file)
    directory = file.parent if file.is_absolute() else data_directory(data)
    if directory is None:
        return None
    other = file.name.removesuffix(".gz") if file.name.endswith(".gz") else file.name + ".gz"
    return next((path for name in (file.name, other) if (path := directory / name).is_file()), None)


def data_directory(data: str | Path | None = None) -> Path | None:
    """The directory that was named, or the one REASONLAB_DATA names; None where there is neither."""
    named = data or os.environ.get(DATA_VARIABLE)
    if not named or _is_hub(named):
        return None
    directory = Path(named)
    if not directory.is_dir():
        origin = "--data" if data else DATA_VARIABLE
        raise UserError(f"{origin} names {directory}, which is not a directory", "Name the one with the .jsonl files")
    return directory


def open_lines(path: Path) -> Iterator[bytes]:
    """A file's lines as bytes, decompressed where its name ends in .gz."""
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            yield from file
    except (gzip.BadGzipFile, EOFError) as error:
        raise UserError(f"{path} is not whole: {error}", "Fetch it again") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})", "Check its name and your rights") from None


class Line(NamedTuple):
    """A line of a JSON lines file: its number, from 1, its bytes, and the object in it."""

    number: int
    raw: bytes
    row: Row


def json_lines(path: Path) -> Iterator[Line]:
    """The objects of a JSON lines file; blank lines are passed over."""
    for number, line in enumerate(open_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise UserError(f"line {number} of {path} is not JSON ({error})", "Each line must be an object") from None
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {path} is not an object", 'For instance {"question": …, "answer": …}')
        yield Line(number, line, row)


def own_columns(line: Line, path: Path) -> Row:
    """A row with `id`, `problem` and `answer`, whatever the file calls its question."""
    number, _, row = line
    problem = question_column(row)
    if problem is None or ("answer" not in row and "rating" not in row):
        found = ", ".join(row) or "none"
        raise UserError(
            f"line {number} of {path} lacks a question or an answer", f"Needs question and answer; found {found}"
        )
    return row | {"id": row.get("id", f"{path.name.split('.')[0]}-{number}"), "problem": problem}


def question_column(row: Row) -> str | None:
    """The question of a row of any common form: a string, or a chat whose last user turn it is."""
    for column in QUESTION_COLUMNS:
        value = row.get(column)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            turns = [turn for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
            if turns and isinstance(turns[-1].get("content"), str):
                return str(turns[-1]["content"])
    return None


def _check_sum(entry: Benchmark, path: Path, strict: bool) -> None:
    if entry.sha256 is None:
        return
    digest = hashlib.sha256()
    for line in open_lines(path):
        digest.update(line)
    if digest.hexdigest() != entry.sha256:
        message = f"{path} is not the {entry.name} of the registry: sha256 {digest.hexdigest()}, not {entry.sha256}"
        if strict:
            raise UserError(message, "Fetch it again, or leave out strict to use it as it is")
        warnings.warn(message, ChecksumWarning, stacklevel=2)


def _missing(entry: Benchmark, data: str | Path | None) -> MissingDataError:
    ways = []
    if entry.file:
        ways.append(f"put {entry.file} into a directory and name it with --data DIR or {DATA_VARIABLE}")
    if entry.hub:
        gated = ", after accepting its terms there" if entry.hub.gated else ""
        ways.append(f"load {entry.hub.repo} from the Hugging Face hub with --data hub{gated}")
    looked = f" in {data_directory(data)}" if data_directory(data) else " on the hub" if _is_hub(data) else ""
    return MissingDataError(f"the data of {entry.name} was not found{looked}", f"To get it, {', or '.join(ways)}")


# The hub


def _is_hub(data: str | Path | None) -> bool:
    return isinstance(data, str) and (data == HUB or data.startswith(HUB + ":"))


def _mirror(data: str) -> Path | None:
    _, _, directory = data.partition(":")
    return Path(directory) if directory else None


def _hub_rows(entry: Benchmark, hub: Hub, mirror: Path | None) -> list[Row]:
    table = _load_dataset(hub, mirror)
    columns = {ours: (theirs,) if isinstance(theirs, str) else theirs for ours, theirs in hub.columns.items()}
    absent = {name for names in columns.values() for name in names} | set(hub.where)
    absent -= set(table.column_names)
    if absent:
        raise UserError(
            f"{hub.repo} has no column {', '.join(sorted(absent))} (it has {', '.join(table.column_names)})",
            f"The set has changed on the hub; use a local file of {entry.name} instead",
        )
    kept = (row for row in table if all(row[name] in values for name, values in hub.where.items()))
    return [_from_hub(entry.name, hub, columns, row, number) for number, row in enumerate(kept)]


def _load_dataset(hub: Hub, mirror: Path | None) -> Any:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError
    except ImportError:
        raise UserError("the hub needs the package datasets", "pip install 'reasonlab[hub]'") from None
    place = hub.repo if mirror is None else str(mirror / hub.repo)
    try:
        return load_dataset(place, hub.config, split=hub.split)
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        gated = "log in with `hf auth login` and accept its terms, or " if hub.gated else ""
        raise MissingDataError(
            f"cannot load {place}: {first_line}", f"Check the connection, {gated}use --data DIR"
        ) from error


def _from_hub(name: str, hub: Hub, columns: Mapping[str, tuple[str, ...]], theirs: Row, number: int) -> Row:
    row: Row = {}
    for ours, names in columns.items():
        values = [theirs[column] for column in names]
        row[ours] = values[0] if len(values) == 1 else values
    row["id"] = str(row.get("id") or f"{name}-{number}")
    if isinstance(row["problem"], list):
        row["problem"] = _joined(row["problem"])
    if hub.answer == "first_choice":
        row["choices"], row["answer"] = _shuffled(row["choices"], row["id"])
    else:
        row["answer"] = _gold(row["answer"], hub)
    return row


def _joined(parts: Iterable[str]) -> str:
    """Sentences in one line; a body without its full stop gets one."""
    texts = [part.strip() for part in parts]
    return (
        " ".join(text if text.endswith((".", "?", "!", ",")) else text + "." for text in texts[:-1]) + " " + texts[-1]
    )


def _shuffled(choices: list[str], identity: str) -> tuple[list[str], str]:
    """The choices in an order that depends on the id alone, and the letter the first of them got."""
    order = list(range(len(choices)))
    Random(key("choices", identity)).shuffle(order)
    return [str(choices[index]).strip() for index in order], LETTERS[order.index(0)]


def _gold(value: Any, hub: Hub) -> str:
    if hub.answer == "hash":
        return str(value).rpartition("####")[2].strip().replace(",", "")
    if hub.answer == "boxed":
        return last_boxed(str(value))
    if hub.answer == "letter":
        return LETTERS[int(value)]
    if hub.answer == "list":
        return ",".join(map(str, value))
    if hub.answer == "integer":  # some copies write 51 as 51.0
        return str(int(float(value)))
    return str(value)


def last_boxed(solution: str) -> str:
    """What stands in a solution's last \\boxed{…}, braces balanced; empty where there is none."""
    _, found, rest = solution.rpartition("\\boxed{")
    depth = 1 if found else 0
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:position] if found else ""
    return ""
