"""`reasonlab data curate`: what is taken out and why, what is kept, and that it comes back for training."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, Reply, completion, serving
from hypothesis import given
from hypothesis import strategies as st

from reasonlab.cli import main
from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import evaluate
from reasonlab.grading.grade import grade
from reasonlab.keys import key
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.curation import (
    BEYOND_SIZE,
    BINS,
    FAMILY_CAP,
    REPEATED,
    TRIVIAL,
    TWO_GOLDS,
    UNSOLVED,
    Candidate,
    balance,
    bin_of,
    cut_to_size,
    even_shares,
    limited,
    load_problems,
    of_tiny_world,
    read_pool,
    remaining,
    remove_by_pass_rate,
    remove_unfit,
)
from reasonlab.problems.problem import Problem
from reasonlab.problems.question_kinds import MULTIPLE_CHOICE, NO_GOLD
from reasonlab.problems.tiny_world import problem_set
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Sampling


@pytest.fixture(autouse=True)
def _straight_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("REASONLAB_DATA", raising=False)


# --- pools ---------------------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", ["pool.jsonl", "pool.jsonl.gz"])
def test_a_pool_of_ones_own_with_families_from_its_columns(tmp_path: Path, name: str) -> None:
    pool = write_rows(
        tmp_path / name,
        [
            {"id": "a", "problem": "1+1?", "answer": "2", "subject": "Algebra", "level": "Level 3"},
            {"question": "2+2?", "answer": 4, "domain": ["Sums", "More"], "source": "book"},
            {"prompt": [{"role": "user", "content": "3+3?"}], "answer": "6"},
            {"id": "d", "question": "4+4?", "answer": None},
        ],
    )
    candidates = read_pool(str(pool))
    assert [c.problem for c in candidates] == [
        Problem("a", "1+1?", "2", "Algebra", 3),
        Problem("pool-2", "2+2?", "4", "Sums", 0),
        Problem("pool-3", "3+3?", "6", "pool", 0),
        Problem("d", "4+4?", "", "pool", 0),
    ]
    remove_unfit(candidates)
    assert [c.removed for c in candidates] == [None, None, None, NO_GOLD]
    row = candidates[1].curated_row()
    assert list(row)[:7] == ["id", "question", "answer", "family", "level", "pass_rate", "guessed"]
    assert (row["question"], row["source"], "problem" in row) == ("2+2?", "book", False)


def test_the_same_question_twice(tmp_path: Path) -> None:
    golds = {"Add  1+1.": "2", "Add 1+1.": "$2$", "Add 2+2.": "4", "Add\n2+2.": "5", "Add 3+3.": "6"}
    pool = write_rows(tmp_path / "p.jsonl", [{"question": q, "answer": a} for q, a in golds.items()])
    candidates = read_pool(str(pool))
    remove_unfit(candidates)
    assert [c.removed for c in candidates] == [None, REPEATED, TWO_GOLDS, TWO_GOLDS, None]


def test_what_is_no_pool(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a benchmark"):
        read_pool("math500")
    with pytest.raises(UserError, match="is a benchmark"):
        read_pool("tiny/sum")
    with pytest.raises(UserError, match="there is no file"):
        read_pool(str(tmp_path / "absent.jsonl"))
    with pytest.raises(UserError, match="several rows with the id 'x'"):
        read_pool(str(write_rows(tmp_path / "p.jsonl", [{"id": "x", "question": q, "answer": "1"} for q in "ab"])))
    with pytest.raises(UserError, match="holds no problems"):
        read_pool(str(write_rows(tmp_path / "empty.jsonl", [])))


# --- the choice ----------------------------------------------------------------------------------------------------


def candidates_of(families: dict[str, list[float | None]]) -> list[Candidate]:
    """For each family its pass rates."""
    return [
        Candidate(Problem(f"{family}-{number}", f"{family} {number}?", "1", family), {}, pass_rate=rate)
        for family, rates in families.items()
        for number, rate in enumerate(rates)
    ]


def kept_by_family(candidates: list[Candidate]) -> dict[str, int]:
    return dict(Counter(candidate.problem.family for candidate in remaining(candidates)))


def test_trivial_is_above_the_threshold_and_unsolved_stays_unless_told() -> None:
    for drop, unsolved in ((False, None), (True, UNSOLVED)):
        candidates = candidates_of({"f": [0.0, 0.1, 0.9, 0.95, 1.0]})
        remove_by_pass_rate(candidates, 0.9, drop)
        assert [c.removed for c in candidates] == [unsolved, None, None, TRIVIAL, TRIVIAL]


def test_no_family_above_the_multiple_of_the_median() -> None:
    sizes = {"one": 1, "small": 4, "middle": 6, "large": 20, "huge": 100}
    candidates = candidates_of({family: [0.5] * size for family, size in sizes.items()})
    balance(candidates, 2.0, seed=0)
    assert kept_by_family(candidates) == {"one": 1, "small": 4, "middle": 6, "large": 12, "huge": 12}
    assert Counter(c.removed for c in candidates)[FAMILY_CAP] == 8 + 88


def test_the_draw_depends_on_the_seed_but_not_on_the_order() -> None:
    def drawn(seed: int, reverse: bool = False) -> set[str]:
        candidates = candidates_of({"a": [0.5] * 50, "b": [0.5] * 5, "c": [0.5] * 5})
        balance(candidates[::-1] if reverse else candidates, 1.0, seed)
        return {c.problem.id for c in remaining(candidates)}

    assert len(drawn(0)) == 15
    assert drawn(0) == drawn(0, reverse=True)
    assert drawn(0) != drawn(1)


def test_a_size_is_spread_over_families_and_pass_rates() -> None:
    rates = [0.0] * 10 + [0.2] * 2 + [0.4] * 30 + [0.6] * 30
    candidates = candidates_of({"wide": rates, "narrow": [0.5] * 3, "other": rates})
    cut_to_size(candidates, 35, seed=0)
    assert kept_by_family(candidates) == {"wide": 16, "narrow": 3, "other": 16}
    for family in ("wide", "other"):
        bins = Counter(bin_of(c.pass_rate) for c in remaining(candidates) if c.problem.family == family)
        assert sorted(bins[name] for name in BINS[:4]) == [2, 4, 5, 5]
        assert bins["(0,0.25]"] == 2
    assert Counter(c.removed for c in candidates)[BEYOND_SIZE] == len(candidates) - 35


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), min_size=1), st.integers(0, 300))
def test_shares_are_as_even_as_they_can_be(sizes: dict[str, int], total: int) -> None:
    shares = even_shares(sizes, total)
    assert sum(shares.values()) == min(total, sum(sizes.values()))
    for name, share in shares.items():
        assert 0 <= share <= sizes[name]
        if share < sizes[name]:  # who has more to give gives as much as anybody, but for the remainder
            assert all(share >= other - 1 for other in shares.values())


@pytest.mark.parametrize(
    ("rate", "name"),
    [(0.0, "0"), (0.1, "(0,0.25]"), (0.25, "(0,0.25]"), (0.3, "(0.25,0.5]"), (0.5, "(0.25,0.5]"), (0.75, "(0.5,0.75]"),
     (0.9, "(0.75,1)"), (0.999, "(0.75,1)"), (1.0, "1")],
)  # fmt: skip
def test_bins(rate: float, name: str) -> None:
    assert bin_of(rate) == name


def test_a_larger_limit_keeps_what_a_smaller_one_drew() -> None:
    candidates = candidates_of({"f": [None] * 40})
    small, large = ([c.problem.id for c in limited(candidates, n)] for n in (10, 25))
    assert len(small) == 10
    assert set(small) < set(large)
    order = [c.problem.id for c in candidates]
    assert small == sorted(small, key=order.index)


# --- back for training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("not json\n", "line 1 of .* is not JSON"),
        ('{"question": "1+1?"}\n', "line 1 of .* lacks a question or an answer"),
        ('{"answer": "1"}\n', "line 1 of .* lacks a question or an answer"),
        ('{"question": "a", "answer": "1"}\n{"question": "b", "answer": " "}\n', "line 2 of .* has an empty answer"),
        ('{"question": " ", "answer": "1"}\n', "line 1 of .* has an empty question"),
        ('{"id": 1, "question": "a", "answer": "1"}\n' * 2, "line 2 of .* has the id '1' of an earlier row"),
        ('{"question": "a", "answer": "1", "pass_rate": 1.5}\n', "line 1 of .* has the pass rate 1.5"),
        ('{"question": "a", "answer": "1", "pass_rate": "high"}\n', "has the pass rate 'high'"),
        ("", "is empty"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "curated.jsonl"
    path.write_text(lines)
    with pytest.raises(UserError, match=message):
        load_problems(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        load_problems(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match=r"does not end in \.jsonl"):
        load_problems(tmp_path / "problems.csv")
    with pytest.raises(UserError, match=r"no training set 'gsm8k_trian'\. Perhaps you meant 'gsm8k_train'"):
        load_problems(Path("gsm8k_trian"))


# --- the command, with a tiny model --------------------------------------------------------------------------------

TINY_WORDS = ["data", "curate", "tiny", "--model", "tiny-0.3m", "--problems", "36", "--threads", "1"]


def curate(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(list(words))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def curated(path: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def rates_by_evaluator(problems: list[Problem], samples: int, seed: int, force: str, tokens: int) -> dict[str, float]:
    tokenizer = TinyTokenizer.load()
    engine = Engine(load_model(resolve_model("tiny-0.3m")), 64, 1)
    sampling = Sampling(max_tokens=tokens, stop_ids=(tokenizer.eos_id,), repetition_window=64)
    right = Counter(dict.fromkeys((p.id for p in problems), 0))
    for answer in evaluate(engine, tokenizer, problems, sampling, samples, seed, force):
        right[answer.problem] += answer.verdict == "correct"
    return {name: count / samples for name, count in right.items()}


def test_pass_rates_and_guesses_are_the_evaluators_and_problems_come_back_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "curated.jsonl"
    words = [*TINY_WORDS, "--samples", "4", "--guesses", "2", "--balance", "off", "--easy", "0.7", "--out", str(out)]
    text = curate(capsys, *words)
    problems = problem_set("train", 36, levels=(2, 3, 4, 5))
    guessed = rates_by_evaluator(problems, 2, key(0, "guesses"), "Answer:", 16)
    asked = [problem for problem in problems if guessed[problem.id] == 0]
    rates = rates_by_evaluator(asked, 4, 0, "", 160)
    assert 0 < len(asked) < 36  # the test would say nothing otherwise
    expected = {problem.id: rates[problem.id] for problem in asked if rates[problem.id] <= 0.7}
    rows = curated(out)
    assert {name: row["pass_rate"] for name, row in rows.items()} == expected
    assert all(row["guessed"] == 0 for row in rows.values())
    report = json.loads((tmp_path / "curated.report.json").read_text())
    assert (report["rows"], report["kept"]) == (36, len(expected))
    assert report["removed"]["guessable"] == 36 - len(asked)
    assert report["removed"]["trivial"] == len(asked) - len(expected)
    assert sum(family["removed"]["guessable"] for family in report["families"].values()) == 36 - len(asked)
    assert sum(report["pass_rate"]["measured"]["histogram"].values()) == len(asked)
    assert sum(report["pass_rate"]["kept"]["histogram"].values()) == len(expected)
    assert report["settings"]["seed"] == 0
    assert report["model"]["sha256"]
    assert report["command"][:4] == ["reasonlab", "data", "curate", "tiny"]
    assert re.search(rf"^all +36 +{36 - len(asked)} .* {len(expected)} ", text, re.MULTILINE)
    known = {problem.id: problem for problem in problems}
    for problem, rate in load_problems(out):
        assert problem == known[problem.id]
        assert rate == expected[problem.id]
        assert of_tiny_world(problem)
        assert grade(problem, f"Answer:{problem.answer}").verdict == "correct"


def test_a_curated_file_is_a_pool_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl.gz"
    common = ["--model", "tiny-0.3m", "--threads", "1", "--samples", "2", "--guesses", "0", "--balance", "off"]
    curate(capsys, *TINY_WORDS, "--samples", "2", "--guesses", "0", "--balance", "off", "--out", str(first))
    curate(capsys, "data", "curate", str(first), *common, "--out", str(second))
    assert load_problems(second) == load_problems(first)  # the same keys, so the same answers and pass rates


def test_what_was_interrupted_goes_on_and_thresholds_cost_no_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "curated.jsonl"
    words = [*TINY_WORDS, "--samples", "3", "--guesses", "1", "--out", str(out)]
    curate(capsys, *words)
    files = [out, tmp_path / "curated.report.json"]
    whole = [path.read_bytes() for path in files]
    answers = tmp_path / "curated.answers" / "samples" / "answers.jsonl"
    lines = answers.read_bytes().splitlines(keepends=True)
    answers.write_bytes(b"".join(lines[:5]) + lines[5][:-20])  # as a power cut leaves it
    for path in files:
        path.unlink()
    curate(capsys, *words)
    assert [path.read_bytes() for path in files] == whole
    assert len(answers.read_bytes().splitlines()) == len(lines)

    def refuse(*_: object) -> None:
        raise AssertionError("nothing may be asked")

    monkeypatch.setattr(Engine, "generate", refuse)
    curate(capsys, *words, "--easy", "0.5", "--drop-unsolved", "--limit", "20", "--size", "5")
    assert len(curated(out)) <= 5
    assert all(0 < row["pass_rate"] <= 0.5 for row in curated(out).values())


def test_other_sampling_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY_WORDS, "--samples", "1", "--guesses", "0", "--out", str(tmp_path / "curated.jsonl")]
    curate(capsys, *words)
    assert main([*words, "--temperature", "0.5"]) == 2
    assert "sampling.temperature is 1.0 there and 0.5 now" in capsys.readouterr().err


def test_answers_of_another_grader_are_graded_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curated.jsonl"
    words = [*TINY_WORDS, "--samples", "2", "--guesses", "0", "--out", str(out)]
    curate(capsys, *words)
    whole, record = out.read_bytes(), tmp_path / "curated.answers" / "samples"
    spoiled = (record / "answers.jsonl").read_text().replace('"correct"', '"wrong"')
    (record / "answers.jsonl").write_text(spoiled)
    curate(capsys, *words)
    assert out.read_bytes() != whole  # stored verdicts are believed …
    settings = json.loads((record / "settings.json").read_text())
    settings["about"]["grader"] = "an older one"
    (record / "settings.json").write_text(json.dumps(settings))
    curate(capsys, *words)
    assert out.read_bytes() == whole  # … unless the grader has changed


# --- the command, with an endpoint ---------------------------------------------------------------------------------


def oracle(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
    """n + n: up to 3 by heart, from 8 on never, in between every other time and only with reasoning."""
    n = int(re.search(r"(\d+) \+", prompt)[1])  # type: ignore[index]
    if "Do not reason" in prompt:
        assert body["max_tokens"] == 64
        return completion(str(2 * n) if n <= 3 else "I think it is 1")
    return completion(f"<think>hm</think>So \\boxed{{{2 * n if n < 8 and attempt % 2 else 1}}}")


def sums(path: Path, count: int = 10) -> Path:
    rows = [{"id": f"q{n}", "question": f"What is {n} + {n}?", "answer": str(2 * n), "book": n} for n in range(count)]
    return write_rows(path, rows)


def test_an_endpoint_guesses_and_solves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curated.jsonl"
    with serving(ChatServer(oracle)) as server:
        words = ["data", "curate", str(sums(tmp_path / "sums.jsonl")), "--model", server.url, "--out", str(out)]
        words += ["--samples", "4", "--guesses", "3", "--concurrency", "1"]
        text = curate(capsys, *words)
        assert "reasonlab data check" in text
        rows = curated(out)
        assert list(rows) == [f"q{n}" for n in range(4, 10)]
        assert [row["pass_rate"] for row in rows.values()] == [0.5, 0.5, 0.5, 0.5, 0.0, 0.0]
        assert rows["q4"]["book"] == 4
        asked = sum(server.attempts.values())
        assert asked == 10 * 3 + 6 * 4
        assert all(body["temperature"] == 1.0 for body in server.bodies)
        curate(capsys, *words, "--drop-unsolved")
        assert list(curated(out)) == ["q4", "q5", "q6", "q7"]
        assert sum(server.attempts.values()) == asked
        changed = sums(tmp_path / "sums.jsonl")  # the same ids, one other question: only that one is asked
        changed.write_text(changed.read_text().replace("What is 9 + 9?", "How much is 9 + 9?"))
        curate(capsys, *words)
        assert sum(server.attempts.values()) == asked + 3 + 4


def test_answers_that_never_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def silent_about_five(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        return (400, {}, "no") if "5 +" in prompt else oracle(prompt, attempt, body)

    out = tmp_path / "curated.jsonl"
    pool = sums(tmp_path / "sums.jsonl")
    with serving(ChatServer(silent_about_five)) as server:
        words = ["data", "curate", str(pool), "--model", server.url, "--out", str(out)]
        words += ["--samples", "2", "--guesses", "1", "--retries", "0", "--concurrency", "1"]
        assert main(words) == 0
        assert "3 answers never came" in capsys.readouterr().err
        report = json.loads((tmp_path / "curated.report.json").read_text())
        assert report["removed"]["not measured"] == 1
        assert "q5" not in curated(out)
        server.rule = oracle
        assert main(words) == 0
        assert "never came" not in capsys.readouterr().err
        assert "q5" in curated(out)
    lost = tmp_path / "lost.jsonl"
    with serving(ChatServer(lambda *_: (400, {}, "no"))) as server:
        words[4:7] = [server.url, "--out", str(lost)]
        assert main(words) == 1
        assert "no pass rate could be measured" in capsys.readouterr().err
        assert not lost.exists()


def test_a_model_that_reasons_although_it_should_guess_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def thinker(prompt: str, attempt: int, body: dict[str, Any]) -> Reply:
        return completion("<think>Let me see, 2 and 2 is", 64, "length")

    with serving(ChatServer(thinker)) as server:
        words = ["data", "curate", str(sums(tmp_path / "sums.jsonl", 4)), "--model", server.url]
        words += ["--samples", "0", "--guesses", "2", "--out", str(tmp_path / "curated.jsonl")]
        assert main(words) == 0
    assert "100 % of the guesses were cut off" in capsys.readouterr().err
    assert [rate for _, rate in load_problems(tmp_path / "curated.jsonl")] == [None] * 4


# --- the command, without a model ----------------------------------------------------------------------------------


def test_structure_alone_needs_neither_model_nor_torch(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": "2"}] * 2 + [{"question": "2+2?", "answer": "4", "choices": ["3", "4"]}]
    pool = write_rows(tmp_path / "pool.jsonl", rows)
    out = tmp_path / "curated.jsonl"
    words = ["data", "curate", str(pool), "--samples", "0", "--guesses", "0", "--out", str(out), "--json"]
    code = f"import sys; from reasonlab.cli import main; code = main({words!r}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert {reason: count for reason, count in report["removed"].items() if count} == {MULTIPLE_CHOICE: 1, REPEATED: 1}
    assert report["model"] == {}
    assert [problem.question for problem, _ in load_problems(out)] == ["1+1?"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "-1"], "--samples and --guesses count answers"),
        (["--easy", "90"], "--easy 90 is no pass rate"),
        (["--balance", "some"], "--balance some is not a number"),
        (["--balance", "0.5"], "--balance 0.5 is not a number"),
        (["--size", "0"], "--size 0 leaves nothing"),
        (["--problems", "9"], "--problems and --levels are for the pool tiny"),
        ([], "curate needs a model"),
        (["--model", "tiny-1m", "--temperature", "0"], "at temperature 0"),
        (["--out", "curated.csv"], "does not end in .jsonl"),
        (["--out", "POOL"], "--out is the pool itself"),
    ],
)
def test_mistakes_are_told_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    pool = str(sums(tmp_path / "sums.jsonl"))
    words = [pool if word == "POOL" else word for word in words]
    out = [] if "--out" in words else ["--out", str(tmp_path / "curated.jsonl")]
    assert main(["data", "curate", pool, *words, *out]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["sums.jsonl"]
