"""What every side of `iteration.py` is told, with the checkpoint that is written for it, and what it reports."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
from random_models import SHAPES, random_model
from tokenizers import Tokenizer, models, pre_tokenizers
from trl_settings import BETAS, CLIP_NORM, LEARNING_RATE

from reasonlab.config import Config, validate
from reasonlab.errors import UserError
from reasonlab.model.checkpoint import load_config, save_model
from reasonlab.model.text_format import open_format
from reasonlab.problems.problem import Problem
from reasonlab.problems.registry import prompts as instructions
from reasonlab.train.exchange import INSTRUCTION, Exchange
from reasonlab.train.prompts import Prompts

UNKNOWN, PAD, END = "<unk>", "<pad>", "<eos>"
POOL = "problems.jsonl"
REWARDS = 1009  # different rewards
MOST_ROWS = 1024


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


# A side tells the iterations that are done: none when all is loaded and compiled and its first begins.
Tell = Callable[[Sequence[Iteration]], None]


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
