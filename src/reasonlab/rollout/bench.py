"""`reasonlab bench rollout`: how fast the engine samples, and whether its logprobs are the learner's."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

from reasonlab.config import LearnerConfig
from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.methods.group import example
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.tiny_world import problem_set
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Rollout, Sampling
from reasonlab.train.learner import Learner


def bench_rollout(arguments: argparse.Namespace) -> int:
    device = prepare(arguments.device)
    tokenizer = TinyTokenizer.load()
    model = load_model(resolve_model(arguments.model)).to(device)
    low_precision = device.type == "cuda" and not arguments.float32
    sampler = load_model(resolve_model(arguments.model)).to(device, torch.bfloat16) if low_precision else model
    engine = Engine(sampler, arguments.rows, arguments.threads)
    sampling = Sampling(arguments.temperature, max_tokens=arguments.max_tokens, stop_ids=(tokenizer.eos_id,))
    requests = [
        Request(
            tokenizer.encode(prompt_text(problem.question)),
            [key("bench", problem.id, sample) for sample in range(arguments.samples)],
        )
        for problem in problem_set("train", arguments.prompts, levels=(2, 3, 4, 5))
    ]
    engine.generate(requests, sampling)  # warm-up: buffers, and on CUDA the captured graphs
    started = time.perf_counter()
    rollouts = [rollout for group in engine.generate(requests, sampling) for rollout in group]
    seconds = time.perf_counter() - started
    tokens = sum(len(rollout.ids) for rollout in rollouts)
    result = {
        "model": arguments.model,
        "device": device.type,
        "dtype": str(sampler.embedding.weight.dtype).removeprefix("torch."),
        "rollouts": len(rollouts),
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
    }
    if arguments.check:
        result |= check(model, rollouts, arguments.temperature or 1.0, low_precision)
    if arguments.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:>20}  {value}" for name, value in result.items()))
    return 0


def check(model: torch.nn.Module, rollouts: list[Rollout], temperature: float, bfloat16: bool) -> dict[str, float]:
    """Largest and mean |engine logprob − learner logprob| over all sampled tokens."""
    learner = Learner(model, LearnerConfig(bfloat16=bfloat16), temperature=temperature)  # type: ignore[arg-type]
    examples = [example(rollout, 0.0) for rollout in rollouts]
    pairs = zip(learner.logprobs(examples), rollouts, strict=True)
    differences = np.concatenate([np.abs(mine - rollout.logprobs) for mine, rollout in pairs])
    return {"logprob_diff_max": float(differences.max()), "logprob_diff_mean": float(differences.mean())}
