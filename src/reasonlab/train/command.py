"""`reasonlab train`: start or continue a run and say how it ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from reasonlab.config import Config, load_recipe
from reasonlab.runs import RunReader
from reasonlab.terminal import make_observer
from reasonlab.train.loop import TIME_LIMIT, Outcome, Trainer, resume, start


def start_run(config: Config, out: Path, argv: Sequence[str], minutes: float | None = None) -> int:
    """`minutes` from now no further iteration begins; the last evaluation and the weights take some more seconds."""
    deadline = deadline_in(minutes)
    with make_observer(config.iterations, out.name) as observer:
        trainer = start(config, out, argv, observer)
        outcome = run_guarded(trainer, deadline)
    return report(out, outcome)


def resume_run(run: Path, minutes: float | None = None, iterations: int | None = None) -> int:
    """`iterations`: as many as the run is to have now, in place of those it was started with."""
    deadline = deadline_in(minutes)
    RunReader(run).run  # noqa: B018  a clear error if there is no run, before the view opens
    total = iterations or load_recipe(run / "config.toml").iterations
    with make_observer(total, run.name) as observer:
        trainer = resume(run, observer, iterations)
        outcome = run_guarded(trainer, deadline)
    return report(run, outcome)


def deadline_in(minutes: float | None) -> float | None:
    return None if minutes is None else time.monotonic() + 60 * minutes


def run_guarded(trainer: Trainer, deadline: float | None = None) -> Outcome:
    """Run; if it fails, say so in the record as far as that is still possible."""
    try:
        return trainer.run(deadline)
    except Exception:
        try:
            trainer.record.finish("failed")
        except Exception as second:  # a full disk fails here too; the first error is the one to show
            print(f"the record could not be closed: {second}")
        raise


def report(run: Path, outcome: Outcome, command: str = "train") -> int:
    """How it ended, and how it goes on: with the command that it was started with."""
    if outcome.status == "interrupted":
        print(f"saved after iteration {outcome.iteration}. Continue with: reasonlab {command} --resume {run}")
        return 130
    print(f"{outcome.status} after iteration {outcome.iteration}, {outcome.seconds:.0f} s.")
    if outcome.status == TIME_LIMIT:
        print(f"Continue with: reasonlab {command} --resume {run}")
    print(f"weights: {run / 'checkpoints' / 'final'}   figure: reasonlab figures {run}")
    return 0
