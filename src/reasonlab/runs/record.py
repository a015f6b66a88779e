"""The append-only writer of a run: metrics and events as JSON lines, rollouts and evaluations as gzip files.

Each process writes files of its own, and each line goes to the system in one `os.write`. So a line is whole
or absent after kill -9, a line whose call has returned is never lost, and nothing depends on file locks.
"""

from __future__ import annotations

import gzip
import math
import os
import platform
import re
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from reasonlab.errors import UserError
from reasonlab.keys import key
from reasonlab.runs.files import (
    evaluation_path,
    experiences_path,
    explained,
    rollouts_path,
    sync_path,
    write_all,
    write_aside,
)

LINE_VERSION = 1

_PACKAGES = ("reasonlab", "torch", "transformers", "tokenizers", "safetensors", "numpy", "math-verify")
_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTHONHASHSEED",
    "HF_HUB_OFFLINE",
    "SLURM_JOB_ID",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
)
# "max-tokens" and "tokenizer" are settings worth reading, not secrets.
_SECRET_FLAG = re.compile(r"--?[^=]*(?:key|token(?!s|iz)|secret|password)[^=]*", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^/@\s]+@")


class RunRecord:
    """Writes what happens in one attempt of a run. Make one with `create` or `resume`.

    A helper process that wants to add lines of its own uses the constructor, with the attempt it works for.
    """

    def __init__(self, directory: str | os.PathLike[str], attempt: int) -> None:
        self.directory = Path(directory)
        self.attempt = attempt
        self._files: dict[str, _LineFile] = {}

    @classmethod
    def create(cls, directory: str | os.PathLike[str], config_toml: str, argv: list[str]) -> RunRecord:
        """Start a run in a directory that holds none yet. `run.json` comes last: with it the run exists."""
        record = cls(directory, attempt=0)
        if record._run_file.exists():
            remedy = f"Continue it with --resume {record.directory}, or choose another --out"
            raise UserError(f"{record.directory} already holds a run", remedy)
        write_aside(record.directory / "config.toml", config_toml.encode())
        write_aside(record.directory / "env.json", _pretty(_environment()))
        now = datetime.now(UTC)
        suffix = key(_host(), os.getpid(), time.time_ns()) % 16**6
        record._save_run(
            {
                "v": LINE_VERSION,
                "id": f"{now:%Y%m%d-%H%M%S}-{suffix:06x}",
                "created": now.isoformat(timespec="seconds"),
                "status": "running",
                "argv": _without_secrets(argv),
                "attempts": [_attempt_entry(0, now)],
            }
        )
        return record

    @classmethod
    def resume(cls, directory: str | os.PathLike[str]) -> RunRecord:
        """Open the next attempt of a run. Who restores step k then says so: `event("resume", step=k)`."""
        run = read_run(Path(directory))
        record = cls(directory, attempt=len(run["attempts"]))
        run["attempts"].append(_attempt_entry(record.attempt, datetime.now(UTC)))
        record._save_run({**run, "status": "running"})
        return record

    def metrics(self, step: int, values: Mapping[str, object]) -> None:
        """Append one line of numbers. Lines of the same step add up; readers see them as one."""
        self._append("metrics", step, values)

    def event(self, kind: str, step: int | None = None, **fields: object) -> None:
        """Append something that happened: a checkpoint, an alarm, an evaluation, a resume."""
        self._append("events", step, {"kind": kind, **fields})

    def rollouts(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Keep every rollout of an iteration, in one file that appears whole."""
        write_aside(rollouts_path(self.directory, step), _packed(step, rows))

    def experiences(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Keep every reflection of an iteration with its replay (Meta-Experience Learning)."""
        write_aside(experiences_path(self.directory, step), _packed(step, rows))

    def evaluation(self, suite: str, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Keep every answer of an evaluation, enough to grade it again without the model."""
        write_aside(evaluation_path(self.directory, suite, step), _packed(step, rows))

    def sync(self) -> None:
        """Put all lines written so far out of reach of a power cut; called when a checkpoint is made."""
        with explained(self.directory):
            for file in self._files.values():
                file.sync()
            sync_path(self.directory)

    def close(self) -> None:
        """Flush and close this process's files; the run goes on. A later line opens them again."""
        self.sync()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def finish(self, status: str) -> None:
        """Close this attempt with a status such as "finished", "interrupted" or "failed"."""
        self.close()
        run = read_run(self.directory)
        run["attempts"][self.attempt]["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
        self._save_run({**run, "status": status})

    @property
    def _run_file(self) -> Path:
        return self.directory / "run.json"

    def _save_run(self, run: Mapping[str, object]) -> None:
        write_aside(self._run_file, _pretty(run))

    def _append(self, family: str, step: int | None, fields: Mapping[str, object]) -> None:
        header = {"v": LINE_VERSION, "attempt": self.attempt, "step": step, "t": time.time()}
        line = _line(header, fields)
        if family not in self._files:
            name = f"{family}.{_host()}-{os.getpid()}-{self.attempt}.jsonl"
            self._files[family] = _LineFile(self.directory / name)
        self._files[family].append(line)


class _LineFile:
    """One process's append-only file of lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with explained(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def append(self, line: bytes) -> None:
        end = os.fstat(self._descriptor).st_size
        try:
            with explained(self._path):
                write_all(self._descriptor, line)
        except BaseException:
            # A full disk may have taken half a line, and the next one must not be glued to it.
            os.ftruncate(self._descriptor, end)
            raise

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def read_run(directory: Path) -> dict[str, Any]:
    """The contents of `run.json`, the file that makes a directory a run."""
    try:
        run: dict[str, Any] = orjson.loads((directory / "run.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        remedy = "Give the directory that holds its run.json"
        raise UserError(f"there is no run in {directory}", remedy) from None
    return run


def _packed(step: int, rows: Iterable[Mapping[str, object]]) -> bytes:
    """Rows as gzipped lines, without clock or attempt: a step made again after a resume gives the same bytes."""
    header = {"v": LINE_VERSION, "step": step}
    return gzip.compress(b"".join(_line(header, row) for row in rows), compresslevel=6, mtime=0)


def _line(header: Mapping[str, object], fields: Mapping[str, object]) -> bytes:
    """One JSON line. JSON has no NaN or infinity: they become null, and their keys are listed in "nonfinite"."""
    if taken := fields.keys() & {*header, "nonfinite"}:
        raise ValueError(f"the record itself uses the names {sorted(taken)}")
    line = {**header, **fields}
    if nonfinite := [name for name, value in fields.items() if _has_nonfinite(value)]:
        line["nonfinite"] = nonfinite
    return _encoded(line, orjson.OPT_APPEND_NEWLINE)


def _has_nonfinite(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(_has_nonfinite, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_nonfinite, value))
    return hasattr(value, "tolist") and _has_nonfinite(value.tolist())


def _encoded(value: object, option: int) -> bytes:
    try:
        return orjson.dumps(value, default=_plain, option=option)
    except orjson.JSONEncodeError:
        # Text with lone surrogates is not UTF-8 (an odd file name, a strange answer); it must not end a run.
        return orjson.dumps(_with_valid_text(value), default=_plain, option=option)


def _plain(value: Any) -> object:
    """Arrays and tensors of any library as lists, paths as text."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value.tolist()


def _with_valid_text(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_with_valid_text(name): _with_valid_text(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_valid_text(item) for item in value]
    return value


def _pretty(value: object) -> bytes:
    return _encoded(value, orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _attempt_entry(attempt: int, now: datetime) -> dict[str, object]:
    started = now.isoformat(timespec="seconds")
    return {"attempt": attempt, "started": started, "host": _host(), "pid": os.getpid()}


def _host() -> str:
    return re.sub(r"[^\w.-]", "_", socket.gethostname())


def _without_secrets(argv: list[str]) -> list[str]:
    """The command line with the values of secret flags, and passwords inside URLs, replaced by ***."""
    kept: list[str] = []
    mask_next = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        is_flag = word.startswith("-") and _SECRET_FLAG.fullmatch(flag) is not None
        if mask_next and not word.startswith("--"):
            kept.append("***")
            is_flag = False
        elif is_flag and equals:
            kept.append(f"{flag}=***")
        else:
            kept.append(_URL_PASSWORD.sub(r"\1***@", word))
        mask_next = is_flag and not equals
    return kept


def _environment() -> dict[str, object]:
    """What the run stood on. Versions come from package metadata, because importing torch takes seconds."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "git": git_state(),
        "variables": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state() -> dict[str, object] | None:
    """Commit and dirty flag of the checkout this package runs from; None if it is installed elsewhere.

    A copy of the checkout without its history, on a machine without git, can be told its commit by REASONLAB_COMMIT.
    """
    if told := os.environ.get("REASONLAB_COMMIT"):
        return {"commit": told.rstrip("+"), "dirty": told.endswith("+")}
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        # A site-packages inside somebody's repository is not our checkout: there this file is not tracked.
        git("ls-files", "--error-unmatch", here.name)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
