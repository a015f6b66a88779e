"""The study prm-selection from the command line on a recipe that takes seconds, and the parts it is made of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from study_pieces import alive, children, until

from reasonlab.cli import main
from reasonlab.errors import UserError
from reasonlab.figures import style
from reasonlab.figures.published import reasonflux
from reasonlab.figures.tables import (
    BEST_OF,
    JUDGE_RL,
    SELECTION,
    BestOfRow,
    JudgeRewardRow,
    SelectionRow,
    read_table,
)
from reasonlab.judges.exact_labels import exact_labels
from reasonlab.judges.types import Candidate, Scored, read_labels
from reasonlab.problems.tiny_world import split_of
from reasonlab.studies import prm_best_of as best_of
from reasonlab.studies import prm_selection as study
from reasonlab.studies.answers import read_answers
from reasonlab.studies.plan import Plan
from reasonlab.studies.prm_judges import (
    LABELLED,
    ON_RESPONSES,
    POOL,
    RESPONSE,
    TRAJECTORY,
    VALUE,
    JudgeName,
    clean_response,
    judge_directory,
    judges_of,
    labels_file,
    overall,
    read_traces,
    scores_of,
)
from reasonlab.studies.recipe import StudyRecipe, parse_study, study_recipe

MINI = """
iterations = 2
threads = 1
model = { path = "tiny-0.3m" }
rollout = { prompts = 4, samples = 2, max_tokens = 48 }
problems = { levels = [1, 2] }
method = { type = "grpo" }
evaluate = { every = 0, levels = [1, 2] }
[arms]
student = { method = { type = "sft", data = "selected.jsonl" } }
rl-outcome = {}
"rl-steps-0.75" = { reward = { judge = "later", judge_weight = 0.75 } }
[study]
seeds = 2
questions = 12
samples = 1
pool = 60
judge_traces = 40
selected = [8, 16]
judge_models = ["tiny-0.3m", "tiny-1m"]
judge_epochs = 1
completions = 1
best_of = 4
best_of_questions = 8
writers = [{ model = "tiny-0.3m", thinking = true }, { model = "tiny-0.3m", temperature = 1.2 }]
"""


def recipe_of(text: str = MINI) -> StudyRecipe:
    return parse_study(text, "mini", "mini.toml")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("prm")
    (where / "mini.toml").write_text(MINI)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "PNG_DPI", 40)
        command = ["study", "prm-selection", "--recipe", str(where / "mini.toml"), "--out", str(where / "out")]
        assert main(command) == 0
    return where / "out"


def test_verdicts_tables_and_figures(out: Path) -> None:
    content = json.loads((out / "verdicts.json").read_text())
    named = {claim["id"] for claim in content["claims"]}
    assert {"beats-random", "beats-pool", "beats-curated", "larger-judge-better", "more-data-better"} <= named
    assert {"rl-steps-0.75-beats-outcome", "best-of-n-beats-majority"} <= named
    assert all(claim["verdict"] in ("holds", "fails", "undecided") for claim in content["claims"])
    assert (out / "prm-selection.png").exists()
    assert (out / "prm-uses.svg").exists()
    assert content["protocol"]["passes"]["pool"] == round(2 * 4 / 60, 2)


def test_the_table_is_that_of_the_answers(out: Path) -> None:
    rows = read_table(out / SELECTION, SelectionRow)
    settings = recipe_of().settings
    assert len(rows) == len(study.sets_of(settings)) + 2  # before SFT: as it is, and made to think
    for row in rows:
        if row.data == study.RANDOM:
            seeds = [
                read_answers(out / "runs" / f"seed-{s}" / "answers" / f"random {row.selected}.jsonl.gz") for s in (0, 1)
            ]
            right = [answer.verdict == "correct" for answers in seeds for answer in answers]
            assert row.accuracy == pytest.approx(np.mean(right))
            assert (row.seeds, row.questions, row.parameters) == (2, 12, 0)
    best = read_table(out / BEST_OF, BestOfRow)
    accuracy = {(row.selector, row.n): row.accuracy for row in best}
    assert len({round(accuracy[row.selector, 1], 9) for row in best}) == 1  # of one answer nothing can be picked
    assert all(row.accuracy <= accuracy["oracle", row.n] + 1e-9 for row in best)
    assert {"majority", "weighted majority", "any distinct text", "oracle"} <= {row.selector for row in best}
    rl = {row.arm: row for row in read_table(out / JUDGE_RL, JudgeRewardRow)}
    assert (rl["rl-steps-0.75"].weight, rl["rl-steps-0.75"].form, rl["rl-outcome"].form) == (0.75, "steps", "none")


def test_sets_say_what_is_in_them(out: Path) -> None:
    inside = json.loads((out / "runs" / "seed-0" / "sets" / "sets.json").read_text())
    right = next(name for name in inside if name.startswith(study.RIGHT))
    assert inside[right]["right"] == 1
    assert 0 < inside["pool"]["thinking"] < 1
    for one in inside.values():
        assert sum(one["writers"].values()) == pytest.approx(1)
    curated = next(one for name, one in inside.items() if name.startswith(study.CURATED))
    assert curated["stages"]["right"] >= curated["stages"]["distinct"] >= curated["traces"]


def test_a_judge_that_knows_nothing_picks_like_any_distinct_text() -> None:
    """Three answers agree word for word and are right, one is wrong: of two texts one is picked."""
    pool = [Candidate("q", "1+1=?", text, "2", text == "2", "sum") for text in ("2", "2", "2", "3")]
    by_lot = np.mean([best_of.exact(best_of.questions(pool, best_of.lots(pool, n)), [4])[4][0] for n in range(400)])
    assert by_lot == pytest.approx(0.5, abs=0.08)


def test_problems_of_pool_judges_and_test_do_not_overlap(out: Path) -> None:
    settings = recipe_of().settings
    pool, labelled = (read_traces(out, part, settings) for part in (POOL, LABELLED))
    assert (len(pool), len(labelled)) == (60, 40)
    assert len({one.question for one in [*pool, *labelled]}) == 100
    assert {split_of(one.question) for one in [*pool, *labelled]} == {"train"}
    assert Counter(one.source for one in pool) == {"tiny-0.3m, thinking, 1": 30, "tiny-0.3m, 1.2": 30}


def test_a_set_holds_the_best_scored_traces(out: Path) -> None:
    settings = recipe_of().settings
    pool = read_traces(out, POOL, settings)
    for judge in judges_of(settings):
        scores = scores_of(out, POOL, judge, pool)
        path = study.set_file(out / "runs" / "seed-0", study.Set(str(judge), 8))
        chosen = {json.loads(line)["id"] for line in path.read_text().splitlines()}
        assert len(chosen) == 8
        inside = [score for one, score in zip(pool, scores, strict=True) if one.problem in chosen]
        outside = [score for one, score in zip(pool, scores, strict=True) if one.problem not in chosen]
        assert min(inside) >= max(outside)


def test_rl_is_rewarded_by_the_larger_trajectory_aware_judge(out: Path) -> None:
    settings = recipe_of().settings
    run = (out / "runs" / "seed-0" / "rl-steps-0.75" / "config.toml").read_text()
    assert str(judge_directory(out, JudgeName(TRAJECTORY, settings.judge_models[1]))) in run


def test_each_kind_of_judge_has_its_own_labels(out: Path) -> None:
    by_kind = {kind: read_labels(labels_file(out, kind)) for kind in (TRAJECTORY, RESPONSE, VALUE)}
    assert all(one.final is not None for one in by_kind[TRAJECTORY])
    assert all(one.final is None for kind in (RESPONSE, VALUE) for one in by_kind[kind])
    assert {step for one in by_kind[RESPONSE] for step in one.steps} <= {0.0, 1.0}
    closed = [one.candidate.response for one in by_kind[RESPONSE] if "Answer" in one.candidate.response]
    assert not any(" check " in response for response in closed)
    assert any(" check " in one.candidate.response for one in by_kind[TRAJECTORY])


def test_a_finished_study_is_only_judged_again(out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.gz")}
    assert main(["study", "prm-selection", "--recipe", str(out.parent / "mini.toml"), "--out", str(out)]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*.gz")}


def killed(command: list[str], begun: Path) -> None:
    """Start a study in a session of its own, kill it when a file is there, and see all its processes end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "reasonlab.cli", *command], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until(lambda: begun.exists() or process.poll() is not None, seconds=180)
        workers = children(process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, "it ended before the moment came"
    until(lambda: not any(map(alive, workers)))


def test_killed_twice_it_ends_with_the_same_tables(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a judge is trained, and, done by two processes, while a policy is trained with a judge's reward."""
    mine = tmp_path / "out"
    command = ["study", "prm-selection", "--recipe", str(out.parent / "mini.toml"), "--out", str(mine)]
    killed(command, mine / "judges" / f"{RESPONSE} tiny-0.3m" / "run.json")
    first = [*mine.glob("traces/*.gz"), *mine.glob("labels/*.gz"), *mine.glob("judges/*/checkpoints/*/judge.json")]
    assert {path.parts[len(mine.parts)] for path in first} == {"traces", "labels", "judges"}
    stamps = {path: path.stat().st_mtime_ns for path in first}
    assert not (mine / "scores").exists()
    killed([*command, "--jobs", "2"], mine / "runs/seed-0/rl-steps-0.75/rollouts/000001.jsonl.gz")
    second = [*mine.glob("scores/*.gz"), *mine.glob("runs/*/answers/*.gz"), *mine.glob("runs/*/sets/*")]
    assert not (mine / "verdicts.json").exists()
    stamps |= {path: path.stat().st_mtime_ns for path in second}
    monkeypatch.setattr("reasonlab.figures.redraw.redraw", lambda *_: [])  # another test looks at the figures
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps, "what was done was done again"
    for table in (SELECTION, BEST_OF, JUDGE_RL):
        assert (mine / table).read_bytes() == (out / table).read_bytes()
    claims = [json.loads((where / "verdicts.json").read_text())["claims"] for where in (mine, out)]
    assert claims[0] == claims[1]


def trace(response: str) -> Candidate:
    return Candidate("gcd/2/train/000000", "gcd(192,468)=?", response)


@pytest.mark.parametrize(
    ("said", "clean"),
    [
        (
            "<think>93/4=23 check 93-23*4=1 ok;23/3=7 check 7*3=21 no;23/3=7 check 23-7*3=2 ok</think>Answer:16<eos>",
            "<think>93/4=23;23/3=7</think>Answer:16<eos>",
        ),
        ("<think>8/3=2 check 2*3=6 no;1+2=3</think>Answer:3<eos>", "<think>1+2=3</think>Answer:3<eos>"),
        ("<think>1+2=3</think>Answer:3<eos>", "<think>1+2=3</think>Answer:3<eos>"),
        ("Answer:3<eos>", "Answer:3<eos>"),
        ("<think>1+2=3;1+2", "<think>1+2=3;1+2"),
    ],
)
def test_what_a_trace_comes_to(said: str, clean: str) -> None:
    assert clean_response(trace(said)).response == clean


def test_a_clean_response_of_a_right_trace_is_right(out: Path) -> None:
    for one in read_traces(out, POOL, recipe_of().settings):
        if exact_labels(one).all_right:
            assert exact_labels(clean_response(one)).all_right


def test_how_each_kind_scores() -> None:
    said = Scored((0.5, 0.8), 0.9)
    assert overall(JudgeName(TRAJECTORY, "x"), said) == pytest.approx(0.65 + 0.9)
    assert overall(JudgeName(VALUE, "x"), said) == pytest.approx(0.65)
    assert overall(JudgeName(RESPONSE, "x"), said) == overall(JudgeName(ON_RESPONSES, "x"), said) == pytest.approx(0.4)
    assert overall(JudgeName(TRAJECTORY, "x"), Scored((), 0.9)) == 0.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('type = "sft", data = "selected.jsonl"', 'type = "grpo"'), "must be trained by sft"),
        (("rl-outcome = {}", 'rl-outcome = { reward = { judge = "x", judge_weight = 0.5 } }'), "judge's reward"),
        (("selected = [8, 16]", "selected = [16, 8]"), "does not rise"),
        (("selected = [8, 16]", "selected = [8, 61]"), "cannot be chosen"),
        (('"tiny-0.3m", "tiny-1m"]', '"tiny-1m", "tiny-1m"]'), "same model"),
    ],
)
def test_recipes_that_would_fail_at_the_end_fail_at_the_start(
    change: tuple[str, str], complaint: str, tmp_path: Path
) -> None:
    assert change[0] in MINI
    recipe = recipe_of(MINI.replace(*change))
    with pytest.raises(UserError, match=complaint):
        study.pieces(Plan(study.name, recipe, (0,), tmp_path, []))


@pytest.mark.parametrize("scale", ["cpu", "gpu", "paper"])
def test_dry_run(scale: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = study_recipe(study.name, scale)
    assert set(recipe.arms) == set(study.arms)
    assert main(["study", "prm-selection", "--scale", scale, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("students", "larger judge", "rl-single-0.75", "test answers"))


def test_published_numbers() -> None:
    """The two sources agree to two points, as their file says."""
    content = reasonflux()
    table, sizes = content["table"]["rows"], content["judge_sizes"]["points"]
    place = content["table"]["benchmarks"].index("MATH500")
    for name in ("ReasonFlux-PRM-7B", "Qwen2.5-Math-PRM-7B", "Qwen2.5-Math-PRM-72B", "Skywork-PRM-7B"):
        assert abs(table[name][place] - sizes[name][2]) <= 0.021
    assert content["selection"]["trajectory-aware"][0][1] == pytest.approx(sizes["ReasonFlux-PRM-7B"][2], abs=0.005)
