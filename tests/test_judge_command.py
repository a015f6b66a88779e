"""`reasonlab judge`, `select` and `eval --judge`: from a pool to a judge, and from a judge to choices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, completion, serving
from judge_commands import Output, killed, mistake, pool, run

from reasonlab.cli import main
from reasonlab.errors import UserError
from reasonlab.judges import score_log
from reasonlab.judges.opened import JudgeAtWork, open_at_work
from reasonlab.judges.score_log import chunks, open_log, score_all
from reasonlab.judges.types import Candidate, Scored, read_pool, read_scores, write_pool
from reasonlab.train.recorded import read_responses

SMALL = ["--model", "tiny-0.3m", "--batch", "8", "--epochs", "1", "--threads", "1"]


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
