"""A whole GRPO iteration: our loop beside `trl.GRPOTrainer`, with `generate` and with vLLM in the same process.

    python benchmarks/iteration.py --sides ours trl trl-vllm               # CUDA if there is one: 135m, 128 x 8
    python benchmarks/iteration.py --shape 0.5b --sides ours trl-vllm --json iteration.json
    python benchmarks/iteration.py --shape mini --prompts 4 --samples 4 --prompt 24 --new 16 --sides ours trl     # CPU
    python benchmarks/iteration.py --model smollm2.gguf --data DIR --ragged --new 400 --sides ours trl-vllm
    python benchmarks/iteration.py --rollouts-only --model smollm2.gguf --data DIR --ragged --new 400 --sides ours vllm

The same work on every side: one checkpoint directory, the same prompts in the same order, group size, number of new
tokens, temperature 1, reward, advantages, clipped loss without KL, one update a rollout, gradient clipping, AdamW and
learning rate. Weights are random in the shapes of `rollout.py`, with a tokenizer of as many words and prompts of
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
compares sampling alone, our engine with vLLM's. Each side has a process of its own. Memory is what is in use on the
device when the side ends (nobody gives memory back before), on the CPU the highest resident set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
from random_models import SHAPES, random_model
from resident_memory import peak_mib
from tokenizers import Tokenizer, models, pre_tokenizers
from trl_settings import BETAS, CLIP_NORM, LEARNING_RATE, TRL_SETTINGS

from reasonlab.config import Config, validate
from reasonlab.errors import UserError
from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.methods.group import Array, Group
from reasonlab.model.checkpoint import load_config, load_model, save_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.text_format import open_format
from reasonlab.problems.problem import Problem
from reasonlab.problems.registry import prompts as instructions
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling
from reasonlab.terminal import PlainObserver
from reasonlab.train.exchange import INSTRUCTION, Exchange
from reasonlab.train.loop import start
from reasonlab.train.prompts import Prompts
from reasonlab.train.sources import Rollouts

UNKNOWN, PAD, END = "<unk>", "<pad>", "<eos>"
POOL = "problems.jsonl"
WANTED = {"trl": 10.0, "trl-vllm": 3.0, "vllm": 1.0}  # times that ours is to be faster than each
REWARDS = 1009  # different rewards
MOST_ROWS = 1024
HEADER = "           iteration   rollout    reward    update   tokens/s    first       memory"
STDERR = 2  # where libraries may chatter: the table goes to the standard output alone


@dataclass(frozen=True)
class Work:
    """What every side is told."""

    model: str  # a checkpoint directory
    data: str  # directory with GSM8K; empty: random questions that lie beside the weights
    prompts: int
    samples: int
    new: int
    ragged: bool
    warmup: int
    timed: int
    micro: int  # sequences of a micro-batch: TRL
    budget: int  # tokens of a micro-batch: ours
    vllm_memory: float
    device: str
    threads: int
    rollouts_only: bool = False
    full_graphs: bool = False  # vLLM inside TRL captures graphs up to the full batch

    @property
    def iterations(self) -> int:
        return self.warmup + self.timed

    @property
    def rollouts(self) -> int:
        return self.prompts * self.samples

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @cached_property
    def recipe(self) -> Config:
        return validate(
            {
                "iterations": self.iterations,
                "device": self.device,
                "threads": self.threads,
                "data": self.data,
                "model": {"path": self.model},
                "problems": {"path": "gsm8k_train" if self.data else str(Path(self.model) / POOL)},
                "rollout": {
                    "prompts": self.prompts,
                    "samples": self.samples,
                    "max_tokens": self.new,
                    "rows": min(MOST_ROWS, self.rollouts),
                    "repetition_window": 0,
                },
                "method": {"type": "grpo"},
                "learner": {
                    "lr": LEARNING_RATE,
                    "betas": BETAS,
                    "clip_grad_norm": CLIP_NORM,
                    "token_budget": self.budget,
                },
                "evaluate": {"every": 0},
                "checkpoint": {"every": self.iterations + 1},
            },
            "benchmark",
        )

    @cached_property
    def exchange(self) -> Exchange:
        return Exchange(open_format(Path(self.model), load_config(Path(self.model)).vocab_size))

    @cached_property
    def problems(self) -> list[list[Problem]]:
        """Those that the loop draws, iteration by iteration."""
        prompts = Prompts(self.recipe)
        return [prompts.draw(number, self.prompts) for number in range(1, self.iterations + 1)]

    @cached_property
    def prompt_ids(self) -> list[list[list[int]]]:
        """The tokens of every prompt, iteration by iteration."""
        return [[self.exchange.prompt(problem).ids for problem in problems] for problems in self.problems]

    @property
    def prompt_texts(self) -> list[str]:
        """The same prompts as texts, all in a row."""
        text_format = self.exchange.format
        return [text_format.shown(ids) for iteration in self.prompt_ids for ids in iteration]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together."""
        return max(len(ids) for iteration in self.prompt_ids for ids in iteration) + self.new

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.exchange.stop_ids if self.ragged else ()


@dataclass
class Iteration:
    """What one iteration of one side took, and what it did."""

    seconds: float
    rollout_s: float
    reward_s: float
    update_s: float
    tokens: int  # generated
    in_loss: int  # sequences
    prompts: str  # a digest of the tokens of all prompts, each as often as it was sampled from

    @property
    def s_per_token(self) -> float:
        return self.seconds / self.tokens


@dataclass
class Measured:
    """What a side reports."""

    side: str
    iterations: list[Iteration]  # those that count
    first_s: float  # the first, which captures graphs and compiles
    memory_mib: float
    versions: dict[str, str] = field(default_factory=dict)

    def median_of(self, what: str) -> float:
        return float(median(getattr(iteration, what) for iteration in self.iterations))


def reward_of(ids: Sequence[int]) -> float:
    """A number in [0, 1) that different responses hardly ever share."""
    return (sum((place + 1) * token for place, token in enumerate(ids)) % REWARDS) / REWARDS


def digest(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(map(int, ids)) for ids in prompts]).encode()).hexdigest()[:16]


def repeated(prompts: Sequence[list[int]], samples: int) -> list[list[int]]:
    return [ids for ids in prompts for _ in range(samples)]


class Stopwatch:
    """Seconds by name, the device waited for at both ends."""

    def __init__(self, device: str) -> None:
        self.device, self.seconds = device, dict[str, float]()

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; the seconds of its calls are added up under this name."""

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = self.now()
            result = function(*arguments, **options)
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - begin
            return result

        return timed

    def take(self, name: str) -> float:
        return self.seconds.pop(name, 0.0)


# --- the work --------------------------------------------------------------------------------------------------------


def write_checkpoint(shape: str, prompt: int, questions: int, directory: Path) -> None:
    """Random weights, a tokenizer with a word for each of the model's tokens, and questions in these words.

    Nothing is written where all three lie already.
    """
    if (directory / POOL).is_file():
        return
    directory.mkdir(parents=True, exist_ok=True)
    frame = instructions()[INSTRUCTION].split()
    words = list(dict.fromkeys([UNKNOWN, PAD, END, *frame[1:]]))
    words += [f"w{number}" for number in range(len(words), SHAPES[shape].vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"unk_token": UNKNOWN, "pad_token": PAD, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    config = replace(SHAPES[shape], eos_ids=(words.index(END),), pad_id=words.index(PAD))
    save_model(random_model(config, torch.device("cpu"), torch.bfloat16), directory)
    length, random = prompt - len(frame) + 1, Random(0)
    if length < 1:
        raise UserError(f"a prompt has at least {len(frame)} tokens", f"Set --prompt {len(frame)} or more")
    plain = words[len(words) // 2 :]
    rows = (
        {"id": f"q{number}", "question": " ".join(random.choices(plain, k=length)), "answer": "1"}
        for number in range(questions)
    )
    (directory / POOL).write_text("".join(json.dumps(row) + "\n" for row in rows))


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


# --- our loop --------------------------------------------------------------------------------------------------------


def ours(work: Work, scratch: Path) -> list[Iteration]:
    """The loop of `reasonlab train`. Only three things differ: nothing stops early, the reward, and it is timed."""
    trainer = start(work.recipe, scratch / "run", ["benchmark"], PlainObserver(work.iterations, "ours", quiet=True))
    watch, source = Stopwatch(work.device), trainer.source
    assert isinstance(source, Rollouts)
    trainer.sampling = source.sampling = replace(trainer.sampling, stop_ids=work.stop_ids)
    drawn: list[Group] = []
    trained: list[int] = []

    def reward(number: int, group: Group) -> Array:
        drawn.append(group)
        return np.array([reward_of(rollout.ids) for rollout in group.rollouts])

    step_on = trainer.learner.step_on

    def counted(objectives: Sequence[Any]) -> Any:
        trained.append(sum(len(objective.examples) for objective in objectives))
        return step_on(objectives)

    for owner, name, timed in (
        (source, "_reward", watch.around("reward", reward)),
        (trainer.exchange, "grades", watch.around("reward", trainer.exchange.grades)),
        (source, "groups", watch.around("groups", source.groups)),
        (trainer, "_update", watch.around("update", trainer._update)),
        (trainer.learner, "step_on", counted),
    ):
        setattr(owner, name, timed)
    trainer._announce()
    iterations = []
    for number in range(1, work.iterations + 1):
        drawn.clear()
        trained.clear()
        begin = watch.now()
        trainer._iteration(number)
        seconds = watch.now() - begin
        reward_s = watch.take("reward")
        iterations.append(
            Iteration(
                seconds,
                watch.take("groups") - reward_s,
                reward_s,
                watch.take("update"),
                tokens=sum(int(group.lengths.sum()) for group in drawn),
                in_loss=sum(trained),
                prompts=digest([rollout.prompt for group in drawn for rollout in group.rollouts]),
            )
        )
    trainer._finish_writing()  # of the last rollouts: the scratch directory goes away
    return iterations


# --- TRL -------------------------------------------------------------------------------------------------------------


def trl(work: Work, scratch: Path) -> list[Iteration]:
    return trl_iterations(work, scratch, use_vllm=False)


def trl_vllm(work: Work, scratch: Path) -> list[Iteration]:
    return trl_iterations(work, scratch, use_vllm=True)


def trl_iterations(work: Work, scratch: Path, use_vllm: bool) -> list[Iteration]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cuda = work.device == "cuda"
    if not cuda:
        torch.set_num_threads(work.threads)
    watch = Stopwatch(work.device)
    iterations: list[Iteration] = []
    seen: dict[str, Any] = {}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward_of(ids) for ids in completion_ids]

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        """From the end of one step to the end of the next."""

        begin = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begin = watch.now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = watch.now()
            rollout_s, reward_s = watch.take("rollout"), watch.take("reward")
            seconds = now - self.begin
            rest = seconds - rollout_s - reward_s
            iterations.append(Iteration(seconds, rollout_s, reward_s, rest, **seen))
            self.begin = watch.now()

    accumulated, rest = divmod(work.rollouts, work.micro)
    if rest:
        raise UserError(
            f"{work.rollouts} rollouts cannot be dealt out in micro-batches of {work.micro}", "Change --micro"
        )
    fixed: dict[str, Any] = {"ignore_eos": True} if use_vllm else {"min_new_tokens": work.new}
    vllm: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": work.vllm_memory,
        "vllm_max_model_length": work.longest,
        "vllm_importance_sampling_correction": False,
    }
    if use_vllm and work.full_graphs:
        engines: Any = import_module("trl.generation.vllm_generation")
        engines.LLM = partial(engines.LLM, compilation_config=graphs_of(work.rollouts))
    generation = ({} if work.ragged else fixed) | ({"detokenize": False} if use_vllm else {})
    trainer = GRPOTrainer(
        model=work.model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(scratch / "trl"),
            use_cpu=not cuda,
            bf16=False,  # the weights are: nothing has to be cast
            model_init_kwargs={"dtype": str(work.dtype).removeprefix("torch.")},
            per_device_train_batch_size=work.micro,
            gradient_accumulation_steps=accumulated,
            steps_per_generation=accumulated,
            num_generations=work.samples,
            max_completion_length=work.new,
            generation_kwargs=generation,
            **TRL_SETTINGS,
            max_steps=work.iterations,
            **(vllm if use_vllm else {}),
        ),
        train_dataset=Dataset.from_dict({"prompt": work.prompt_texts}),
        callbacks=[Clock()],
    )
    score = trainer._generate_and_score_completions

    def observed(inputs: Any) -> Any:
        scored = score(inputs)
        lengths = scored["completion_mask"].sum(1)
        prompts = zip(scored["prompt_ids"].tolist(), scored["prompt_mask"].bool().tolist(), strict=True)
        seen.update(
            tokens=int(lengths.sum()),
            in_loss=int(((scored["advantages"] != 0) & (lengths > 0)).sum()),
            prompts=digest([[token for token, real in zip(*pair, strict=True) if real] for pair in prompts]),
        )
        return scored

    for name, timed in (
        ("_generate_and_score_completions", observed),
        ("_generate", watch.around("rollout", trainer._generate)),
        ("_calculate_rewards", watch.around("reward", trainer._calculate_rewards)),
    ):
        setattr(trainer, name, timed)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return iterations


# --- sampling alone --------------------------------------------------------------------------------------------------


def sampled(work: Work, sample: Callable[[int], int]) -> list[Iteration]:
    """`sample` makes the rollouts of an iteration and says how many tokens they have."""
    watch, iterations = Stopwatch(work.device), []
    for number, prompts in enumerate(work.prompt_ids):
        begin = watch.now()
        tokens = sample(number)
        seconds = watch.now() - begin
        iterations.append(
            Iteration(seconds, seconds, 0.0, 0.0, tokens, 0, digest(repeated(prompts, work.samples)))
        )  # fmt: skip
    return iterations


def our_rollouts(work: Work, scratch: Path) -> list[Iteration]:
    device = prepare(work.device)
    model = load_model(Path(work.model)).to(device, work.dtype)
    engine = Engine(model, work.recipe.rollout.rows, work.threads)
    sampling = Sampling(max_tokens=work.new, stop_ids=work.stop_ids)

    def sample(number: int) -> int:
        requests = [
            Request(ids, [key(number, place, i) for i in range(work.samples)])
            for place, ids in enumerate(work.prompt_ids[number])
        ]
        return sum(len(rollout.ids) for group in engine.generate(requests, sampling) for rollout in group)

    return sampled(work, sample)


def graphs_of(rows: int) -> dict[str, Any]:
    """vLLM's own choice ends at 512 rows; above, it decodes without graphs."""
    return {"cudagraph_capture_sizes": [1, 8, 32, 64, *range(128, rows + 1, 128)]}


def vllm_rollouts(work: Work, scratch: Path) -> list[Iteration]:
    """vLLM's offline engine, as fast as it goes: graphs up to the full batch, prompts shared, no detokenizing."""
    from vllm import LLM, SamplingParams

    rows = work.recipe.rollout.rows
    llm = LLM(
        work.model,
        dtype=str(work.dtype).removeprefix("torch."),
        skip_tokenizer_init=True,
        max_num_seqs=rows,
        max_model_len=work.longest,
        gpu_memory_utilization=work.vllm_memory,
        disable_log_stats=True,
        compilation_config=graphs_of(rows),
    )
    parameters = SamplingParams(
        n=work.samples, temperature=1.0, max_tokens=work.new, logprobs=0, detokenize=False,
        ignore_eos=True, stop_token_ids=list(work.stop_ids),
    )  # fmt: skip

    def sample(number: int) -> int:
        prompts = [{"prompt_token_ids": ids} for ids in work.prompt_ids[number]]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    return sampled(work, sample)


Side = Callable[[Work, Path], list[Iteration]]
WHOLE: dict[str, Side] = {"ours": ours, "trl": trl, "trl-vllm": trl_vllm}
SAMPLING: dict[str, Side] = {"ours": our_rollouts, "vllm": vllm_rollouts}
NEEDS = {"trl": ("trl",), "trl-vllm": ("trl", "vllm"), "vllm": ("vllm",)}


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(side: str, work: Work) -> Measured:
    with TemporaryDirectory() as scratch:
        iterations = (SAMPLING if work.rollouts_only else WHOLE)[side](work, Path(scratch))
        memory = memory_mib(work.device)
    return Measured(side, iterations[work.warmup :], iterations[0].seconds, memory, versions())


def measure_apart(side: str, work: Work, timeout: float) -> Measured | str:
    """`measure` in a process of its own; if that fails or takes too long, why there is nothing."""
    if missing := [package for package in NEEDS.get(side, ()) if find_spec(package) is None]:
        return f"{missing[0]} is not installed"
    with TemporaryDirectory() as directory:
        told, answer = Path(directory, "work.json"), Path(directory, "measured.json")
        told.write_text(json.dumps(asdict(work)))
        command = [sys.executable, str(Path(__file__).resolve()), "--tell", str(told), side, str(answer)]
        process = subprocess.Popen(command, stdout=STDERR)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            for one in psutil.Process(process.pid).children(recursive=True):  # vLLM's engine outlives its parent
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.kill()
            process.wait()
            return f"not done after {timeout:.0f} s"
        if not answer.is_file():
            return f"ended early with exit status {code}; its traceback is above"
        raw = json.loads(answer.read_text())
    return Measured(**{**raw, "iterations": [Iteration(**iteration) for iteration in raw["iterations"]]})


def answer_apart(told: str, side: str, answer: str) -> None:
    """What `measure_apart` starts."""
    measured = measure(side, Work(**json.loads(Path(told).read_text())))
    Path(answer).write_text(json.dumps(asdict(measured)))


def differences(work: Work, sides: Sequence[Measured]) -> list[str]:
    """How the sides did not do the same, and not what they were told."""
    found = []
    expected = [digest(repeated(prompts, work.samples)) for prompts in work.prompt_ids[work.warmup :]]
    for side in sides:
        if [iteration.prompts for iteration in side.iterations] != expected:
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
    return f"{name:10} {parts} {rate:10,.0f} {side.first_s:6.1f} s {side.memory_mib:8,.0f} MiB"


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
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a side is given up")
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
            results[side] = measure_apart(side, work, options.timeout)
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
