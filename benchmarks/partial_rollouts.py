"""What partial rollouts gain: the same rollouts with and without a limit on the new tokens of one pass.

    python benchmarks/partial_rollouts.py                         # CPU, 2 threads, about ten minutes
    python benchmarks/partial_rollouts.py --cases thinking --segments 64 --repetitions 3
    python benchmarks/partial_rollouts.py --device cuda --json partial.json

A fixed stream of problems comes in iterations. Without partial rollouts every iteration waits for its longest
rollout; with them it ends after `segment` new tokens for each, and what is not done goes on beside the problems of
the next iteration (`reasonlab.rollout.partial`). A closing pass without a limit finishes what is left after the last
iteration, and its time counts, so all variants make the same rollouts: keys are fixed and the weights do not change.
In fp32 a draw next to the border between two tokens falls differently now and then, since keys and values come from
prefill in place of decoding; "same" says how many rollouts are equal token for token.

runaway   the demo's problems (levels 2 to 5) at temperature 1.6: most answers are short, some run on for hundreds of
          tokens. A heavy tail.
thinking  worked style forced, temperature 1: all answers think, few think long. A light tail.

Rollouts may grow to the model's positions. One run of every variant is warm-up; then the variants take turns, and a
ratio is the median of those of neighbouring runs (in brackets: lowest and highest).

total     seconds of all iterations and the closing pass, for the same finished rollouts
iteration mean and longest seconds of an iteration, without the closing pass
tokens/s  finished tokens over total; "in passes" leaves the tokens and the time of the closing pass out
CPU       ratio of the CPU seconds of the process, which a busy machine disturbs less
rows      mean number of active rows in a decoding step
prefill   prefilled tokens for each finished token: a rollout that goes on is prefilled again, with the new weights
stale     share of the tokens in the groups that iterations hand out that an earlier iteration sampled, and that a
          loss on fresh tokens masks
silent    share of the rollouts handed out that have no fresh token at all: they ended in an earlier iteration and
          waited for a sibling
fresh/s   tokens handed out by iterations that are not stale, over the seconds of the iterations: what a loss on fresh
          tokens learns from

The last table is the cost of one decoding step by the number of rows and of cache columns, single-threaded: what
there is to gain (a row costs much more in a step of few rows than in one of many) and what it costs (in a step all
rows attend over as many columns as the longest row has).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
from torch import Tensor

from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.model.transformer import Transformer
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import problem_set
from reasonlab.rollout.decoder import Decoder
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.operations import RUNNING
from reasonlab.rollout.partial import PartialRollouts
from reasonlab.rollout.types import Request, Rollout, Sampling

LEVELS = (2, 3, 4, 5)
QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
BUSY = 0.2  # cores used by others that disturb a measurement
STEP_ROWS, STEP_COLUMNS = (1, 4, 16, 64, 256), (64, 256, 1024)


@dataclass(frozen=True)
class Case:
    name: str
    what: str
    temperature: float
    suffix: str  # appended to every prompt


CASES = {
    case.name: case
    for case in (
        Case("runaway", "short answers, some of which run away", 1.6, ""),
        Case("thinking", "worked style forced, few answers much longer than the others", 1.0, "<think>"),
    )
}


@dataclass
class Run:
    """One way through the stream."""

    segment: int
    iteration_s: list[float] = field(default_factory=list)
    closing_s: float = 0.0
    cpu_s: float = 0.0
    busy_elsewhere: float = 0.0  # cores that other processes used meanwhile
    steps: int = 0
    row_steps: int = 0
    prefilled_tokens: int = 0
    trained_tokens: int = 0  # in the groups that iterations handed out
    stale_tokens: int = 0
    trained_rollouts: int = 0
    silent_rollouts: int = 0
    tokens: int = 0
    closing_tokens: int = 0
    groups: dict[str, list[Rollout]] = field(default_factory=dict)  # of all problems, by id

    @property
    def total_s(self) -> float:
        return sum(self.iteration_s) + self.closing_s

    @property
    def tokens_per_s_in_passes(self) -> float:
        return (self.tokens - self.closing_tokens) / sum(self.iteration_s)

    @property
    def fresh_per_s(self) -> float:
        return (self.trained_tokens - self.stale_tokens) / sum(self.iteration_s)

    def numbers(self) -> dict[str, Any]:
        """Everything but the rollouts."""
        values = {name: value for name, value in vars(self).items() if name != "groups"}
        return values | {name: getattr(self, name) for name in ("total_s", "tokens_per_s_in_passes", "fresh_per_s")}


class Bench:
    """A stream of problems, and for each variant engines that keep their buffers from run to run."""

    def __init__(self, case: Case, options: argparse.Namespace, model: Transformer) -> None:
        tokenizer = TinyTokenizer.load()
        groups: list[tuple[Problem, Request]] = []
        for problem in problem_set("train", options.iterations * options.prompts, levels=LEVELS):
            prompt = tokenizer.encode(prompt_text(problem.question) + case.suffix)
            groups.append((problem, Request(prompt, [key("partial", problem.id, i) for i in range(options.samples)])))
        self.stream = [groups[i : i + options.prompts] for i in range(0, len(groups), options.prompts)]
        self.sampling = Sampling(
            case.temperature,
            max_tokens=model.config.max_positions - max(len(request.prompt) for _, request in groups),
            stop_ids=(tokenizer.eos_id,),
            repetition_window=options.repetition_window,
        )
        self.variants = (0, *options.segments)
        # The closing pass has an engine of its own: with its few rows it would displace the buffers of the other.
        self.engines = {
            segment: [Engine(model, options.rows, options.threads) for _ in range(2)] for segment in self.variants
        }

    def run(self, segment: int) -> Run:
        run, buffer = Run(segment), PartialRollouts()
        engine, closing = self.engines[segment]
        sampling = replace(self.sampling, segment_tokens=segment)
        busy, own, started = cpu_seconds(), time.process_time(), time.perf_counter()
        with counted(run):
            for number, new in enumerate(self.stream):
                engine.version = number
                start = time.perf_counter()
                done = buffer.generate(engine, new, sampling)
                run.iteration_s.append(time.perf_counter() - start)
                for problem, rollouts in done:
                    run.groups[problem.id] = rollouts
                    fresh = [int((rollout.versions == number).sum()) for rollout in rollouts]
                    lengths = [len(rollout.ids) for rollout in rollouts]
                    run.trained_tokens += sum(lengths)
                    run.stale_tokens += sum(lengths) - sum(fresh)
                    run.trained_rollouts += len(rollouts)
                    run.silent_rollouts += fresh.count(0)
            closing.version = len(self.stream)
            start = time.perf_counter()
            run.groups.update(
                (problem.id, rollouts) for problem, rollouts in buffer.generate(closing, [], self.sampling)
            )
            run.closing_s = time.perf_counter() - start
        run.cpu_s = time.process_time() - own
        run.busy_elsewhere = max(0.0, cpu_seconds() - busy - run.cpu_s) / (time.perf_counter() - started)
        for rollout in all_rollouts(run):
            run.tokens += len(rollout.ids)
            run.closing_tokens += int((rollout.versions == closing.version).sum())
        return run


def all_rollouts(run: Run) -> Iterator[Rollout]:
    return (rollout for _, group in sorted(run.groups.items()) for rollout in group)


def cpu_seconds() -> float:
    """Of all processes of the machine."""
    times = psutil.cpu_times()
    return float(times.user + times.system)


@contextmanager
def counted(run: Run) -> Iterator[None]:
    """Count steps, rows, prefilled tokens; two threads may lose a count now and then, which no mean feels."""
    step, prefill = Decoder.step, Decoder.prefill

    def counted_step(self: Decoder, rows: int, columns: int) -> None:
        run.steps += 1
        run.row_steps += rows
        step(self, rows, columns)

    def counted_prefill(self: Decoder, contexts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        run.prefilled_tokens += sum(len(context) - 1 for context in contexts)
        return prefill(self, contexts)

    with patch.object(Decoder, "step", counted_step), patch.object(Decoder, "prefill", counted_prefill):
        yield


# --- tables ----------------------------------------------------------------------------------------------------------


def ratio(runs: dict[int, list[Run]], segment: int, value: Callable[[Run], float]) -> dict[str, float]:
    """A cost without partial rollouts over that with them, of neighbouring runs."""
    ratios = [value(without) / value(with_) for without, with_ in zip(runs[0], runs[segment], strict=True)]
    return {"median": median(ratios), "low": min(ratios), "high": max(ratios)}


def report(case: Case, bench: Bench, runs: dict[int, list[Run]]) -> dict[str, Any]:
    """Print the tables of a case; returns what stands in them."""
    reference = list(all_rollouts(runs[0][0]))
    lengths = np.array([len(rollout.ids) for rollout in reference])
    quantiles = {f"{q:.0%}": int(np.quantile(lengths, q)) for q in QUANTILES}
    ends = dict(Counter(rollout.finish for rollout in reference))
    print(f"\n{case.name}: {case.what} (temperature {case.temperature}, at most {bench.sampling.max_tokens} tokens)")
    print(f"  {len(lengths)} rollouts, {lengths.sum()} tokens, mean {lengths.mean():.0f}; ends: {ends}")
    print("  lengths: " + ", ".join(f"{name} {value}" for name, value in quantiles.items()))
    print("  segment    total  closing  iteration (longest)  tokens/s  in passes    rows  prefill", end="")
    print("  stale  silent  fresh/s       same")
    variants = {}
    for segment, each in runs.items():
        first = each[0]  # what was sampled is the same in every run
        same = sum(a.ids == b.ids for a, b in zip(all_rollouts(first), reference, strict=True))
        row = {
            "total_s": median(run.total_s for run in each),
            "closing_s": median(run.closing_s for run in each),
            "iteration_s": median(mean(run.iteration_s) for run in each),
            "longest_s": median(max(run.iteration_s) for run in each),
            "tokens_per_s": median(run.tokens / run.total_s for run in each),
            "tokens_per_s_in_passes": median(run.tokens_per_s_in_passes for run in each),
            "rows": median(run.row_steps / run.steps for run in each),
            "prefill": median(run.prefilled_tokens / run.tokens for run in each),
            "stale": first.stale_tokens / first.trained_tokens,
            "silent": first.silent_rollouts / first.trained_rollouts,
            "fresh_per_s": median(run.fresh_per_s for run in each),
            "same_rollouts": same,
        }
        variants[segment] = row
        print(
            f"  {segment or 'none':>7} {row['total_s']:6.2f} s {row['closing_s']:6.2f} s "
            f"{row['iteration_s']:9.2f} s ({row['longest_s']:5.2f} s) {row['tokens_per_s']:9.0f} "
            f"{row['tokens_per_s_in_passes']:10.0f} {row['rows']:7.1f} {row['prefill']:8.2f} {row['stale']:6.1%} "
            f"{row['silent']:7.1%} {row['fresh_per_s']:8.0f} {same:5}/{len(reference)}"
        )
    ratios = {}
    for segment in list(runs)[1:]:
        ratios[segment] = {
            "total": ratio(runs, segment, lambda run: run.total_s),
            "CPU": ratio(runs, segment, lambda run: run.cpu_s),
            "mean iteration": ratio(runs, segment, lambda run: mean(run.iteration_s)),
            "longest iteration": ratio(runs, segment, lambda run: max(run.iteration_s)),
            "per token in passes": ratio(runs, segment, lambda run: 1 / run.tokens_per_s_in_passes),
            "per fresh token": ratio(runs, segment, lambda run: 1 / run.fresh_per_s),
        }
        print(f"  none / {segment}:")
        for name, r in ratios[segment].items():
            print(f"    {name + ':':<20} {r['median']:.2f} ({r['low']:.2f}-{r['high']:.2f}) times")
    busy = median(run.busy_elsewhere for each in runs.values() for run in each)
    if busy > BUSY:
        print(f"  note: other processes used {busy:.1f} cores meanwhile")
    return {
        "case": asdict(case),
        "lengths": quantiles,
        "ends": ends,
        "variants": variants,
        "ratios": ratios,
        "busy_elsewhere": busy,
        "runs": [run.numbers() for each in runs.values() for run in each],
    }


@torch.inference_mode()
def step_costs(model: Transformer, repetitions: int = 15) -> dict[str, dict[int, float]]:
    """Milliseconds of a decoding step: {columns: {rows: median}}."""
    columns = [c for c in STEP_COLUMNS if c <= model.config.max_positions]
    decoder = Decoder(model, max(STEP_ROWS), max(columns), Sampling(max_tokens=1))
    costs: dict[str, dict[int, float]] = {}
    print("\none decoding step, ms     " + "".join(f"{rows:>6} rows" for rows in STEP_ROWS))
    for width in columns:
        row = costs[str(width)] = {}
        for rows in STEP_ROWS:
            times = []
            for _ in range(repetitions):
                decoder.state.counts.zero_()
                decoder.state.finish.fill_(RUNNING)
                decoder.state.positions.fill_(width - 1)
                start = time.perf_counter()
                decoder.step(rows, width)
                if decoder.device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            row[rows] = 1e3 * median(times)
        print(f"  {width:>5} columns            " + "".join(f"{row[rows]:11.2f}" for rows in STEP_ROWS))
    return costs


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--segments", nargs="+", type=int, default=[64, 128, 256], help="new tokens of one pass")
    parser.add_argument("--repetitions", type=int, default=3, help="measured runs of each variant")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=32, help="new problems in an iteration")
    parser.add_argument("--samples", type=int, default=8, help="of each problem")
    parser.add_argument(
        "--repetition-window", type=int, default=0, help="cut rollouts that repeat themselves (0: never)"
    )
    parser.add_argument("--model", default="tiny-1m", help="a bundled model or a checkpoint directory")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="bfloat16 on cuda, as in training")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256, help="of the engine, for each thread")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was measured")
    options = parser.parse_args()

    device = prepare(options.device)
    model = load_model(resolve_model(options.model)).to(device, torch.bfloat16 if options.device == "cuda" else None)
    print(
        f"{options.model} on {options.device}, {options.threads} threads; {options.iterations} iterations of ", end=""
    )
    print(f"{options.prompts} problems x {options.samples} samples; torch {torch.__version__}")
    print(f"medians of {options.repetitions} runs of each variant in turn")
    results = []
    for name in options.cases:
        bench = Bench(CASES[name], options, model)
        runs: dict[int, list[Run]] = {segment: [] for segment in bench.variants}
        for repetition in range(options.repetitions + 1):
            for segment in bench.variants[:: -1 if repetition % 2 else 1]:
                run = bench.run(segment)
                if repetition > 0:  # the first is warm-up
                    runs[segment].append(run)
        results.append(report(CASES[name], bench, runs))
    costs = step_costs(model)
    if options.json is not None:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        document = {"settings": settings, "cases": results, "step_ms": costs}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
