"""The reader of a run: the files of all writers and attempts as one account, also while the run goes on."""

from __future__ import annotations

import gzip
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson

from reasonlab.errors import UserError
from reasonlab.runs.files import evaluation_path, evaluation_prefix, experiences_path, rollouts_path
from reasonlab.runs.record import read_run

Line = dict[str, Any]


class RunReader:
    """Reads a run directory. Ask again at any time: each call takes in what was appended since."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._files: dict[Path, _TailedFile] = {}
        read_run(self.directory)

    @property
    def run(self) -> Line:
        return read_run(self.directory)

    @property
    def config_toml(self) -> str:
        return (self.directory / "config.toml").read_text(encoding="utf-8")

    def metrics(self) -> list[Line]:
        """One dict per step, in order.

        Lines of one step and attempt are joined. Between attempts the highest wins: it has made the step again.
        Only up to the step it resumed from, which it did not make again, does it add to what was there.
        """
        resumes = [event for event in self.events() if event["kind"] == "resume" and event.get("step") is not None]
        resumed_from = {event["attempt"]: event["step"] for event in resumes}
        attempts_of_step: defaultdict[int, dict[int, Line]] = defaultdict(dict)
        for line in self._lines("metrics"):
            attempts = attempts_of_step[line["step"]]
            attempts[line["attempt"]] = _joined(attempts.get(line["attempt"], {}), line)
        account = []
        for step, attempts in sorted(attempts_of_step.items()):
            joined: Line = {}
            for attempt in sorted(attempts, reverse=True):
                joined = _joined(attempts[attempt], joined)
                if step > resumed_from.get(attempt, -1):
                    break
            account.append(joined)
        return account

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric was written, and its values; one that was not finite reads as NaN."""
        lines = [line for line in self.metrics() if name in line]
        values = [math.nan if line[name] is None else float(line[name]) for line in lines]
        return [line["step"] for line in lines], values

    def events(self) -> list[Line]:
        """Everything that happened, in all attempts, in order."""
        return self._lines("events")

    def rollouts(self, step: int) -> list[Line]:
        return self._unpacked(rollouts_path(self.directory, step), f"rollouts of step {step}")

    def rollout_steps(self) -> list[int]:
        return self._steps("rollouts", "")

    def experiences(self, step: int) -> list[Line]:
        return self._unpacked(experiences_path(self.directory, step), f"experiences of step {step}")

    def evaluation(self, suite: str, step: int) -> list[Line]:
        return self._unpacked(evaluation_path(self.directory, suite, step), f"{suite} answers of step {step}")

    def evaluation_suites(self) -> list[str]:
        """What was evaluated, by name."""
        names = sorted(path.name.rpartition("@")[0] for path in (self.directory / "evals").glob("*@*.jsonl.gz"))
        return [unquote(name) for name in dict.fromkeys(names)]

    def evaluation_steps(self, suite: str) -> list[int]:
        return self._steps("evals", evaluation_prefix(suite))

    @property
    def bad_lines(self) -> int:
        """How many complete lines could not be read; an unterminated last one is still being written."""
        self._lines("metrics")
        self._lines("events")
        return sum(file.bad for file in self._files.values())

    def _lines(self, family: str) -> list[Line]:
        """All lines of one family of files, ordered by attempt and clock."""
        required = "kind" if family == "events" else "step"
        lines: list[Line] = []
        for path in sorted(self.directory.glob(f"{family}.*.jsonl")):
            lines += self._files.setdefault(path, _TailedFile(path, required)).lines()
        return sorted(lines, key=lambda line: (line["attempt"], line["t"]))

    def _unpacked(self, path: Path, what: str) -> list[Line]:
        try:
            data = gzip.decompress(path.read_bytes())
        except FileNotFoundError:
            remedy = f"Look in {path.parent} for the steps it kept"
            raise UserError(f"{self.directory} holds no {what}", remedy) from None
        return [orjson.loads(line) for line in data.splitlines()]

    def _steps(self, folder: str, prefix: str) -> list[int]:
        ending = ".jsonl.gz"
        names = [path.name for path in (self.directory / folder).glob(f"*{ending}")]
        middles = [name[len(prefix) : -len(ending)] for name in names if name.startswith(prefix)]
        return sorted(int(middle) for middle in middles if middle.isdecimal())


class _TailedFile:
    """One writer's file, read on from where the last look ended."""

    def __init__(self, path: Path, required: str) -> None:
        self._path = path
        self._required = required
        self._offset = 0
        self._lines: list[Line] = []
        self.bad = 0

    def lines(self) -> list[Line]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            # Up to the present end only: a fast writer could otherwise keep its reader busy for ever.
            appended = os.fstat(file.fileno()).st_size - self._offset
            complete, newline, _ = file.read(appended).rpartition(b"\n")
        if newline:
            self._offset += len(complete) + 1
            for raw in complete.split(b"\n"):
                self._take(raw)
        return self._lines

    def _take(self, raw: bytes) -> None:
        try:
            line = orjson.loads(raw)
        except orjson.JSONDecodeError:
            line = None
        needed = ("attempt", "t", self._required)
        if isinstance(line, dict) and all(line.get(name) is not None for name in needed):
            self._lines.append(line)
        else:
            self.bad += 1


def _joined(earlier: Line, later: Line) -> Line:
    """Both lines as one; where both have a key, the later value stands."""
    joined = {**earlier, **later}
    joined.pop("nonfinite", None)
    kept_flags = [name for name in earlier.get("nonfinite", []) if name not in later]
    if flags := kept_flags + later.get("nonfinite", []):
        joined["nonfinite"] = flags
    return joined
