"""Both studies from the command line, on recipes that take seconds: results, killed and continued, refused."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.torch import load_file
from study_pieces import alive, children, heed_signals

from reasonlab.cli import main
from reasonlab.config import load_recipe
from reasonlab.errors import UserError
from reasonlab.figures import style
from reasonlab.figures.panel_grid import FORCED, TOTAL
from reasonlab.figures.tables import ARMS, PANELS, SLOPES, ArmRow, PanelRow, read_table
from reasonlab.model.ladder import resolve_model
from reasonlab.runs import RunReader
from reasonlab.studies import k15_dynamics as dynamics
from reasonlab.studies import long2short as shortening
from reasonlab.studies.command import keep_recipe
from reasonlab.studies.plan import Plan
from reasonlab.studies.recipe import parse_study

SHARED = """
iterations = 2
threads = 1
model = { path = "tiny-0.3m" }
problems = { families = ["sum", "word"], levels = [1, 2], pool = 32 }
rollout = { prompts = 4, samples = 2, max_tokens = 64 }
learner = { lr = 1e-3 }
checkpoint = { every = 1 }
method = { type = "mirror_descent" }
"""
DYNAMICS = (
    SHARED
    + """
evaluate = { every = 1, problems = 12, levels = [1, 2] }
[arms]
mirror-descent = {}
rest = { method = { type = "rest" } }
curriculum = { problems = { curriculum_from = 2, hard_level = 2 } }
other-size = { iterations = 1 }
"""
)
SHORTENING = (
    SHARED
    + """
evaluate = { every = 0, levels = [1, 2] }
[arms]
warm-up = { method = { type = "sft", data = "warm-up.jsonl" } }
long = {}
shortest = { method = { type = "sft", data = "shortest.jsonl" } }
"merge+rs" = { method = { type = "sft", data = "merge+rs.jsonl" } }
dpo = { method = { type = "dpo", data = "pairs.jsonl" } }
rl = { rollout = { max_tokens = 40 }, reward = { length_weight = 0.5 } }
[study]
questions = 12
warmup_problems = 24
warmup_samples = 2
sampled_problems = 24
sampled_answers = 4
"""
)
STUDIES = {"k15-dynamics": (DYNAMICS, (PANELS, SLOPES)), "long2short": (SHORTENING, (ARMS,))}


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pixels: the tests look at what is in the files, not at how sharp it is."""
    monkeypatch.setattr(style, "PNG_DPI", 40)


def words(study: str, where: Path, *more: str) -> list[str]:
    """The command line of a small study in `where`/out."""
    recipe = where / "mini.toml"
    if not recipe.exists():
        recipe.write_text(STUDIES[study][0])
    return ["study", study, "--recipe", str(recipe), "--out", str(where / "out"), *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a study that nobody disturbed, made when it is first asked for."""
    made_already: dict[str, Path] = {}

    def of(study: str) -> Path:
        if study not in made_already:
            where = tmp_path_factory.mktemp(study)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(style, "PNG_DPI", 40)
                assert main(words(study, where)) == 0
            made_already[study] = where / "out"
        return made_already[study]

    return of


def strict(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return content


@pytest.mark.parametrize("study", list(STUDIES))
def test_a_study_leaves_verdicts_tables_and_figures(
    study: str, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    out = finished(study)
    content = strict(out / "verdicts.json")
    keys = {"study", "scale", "seeds", "command", "commit", "hardware", "protocol", "claims", "arms"}
    assert keys <= content.keys()
    assert (content["study"], content["scale"], content["seeds"]) == (study, "mini", [0])
    assert content["command"].startswith(f"reasonlab study {study} --recipe ")
    assert content["protocol"]["model"] == "tiny-0.3m"
    assert all(claim["verdict"] in ("holds", "fails", "undecided") for claim in content["claims"])
    figures = sorted(path.name for path in out.iterdir() if path.suffix in (".png", ".svg"))
    assert len(figures) == (8 if study == "k15-dynamics" else 2)
    assert main(["figures", str(out), "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == figures
    assert all((tmp_path / name).read_bytes() == (out / name).read_bytes() for name in figures)


def test_the_tables_of_k15_dynamics_are_those_of_its_runs(finished: Callable[[str], Path]) -> None:
    out = finished("k15-dynamics")
    rows = {(row.arm, row.panel, row.iteration): row for row in read_table(out / PANELS, PanelRow)}
    trained = set(dynamics.arms) - {dynamics.GRPO}  # which the recipes of the tiny world leave out
    assert {arm for arm, _, _ in rows} == trained
    for arm in trained:
        reader = RunReader(out / "runs" / "seed-0" / arm)
        last = 1 if arm == dynamics.OTHER_SIZE else 2
        assert reader.evaluation_steps("tiny") == list(range(last + 1))
        for step in range(last + 1):
            answers = reader.evaluation("tiny", step)
            assert rows[arm, TOTAL, step].accuracy == np.mean([a["verdict"] == "correct" for a in answers])
            assert rows[arm, TOTAL, step].tokens == pytest.approx(np.mean([a["tokens"] for a in answers]))
        forced = reader.evaluation("tiny-forced", last)
        assert rows[arm, FORCED, last].accuracy == np.mean([a["verdict"] == "correct" for a in forced])
    content = strict(out / "verdicts.json")
    for arm in content["arms"]:
        reader = RunReader(out / "runs" / "seed-0" / arm["arm"])
        sampled = sum(row["tokens"] for step in reader.rollout_steps() for row in reader.rollouts(step))
        assert arm["generated_tokens"] == sampled > 0
    gain, style_, skill = (content["gain_split"][name][0] for name in ("gain", "style", "skill"))
    assert gain == pytest.approx(style_ + skill)


def test_the_table_of_long2short_is_that_of_its_answers(finished: Callable[[str], Path]) -> None:
    out = finished("long2short")
    rows = {(row.panel, row.arm): row for row in read_table(out / ARMS, ArmRow)}
    assert len(rows) == 2 * (len(shortening.FINISHED) + 2)
    for (panel, arm), row in rows.items():
        folder = out / "runs" if arm.startswith("base") else out / "runs" / "seed-0"
        lines = gzip.decompress((folder / "answers" / f"{arm}.jsonl.gz").read_bytes()).splitlines()
        answers = [one for one in map(orjson.loads, lines) if panel == shortening.ALL or one["level"] == 2]
        assert row.accuracy == pytest.approx(np.mean([one["verdict"] == "correct" for one in answers]))
        assert row.tokens == pytest.approx(np.mean([one["tokens"] for one in answers]))
        assert (row.questions * row.samples, row.samples) == (len(answers), 2)
    forced = gzip.decompress((out / "runs" / "answers" / "base, thinking forced.jsonl.gz").read_bytes()).splitlines()
    assert all(orjson.loads(line)["text"].startswith("<think>") for line in forced)

    cost = {arm["arm"]: arm["generated_tokens"] for arm in strict(out / "verdicts.json")["arms"]}
    root = out / "runs" / "seed-0"
    reader = RunReader(root / "rl")
    assert cost["rl"] == sum(row["tokens"] for step in reader.rollout_steps() for row in reader.rollouts(step))
    data = json.loads((root / "warm-up data" / "cost.json").read_text())["generated_tokens"]
    reader = RunReader(root / "long")
    assert cost["long"] - data == sum(row["tokens"] for step in (1, 2) for row in reader.rollouts(step))
    assert cost["shortest"] == cost["dpo"] > 0  # both learn from the same samples
    assert cost["merge"] == cost["base"] == 0


def test_every_shortening_starts_where_the_report_says(finished: Callable[[str], Path]) -> None:
    root = finished("long2short") / "runs" / "seed-0"
    start = {arm: load_recipe(root / arm / "config.toml").model.path for arm in shortening.arms}
    assert start["warm-up"] == "tiny-0.3m"
    assert start["long"] == str(root / "warm-up/checkpoints/final")
    assert {start[arm] for arm in ("shortest", "dpo", "rl")} == {str(root / "long/checkpoints/final")}
    assert start["merge+rs"] == str(root / "merge")
    base, long, merged = (
        load_file(directory / "model.safetensors")
        for directory in (resolve_model("tiny-0.3m"), root / "long/checkpoints/final", root / "merge")
    )
    for name, tensor in merged.items():
        np.testing.assert_allclose(tensor, (base[name] + long[name]) / 2, atol=1e-6)
    assert any((long[name] != base[name]).any() for name in base)


# --- continued, refused ----------------------------------------------------------------------------------------------


def killed(study: str, where: Path, moment: Callable[[Path], bool], sign: int, *more: str) -> None:
    """Start a study in a process of its own, kill it at a moment, and see all its processes end."""
    command = [sys.executable, "-m", "reasonlab.cli", *words(study, where, *more)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not moment(where / "out"):
        assert process.poll() is None, "it ended before the moment came"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workers = children(process.pid)
    process.send_signal(sign)
    assert process.wait(60) == -sign
    assert len(workers) >= (2 if more else 0)
    while any(map(alive, workers)):
        assert time.monotonic() < deadline, "a process went on without its study"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("study", "begun", "sign", "jobs"),
    [
        pytest.param(
            *("k15-dynamics", "runs/seed-0/rest/rollouts/000001.jsonl.gz", signal.SIGTERM, ("--jobs", "2")),
            marks=pytest.mark.slow,
        ),
        ("long2short", "runs/seed-0/shortest/rollouts/000001.jsonl.gz", signal.SIGKILL, ()),
    ],
)
def test_a_killed_study_is_continued_by_the_same_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: Callable[[str], Path],
    study: str,
    begun: str,
    sign: int,
    jobs: tuple[str, ...],
) -> None:
    killed(study, tmp_path, lambda out: (out / begun).exists(), sign, *jobs)
    monkeypatch.setattr("reasonlab.figures.redraw.redraw", lambda *_: [])  # another test looks at the figures
    out, whole = tmp_path / "out", finished(study)
    assert not (out / "verdicts.json").exists()
    left = {path: path.read_bytes() for path in (out / "runs").rglob("final/model.safetensors")}
    assert main(words(study, tmp_path)) == 0
    for name in STUDIES[study][1]:
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    claims = [strict(directory / "verdicts.json")["claims"] for directory in (out, whole)]
    assert claims[0] == claims[1]
    assert all(path.read_bytes() == data for path, data in left.items())


@pytest.mark.slow
def test_ctrl_c_lets_the_runs_of_all_processes_save(tmp_path: Path) -> None:
    (tmp_path / "mini.toml").write_text(DYNAMICS.replace("iterations = 2\n", "iterations = 500\n"))
    command = [sys.executable, "-m", "reasonlab.cli", *words("k15-dynamics", tmp_path, "--jobs", "2")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    runs = [tmp_path / "out/runs/seed-0" / arm for arm in (dynamics.MAIN, dynamics.REST)]
    while not all((run / "rollouts/000002.jsonl.gz").exists() for run in runs):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in output
    for run in runs:
        assert RunReader(run).run["status"] == "interrupted"
        assert (run / "checkpoints" / "latest").exists()


@pytest.mark.parametrize("piece", ["warm-up data", "samples", "merge", "merged samples"])
def test_a_piece_killed_before_its_cost_is_written_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    recipe = parse_study(SHORTENING, "mini", "mini.toml")
    settings = recipe.settings.model_copy(update={"warmup_problems": 4, "sampled_problems": 4})
    config, base = recipe.arms[shortening.LONG], resolve_model("tiny-0.3m")

    def work() -> None:
        match piece:
            case "warm-up data":
                shortening.warmup_data(str(base), config, settings, tmp_path)
            case "samples":
                shortening.long_samples(base, config, settings, tmp_path)
            case "merged samples":
                shortening.merged_samples(base, config, settings, tmp_path)
            case "merge":
                shortening.merge(str(base), base, 0.5, tmp_path / "merge")

    def killed_here(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shortening, "_write_cost", killed_here)
        with pytest.raises(KeyboardInterrupt):
            work()
    work()
    cost = tmp_path / piece / "cost.json"
    assert (json.loads(cost.read_text())["generated_tokens"] > 0) == (piece != "merge")
    before = cost.stat().st_mtime_ns
    work()
    assert cost.stat().st_mtime_ns == before, "what is done is not done again"


def test_a_finished_study_is_only_judged_again(
    finished: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = finished("long2short")
    before = strict(out / "verdicts.json")
    files = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")}
    capsys.readouterr()
    assert main(words("long2short", out.parent)) == 0
    assert "iteration" not in capsys.readouterr().out.split("claims")[0]
    assert strict(out / "verdicts.json")["claims"] == before["claims"]
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")} == files


@pytest.mark.parametrize(
    ("study", "change", "says"),
    [
        ("long2short", ("questions = 12", "questions = 24"), "begun with study.questions = 12, not 24"),
        ("long2short", ("max_tokens = 40", "max_tokens = 50"), "begun with arms.rl.rollout.max_tokens = 40, not 50"),
        ("k15-dynamics", ("lr = 1e-3", "lr = 1e-4"), "begun with arms.mirror-descent.learner.lr = 0.001, not 0.0001"),
    ],
)
def test_another_recipe_in_the_same_directory_is_refused(
    finished: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    study: str,
    change: tuple[str, str],
    says: str,
) -> None:
    out, recipe = finished(study), tmp_path / "other.toml"
    recipe.write_text(STUDIES[study][0].replace(*change))
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["study", study, "--recipe", str(recipe), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Choose another --out" in error
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files


def test_seeds_and_arms_may_be_added(tmp_path: Path) -> None:
    recipe = parse_study(DYNAMICS, "mini", "mini.toml")
    fewer = replace(recipe, arms={arm: recipe.arms[arm] for arm in (dynamics.MAIN, dynamics.REST)})
    more_seeds = replace(recipe, settings=recipe.settings.model_copy(update={"seeds": 3}))
    for one, seeds in ((fewer, (0,)), (more_seeds, (0, 1, 2)), (fewer, (5,))):
        keep_recipe(Plan(dynamics.name, one, seeds, tmp_path, []))
    assert json.loads((tmp_path / "study.json").read_text())["arms"].keys() == recipe.arms.keys()
    with pytest.raises(UserError, match="begun with name = 'k15-dynamics', not 'long2short'"):
        keep_recipe(Plan(shortening.name, recipe, (0,), tmp_path, []))


@pytest.mark.parametrize("study", list(STUDIES))
def test_dry_run_writes_nothing(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = words(study, tmp_path, "--dry-run")
    before = sorted(tmp_path.rglob("*"))
    assert main(command) == 0
    assert "rl" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("study", ["k15-dynamics", "long2short", "mel-vs-grpo", "rm-scaling", "prm-selection"])
def test_dry_run_counts_the_seeds_asked_for(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", study, "--dry-run", "--seeds", "7"]) == 0
    assert "7 seeds" in capsys.readouterr().out


def test_a_scale_whose_device_is_missing_names_the_scale_that_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = ["study", "k15-dynamics", "--out", str(tmp_path / "out")]
    for chosen, advised in ((["--scale", "gpu"], "--scale cpu"), (["--device", "cuda"], "--device cpu")):
        assert main([*command, *chosen]) == 2
        assert f"no CUDA device is available. Use {advised}, or" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unfinished_study_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("reasonlab.studies.command.run_pieces", interrupted)
    command = words("k15-dynamics", tmp_path)
    assert main(command) == 130
    printed = capsys.readouterr()
    assert printed.out.endswith("saved. The same command continues the study.\n")
    assert printed.err == ""
    assert main(["figures", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "the study k15-dynamics" in error
    assert f"unfinished: there is nothing to draw yet. Continue it with: reasonlab {shlex.join(command)}" in error
    (tmp_path / "out/study.json").write_text('{"name": "k15-dynamics"}')  # as studies of an earlier version have it
    assert main(["figures", str(tmp_path / "out")]) == 2
    assert "Continue it with the command that began it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["k15-dynamics", "--scale", "paper"], "Look at what it needs with --dry-run"),
        (["k15-dynamics", "--arms", "mirror-descent,rset"], "there is no arm 'rset'. Choose from mirror-descent, rest"),
        (["k15-dynamics", "--arms", "rest"], "k15-dynamics needs the arm mirror-descent"),
        (["long2short", "--arms", "warm-up,long"], "long2short needs the arm shortest"),
        (["k15-dynamics", "--seeds", "0"], "--jobs and --seeds are at least 1"),
        (["k15-dynamics", "--jobs", "0"], "--jobs and --seeds are at least 1"),
        (["k15-dynamics", "--threads", "0"], "threads: Input should be greater than or equal to 1"),
        (["k15-dynamics", "--recipe", "none.toml"], "none.toml cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_with_a_remedy(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert says in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("study", "change", "says"),
    [
        ("k15-dynamics", ("rest = {", "rset = {"), "k15-dynamics has no arm 'rset'"),
        ("k15-dynamics", ("every = 1, problems", "every = 0, problems"), "mirror-descent is never evaluated"),
        (
            "k15-dynamics",
            ("{ iterations = 1 }", "{ evaluate = { problems = 13 } }"),
            "other-size is evaluated in another",
        ),
        ("long2short", ("questions = 12", "questions = 1"), "of 1 test problems are hard"),
        (
            "long2short",
            ('type = "dpo", data = "pairs', 'type = "sft", data = "x'),
            "dpo must be trained by dpo, not by sft",
        ),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_recipes_that_would_fail_at_the_end_fail_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], study: str, change: tuple[str, str], says: str
) -> None:
    assert change[0] in STUDIES[study][0]
    (tmp_path / "mini.toml").write_text(STUDIES[study][0].replace(*change))
    assert main(words(study, tmp_path)) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["k16"], []])
def test_a_wrong_or_missing_study_names_those_there_are(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", *arguments]) == 2
    output = capsys.readouterr()
    assert "k15-dynamics" in output.err
    assert "long2short" in output.err
