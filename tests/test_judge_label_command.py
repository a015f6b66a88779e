"""`reasonlab judge pool` and `judge label`: sampled pools; labels by rollouts, by a language model, of trajectories."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, Reply, completion, serving
from judge_commands import Output, killed, mistake, pool, run

from reasonlab.judges import label_command, monte_carlo, score_log, templates
from reasonlab.judges.exact_labels import exact_labels
from reasonlab.judges.llm_labels import judge_prompt
from reasonlab.judges.types import Candidate, read_labels, read_pool, write_pool


def test_pools_are_sampled_from_several_models(tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "pool.jsonl.gz"
    words = ["judge", "pool", "tiny-1m", "tiny-0.3m", "--problems", "6", "--samples", "2", "--levels", "1,2"]
    assert "24 candidates for 6 problems" in run(capsys, *words, "--threads", "1", "--out", out)
    found = read_pool(out)
    assert [c.source for c in found[:4]] == ["tiny-1m", "tiny-1m", "tiny-0.3m", "tiny-0.3m"]
    assert all(c.problem.split("/")[2] == "train" and c.answer and c.correct is not None for c in found)
    assert len({c.problem for c in found}) == 6


def test_labels_by_rollouts_and_by_a_language_model(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pool(tmp_path / "few.jsonl", pool(2, 4, split="test")[:6])
    few = ["judge", "label", tmp_path / "few.jsonl"]
    rollouts = ["--source", "monte-carlo", "--model", "tiny-0.3m", "--completions", "4", "--soft", "--threads", "1"]
    assert "6 of 6 candidates" in run(capsys, *few, *rollouts, "--out", tmp_path / "mc.jsonl")
    soft = read_labels(tmp_path / "mc.jsonl")
    assert {value for one in soft for value in one.steps} <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert [one.final for one in soft] == [float(bool(one.candidate.correct)) for one in soft]

    def rule(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        steps = prompt.count('<step number="')
        scores = [1.0] * (steps - 1) + [0.0]
        if "Answer:" in prompt and attempt == 1:
            return completion("no JSON at all")
        return completion(json.dumps({"scores": scores, "first_wrong": steps - 1}))

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(ChatServer(rule)) as server:
        words = ["--source", "endpoint", "--url", server.url, "--rule", "tiny", "--out", tmp_path / "llm.jsonl"]
        run(capsys, *few, *words)
    assert all(one.steps[-1] == 0 and set(one.steps[:-1]) <= {1.0} for one in read_labels(tmp_path / "llm.jsonl"))


@pytest.mark.parametrize("source", ["monte-carlo", "trajectory"])
def test_killed_labelling_continues_to_the_same_bytes(
    source: str, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pool(tmp_path / "pool.jsonl", pool(20, 4, seed=3))
    words = ["judge", "label", str(tmp_path / "pool.jsonl"), "--model", "tiny-0.3m", "--threads", "1"]
    mine = ["--source", source, "--completions", "2"]
    out = ["--out", str(tmp_path / "killed.jsonl")]
    log = tmp_path / "killed.jsonl.labelling"
    killed([*words, *mine, *out], "label_command.CHUNK = 800", log, 20)
    assert not (tmp_path / "killed.jsonl").exists()
    known = {json.loads(line)["name"] for line in log.read_bytes().splitlines()[1:]}
    assert len(known) < 75, "it was killed on the way"
    with log.open("ab") as file:
        file.write(b'{"name": "torn')
    assert "completions is 2 there and 3 now" in mistake(capsys, *words, *mine, "--completions", "3", *out)
    assert "sampling.temperature is 1.0 there" in mistake(capsys, *words, *mine, "--temperature", "0.5", *out)
    assert "model is " in mistake(capsys, *words, *mine, "--model", "tiny-1m", *out)
    assert "labels of another source" in mistake(capsys, *words, "--source", "exact", *out)
    other = {"monte-carlo": "trajectory", "trajectory": "monte-carlo"}[source]
    assert f'source is "{source}" there and "{other}" now' in mistake(capsys, *words, *mine, "--source", other, *out)

    worker = (monte_carlo, "monte_carlo") if source == "monte-carlo" else (templates, "tiny_rewards")
    work, seen = getattr(*worker), set[str]()

    def watched(part: list[Candidate], *rest: Any) -> Any:
        seen.update(map(score_log.name_of, part))
        return work(part, *rest)

    monkeypatch.setattr(*worker, watched)
    monkeypatch.setattr(label_command, "CHUNK", 800)
    run(capsys, *words, *mine, *out)
    assert seen
    assert not seen & known, "what was known was done again"
    assert not log.exists()
    run(capsys, *words, *mine, "--out", tmp_path / "whole.jsonl")
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_killed_reader_is_not_asked_twice(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pool(tmp_path / "pool.jsonl", pool(12, 2, seed=3))
    killed_already, answered = threading.Event(), 0

    def rule(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        """The same reply to the same request; but for a while only to the first twelve."""
        nonlocal answered
        answered += 1
        if answered > 12:
            killed_already.wait(60)
        steps = prompt.count('<step number="')
        first_wrong = body["seed"] % (steps + 1) - 1
        if body["seed"] % 2 == 0:
            return completion("no JSON at all")
        scores = [float(step != first_wrong) for step in range(steps)]
        return completion(json.dumps({"scores": scores, "first_wrong": first_wrong}))

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(ChatServer(rule)) as server:
        words = ["judge", "label", str(tmp_path / "pool.jsonl"), "--source", "endpoint", "--url", server.url]
        words += ["--rule", "tiny", "--concurrency", "2", "--out"]
        log = tmp_path / "killed.jsonl.labelling"
        killed([*words, str(tmp_path / "killed.jsonl")], "pass", log, 4)
        killed_already.set()
        known = {json.loads(line)["name"] for line in log.read_bytes().splitlines()[1:]}
        assert len(known) >= 3
        assert "show_answer is false there" in mistake(capsys, *words, tmp_path / "killed.jsonl", "--show-answer")
        asked = server.attempts.copy()
        run(capsys, *words, tmp_path / "killed.jsonl")
        assert not log.exists()
        again = set(server.attempts - asked)
        kept = [one for one in read_pool(tmp_path / "pool.jsonl") if score_log.name_of(one) in known]
        assert not again & {judge_prompt(one, "tiny") for one in kept}
        told = run(capsys, *words, tmp_path / "whole.jsonl")
    assert "(the reply does not end with a JSON object)" in told
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_trajectory_labels_are_targets_of_steps_and_what_following_is_worth(tmp_path: Path, capsys: Output) -> None:
    write_pool(tmp_path / "pool.jsonl", pool(12, 4, seed=3))
    words = ["judge", "label", tmp_path / "pool.jsonl", "--source", "trajectory", "--threads", "1"]
    assert "48 of 48 candidates" in run(capsys, *words, "--completions", "4", "--out", tmp_path / "labels.jsonl")
    found = read_labels(tmp_path / "labels.jsonl")
    assert {one.final for one in found} <= {0.0, 0.25, 0.5, 0.75, 1.0}
    right, spoiled_ = ([one for one in found if one.candidate.correct is wanted] for wanted in (True, False))
    for value in (lambda one: one.final, lambda one: min(one.steps)):
        assert sum(map(value, right)) > sum(map(value, spoiled_))
    quality = [exact_labels(one.candidate).values for one in found]
    assert any(0 < step < 1 for one in found for step in one.steps), "they are more than the quality"
    assert [one.steps[-1] for one in found] == [values[-1] for values in quality], "the answer has a quality only"
