"""`reasonlab judge`, `select` and `eval --judge`: from a pool to a judge, and from a judge to choices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chat_server import ChatServer, Reply, completion, serving

from reasonlab.cli import main
from reasonlab.errors import UserError
from reasonlab.judges import label_command, monte_carlo, score_log, templates
from reasonlab.judges.exact_labels import exact_labels
from reasonlab.judges.llm_labels import judge_prompt
from reasonlab.judges.opened import JudgeAtWork, open_at_work
from reasonlab.judges.score_log import chunks, open_log, score_all
from reasonlab.judges.types import Candidate, Scored, read_labels, read_pool, read_scores, write_pool
from reasonlab.problems.families.steps import render
from reasonlab.problems.reflections import spoiled
from reasonlab.problems.tiny_world import Split, draw
from reasonlab.train.recorded import read_responses

SMALL = ["--model", "tiny-0.3m", "--batch", "8", "--epochs", "1", "--threads", "1"]
FAMILIES = ("sum", "gcd", "counting")
Output = pytest.CaptureFixture[str]


def pool(problems: int, each: int, split: Split = "train", seed: int = 0) -> list[Candidate]:
    """Right and spoiled responses by turns, to problems that can be drawn again from their ids."""
    rng, found = Random(seed), []
    for number in range(problems):
        drawn = draw(FAMILIES[number % 3], 2, split, number, seed)
        p = drawn.problem
        for place in range(each):
            right = place % 2 == 0
            text = render(drawn.solution, "worked", rng, 0.2) if right else spoiled(drawn, rng, "worked")
            found.append(Candidate(p.id, p.question, text, p.answer, right, p.family, p.level))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool, its exact labels, an outcome judge and a process judge, all made by commands."""
    made = tmp_path_factory.mktemp("judges")
    write_pool(made / "pool.jsonl", pool(48, 4))
    write_pool(made / "test.jsonl", pool(24, 4, split="test"))
    (made / "recipe.toml").write_text('model = "tiny-1m"\nlr = 1e-3\n')
    words = [str(made / "recipe.toml"), *SMALL]
    for name in ("pool", "test"):
        source = str(made / f"{name}.jsonl")
        assert main(["judge", "label", source, "--source", "exact", "--out", str(made / f"{name}-labels.jsonl")]) == 0
    assert main(["judge", "train", *words, "--data", str(made / "pool.jsonl"), "--out", str(made / "orm")]) == 0
    process = ["--kind", "process", "--data", str(made / "pool-labels.jsonl"), "--out", str(made / "prm")]
    assert main(["judge", "train", *words, *process]) == 0
    return made


def run(capsys: Output, *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def mistake(capsys: Output, *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    return error


# --- training ----------------------------------------------------------------------------------------------------


def test_a_training_says_what_it_used_and_resolves_its_recipe(place: Path, tmp_path: Path, capsys: Output) -> None:
    words = ["judge", "train", "--lr", "2e-3", place / "recipe.toml", *SMALL, "--data", place / "pool.jsonl"]
    resolved = run(capsys, *words, "--kind", "process", "--dry-run")
    assert 'kind = "process"\nloss = "ce"' in resolved, "a kind brings its own loss"
    assert "lr = 0.002" in resolved
    (tmp_path / "again.toml").write_text(resolved)
    assert run(capsys, "judge", "train", tmp_path / "again.toml", "--dry-run") == resolved
    out = run(capsys, *words, "--out", tmp_path / "run")
    assert "48 lists from 48 problems with 192 candidates" in out
    assert "step 6/6: loss " in out
    assert f"judge: {tmp_path / 'run' / 'checkpoints' / 'step-000006'}" in out
    assert json.loads((tmp_path / "run" / "run.json").read_text())["argv"][:2] == ["judge", "train"]


def test_an_interrupted_training_is_saved_and_continues(place: Path, tmp_path: Path, capsys: Output) -> None:
    code = "import sys; from reasonlab.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["judge", "train", place / "recipe.toml", *SMALL, "--epochs", "4", "--data", place / "pool.jsonl"]
    command = [sys.executable, "-c", code, *map(str, words), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    metrics = tmp_path / "run"
    while not any(file.stat().st_size for file in metrics.glob("metrics.*.jsonl")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"Continue with: reasonlab judge train --resume {tmp_path / 'run'}" in out
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert "takes no other options" in mistake(capsys, "judge", "train", "--resume", tmp_path / "run", "--lr", "1")
    text = run(capsys, "judge", "train", "--resume", tmp_path / "run")
    assert "continuing after step " in text
    assert "finished after 24 steps" in text


# --- scoring -----------------------------------------------------------------------------------------------------


def test_scores_come_in_the_order_of_the_pool_and_once(place: Path, tmp_path: Path, capsys: Output) -> None:
    scores = tmp_path / "scores.jsonl.gz"
    words = ["judge", "score", place / "test.jsonl", "--judge", place / "prm", "--out", scores]
    assert f"wrote {scores}: 96 candidates and " in run(capsys, *words)
    candidates = read_pool(place / "test.jsonl")
    found = read_scores(scores, candidates)
    alone = open_at_work(str(place / "prm")).score([candidates[17]])[0]
    assert found[17].steps == pytest.approx(alone.steps, abs=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [scores.name, f"{scores.name}.judge.json"]
    written = scores.stat().st_mtime_ns
    assert "is already there" in run(capsys, *words)
    assert scores.stat().st_mtime_ns == written
    other = ["judge", "score", place / "test.jsonl", "--judge", place / "orm", "--out", scores]
    assert "exists and is not by this judge" in mistake(capsys, *other)


def killed(words: list[str], smaller: str, log: Path, lines: int) -> None:
    """Start a command with smaller chunks in a process of its own, and kill it when its log has so many lines."""
    code = (
        f"import sys; from reasonlab.judges import score_log, label_command; {smaller}; "
        "from reasonlab.cli import main; main(sys.argv[1:])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *words])
    while not log.is_file() or log.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_killed_and_continued_it_writes_the_same_bytes(
    place: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pool(tmp_path / "pool.jsonl", pool(200, 6, seed=5))
    words = ["judge", "score", str(tmp_path / "pool.jsonl"), "--judge", str(place / "orm"), "--threads", "1", "--out"]
    log = tmp_path / "killed.jsonl.scoring"
    killed([*words, str(tmp_path / "killed.jsonl")], "score_log.CHUNK = 2000", log, 100)
    assert not (tmp_path / "killed.jsonl").exists()
    with log.open("ab") as file:
        file.write(b'{"name": "torn')
    monkeypatch.setattr(score_log, "CHUNK", 2000)
    before = log.stat().st_size
    assert before < 70_000, "it was killed on the way"
    run(capsys, *words, tmp_path / "killed.jsonl")
    assert not log.exists()
    run(capsys, *words, tmp_path / "whole.jsonl")
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_what_is_in_the_log_is_not_scored_again(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_log, "CHUNK", 1000)
    candidates = read_pool(place / "test.jsonl")
    borders = list(chunks(candidates, 1000))
    assert len(borders) > 2
    assert [i for chunk in borders for i in chunk] == list(range(len(candidates)))
    assert all(candidates[c.start].problem != candidates[c.start - 1].problem for c in borders[1:])
    judge = open_at_work("exact")
    done: list[int] = []
    with open_log(tmp_path / "log", {"judge": {"kind": "nobody"}}, Scored):
        pass  # a mistake was made before anything was scored: that must not be in the way
    whose = {"judge": judge.identity}
    with open_log(tmp_path / "log", whose, Scored) as log:
        first = score_all(judge, candidates[: borders[1].stop], log, done.append)
    with open_log(tmp_path / "log", whose, Scored) as log:
        known = set(log.known)
        monkeypatch.setattr(judge.judge, "score", refuse_known(judge.judge.score, known), raising=False)
        everything = score_all(judge, candidates, log, done.append)
        with pytest.raises(UserError, match="another process"), open_log(tmp_path / "log", whose, Scored):
            pass
    assert everything[: len(first)] == first
    assert sum(done) == len(first) + len(candidates)
    with (
        pytest.raises(UserError, match=r'judge\.kind is "exact" there and "other" now'),
        open_log(tmp_path / "log", {"judge": {"kind": "other"}}, Scored),
    ):
        pass


def refuse_known(score: Any, known: set[str]) -> Any:
    def checked(candidates: list[Candidate], progress: Any = None) -> Any:
        assert not {score_log.name_of(candidate) for candidate in candidates} & known
        return score(candidates, progress)

    return checked


def test_long_responses_are_read_in_windows_and_told_or_refused(place: Path, tmp_path: Path, capsys: Output) -> None:
    long = Candidate("p", "1+1=?", "<think>" + "12+34=46;" * 200 + "</think>Answer:2")
    write_pool(tmp_path / "long.jsonl", [*read_pool(place / "test.jsonl")[:3], long])
    words = ["judge", "score", tmp_path / "long.jsonl", "--judge", place / "prm", "--out", tmp_path / "scores.jsonl"]
    assert "has" in mistake(capsys, *words, "--long", "refuse")
    assert not (tmp_path / "scores.jsonl").exists()
    assert main([str(word) for word in words]) == 0
    assert "note: 1 responses exceed the judge's positions" in capsys.readouterr().err
    assert len(read_scores(tmp_path / "scores.jsonl", read_pool(tmp_path / "long.jsonl"))[3].steps) == 202


# --- benchmarks and selection ------------------------------------------------------------------------------------


def test_the_judge_that_knows_reaches_the_oracle(place: Path, tmp_path: Path, capsys: Output) -> None:
    out = run(capsys, "judge", "bench", "rm", place / "test.jsonl", "--judge", "exact", "--k", "2", "--json")
    rows = json.loads(out)["families"]
    assert set(rows) == {"sum", "gcd", "counting", "average"}
    for row in rows.values():
        assert row["rm"]["estimate"] == pytest.approx(row["oracle"]["estimate"])
        assert row["rm_drawn"]["mean"] == pytest.approx(row["rm"]["estimate"], abs=5 * row["rm_drawn"]["error"])
        assert row["single"]["estimate"] == pytest.approx(0.5)
    curves = run(capsys, "judge", "bench", "best-of-n", place / "test.jsonl", "--judge", "exact", "--n", "1,4")
    assert curves.splitlines()[2].startswith("4  100.0 %")
    found = tmp_path / "labels.json"
    words = ["judge", "bench", "processbench", place / "test-labels.jsonl", "--judge", "exact", "--out", found]
    assert "test-labels  48     48     100.0 %" in run(capsys, *words)
    told = json.loads(found.read_text())
    assert (told["threshold"], told["mean_f1"]) == ({"value": 0.5, "f1": None, "split": ""}, 1.0)


def test_scores_from_a_file_are_the_judges_own(place: Path, tmp_path: Path, capsys: Output) -> None:
    scores = tmp_path / "scores.jsonl"
    run(capsys, "judge", "score", place / "test.jsonl", "--judge", place / "orm", "--out", scores)
    for bench in (["rm", "--k", "2"], ["best-of-n", "--n", "1,2,4"]):
        words = ["judge", "bench", *bench[:1], place / "test.jsonl", *bench[1:], "--json"]
        from_file, from_judge = (
            json.loads(run(capsys, *words, *whose)) for whose in (["--scores", scores], ["--judge", place / "orm"])
        )
        assert from_file == from_judge
    assert from_file["weight"] == "sigmoid", "an outcome judge's scores are no probabilities"


def test_the_threshold_is_chosen_on_another_split(place: Path, tmp_path: Path, capsys: Output) -> None:
    files = place / "pool-labels.jsonl", place / "test-labels.jsonl"
    words = ["judge", "bench", "processbench", *files, "--judge", place / "prm"]
    out = run(capsys, *words, "--choose-on", "pool-labels")
    assert "chosen on pool-labels (F1 " in out
    assert "\npool-labels " not in out
    assert "no split 'gsm8k'" in mistake(capsys, *words, "--choose-on", "gsm8k")
    assert "two ways" in mistake(capsys, *words, "--choose-on", "pool-labels", "--threshold", "0.4")
    outcome = ["judge", "bench", "processbench", files[1], "--judge", place / "orm"]
    assert "gives no scores to steps" in mistake(capsys, *outcome)
    theirs = {"id": "gsm8k-0", "problem": "1+1=?", "steps": ["1+1=2;", "Answer:2"], "label": -1}
    rows = [theirs, {**theirs, "id": "gsm8k-1", "steps": ["1+1=3;", "Answer:3"], "label": 0}]
    (tmp_path / "processbench_gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = run(capsys, "judge", "bench", "processbench", "--data", tmp_path, "--judge", place / "prm")
    assert "gsm8k  1      1 " in out


def test_a_benchmark_keeps_what_the_judge_said(
    place: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, it goes on; and another benchmark of the same pool asks the judge nothing."""
    write_pool(tmp_path / "pool.jsonl", pool(200, 6, seed=5))
    words = ["judge", "bench", "rm", str(tmp_path / "pool.jsonl"), "--judge", str(place / "orm"), "--threads", "1"]
    words += ["--k", "4"]
    identity = open_at_work(str(place / "orm")).identity
    log = score_log.kept_beside(tmp_path / "pool.jsonl", identity)
    killed(words, "score_log.CHUNK = 2000", log, 100)
    before = log.read_bytes()
    assert before.count(b"\n") < 1201, "it was killed on the way"
    monkeypatch.setattr(score_log, "CHUNK", 2000)
    continued = run(capsys, *words, "--json")
    assert log.read_bytes().startswith(before)
    assert log.read_bytes().count(b"\n") == 1201
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pool.jsonl", log.name]
    scores = tmp_path / "scores.jsonl"
    run(capsys, "judge", "score", tmp_path / "pool.jsonl", "--judge", place / "orm", "--threads", "1", "--out", scores)
    assert continued == run(capsys, *words[:4], "--k", "4", "--scores", scores, "--json")
    monkeypatch.setattr(JudgeAtWork, "score", lambda *_: pytest.fail("the judge was asked again"))
    assert run(capsys, *words, "--json") == continued
    run(capsys, *words, "--k", "2", "--seeds", "10", "--seed", "1")
    run(capsys, "judge", "bench", "best-of-n", *words[3:8], "--n", "1,2")


def test_each_split_of_processbench_keeps_its_scores(
    place: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pool", "test"):
        (tmp_path / f"{name}.jsonl").write_bytes((place / f"{name}-labels.jsonl").read_bytes())
    files = [tmp_path / "pool.jsonl", tmp_path / "test.jsonl"]
    words = ["judge", "bench", "processbench", "--judge", place / "prm", "--json"]
    both = json.loads(run(capsys, *words, *files))
    assert len(list(tmp_path.glob("pool.jsonl.judged-*"))) == len(list(tmp_path.glob("test.jsonl.judged-*"))) == 1
    with monkeypatch.context() as patch:
        patch.setattr(JudgeAtWork, "score", lambda *_: pytest.fail("the judge was asked again"))
        assert json.loads(run(capsys, *words, files[1]))["splits"]["test"] == both["splits"]["test"]
        run(capsys, *words, *files, "--choose-on", "pool")
    for kept in tmp_path.glob("*.judged-*"):
        kept.unlink()
    monkeypatch.setattr("reasonlab.judges.bench_command.os.access", lambda *_: False)  # root may write everywhere
    capsys.readouterr()
    assert main([str(word) for word in [*words, files[1]]]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["splits"]["test"] == both["splits"]["test"]
    assert "note: the scores are not kept, because" in shown.err
    assert not list(tmp_path.glob("*.judged-*"))


def test_selection_takes_the_best_and_reports_what_it_left(place: Path, tmp_path: Path, capsys: Output) -> None:
    words = ["select", place / "test.jsonl", "--judge", "exact", "--out", tmp_path / "best.jsonl"]
    out = run(capsys, *words, "--top", "12", "--per-family", "--one-per-problem")
    assert "12 of 96 chosen" in out
    assert "100.0 % are right (50.0 % of the pool)" in out
    chosen = read_pool(tmp_path / "best.jsonl")
    assert all(candidate.correct for candidate in chosen)
    assert len({candidate.problem for candidate in chosen}) == 12
    counts = {family: sum(c.family == family for c in chosen) for family in ("sum", "gcd", "counting")}
    assert set(counts.values()) == {4}
    report = json.loads((tmp_path / "best.jsonl.report.json").read_text())
    assert (report["chosen"], report["judge"], report["rank_by"]) == (12, "exact", {"steps": "mean", "alpha": 1.0})
    assert "exists" in mistake(capsys, *words, "--top", "12")
    sft = tmp_path / "sft.jsonl"
    run(capsys, *words[:-1], sft, "--top", "10", "--demonstrations")
    groups = read_responses(sft, pairs=False)
    assert len(groups) == 10
    assert all(group.rollouts[0].ids[-1] == 2 for group in groups), "they end with the end token"


# --- pools and labels --------------------------------------------------------------------------------------------


def test_pools_are_sampled_from_several_models(tmp_path: Path, capsys: Output) -> None:
    out = tmp_path / "pool.jsonl.gz"
    words = ["judge", "pool", "tiny-1m", "tiny-0.3m", "--problems", "6", "--samples", "2", "--levels", "1,2"]
    assert "24 candidates for 6 problems" in run(capsys, *words, "--threads", "1", "--out", out)
    found = read_pool(out)
    assert [c.source for c in found[:4]] == ["tiny-1m", "tiny-1m", "tiny-0.3m", "tiny-0.3m"]
    assert all(c.problem.split("/")[2] == "train" and c.answer and c.correct is not None for c in found)
    assert len({c.problem for c in found}) == 6


def test_labels_by_rollouts_and_by_a_language_model(
    place: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pool(tmp_path / "few.jsonl", read_pool(place / "test.jsonl")[:6])
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


# --- best-of-N in evaluations ------------------------------------------------------------------------------------


def test_an_evaluation_is_judged_beside_its_answers(
    place: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "evaluation"
    words = ["eval", "tiny-0.3m", "--problems", "24", "--k", "4", "--levels", "1,2", "--threads", "1", "--out", out]
    run(capsys, *words)
    text = run(capsys, *words, "--judge", "exact", "--best-of", "4")
    best_of = json.loads((out / "scores.json").read_text())["best_of"]
    total = best_of["scores"]["tiny"]
    assert f"tiny best@4 = {100 * total['best']['estimate']:.1f} %" in text
    assert total["best"]["estimate"] == pytest.approx(total["oracle"]["estimate"])
    assert total["majority"]["estimate"] <= total["weighted_majority"]["estimate"] <= total["oracle"]["estimate"]
    [log] = out.glob("judged-*.jsonl")
    stamp = log.stat().st_mtime_ns, log.stat().st_size
    run(capsys, *words, "--judge", "exact", "--best-of", "2", "--steps", "min")
    assert (log.stat().st_mtime_ns, log.stat().st_size) == stamp, "another N costs no scoring"
    again = run(capsys, "eval", "--rescore", out, "--judge", place / "orm", "--threads", "1", "--json")
    assert json.loads(again)["best_of"]["scores"]["tiny"]["n"] == 4
    assert json.loads(again)["best_of"]["weight"] == "sigmoid"
    assert len(list(out.glob("judged-*.jsonl"))) == 2
    # The directory is a pool as well, with the scores of its judges, and the benchmark agrees with the evaluation.
    with monkeypatch.context() as patch:
        patch.setattr(JudgeAtWork, "score", lambda *_: pytest.fail("the judge was asked again"))
        run(capsys, "judge", "bench", "best-of-n", out, "--judge", place / "orm", "--n", "4")
    pooled = run(capsys, "judge", "bench", "best-of-n", out, "--judge", "exact", "--n", "4", "--json")
    assert json.loads(pooled)["best-of-N"][0]["estimate"] == pytest.approx(total["best"]["estimate"])


def test_a_judge_that_cannot_read_an_answer_does_not_cost_the_scores(
    place: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    own = tmp_path / "sums.jsonl"
    own.write_text('{"id": "a", "question": "What is 1 + 1?", "answer": "2"}\n')
    with serving(ChatServer(lambda *_: completion("so " * 2000 + "\\boxed{2}"))) as server:
        words = ["eval", server.url, "--benchmark", str(own), "--k", "2", "--out", str(tmp_path / "evaluation")]
        assert main([*words, "--judge", str(place / "orm")]) == 2
    shown = capsys.readouterr()
    assert "sums avg@2 = 100.0 %" in shown.out
    assert "tokens, the judge reads" in shown.err
    assert json.loads((tmp_path / "evaluation" / "scores.json").read_text())["scores"]["sums"]["questions"] == 1


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["judge", "score", "none.jsonl", "--judge", "exact", "--out", "x"], "there is no pool none.jsonl"),
        (["judge", "score", "bad.jsonl", "--judge", "exact", "--out", "x"], "line 1: the key 'question' is missing"),
        (["judge", "score", "pool.jsonl", "--judge", "none", "--out", "x"], "there is no directory none"),
        (["judge", "score", "pool.jsonl", "--judge", ".", "--out", "x"], "no config.json"),
        (
            ["judge", "score", "pool.jsonl", "--judge", "exact", "--top", "3", "--out", "x"],
            "unexpected argument '--top'",
        ),
        (["judge", "bench", "rm", "pool.jsonl"], "either --judge or --scores"),
        (["judge", "bench", "rm", "pool.jsonl", "--judge", "exact", "--k", "9"], "has 9 graded answers"),
        (["judge", "bench", "rm", "open.jsonl", "--judge", "exact"], "says whether it is right"),
        (["judge", "bench", "best-of-n", "pool.jsonl", "--judge", "exact", "--n", "two"], "is no list of numbers"),
        (["judge", "train"], "needs a recipe, or --resume RUN"),
        (["judge", "train", "none.toml"], "none.toml cannot be read"),
        (["judge", "train", "recipe.toml", "--data", "pool.jsonl", "--lrr", "1"], "Perhaps you meant 'lr'"),
        (["judge", "train", "recipe.toml"], "no data to learn from"),
        (["judge", "train", "recipe.toml", "--data", "pool.jsonl", "--kind", "process"], "step_labels"),
        (["judge", "train", "--resume", "none"], "there is no run in none"),
        (["judge", "label", "open.jsonl", "--source", "exact", "--out", "x"], "no problem of the tiny world"),
        (["judge", "label", "open.jsonl", "--source", "monte-carlo", "--out", "x"], "is not in the pool"),
        (["judge", "label", "pool.jsonl", "--source", "endpoint", "--out", "x"], "needs --url"),
        (["judge", "label", "open.jsonl", "--source", "trajectory", "--out", "x"], "step_targets (judges/targets.py)"),
        (
            ["judge", "label", "pool.jsonl", "--source", "trajectory", "--rule", "newline", "--out", "x"],
            "Leave out --rule",
        ),
        (
            ["judge", "label", "pool.jsonl", "--source", "trajectory", "--completions", "0", "--out", "x"],
            "at least 1",
        ),
        (["judge", "pool", "none", "--out", "x"], "there is no model 'none'"),
        (["select", "pool.jsonl", "--judge", "exact", "--top", "0", "--out", "x"], "--top 0 of 8 candidates"),
        (["select", "pool.jsonl", "--judge", "exact", "--top", "9", "--out", "x"], "--top 9 of 8 candidates"),
        (["select", "pool.jsonl", "--judge", "exact", "--top", "2", "--per-family", "x", "--out", "x"], "is no number"),
        (["eval", "tiny-0.3m", "--k", "4", "--best-of", "4"], "--best-of needs a judge"),
        (["eval", "tiny-0.3m", "--k", "4", "--judge", "exact", "--best-of", "5"], "2 <= best-of <= k"),
        (["eval", "tiny-0.3m", "--judge", "exact"], "2 <= best-of <= k"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_mistakes_are_one_line_and_leave_nothing_behind(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pool(Path("pool.jsonl"), pool(4, 2))
    write_pool(Path("open.jsonl"), [Candidate("p", "How many?", "Answer:2")])
    Path("bad.jsonl").write_text('{"problem": "a"}\n')
    Path("recipe.toml").write_text('model = "tiny-0.3m"\n')
    before = sorted(os.listdir())
    assert says in mistake(capsys, *words)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("name", ["pool", "label", "train", "score", "bench", "bench rm", "bench processbench"])
def test_every_part_has_help_with_an_example(name: str, capsys: Output) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["judge", *name.split(), "--help"])
    assert exit_.value.code == 0
    assert "example: reasonlab judge " in capsys.readouterr().out
