"""The memory of a run, planned before it begins: what it holds, what is refused, and which changes help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from language_model_runs import sums_recipe
from small_models import random_sequences, small_model
from test_loop import Silent

from reasonlab.config import Config, LearnerConfig, load_recipe, validate
from reasonlab.errors import UserError
from reasonlab.keys import key
from reasonlab.methods.sft import demonstration as sft_example
from reasonlab.methods.sft import sft_loss
from reasonlab.problems.problem import Problem
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.partial import PartialRollouts
from reasonlab.rollout.types import Request, Sampling
from reasonlab.train.batch import Totals
from reasonlab.train.learner import Learner, Objective
from reasonlab.train.loop import start
from reasonlab.train.memory import (
    Workload,
    advice,
    cache_slots,
    check_room,
    largest_micro_batch,
    planned_memory,
    warned_of_room,
)


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return sums_recipe(tmp_path)


def work() -> Workload:
    return Workload(small_model().config, prompt=40)


def on_a_gpu(**sections: Any) -> Config:
    return validate({"device": "cuda", "method": {"type": "grpo"}, **sections}, "test")


def test_the_plan_counts_what_a_run_holds() -> None:
    config, parameters = (
        on_a_gpu(rollout={"rows": 64, "max_tokens": 88}),
        sum(p.numel() for p in small_model().parameters()),
    )
    plan = planned_memory(config, work())
    assert plan.weights == 4 * parameters
    assert plan.moments == 8 * parameters
    assert plan.working == 2 * parameters
    assert plan.cache == 64 * 128 * (2 * 2 * 2 * 8) * 2  # rows, columns, numbers of a token, bf16
    assert planned_memory(on_a_gpu(learner={"recompute": True}), work()).activations < plan.activations
    assert planned_memory(on_a_gpu(method={"type": "grpo", "kl": 0.1}), work()).reference > 0 == plan.reference


def test_the_plan_takes_no_more_tokens_than_an_iteration_has() -> None:
    def tokens(**sections: Any) -> int:
        few = {"prompts": 2, "samples": 3, "max_tokens": 20, **sections.pop("rollout", {})}
        return largest_micro_batch(on_a_gpu(rollout=few, **sections), work())

    assert tokens() == 2 * 3 * (40 + 20)
    assert tokens(learner={"token_budget": 100}) == 100
    assert tokens(learner={"token_budget": 10}) == 40 + 20
    assert tokens(method={"type": "rest", "keep": "best"}) == 2 * (40 + 20)
    assert tokens(rollout={"segment_tokens": 8}) == 3 * 2 * 3 * (40 + 20)  # three iterations may end together
    reflecting = replace(work(), reflection=500)
    assert largest_micro_batch(on_a_gpu(rollout={"prompts": 2, "samples": 2, "max_tokens": 20}), reflecting) == 2 * 500


def test_the_cache_has_room_for_rollouts_that_go_on() -> None:
    rollout = {"prompts": 2, "samples": 4, "max_tokens": 56, "segment_tokens": 8, "rows": 256}
    config = on_a_gpu(rollout=rollout, evaluate={"every": 0}).model_copy(update={"device": "cpu", "threads": 1})
    engine, buffer = Engine(small_model(seed=5), 256), PartialRollouts()
    sampling = Sampling(max_tokens=56, segment_tokens=8)
    for number in range(8):
        problems = [Problem(f"p{number} {i}", "?", "1", "f") for i in range(2)]
        new = [(p, Request(list(range(8)), [key(number, i, j) for j in range(4)])) for i, p in enumerate(problems)]
        buffer.generate(engine, new, sampling)
    slots = cache_slots(config, Workload(small_model().config, prompt=8))
    assert engine._storage[0].tokens == slots == 64 * 64


def test_the_plan_says_what_the_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_a_gpu().model_copy(update={"device": "cpu"})
    peak = planned_memory(config, work()).peak
    for there, said in ((0.9 * peak, True), (1.1 * peak, False)):
        monkeypatch.setattr("reasonlab.train.memory.physical_memory", lambda there=there: there)
        warning = warned_of_room(config, work())
        assert bool(warning) == said
        assert ("Change rollout.rows" in warning or "Change learner" in warning) == said
    assert not warned_of_room(on_a_gpu(), work())


def test_a_run_that_cannot_fit_is_refused_with_the_changes_that_help_most(
    tmp_path: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_a_gpu()
    needed = planned_memory(config, work()).peak
    check_room(config, work(), 1.1 * needed)
    check_room(config, work(), None)
    with pytest.raises(UserError, match="are free") as caught:
        check_room(config, work(), 0.9 * needed)
    assert caught.value.remedy.count("frees") == 3
    half = on_a_gpu(learner={"token_budget": 2048})
    freed = (needed - planned_memory(half, work()).peak) / 2**20
    assert f"learner.token_budget = 2048 (frees {freed:.1f} MiB)" in caught.value.remedy
    deep = Workload(small_model(layers=24).config, prompt=40)
    assert "learner.recompute = true" in advice(config, deep)
    wide = on_a_gpu(rollout={"rows": 4096, "prompts": 512, "max_tokens": 900}, learner={"token_budget": 64})
    assert advice(wide, work()).startswith("Change rollout.rows = 2048")
    monkeypatch.setattr("reasonlab.train.loop.free_memory", lambda config: 1000.0)
    with pytest.raises(UserError, match="the run needs about"):
        start(validate(recipe, "test"), tmp_path / "run", ["test"], Silent())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["gsm8k-sft", "gsm8k-grpo"])
def test_the_recipes_load_and_fit_a_gpu(name: str) -> None:
    config = load_recipe(Path(__file__).parents[1] / "recipes" / f"{name}.toml")
    shape = {"hidden_size": 896, "intermediate_size": 4864, "layers": 24, "heads": 14, "kv_heads": 2, "head_dim": 64}
    half_a_billion = replace(work(), shape=replace(work().shape, architecture="qwen2", vocab_size=151936, **shape))
    assert 4e8 < half_a_billion.shape.parameter_count() < 6e8
    assert planned_memory(config, replace(half_a_billion, prompt=300)).peak < 79 * 2**30
    assert config.reward.extraction == "boxed" or config.method.type == "sft"


@pytest.mark.parametrize("tied", [True, False])
def test_recomputing_layers_leaves_the_gradients_as_they_are(tied: bool) -> None:
    examples = [
        sft_example(prompt.tolist(), response.tolist())
        for prompt, response in zip(random_sequences([5, 9, 3]), random_sequences([7, 4, 11], seed=1), strict=True)
    ]
    objective = Objective(examples, sft_loss, Totals.of(examples))
    found = []
    for recompute in (False, True):
        learner = Learner(small_model(tied=tied), LearnerConfig(recompute=recompute))
        ((*_, gradients),) = learner.gradients([(examples, objective)])
        found.append(gradients)
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-6, atol=1e-7)
