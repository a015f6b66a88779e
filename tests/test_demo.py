"""The demo from start to finish, on a small recipe; and the packaged recipe itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_loop import config

from reasonlab.config import Config
from reasonlab.errors import UserError
from reasonlab.evaluate.control import ALONE
from reasonlab.runs import RunReader, RunRecord
from reasonlab.studies import demo
from reasonlab.train.loop import Trainer


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
def test_demo_without_time_says_so_and_goes_on_to_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "demo"
    assert demo.run_demo(run, seed=0, minutes=0.1, threads=1) == 0
    assert json.loads((run / "summary.json").read_text())["iterations"] == 0
    assert RunReader(run).run["status"] == "stopped at the time limit"
    words = capsys.readouterr().out
    assert "stopped at the time limit after 0 of 3 iterations" in words
    assert words.count("evaluation at iteration 0, held-out:") == 1
    assert "before any training" in words
    assert ALONE in words
    assert "No control" not in words
    assert f"reasonlab demo --resume {run}" in words
    assert demo.resume_demo(run, minutes=4) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["iterations"] == 3
    assert summary["in_words"].startswith("Iteration 0 to 3")
    assert "(checkpoints/final)" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_an_interrupted_demo_says_how_it_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, iterate = tmp_path / "demo", Trainer._iteration

    def interrupted(trainer: Trainer, number: int) -> None:
        iterate(trainer, number)
        trainer.stop_requested = True

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_iteration", interrupted)
        assert demo.run_demo(run, seed=5, minutes=4, threads=1) == 130
    assert f"Continue with: reasonlab demo --resume {run}" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"Continue it with --resume {run}"):
        demo.run_demo(run, seed=5, minutes=4, threads=1)
    assert demo.resume_demo(run, minutes=4) == 0
    assert "continuing after iteration 1 of 3 (checkpoints/step-000001)" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["seed"] == 5
    assert (run / "dynamics.png").exists()


def test_another_run_is_not_continued_as_a_demo(tmp_path: Path) -> None:
    RunRecord.create(tmp_path / "run", "", ["train", "smoke.toml"]).close()
    with pytest.raises(UserError, match=r"is no demo\. Continue it with: reasonlab train --resume"):
        demo.resume_demo(tmp_path / "run", minutes=4)


def test_packaged_recipe_keeps_training_and_evaluation_apart() -> None:
    recipe = demo.demo_config(seed=1, threads=2)
    assert recipe.seed == 1
    assert recipe.evaluate.split == "test"
    assert recipe.evaluate.forced_style


@pytest.mark.usefixtures("small")
def test_a_demo_that_was_killed_before_its_summary_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(demo, "draw_dynamics", killed)
        with pytest.raises(KeyboardInterrupt):
            demo.run_demo(tmp_path / "demo", seed=0, minutes=4.0, threads=1)
    assert RunReader(tmp_path / "demo").run["status"] == "finished"
    assert demo.resume_demo(tmp_path / "demo", minutes=4.0) == 0
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["iterations"] > 0
    assert (tmp_path / "demo" / "dynamics.png").exists()
    with pytest.raises(UserError, match="already ended"):
        demo.resume_demo(tmp_path / "demo", minutes=4.0)
