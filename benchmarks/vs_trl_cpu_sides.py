"""The two sides of `vs_trl_cpu.py`. Each waits for the word before a step and reports the step after it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from resident_memory import peak_mib, resident_mib
from trl_settings import BETAS, CLIP_NORM, LEARNING_RATE, TRL_SETTINGS
from vs_trl_cpu_work import Setting, Step, in_groups, step_flops

from reasonlab.config import GrpoConfig, LearnerConfig
from reasonlab.grading.grade import grade
from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.methods.group import Group
from reasonlab.methods.grpo import Grpo
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.problem import Problem
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling
from reasonlab.train.batch import Example, Totals
from reasonlab.train.learner import Learner
from reasonlab.train.loop import on_policy


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


SIDES = {"trl": run_trl, "reasonlab": run_ours}
