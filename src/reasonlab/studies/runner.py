"""Runs the pieces of a study: each once, in the order of what needs what, in one process or in several.

A piece leaves its result on disk, whole or absent, and is skipped where it is already there. So a study that was
killed is continued by the same command. No process outlives its study: two would write into the same run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from graphlib import TopologicalSorter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reasonlab.config import Config, load_recipe
from reasonlab.errors import UserError
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
        piece.work(*piece.arguments)
        done.add(piece.name)
        waiting.remove(piece)


# --- several processes -----------------------------------------------------------------------------------------------


def _run_in_processes(pieces: Sequence[Piece], jobs: int) -> None:
    context = multiprocessing.get_context("spawn")
    listening, going_on = context.Pipe(duplex=False)  # closed, it tells the workers that the study is over
    waiting, done = list(pieces), set[str]()
    running: dict[Future[None], Piece] = {}
    with listening, going_on, ProcessPoolExecutor(jobs, context, _become_worker, (listening,)) as pool:
        try:
            while waiting or running:
                for piece in [piece for piece in waiting if done.issuperset(piece.needs)][: jobs - len(running)]:
                    running[pool.submit(_do, piece.work, piece.arguments)] = piece
                    waiting.remove(piece)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    piece = running.pop(future)
                    future.result()
                    done.add(piece.name)
        except BrokenProcessPool:
            remedy = "If memory ran out, take fewer --jobs; the same command goes on from here"
            raise UserError(f"a process of the study was killed while {piece.name!r} was done", remedy) from None
        except BaseException:
            going_on.close()
            try:
                wait(running)  # runs finish their iteration and save
            except KeyboardInterrupt:
                os._exit(130)  # a second Ctrl-C does not wait for them; without their parent they end at once
            raise


# In a worker: a piece is being done; no further one is to be begun. Each side sets its own before it asks the other's.
_at_work, _over = threading.Event(), threading.Event()


def _do(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    _at_work.set()
    try:
        if _over.is_set():
            raise KeyboardInterrupt
        work(*arguments)
    finally:
        _at_work.clear()


def _become_worker(study: Connection) -> None:
    """Set up a new worker process."""
    os.setpgrp()  # Ctrl-C reaches the parent alone, which passes it on once: twice would stop runs before they save
    os.environ["TERM"] = "dumb"  # no live view: several would overwrite each other
    threading.Thread(target=_end_with, args=(study,), daemon=True).start()


def _end_with(study: Connection) -> None:
    """Interrupt the piece when the study is over; if the parent is dead, however it died, end at once."""
    study.poll(None)  # nothing is ever sent: this returns when the other end is closed
    _over.set()
    if _at_work.is_set():
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os.killpg(0, signal.SIGKILL)  # with whatever processes the piece has started


def train(config: Config, out: Path, command: Sequence[str]) -> None:
    """Run a recipe to its end in `out`, from where it was left; a finished run is left alone."""
    from reasonlab.terminal import make_observer  # with torch, which takes seconds: only where a run is made
    from reasonlab.train.command import run_guarded
    from reasonlab.train.loop import resume, start

    exists = (out / "run.json").exists()
    if exists:
        before = load_recipe(out / "config.toml")
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
