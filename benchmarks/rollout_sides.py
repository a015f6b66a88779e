"""Who samples in `rollout.py`: our engine, transformers, vLLM. A side makes all rollouts and counts their tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rollout_work import Work

from reasonlab.model.transformer import Transformer
from reasonlab.rollout.engine import Engine


def engine_side(model: Transformer, work: Work) -> Callable[[], int]:
    engine = Engine(model, work.rows)
    requests, sampling = work.requests(model.config.vocab_size), work.sampling(model.config.vocab_size)
    return lambda: sum(len(rollout.ids) for group in engine.generate(requests, sampling) for rollout in group)


def transformers_side(model: Transformer, work: Work) -> Callable[[], int]:
    """`generate` on all prompts at once, without logprobs, which would only slow it down."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[model.config.architecture]
    weight = model.embedding.weight
    theirs = AutoModelForCausalLM.from_config(kind(**model.config.to_hf()), dtype=weight.dtype).to(weight.device).eval()
    prompts = [r.prompt for r in replace(work, group=1).requests(model.config.vocab_size)]
    tokens = torch.tensor(prompts, device=weight.device)

    @torch.inference_mode()
    def run() -> int:
        out = theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None,
            min_new_tokens=work.new, max_new_tokens=work.new,
        )  # fmt: skip
        return int(out.shape[0] * (out.shape[1] - work.prompt))

    return run


def vllm_side(model: Transformer, work: Work) -> Callable[[], int]:
    """vLLM's offline engine with random weights of the same shape, returning the logprob of each sampled token."""
    from vllm import LLM, SamplingParams

    directory = TemporaryDirectory()
    Path(directory.name, "config.json").write_text(json.dumps(model.config.to_hf("bfloat16")))
    llm = LLM(
        directory.name, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=work.rows,
        max_model_len=work.prompt + work.new, enable_prefix_caching=False, gpu_memory_utilization=0.5,
    )  # fmt: skip
    parameters = SamplingParams(temperature=1.0, max_tokens=work.new, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": list(r.prompt)} for r in replace(work, group=1).requests(model.config.vocab_size)]

    def run(keep: object = directory) -> int:
        return sum(len(out.outputs[0].token_ids) for out in llm.generate(prompts, parameters, use_tqdm=False))

    return run


SIDES = {"engine": engine_side, "transformers": transformers_side, "vllm": vllm_side}
