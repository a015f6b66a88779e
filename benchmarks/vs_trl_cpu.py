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
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from reasonlab.config import GrpoConfig, LearnerConfig
from reasonlab.grading.grade import grade
from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.methods.group import Group
from reasonlab.methods.grpo import Grpo
from reasonlab.model.checkpoint import load_model
from reasonlab.model.config import ModelConfig
from reasonlab.model.ladder import resolve_model
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import problem_set
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling
from reasonlab.train.batch import Example, Totals
from reasonlab.train.learner import Learner
from reasonlab.train.loop import on_policy

LEVELS = (2, 3, 4, 5)
LEARNING_RATE = 1e-6
BETAS, CLIP_NORM = (0.9, 0.95), 1.0
TRL_SETTINGS: dict[
    str, Any
] = {  # of every comparison with its GRPOTrainer: the same update as ours, and nothing beside it
    "disable_dropout": True,
    "gradient_checkpointing": False,
    "num_iterations": 1,
    "temperature": 1.0,
    "beta": 0.0,
    "loss_type": "grpo",
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "adam_beta1": BETAS[0],
    "adam_beta2": BETAS[1],
    "max_grad_norm": CLIP_NORM,
    "optim": "adamw_torch_fused",
    "shuffle_dataset": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
WARMUP_STEPS = 1
BUSY = 0.2  # cores used by others that disturb a measurement


@dataclass(frozen=True)
class Case:
    name: str
    what: str
    max_tokens: int
    equal: bool  # all prompts and all rollouts of one length
    suffix: str  # appended to every prompt
    target: float | None


CASES = {
    case.name: case
    for case in (
        Case("equal", "prompts of one length, 32 new tokens each, no early stop", 32, True, "", 1.5),
        Case("ragged", "the demo's first lengths: stop at <eos>, at most 160 tokens", 160, False, "", 3.0),
        Case("worked", "the demo's last lengths: as ragged, worked style forced", 160, False, "<think>", None),
    )
}


@dataclass(frozen=True)
class Setting:
    """What both sides are told."""

    case: Case
    model: str
    prompts: int
    samples: int
    threads: int
    steps: int  # measured and warm-up

    def problems(self) -> list[list[Problem]]:
        """The problems of each step."""
        needed = self.prompts * self.steps
        if not self.case.equal:
            drawn = problem_set("train", needed, levels=LEVELS)
        else:
            tokenizer = TinyTokenizer.load()
            by_length: dict[int, list[Problem]] = {}
            for problem in problem_set("train", 8 * needed, levels=LEVELS):
                by_length.setdefault(len(tokenizer.encode(self.prompt(problem))), []).append(problem)
            drawn = max(by_length.values(), key=len)[:needed]
        return [drawn[i : i + self.prompts] for i in range(0, needed, self.prompts)]

    def prompt(self, problem: Problem) -> str:
        return prompt_text(problem.question) + self.case.suffix


@dataclass
class Step:
    """One measured step of one side."""

    rollout_s: float
    update_s: float
    tokens: int  # generated, up to and with <eos>
    in_update: int  # examples
    flops: float
    memory_before_mib: float
    memory_peak_mib: float
    update_all_s: float  # with the examples that have no advantage
    busy_elsewhere: float = 0.0  # cores that other processes used meanwhile

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.update_s


# --- the arithmetic a step needs -------------------------------------------------------------------------------------


def step_flops(
    config: ModelConfig, prompts: Sequence[int], responses: Sequence[Sequence[int]], updated: Sequence[Sequence[bool]]
) -> float:
    """`responses[i]` are the lengths of the rollouts of a prompt of `prompts[i]` tokens, `updated` those trained on."""
    heads = config.heads * config.head_dim
    attention_weights = config.hidden_size * (2 * heads + 2 * config.kv_heads * config.head_dim)
    weights = config.layers * (attention_weights + 3 * config.hidden_size * config.intermediate_size)
    head = config.hidden_size * config.vocab_size

    def forward(first: int, last: int) -> float:
        """Tokens first + 1 .. last of a sequence, each attending to itself and all before it."""
        seen = (last * (last + 1) - first * (first + 1)) / 2
        return 2 * weights * (last - first) + 4 * config.layers * heads * seen

    total = 0.0
    for prompt, group, kept in zip(prompts, responses, updated, strict=True):
        total += forward(0, prompt) * (1 + 3 * any(kept))
        for response, in_update in zip(group, kept, strict=True):
            end = prompt + response - 1  # nobody asks what follows the last token
            total += (forward(prompt, end) + 2 * head * response) * (1 + 3 * in_update)
    return total


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


# --- reasonlab -------------------------------------------------------------------------------------------------------


def run_ours(setting: Setting, connection: Connection) -> None:
    prepare("cpu")
    tokenizer, model = TinyTokenizer.load(), load_model(resolve_model(setting.model))
    case = setting.case
    learner = Learner(
        model, LearnerConfig(lr=LEARNING_RATE, betas=BETAS, clip_grad_norm=CLIP_NORM), workers=setting.threads
    )
    engine = Engine(model, workers=setting.threads)
    method = Grpo(GrpoConfig(type="grpo"), case.max_tokens)
    sampling = Sampling(max_tokens=case.max_tokens, stop_ids=() if case.equal else (tokenizer.eos_id,))
    batches = setting.problems()
    before = resident_mib()

    def rollouts(number: int, problems: Sequence[Problem]) -> tuple[list[Group], list[Example]]:
        requests = [
            Request(tokenizer.encode(setting.prompt(p)), [key(number, p.id, i) for i in range(setting.samples)])
            for p in problems
        ]
        groups = []
        for problem, rollouts in zip(problems, engine.generate(requests, sampling), strict=True):
            grades = [grade(problem, tokenizer.decode(rollout.ids)) for rollout in rollouts]
            groups.append(Group(problem, rollouts, grades))
            groups[-1].rewards = groups[-1].correct.astype(np.float64)
        return groups, method.examples(groups)

    def update(examples: Sequence[Example], totals: Totals) -> float:
        start = time.perf_counter()
        if examples:
            learner.step(examples, on_policy(method.loss), totals)
        return time.perf_counter() - start

    for number, problems in enumerate(batches):
        connection.recv()
        start = time.perf_counter()
        groups, examples = rollouts(number, problems)
        kept = [case.equal or e.advantage != 0 for e in examples]
        chosen, totals = [e for e, keep in zip(examples, kept, strict=True) if keep], Totals.of(examples)
        rollout_s = time.perf_counter() - start
        update_s = update(chosen, totals)
        peak = peak_mib()
        connection.send(
            Step(
                rollout_s,
                update_s,
                tokens=sum(int(group.lengths.sum()) for group in groups),
                in_update=len(chosen),
                flops=step_flops(
                    model.config,
                    [len(group.rollouts[0].prompt) for group in groups],
                    [group.lengths.tolist() for group in groups],
                    list(in_groups(kept, setting.samples)),
                ),
                memory_before_mib=before,
                memory_peak_mib=peak,
                update_all_s=update_s if len(chosen) == len(examples) else update(examples, totals),
            )
        )


# --- TRL -------------------------------------------------------------------------------------------------------------


def run_trl(setting: Setting, connection: Connection) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    import trl
    from datasets import Dataset

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(setting.threads)
    case, batches, tokenizer = setting.case, setting.problems(), TinyTokenizer.load()
    config = load_model(resolve_model(setting.model)).config
    problems = [problem for batch in batches for problem in batch]
    dataset = Dataset.from_dict({"prompt": [setting.prompt(p) for p in problems], "index": list(range(len(problems)))})
    lengths: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        lengths[:] = [len(ids) for ids in completion_ids]
        pairs = zip(index, completions, strict=True)
        return [float(grade(problems[i], text).verdict == "correct") for i, text in pairs]

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        """Waits for the word before a step and reports after it."""

        start = rollout_s = before = 0.0
        number = 0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.before = self.before or resident_mib()
            connection.recv()
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            update_s = time.perf_counter() - self.start - self.rollout_s
            prompts = [len(tokenizer.encode(setting.prompt(p))) for p in batches[self.number]]
            responses = list(in_groups(lengths, setting.samples))
            connection.send(
                Step(
                    self.rollout_s,
                    update_s,
                    tokens=sum(lengths),
                    in_update=len(lengths),
                    flops=step_flops(config, prompts, responses, [[True] * setting.samples for _ in responses]),
                    memory_before_mib=self.before,
                    memory_peak_mib=peak_mib(),
                    update_all_s=update_s,
                )
            )
            self.number += 1

    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        trainer = trl.GRPOTrainer(
            model=str(resolve_model(setting.model)),
            reward_funcs=reward,
            args=trl.GRPOConfig(
                output_dir=directory,
                use_cpu=True,
                bf16=False,
                model_init_kwargs={"dtype": "float32"},
                per_device_train_batch_size=setting.prompts * setting.samples,
                gradient_accumulation_steps=1,
                steps_per_generation=1,
                num_generations=setting.samples,
                max_completion_length=case.max_tokens,
                generation_kwargs={"min_new_tokens": case.max_tokens} if case.equal else None,
                **TRL_SETTINGS,
                max_steps=setting.steps,
                dataloader_num_workers=0,
            ),
            train_dataset=dataset,
            callbacks=[clock],
        )
        original: Callable[[Any], Any] = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            start = time.perf_counter()
            scored = original(inputs)
            clock.rollout_s = time.perf_counter() - start
            return scored

        trainer._generate_and_score_completions = timed
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


# --- measuring -------------------------------------------------------------------------------------------------------


def in_groups(values: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(values), size):
        yield list(values[start : start + size])


def resident_mib() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20


def peak_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


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


SIDES = {"trl": run_trl, "reasonlab": run_ours}


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
