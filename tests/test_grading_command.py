"""`reasonlab grade`: rows in, the same rows with verdicts out; and the labelled cases, where they are at hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from reasonlab.errors import UserError
from reasonlab.grading.command import run
from reasonlab.grading.verifier import grade_text

CASES = Path(__file__).resolve().parents[2] / "shared" / "grading" / "cases.jsonl"


def grade_file(lines: list[str], folder: Path, **more: object) -> list[dict[str, object]]:
    source, out = folder / "rows.jsonl", folder / "out" / "graded.jsonl"
    source.write_text("\n".join(lines))
    assert run(argparse.Namespace(file=source, out=out, json=False, **more)) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_come_back_in_order_with_their_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"id": 1, "prediction": r"so \boxed{\frac12}", "gold": "0.5", "benchmark": "math500"},
        {"id": 2, "prediction": "1/3", "gold": "0.5", "kind": "answer"},
        {"id": 3, "prediction": r"\boxed{\lim_{x\to 0}\frac{\sin x}{x}}", "gold": "1"},
        {"id": 4, "prediction": "7", "gold": 7, "kind": "answer"},
    ]
    graded = grade_file([json.dumps(row) for row in rows], tmp_path)
    assert [row["id"] for row in graded] == [1, 2, 3, 4]
    assert [row["verdict"] for row in graded] == ["correct", "wrong", "correct", "correct"]
    assert graded[0]["benchmark"] == "math500"
    assert all({"extracted", "rule", "seconds"} <= row.keys() for row in graded)
    assert graded[0]["extracted"] == r"\frac12"
    assert "4 rows: 3 correct, 1 wrong, 0 error, 0 timeout" in capsys.readouterr().err


def test_a_file_without_one_graded_row_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "graded.jsonl"
    source.write_text('\n{"gold": "1"}\n')
    assert run(argparse.Namespace(file=source, out=out, json=False)) == 1
    assert "first error: line 2: the row has no text `prediction`" in capsys.readouterr().err
    source.write_text("\n\n")
    with pytest.raises(UserError, match="holds no rows"):
        run(argparse.Namespace(file=source, out=tmp_path / "none.jsonl", json=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graded.jsonl", "rows.jsonl"]


def test_a_bad_row_is_an_error_row_and_the_others_are_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "not json",
        "[1, 2]",
        '{"gold": "1"}',
        '{"prediction": "1", "gold": null}',
        '{"prediction": "1", "gold": ""}',
    ]
    lines += ['{"prediction": "1", "gold": "1", "kind": "poem"}', '{"prediction": "1", "gold": "1", "question": 7}']
    lines += ["", '{"prediction": "Answer: 1", "gold": "1"}']
    graded = grade_file(lines, tmp_path)
    assert [row["verdict"] for row in graded] == ["error"] * 7 + ["correct"]
    assert (graded[0]["row"], graded[0]["line"], graded[0]["rule"]) == ("not json", 1, "not JSON")
    assert graded[1]["rule"] == "not a JSON object"
    assert "first error: line 1: not JSON" in capsys.readouterr().err
    assert all(row["rule"] for row in graded)


def test_the_policy_can_be_strict(tmp_path: Path) -> None:
    row = json.dumps({"prediction": "there are 12", "gold": "12"})
    assert grade_file([row], tmp_path)[0]["verdict"] == "correct"
    assert grade_file([row], tmp_path, policy="explicit")[0]["verdict"] == "wrong"
    with pytest.raises(UserError, match="no policy"):
        grade_file([row], tmp_path, policy="strict")


def test_a_benchmark_brings_its_own_policy(tmp_path: Path) -> None:
    rows = [
        {"prediction": "there are 12", "gold": "12", "benchmark": "math500"},  # its prompt asks for a box
        {"prediction": r"\boxed{12}", "gold": "12", "benchmark": "math500"},
        {"prediction": "there are 12", "gold": "12", "benchmark": "a set of my own"},
    ]
    graded = grade_file([json.dumps(row) for row in rows], tmp_path)
    assert [row["verdict"] for row in graded] == ["wrong", "correct", "correct"]


def test_a_missing_file_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        run(argparse.Namespace(file=tmp_path / "none.jsonl", out=None, json=False))


@pytest.mark.parametrize(("out", "told"), [(".", "is a directory"), ("rows.jsonl/graded.jsonl", "cannot write")])
def test_a_place_that_cannot_be_written_is_told(out: str, told: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prediction": "1", "gold": "1"}\n')
    with pytest.raises(UserError, match=told):
        run(argparse.Namespace(file=rows, out=tmp_path / out, json=False))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.skipif(not CASES.exists(), reason="the labelled cases are not beside this checkout")
def test_other_projects_labelled_cases() -> None:
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    core = [case for case in cases if case["policy"] is None]
    verdicts = [grade_text(c["pred"], c["gold"], "free", c["kind"]).verdict == "correct" for c in core]
    agree = sum(v == c["correct"] for v, c in zip(verdicts, core, strict=True))
    assert agree / len(core) >= 0.97
    assert sum(v and not c["correct"] for v, c in zip(verdicts, core, strict=True)) <= 4
