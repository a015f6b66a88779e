"""Training judges: they learn, and a training that was killed ends with the same bytes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judge_pools import pool

from reasonlab.errors import UserError
from reasonlab.judges.lists import make_lists
from reasonlab.judges.scoring import ModelJudge
from reasonlab.judges.settings import judge_config, judge_toml, load_judge_recipe
from reasonlab.judges.steps import cut
from reasonlab.judges.training import JudgeConfig, JudgeTrainer, checkpoints_of, resume, start
from reasonlab.judges.types import Candidate, Labelled, Scored, read_pool, write_labels, write_pool, write_scores
from reasonlab.problems.families.steps import parse
from reasonlab.runs import RunReader

SMALL: dict[str, Any] = {"model": "tiny-0.3m", "batch": 4, "checkpoints": 3, "threads": 1}


def quiet(what: str, done: int, total: int) -> None:
    pass


def trained(out: Path, units: Any = None, **settings: Any) -> Path:
    assert start(JudgeConfig(**SMALL | settings), out, [], quiet, units).run() == "finished"
    return out


def labelled(candidates: list[Candidate]) -> list[Labelled]:
    """A step of the tiny world is right if its arithmetic is; the answer, if the response is."""
    found = []
    for candidate in candidates:
        operations = [(s.expression, s.result) for s in parse(candidate.response).steps]
        steps = [float(eval_integer(expression) == result) for expression, result in operations]
        found.append(Labelled(candidate, (*steps, float(bool(candidate.correct))), float(bool(candidate.correct))))
    return found


def eval_integer(expression: str) -> int:
    place = next(i for i, sign in enumerate(expression) if sign in "+-*/%")
    a, b = int(expression[:place]), int(expression[place + 1 :])
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1), "%": a % max(b, 1)}[expression[place]]


def weights(checkpoint: Path) -> bytes:
    names = ("model.safetensors", "judge.safetensors")
    return b"".join((checkpoint / name).read_bytes() for name in names if (checkpoint / name).exists())


# --- judges learn ----------------------------------------------------------------------------------------------------


def test_an_outcome_judge_tells_right_from_wrong_on_problems_it_has_not_seen(tmp_path: Path) -> None:
    """Forty steps. Two right and two wrong responses to each of 150 held-out problems; chance is 0.5."""
    lists, _ = make_lists(pool(640), 4)
    run = trained(tmp_path / "run", lists, batch=16, lr=2e-3, checkpoints=1, threads=2)
    held_out = pool(150, split="validation", seed=1)
    scores = [s.final for s in ModelJudge.open(checkpoints_of(run)[-1][1], workers=2).score(held_out)]
    wins = []
    for _, group in groupby(zip(held_out, scores, strict=True), lambda pair: pair[0].problem):
        one = list(group)
        wins += [a > b for c, a in one for d, b in one if c.correct and not d.correct]
    assert len(wins) == 600
    assert np.mean(wins) > 0.62


def test_a_process_judge_finds_wrong_steps_on_problems_it_has_not_seen(tmp_path: Path) -> None:
    run = trained(
        tmp_path / "run", labelled(pool(400)), kind="process", loss="mse", batch=40, lr=2e-3, checkpoints=1, threads=2
    )
    held_out = labelled(pool(150, split="validation", seed=1))
    scored = ModelJudge.open(checkpoints_of(run)[-1][1], workers=2).score([one.candidate for one in held_out])
    truth = np.concatenate([one.steps for one in held_out])
    guess = np.concatenate([one.steps for one in scored])
    assert ((guess > 0) & (guess < 1)).all()
    assert 0.1 < np.mean(truth == 0) < 0.5
    wrong_below_right = np.mean(guess[truth == 0][:, None] < guess[truth == 1][None, :])
    assert wrong_below_right > 0.6


@pytest.mark.parametrize(
    ("kind", "loss"), [("outcome", "pair_bt"), ("outcome", "ce"), ("outcome", "mse"), ("process", "ce")]
)
def test_every_loss_falls(kind: Any, loss: Any, tmp_path: Path) -> None:
    """Many epochs over the same few responses, which the judge can learn by heart."""
    candidates = pool(6)
    units = labelled(candidates) if kind == "process" else make_lists(candidates, 4)[0]
    run = trained(tmp_path / "run", units, kind=kind, loss=loss, epochs=15, lr=2e-3, warmup=0.0)
    losses = [line["train/loss"] for line in RunReader(run).metrics()]
    assert np.mean(losses[-4:]) < 0.6 * np.mean(losses[:4])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize(("kind", "loss"), [("outcome", "list_bt"), ("process", "mse")])
def test_the_loss_falls_on_cuda(kind: Any, loss: Any, bfloat16: bool, tmp_path: Path) -> None:
    candidates = pool(6)
    units = labelled(candidates) if kind == "process" else make_lists(candidates, 4)[0]
    settings = {"kind": kind, "loss": loss, "epochs": 15, "lr": 2e-3, "device": "cuda", "bfloat16": bfloat16}
    losses = [line["train/loss"] for line in RunReader(trained(tmp_path / "run", units, **settings)).metrics()]
    assert np.mean(losses[-4:]) < 0.6 * np.mean(losses[:4])


# --- the run ---------------------------------------------------------------------------------------------------------


def test_the_run_says_what_happened(tmp_path: Path) -> None:
    write_pool(tmp_path / "pool.jsonl.gz", pool(25))
    run = trained(tmp_path / "run", data=str(tmp_path / "pool.jsonl.gz"), checkpoints=5)
    reader = RunReader(run)
    lines = list(reader.metrics())
    assert [line["step"] for line in lines] == list(range(1, 8))  # 25 lists, 4 in each step
    assert lines[-1]["train/progress"] == 1
    assert {"train/loss", "train/pair_accuracy", "train/margin", "train/lr", "train/grad_norm"} <= lines[0].keys()
    assert lines[0]["train/lr"] > lines[-1]["train/lr"]
    (data,) = (event for event in reader.events() if event["kind"] == "data")
    assert (data["units"], data["problems"], data["all_right"], data["too_long"]) == (25, 25, 0, 0)
    assert [path.name for _, path in checkpoints_of(run)] == [f"step-{n:06d}" for n in (1, 3, 4, 6, 7)]
    assert [progress for progress, _ in checkpoints_of(run)] == pytest.approx([n / 7 for n in (1, 3, 4, 6, 7)])
    assert [(path / "trainer").exists() for _, path in checkpoints_of(run)] == [False] * 4 + [True]
    assert load_judge_recipe(run / "config.toml").data.endswith("pool.jsonl.gz")


def test_score_sorted_lists_come_from_the_files(tmp_path: Path) -> None:
    candidates = pool(8, each=8)
    write_pool(tmp_path / "pool.jsonl", candidates)
    ranks = [float(i) for i in range(len(candidates))]
    write_scores(tmp_path / "scores.jsonl", candidates, [Scored((), rank) for rank in ranks])
    config = JudgeConfig(
        **SMALL, data=str(tmp_path / "pool.jsonl"), scores=str(tmp_path / "scores.jsonl"), list_size=2, top=1
    )
    units = JudgeTrainer(config, None, quiet).data.units
    assert units == make_lists(read_pool(tmp_path / "pool.jsonl"), 2, ranks, top=1)[0]
    assert units != make_lists(candidates, 2)[0]


def test_pairs_are_drawn_anew_in_every_epoch_and_keyed_by_the_seed() -> None:
    units = make_lists(pool(12, each=8), 6)[0]
    draws = []
    for seed in (0, 0, 1):
        trainer = JudgeTrainer(JudgeConfig(**SMALL, loss="pair_bt", epochs=2, seed=seed), units, quiet)
        examples = [trainer._examples(step) for step in range(trainer.total)]
        assert all(len(step) == 8 for step in examples)
        assert all([e.final for e in step] == [1.0, 0.0] * 4 for step in examples)
        draws.append([[e.encoded.ids.tobytes() for e in step] for step in examples])
    assert draws[0] == draws[1] != draws[2]
    epochs = [{ids for step in draws[0][half] for ids in step} for half in (slice(0, 3), slice(3, 6))]
    assert epochs[0] != epochs[1]


def test_an_epoch_goes_through_every_list_once() -> None:
    units = make_lists(pool(10), 4)[0]
    trainer = JudgeTrainer(JudgeConfig(**SMALL, epochs=2), units, quiet)
    for epoch in range(2):
        steps = [trainer._examples(step) for step in range(epoch * 3, epoch * 3 + 3)]
        assert sorted({e.pair for step in steps for e in step}) == list(range(10))
        assert [len({e.pair for e in step}) for step in steps] == [4, 4, 2]


# --- killed and continued --------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from reasonlab.judges.settings import load_judge_recipe
from reasonlab.judges.training import start
start(load_judge_recipe(Path(sys.argv[1])), Path(sys.argv[2]), [], lambda *_: None).run()
"""


def test_killed_and_resumed_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """A process judge; the same of an outcome judge that is interrupted follows."""
    data = tmp_path / "data.jsonl"
    write_labels(data, labelled(pool(25)))
    settings = {"kind": "process", "loss": "mse", "data": str(data), "epochs": 2, "checkpoints": 8, "threads": 2}
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(judge_toml(JudgeConfig(**SMALL | settings)))
    run = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(recipe), str(run)])
    while process.poll() is None and len(list((run / "checkpoints").glob("step-*"))) < 2:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    trainer = resume(run, quiet)
    assert 0 < trainer.state.iteration < trainer.total
    assert trainer.run() == "finished"

    whole = trained(tmp_path / "whole", **settings)
    assert len(checkpoints_of(whole)) == 8
    for (a, mine), (b, expected) in zip(checkpoints_of(run), checkpoints_of(whole), strict=True):
        assert a == b
        assert weights(mine) == weights(expected)
    assert len({weights(path) for _, path in checkpoints_of(whole)}) == 8
    assert not list((run / "checkpoints").glob(".*"))
    reader = RunReader(run)
    assert [line["step"] for line in reader.metrics()] == list(range(1, trainer.total + 1))
    with pytest.raises(UserError, match="already ended"):
        resume(run, quiet)


def test_interrupted_it_saves_and_the_extra_checkpoint_goes_when_it_is_continued(tmp_path: Path) -> None:
    units = make_lists(pool(40), 4)[0]
    trainer = start(JudgeConfig(**SMALL | {"checkpoints": 2}), tmp_path / "run", [], quiet, units)
    trainer.report = lambda what, done, total: signal.raise_signal(signal.SIGINT) if done == 3 else None
    assert trainer.run() == "interrupted"
    assert [path.name for _, path in checkpoints_of(tmp_path / "run")] == ["step-000003"]
    assert resume(tmp_path / "run", quiet, units).run() == "finished"
    assert [path.name for _, path in checkpoints_of(tmp_path / "run")] == ["step-000005", "step-000010"]
    whole = trained(tmp_path / "whole", units, checkpoints=2)
    assert weights(checkpoints_of(tmp_path / "run")[-1][1]) == weights(checkpoints_of(whole)[-1][1])


def test_a_training_in_a_thread_leaves_signals_alone(tmp_path: Path) -> None:
    units = make_lists(pool(4), 4)[0]
    thread = threading.Thread(target=trained, args=(tmp_path / "run", units))
    thread.start()
    thread.join()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_other_data_are_refused_when_it_is_resumed(tmp_path: Path) -> None:
    units = make_lists(pool(12), 4)[0]
    trainer = start(JudgeConfig(**SMALL), tmp_path / "run", [], quiet, units)
    trainer.stop_requested = False
    trainer._step(0)
    trainer._save()
    with pytest.raises(UserError, match="other data"):
        resume(tmp_path / "run", quiet, make_lists(pool(12, seed=5), 4)[0])
    assert resume(tmp_path / "run", quiet, units).state.iteration == 1


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_what_the_model_cannot_read_whole_is_refused_or_dropped() -> None:
    units = make_lists(pool(6), 4)[0]
    long = replace(units[2].wrong[0], response="9" * 1100)
    units[2] = replace(units[2], wrong=(long,))
    with pytest.raises(UserError, match=r"problem '.*' has 1,1\d\d tokens, tiny-0.3m reads 1,024 at most"):
        JudgeTrainer(JudgeConfig(**SMALL), units, quiet)
    trainer = JudgeTrainer(JudgeConfig(**SMALL, too_long="drop"), units, quiet)
    assert (len(trainer.data.units), trainer.data.report["too_long"]) == (5, 1)


def test_labels_must_fit_the_steps_and_the_loss() -> None:
    (candidate,) = pool(1, each=1)
    count = len(cut(candidate.response, "tiny"))
    process = {**SMALL, "kind": "process", "loss": "ce"}
    with pytest.raises(UserError, match=rf"has {count} steps by the rule of this judge, but {count + 1} labels"):
        JudgeTrainer(JudgeConfig(**process), [Labelled(candidate, (1.0,) * (count + 1))], quiet)
    with pytest.raises(UserError, match="soft labels"):
        JudgeTrainer(JudgeConfig(**process), [Labelled(candidate, (0.5,) * count)], quiet)
    given = replace(candidate, step_ends=(3, len(candidate.response)))
    assert JudgeTrainer(JudgeConfig(**process), [Labelled(given, (1.0, 0.0))], quiet).total == 1


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"bach": 3}, "Perhaps you meant 'batch'"),
        ({"lr": 0}, "lr: "),
        ({"kind": "process"}, "process judges learn with ce or mse, not list_bt"),
        ({"kind": "process", "loss": "ce", "scores": "x"}, "scores are for the lists"),
    ],
)
def test_a_wrong_setting_is_one_line(raw: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as error:
        judge_config(raw, "recipe")
    assert complaint in str(error.value)


def test_settings_come_back_from_their_file(tmp_path: Path) -> None:
    config = JudgeConfig(model='a"b', kind="process", loss="ce", lr=1e-7, steps="newline", bfloat16=False)
    (tmp_path / "recipe.toml").write_text(judge_toml(config))
    assert load_judge_recipe(tmp_path / "recipe.toml") == config


def test_no_data_and_nothing_to_learn_from_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data"):
        JudgeTrainer(JudgeConfig(**SMALL), None, quiet)
    write_pool(tmp_path / "pool.jsonl", [c for c in pool(4) if c.correct])
    with pytest.raises(UserError, match="nothing to learn from"):
        start(JudgeConfig(**SMALL, data=str(tmp_path / "pool.jsonl")), tmp_path / "run", [], quiet)
    assert not (tmp_path / "run").exists()
