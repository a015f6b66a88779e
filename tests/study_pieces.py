"""Pieces of a made-up study: functions that worker processes import, so this module imports nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from reasonlab.errors import UserError
from reasonlab.studies.runner import Piece, run_pieces

PROC = Path("/proc")


def note(log: Path, word: str) -> None:
    """One line, in one write: processes do not tear each other's lines."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{word}\n".encode())
    os.close(descriptor)


def noted(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def work(log: Path, name: str, beside: str = "") -> None:
    """With another piece `beside` it, wait until that one has begun too."""
    note(log, f"begin:{name}")
    until(lambda: not beside or f"begin:{beside}" in noted(log))
    note(log, f"end:{name}")


def until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def work_for_hours(log: Path) -> None:
    """A minute, in fact: a failed test leaves it behind."""
    note(log, f"hours:{os.getpid()}")
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        note(log, "saved")
        raise


def ignore_interrupts(log: Path) -> None:
    signal.signal(signal.SIGINT, lambda *_: note(log, "ignored"))
    note(log, f"hours:{os.getpid()}")
    until(lambda: False)


def fail_beside(log: Path, kind: str) -> None:
    """Fail in some way once the long piece is under way."""
    until(lambda: any(word.startswith("hours:") for word in noted(log)))
    match kind:
        case "mistake":
            raise UserError("the data is missing", "Make it")
        case "bug":
            raise ZeroDivisionError("a bug")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def main(log: Path, work: Callable[[Path], None]) -> None:
    """A study of two processes."""
    run_pieces([Piece(name, work, (log,)) for name in "ab"], jobs=2)


def alive(pid: int) -> bool:
    """Also one that is dead but was not yet collected by its parent (a zombie) is dead."""
    if PROC.is_dir():
        status = _status(PROC / str(pid))
        return status is not None and status[0] != "Z"
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def children(pid: int) -> list[int]:
    if PROC.is_dir():
        found = [(entry.name, _status(entry)) for entry in PROC.glob("[0-9]*")]
        return [int(name) for name, status in found if status is not None and int(status[1]) == pid]
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in listed.split()]


def _status(process: Path) -> list[str] | None:
    """State and parent of a process (Linux); the name before them may hold anything but is in brackets."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:  # gone meanwhile
        return None


def heed_signals() -> None:
    """For a new process: what a shell or nohup starts in the background ignores these, and so would all it starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
