"""The judge's reward in RL: (1 − β)·outcome + β·judge, in the two published forms, and the run that uses it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from reasonlab.config import Config, load_recipe, to_toml, validate
from reasonlab.errors import UserError
from reasonlab.judges.formats import own_format
from reasonlab.judges.network import fresh_judge, save_judge
from reasonlab.judges.scoring import ModelJudge
from reasonlab.judges.types import Candidate, Scored
from reasonlab.methods.group import judge_reward, with_judge
from reasonlab.model.ladder import resolve_model
from reasonlab.rollout.types import Sampling
from reasonlab.runs import RunReader
from reasonlab.terminal import make_observer
from reasonlab.train.exchange import tiny_exchange
from reasonlab.train.loop import start
from reasonlab.train.sample import open_engine
from reasonlab.train.sources import Rollouts

BASE = "tiny-0.3m"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process judge that was not trained; what it says differs from response to response all the same."""
    directory = tmp_path_factory.mktemp("judge")
    base = resolve_model(BASE)
    model = fresh_judge(base, "process", 0)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.mul_(20)
    save_judge(model, own_format(base, "process"), directory, base)
    return directory


def recipe(**reward: object) -> Config:
    raw = {
        "iterations": 2,
        "threads": 1,
        "model": {"path": BASE},
        "problems": {"pool": 16},
        "rollout": {"prompts": 3, "samples": 4, "max_tokens": 64},
        "method": {"type": "grpo"},
        "evaluate": {"every": 0},
        "reward": reward,
    }
    return validate(raw, "test")


def test_the_two_forms_by_hand() -> None:
    scored = [Scored((0.5, 1.0), 0.2), Scored((0.1, 0.3), None), Scored((), 0.7)]
    assert judge_reward(scored, "steps").tolist() == pytest.approx([0.95, 0.2, 0.7])
    assert judge_reward(scored, "single").tolist() == pytest.approx([0.2, 0.3, 0.7])


def test_the_mixture_by_hand() -> None:
    outcome, judged = np.array([1.0, 0.0]), np.array([0.5, 1.5])
    assert with_judge(outcome, judged, 0.25).tolist() == [0.875, 0.375]
    assert with_judge(outcome, judged, 0.0).tolist() == outcome.tolist()
    assert with_judge(outcome, judged, 1.0).tolist() == judged.tolist()


@pytest.mark.parametrize("form", ["steps", "single"])
def test_rollouts_are_rewarded_by_outcome_and_judge(judge: Path, form: str) -> None:
    config = recipe(judge=str(judge), judge_weight=0.75, judge_form=form)
    engine, tokenizer = open_engine(resolve_model(BASE), "cpu", 1, 16)
    sampling = Sampling(max_tokens=64, stop_ids=(tokenizer.eos_id,))
    groups = Rollouts(config, engine, tiny_exchange(tokenizer), sampling, lambda *_: None).groups(1)
    spread = 0.0
    for group in groups:
        texts = [tokenizer.decode(rollout.ids) for rollout in group.rollouts]
        says = ModelJudge.open(judge).score([Candidate("x", group.problem.question, text) for text in texts])
        alone = [one.overall() if form == "steps" else one.final for one in says]
        assert group.rewards == pytest.approx(0.25 * group.correct + 0.75 * np.array(alone), abs=1e-5)
        spread = max(spread, float(np.ptp(np.array(alone, float))))
    assert spread > 0.01


def test_without_weight_the_outcome_alone_counts(judge: Path) -> None:
    engine, tokenizer = open_engine(resolve_model(BASE), "cpu", 1, 16)
    sampling = Sampling(max_tokens=64, stop_ids=(tokenizer.eos_id,))
    for group in Rollouts(recipe(judge=str(judge)), engine, tiny_exchange(tokenizer), sampling, lambda *_: None).groups(
        1
    ):
        assert group.rewards.tolist() == group.correct.astype(float).tolist()
        assert group.judged is None


def test_a_run_learns_from_the_judge_and_logs_what_it_says(judge: Path, tmp_path: Path) -> None:
    config = recipe(judge=str(judge), judge_weight=0.5)
    with make_observer(2, "test") as observer:
        assert start(config, tmp_path / "run", [], observer).run().status == "finished"
    lines = [line for line in RunReader(tmp_path / "run").metrics() if "train/reward/mean" in line]
    assert len(lines) == 2
    for line in lines:
        mixed = 0.5 * line["train/accuracy"] + 0.5 * line["train/judge/mean"]
        assert line["train/reward/mean"] == pytest.approx(mixed)
        assert line["train/grad_norm"] > 0
    assert load_recipe(tmp_path / "run" / "config.toml") == config


def test_settings(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a judge"):
        recipe(judge_weight=0.5)
    with pytest.raises(UserError, match="judge_weight"):
        recipe(judge="x", judge_weight=1.5)
    (tmp_path / "recipe.toml").write_text(to_toml(recipe(judge="a judge", judge_weight=0.75, judge_form="single")))
    assert load_recipe(tmp_path / "recipe.toml").reward.judge_form == "single"


def test_a_judge_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = recipe(judge=str(tmp_path / "none"), judge_weight=0.5)
    with make_observer(1, "test") as observer, pytest.raises(UserError, match="no directory"):
        start(config, tmp_path / "run", [], observer)
    assert not (tmp_path / "run" / "run.json").exists()
