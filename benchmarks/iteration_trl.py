"""TRL's side of `iteration.py`: its GRPOTrainer, with `generate` and with vLLM in the same process."""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from iteration_sampling import graphs_of
from iteration_work import Iteration, Stopwatch, Tell, Work, digest, reward_of
from trl_settings import TRL_SETTINGS

from reasonlab.errors import UserError


def trl(work: Work, scratch: Path, tell: Tell) -> list[Iteration]:
    return trl_iterations(work, scratch, tell, use_vllm=False)


def trl_vllm(work: Work, scratch: Path, tell: Tell) -> list[Iteration]:
    return trl_iterations(work, scratch, tell, use_vllm=True)


def trl_iterations(work: Work, scratch: Path, tell: Tell, use_vllm: bool) -> list[Iteration]:
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
            tell(iterations)
            self.begin = watch.now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now = watch.now()
            rollout_s, reward_s = watch.take("rollout"), watch.take("reward")
            seconds = now - self.begin
            rest = seconds - rollout_s - reward_s
            iterations.append(Iteration(seconds, rollout_s, reward_s, rest, **seen))
            tell(iterations)
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
