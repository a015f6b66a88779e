"""One GRPO step of reasonlab against one step of `trl.GRPOTrainer`, on the CPU.

    python benchmarks/vs_trl_cpu.py [--threads 1] [--cases equal ragged worked] [--json FILE]

Both sides get the same weights (a bundled model, which transformers reads from the same directory), the same prompts
in the same order, the same group size, number of threads, temperature 1, fp32, advantages, loss, gradient clipping
and AdamW. One step is: tokenize, generate, grade, advantages, forward, backward, optimizer. TRL's is timed between
its `on_step_begin` and `on_step_end` callbacks; with `num_iterations` and `steps_per_generation` at 1 that is one
generation and one update. The learning rate is so small that the weights stay the same. "rollout" ends when
advantages are known (TRL: `_generate_and_score_completions`), "update" is the rest.

equal    prompts of one length and exactly 32 new tokens in every rollout; every example is in the update. The same
         work on both sides: what differs is how it is done.
ragged   the demo's problems (levels 2 to 5) and limits: rollouts end at <eos> or after 160 tokens. The lengths are
         those of the bundled model at the beginning of the demo.
worked   the same with the worked style forced, for lengths as they are when the demo ends (not run by default).

In the ragged cases the samples differ, because the two sides draw differently from one distribution; so their ratio
is that of the times per generated token (padding and tokens after <eos> do not count), and the ratio of the step
times stands beside it. Our loop leaves examples without advantage out of an update, since their gradient is zero; TRL
computes them. "all examples" is our step without that saving, measured on the same rollouts.

Each side runs in its own process. The steps alternate between them, so that a busy machine disturbs both, and a
ratio is the median of those of neighbouring steps (in brackets: lowest and highest); what other processes used of the
machine meanwhile is measured, and said if it matters. With `--threads n` TRL gets
`torch.set_num_threads(n)`, reasonlab n workers with single-threaded arithmetic. Memory is the highest resident set of
the process, and how far that lies above the resident set after libraries, model and trainer were loaded.

The floor is the arithmetic that the step needs, without padding and with the prompt of a group computed once for all
its samples: 2 operations for each weight and token, attention over the real context, three times that for the update,
divided by n times the measured rate of one core in a large fp32 product. "reached" is the floor over the step's time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from vs_trl_cpu_sides import SIDES
from vs_trl_cpu_work import CASES, Setting, Step

WARMUP_STEPS = 1
BUSY = 0.2  # cores used by others that disturb a measurement


def matmul_rate(seconds: float = 1.0) -> float:
    """Operations per second of one core in a large fp32 product: the best of many."""
    torch.set_num_threads(1)
    n, best = 768, 0.0
    a, b = torch.randn(n, n), torch.randn(n, n)
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        torch.mm(a, b)
        best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best


class Side:
    """The process of one side."""

    def __init__(self, name: str, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.connection, theirs = context.Pipe()
        process = context.Process(target=SIDES[name], args=(setting, theirs), daemon=True)
        process.start()
        theirs.close()
        self.process = psutil.Process(process.pid)

    def step(self) -> Step:
        start, busy, own = time.perf_counter(), cpu_seconds(psutil.cpu_times()), cpu_seconds(self.process.cpu_times())
        self.connection.send("go")
        try:
            step: Step = self.connection.recv()
        except EOFError:
            sys.exit(f"error: the {self.name} side ended early; its traceback is above")
        busy, own = cpu_seconds(psutil.cpu_times()) - busy, cpu_seconds(self.process.cpu_times()) - own
        step.busy_elsewhere = max(0.0, busy - own) / (time.perf_counter() - start)
        return step


def cpu_seconds(times: Any) -> float:
    return float(times.user + times.system)


def measure(setting: Setting) -> dict[str, list[Step]]:
    """Both sides take the steps in turn, each time in the other order; the first step is warm-up."""
    sides = [Side(name, setting) for name in SIDES]
    steps: dict[str, list[Step]] = {name: [] for name in SIDES}
    for number in range(setting.steps):
        for side in sides if number % 2 else sides[::-1]:
            steps[side.name].append(side.step())
    return {name: each[WARMUP_STEPS:] for name, each in steps.items()}


@dataclass(frozen=True)
class Ratio:
    """TRL over reasonlab, of neighbouring steps."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, steps: dict[str, list[Step]], value: Callable[[Step], float]) -> Ratio:
        pairs = zip(steps["trl"], steps["reasonlab"], strict=True)
        ratios = [value(theirs) / value(ours) for theirs, ours in pairs]
        return cls(median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}-{self.high:.2f})"


def report(setting: Setting, steps: dict[str, list[Step]], flops_per_s: float) -> dict[str, Any]:
    """Print the table of a case; returns what stands in it."""
    case = setting.case
    ratios = {
        "step": Ratio.of(steps, lambda s: s.seconds),
        "step, per token": Ratio.of(steps, lambda s: s.seconds / s.tokens),
        "rollout, per token": Ratio.of(steps, lambda s: s.rollout_s / s.tokens),
        "update, per token": Ratio.of(steps, lambda s: s.update_s / s.tokens),
        "step, per token, all examples": Ratio.of(steps, lambda s: (s.rollout_s + s.update_all_s) / s.tokens),
        "growth of memory": Ratio.of(steps, lambda s: s.memory_peak_mib - s.memory_before_mib),
    }
    sides = {name: summary(each, flops_per_s) for name, each in steps.items()}
    print(f"\n{case.name}: {case.what}")
    print("             step  rollout   update   tokens  µs/token  in update   floor  reached  memory  growth")
    for name, side in sides.items():
        print(
            f"{name:<10} {side['step_s']:5.2f} s {side['rollout_s']:6.2f} s {side['update_s']:6.2f} s "
            f"{side['tokens']:8.0f} {1e6 * side['s_per_token']:9.1f} {side['in_update']:10.0f} "
            f"{side['floor_s']:5.2f} s {side['reached']:7.0%} "
            f"{side['memory_mib']:4.0f} MiB {side['growth_mib']:4.0f} MiB"
        )
    for name, ratio in ratios.items():
        print(f"  {name + ':':<31} {ratio} times" + ("  <- compared" if name == "step, per token" else ""))
    if case.target is not None:
        reached = ratios["step, per token"].middle
        lighter = sides["reasonlab"]["growth_mib"] <= sides["trl"]["growth_mib"]
        print(f"  target {case.target} times: {'met' if reached >= case.target else 'MISSED'}; ", end="")
        print(f"memory no higher: {'met' if lighter else 'MISSED'}")
    busy = median(step.busy_elsewhere for each in steps.values() for step in each)
    if busy > BUSY:
        print(
            f"  note: other processes used {busy:.1f} cores meanwhile. With several threads that slows TRL more, whose"
        )
        print("  threads wait for each other inside every operation: the ratios are too high")
    return {
        "case": asdict(case),
        "sides": sides,
        "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
        "steps": {name: [asdict(step) for step in each] for name, each in steps.items()},
    }


def summary(steps: Sequence[Step], flops_per_s: float) -> dict[str, float]:
    """Medians over the steps; memory is the highest."""
    peak = max(s.memory_peak_mib for s in steps)
    return {
        "step_s": median(s.seconds for s in steps),
        "rollout_s": median(s.rollout_s for s in steps),
        "update_s": median(s.update_s for s in steps),
        "update_all_s": median(s.update_all_s for s in steps),
        "tokens": median(s.tokens for s in steps),
        "s_per_token": median(s.seconds / s.tokens for s in steps),
        "in_update": median(s.in_update for s in steps),
        "floor_s": median(s.flops for s in steps) / flops_per_s,
        "reached": median(s.flops / s.seconds for s in steps) / flops_per_s,
        "memory_mib": peak,
        "growth_mib": peak - steps[0].memory_before_mib,
    }


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="for both sides (default 2)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["equal", "ragged"])
    parser.add_argument("--model", default="tiny-1m", help="a bundled model or a checkpoint directory")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--repetitions", type=int, default=5, help="measured steps of each case and side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was measured")
    options = parser.parse_args()

    rate = matmul_rate()
    print(f"{options.model}, {options.prompts} prompts x {options.samples} samples, GRPO with one update")
    print(f"medians of {options.repetitions} steps; threads: {options.threads}; torch {torch.__version__}")
    print(f"one core: {rate / 1e9:.0f} GFLOP/s in a large fp32 product")
    results = []
    for name in options.cases:
        steps = WARMUP_STEPS + options.repetitions
        setting = Setting(CASES[name], options.model, options.prompts, options.samples, options.threads, steps)
        results.append(report(setting, measure(setting), rate * options.threads))
    if options.json is not None:
        document = {"threads": options.threads, "model": options.model, "core_flops_per_s": rate, "cases": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
