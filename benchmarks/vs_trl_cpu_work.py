"""What both sides of `vs_trl_cpu.py` are told, what they report of a step, and the arithmetic that a step needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reasonlab.model.config import ModelConfig
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import problem_set

LEVELS = (2, 3, 4, 5)


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


def in_groups(values: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(values), size):
        yield list(values[start : start + size])


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
