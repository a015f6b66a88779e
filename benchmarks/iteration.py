"""A whole GRPO iteration: our loop beside `trl.GRPOTrainer`, with `generate` and with vLLM in the same process.

    python benchmarks/iteration.py --sides ours trl trl-vllm               # CUDA if there is one: 135m, 128 x 8
    python benchmarks/iteration.py --shape 0.5b --sides ours trl-vllm --json iteration.json
    python benchmarks/iteration.py --shape mini --prompts 4 --samples 4 --prompt 24 --new 16 --sides ours trl     # CPU
    python benchmarks/iteration.py --model smollm2.gguf --data DIR --ragged --new 400 --sides ours trl-vllm
    python benchmarks/iteration.py --rollouts-only --model smollm2.gguf --data DIR --ragged --new 400 --sides ours vllm

The same work on every side: one checkpoint directory, the same prompts in the same order, group size, number of new
tokens, temperature 1, reward, advantages, clipped loss without KL, one update a rollout, gradient clipping, AdamW and
learning rate. Weights are random in the shapes of `random_models.py`, with a tokenizer of as many words and prompts of
exactly `--prompt` tokens; or they are those of `--model`, with the prompts of GSM8K. Every rollout has exactly `--new`
tokens; with `--ragged` it ends at an end token, or there. The reward is a number made of the token ids: it differs
inside each group, so every sequence is in the loss. All that is checked in the numbers that each side reports: the
prompts' tokens, the tokens that were generated, the sequences in the loss.

ours       `reasonlab.train.loop`, as `reasonlab train` runs it: prompts, rollouts, decoding and grading of all
           responses, advantages, update, metrics, the record of every rollout on disk; no evaluation or checkpoint
trl        `GRPOTrainer` with `generate` on all prompts at once
trl-vllm   `GRPOTrainer` with `use_vllm` and `vllm_mode="colocate"`; its weights are synchronised in every iteration

TRL runs with what makes it fast: weights, gradients and optimizer in bf16 (ours has fp32 master weights and moments),
no gradient checkpointing, micro-batches of `--micro` sequences, no importance-sampling correction for vLLM (which
would cost it a forward pass), no detokenizing inside vLLM, no logging, no saving. vLLM decodes more than 512 rows
without CUDA graphs unless it is told otherwise, for which TRL has no setting; `--full-graphs` does it.

An iteration is the time from the end of one update to the end of the next, the device waited for. The first `--warmup`
ones do not count.

rollout    tokens in, tokens and texts out; TRL with vLLM: also the weights' way to it
reward     ours: grading and reward; TRL: the reward function
update     ours: from advantages to new weights; TRL: all the rest

With `--ragged` the sides draw different samples, so the ratio is of seconds per generated token. `--rollouts-only`
compares sampling alone, our engine with vLLM's. Each side has a process of its own, `--start-timeout` seconds until
its first iteration begins (loading, and what vLLM compiles), and `--timeout` from there on; of one that is late, what
it has done by then counts. Memory is what is in use on
the device when the side ends (nobody gives memory back before), on the CPU the highest resident set.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from iteration_ours import ours
from iteration_sampling import our_rollouts, vllm_rollouts
from iteration_trl import trl, trl_vllm
from iteration_work import Iteration, Tell, Work, digest, repeated, write_checkpoint
from random_models import SHAPES
from resident_memory import peak_mib

from reasonlab.model.checkpoint import load_config
from reasonlab.model.ladder import resolve_model

Side = Callable[[Work, Path, Tell], list[Iteration]]
WHOLE: dict[str, Side] = {"ours": ours, "trl": trl, "trl-vllm": trl_vllm}
SAMPLING: dict[str, Side] = {"ours": our_rollouts, "vllm": vllm_rollouts}
NEEDS = {"trl": ("trl",), "trl-vllm": ("trl", "vllm"), "vllm": ("vllm",)}
WANTED = {"trl": 10.0, "trl-vllm": 3.0, "vllm": 1.0}  # times that ours is to be faster than each
HEADER = "           iteration   rollout    reward    update   tokens/s    first       memory"
STDERR = 2  # where libraries may chatter: the table goes to the standard output alone
LOOK_S = 0.1  # between two looks for an answer


@dataclass
class Measured:
    """What a side reports."""

    side: str
    iterations: list[Iteration]  # those that count
    first_s: float  # the first, which captures graphs and compiles
    memory_mib: float
    versions: dict[str, str] = field(default_factory=dict)
    late: str = ""  # why there are no more iterations

    def median_of(self, what: str) -> float:
        return float(median(getattr(iteration, what) for iteration in self.iterations))


def memory_mib(device: str) -> float:
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20
    return peak_mib()


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "transformers", "trl", "vllm"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def measure(side: str, work: Work, answer: Path | None = None) -> Measured:
    """All iterations of a side. What is known so far lies in `answer` from the beginning of the first one on."""

    def measured(iterations: Sequence[Iteration]) -> Measured:
        first = iterations[0].seconds if iterations else 0.0
        return Measured(side, list(iterations[work.warmup :]), first, memory_mib(work.device), versions())

    def tell(iterations: Sequence[Iteration]) -> None:
        if answer is not None:
            aside = answer.with_suffix(".part")
            aside.write_text(json.dumps(asdict(measured(iterations))))
            aside.replace(answer)

    with TemporaryDirectory() as scratch:
        return measured((SAMPLING if work.rollouts_only else WHOLE)[side](work, Path(scratch), tell))


def measure_apart(side: str, work: Work, start_timeout: float, timeout: float) -> Measured | str:
    """`measure` in a process of its own, as far as it comes in time; if there is nothing, why."""
    if missing := [package for package in NEEDS.get(side, ()) if find_spec(package) is None]:
        return f"{missing[0]} is not installed"
    with TemporaryDirectory() as directory:
        told, answer = Path(directory, "work.json"), Path(directory, "measured.json")
        told.write_text(json.dumps(asdict(work)))
        command = [sys.executable, str(Path(__file__).resolve()), "--tell", str(told), side, str(answer)]
        process = subprocess.Popen(command, stdout=STDERR)
        try:
            late = lateness(process, answer, start_timeout, timeout)
        finally:  # also if we are interrupted
            end_of(process)
        raw = json.loads(answer.read_text()) if answer.is_file() else {"iterations": []}
    if not late and len(raw["iterations"]) < work.timed:
        return f"ended early with exit status {process.returncode}; its traceback is above"
    if not raw["iterations"]:
        return late
    return Measured(**{**raw, "iterations": [Iteration(**iteration) for iteration in raw["iterations"]], "late": late})


def end_of(process: subprocess.Popen[bytes]) -> None:
    """Kill it and all that it has started, if it still runs: vLLM's engine outlives its parent."""
    if process.poll() is None:
        for one in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()
        process.wait()


def lateness(process: subprocess.Popen[bytes], answer: Path, start_timeout: float, timeout: float) -> str:
    """Wait for the end of the process; if it does not come in time, what did not happen, and nothing otherwise.

    The time to load and to compile says nothing about an iteration, so it has a limit of its own.
    """
    latest = time.monotonic() + start_timeout
    while process.poll() is None and not answer.is_file():
        if time.monotonic() > latest:
            return f"no iteration begun after {start_timeout:.0f} s"
        time.sleep(LOOK_S)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout:.0f} s"
    return ""


def answer_apart(told: str, side: str, answer: str) -> None:
    """What `measure_apart` starts."""
    measure(side, Work(**json.loads(Path(told).read_text())), Path(answer))


def differences(work: Work, sides: Sequence[Measured]) -> list[str]:
    """How the sides did not do the same, and not what they were told."""
    found = []
    expected = [digest(repeated(prompts, work.samples)) for prompts in work.prompt_ids[work.warmup :]]
    for side in sides:
        if [iteration.prompts for iteration in side.iterations] != expected[: len(side.iterations)]:
            found.append(f"{side.side} had other prompts")
        tokens = {iteration.tokens for iteration in side.iterations}
        if not work.ragged and tokens != {work.rollouts * work.new}:
            found.append(f"{side.side} generated {sorted(tokens)} tokens, not {work.rollouts * work.new}")
        trained = {iteration.in_loss for iteration in side.iterations}
        # Two responses of a group may be rewarded alike by chance; one whose reward is the mean is not learned from.
        if not work.rollouts_only and not all(0.99 * work.rollouts <= count <= work.rollouts for count in trained):
            found.append(f"{side.side} had {sorted(trained)} sequences in the loss, not {work.rollouts}")
    return found


def row(name: str, side: Measured | str) -> str:
    """A line of the table."""
    if isinstance(side, str):
        return f"{name:10} {side}"
    parts = " ".join(f"{side.median_of(part):7.3f} s" for part in ("seconds", "rollout_s", "reward_s", "update_s"))
    rate = 1 / side.median_of("s_per_token")
    note = f"  ({len(side.iterations)} timed, {side.late})" if side.late else ""
    return f"{name:10} {parts} {rate:10,.0f} {side.first_s:6.1f} s {side.memory_mib:8,.0f} MiB{note}"


def compare(work: Work, results: dict[str, Measured | str]) -> dict[str, Any]:
    """Print how the others compare with ours; returns all that was measured."""
    sides = {name: side for name, side in results.items() if isinstance(side, Measured)}
    ratios: dict[str, float] = {}
    if own := sides.get("ours"):
        ratios = {
            name: side.median_of("s_per_token") / own.median_of("s_per_token")
            for name, side in sides.items()
            if side is not own
        }
    for name, ratio in ratios.items():
        met = "met" if ratio >= WANTED[name] else "MISSED"
        print(f"{name} takes {ratio:.2f} times as long as ours for a token; wanted {WANTED[name]:g}: {met}")
    found = differences(work, list(sides.values()))
    if sides:
        print(f"NOT THE SAME WORK: {'; '.join(found)}" if found else "the same work on all sides")
    return {
        "work": asdict(work),
        "sides": {name: side if isinstance(side, str) else asdict(side) for name, side in results.items()},
        "ratios": ratios,
        "differences": found,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=list({**WHOLE, **SAMPLING}), default=["ours", "trl", "trl-vllm"])
    parser.add_argument("--shape", choices=SHAPES, default="135m", help="of random weights")
    parser.add_argument("--model", help="real weights instead: a checkpoint directory, a GGUF file or a name")
    parser.add_argument("--data", default="", help="directory with GSM8K: its prompts for --model")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt", type=int, default=80, help="tokens of a prompt, for random weights")
    parser.add_argument("--new", type=int, default=256, help="new tokens of a rollout; with --ragged at most")
    parser.add_argument("--ragged", action="store_true", help="rollouts end at an end token")
    parser.add_argument("--rollouts-only", action="store_true", help="sampling alone, for the sides ours and vllm")
    parser.add_argument("--warmup", type=int, default=1, help="iterations that do not count")
    parser.add_argument("--timed", type=int, default=3, help="iterations that count")
    parser.add_argument("--micro", type=int, help="sequences of TRL's micro-batch (64; 32 for larger models)")
    parser.add_argument("--budget", type=int, help="tokens of our micro-batch (32,768; 16,384 for larger models)")
    parser.add_argument("--vllm-memory", type=float, default=0.4, help="share of the device that vLLM takes")
    parser.add_argument(
        "--full-graphs", action="store_true", help="vLLM inside TRL: graphs up to the full batch (TRL cannot set that)"
    )
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds for a side to load and to compile")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a side from its first iteration on")
    parser.add_argument("--threads", type=int, default=1, help="on the CPU, for each side")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", type=Path, help="keep the random weights there, and take them from there")
    parser.add_argument("--json", type=Path, help="also write all numbers there")
    options = parser.parse_args(arguments)
    if unknown := [side for side in options.sides if side not in (SAMPLING if options.rollouts_only else WHOLE)]:
        parser.error(f"{unknown[0]} is for {'whole iterations' if options.rollouts_only else '--rollouts-only'}")
    if bool(options.model) != bool(options.data):
        parser.error("--model and --data belong together")
    with TemporaryDirectory() as temporary:
        if options.model:
            directory = resolve_model(options.model)
        else:
            directory = options.checkpoint or Path(temporary, options.shape)
            write_checkpoint(options.shape, options.prompt, options.prompts * 8, directory)
        small = load_config(directory).hidden_size <= SHAPES["135m"].hidden_size
        work = Work(
            str(directory.resolve()), options.data, options.prompts, options.samples, options.new, options.ragged,
            options.warmup, options.timed, options.micro or min(64 if small else 32, options.prompts * options.samples),
            options.budget or (32768 if small else 16384), options.vllm_memory, options.device, options.threads,
            options.rollouts_only, options.full_graphs,
        )  # fmt: skip
        print(
            f"{options.model or options.shape}, {work.prompts} prompts x {work.samples} samples, "
            f"{'at most' if work.ragged else 'exactly'} {work.new} new tokens, {work.device}, {work.dtype}; medians of "
            f"{work.timed}",
            flush=True,
        )
        print(HEADER, flush=True)
        results: dict[str, Measured | str] = {}
        for side in options.sides:
            results[side] = measure_apart(side, work, options.start_timeout, options.timeout)
            print(row(side, results[side]), flush=True)
        document = compare(work, results)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return document


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tell"]:
        answer_apart(*sys.argv[2:5])
    else:
        main()
