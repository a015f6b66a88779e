"""What a language model is trained and evaluated on: benchmarks held out, prompts left out, sets known by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from language_model_runs import event, rows_file, sums_recipe, trained
from test_loop import Silent

from reasonlab.config import validate
from reasonlab.errors import UserError
from reasonlab.runs import RunReader
from reasonlab.train.loop import start

LONG = "A farmer has {n} fields with twelve rows of apple trees in each of them. How many rows of trees does he have?"


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return sums_recipe(tmp_path)


def test_held_out_problems_are_not_trained_on(tmp_path: Path, recipe: dict[str, Any]) -> None:
    tests = [{"id": f"t{n}", "question": LONG.format(n=n), "answer": str(12 * n)} for n in (3, 4)]
    train = [{"id": f"p{n}", "question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(3)]
    copies = [{"id": "copy", "question": LONG.format(n=4).upper(), "answer": "48"}]
    raw = {**recipe, "problems": {"path": rows_file(tmp_path / "both.jsonl", train + copies)}, "iterations": 2}
    raw["evaluate"] = {"every": 1, "suite": rows_file(tmp_path / "farm.jsonl", tests)}
    reader, observer = trained(raw, tmp_path / "run")
    asked = {row["problem"] for step in (1, 2) for row in reader.rollouts(step)}
    assert asked == {"p0", "p1", "p2"}
    assert any("1 of 4 training problems are also in farm" in text for text in observer.notes)
    assert "1 of 4 training problems" in event(reader, "note")["text"]
    raw["problems"] = {"path": rows_file(tmp_path / "copies.jsonl", copies)}
    with pytest.raises(UserError, match="every training problem is one of farm"):
        start(validate(raw, "test"), tmp_path / "none", ["test"], Silent())
    raw["problems"] = {"path": "math500"}
    with pytest.raises(UserError, match="math500 is a benchmark"):
        start(validate(raw, "test"), tmp_path / "none", ["test"], Silent())


def test_the_tiny_world_can_be_asked_too(tmp_path: Path, recipe: dict[str, Any]) -> None:
    raw = {**recipe, "iterations": 1, "evaluate": {"every": 1, "problems": 4, "temperature": 0.0}}
    trainer = start(validate(raw, "test"), tmp_path / "run", ["test"], Silent())
    (panel,) = trainer.held_out.panels
    assert "\\boxed{}" in panel.asked(panel.problems[0]), "a language model must be told how to mark its answer"
    trainer.run()
    reader = RunReader(tmp_path / "run")
    assert reader.evaluation_suites() == ["tiny"], "the forced style is for tiny models"
    assert len(reader.evaluation("tiny", 1)) == 4


def test_long_prompts_can_be_left_out(tmp_path: Path, recipe: dict[str, Any]) -> None:
    rows = [{"id": f"p{n}", "question": "word " * n, "answer": "1"} for n in (1, 2, 40)]
    path = rows_file(tmp_path / "words.jsonl", rows)
    raw = {**recipe, "iterations": 1, "problems": {"path": path, "longest_prompt": 120}}
    reader, observer = trained(raw, tmp_path / "run")
    assert {row["problem"] for row in reader.rollouts(1)} == {"p1", "p2"}
    assert "1 of 3 prompts have more than 120 tokens and are left out" in observer.notes
    with pytest.raises(UserError, match="every prompt has more than 3 tokens"):
        start(validate({**raw, "problems": {"path": path, "longest_prompt": 3}}, "test"), tmp_path, [], Silent())


def test_a_report_beside_the_pool_is_told(tmp_path: Path, recipe: dict[str, Any]) -> None:
    file = Path(recipe["problems"]["path"])
    report = {"pools": [{"benchmarks": {"amc23": {"ids": ["a", "b"]}}}], "checked": {"amc23": 40}, "cleaned": False}
    file.with_name(file.name + ".overlap.json").write_text(json.dumps(report))
    reader, observer = trained({**recipe, "iterations": 1, "evaluate": {"every": 0}}, tmp_path / "run")
    assert event(reader, "overlap")["problems"] == {"amc23": 2}
    assert any("amc23 (2)" in text for text in observer.alarms)


def benchmark_data() -> Path:
    shared = Path(os.environ.get("REASONLAB_DATA") or Path(__file__).parents[2] / "shared" / "bench")
    if not (shared / "gsm8k_train.jsonl.gz").is_file():
        pytest.skip("benchmark data is not here (REASONLAB_DATA)")
    return shared


def test_a_file_of_test_problems_is_refused(tmp_path: Path, recipe: dict[str, Any]) -> None:
    shared = benchmark_data()
    raw = {**recipe, "data": str(shared), "problems": {"path": str(shared / "svamp.jsonl")}, "evaluate": {"every": 0}}
    with pytest.raises(UserError, match=r"1,000 of the 1,000 problems .* are in benchmarks"):
        start(validate(raw, "test"), tmp_path / "run", [], Silent())
    assert not (tmp_path / "run").exists()


def test_registered_sets_are_known_by_name(tmp_path: Path, recipe: dict[str, Any]) -> None:
    shared = benchmark_data()
    raw = {
        **recipe,
        "data": str(shared),
        "problems": {"path": "gsm8k_train"},
        "iterations": 1,
        "method": {"type": "sft"},
    }
    model = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**model, "max_position_embeddings": 4096}))
    raw |= {"evaluate": {"every": 1, "suite": "gsm8k", "problems": 3}, "rollout": {"prompts": 4, "max_tokens": 8}}
    reader, observer = trained(raw, tmp_path / "run")
    assert reader.evaluation_suites() == ["gsm8k_test"]
    assert len(reader.evaluation("gsm8k_test", 0)) == 3
    assert all("The answer is \\boxed{" in row["text"] and "<<" not in row["text"] for row in reader.rollouts(1))
    assert observer.alarms == [], "GSM8K's parts share nothing"
    assert not any("left out" in text or "without a solution" in text for text in observer.notes)
