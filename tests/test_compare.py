"""Comparing two evaluations: pairing, flips, tests, and what the command says about them and about mistakes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from reasonlab.errors import UserError
from reasonlab.evaluate.compare import compare
from reasonlab.evaluate.compare_command import run
from reasonlab.evaluate.control import FORCED_SUITE
from reasonlab.evaluate.statistics import (
    holm,
    mcnemar,
    minimum_detectable_effect,
    paired_difference,
    score_interval,
    sign_flip,
)
from reasonlab.runs import RunRecord

Row = dict[str, Any]
CONFIG = "[evaluate]\ntemperature = 0.6\n\n[rollout]\nmax_tokens = 160\n"


def row(problem: str, verdict: str = "correct", tokens: int = 10, **more: object) -> Row:
    family = problem.partition("/")[0]
    return {
        "problem": problem,
        "family": family,
        "question": f"{problem}?",
        "sample": 0,
        "verdict": verdict,
        "tokens": tokens,
        "finish": "stop",
        **more,
    }


def evaluation(seed: int, gain: float = 0.0, longer: float = 0.0, k: int = 4, questions: int = 40) -> list[Row]:
    """Answers to problems of two families whose difficulties are the same for every seed."""
    chances = np.random.default_rng(0).beta(1, 1, size=questions)
    generator = np.random.default_rng(seed)
    return [
        row(
            f"{'gcd' if i % 2 else 'sum'}/{i:03d}",
            "correct" if generator.random() < chance + gain else "wrong",
            int(generator.gamma(9, 10) + longer),
            sample=sample,
        )
        for i, chance in enumerate(chances)
        for sample in range(k)
    ]


def means(rows: list[Row], family: str = "") -> tuple[np.ndarray, np.ndarray]:
    rows = [r for r in rows if r["problem"].startswith(family)]
    problems = list(dict.fromkeys(r["problem"] for r in rows))
    right = [np.mean([r["verdict"] == "correct" for r in rows if r["problem"] == p]) for p in problems]
    return np.array(right), np.array([np.mean([r["tokens"] for r in rows if r["problem"] == p]) for p in problems])


def test_numbers_are_those_of_the_statistics() -> None:
    a, b = evaluation(1), evaluation(2, gain=0.2, longer=30)
    found = compare(a, b)
    (right_a, tokens_a), (right_b, tokens_b) = means(a), means(b)
    for change, before, after in [
        (found.total.accuracy, right_a, right_b),
        (found.total.tokens, tokens_a, tokens_b),
    ]:
        assert (change.difference, change.p_t) == paired_difference(before, after)
        assert change.p_permutation == change.p_holm == sign_flip(after - before)
        assert change.detectable == minimum_detectable_effect(after - before)
    grades = [
        [r["verdict"] == "correct" for r in b if r["problem"] == p] for p in dict.fromkeys(r["problem"] for r in b)
    ]
    assert found.total.b.accuracy == score_interval(grades)
    assert found.total.problems == 40
    assert found.total.a.samples == 4
    assert found.total.mcnemar is None
    assert found.total.token_ratio.estimate == pytest.approx(tokens_b.mean() / tokens_a.mean())


def test_panels_are_corrected_for_their_number() -> None:
    a, b = evaluation(1), evaluation(2, gain=0.1)
    found = compare(a, b)
    assert [panel.name for panel in found.panels] == ["sum", "gcd"]
    raw = [sign_flip(means(b, name)[0] - means(a, name)[0]) for name in ("sum", "gcd")]
    assert [panel.accuracy.p_permutation for panel in found.panels] == raw
    assert [panel.accuracy.p_holm for panel in found.panels] == pytest.approx(holm(raw))


def test_flips_and_mcnemar_with_one_answer_a_problem() -> None:
    a = [row("sum/1", "wrong"), row("sum/2", "wrong"), row("sum/3"), row("sum/4"), row("sum/5")]
    b = [row("sum/5"), row("sum/4", "wrong", 5), row("sum/3"), row("sum/2", tokens=30), row("sum/1", tokens=20)]
    found = compare(a, b)
    assert found.total.gained == ("sum/1", "sum/2")
    assert found.total.lost == ("sum/4",)
    assert (found.total.longer, found.total.shorter) == (2, 1)
    assert found.total.mcnemar == mcnemar(2, 1)
    assert found.panels == ()  # one family: the total says it all


def test_problems_of_different_benchmarks_are_not_confused() -> None:
    a = [row("1", benchmark="aime24"), row("1", "wrong", benchmark="aime25", question="another?")]
    b = [row("1", "wrong", benchmark="aime25", question="another?"), row("1", benchmark="aime24")]
    found = compare(a, b)
    assert found.total.problems == 2
    assert found.total.gained == found.total.lost == ()
    assert [panel.name for panel in found.panels] == ["aime24", "aime25"]


def test_one_benchmark_is_split_by_family() -> None:
    rows = [row("sum/1", benchmark="tiny"), row("gcd/1", benchmark="tiny")]
    assert [panel.name for panel in compare(rows, rows).panels] == ["sum", "gcd"]


def test_what_has_no_partner_or_no_grade_is_left_out_and_counted() -> None:
    a = [row("sum/1"), row("sum/2"), row("sum/3", "timeout"), row("sum/4"), row("sum/4", "error", sample=1)]
    b = [row("sum/1"), row("sum/3"), row("sum/4"), row("sum/5"), row("sum/6")]
    found = compare(a, b)
    assert (found.total.problems, found.only_a, found.only_b, found.unpaired_ungraded) == (2, 1, 2, 1)
    assert (found.total.a.ungraded, found.total.b.ungraded) == (1, 0)
    assert found.total.a.accuracy.estimate == 1.0


def test_lengths_by_verdict_censoring_and_both_right() -> None:
    a = [row("sum/1", tokens=10), row("sum/2", "wrong", 160, finish="length"), row("sum/3", tokens=30)]
    b = [row("sum/1", tokens=14), row("sum/2", tokens=90), row("sum/3", tokens=40)]
    found = compare(a, b).total
    assert found.a.truncated == pytest.approx(1 / 3)
    assert found.a.lengths.every.is_lower_bound
    assert found.a.lengths.correct is not None
    assert not found.a.lengths.correct.is_lower_bound
    assert found.both_right_tokens is not None
    assert found.both_right_tokens.estimate == pytest.approx(7)  # (4 + 10) / 2, without the newly solved problem
    assert found.b.lengths.wrong is None
    looping = compare(a, [{**r, "finish": "repetition"} for r in b]).total.b
    assert (looping.truncated, looping.repeating, looping.lengths.every.is_lower_bound) == (0.0, 1.0, True)


def test_unknown_lengths_and_answers_that_never_came() -> None:
    """An answer that failed is ungraded and has no length; asked again, the one that came counts, in either order."""
    failed = row("sum/1", "error", 0, finish="error")
    a = [failed, row("sum/1", tokens=20), row("sum/2", tokens=-1), row("sum/3", "wrong", 30)]
    b = [row("sum/1", tokens=25), failed, row("sum/2", "wrong", 40), row("sum/3", tokens=36)]
    found = compare(a, b).total
    assert (found.problems, found.a.ungraded, found.gained, found.lost) == (3, 0, ("sum/3",), ("sum/2",))
    assert found.tokens is not None
    assert found.tokens.difference.estimate == pytest.approx(5.5)  # sum/2 has no length in A
    assert found.a.lengths is not None
    assert found.a.lengths.every.tokens.estimate == 25
    blind = compare([{**r, "tokens": -1} for r in a], b)
    assert blind.total.tokens is blind.total.dominance is blind.total.a.lengths is None
    assert blind.total.accuracy == found.accuracy


def test_dominance_and_the_direction_of_differences() -> None:
    a, b = evaluation(1), evaluation(1)
    for number, r in enumerate(b):
        r["tokens"] -= 1 + number // 4 % 2
    next(r for r in b if r["verdict"] == "wrong")["verdict"] = "correct"
    found = compare(a, b).total
    assert (found.dominance.a, found.dominance.b) == (0.0, 1.0)
    assert found.tokens.difference.estimate == pytest.approx(-1.5)
    turned = compare(b, a).total
    assert turned.dominance.a == 1.0
    assert compare(a, a).total.dominance is None, "the same everywhere says nothing about other problems"


def test_two_samples_of_one_model_rarely_differ() -> None:
    found = [compare(evaluation(s, k=2), evaluation(1000 + s, k=2)).total for s in range(60)]
    assert sum(c.accuracy.p_permutation <= 0.05 for c in found) <= 8
    assert sum(c.tokens.p_permutation <= 0.05 for c in found) <= 8


def test_differences_without_scatter_leave_an_interval_and_no_claims(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All wrong on both sides and cut at two limits: from n problems no certainty follows."""
    for n in (2, 4, 30):
        a = [row(f"sum/{i}", "wrong", 32, finish="length") for i in range(n)]
        b = [{**r, "tokens": 8} for r in a]
        paths = [write(tmp_path / name, rows) for name, rows in (("a.jsonl", a), ("b.jsonl", b))]
        assert run([*paths, "--json"]) == 0
        total = json.loads(capsys.readouterr().out)["total"]
        accuracy, tokens = total["accuracy"], total["tokens"]
        assert accuracy["difference"]["estimate"] == 0
        assert (1 - accuracy["difference"]["high"]) ** n == pytest.approx(0.05)
        assert accuracy["difference"]["low"] == -accuracy["difference"]["high"]
        assert tokens["difference"] == {"estimate": -24.0, "low": None, "high": None, "level": 0.95}
        assert total["token_ratio"] == {"estimate": 0.25, "low": None, "high": None, "level": 0.95}
        assert accuracy["p_t"] is accuracy["detectable"] is tokens["p_t"] is tokens["detectable"] is None
        assert total["dominance"] is None
        assert accuracy["p_permutation"] == 1
        assert tokens["p_permutation"] == pytest.approx(2.0 ** (1 - n))
        assert run(paths) == 0
        words = capsys.readouterr().out
        for absent in ("four times in five", ", t p", "dominates", " nan", "inf"):
            assert absent not in words.partition("shared problems")[2]
        assert "accuracy: 0.0 [−" in words
        assert "tokens: −24.0, 0.25 times (permutation p" in words
        assert "note: accuracy and length compared on fewer than 5 problems, or changed by the same on all" in words


def test_few_problems_with_scatter_keep_their_interval_but_claim_no_power() -> None:
    a = [row("sum/1", "wrong", 30), row("sum/2", "wrong", 40), row("sum/3", "correct", 50)]
    b = [row("sum/1", "correct", 20), row("sum/2", "wrong", 35), row("sum/3", "correct", 45)]
    found = compare(a, b).total
    assert found.accuracy.difference == paired_difference([0, 0, 1], [1, 0, 1])[0]
    assert np.isnan(found.accuracy.p_t)
    assert np.isinf(found.tokens.detectable)
    assert found.dominance is None


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ([row("sum/1")], [row("sum/2")], "share no problem"),
        ([], [row("sum/2")], "A holds no answers"),
        ([row("sum/1")], [{"problem": "sum/1", "tokens": 3}], "row 1 of B has no 'verdict'"),
        ([row("sum/1"), row("sum/1")], [row("sum/1")], "A holds answer 0 to problem sum/1 twice"),
        ([row("sum/1")], [row("sum/1", question="else?")], "asks different questions"),
        ([row("sum/1", "error")], [row("sum/1")], "no shared problem has a graded answer"),
    ],
)
def test_mistakes_are_explained(a: list[Row], b: list[Row], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        compare(a, b)
    assert error.value.remedy


def write(path: Path, rows: list[Row]) -> str:
    data = b"".join(orjson.dumps(r) + b"\n" for r in rows)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.fixture
def run_directory(tmp_path: Path) -> str:
    record = RunRecord.create(tmp_path / "run", CONFIG, ["train"])
    for step, gain in [(0, 0.0), (10, 0.3), (20, 0.2)]:
        record.evaluation("tiny", step, evaluation(step, gain, longer=step))
    record.close()
    return str(tmp_path / "run")


def test_the_command_speaks_in_whole_sentences(run_directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([run_directory, run_directory, "--step-a", "0"]) == 0
    output = capsys.readouterr().out
    assert "40 shared problems" in output
    assert "tiny@0" in output
    assert "tiny@20" in output  # the last one
    sentence = next(line for line in output.splitlines() if line.startswith("B: avg@4 = "))
    for part in ("[", "40 questions", "T=0.6", "160 tokens at most", "0.0 % truncated", "tokens/answer", "per correct"):
        assert part in sentence
    for part in ("accuracy: +", "permutation p", "four times in five", "problems gained", "p (Holm)", "dominates"):
        assert part in output
    assert "selected" not in output


def test_the_best_step_is_marked_as_selected(run_directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    run([run_directory, run_directory, "--step-a", "0", "--step-b", "10"])
    assert "note: B is step 10" in (output := capsys.readouterr().out)
    assert "best of 3 evaluations, so biased upward" in output


def test_files_runs_and_json(run_directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**r, "temperature": 1.0, "max_tokens": 80} for r in evaluation(7, gain=0.1)]
    plain, packed = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl.gz", evaluation(8))
    assert run([plain, packed, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["a"]["temperature"] == 1.0
    assert found["b"]["temperature"] is None
    assert found["total"]["accuracy"] == compare(rows, evaluation(8)).as_dict()["total"]["accuracy"]
    assert set(found["total"]["gained"]) <= {r["problem"] for r in rows}
    assert run([plain, run_directory]) == 0
    assert "sampled differently (A T=1, 80 tokens at most; B T=0.6" in capsys.readouterr().out


def test_evaluation_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `reasonlab eval --out DIR` keeps them; a half-written last line is not an answer yet."""
    directory = tmp_path / "served"
    directory.mkdir()
    rows = [{**r, "tokens": -1} for r in evaluation(3)]
    overlap = {"pool": "pool.jsonl", "problems": {"sum": ["sum/000", "sum/002"], "gcd": None}}
    settings = {"sampling": {"temperature": 0.6, "top_p": 0.95, "max_tokens": 4096}, "about": {"overlap": overlap}}
    (directory / "settings.json").write_bytes(orjson.dumps(settings))
    write(directory / "answers.jsonl", rows)
    with (directory / "answers.jsonl").open("ab") as file:
        file.write(b'{"problem": "su')
    other = write(tmp_path / "b.jsonl", evaluation(4))
    assert run([str(directory), other]) == 0
    output = capsys.readouterr().out
    for part in (
        "T=0.6, top-p 0.95, 4,096 tokens at most",
        "unknown tokens/answer",
        "OVERLAP: 2 problems of A are in its",
    ):
        assert part in output
    assert "dominates" not in output
    assert "unfinished" not in output, "nothing says how many answers there are to be"
    settings |= {"k": 4, "benchmarks": {"sum": {"questions": 1000}, "gcd": {"questions": 20}}}
    (directory / "settings.json").write_bytes(orjson.dumps(settings))
    assert run([str(directory), other]) == 0
    assert f"note: A is unfinished: {len(rows)} of 4,080 answers" in capsys.readouterr().out
    with pytest.raises(UserError, match="is one evaluation"):
        run([str(directory), other, "--step-a", "0"])


def test_json_has_no_infinities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one.jsonl", [row("sum/1", "wrong")])
    assert run([one, one, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["total"]["accuracy"]["detectable"] is None
    assert run([one, one]) == 0
    words = capsys.readouterr().out
    assert "none correct" in words
    assert "1 shared problem;" in words
    assert "(1 question;" in words
    assert "inf" not in words.partition("shared problem")[2]
    assert "∞" not in words
    assert "would be found" not in words


def test_wrong_words_are_explained(run_directory: str, tmp_path: Path) -> None:
    answers = write(tmp_path / "a.jsonl", evaluation(1))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"problem": ')
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text("1\n2\n")
    for words, says in [
        (["no/such/run", answers], "does not exist"),
        ([str(tmp_path), answers], "there is no run in"),
        ([run_directory, answers, "--step-a", "7"], "no tiny evaluation at step 7. --step-a can be 0, 10, 20"),
        ([answers, answers, "--step-b", "7"], "--step-b chooses an evaluation of a run"),
        ([run_directory, answers, "--suite", "k15"], "no evaluation of suite 'k15'. It has tiny: choose one"),
        ([str(broken), answers], "not a file of JSON lines"),
        ([str(numbers), answers], "not JSON objects"),
    ]:
        with pytest.raises(UserError, match=says):
            run(words)


def run_with(directory: Path, *suites: str) -> str:
    record = RunRecord.create(directory, CONFIG, ["train"])
    for suite in suites:
        record.evaluation(suite, 0, evaluation(len(suite)))
    record.close()
    return str(directory)


def test_runs_are_compared_on_the_suite_that_they_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_with(tmp_path / "first", "gsm8k", "own/set")
    second = run_with(tmp_path / "second", "own/set", "svamp")
    tiny = run_with(tmp_path / "third", "tiny", FORCED_SUITE)
    answers = write(tmp_path / "a.jsonl", evaluation(1))
    assert run([first, second, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["a"]["source"].partition("first ")[2].startswith("own")
    assert run([tiny, tiny]) == 0, "the control is not what is meant"
    assert "tiny@0" in capsys.readouterr().out
    assert run([run_with(tmp_path / "one", "gsm8k"), answers]) == 0
    assert "gsm8k@0" in capsys.readouterr().out
    for words, says in [
        ([first, answers], r"several suites to compare: gsm8k, own/set. Choose one with --suite"),
        ([first, tiny], r"first has gsm8k, own/set; .*third has tiny, tiny-forced"),
        ([run_with(tmp_path / "empty"), answers], "empty has none at all yet"),
    ]:
        with pytest.raises(UserError, match=says):
            run(words)


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(["--help"])
    assert exit_.value.code == 0
    assert "example: reasonlab compare" in capsys.readouterr().out
