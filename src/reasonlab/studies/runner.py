"""Runs the pieces of a study: each once, in the order of what needs what, in one process or in several.

A piece leaves its result on disk, whole or absent, and is skipped where it is already there. So a study that was
killed is continued by the same command. No process outlives its study: two would write into the same run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

from reasonlab.config import Config, load_recipe
from reasonlab.errors import UserError
from reasonlab.judges.settings import JudgeConfig, load_judge_recipe
from reasonlab.runs.record import read_run


@dataclass(frozen=True, slots=True)
class Piece:
    """`work(*arguments)` is a function of a module, so that another process can call it."""

    name: str
    work: Callable[..., None]
    arguments: tuple[Any, ...]
    needs: tuple[str, ...] = ()


def run_pieces(pieces: Sequence[Piece], jobs: int = 1) -> None:
    """Do every piece after those it needs, `jobs` at the same time. The first failure ends the study."""
    names = [piece.name for piece in pieces]
    if len(set(names)) < len(names):
        raise ValueError(f"two pieces have the same name: {sorted(names)}")
    for piece in pieces:
        if unknown := set(piece.needs) - set(names):
            raise ValueError(f"{piece.name} needs {unknown}, which is no piece")
    TopologicalSorter({piece.name: piece.needs for piece in pieces}).prepare()  # raises if some wait for each other
    if jobs > 1:
        _run_in_processes(pieces, jobs)
        return
    waiting, done = list(pieces), set[str]()
    while waiting:
        piece = next(piece for piece in waiting if done.issuperset(piece.needs))
        _say(piece, len(done), len(pieces))
        piece.work(*piece.arguments)
        done.add(piece.name)
        waiting.remove(piece)


def _say(piece: Piece, begun: int, of: int) -> None:
    print(f"piece {begun + 1} of {of}: {piece.name}", flush=True)


# --- several processes -----------------------------------------------------------------------------------------------
# Not concurrent.futures: its pool does not always notice that a worker was killed, and cannot interrupt one.


class Worker:
    """A process that does one piece after the other."""

    def __init__(self, context: SpawnContext) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()  # held by the worker alone: if it dies, our end says so

    def answer(self, piece: Piece) -> BaseException | None:
        """How the piece ended."""
        try:
            failure: BaseException | None = self.connection.recv()
        except (EOFError, ConnectionResetError):
            remedy = "If memory ran out, take fewer --jobs; the same command goes on from here"
            return UserError(f"the process that did {piece.name!r} was killed", remedy)
        return failure

    def interrupt(self) -> None:
        """A run finishes its iteration and saves; anything else stops at once."""
        if self.process.is_alive():
            os.kill(self.process.ident or 0, signal.SIGINT)

    def kill(self) -> None:
        try:
            os.killpg(self.process.ident or 0, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet, or is gone
            self.process.kill()

    def end(self) -> None:
        self.connection.close()  # for an idle worker the end of its work
        self.process.join()


def _run_in_processes(pieces: Sequence[Piece], jobs: int) -> None:
    context = multiprocessing.get_context("spawn")
    waiting, done = list(pieces), set[str]()
    workers: list[Worker] = []
    busy: dict[Worker, Piece] = {}
    try:
        while waiting or busy:
            for piece in [piece for piece in waiting if done.issuperset(piece.needs)][: jobs - len(busy)]:
                if len(busy) == len(workers):
                    workers.append(Worker(context))
                worker = next(worker for worker in workers if worker not in busy)
                _say(piece, len(done) + len(busy), len(pieces))
                worker.connection.send((piece.work, piece.arguments))
                busy[worker] = piece
                waiting.remove(piece)
            answered = wait([worker.connection for worker in busy])
            for worker in [worker for worker in busy if worker.connection in answered]:
                piece = busy.pop(worker)
                if failure := worker.answer(piece):
                    raise failure
                done.add(piece.name)
    except BaseException:
        try:
            for worker in busy:
                worker.interrupt()
            for worker, piece in busy.items():
                worker.answer(piece)
        except KeyboardInterrupt:  # a second Ctrl-C does not wait for them
            for worker in busy:
                worker.kill()
        raise
    finally:
        for worker in workers:
            worker.end()


def _serve(pieces: Connection) -> None:
    """What a worker process does."""
    os.setpgrp()  # Ctrl-C reaches the parent alone, which passes it on once: twice would stop runs before they save
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born ignoring it
    os.environ["TERM"] = "dumb"  # no live view: several would overwrite each other
    threading.Thread(target=_die_with_parent, daemon=True).start()
    while True:
        try:
            work, arguments = pieces.recv()
        except (EOFError, KeyboardInterrupt):  # interrupted just after its last piece
            return
        failure: BaseException | None = None
        try:
            work(*arguments)
        except (UserError, KeyboardInterrupt) as error:
            failure = error
        except Exception:
            failure = RuntimeError(f"in a process of the study:\n{traceback.format_exc()}")
        pieces.send(failure)


def _die_with_parent() -> None:
    """However the parent died; together with the processes that a piece has started."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os.killpg(0, signal.SIGKILL)


def train(config: Config, out: Path, command: Sequence[str]) -> None:
    """Run a recipe to its end in `out`, from where it was left; a finished run is left alone."""
    from reasonlab.terminal import make_observer  # with torch, which takes seconds: only where a run is made
    from reasonlab.train.command import run_guarded
    from reasonlab.train.loop import resume, start

    exists = (out / "run.json").exists()
    if exists:
        before = load_recipe(out / "config.toml").model_copy(update={"threads": config.threads})
        if before != config:
            difference = first_difference(before.model_dump(), config.model_dump()) or "another recipe"
            raise UserError(f"the run in {out} was made with {difference}", "Choose another --out for this study")
        if read_run(out)["status"] == "finished":
            return
    with make_observer(config.iterations, f"{out.parent.name}/{out.name}") as observer:
        trainer = resume(out, observer) if exists else start(config, out, list(command), observer)
        outcome = run_guarded(trainer)
    if outcome.status == "interrupted":
        raise KeyboardInterrupt


def train_judge(config: JudgeConfig, out: Path, command: Sequence[str]) -> None:
    """Train a judge to its end in `out`, from where it was left; a finished one is left alone."""
    from reasonlab.judges.training import resume, start
    from reasonlab.terminal import make_observer

    exists = (out / "run.json").exists()
    if exists:
        before = load_judge_recipe(out / "config.toml").model_copy(update={"threads": config.threads})
        if before != config:
            difference = first_difference(before.model_dump(), config.model_dump()) or "another recipe"
            raise UserError(f"the judge in {out} was trained with {difference}", "Choose another --out")
        if read_run(out)["status"] == "finished":
            return
    with make_observer(1, f"{out.parent.name}/{out.name}") as observer:
        report = observer.progress
        trainer = resume(out, report) if exists else start(config, out, command, report)
        if trainer.run() == "interrupted":
            raise KeyboardInterrupt


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Where two sets of settings differ, such as "learner.lr = 0.1, not 0.2". A setting new in `now` is no difference:
    an older version did not know it."""
    for name, old in before.items():
        new = now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if below := first_difference(old, new):
                return f"{name}.{below}"
        elif old != new:
            return f"{name} = {old!r}, not {new!r}"
    return ""
