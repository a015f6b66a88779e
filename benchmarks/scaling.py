"""How the cost of a GRPO iteration grows: with rollouts, with their length, with the size of the model.

    python benchmarks/scaling.py                                  # CUDA if there is one; about two minutes on an H200
    python benchmarks/scaling.py --rollouts 64 256 --lengths 128 512 --sizes 10m 135m --json scaling.json

One axis is varied at a time, the others as in `--centre` (shape, rollouts, new tokens). An iteration is sampling
(groups of 8 with a prompt of 64 random tokens, temperature 1, logprobs, nothing stops early) and one optimizer step on
all of it. Grading, record and evaluation are not in it. Weights are random. A first iteration is warm-up; the best of
the others counts.

growth   b of seconds = a · x^b, by least squares on the logarithms: 1 is proportional, below 1 it gets cheaper by the
         piece. Written for the whole range and for its last step, because a small machine load is bound by latency.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_models import SHAPES, random_model
from rollout_work import Work

from reasonlab.config import GrpoConfig, LearnerConfig
from reasonlab.hardware import prepare
from reasonlab.methods.group import example
from reasonlab.methods.grpo import Grpo
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Rollout
from reasonlab.train.batch import Totals
from reasonlab.train.learner import Learner

PROMPT, GROUP, MOST_ROWS = 64, 8, 4096


@dataclass(frozen=True, slots=True)
class Point:
    shape: str
    rollouts: int
    new: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one iteration, and the most memory that torch had allocated."""

    rollout: float
    update: float
    memory_gib: float

    @property
    def whole(self) -> float:
        return self.rollout + self.update


def measure(point: Point, device: torch.device, budget: int, seconds: float) -> Cost:
    """The best of as many iterations as fit into `seconds`, and at least one, after a first that does not count."""
    cuda = device.type == "cuda"
    model = random_model(SHAPES[point.shape], device, torch.float32)
    learner = Learner(model, LearnerConfig(lr=1e-9, token_budget=budget))
    engine = Engine(learner.working, min(point.rollouts, MOST_ROWS))
    method = Grpo(GrpoConfig(type="grpo", variant="dapo"), point.new)
    work = Work(point.rollouts, PROMPT, point.new, GROUP, ragged=False)
    requests, sampling = work.requests(model.config.vocab_size), work.sampling(model.config.vocab_size)
    rng = np.random.default_rng(0)

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def iteration() -> tuple[float, float]:
        begin = now()
        rollouts: list[Rollout] = [rollout for group in engine.generate(requests, sampling) for rollout in group]
        sampled = now()
        examples = [example(rollout, float(rng.normal())) for rollout in rollouts]
        learner.step(examples, method.loss, Totals.of(examples))
        return sampled - begin, now() - sampled

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    iteration()
    spent, parts = 0.0, [iteration()]
    while (spent := spent + sum(parts[-1])) + sum(parts[-1]) < seconds:
        parts.append(iteration())
    best = min(parts, key=sum)
    return Cost(*best, torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0)


def growth(x: Sequence[float], seconds: Sequence[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(seconds), 1)[0])


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", nargs="+", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 256, 512, 1024, 2048, 4096], help="new tokens")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["10m", "135m", "0.5b"])
    parser.add_argument("--centre", nargs=3, default=["135m", "256", "256"], metavar=("SHAPE", "ROLLOUTS", "NEW"))
    parser.add_argument("--budget", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--seconds", type=float, default=4.0, help="for the repetitions of one point")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write all numbers there")
    options = parser.parse_args(arguments)
    device = prepare(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    shape, rollouts, new = options.centre[0], int(options.centre[1]), int(options.centre[2])
    print(f"{name}, torch {torch.__version__}; centre: {shape}, {rollouts} rollouts, {new} new tokens")
    axes: dict[str, list[tuple[float, Point]]] = {
        "rollouts": [(n, Point(shape, n, new)) for n in options.rollouts],
        "length": [(n, Point(shape, rollouts, n)) for n in options.lengths],
        "size": [(SHAPES[one].parameter_count() / 1e6, Point(one, rollouts, new)) for one in options.sizes],
    }
    known: dict[Point, Cost] = {}
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "centre": options.centre, "axes": {}}
    for axis, points in axes.items():
        unit = " (million parameters)" if axis == "size" else ""
        print(f"\n{axis + unit:>28}  {'rollout':>9} {'update':>9} {'whole':>9} {'tokens/s':>10} {'memory':>10}")
        for x, point in points:
            if point not in known:
                known[point] = measure(point, device, options.budget, options.seconds)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            cost = known[point]
            rate = point.rollouts * point.new / cost.whole
            times = f"{cost.rollout:8.3f}s {cost.update:8.3f}s {cost.whole:8.3f}s"
            print(f"{x:28,.0f}  {times} {rate:10,.0f} {cost.memory_gib:6.1f} GiB", flush=True)
        costs = [known[point] for _, point in points]
        fits: dict[str, dict[str, float]] = {}
        if len(points) > 1:
            xs = [x for x, _ in points]
            for part in ("rollout", "update", "whole"):
                values = [getattr(cost, part) for cost in costs]
                fits[part] = {"all": growth(xs, values), "last": growth(xs[-2:], values[-2:])}
            for span in ("all", "last"):
                words = "  ".join(f"{part} {fit[span]:.2f}" for part, fit in fits.items())
                print(f"{'growth, ' + ('whole range' if span == 'all' else 'last step'):>28}  {words}")
        rows = [
            {"x": x, **asdict(point), **asdict(cost), "whole": cost.whole}
            for (x, point), cost in zip(points, costs, strict=True)
        ]
        result["axes"][axis] = {"points": rows, "growth": fits}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
