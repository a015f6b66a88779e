"""The two studies of Kimi k1.5 on a language model: panels are benchmarks, and a long model may exist already."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from language_model_runs import pool, rows_file, teach

from reasonlab.cli import main
from reasonlab.config import to_toml, validate
from reasonlab.evaluate.evaluator import Answer
from reasonlab.figures.tables import ARMS, PANELS, ArmRow, PanelRow, read_table
from reasonlab.studies import k15_dynamics, long2short
from reasonlab.studies.plan import Plan
from reasonlab.studies.recipe import own_recipe
from reasonlab.studies.scores import Scores


def sums(path: Path, numbers: range, plus: str) -> str:
    rows = [{"id": f"{plus}{n}", "question": f"What is {n} {plus} {n}?", "answer": str(2 * n)} for n in numbers]
    return rows_file(path, rows)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach(tmp_path_factory.mktemp("taught"))


@pytest.fixture
def common(tmp_path: Path) -> dict[str, Any]:
    added, twice = sums(tmp_path / "added.jsonl", range(20, 24), "and"), sums(tmp_path / "twice.jsonl", range(3), "or")
    return {
        "iterations": 2,
        "threads": 1,
        "model": {"path": "somewhere/else"},  # --model takes its place
        "problems": {"path": pool(tmp_path / "pool.jsonl")},
        "rollout": {"prompts": 3, "samples": 8, "max_tokens": 24, "repetition_window": 0},
        "method": {"type": "mirror_descent"},
        "learner": {"lr": 1e-4},
        "evaluate": {"every": 1, "suite": f"{added},{twice}", "temperature": 0.0},
    }


def write_recipe(path: Path, common: dict[str, Any], arms: str, study: str) -> str:
    text = to_toml(validate(common, "test"))
    path.write_text(f"{text}\n{arms}\n[study]\n{study}\n")
    return str(path)


def test_k15_dynamics_of_a_language_model(
    taught: Path, tmp_path: Path, common: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(
        tmp_path / "k15-dynamics-mini.toml",
        common,
        '[arms.mirror-descent]\n[arms.grpo]\nmethod = { type = "grpo" }',
        "seeds = 1",
    )
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs/k15-dynamics-mini"  # where recipes/long2short-gsm8k.toml looks for its own
    assert main(["study", "k15-dynamics", "--recipe", recipe, "--model", str(taught)]) == 0
    rows = read_table(out / PANELS, PanelRow)
    assert {row.panel for row in rows} == {"total", "added", "twice"}
    assert {row.arm for row in rows} == {"mirror-descent", "grpo"}
    assert {(row.panel, row.questions) for row in rows} == {("total", 7), ("added", 4), ("twice", 3)}
    record = json.loads((out / "verdicts.json").read_text())
    assert record["protocol"]["suite"] == common["evaluate"]["suite"]
    assert "beats-grpo" in {claim["id"] for claim in record["claims"]}
    assert (out / "dynamics.png").exists()


LONG2SHORT = """
[arms.long]
[arms.rl]
reward = { length_weight = 0.5 }
[arms.shortest]
iterations = 1
method = { type = "sft", data = "shortest.jsonl" }
[arms."merge+rs"]
iterations = 1
method = { type = "sft", data = "merge+rs.jsonl" }
[arms.dpo]
iterations = 1
method = { type = "dpo", data = "pairs.jsonl" }
"""


@pytest.mark.parametrize("given", [True, False])
def test_long2short_of_a_language_model(
    taught: Path,
    tmp_path: Path,
    common: dict[str, Any],
    given: bool,
) -> None:
    settings = "seeds = 1\nquestions = 100\nsamples = 1\ntemperature = 0.0\nsampled_problems = 6\nsampled_answers = 16"
    common["evaluate"]["every"] = 0
    if given:  # from elsewhere: nothing is known of how it was trained
        shutil.copytree(taught, tmp_path / "long", ignore=shutil.ignore_patterns("trainer"))
        settings += f'\nlong_model = "{tmp_path / "long"}"'
    recipe = write_recipe(tmp_path / "short.toml", common, LONG2SHORT, settings)
    out = tmp_path / "short"
    assert main(["study", "long2short", "--recipe", recipe, "--model", str(taught), "--out", str(out)]) == 0
    rows = read_table(out / ARMS, ArmRow)
    assert {row.panel for row in rows} == {"all benchmarks", "added", "twice"}
    assert {row.arm for row in rows} == {"base", "long", "shortest", "merge", "merge+rs", "dpo", "rl"}
    by_arm = {row.arm: row for row in rows if row.panel == "all benchmarks"}
    assert by_arm["long"].questions == 7
    if given:  # nothing lies between them
        assert by_arm["base"].tokens == by_arm["long"].tokens == by_arm["merge"].tokens
    assert (out / "runs/seed-0/long").exists() is not given
    assert (out / "long2short.png").exists()


def test_problems_that_are_asked_at_the_end_are_not_trained_on(
    taught: Path, tmp_path: Path, common: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = sums(tmp_path / "asked.jsonl", range(2), "plus")  # the first two of the pool
    common["evaluate"] |= {"every": 0, "suite": asked}
    settings = "questions = 100\nsamples = 1\ntemperature = 0.0\nsampled_problems = 6\nsampled_answers = 16"
    recipe = write_recipe(tmp_path / "short.toml", common, LONG2SHORT, settings)
    out = tmp_path / "short"
    words = ["study", "long2short", "--recipe", recipe, "--model", str(taught), "--out", str(out)]
    assert main([*words, "--dry-run"]) == 2
    assert "not known beforehand" in capsys.readouterr().err
    assert main(words) == 0
    learned = "".join(path.read_text() for path in (out / "runs/seed-0").glob("*.jsonl"))
    assert '"p2"' in learned or '"p3"' in learned or '"p4"' in learned or '"p5"' in learned
    assert '"p0"' not in learned
    assert '"p1"' not in learned


def test_a_model_that_no_two_arms_share_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "rm-scaling", "--scale", "cpu", "--model", "tiny-1m", "--dry-run"]) == 2
    assert "each has its own" in capsys.readouterr().err


def test_questions_with_the_same_id_in_two_benchmarks_stay_two() -> None:
    def answer(family: str, verdict: str) -> Answer:
        return Answer("1", family, 0, "?", "2", 0, verdict, "2", 5, "stop", "2")

    scores = Scores.of([[answer("a", "correct"), answer("b", "wrong")]])
    assert scores.accuracy.tolist() == [[1.0, 0.0]]


def test_a_warm_up_of_the_tiny_kind_and_a_missing_long_model_are_refused(
    taught: Path,
    tmp_path: Path,
    common: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["study", "long2short", "--model", str(taught), "--out", str(tmp_path / "out"), "--recipe"]
    warmed = LONG2SHORT + '[arms.warm-up]\nmethod = { type = "sft", data = "warm-up.jsonl" }\n'
    assert main([*words, write_recipe(tmp_path / "warm.toml", common, warmed, "seeds = 1")]) == 2
    assert "that of the tiny models" in capsys.readouterr().err
    missing = write_recipe(tmp_path / "none.toml", common, LONG2SHORT, 'long_model = "nowhere"')
    assert main([*words, missing]) == 2
    assert "no long model" in capsys.readouterr().err


@pytest.mark.parametrize("study", [k15_dynamics, long2short], ids=lambda study: study.name)
def test_the_recipes_for_gsm8k_have_all_that_their_studies_need(study: ModuleType) -> None:
    recipe = own_recipe(Path(__file__).parents[1] / "recipes" / f"{study.name}-gsm8k.toml")
    assert set(study.needed) <= set(recipe.arms) <= set(study.arms)
    assert {config.device for config in recipe.arms.values()} == {"cuda"}
    settings = recipe.settings.model_copy(update={"long_model": ""})  # which is not there yet
    plan = Plan(study.name, replace(recipe, settings=settings), (0,), Path("out"), [])
    names = [piece.name for piece in study.pieces(plan)]
    assert len(names) == len(set(names)) >= len(recipe.arms)
