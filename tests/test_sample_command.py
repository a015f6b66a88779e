"""`reasonlab data sample` and what can be trained from its files."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from reasonlab.cli import main

SMOKE = Path(__file__).parent.parent / "recipes" / "smoke.toml"
SMALL = ["--problems", "16", "--levels", "1,2", "--samples", "6", "--max-tokens", "64", "--threads", "1"]


@pytest.mark.parametrize("keep", ["shortest", "pairs", "long"])
def test_what_is_kept_can_be_learned_from(tmp_path: Path, keep: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / f"{keep}.jsonl"
    assert main(["data", "sample", "tiny-0.3m", "--keep", keep, "--out", str(out), *SMALL]) == 0
    rows = [orjson.loads(line) for line in out.read_bytes().splitlines()]
    said = capsys.readouterr().out
    assert f"{len(rows)} kept" in said
    assert "96 answers to 16 problems" in said
    assert rows
    assert all(row["id"].split("/")[2] == "train" for row in rows)
    if keep == "pairs":
        assert all(len(row["rejected"]) > len(row["response"]) for row in rows)
    method = ["--method.type", "dpo" if keep == "pairs" else "sft", "--method.data", str(out)]
    words = ["--iterations", "1", "--evaluate.every", "0", "--rollout.prompts", "4", "--out", str(tmp_path / "run")]
    assert main(["train", str(SMOKE), *method, *words]) == 0


def test_the_same_seed_gives_the_same_file_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        words = ["--keep", "shortest", "--out", str(tmp_path / name), "--seed", seed, *SMALL]
        assert main(["data", "sample", "tiny-0.3m", *words]) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--levels", "two"], "no list of levels"),
        (["--samples", "0"], "at least 1"),
        (["--path", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.jsonl"
    assert main(["data", "sample", "tiny-0.3m", "--keep", "shortest", "--out", str(out), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error:")
    assert what in error
    assert not out.exists()


def test_an_existing_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text("mine")
    assert main(["data", "sample", "tiny-0.3m", "--keep", "shortest", "--out", str(out)]) == 2
    assert out.read_text() == "mine"
