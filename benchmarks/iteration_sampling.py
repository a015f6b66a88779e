"""Sampling alone, for `iteration.py --rollouts-only`: our engine and vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from iteration_work import Iteration, Stopwatch, Tell, Work, digest, repeated

from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.model.checkpoint import load_model
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling


def sampled(work: Work, tell: Tell, sample: Callable[[int], int]) -> list[Iteration]:
    """`sample` makes the rollouts of an iteration and says how many tokens they have."""
    watch = Stopwatch(work.device)
    iterations: list[Iteration] = []
    tell(iterations)
    for number, prompts in enumerate(work.prompt_ids):
        begin = watch.now()
        tokens = sample(number)
        seconds = watch.now() - begin
        iterations.append(
            Iteration(seconds, seconds, 0.0, 0.0, tokens, 0, digest(repeated(prompts, work.samples)))
        )  # fmt: skip
        tell(iterations)
    return iterations


def our_rollouts(work: Work, scratch: Path, tell: Tell) -> list[Iteration]:
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

    return sampled(work, tell, sample)


def graphs_of(rows: int) -> dict[str, Any]:
    """vLLM's own choice ends at 512 rows; above, it decodes without graphs."""
    return {"cudagraph_capture_sizes": [1, 8, 32, 64, *range(128, rows + 1, 128)]}


def vllm_rollouts(work: Work, scratch: Path, tell: Tell) -> list[Iteration]:
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

    return sampled(work, tell, sample)
