"""Runs the pieces of a study: each once, in the order of what needs what, in one process or in several.

A piece leaves its result on disk, whole or absent, and is skipped where it is already there. So a study that was
killed is continued by the same command.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reasonlab.config import Config, load_recipe
from reasonlab.errors import UserError
from reasonlab.runs.record import read_run
from reasonlab.terminal import make_observer
from reasonlab.train.command import run_guarded
from reasonlab.train.loop import resume, start


@dataclass(frozen=True, slots=True)
class Piece:
    """`work(*arguments)` is a function of a module, so that another process can call it."""

    name: str
    work: Callable[..., None]
    arguments: tuple[Any, ...]
    needs: tuple[str, ...] = ()


def run_pieces(pieces: Sequence[Piece], jobs: int = 1) -> None:
    """Do every piece after those it needs, `jobs` at the same time. The first failure ends the study."""
    names = {piece.name for piece in pieces}
    waiting = list(pieces)
    done: set[str] = set()
    for piece in pieces:
        if unknown := set(piece.needs) - names:
            raise ValueError(f"{piece.name} needs {unknown}, which is no piece")
    if jobs == 1:
        while waiting:
            piece = next(piece for piece in waiting if done.issuperset(piece.needs))
            piece.work(*piece.arguments)
            done.add(piece.name)
            waiting.remove(piece)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[None], Piece] = {}
        try:
            while waiting or running:
                for piece in [piece for piece in waiting if done.issuperset(piece.needs)][: jobs - len(running)]:
                    running[pool.submit(piece.work, *piece.arguments)] = piece
                    waiting.remove(piece)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    done.add(running.pop(future).name)
                    future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train(config: Config, out: Path, command: Sequence[str]) -> None:
    """Run a recipe to its end in `out`, from where it was left; a finished run is left alone."""
    exists = (out / "run.json").exists()
    if exists:
        if load_recipe(out / "config.toml") != config:
            raise UserError(f"the run in {out} was made with another recipe", "Choose another --out for this study")
        if read_run(out)["status"] == "finished":
            return
    with make_observer(config.iterations, f"{out.parent.name}/{out.name}") as observer:
        trainer = resume(out, observer) if exists else start(config, out, list(command), observer)
        outcome = run_guarded(trainer)
    if outcome.status == "interrupted":
        raise KeyboardInterrupt
