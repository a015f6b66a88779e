"""Labelled steps that others published: ProcessBench and PRM800K are read, checked, and learnt from."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from chat_checkpoints import checkpoint as chat_checkpoint

from reasonlab import cli
from reasonlab.errors import UserError
from reasonlab.judges.formats import own_format
from reasonlab.judges.label_data import read_prm800k, read_processbench
from reasonlab.judges.labels import StepLabels
from reasonlab.judges.steps import steps_of
from reasonlab.judges.training import JudgeConfig, JudgeTrainer
from reasonlab.judges.types import Candidate, read_labels, write_pool

DATA = Path(os.environ.get("REASONLAB_DATA") or Path(__file__).parents[2] / "shared" / "bench")
needs_data = pytest.mark.skipif(
    not (DATA / "processbench_math.jsonl.gz").is_file(), reason="no labelled steps: set REASONLAB_DATA"
)


# --- what is read ------------------------------------------------------------------------------------------------


def write(path: Path, *rows: Any) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def test_processbench_is_read(tmp_path: Path) -> None:
    row = {"id": "m-1", "problem": "Q", "steps": ["a\n\nb", "c", "d"], "label": 1, "final_answer_correct": False}
    right = {**row, "id": "m-2", "label": -1, "final_answer_correct": True, "generator": "G"}
    one, two = read_processbench(write(tmp_path / "processbench_math.jsonl.gz", row, right))
    assert one.labels == StepLabels((1.0, 0.0, 0.0), 1)
    assert steps_of(one.candidate, "blank_line") == ["a\n\nb\n\n", "c\n\n", "d"]
    assert (one.candidate.family, one.candidate.correct) == ("processbench_math", False)
    assert two.labelled.steps == (1.0, 1.0, 1.0)
    assert (two.candidate.correct, two.candidate.source) == (True, "G")


def row(before: list[str], step: str, rating: int | None, problem: str = "Q") -> dict[str, Any]:
    """A step of PRM800K."""
    made = {"id": "x", "problem": problem, "prev_steps": before, "step": step, "rating": rating}
    return made if rating is not None else {name: value for name, value in made.items() if name != "rating"}


def test_prm800k_is_put_together(tmp_path: Path) -> None:
    rows = [row([], "a", 1), row(["a"], "b", -1), row(["a"], "b2", None), row(["a", "b2"], "c", 0), row([], "z", -1)]
    path = write(tmp_path / "steps.jsonl", *rows)
    found = {"".join(steps_of(one.candidate, "blank_line")): one.labels for one in read_prm800k(path)}
    assert found == {
        "a\n\nb": StepLabels((1.0, 0.0), 1),
        "a\n\nb2\n\nc": StepLabels((1.0, 1.0, 1.0), -1),
        "z": StepLabels((0.0,), 0),
    }
    assert StepLabels((1.0, 1.0, 0.5), -1) in [one.labels for one in read_prm800k(path, neutral=0.5)]
    assert len({one.candidate.problem for one in read_prm800k(path)}) == 1
    for ratings in ((1, -1), (-1, 1)):
        twice = write(tmp_path / "twice.jsonl", *(row([], "a", rating) for rating in ratings))
        assert [one.labels.first_wrong for one in read_prm800k(twice)] == [0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"problem": "Q", "steps": ["a"], "label": 1}, "line 1: `label`"),
        ({"problem": "Q", "steps": ["a"], "label": True}, "line 1: `label`"),
        ({"problem": "Q", "steps": [], "label": -1}, "line 1: `problem`"),
        ({"problem": "Q", "steps": ["a", ""], "label": -1}, "line 1: `problem`"),
        ([1], "not an object"),
    ],
)
def test_mistakes_in_processbench_files_name_their_line(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_processbench(write(tmp_path / "bad.jsonl", row))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"rating": 2}, "rating"), ({"rating": True}, "rating"), ({"step": ""}, "step"), ({"prev_steps": "a"}, "texts")],
)
def test_mistakes_in_prm800k_files_name_their_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    row = {"problem": "Q", "prev_steps": [], "step": "a", "rating": 1, **changes}
    with pytest.raises(UserError, match=f"line 1: .*{said}"):
        read_prm800k(write(tmp_path / "bad.jsonl", row))


def test_prm800k_must_rate_what_it_goes_on_from(tmp_path: Path) -> None:
    row = {"problem": "Q", "prev_steps": ["a"], "step": "b", "rating": 1}
    with pytest.raises(UserError, match="does not rate: 'a'"):
        read_prm800k(write(tmp_path / "cut.jsonl", row))
    with pytest.raises(UserError, match="neutral"):
        read_prm800k(write(tmp_path / "cut.jsonl", row), neutral=0.2)


# --- from labelled data to a judge -------------------------------------------------------------------------------


def branching(problem: str) -> list[dict[str, Any]]:
    """Alternatives to each step of one solution: four beginnings that nobody went on from, seven distinct steps."""
    return [
        row([], "Half of 8 is 4.", 1, problem),
        row([], "Half of 8 is 3.", -1, problem),
        row(["Half of 8 is 4."], "4 plus 2 is 6.", None, problem),
        row(["Half of 8 is 4."], "4 plus 2 is 7.", -1, problem),
        row(["Half of 8 is 4.", "4 plus 2 is 6."], "So it is 6.", 1, problem),
        row(["Half of 8 is 4.", "4 plus 2 is 6."], "So it is 5.", -1, problem),
        row(["Half of 8 is 4.", "4 plus 2 is 7."], "So it is 7.", 0, problem),
    ]


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    code = cli.main(list(map(str, words)))
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


@pytest.mark.parametrize("response", ["One.\n\nTwo.", "One.\n\nTwo.\n\n", "One.\n\nTwo. \n"])
def test_every_step_is_read_behind_its_separator(response: str, tmp_path: Path) -> None:
    """In PRM800K wrong steps are last ones. Where a step is read must not tell whether it is."""
    chat_checkpoint(tmp_path)
    form = own_format(tmp_path, "process")
    encoded, alone = (form.encode(Candidate("p", "Why?", text)) for text in (response, "One."))
    prompt = form.tokenizer.chat_text("Why?")
    texts = [form.tokenizer.decode(encoded.ids[: place + 1].tolist()) for place in encoded.steps]
    assert texts == [prompt + "One.\n\n", prompt + "One.\n\nTwo.\n\n"]
    assert alone.ids[:-1].tolist() == encoded.ids[: encoded.steps[0] + 1].tolist()
    assert encoded.final == encoded.steps[-1] + 1 == len(encoded.ids) - 1
    together = form.encode_all([Candidate("p", "Why?", response)] * 2)
    assert all(one.ids.tolist() == encoded.ids.tolist() for one in together)


def test_a_step_that_responses_share_counts_once(tmp_path: Path) -> None:
    chat_checkpoint(tmp_path / "model")
    path = write(tmp_path / "steps.jsonl", *branching("Half of 8, plus 2?"), *branching("Again: half of 8, plus 2?"))
    units = [example.labelled for example in read_prm800k(path)]
    settings: dict[str, Any] = {"model": str(tmp_path / "model"), "kind": "process", "loss": "ce", "batch": len(units)}

    def counted(shared: Any, **more: Any) -> tuple[int, int]:
        trainer = JudgeTrainer(JudgeConfig(**settings | more, shared_steps=shared), units, lambda *_: None)
        examples = trainer._examples(0)
        return sum(int(e.mask.sum()) for e in examples), sum(int((e.mask & (e.steps == 0)).sum()) for e in examples)

    # Of each problem: three distinct right steps and three wrong ones; what follows a wrong one does not enter.
    assert counted("once") == (2 * 6, 2 * 3)
    assert counted("each") == (2 * (1 + 2 + 3 + 3), 2 * 3)
    assert counted("once", loss="mse") == (2 * 7, 2 * 3)


def test_from_rated_steps_to_a_measured_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of recipes/processbench.toml, on a random model with a chat template."""
    model, labels, run = tmp_path / "model", tmp_path / "labels.jsonl.gz", tmp_path / "run"
    chat_checkpoint(model)
    steps = write(tmp_path / "steps.jsonl.gz", *(row for n in range(6) for row in branching(f"{n} and half of 8?")))
    told = printed(capsys, "judge", "label", steps, "--source", "prm800k", "--out", labels)
    assert "24 of 24 candidates with 60 steps, 30.0 % wrong" in told
    assert [one.steps for one in read_labels(labels)[:4]] == [(0,), (1, 1, 1), (1, 1, 0), (1, 0, 1)]
    soft = tmp_path / "soft.jsonl"
    printed(capsys, "judge", "label", steps, "--source", "prm800k", "--neutral", 0.5, "--out", soft)
    assert read_labels(soft)[3].steps == (1, 0, 0.5)

    recipe = Path(__file__).parents[1] / "recipes" / "processbench.toml"
    small = ("--model", model, "--data", labels, "--batch", 8, "--token_budget", 512, "--threads", 1)
    printed(capsys, "judge", "train", recipe, *small, "--out", run)
    data = json.loads(next(run.glob("events.*")).read_text().splitlines()[0])
    assert (data["units"], data["too_long"], data["shared_steps"]) == (24, 0, 6 * (10 - 7))

    # Nobody said what the whole is worth, so the judge does not either: a random number would spoil every ranking.
    pool = tmp_path / "pool.jsonl"
    write_pool(pool, [one.candidate for one in read_labels(labels)])
    printed(capsys, "judge", "score", pool, "--judge", run, "--out", tmp_path / "scores.jsonl")
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [(len(one["steps"]), one["final"]) for one in scores[:4]] == [(n, None) for n in (1, 3, 3, 3)]

    solution = {"problem": "Half of 6?", "steps": ["Half of 6 is 3.", "So it is 4."], "final_answer_correct": False}
    right = {**solution, "label": -1, "final_answer_correct": True}
    bench = write(tmp_path / "processbench_math.jsonl", {**solution, "label": 1}, {**solution, "label": 0}, right)
    told = printed(
        capsys, "judge", "bench", "processbench", labels, bench, "--judge", run, "--choose-on", "labels", "--json"
    )
    found = json.loads(told)
    assert found["threshold"]["split"] == "labels"
    assert (found["splits"]["math"]["wrong_samples"], found["splits"]["math"]["right_samples"]) == (2, 1)
    share = 1 / 2  # of the errors are in either place
    assert found["splits"]["math"]["blind"] == pytest.approx(2 * share / (1 + share**0.5) ** 2)
    printed(capsys, "judge", "label", bench, "--source", "processbench", "--out", tmp_path / "again.jsonl")
    again = read_labels(tmp_path / "again.jsonl")
    assert [(one.steps, one.final) for one in again] == [((1, 0), 0), ((0, 0), 0), ((1, 1), 1)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere.jsonl", "--source", "prm800k"), "there is no file"),
        (("steps.jsonl", "--source", "prm800k", "--rule", "newline"), "where steps end"),
        (("steps.jsonl", "--source", "prm800k", "--neutral", "0.2"), "neutral"),
        (("steps.jsonl", "--source", "processbench"), "line 1: `problem`"),
    ],
)
def test_mistakes_in_labelling_data_leave_nothing_behind(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "steps.jsonl", *branching("Q"))
    assert cli.main(["judge", "label", str(tmp_path / words[0]), *words[1:], "--out", str(tmp_path / "out")]) != 0
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@needs_data
def test_the_published_files_are_read_whole() -> None:
    for name, size, right in (("gsm8k", 400, 193), ("math", 1000, 406), ("omnimath", 1000, 241)):
        examples = read_processbench(DATA / f"processbench_{name}.jsonl.gz")
        assert (len(examples), sum(one.labels.all_right for one in examples)) == (size, right)
        for one in examples:
            assert len(steps_of(one.candidate, "blank_line")) == len(one.labels.values)
            # A right sample has a right answer; the other way round does not hold, which is what the set is about.
            assert one.candidate.correct or not one.labels.all_right
    steps = read_prm800k(DATA / "prm800k_phase1_test_steps.jsonl.gz")
    assert len({one.candidate.problem for one in steps}) == 101
    assert sum(one.labels.first_wrong == len(one.labels.values) - 1 for one in steps) == sum(
        not one.labels.all_right for one in steps
    ), "in the test part nobody went on from a wrong step"
