"""The directory of an evaluation: what was asked, every answer as it came, and the scores.

    settings.json    the whole protocol; an evaluation continues only where it is the same
    answers.jsonl    append-only, one `os.write` a line: whole or absent after kill -9; put in order at the end
    scores.json      written at the end, and again by --rescore without --out

An answer that never came (`finish` "error") is asked for again when the evaluation continues.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import Answer
from reasonlab.evaluate.responder import FAILED
from reasonlab.runs.files import explained, sync_path, write_all, write_aside

SETTINGS, ANSWERS, SCORES = "settings.json", "answers.jsonl", "scores.json"
ABOUT = "about"  # what may differ between two attempts: paths, versions, the grader

Place = tuple[str, str, int]  # family, problem, sample


def place_of(answer: Answer) -> Place:
    return answer.family, answer.problem, answer.sample


class EvaluationRecord:
    """One process's hold on the directory of an evaluation."""

    def __init__(self, directory: Path, descriptor: int) -> None:
        self.directory, self._descriptor = directory, descriptor

    @classmethod
    @contextmanager
    def start(cls, directory: Path, settings: Mapping[str, Any]) -> Iterator[EvaluationRecord]:
        """Begin an evaluation, or continue the one that is there."""
        if (directory / SETTINGS).exists():
            if told := differences(read_settings(directory), settings):
                raise UserError(
                    f"{directory} holds an evaluation with other settings: {told}",
                    "Continue it with the same settings, or choose another --out",
                )
        else:
            with explained(directory):
                if directory.exists() and any(directory.iterdir()):
                    raise UserError(f"{directory} is not empty and holds no evaluation", "Choose another --out")
            write_aside(directory / SETTINGS, _pretty(settings))
        with cls.existing(directory) as record:
            yield record

    @classmethod
    @contextmanager
    def existing(cls, directory: Path) -> Iterator[EvaluationRecord]:
        read_settings(directory)
        path = directory / ANSWERS
        with explained(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            lock_file(descriptor, directory)
            yield cls(directory, descriptor)
            os.fsync(descriptor)
            sync_path(directory)
        finally:
            os.close(descriptor)

    @property
    def settings(self) -> dict[str, Any]:
        return read_settings(self.directory)

    def append(self, answer: Answer) -> None:
        with explained(self.directory / ANSWERS):
            write_all(self._descriptor, orjson.dumps(answer.row()) + b"\n")

    def answers(self) -> dict[Place, Answer]:
        """Every answer so far. A line without its end, left by a power cut, is cut off."""
        data = (self.directory / ANSWERS).read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._descriptor, whole)
        return read_answers(self.directory)

    def replace(self, answers: Mapping[Place, Answer], settings: Mapping[str, Any]) -> None:
        """Put these answers, in their order, in the place of all lines, in one stroke."""
        write_aside(self.directory / ANSWERS, answer_lines(answers.values()))
        write_aside(self.directory / SETTINGS, _pretty(settings))
        descriptor = os.open(self.directory / ANSWERS, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            lock_file(descriptor, self.directory)
        except BaseException:
            os.close(descriptor)
            raise
        os.dup2(descriptor, self._descriptor, inheritable=False)  # the file is a new one now
        os.close(descriptor)

    def write_scores(self, scores: Mapping[str, Any]) -> None:
        write_aside(self.directory / SCORES, _pretty(scores))


def read_settings(directory: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = orjson.loads((directory / SETTINGS).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"there is no evaluation in {directory}", f"Give the directory with its {SETTINGS}") from None
    except orjson.JSONDecodeError as error:
        raise UserError(f"{directory / SETTINGS} is damaged ({error})", "Start the evaluation anew") from None
    return settings


def read_answers(directory: Path) -> dict[Place, Answer]:
    """The answers of an evaluation, changing nothing there; a last line without its end is left out."""
    try:
        whole, newline, _ = (directory / ANSWERS).read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return {}
    found: dict[Place, Answer] = {}
    for number, line in enumerate((whole + newline).splitlines(), 1):
        try:
            answer = Answer(**orjson.loads(line))
        except (orjson.JSONDecodeError, TypeError):
            raise UserError(
                f"line {number} of {directory / ANSWERS} is no answer", "Remove the line, or start anew"
            ) from None
        if answer.finish != FAILED or place_of(answer) not in found:
            found[place_of(answer)] = answer
    return found


def answer_lines(answers: Iterable[Answer]) -> bytes:
    return b"".join(orjson.dumps(answer.row()) + b"\n" for answer in answers)


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How settings in a file differ from those of now, in words; empty if they do not."""
    old, new = (dict(_flat({k: v for k, v in settings.items() if k != ABOUT})) for settings in (there, now))
    different = [name for name in [*old, *(name for name in new if name not in old)] if old.get(name) != new.get(name)]
    told = [
        f"{name} is {_short(old.get(name))}{_place(there, name)} there and "
        f"{_short(new.get(name))}{_place(now, name)} now"
        for name in different[:3]
    ]
    more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
    return "; ".join(told) + more


def _place(settings: Mapping[str, Any], name: str) -> str:
    """A checksum says nothing to people: with the model's comes the name it was given by."""
    place = settings.get(ABOUT, {}).get("model")
    return f" ({place})" if name == "model.sha256" and place else ""


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _flat(item, f"{name}.{inner}" if name else str(inner))
    else:
        yield name, list(value) if isinstance(value, tuple) else value


def _short(value: object) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 48 else text[:45] + "…"


def _pretty(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def lock_file(descriptor: int, path: Path) -> None:
    """One writer at a time, where the system has locks; the system lets go of it when the process ends, however."""
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is writing {path}", "Wait for it to end") from None
