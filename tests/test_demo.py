"""The demo from start to finish, on a small recipe; and the packaged recipe itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_loop import config

from reasonlab.config import Config
from reasonlab.runs import RunReader
from reasonlab.studies import demo


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def small_config(seed: int, threads: int) -> Config:
        return config(seed=seed, threads=threads, evaluate={"every": 2, "problems": 12, "levels": [1, 2]})

    monkeypatch.setattr(demo, "demo_config", small_config)


@pytest.mark.usefixtures("small")
def test_demo_writes_figure_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "demo"
    assert demo.run_demo(run, seed=3, minutes=4, threads=1) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["seed"] == 3
    assert summary["seconds"] > 0
    reader = RunReader(run)
    before, after = (reader.evaluation("tiny", step) for step in (0, 3))
    right = [np.array([row["verdict"] == "correct" for row in rows], float) for rows in (before, after)]
    accuracy = summary["accuracy"]
    assert accuracy["before"] == pytest.approx(right[0].mean())
    assert accuracy["after"] == pytest.approx(right[1].mean())
    assert accuracy["difference"] == pytest.approx((right[1] - right[0]).mean())
    assert accuracy["interval"][0] <= accuracy["difference"] <= accuracy["interval"][1]
    for part in (summary, summary["forced_style"], *summary["families"].values()):
        for name in ("accuracy", "tokens"):
            assert {"before", "after", "difference", "interval"} <= part[name].keys()
    assert set(summary["families"]) == {"sum", "word"}
    assert {"dynamics.png", "dynamics.svg", "dynamics.csv"} <= {path.name for path in run.iterdir()}
    words = capsys.readouterr().out
    assert summary["in_words"] in words
    assert f"reasonlab eval {run / 'checkpoints' / 'final'}" in words


@pytest.mark.usefixtures("small")
def test_demo_without_time_still_ends_with_a_summary(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    assert demo.run_demo(run, seed=0, minutes=0.0, threads=1) == 0
    assert json.loads((run / "summary.json").read_text())["iterations"] == 0
    assert RunReader(run).run["status"] == "stopped at the time limit"


def test_packaged_recipe_keeps_training_and_evaluation_apart() -> None:
    recipe = demo.demo_config(seed=1, threads=2)
    assert recipe.seed == 1
    assert recipe.evaluate.split == "test"
    assert recipe.evaluate.forced_style
