"""`reasonlab demo`: a base model learns by RL that thinking pays, and the control says how much of it is skill.

Trains with the packaged recipe, draws the figure, and writes `summary.json`: before, after, and the 95 % interval of
the paired difference (by question), for accuracy and tokens, in total and for each family; and the same for answers
that were made to think, which splits the gain into choosing to think (style) and thinking better (skill).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reasonlab.cli import free_directory
from reasonlab.config import Config, apply_overrides, load_recipe
from reasonlab.errors import UserError
from reasonlab.evaluate.control import FORCED_SUITE, SUITE, caption, recorded_answers, split_gain
from reasonlab.evaluate.evaluator import Answer, by_question
from reasonlab.evaluate.statistics import paired_difference
from reasonlab.figures.dynamics import draw_dynamics
from reasonlab.runs import RunReader
from reasonlab.runs.files import write_aside
from reasonlab.studies.answers import STATE, final
from reasonlab.terminal import make_observer
from reasonlab.train.command import report, run_guarded
from reasonlab.train.loop import TIME_LIMIT, Observer, Trainer, resume, start

DEMO = "demo"  # the command
SUMMARY = "summary.json"
RESERVE_SECONDS = 25  # for the last evaluation, the figure and the summary, when time is short


def demo_config(seed: int, threads: int) -> Config:
    with as_file(files("reasonlab.studies") / "demo.toml") as recipe:
        return apply_overrides(load_recipe(recipe), ["--seed", str(seed), "--threads", str(threads)])


def run_demo(out: Path | None, seed: int, minutes: float, threads: int) -> int:
    config = demo_config(seed, threads)
    run = out or free_directory("demo")
    words = [DEMO, "--seed", str(seed)]
    return _train_and_tell(run, config, minutes, lambda observer: start(config, run, words, observer))


def resume_demo(run: Path, minutes: float) -> int:
    """Continue an interrupted demo to its figure and summary."""
    reader = RunReader(run)
    if reader.run["argv"][:1] != [DEMO]:
        raise UserError(f"the run in {run} is no demo", f"Continue it with: reasonlab train --resume {run}")
    if reader.run["status"] == "finished" and not (run / SUMMARY).exists():  # killed while it was summed up
        state = json.loads((final(run) / STATE).read_text())
        return _tell(run, load_recipe(run / "config.toml"), state["iteration"], state["seconds"])
    return _train_and_tell(run, load_recipe(run / "config.toml"), minutes, lambda observer: resume(run, observer))


def _train_and_tell(run: Path, config: Config, minutes: float, opened: Callable[[Observer], Trainer]) -> int:
    started = time.monotonic()
    with make_observer(config.iterations, run.name) as observer:
        trainer = opened(observer)
        earlier = trainer.state.seconds
        outcome = run_guarded(trainer, deadline=started + 60 * minutes - RESERVE_SECONDS)
    if outcome.status == "interrupted":
        return report(run, outcome, DEMO)
    if outcome.status == TIME_LIMIT:
        print(f"\n{TIME_LIMIT} after {outcome.iteration} of {config.iterations} iterations")
        print(f"Continue with: reasonlab {DEMO} --resume {run}")
    return _tell(run, config, outcome.iteration, earlier + time.monotonic() - started)


def _tell(run: Path, config: Config, iterations: int, seconds: float) -> int:
    summary = {**summarise_run(run, config.seed), "seconds": round(seconds, 1), "iterations": iterations}
    draw_dynamics(run, run)
    write_aside(run / SUMMARY, (json.dumps(summary, indent=1) + "\n").encode())
    print(tell(run, summary))
    return 0


def summarise_run(run: Path, seed: int) -> dict[str, Any]:
    """Before and after, from the answers that the run recorded."""
    reader = RunReader(run)
    last = max(reader.evaluation_steps(SUITE))
    free = {step: recorded_answers(reader, SUITE, step) for step in (0, last)}
    forced = {step: recorded_answers(reader, FORCED_SUITE, step) for step in (0, last)}
    total = _comparison(free[0], free[last])
    skill = _comparison(forced[0], forced[last])
    families = list(dict.fromkeys(answer.family for answer in free[0]))
    return {
        "seed": seed,
        "questions": len({answer.problem for answer in free[0]}),
        **total,
        "forced_style": skill,
        "in_words": caption(split_gain(free, forced), evaluations=len(free)),
        "families": {family: _comparison(*(_of(free[step], family) for step in (0, last))) for family in families},
        "samples": _samples(free[0], free[last]),
    }


def _of(answers: Sequence[Answer], family: str) -> list[Answer]:
    return [answer for answer in answers if answer.family == family]


def _comparison(before: Sequence[Answer], after: Sequence[Answer]) -> dict[str, Any]:
    """Paired by question: both evaluations hold the same questions in the same order."""
    pairs = zip(("accuracy", "tokens"), by_question(before), by_question(after), strict=True)
    return {name: _difference(_means(a), _means(b)) for name, a, b in pairs}


def _difference(before: NDArray[np.float64], after: NDArray[np.float64]) -> dict[str, Any]:
    interval, p = paired_difference(before, after)
    return {
        "before": float(before.mean()),
        "after": float(after.mean()),
        "difference": interval.estimate,
        "interval": [interval.low, interval.high],
        "p": p,
    }


def _means(questions: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.array([float(np.nanmean(row)) for row in questions])


def _samples(before: Sequence[Answer], after: Sequence[Answer], count: int = 3) -> list[dict[str, str]]:
    """Questions that were wrong before and right after, from different families, shortest first."""
    chosen: dict[str, tuple[Answer, Answer]] = {}
    for a, b in sorted(zip(before, after, strict=True), key=lambda pair: pair[1].tokens):
        if a.verdict == "wrong" and b.verdict == "correct" and b.text.startswith("<think>"):
            chosen.setdefault(a.family, (a, b))
    pairs = list(chosen.values())[:count]
    return [{"question": a.question, "gold": a.gold, "before": a.text, "after": b.text} for a, b in pairs]


def tell(run: Path, summary: dict[str, Any]) -> str:
    """The closing words: what changed, how it splits, samples, and what to do next."""
    accuracy, tokens, skill = summary["accuracy"], summary["tokens"], summary["forced_style"]["accuracy"]
    changes = [
        f"Held-out accuracy {_points(accuracy)} (95 % interval of the paired difference, "
        f"{summary['questions']} questions, one answer each at temperature 1)",
        f"Response length {tokens['before']:.1f} → {tokens['after']:.1f} tokens, "
        f"{tokens['after'] / tokens['before']:.2f}-fold",
        f"Made to think  {_points(skill)}: the control, the same model with <think> forced",
    ]
    untrained = [
        f"Held-out accuracy {100 * accuracy['before']:.1f} %, made to think {100 * skill['before']:.1f} %, "
        f"response length {tokens['before']:.1f} tokens ({summary['questions']} questions), before any training"
    ]
    lines = ["", *(changes if summary["iterations"] else untrained), summary["in_words"], ""]
    for sample in summary["samples"]:
        lines += [f"  {sample['question']}  (gold {sample['gold']})"]
        lines += [f"    before: {sample['before']}", f"    after:  {sample['after']}"]
    lines += [
        "",
        f"figure   {run / 'dynamics.png'}   summary   {run / SUMMARY}   ({summary['seconds']:.0f} s)",
        "next     "
        f"reasonlab eval {run / 'checkpoints' / 'final'} --split harder   |   "
        f"reasonlab train recipes/smoke.toml   |   reasonlab demo --seed {summary['seed'] + 1}",
    ]
    return "\n".join(lines)


def _points(comparison: dict[str, Any]) -> str:
    low, high = comparison["interval"]
    return (
        f"{100 * comparison['before']:.1f} % → {100 * comparison['after']:.1f} %, "
        f"{100 * comparison['difference']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
    )
