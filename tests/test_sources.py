"""Where groups come from, through the loop: partial rollouts and their stale tokens, recorded examples, resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from test_loop import SMALL, Silent, config, train

from reasonlab.config import validate
from reasonlab.errors import UserError
from reasonlab.methods.group import Group
from reasonlab.methods.long2short import preference_pairs, shortest_correct
from reasonlab.model.ladder import resolve_model
from reasonlab.problems.tiny_world import problem_set
from reasonlab.rollout.types import Sampling
from reasonlab.runs import RunReader
from reasonlab.train.exchange import tiny_exchange
from reasonlab.train.loop import Trainer, resume, start
from reasonlab.train.recorded import RecordedResponses, read_responses, write_demonstrations, write_pairs
from reasonlab.train.sample import open_engine, sample_groups
from reasonlab.train.sources import Rollouts

PARTIAL: dict[str, Any] = {"prompts": 4, "samples": 4, "max_tokens": 64, "segment_tokens": 12}
FINAL = "checkpoints/final/model.safetensors"


def final(run: Path) -> bytes:
    return (run / FINAL).read_bytes()


# --- partial rollouts in the loop ------------------------------------------------------------------------------------


def test_without_a_limit_in_reach_partial_rollouts_change_nothing(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    train(tmp_path / "partial", rollout={**PARTIAL, "segment_tokens": 64})
    assert final(tmp_path / "whole") == final(tmp_path / "partial")


@pytest.mark.parametrize("stale", ["mask", "anchor"])
@pytest.mark.parametrize("sampling", ["uniform", "prioritised"])
def test_killed_after_any_iteration_it_ends_with_the_same_bytes(tmp_path: Path, stale: str, sampling: str) -> None:
    """With unfinished rollouts in the buffer and success rates in the sampler."""
    changes: dict[str, Any] = {
        "iterations": 5,
        "rollout": {**PARTIAL, "stale": stale},
        "problems": {**SMALL["problems"], "sampling": sampling, "pool": 12},
        "evaluate": {"every": 0},
    }
    train(tmp_path / "whole", **changes)
    assert max(m["train/stale_frac"] for m in iterations(tmp_path / "whole")) > 0.1, "nothing was ever continued"
    for stop in (1, 3):
        run = tmp_path / f"cut-{stop}"
        trainer = start(config(**changes), run, ["test"], Silent())
        for number in range(1, stop + 1):
            trainer._iteration(number)
            trainer._checkpoint()
        del trainer  # as if killed: nothing else is written
        resume(run, Silent()).run()
        assert final(run) == final(tmp_path / "whole")
        assert rollout_texts(run) == rollout_texts(tmp_path / "whole")


def iterations(run: Path) -> list[dict[str, Any]]:
    return [line for line in RunReader(run).metrics() if "train/loss" in line or "train/updates" in line]


def rollout_texts(run: Path) -> list[list[str]]:
    reader = RunReader(run)
    return [[row["text"] for row in reader.rollouts(step)] for step in reader.rollout_steps()]


def test_a_group_trains_when_all_members_are_done_and_none_is_lost_or_taken_twice(tmp_path: Path) -> None:
    trainer = start(config(iterations=6, rollout=PARTIAL, evaluate={"every": 0}), tmp_path / "run", ["test"], Silent())
    trainer.run()
    reader = RunReader(tmp_path / "run")
    rows = [reader.rollouts(step) for step in reader.rollout_steps()]
    assert all(row["finish"] != "unfinished" for one in rows for row in one)
    assert isinstance(trainer.source, Rollouts)
    pending = trainer.source.partial.pending_groups
    assert pending > 0
    assert sum(len(one) for one in rows) == 4 * (6 * 4 - pending)


@pytest.mark.parametrize("stale", ["mask", "anchor"])
def test_stale_tokens_are_masked_or_anchored(tmp_path: Path, stale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An anchor is the logprob of the older policy that sampled the token, not that of the present one."""
    changes = {"rollout": {**PARTIAL, "stale": stale}, "learner": {"lr": 1e-3}, "evaluate": {"every": 0}}
    trainer = start(config(**changes), tmp_path / "run", ["test"], Silent())
    step, moved = trainer.learner.step_on, []

    def spy(objectives: Any) -> Any:
        version, examples = trainer.engine.version, objectives[0].examples
        for e, now in zip(examples, trainer.learner.logprobs(examples), strict=True):
            fresh = e.sampled_by(version)
            np.testing.assert_array_equal(e.mask, fresh if stale == "mask" else np.ones(len(fresh), bool))
            np.testing.assert_allclose(e.logprobs[fresh], now[fresh], atol=1e-3)
            assert (e.versions[~fresh] < version).all()
            moved.extend(np.abs(e.logprobs - now)[~fresh])
        return step(objectives)

    monkeypatch.setattr(trainer.learner, "step_on", spy)
    for number in range(1, 5):
        trainer._iteration(number)
    assert max(moved) > 0.05, "no stale token was met"


def test_every_sampled_token_is_counted_once(tmp_path: Path) -> None:
    """Also those of groups that still wait at the end, and not those a file brought."""
    trainer = start(config(iterations=3, rollout=PARTIAL, evaluate={"every": 0}), tmp_path / "run", ["test"], Silent())
    trainer.run()
    assert isinstance(trainer.source, Rollouts)
    reader = RunReader(tmp_path / "run")
    finished = sum(row["tokens"] for step in reader.rollout_steps() for row in reader.rollouts(step))
    waiting = sum(len(r["ids"]) for g in trainer.source.partial.state()["groups"] for r in g["rollouts"])
    assert waiting > 0
    assert trainer.state.generated_tokens == finished + waiting


def test_solved_problems_are_remembered_although_dynamic_sampling_drops_them(tmp_path: Path) -> None:
    problems = {**SMALL["problems"], "levels": [1], "sampling": "prioritised"}
    rollout = {**SMALL["rollout"], "samples": 2, "dynamic_rounds": 2}
    trainer = start(config(problems=problems, rollout=rollout, iterations=2), tmp_path / "run", ["test"], Silent())
    trainer._iteration(1)
    assert isinstance(trainer.source, Rollouts)
    assert 1.0 in trainer.source.prompts.success.values()


def test_partial_rollouts_and_dynamic_sampling_exclude_each_other() -> None:
    with pytest.raises(UserError, match="exclude each other"):
        validate({"rollout": {"segment_tokens": 8, "dynamic_rounds": 1}}, "test")


# --- recorded examples -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    engine, tokenizer = open_engine(resolve_model("tiny-0.3m"), "cpu", 1, 64)
    problems = problem_set("train", 16, 0, ["sum", "word"], [1, 2])
    sampling = Sampling(max_tokens=64, stop_ids=(tokenizer.eos_id,))
    return sample_groups(engine, tiny_exchange(tokenizer), problems, 6, sampling, 0, lambda *_: None, force="")


def test_forced_beginnings_are_part_of_the_response() -> None:
    engine, tokenizer = open_engine(resolve_model("tiny-0.3m"), "cpu", 1, 64)
    problems = problem_set("train", 3, 0, ["sum"], [1])
    sampling = Sampling(max_tokens=64, stop_ids=(tokenizer.eos_id,))
    free = tokenizer.encode(f"<bos>{problems[0].question}\n")
    for group in sample_groups(
        engine, tiny_exchange(tokenizer), problems, 2, sampling, 0, lambda *_: None, force="<think>"
    ):
        for rollout in group.rollouts:
            assert tokenizer.decode(rollout.ids).startswith("<think>")
            assert len(rollout.ids) == len(rollout.logprobs) == len(rollout.versions)
        assert group.rollouts[0].prompt[: len(free)] == free or group.problem is not problems[0]


def test_demonstrations_and_pairs_come_back_as_written(tmp_path: Path, groups: list[Group]) -> None:
    demonstrations = shortest_correct(groups)
    assert write_demonstrations(tmp_path / "d.jsonl", demonstrations) == len(demonstrations) > 4
    for (problem, rollout), group in zip(
        demonstrations, read_responses(tmp_path / "d.jsonl", pairs=False), strict=True
    ):
        assert group.problem == problem
        assert (group.rollouts[0].prompt, group.rollouts[0].ids) == (rollout.prompt, rollout.ids)
    pairs = preference_pairs(groups)
    assert write_pairs(tmp_path / "p.jsonl", pairs) == len(pairs) > 2
    read = read_responses(tmp_path / "p.jsonl", pairs=True)
    chosen = config(rollout={"prompts": len(pairs)}, method={"type": "dpo", "data": "p.jsonl"})
    RecordedResponses(chosen, read, tiny_exchange()).groups(1)
    for mine, back in zip(pairs, read, strict=True):
        assert [r.ids for r in mine.rollouts] == [r.ids for r in back.rollouts]
        assert mine.correct.tolist() == back.correct.tolist(), "graded when they are learnt from"


def test_every_row_is_seen_once_in_each_pass(tmp_path: Path, groups: list[Group]) -> None:
    count = write_demonstrations(tmp_path / "d.jsonl", shortest_correct(groups))
    chosen = config(rollout={"prompts": 3}, method={"type": "sft", "data": str(tmp_path / "d.jsonl")})
    source = RecordedResponses(chosen, read_responses(tmp_path / "d.jsonl", pairs=False), tiny_exchange())
    order = [group.problem.id for number in range(1, count + 1) for group in source.groups(number)]
    passes = [order[i : i + count] for i in range(0, 3 * count, count)]
    assert all(len(set(one)) == count for one in passes)
    assert passes[0] != passes[1]
    again = RecordedResponses(chosen, read_responses(tmp_path / "d.jsonl", pairs=False), tiny_exchange())
    assert [g.problem.id for g in again.groups(count)] == order[3 * (count - 1) :], "any iteration can be made alone"


def test_sft_and_dpo_learn_from_a_file(tmp_path: Path, groups: list[Group]) -> None:
    write_demonstrations(tmp_path / "d.jsonl", shortest_correct(groups))
    write_pairs(tmp_path / "p.jsonl", preference_pairs(groups))
    learner = {"lr": 3e-5, "inner_steps": 2}
    common: dict[str, Any] = {"iterations": 8, "evaluate": {"every": 0}, "learner": learner}
    _, sft = train(tmp_path / "sft", method={"type": "sft", "data": str(tmp_path / "d.jsonl")}, **common)
    assert sft.iterations[-1]["train/loss"] < sft.iterations[0]["train/loss"]
    _, dpo = train(tmp_path / "dpo", method={"type": "dpo", "data": str(tmp_path / "p.jsonl")}, **common)
    assert dpo.iterations[0]["train/margin"] == pytest.approx(0, abs=0.1)
    assert dpo.iterations[-1]["train/margin"] > dpo.iterations[0]["train/margin"]
    assert dpo.iterations[-1]["train/loss"] < 0.69


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{}", "line 1 is not a demonstration"),
        (b"not json", "line 1 is not a demonstration"),
        (b"", "holds no examples"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, line: bytes | None, what: str) -> None:
    path = tmp_path / "d.jsonl"
    if line is not None:
        path.write_bytes(line)
    with pytest.raises(UserError, match=what):
        read_responses(path, pairs=False)


def test_demonstrations_are_no_pairs(tmp_path: Path, groups: list[Group]) -> None:
    write_demonstrations(tmp_path / "d.jsonl", shortest_correct(groups))
    with pytest.raises(UserError, match="not a preference pair"):
        read_responses(tmp_path / "d.jsonl", pairs=True)
    row = orjson.loads((tmp_path / "d.jsonl").read_bytes().splitlines()[0])
    for ids in ([10**6], ["a"], [-1]):
        (tmp_path / "ids.jsonl").write_bytes(orjson.dumps({**row, "response": ids}))
        with pytest.raises(UserError, match="token ids are whole numbers"):
            read_responses(tmp_path / "ids.jsonl", pairs=False)
    (tmp_path / "empty.jsonl").write_bytes(orjson.dumps({**row, "response": []}))
    with pytest.raises(UserError, match="an empty response"):
        read_responses(tmp_path / "empty.jsonl", pairs=False)


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_repetition_costs_what_the_recipe_says(tmp_path: Path) -> None:
    chosen = config(reward={"repetition_penalty": 0.25})
    trainer = Trainer(chosen, Silent())
    source = trainer.source
    assert isinstance(source, Rollouts)
    group = source._sample(1, source.prompts.draw(1, 1))[0]
    plain = group.rewards.copy()
    group.rollouts[0] = replace(group.rollouts[0], finish="repetition")
    np.testing.assert_allclose(source._reward(1, group) - plain, [-0.25, 0, 0, 0])


# --- problems from elsewhere -----------------------------------------------------------------------------------------


def test_own_problems_are_graded_by_mathematics(tmp_path: Path) -> None:
    """The tiny base solves 1+1=? written in its own way; a gold of 4/2 is only right for who reads mathematics."""
    path = tmp_path / "own.jsonl"
    path.write_bytes(b'{"question": "1+1=?", "answer": "4/2"}\n{"question": "2+3=?", "answer": "5.0"}\n')
    _, observer = train(tmp_path / "run", problems={"path": str(path)}, evaluate={"every": 0}, iterations=1)
    assert observer.iterations[0]["train/accuracy"] > 0.2
    assert observer.iterations[0]["train/ungraded"] == 0


def test_worked_solutions_exist_only_for_the_tiny_world(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_bytes(b'{"question": "1+1=?", "answer": "2"}\n')
    with pytest.raises(UserError, match="no worked solution"):
        train(tmp_path / "run", problems={"path": str(path)}, method={"type": "sft"})


ASKED = problem_set("train", 1)[0].question
USER, ASSISTANT = ({"role": role, "content": text} for role, text in (("user", ASKED), ("assistant", "Answer: 2")))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"prompt": ASKED, "completion": "Answer: 2"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": ASKED, "chosen": "Answer: 2", "rejected": "Answer: 3"},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "Answer: 3"}]},
    ],
)
def test_the_columns_of_other_trainers_are_understood(row: dict[str, Any], tmp_path: Path) -> None:
    ours = {"question": ASKED, "response": "Answer: 2", **({"rejected": "Answer: 3"} if "rejected" in row else {})}
    read = []
    for name, one in (("theirs", row), ("ours", ours)):
        (tmp_path / f"{name}.jsonl").write_bytes(orjson.dumps(one))
        (group,) = read_responses(tmp_path / f"{name}.jsonl", pairs="rejected" in row)
        read.append((group.problem.question, [(rollout.prompt, rollout.ids) for rollout in group.rollouts]))
    assert read[0] == read[1]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER]},
        {"messages": [USER, ASSISTANT, USER, ASSISTANT]},
        {"prompt": [USER, ASSISTANT, USER], "completion": "Answer: 2"},
        {"prompt": ASKED},
        {"messages": "hello"},
    ],
)
def test_other_conversations_are_refused(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(orjson.dumps(row))
    with pytest.raises(UserError, match="line 1 is not a demonstration"):
        read_responses(tmp_path / "rows.jsonl", pairs=False)
