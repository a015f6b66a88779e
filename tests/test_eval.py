"""`reasonlab eval`: any model, any benchmark, interrupted and continued, graded again, and honest about failures."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_server import ChatServer, Reply, completion, serving
from evaluations import evaluate, own_set, rows_of

from reasonlab.cli import main
from reasonlab.evaluate.evaluator import Answer, Task, answers_to, summarise
from reasonlab.evaluate.responder import Placed, Response
from reasonlab.evaluate.scores import mean_of
from reasonlab.evaluate.statistics import Interval
from reasonlab.grading.grade import Grade
from reasonlab.problems.problem import Problem
from reasonlab.rollout.types import Sampling


@pytest.fixture(autouse=True)
def _straight_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def adder(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
    """Adds, but cannot add 3 and 3, and is silent about 5 and 5."""
    n = int(re.search(r"(\d+) \+", prompt)[1])  # type: ignore[index]
    if n == 5:
        return 400, {}, "no fives"
    return completion(f"<think>hm</think>So \\boxed{{{7 if n == 3 else 2 * n}}}", 10 + n)


# --- endpoints and the record ------------------------------------------------------------------------------------


def test_an_endpoint_is_scored_and_everything_but_the_key_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    out = tmp_path / "evaluation"
    with serving(ChatServer(adder)) as server:
        words = [server.url, "--benchmark", str(own_set(tmp_path / "sums.jsonl")), "--k", "2", "--out", str(out)]
        text = evaluate(capsys, *words)
    assert "sums avg@2 = 80.0 %" in text
    assert "6 questions, T=0.6, top-p 0.95, 4096 tokens at most, 0.0 % truncated, 12.0 [" in text
    assert "2 answers never came" in text
    assert "Please reason step by step" in server.bodies[0]["messages"][0]["content"]
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    settings = json.loads((out / "settings.json").read_text())
    assert settings["model"] == {"kind": "endpoint", "name": "served"}
    assert settings["benchmarks"]["sums"]["questions"] == 6
    assert "{question}" in settings["benchmarks"]["sums"]["template"]
    assert (settings["k"], settings["sampling"]["temperature"], settings["seed"]) == (2, 0.6, 0)
    assert settings["about"]["grader"]
    by_verdict = {(row["problem"], row["sample"]): row["verdict"] for row in rows_of(out)}
    assert len(rows_of(out)) == 12
    assert by_verdict["q3", 0] == "wrong"
    assert by_verdict["q5", 1] == "error"
    assert len(by_verdict) == 12
    assert json.loads((out / "scores.json").read_text())["scores"]["sums"]["failed"] == 2
    for file in out.rglob("*"):
        assert b"sk-very-secret" not in file.read_bytes()


def test_a_continued_evaluation_asks_only_for_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, sums = tmp_path / "evaluation", own_set(tmp_path / "sums.jsonl")
    with serving(ChatServer(adder)) as server:
        words = [server.url, "--benchmark", str(sums), "--out", str(out), "--json"]
        first = json.loads(evaluate(capsys, *words))
        assert sum(server.attempts.values()) == 6
        lines = (out / "answers.jsonl").read_bytes().splitlines(keepends=True)
        (out / "answers.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:-9])  # cut in the middle of a line
        kept = {json.loads(line)["problem"] for line in lines[:2]}
        server.attempts.clear()
        second = json.loads(evaluate(capsys, *words))
        assert first == second
        # What failed is asked again too, in vain.
        assert len(server.attempts) == 6 - len(kept - {"q5"})
        server.rule = lambda *_: completion("\\boxed{10}")
        assert main(["eval", *words[:-1]]) == 0
        again = capsys.readouterr()
        assert "never came" not in again.out
        assert "5 of 6 answers were there already" in again.err, "beside the scores, not among them"
        assert [row["verdict"] for row in rows_of(out)] == [*["correct"] * 3, "wrong", "correct", "correct"]
        for change, named in (
            (["--k", "3"], "k is 1 there and 3 now"),
            (["--temperature", "0"], "sampling.temperature is 0.6 there and 0.0 now"),
            (["--limit", "2"], "benchmarks.sums.questions is 6 there and 2 now"),
            (["--endpoint-model", "other"], 'model.name is "served" there and "other" now'),
        ):
            assert main(["eval", *words, *change]) == 2
            assert named in capsys.readouterr().err


def test_an_evaluation_of_another_model_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--problems", "2", "--out", str(tmp_path / "out")]
    assert "there already" not in evaluate(capsys, "tiny-0.3m", *words)
    assert main(["eval", "tiny-1m", *words]) == 2
    error = capsys.readouterr().err
    assert "(tiny-0.3m) there and" in error
    assert "(tiny-1m) now" in error


def test_rescore_grades_the_stored_answers_without_asking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, sums = tmp_path / "evaluation", own_set(tmp_path / "sums.jsonl", 5)

    def without_box(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        n = int(re.search(r"(\d+) \+", prompt)[1])  # type: ignore[index]
        return completion(f"Answer: {2 * n}", 3)

    with serving(ChatServer(without_box)) as server:
        assert "sums avg@1 = 0.0 %" in evaluate(capsys, server.url, "--benchmark", str(sums), "--out", str(out))
        asked = len(server.bodies)
    assert "sums avg@1 = 100.0 %" in evaluate(capsys, "--rescore", str(out), "--extraction", "explicit")
    assert len(server.bodies) == asked
    assert {row["verdict"] for row in rows_of(out)} == {"correct"}
    assert json.loads((out / "scores.json").read_text())["scores"]["sums"]["accuracy"]["estimate"] == 1
    # Another grader that differs from the record's is noticed when an evaluation continues: no mixture of verdicts.
    settings = json.loads((out / "settings.json").read_text())
    settings["about"]["grader"] = "older"
    (out / "settings.json").write_text(json.dumps(settings))
    forged = [row | {"verdict": "wrong"} for row in rows_of(out)]
    (out / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in forged))
    with serving(ChatServer(without_box)) as server:
        words = [server.url, "--benchmark", str(sums), "--out", str(out), "--extraction", "explicit"]
        assert "sums avg@1 = 100.0 %" in evaluate(capsys, *words)
        assert not server.bodies


def test_rescore_into_another_place_leaves_the_directory_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, sums = tmp_path / "evaluation", own_set(tmp_path / "sums.jsonl", 3)
    with serving(ChatServer(lambda *_: completion("Answer: 2", 3))) as server:
        evaluate(capsys, server.url, "--benchmark", str(sums), "--out", str(source))
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    words = ["eval", "--rescore", str(source), "--extraction", "explicit"]
    other, answers = tmp_path / "other", tmp_path / "answers.jsonl"
    for _ in range(2):  # the second finds the outcome of the first
        assert main([*words, "--out", str(other)]) == 0
        assert f"1 of 3 verdicts changed; written to {other}, {source} is as it was" in capsys.readouterr().err
    assert main([*words, "--out", str(answers)]) == 0
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    assert [row["verdict"] for row in rows_of(other)] == ["wrong", "correct", "wrong"]
    assert answers.read_bytes() == (other / "answers.jsonl").read_bytes()
    assert json.loads((other / "scores.json").read_text())["scores"]["sums"]["accuracy"]["estimate"] == 1 / 3
    assert json.loads((other / "settings.json").read_text())["benchmarks"]["sums"]["extraction"] == "explicit"
    (other / "answers.jsonl").write_text(answers.read_text().replace("Answer: 2", "Answer: 9"))
    assert main([*words, "--out", str(other)]) == 2
    assert "holds other answers" in capsys.readouterr().err
    assert main(words) == 0
    assert f"{source} was rewritten" in capsys.readouterr().err
    assert rows_of(source)[1]["verdict"] == "correct"


def test_rescore_refuses_options_that_it_does_not_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "evaluation"
    evaluate(capsys, "tiny-0.3m", "--problems", "2", "--out", str(out))
    assert main(["eval", "--rescore", str(out), "--k", "1", "--temperature=1", "--benchmark", "svamp"]) == 2
    assert "does not use --k, --temperature, --benchmark. It takes --extraction" in capsys.readouterr().err
    assert main(["eval", "--rescore", str(out), "--threads", "1"]) == 2
    assert "does not use --threads" in capsys.readouterr().err


def test_kill_nine_loses_no_answer_that_was_written(tmp_path: Path) -> None:
    out, sums = tmp_path / "evaluation", own_set(tmp_path / "sums.jsonl", 40)

    def slow(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        time.sleep(0.05)
        return completion("\\boxed{0}", 4)

    with serving(ChatServer(slow)) as server:
        words = ["eval", server.url, "--benchmark", str(sums), "--out", str(out), "--concurrency", "2"]
        command = [sys.executable, "-m", "reasonlab.cli", *words]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
        answers = out / "answers.jsonl"
        while process.poll() is None and not (answers.exists() and answers.read_bytes().count(b"\n") >= 8):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = rows_of(out)
        assert 8 <= len(before) < 40
        server.attempts.clear()
        assert main(words) == 0
        after = rows_of(out)
        assert all(row in after for row in before)
        assert [row["problem"] for row in after] == [f"q{n}" for n in range(40)]
        assert len(server.attempts) == 40 - len(before)


def test_a_directory_that_is_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious.txt").write_text("x")
    assert main(["eval", "tiny-0.3m", "--problems", "4", "--out", str(tmp_path)]) == 2
    assert "holds no evaluation" in capsys.readouterr().err
    assert main(["eval", "--rescore", str(tmp_path)]) == 2
    assert "there is no evaluation in" in capsys.readouterr().err


def test_an_endpoint_nobody_listens_on_is_a_mistake_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ChatServer(adder)) as server:
        pass
    assert main(["eval", server.url, "--suite", "tiny"]) == 2
    assert "does not answer" in capsys.readouterr().err


# --- the tiny world ----------------------------------------------------------------------------------------------


def test_a_tiny_model_continues_to_the_same_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "evaluation"
    words = ["tiny-0.3m", "--problems", "24", "--k", "2", "--json"]
    plain = json.loads(evaluate(capsys, *words))
    recorded = json.loads(evaluate(capsys, *words, "--out", str(out)))
    assert recorded["scores"] == plain["scores"]
    lines = (out / "answers.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 48
    (out / "answers.jsonl").write_bytes(b"".join(lines[:31]))
    assert json.loads(evaluate(capsys, *words, "--out", str(out))) == recorded
    assert (out / "answers.jsonl").read_bytes() == b"".join(lines)
    again = json.loads(evaluate(capsys, "--rescore", str(out), "--json"))
    assert again["scores"] == plain["scores"]


def test_another_seed_draws_other_answers_and_does_not_continue_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tiny-0.3m", "--problems", "12", "--out"]
    texts = {}
    for name, seed in (("none", []), ("zero", ["--seed", "0"]), ("seven", ["--seed", "7"])):
        evaluate(capsys, *words, str(tmp_path / name), *seed)
        texts[name] = [row["text"] for row in rows_of(tmp_path / name)]
    assert texts["none"] == texts["zero"] != texts["seven"]
    assert json.loads((tmp_path / "seven" / "settings.json").read_text())["seed"] == 7
    assert main(["eval", *words, str(tmp_path / "seven")]) == 2
    assert "seed is 7 there and 0 now" in capsys.readouterr().err


def test_several_answers_without_a_draw_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "tiny-0.3m", "--problems", "2", "--temperature"]
    assert main([*words, "0", "--k", "3"]) == 0
    assert "note: temperature 0 draws nothing: --k 3 asks the same 3 times" in capsys.readouterr().err
    for drawn in (["0", "--k", "1"], ["1", "--k", "3"]):
        assert main([*words, *drawn]) == 0
        assert "draws nothing" not in capsys.readouterr().err


def test_a_family_and_a_file_of_ones_own_are_benchmarks_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = tmp_path / "mine.jsonl"
    sums.write_text('{"question": "What is 2+3?", "answer": "5"}\n{"question": "What is 4+4?", "answer": "8"}\n')
    words = ["tiny-1m", "--benchmark", "tiny/sum", "--benchmark", str(sums), "--limit", "20", "--temperature", "0"]
    scores = json.loads(evaluate(capsys, *words, "--json"))
    assert {name: s["questions"] for name, s in scores["scores"].items()} == {"total": 22, "sum": 20, "mine": 2}
    assert scores["mean_of_benchmarks"]["estimate"] == pytest.approx(
        np.mean([scores["scores"][name]["accuracy"]["estimate"] for name in ("sum", "mine")])
    )
    assert main(["eval", "tiny-1m", "--benchmark", str(sums), "--benchmark", str(sums)]) == 2
    assert "Name each once" in capsys.readouterr().err


def test_the_total_is_named_after_all_that_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--suite",
        "tiny",
        "--split",
        "test",
        "--problems",
        "3",
        "--benchmark",
        str(own_set(tmp_path / "own.jsonl")),
    ]
    text = evaluate(capsys, "tiny-0.3m", *words)
    assert text.startswith("tiny test + own avg@1 = ")
    assert "(9 questions," in text.splitlines()[0]
    assert "mean of" not in text, "families of the tiny world are not benchmarks"
    assert "tiny + own" in json.loads(evaluate(capsys, "tiny-0.3m", *words, "--json"))["scores"]


def test_nothing_to_ask_is_a_mistake_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    assert main(["eval", "tiny-0.3m", "--benchmark", str(tmp_path / "empty.jsonl")]) == 2
    assert 'holds no problems. Each line must be an object: {"question"' in capsys.readouterr().err
    assert main(["eval", "tiny-0.3m", "--suite", "mel5", "--data", str(tmp_path)]) == 2
    assert (
        "of the suite mel5 has its data here: aime24, aime25, amc23, math500, olympiadbench." in capsys.readouterr().err
    )


def test_overlap_with_the_training_pool_is_flagged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums, out = own_set(tmp_path / "sums.jsonl", 4), tmp_path / "evaluation"
    pool = tmp_path / "pool.jsonl"
    report = {"checked": {"sums": 4}, "cleaned": False, "pools": [{"benchmarks": {"sums": {"ids": ["q3", "q9"]}}}]}
    pool.with_name("pool.jsonl.overlap.json").write_text(json.dumps(report))
    flag = "; OVERLAP: 1 of the questions are in the training pool pool.jsonl, 100.0 % without them"
    with serving(ChatServer(adder)) as server:
        words = [server.url, "--benchmark", str(sums), "--trained-on", str(pool), "--out", str(out)]
        assert flag in evaluate(capsys, *words)
    assert flag in evaluate(capsys, "--rescore", str(out))
    words = ["tiny-0.3m", "--benchmark", "tiny/sum", "--limit", "4", "--trained-on", str(pool)]
    assert "; overlap with pool.jsonl not checked" in evaluate(capsys, *words)
    assert main(["eval", "tiny-0.3m", "--problems", "4", "--trained-on", str(tmp_path / "other.jsonl")]) == 2
    assert "there is no overlap report" in capsys.readouterr().err


def test_a_suite_is_scored_with_its_registered_prompts_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = Path(os.environ.get("REASONLAB_DATA") or Path(__file__).parents[2] / "shared" / "bench")
    if not (shared / "math500.jsonl").is_file():
        pytest.skip("benchmark data is not here (REASONLAB_DATA)")

    def always_c(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        return completion("\\boxed{C}", 2)

    with serving(ChatServer(always_c)) as server:
        words = ["eval", server.url, "--suite", "k15", "--data", str(shared), "--limit", "8", "--json"]
        assert main(words) == 0
    printed = capsys.readouterr()
    assert "gpqa_diamond" in printed.err
    found = json.loads(printed.out)
    assert found["scores"]["k15"]["questions"] == 8 * 8
    assert 0 < found["scores"]["gaokao_biology"]["accuracy"]["estimate"] < 1
    assert found["scores"]["aime24"]["accuracy"]["estimate"] == 0
    assert found["mean_of_benchmarks"]["estimate"] == pytest.approx(found["scores"]["k15"]["accuracy"]["estimate"])
    assert any("字母" in body["messages"][0]["content"] for body in server.bodies)


# --- summaries ---------------------------------------------------------------------------------------------------


def test_what_came_together_is_handed_out_in_order_before_more_is_asked_for() -> None:
    """Graded side by side, the first one slowly; a responder that fails later costs no answer that it gave before."""
    problems = [Problem(f"p{i}", f"{i}?", str(i), "own", 0) for i in range(6)]
    tasks = [Task(problem, problem.question, range(1)) for problem in problems]

    class Fails:
        def respond(self, asks: Any, sampling: Sampling, progress: Any = None) -> Iterator[Sequence[Placed]]:
            yield [(i, 0, Response(str(i), 1, "stop")) for i in range(5)]
            raise ConnectionError("gone")

    def grader(problem: Problem, text: str) -> Grade:
        if text == "0":
            time.sleep(0.2)
        return Grade("correct" if text == problem.answer else "wrong", text, "")

    answers = answers_to(tasks, Fails(), Sampling(), grader)
    first = [next(answers) for _ in range(5)]
    assert [answer.text for answer in first] == ["0", "1", "2", "3", "4"]
    assert all(answer.verdict == "correct" for answer in first)
    with pytest.raises(ConnectionError):
        next(answers)


def test_answers_that_never_came_have_no_grade_no_length_and_are_not_truncated() -> None:
    def answer(problem: str, verdict: str, tokens: int, finish: str) -> Answer:
        return Answer(problem, "f", 0, "?", "1", 0, verdict, None, tokens, finish, "")

    summary = summarise([answer("a", "correct", 10, "length"), answer("b", "error", 0, "error")])
    assert summary.accuracy.estimate == 1
    assert summary.tokens.estimate == 10
    assert summary.truncated == 1
    assert (summary.questions, summary.ungraded, summary.failed) == (2, 1, 1)
    nothing = summarise([answer("b", "error", 0, "error")])
    assert "nan" in nothing.sentence("x", 1, 5)
    assert "unknown tokens/answer" in nothing.sentence("x", 1, 5)


def test_the_mean_of_benchmarks_narrows_with_their_number() -> None:
    one = Interval(0.5, 0.4, 0.7)
    both = mean_of([one, one])
    assert both.estimate == 0.5
    assert (0.5 - both.low, both.high - 0.5) == pytest.approx((0.1 / 2**0.5, 0.2 / 2**0.5))
