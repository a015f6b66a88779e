"""The loop in one process: methods, evaluation, the record, interruption."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from reasonlab.config import Config, validate
from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import Summary, evaluate, summarise
from reasonlab.grading.grade import Grade
from reasonlab.model.checkpoint import load_model
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import problem_set
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Sampling
from reasonlab.runs import RunReader
from reasonlab.train.command import resume_run
from reasonlab.train.loop import Outcome, resume, start

SMALL: dict[str, Any] = {
    "iterations": 3,
    "threads": 1,
    "model": {"path": "tiny-0.3m"},
    "problems": {"families": ["sum", "word"], "levels": [1, 2], "pool": 64},
    "rollout": {"prompts": 4, "samples": 4, "max_tokens": 64},
    "learner": {"lr": 1e-4},
    "evaluate": {"every": 2, "problems": 12, "samples": 2, "levels": [1, 2]},
    "checkpoint": {"every": 1, "keep": 2},
}


class Silent:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, Any]] = []
        self.evaluations: list[tuple[int, str]] = []
        self.alarms: list[str] = []
        self.notes: list[str] = []

    def progress(self, what: str, done: int, total: int) -> None:
        assert 0 < done <= total

    def iteration(self, number: int, metrics: dict[str, Any], sample: tuple[Problem, str, Grade]) -> None:
        self.iterations.append(metrics)

    def evaluation(self, number: int, suite: str, summary: Summary) -> None:
        self.evaluations.append((number, suite))

    def alarm(self, number: int, text: str) -> None:
        self.alarms.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stopping(self, text: str) -> None:
        self.notes.append(text)


def config(**changes: Any) -> Config:
    return validate({**SMALL, **changes}, "test")


def train(out: Path, **changes: Any) -> tuple[Outcome, Silent]:
    observer = Silent()
    return start(config(**changes), out, ["test"], observer).run(), observer


@pytest.mark.parametrize(
    "method",
    [
        {"type": "mirror_descent"},
        {"type": "mirror_descent", "per_token": True, "reset_optimizer": False},
        {"type": "grpo"},
        {"type": "grpo", "variant": "dapo", "kl": 0.05, "mask_truncated": True},
        {"type": "grpo", "variant": "reinforce_pp", "kl": 0.001, "kl_in_reward": True},
        {"type": "rest", "keep": "correct"},
        {"type": "sft", "styles": {"worked": 0.5, "checked": 0.5}},
    ],
    ids=lambda m: "-".join(str(v) for v in m.values()),
)
def test_every_method_trains(tmp_path: Path, method: dict[str, Any]) -> None:
    outcome, observer = train(tmp_path / "run", method=method)
    assert outcome.status == "finished"
    reader = RunReader(tmp_path / "run")
    assert [line["step"] for line in reader.metrics()] == [0, 1, 2, 3]
    assert all(np.isfinite(m["train/loss"]) for m in observer.iterations if "train/loss" in m)
    trained = load_file(tmp_path / "run/checkpoints/final/model.safetensors")
    base = load_model(_base()).state_dict()
    assert not np.array_equal(trained["model.embed_tokens.weight"].numpy(), base["embedding.weight"].numpy())


def test_record_holds_every_rollout_and_answer(tmp_path: Path) -> None:
    _, observer = train(tmp_path / "run")
    reader = RunReader(tmp_path / "run")
    for step, metrics in enumerate(observer.iterations, start=1):
        rows = reader.rollouts(step)
        assert len(rows) == 16
        assert np.mean([row["verdict"] == "correct" for row in rows]) == pytest.approx(metrics["train/accuracy"])
        assert np.mean([row["tokens"] for row in rows]) == pytest.approx(metrics["train/length/mean"])
    assert observer.evaluations == [(0, "tiny"), (0, "tiny-forced"), (2, "tiny"), (3, "tiny"), (3, "tiny-forced")]
    assert reader.evaluation_steps("tiny") == [0, 2, 3]
    assert all(row["text"].startswith("<think>") for row in reader.evaluation("tiny-forced", 0))
    assert reader.run["status"] == "finished"
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == [
        "final",
        "latest",
        "step-000001",
        "step-000002",
    ]


def test_training_curve_is_the_evaluator_score(tmp_path: Path) -> None:
    """Invariant: evaluating the saved checkpoint gives the recorded answers, token for token."""
    train(tmp_path / "run")
    tokenizer = TinyTokenizer.load()
    engine = Engine(load_model(tmp_path / "run/checkpoints/final"), rows=3)
    problems = problem_set("validation", 12, 0, ["sum", "word"], [1, 2])
    sampling = Sampling(max_tokens=64, stop_ids=(tokenizer.eos_id,), repetition_window=64)
    answers = evaluate(engine, tokenizer, problems, sampling, samples=2)
    recorded = RunReader(tmp_path / "run").evaluation("tiny", 3)
    assert [a.text for a in answers] == [row["text"] for row in recorded]
    accuracy = dict(zip(*RunReader(tmp_path / "run").series("eval/tiny/avg@2"), strict=True))
    assert accuracy[3] == pytest.approx(summarise(answers).accuracy.estimate)


def test_same_seed_same_bits(tmp_path: Path) -> None:
    for name in "ab":
        train(tmp_path / name, learner={"lr": 1e-4, "token_budget": 256, "inner_steps": 2})
    assert _final(tmp_path / "a") == _final(tmp_path / "b")


def test_number_of_threads_does_not_matter(tmp_path: Path) -> None:
    """Bit for bit in a single on-policy step. (Later inner steps compare with sampled logprobs, whose last bit depends
    on the rows that were decoded together.)"""
    for name, threads in (("a", 1), ("b", 2)):
        train(tmp_path / name, threads=threads, learner={"lr": 1e-4, "token_budget": 256})
    assert _final(tmp_path / "a") == _final(tmp_path / "b")


@pytest.mark.parametrize("method", [{"type": "mirror_descent"}, {"type": "grpo"}], ids=["resetting", "moments kept"])
def test_interrupt_saves_and_resumes_to_the_same_bits(tmp_path: Path, method: dict[str, Any]) -> None:
    train(tmp_path / "whole", method=method)

    class InterruptsItself(Silent):
        def iteration(self, number: int, metrics: dict[str, Any], sample: tuple[Problem, str, Grade]) -> None:
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)

    observer = InterruptsItself()
    outcome = start(config(method=method), tmp_path / "cut", ["test"], observer).run()
    assert outcome.status == "interrupted"
    assert outcome.iteration == 2
    assert "interrupted" in observer.notes[0]
    assert observer.alarms == [], "what the user asked for is no alarm"
    assert RunReader(tmp_path / "cut").run["status"] == "interrupted"
    continued = Silent()
    assert resume(tmp_path / "cut", continued).run().status == "finished"
    assert continued.notes[0] == "continuing after iteration 2 of 3 (checkpoints/step-000002)"
    assert _final(tmp_path / "cut") == _final(tmp_path / "whole")


def test_without_a_number_of_steps_the_learning_rate_falls_over_the_whole_run(tmp_path: Path) -> None:
    learner = {"lr": 1e-4, "schedule": "linear", "final_lr_ratio": 0.0, "epochs": 2}
    common: dict[str, Any] = {"method": {"type": "sft"}, "evaluate": {"every": 0}, "iterations": 2}
    _, observer = train(tmp_path / "run", learner=learner, **common)
    assert [line["train/lr"] for line in observer.iterations] == pytest.approx([0.75e-4, 0.25e-4]), "of the last update"
    _, observer = train(tmp_path / "short", learner={**learner, "decay_steps": 2}, **common)
    assert [line["train/lr"] for line in observer.iterations] == pytest.approx([0.5e-4, 0.0])


def test_runs_outside_the_main_thread(tmp_path: Path) -> None:
    """Signals belong to the main thread; a trainer in another one must not insist on them."""
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.append(train(tmp_path / "run", iterations=1)[0].status))
    thread.start()
    thread.join()
    assert done == ["finished"]


def test_dynamic_sampling_keeps_only_mixed_groups(tmp_path: Path) -> None:
    rollout = {**SMALL["rollout"], "dynamic_rounds": 8}
    train(tmp_path / "run", rollout=rollout, iterations=1, evaluate={"every": 0})
    rows = RunReader(tmp_path / "run").rollouts(1)
    by_problem: dict[str, list[bool]] = {}
    for row in rows:
        by_problem.setdefault(row["problem"], []).append(row["verdict"] == "correct")
    assert len(by_problem) == 4
    assert all(0 < sum(right) < len(right) for right in by_problem.values())


def test_length_reward_switches_on(tmp_path: Path) -> None:
    train(tmp_path / "run", reward={"length_weight": 0.5, "length_from": 2}, evaluate={"every": 0})
    reader = RunReader(tmp_path / "run")
    assert {row["reward"] for row in reader.rollouts(1)} <= {0.0, 1.0}
    assert not {row["reward"] for row in reader.rollouts(2)} <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("advantage", "weight", "told"), [("group_std", 0.5, 1), ("group_mean", 0.5, 0), ("group_std", 0.0, 0)]
)
def test_a_length_reward_that_the_spread_makes_loud_is_told(
    tmp_path: Path, advantage: str, weight: float, told: int
) -> None:
    method, reward = {"type": "grpo", "advantage": advantage}, {"length_weight": weight}
    _, observer = train(tmp_path / "run", iterations=1, method=method, reward=reward)
    assert sum("--method.advantage group_mean" in note for note in observer.notes) == told


def test_a_run_that_stopped_at_its_time_limit_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From `final`, also where no other checkpoint was written; to the same bits as a run that was let be."""
    train(tmp_path / "whole", checkpoint={"every": 100})
    observer = Silent()
    trainer = start(config(checkpoint={"every": 100}), tmp_path / "run", ["test"], observer)
    iterate, now = trainer._iteration, time.monotonic

    def late(number: int) -> None:
        iterate(number)
        if number == 2:
            monkeypatch.setattr(time, "monotonic", lambda: now() + 100)

    monkeypatch.setattr(trainer, "_iteration", late)
    outcome = trainer.run(deadline=now() + 100)
    monkeypatch.setattr(time, "monotonic", now)
    assert (outcome.status, outcome.iteration) == ("stopped at the time limit", 2)
    assert observer.evaluations.count((2, "tiny")) == 1, "weights that were just evaluated are not evaluated again"
    continued = resume(tmp_path / "run", Silent())
    assert continued.state.iteration == 2
    assert continued.run().status == "finished"
    assert _final(tmp_path / "run") == _final(tmp_path / "whole")


def test_a_run_without_a_checkpoint_says_that_it_begins_again(tmp_path: Path) -> None:
    start(config(), tmp_path / "run", ["test"], Silent()).record.close()
    observer = Silent()
    assert resume(tmp_path / "run", observer).state.iteration == 0
    assert observer.notes == ["no checkpoint was written yet: starting again from iteration 0"]


def test_finished_run_is_not_resumed(tmp_path: Path) -> None:
    train(tmp_path / "run", iterations=1, evaluate={"every": 0})
    with pytest.raises(UserError, match="already ended"):
        resume(tmp_path / "run", Silent())


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_has_ended_can_go_on_for_longer(
    tmp_path: Path, killed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", iterations=2)
    if killed:  # after the new number was written, before anything else
        text = (tmp_path / "run" / "config.toml").read_text()
        (tmp_path / "run" / "config.toml").write_text(text.replace("iterations = 2", "iterations = 4"))
        assert resume_run(tmp_path / "run") == 0
    else:
        assert resume_run(tmp_path / "run", iterations=4) == 0
    train(tmp_path / "whole", iterations=4)
    assert _final(tmp_path / "run") == _final(tmp_path / "whole")
    with pytest.raises(UserError, match="has 4 iterations already"):
        resume_run(tmp_path / "run", iterations=3)
    with pytest.raises(UserError, match="already ended"):
        resume_run(tmp_path / "run", iterations=4)


def test_a_nonfinite_step_is_dropped_and_alarmed(tmp_path: Path) -> None:
    observer = Silent()
    trainer = start(config(iterations=1, evaluate={"every": 0}), tmp_path / "run", ["test"], observer)
    before = [p.detach().clone() for p in trainer.learner.parameters]
    loss = trainer.method.loss
    trainer.method.loss = lambda logprobs, batch: (loss(logprobs, batch)[0] * float("nan"), {})  # type: ignore[method-assign]
    trainer.run()
    assert any("not finite" in text for text in observer.alarms)
    assert any(event["kind"] == "alarm" for event in RunReader(tmp_path / "run").events())
    assert all(bool((a == b).all()) for a, b in zip(before, trainer.learner.parameters, strict=True))


def _final(run: Path) -> bytes:
    return (run / "checkpoints/final/model.safetensors").read_bytes()


def _base() -> Path:
    from reasonlab.model.ladder import resolve_model

    return resolve_model("tiny-0.3m")


def test_inner_steps_share_out_whole_groups(tmp_path: Path) -> None:
    trainer = start(config(learner={"lr": 1e-4, "inner_steps": 3}), tmp_path / "run", ["test"], Silent())
    groups = trainer.source.groups(1)
    examples = trainer.method.examples(groups)
    shares = list(trainer._shares(1, 0, examples))
    assert sorted(id(e) for share in shares for e in share) == sorted(map(id, examples))
    prompts = [{e.prompt.tobytes() for e in share} for share in shares]
    assert len(shares) == 3
    assert sum(map(len, prompts)) == len(set.union(*prompts)) == len(groups)


@pytest.mark.parametrize(("inner_steps", "epochs"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_policy_before_the_update_is_the_learners(
    tmp_path: Path, inner_steps: int, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, with an engine that differs from the learner: while the weights stand still, so does the ratio."""
    learner = {"lr": 1e-9, "inner_steps": inner_steps, "epochs": epochs}
    settings = config(learner=learner, method={"type": "mirror_descent", "reset_optimizer": False})
    trainer = start(settings, tmp_path / "run", ["test"], Silent())
    trainer.config = trainer.config.model_copy(update={"device": "cuda"})
    asked: list[int] = []
    logprobs = trainer.learner.logprobs

    def measured(examples: Any) -> Any:
        asked.extend(len(e.response) for e in examples)
        return logprobs(examples)

    monkeypatch.setattr(trainer.learner, "logprobs", measured)
    groups = trainer.source.groups(1)
    for group in groups:
        for rollout in group.rollouts:
            rollout.logprobs = (np.asarray(rollout.logprobs) + 0.1).astype(np.float32)
    steps = trainer._update(1, groups, [])
    assert len(steps) == inner_steps * epochs
    assert [step.metrics["log_ratio_abs"] for step in steps] == pytest.approx([0.0] * len(steps), abs=1e-3)
    assert steps[0].mean_mismatch == pytest.approx(0.1, abs=1e-3), "what is told is the engine's"
    # Before the first step both are one policy, so the first share is measured only if it comes again.
    shares = list(trainer._shares(1, 0, trainer.method.examples(groups)))
    again = shares if epochs > 1 else shares[1:]
    assert sorted(asked) == sorted(len(e.response) for share in again for e in share)


def test_what_has_no_token_in_the_loss_is_only_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most members of a group that was sampled in parts have ended before the present policy: nobody computes them."""
    rollout = {"prompts": 8, "samples": 4, "max_tokens": 60, "segment_tokens": 12}
    trainer = start(config(rollout=rollout, method={"type": "grpo"}), tmp_path / "run", ["test"], Silent())
    steps, step_on = [], trainer.learner.step_on

    def watched(objectives: Any) -> Any:
        steps.extend(objectives)
        return step_on(objectives)

    monkeypatch.setattr(trainer.learner, "step_on", watched)
    for number in range(1, 7):
        trainer._iteration(number)
    trainer._finish_writing()
    assert steps
    assert all(e.mask.any() for step in steps for e in step.examples)
    assert sum(step.totals.sequences for step in steps) > sum(len(step.examples) for step in steps)


@pytest.mark.parametrize("rollout", [{"segment_tokens": 12}, {"dynamic_rounds": 3}, {}])
def test_the_rate_counts_what_was_sampled(tmp_path: Path, rollout: dict[str, int]) -> None:
    settings = config(rollout={"prompts": 4, "samples": 4, "max_tokens": 60, **rollout}, method={"type": "grpo"})
    trainer = start(settings, tmp_path / "run", ["test"], Silent())
    sampled = []
    for number in range(1, 5):
        before = trainer.engine.generated
        trainer._iteration(number)
        sampled.append(trainer.engine.generated - before)
    trainer._finish_writing()
    lines = [line for line in RunReader(tmp_path / "run").metrics() if "perf/step_s" in line]
    assert [line["perf/tokens_per_s"] * line["perf/step_s"] for line in lines] == pytest.approx(sampled)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": {"type": "grpo"}}, True),
        ({"method": {"type": "sft"}}, False),
        ({"method": {"type": "grpo"}, "rollout": {"segment_tokens": 12, "stale": "anchor"}}, False),
        ({"method": {"type": "grpo"}, "rollout": {"segment_tokens": 12, "stale": "mask"}}, True),
    ],
)
def test_the_mismatch_is_told_of_what_the_present_policy_sampled(
    tmp_path: Path, changes: dict[str, Any], told: bool
) -> None:
    rollout = {"prompts": 4, "samples": 4, "max_tokens": 60, **changes.get("rollout", {})}
    settings = config(**{**changes, "rollout": rollout, "learner": {"lr": 1e-3}})
    trainer = start(settings, tmp_path / "run", ["test"], Silent())
    for number in range(1, 6):
        trainer._iteration(number)
    trainer._finish_writing()
    last = [line for line in RunReader(tmp_path / "run").metrics() if "train/loss" in line][-1]
    assert ("train/logprob_diff/max" in last) == told
    assert not told or last["train/logprob_diff/max"] < 1e-3
