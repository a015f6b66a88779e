"""`reasonlab judge train`: start or continue the training of a judge and say how it ended."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonlab.errors import UserError
from reasonlab.options import check_resumed

if TYPE_CHECKING:  # which imports torch
    from reasonlab.judges.training import JudgeTrainer

DESCRIPTION = """Train a judge: an outcome judge from a pool with right and wrong responses, a process judge from step
labels. Ctrl-C saves; --resume continues, also after kill -9, and ends with the same weights on the CPU."""
EXAMPLES = """example: reasonlab judge train recipes/judge.toml --data pool.jsonl --out runs/judge

more:
  reasonlab judge train recipes/judge.toml --kind process --data labels.jsonl --lr 1e-4
  reasonlab judge train --resume runs/judge"""
OWN_OPTIONS = ("--out", "--resume", "--dry-run", "--help")
LINES = 10  # of a training in a log


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE.toml")
    parser.add_argument("--out", type=Path, metavar="RUN", help="new directory for the run (default: runs/RECIPE-N)")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue the training in this directory")
    parser.add_argument("--dry-run", action="store_true", help="check the recipe, print it resolved, and stop")


def run(arguments: argparse.Namespace, overrides: list[str], words: list[str]) -> int:
    if arguments.resume is not None:
        others = bool(overrides or arguments.out or arguments.dry_run)
        remedy = "A run continues with the settings it was started with"
        check_resumed("judge train", arguments.recipe, others, remedy)
        return resume_run(arguments.resume)
    from reasonlab.judges.settings import JudgeConfig, judge_toml, load_judge_recipe, overridden

    if arguments.recipe is None:
        overridden(JudgeConfig(), overrides)  # a misspelt option may have taken the recipe for its value
        remedy = "For instance: reasonlab judge train recipes/judge.toml"
        raise UserError("judge train needs a recipe, or --resume RUN", remedy)
    config = overridden(load_judge_recipe(arguments.recipe), overrides)
    if arguments.dry_run:
        print(judge_toml(config), end="")
        return 0
    from reasonlab.cli import free_directory
    from reasonlab.judges.training import start

    out = arguments.out or free_directory(arguments.recipe.stem)
    if out.exists() and any(out.iterdir()):  # before the data are read
        raise UserError(f"{out} is not empty", "Choose another --out, or continue it with --resume")
    with _view(out.name) as view:
        trainer = start(config, out, ["judge", "train", *words], view.report)
        if "lists" in (report := trainer.data.report):
            view.say(_lists(report))
        return _run(trainer, out, view)


def resume_run(run_directory: Path) -> int:
    from reasonlab.judges.training import resume

    with _view(run_directory.name) as view:
        trainer = resume(run_directory, view.report)
        view.say(f"continuing after step {trainer.state.iteration:,} of {trainer.total:,}")
        return _run(trainer, run_directory, view)


def _run(trainer: JudgeTrainer, out: Path, view: _View) -> int:
    view.trainer = trainer
    try:
        status = trainer.run()
    except Exception:
        try:
            trainer.record.finish("failed")
        except Exception as second:  # a full disk fails here too; the first error is the one to show
            print(f"the record could not be closed: {second}", file=sys.stderr)
        raise
    view.close()
    step = trainer.state.iteration
    if status == "interrupted":
        print(f"saved after step {step:,} of {trainer.total:,}. Continue with: reasonlab judge train --resume {out}")
        return 130
    from reasonlab.train.checkpoint import newest_checkpoint

    print(f"{status} after {step:,} steps, {trainer.state.seconds:.0f} s. {_told(trainer.latest)}")
    print(
        f"judge: {newest_checkpoint(out)}   try it: reasonlab judge score POOL.jsonl --judge {out} --out SCORES.jsonl"
    )
    return 0


def _lists(report: dict[str, Any]) -> str:
    from reasonlab.judges.lists import ListReport

    return str(ListReport(**{name: report[name] for name in ListReport.__dataclass_fields__}))


def _told(metrics: dict[str, Any]) -> str:
    """The loss and what else the loss measures, of one step."""
    known = {
        "train/loss": "loss {:.4f}",
        "train/pair_accuracy": "{:.1f} % of pairs in order",
        "train/accuracy": "{:.1f} % of responses told right",
        "train/step_accuracy": "{:.1f} % of steps told right",
        "train/step_error": "squared error of steps {:.4f}",
    }
    return ", ".join(
        text.format(metrics[name] * (100 if "%" in text else 1)) for name, text in known.items() if name in metrics
    )


class _View:
    """A bar for a person who watches, ten lines for a log."""

    def __init__(self, name: str) -> None:
        self.name, self.trainer = name, None  # type: tuple[str, JudgeTrainer | None]
        self.bar: Any = None
        self.task: Any = None
        self.what = ""
        self.started = time.monotonic()

    def report(self, what: str, done: int, total: int) -> None:
        latest = self.trainer.latest if self.trainer else {}
        if self.bar is not None:
            if what != self.what:
                if self.task is not None:
                    self.bar.remove_task(self.task)
                self.what, self.task = what, self.bar.add_task(what, total=total)
            self.bar.update(self.task, completed=done, description=f"{what}  {_told(latest)}")
        elif latest and (done == total or done * LINES // total > (done - 1) * LINES // total):
            seconds = time.monotonic() - self.started
            speed = f"{latest['perf/tokens_per_s']:,.0f} tokens/s"
            self.say(f"step {done:,}/{total:,}: {_told(latest)}; {seconds:.0f} s, {speed}")

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(f"[{self.name}] {text}", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def _view(name: str) -> Iterator[_View]:
    view = _View(name)
    if not sys.stdout.isatty():
        yield view
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as view.bar:
        yield view
