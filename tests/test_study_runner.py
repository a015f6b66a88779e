"""Study recipes, and how the pieces of a study are run: their order, failures, processes that are killed, runs that
are continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from study_pieces import alive, fail_beside, heed_signals, note, noted, until, work, work_for_hours
from test_loop import Silent, config

from reasonlab.config import RestConfig
from reasonlab.errors import UserError
from reasonlab.runs import RunReader
from reasonlab.studies import k15_dynamics, long2short
from reasonlab.studies.plan import Plan
from reasonlab.studies.recipe import own_recipe, parse_study, study_recipe
from reasonlab.studies.runner import Piece, first_difference, run_pieces, train
from reasonlab.train.loop import start

# --- recipes ---------------------------------------------------------------------------------------------------------

BASE = """
iterations = 30
[rollout]
prompts = 16
samples = 4
[method]
type = "mirror_descent"
tau = 0.2
[arms.same]
"""


def test_an_arm_lays_its_keys_over_the_recipe() -> None:
    recipe = parse_study(
        BASE
        + """
        [arms.changed]
        iterations = 10
        rollout = { samples = 8 }
        method = { per_token = true }
        [arms.other.method]
        type = "rest"
        [study]
        seeds = 3
        """,
        "cpu",
        "mine.toml",
    )
    same, changed, other = (recipe.arms[name] for name in ("same", "changed", "other"))
    assert (same.iterations, same.rollout.prompts, same.rollout.samples) == (30, 16, 4)
    assert (changed.iterations, changed.rollout.prompts, changed.rollout.samples) == (10, 16, 8)
    assert changed.method.model_dump() == {**same.method.model_dump(), "per_token": True}
    assert other.method == RestConfig(type="rest")  # nothing of mirror descent is left in it
    assert recipe.settings.seeds == 3
    assert recipe.about == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("iterations = = 3", "mine.toml is not valid TOML"),
        ("iterations = 3", "mine.toml names no arms"),
        ("[arms]", "mine.toml names no arms"),
        ("arms = 3", "mine.toml names no arms"),
        ("[arms]\nrest = 3", "the arm rest is no table"),
        (BASE + "[arms.rest.learner]\nlrr = 1", "mine.toml, arm rest: unknown key 'learner.lrr'. Perhaps you meant"),
        (BASE + "[arms.rest.learner]\nlr = -1", "mine.toml, arm rest: learner.lr"),
        (BASE + "[arms.rest.method]\ntype = 'ppo'", "mine.toml, arm rest: method"),
        (BASE + "[study]\nquestion = 3", "mine.toml: study.question: "),
        (BASE + "[study]\nseeds = 0", "mine.toml: study.seeds: "),
        ("study = 3\n" + BASE, "mine.toml: study: "),
    ],
)
def test_mistakes_in_a_recipe_are_named(text: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        parse_study(text, "cpu", "mine.toml")
    assert says in str(error.value)
    assert error.value.remedy


def test_a_recipe_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml cannot be read"):
        own_recipe(tmp_path / "none.toml")
    (tmp_path / "mini.toml").write_text(BASE)
    assert own_recipe(tmp_path / "mini.toml").scale == "mini"


@pytest.mark.parametrize("scale", ["cpu", "gpu", "paper"])
@pytest.mark.parametrize("study", [k15_dynamics, long2short], ids=lambda study: study.name)
def test_packaged_recipes_have_the_arms_their_studies_name(study: object, scale: str) -> None:
    recipe = study_recipe(study.name, scale)  # type: ignore[attr-defined]
    of_the_report = set(study.arms) - {k15_dynamics.GRPO}  # type: ignore[attr-defined]
    assert set(recipe.arms) == of_the_report
    devices = {one.device for one in recipe.arms.values()}
    assert devices == {"cpu"} if scale == "cpu" else {"cuda"}
    assert bool(recipe.about) == (scale == "paper")


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
@pytest.mark.parametrize("study", [k15_dynamics, long2short], ids=lambda study: study.name)
def test_packaged_recipes_make_pieces_whose_needs_are_pieces(study: object, scale: str) -> None:
    plan = Plan(study.name, study_recipe(study.name, scale), (0, 1), Path("out"), [])  # type: ignore[attr-defined]
    pieces = {piece.name: piece for piece in study.pieces(plan)}  # type: ignore[attr-defined]
    assert all(need in pieces for piece in pieces.values() for need in piece.needs)
    for seed in plan.seeds:
        for arm in plan.recipe.arms:
            trained, out, _ = pieces[f"{arm} {seed}"].arguments
            assert (trained.seed, out) == (seed, Path(f"out/runs/seed-{seed}/{arm}"))


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_packaged_recipes_compare_like_with_like(scale: str) -> None:
    dynamics, shortening = study_recipe("k15-dynamics", scale).arms, study_recipe("long2short", scale).arms
    assert dynamics[k15_dynamics.REST].method.type == "rest"
    assert dynamics[k15_dynamics.CURRICULUM].problems.curriculum_from > 0
    assert dynamics[k15_dynamics.OTHER_SIZE].model.path != dynamics[k15_dynamics.MAIN].model.path
    long, rl = shortening[long2short.LONG], shortening[long2short.RL]
    assert long.reward.length_weight == 0
    assert rl.reward.length_weight > 0
    assert rl.rollout.max_tokens < long.rollout.max_tokens


# --- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_piece_is_done_once_and_after_what_it_needs(tmp_path: Path, jobs: int) -> None:
    """Listed against their order: d needs b and c, which need a. Two processes do b and c at the same time."""
    log = tmp_path / "log"
    needs: dict[str, tuple[str, ...]] = {"d": ("b", "c"), "b": ("a",), "c": ("a",), "a": ()}
    beside = {"b": "c", "c": "b"} if jobs == 2 else {}
    run_pieces([Piece(name, work, (log, name, beside.get(name, "")), needs[name]) for name in needs], jobs)
    words = noted(log)
    assert sorted(words) == sorted(f"{what}:{name}" for name in "abcd" for what in ("begin", "end"))
    for name in needs:
        assert all(words.index(f"end:{need}") < words.index(f"begin:{name}") for need in needs[name])


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("needs", "says"),
    [
        ({"a": (), "b": ("c",)}, "b needs {'c'}, which is no piece"),
        ({"a": ("c",), "b": ("a",), "c": ("b",)}, "cycle"),
        ({"a": ("a",)}, "cycle"),
    ],
)
def test_needs_that_cannot_be_met_are_errors_before_anything_is_done(
    tmp_path: Path, jobs: int, needs: dict[str, tuple[str, ...]], says: str
) -> None:
    log = tmp_path / "log"
    with pytest.raises(ValueError, match=says):
        run_pieces([Piece(name, work, (log, name), needs[name]) for name in needs], jobs)
    with pytest.raises(ValueError, match="same name"):
        run_pieces([Piece("a", work, (log, "a"))] * 2, jobs)
    assert noted(log) == []


def test_a_failure_ends_the_study(tmp_path: Path) -> None:
    log = tmp_path / "log"
    note(log, "hours:0")
    pieces = [
        Piece("before", work, (log, "before")),
        Piece("failing", fail_beside, (log, "bug")),
        Piece("after", work, (log, "after")),
    ]
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run_pieces(pieces)
    assert noted(log) == ["hours:0", "begin:before", "end:before"]


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("mistake", UserError, r"^the data is missing\. Make it$"),
        ("killed", UserError, r"the process that did 'failing' was killed\. .*fewer --jobs"),
        ("bug", RuntimeError, r"fail_beside(.|\n)*ZeroDivisionError: a bug"),
    ],
)
def test_a_failure_in_one_process_ends_the_others(tmp_path: Path, kind: str, error: type[Exception], says: str) -> None:
    """The piece beside it would go on for an hour; it is interrupted, and so can save."""
    log = tmp_path / "log"
    pieces = [
        Piece("long", work_for_hours, (log,)),
        Piece("failing", fail_beside, (log, kind)),
        Piece("after", work, (log, "after"), ("long",)),
    ]
    with pytest.raises(error, match=says):
        run_pieces(pieces, jobs=2)
    words = noted(log)
    assert words[1:] == ["saved"]
    assert not alive(int(words[0].removeprefix("hours:")))


def launched(log: Path, piece: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A study of two such pieces in a session of its own, and its workers, once they are at work."""
    code = f"import study_pieces, pathlib; study_pieces.main(pathlib.Path({str(log)!r}), study_pieces.{piece})"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )
    until(lambda: len(noted(log)) == 2)
    return process, [int(word.removeprefix("hours:")) for word in noted(log)]


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_no_process_outlives_a_killed_study(tmp_path: Path, sign: signal.Signals) -> None:
    log = tmp_path / "log"
    process, workers = launched(log, "ignore_interrupts")
    assert all(map(alive, workers))
    process.send_signal(sign)
    assert process.wait(60) == -sign
    until(lambda: not any(map(alive, workers)), seconds=60)


def test_ctrl_c_interrupts_every_process_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process, workers = launched(log, "work_for_hours")
    assert all(os.getpgid(worker) == worker for worker in workers), "a second interrupt would come from the terminal"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    output = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT
    assert "Process Spawn" not in output, "a worker must not print a traceback of its own"
    assert sorted(noted(log)[2:]) == ["saved", "saved"]
    assert not any(map(alive, workers))


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process, workers = launched(log, "ignore_interrupts")
    process.send_signal(signal.SIGINT)
    until(lambda: noted(log).count("ignored") == 2)
    assert process.poll() is None, "it waits for its workers to save"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    until(lambda: not any(map(alive, workers)), seconds=60)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_is_made_once_and_continued_where_it_was_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, broken = tmp_path / "seed-0" / "whole", tmp_path / "seed-0" / "broken"
    train(config(), whole, ["study"])
    assert "[seed-0/whole] iteration 3/3" in capsys.readouterr().out
    train(config(), whole, ["study"])
    assert capsys.readouterr().out == ""
    assert len(RunReader(whole).run["attempts"]) == 1

    trainer = start(config(), broken, ["study"], Silent())
    trainer.stop_requested = True  # as Ctrl-C does: before the first iteration
    assert trainer.run().status == "interrupted"
    train(config(), broken, ["study"])
    run = RunReader(broken).run
    assert (run["status"], len(run["attempts"])) == ("finished", 2)
    weights = "checkpoints/final/model.safetensors"
    assert (broken / weights).read_bytes() == (whole / weights).read_bytes()


def test_a_run_of_another_recipe_is_refused(tmp_path: Path) -> None:
    train(config(iterations=1), tmp_path / "run", ["study"])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"run was made with learner\.lr = 0\.0001, not 0\.5\. Choose another --out"):
        train(config(iterations=1, learner={"lr": 0.5}), tmp_path / "run", ["study"])
    method = {"type": "sft", "styles": {"worked": 1.0}}
    with pytest.raises(UserError, match=r"made with method\.type = 'mirror_descent', not 'sft'"):
        train(config(iterations=1, method=method), tmp_path / "run", ["study"])
    assert sorted(tmp_path.rglob("*")) == before


def test_the_first_difference_between_settings() -> None:
    before = {"a": 1, "b": {"c": 2, "d": [1, 2]}}
    assert first_difference(before, before) == ""
    assert first_difference(before, {**before, "new": 3}) == ""
    assert first_difference(before, {"a": 1, "b": {"c": 2, "d": [1, 3]}}) == "b.d = [1, 2], not [1, 3]"
    assert first_difference(before, {"b": before["b"]}) == "a = 1, not None"
