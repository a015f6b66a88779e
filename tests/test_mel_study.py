"""The study mel-vs-grpo: a miniature that is interrupted twice, its tables and token budget, its claims on made-up
scores, and the recipes it refuses."""

from __future__ import annotations

import gzip
import json
import math
import signal
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pytest
from test_study_claims import by_id, made

from reasonlab.cli import main
from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import Answer
from reasonlab.evaluate.statistics import pass_at_k
from reasonlab.figures import style
from reasonlab.figures.panel_grid import TOTAL
from reasonlab.figures.tables import (
    AVG_8,
    EXPERIENCE,
    PASS_1,
    PASS_8,
    REFLECTIONS,
    SCORES,
    ExperienceRow,
    ReflectionRow,
    ScoreRow,
    read_table,
)
from reasonlab.problems.tiny_world import problem_set
from reasonlab.runs import RunReader, RunRecord
from reasonlab.studies import mel_vs_grpo as study
from reasonlab.studies.command import STUDIES
from reasonlab.studies.curves import Curve
from reasonlab.studies.plan import Plan
from reasonlab.studies.recipe import parse_study, study_recipe
from reasonlab.studies.scores import Scores
from reasonlab.studies.verdicts import Claim, Outcome, record
from reasonlab.train.loop import Trainer

MINI = """
iterations = 2
threads = 1
model = { path = "tiny-1m-misled" }
problems = { families = ["sum", "word"], levels = [1, 2], pool = 64 }
rollout = { prompts = 10, samples = 8, max_tokens = 40 }
learner = { lr = 1e-4 }
checkpoint = { every = 1 }
evaluate = { every = 1, problems = 12, levels = [1, 2], temperature = 0.0, forced_style = false }
method = { type = "grpo" }
[arms]
grpo = {}
mel = { mel = { weight = 1.0, max_tokens = 36 } }
grpo-matched = {}
[study]
seeds = 2
questions = 12
samples = 8
temperature = 0.6
"""
ARMS = (study.GRPO, study.MEL, study.MATCHED)
SEEDS = (0, 1)


def plan(text: str = MINI, out: Path = Path("out")) -> Plan:
    return Plan(study.name, parse_study(text, "mini", "mini.toml"), SEEDS, out, [])


def strict(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return content


# --- a miniature, interrupted twice ----------------------------------------------------------------------------------


class Studied(NamedTuple):
    out: Path
    before_matched: dict[Path, int]  # the files of each point of interruption, and when they were written
    in_matched: dict[Path, int]


def files(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Studied:
    """Interrupted when both arms that the third needs are done, then by Ctrl-C inside the third, then finished."""
    where = tmp_path_factory.mktemp("mel")
    (where / "mini.toml").write_text(MINI)
    command = ["study", study.name, "--recipe", str(where / "mini.toml"), "--out", str(where / "out")]
    iterate = Trainer._iteration

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    def with_ctrl_c(trainer: Trainer, number: int) -> None:
        iterate(trainer, number)
        if number == 1 and trainer.record.directory.name == study.MATCHED:
            signal.raise_signal(signal.SIGINT)

    points = []
    for owner, name, interrupted in ((study, "train_matched", stopped), (Trainer, "_iteration", with_ctrl_c)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            assert main(command) == 130
        assert not (where / "out" / "verdicts.json").exists()
        points.append(files(where / "out"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "PNG_DPI", 40)
        assert main(command) == 0
    return Studied(where / "out", *points)


def tokens(out: Path, arm: str, seed: int) -> int:
    """Generated in training, counted from what the run kept."""
    reader = RunReader(out / "runs" / f"seed-{seed}" / arm)
    steps = reader.rollout_steps()
    extra = reader.series("train/mel/extra_tokens")[1]
    sampled: int = sum(row["tokens"] for step in steps for row in reader.rollouts(step))
    return sampled + round(sum(extra))


def test_an_interrupted_study_goes_on_without_making_anything_again(studied: Studied) -> None:
    runs = studied.out / "runs"
    finished = {runs / f"seed-{seed}" / arm for seed in SEEDS for arm in (study.GRPO, study.MEL)}
    assert {path.parent for path in studied.before_matched if path.name == "run.json"} == finished
    now = files(studied.out)
    assert now.items() >= studied.before_matched.items()
    matched = runs / "seed-0" / study.MATCHED
    kept = {
        path: time for path, time in studied.in_matched.items() if "rollouts" in path.parts and matched in path.parents
    }
    assert [path.name for path in kept] == ["000001.jsonl.gz"]
    assert now.items() >= kept.items()
    assert len(RunReader(matched).run["attempts"]) == 2
    assert RunReader(matched).rollout_steps() == [1, 2]


def test_matched_grpo_generates_what_mel_does(studied: Studied) -> None:
    for seed in SEEDS:
        grpo, mel, matched = (tokens(studied.out, arm, seed) for arm in ARMS)
        assert [study.generated_tokens(studied.out / "runs" / f"seed-{seed}" / arm) for arm in ARMS] == [
            *(grpo, mel, matched)
        ]
        config = tomllib.loads((studied.out / "runs" / f"seed-{seed}" / study.MATCHED / "config.toml").read_text())
        prompts = config["rollout"]["prompts"]
        assert prompts == round(10 * mel / grpo) > 10
        assert matched == pytest.approx(grpo * prompts / 10, rel=0.08)  # other problems have other lengths
        assert matched == pytest.approx(mel, rel=0.08 + 0.5 / prompts)  # and problems are whole
    protocol = strict((studied.out / "verdicts.json").read_text())["protocol"]
    all_seeds = {arm: sum(tokens(studied.out, arm, seed) for seed in SEEDS) for arm in ARMS}
    assert protocol["token_ratio"] == round(all_seeds[study.MATCHED] / all_seeds[study.MEL], 4)
    shown = read_table(studied.out / REFLECTIONS, ReflectionRow)
    assert {row.arm for row in shown} == {study.MEL}
    assert all(row.reflection and row.replay and 0 < row.success < 1 for row in shown)
    assert protocol["more_tokens_than_grpo"] == round(all_seeds[study.MEL] / all_seeds[study.GRPO] - 1, 4)


def test_the_scores_are_those_of_the_answers(studied: Studied) -> None:
    rows = {(row.arm, row.metric): row for row in read_table(studied.out / SCORES, ScoreRow)}
    assert rows.keys() == {(arm, metric) for arm in (*ARMS, study.BASE) for metric in (PASS_1, AVG_8, PASS_8)}
    for arm in (*ARMS, study.BASE):
        roots = [studied.out / "runs"] if arm == study.BASE else [studied.out / f"runs/seed-{seed}" for seed in SEEDS]
        counts: list[int] = []
        for root in roots:
            lines = gzip.decompress((root / "answers" / f"{arm}.jsonl.gz").read_bytes()).splitlines()
            right: dict[str, int] = {}
            for answer in map(orjson.loads, lines):
                right[answer["problem"]] = right.get(answer["problem"], 0) + (answer["verdict"] == "correct")
            assert (len(lines), len(right)) == (12 * 8, 12)
            counts += right.values()
        assert rows[arm, AVG_8].score == pytest.approx(np.mean(counts) / 8)
        assert rows[arm, PASS_8].score == pytest.approx(np.mean([pass_at_k(8, c, 8) for c in counts]))
        assert rows[arm, PASS_8].seeds == len(roots)
    for arm, step in ((study.BASE, 0), (study.MEL, 2)):
        readers = [RunReader(studied.out / f"runs/seed-{seed}/{study.MEL}") for seed in SEEDS]
        greedy = [row["verdict"] == "correct" for reader in readers for row in reader.evaluation("tiny", step)]
        assert rows[arm, PASS_1].score == pytest.approx(np.mean(greedy))


def test_the_course_of_training_is_that_of_the_runs(studied: Studied) -> None:
    rows = {(row.arm, row.iteration): row for row in read_table(studied.out / EXPERIENCE, ExperienceRow)}
    assert rows.keys() == {(arm, step) for arm in ARMS for step in (1, 2)}
    readers = [RunReader(studied.out / f"runs/seed-{seed}/{study.MEL}") for seed in SEEDS]
    for step in (1, 2):
        seeds = [reader.experiences(step) for reader in readers]
        row = rows[study.MEL, step]
        assert row.retention == pytest.approx(np.mean([np.mean([one["helped"] for one in each]) for each in seeds]))
        assert row.mixed == pytest.approx(np.mean([len(each) / 10 for each in seeds]))
        assert row.retention_low < row.retention < row.retention_high
        assert math.isnan(rows[study.GRPO, step].retention)
        assert rows[study.GRPO, step].reward > 0


# --- the claims ------------------------------------------------------------------------------------------------------

Course = Sequence[tuple[float, float, int]]  # reward, retention, reflections of each step
FLAT: Course = [(0.4, 0.5, 4)] * 8


def recorded(directory: Path, course: Course, with_mel: bool) -> Path:
    """A run of which only the metrics are there."""
    run = RunRecord.create(directory, "", [])
    for step, (reward, retention, reflections) in enumerate(course, start=1):
        mel = {"train/mel/retention": retention, "train/mel/reflections": float(reflections)}
        run.metrics(step, {"train/reward/mean": reward, **(mel if with_mel else {})})
    return directory


def runs_of(where: Path, grpo: Sequence[Course], mel: Sequence[Course]) -> dict[str, list[Path]]:
    """A run for each course, and each course is a seed."""
    return {
        arm: [recorded(where / f"{seed}-{arm}", course, arm == study.MEL) for seed, course in enumerate(courses)]
        for arm, courses in ((study.GRPO, grpo), (study.MEL, mel))
    }


def course_of(*accuracies: float, seeds: int = 2) -> Curve:
    return {10 * i: {TOTAL: made(accuracy, 20.0, seeds)} for i, accuracy in enumerate(accuracies)}


def judged(
    runs: Mapping[str, Sequence[Path]], grpo: Curve, mel: Curve, average: float = 0.5, best: float = 0.5, **more: Curve
) -> dict[str, Claim]:
    """The claims, with GRPO at half in both sampled scores and MEL where it is put."""
    curves = {study.GRPO: grpo, study.MEL: mel, **more}
    seeds = len(runs[study.GRPO])
    sampled = [
        {arm: made(value if arm == study.MEL else 0.5, 20.0, seeds) for arm in curves} for value in (average, best)
    ]
    return by_id(study.claims(curves, sampled[0], sampled[1], runs))


@pytest.mark.parametrize(("end", "verdict"), [(0.8, "holds"), (0.6, "undecided"), (0.4, "fails")])
@pytest.mark.parametrize("seeds", [1, 3])
def test_mel_against_grpo(tmp_path: Path, end: float, verdict: str, seeds: int) -> None:
    runs = runs_of(tmp_path, [FLAT] * seeds, [FLAT] * seeds)
    grpo, mel = course_of(0.2, 0.5, 0.6, seeds=seeds), course_of(0.2, 0.5, end, seeds=seeds)
    matched = course_of(0.2, 0.5, 0.6, seeds=seeds)
    found = judged(runs, grpo, mel, end - 0.1, end - 0.1, **{study.MATCHED: matched, "mel-heavy": mel})
    assert found["grpo-learns"].verdict == "holds"
    assert found["grpo-learns"].estimate == pytest.approx(40, abs=0.5)
    at_the_end = ("mel-beats-grpo", "mel-beats-matched", "mel-heavy-beats-grpo")
    sampled = ("mel-beats-grpo-avg8", "mel-beats-grpo-pass8", "mel-beats-matched-avg8")
    for name in (*at_the_end, *sampled):
        assert found[name].verdict == verdict, name
        assert found[name].estimate == pytest.approx(100 * (end - 0.6), abs=0.5)
    faster = found["mel-learns-faster"]  # of the two validations after the first one differs
    assert faster.verdict == verdict
    assert faster.estimate == pytest.approx(100 * (end - 0.6) / 2, abs=0.5)


def test_a_faster_way_to_the_same_end_is_faster_and_no_better(tmp_path: Path) -> None:
    found = judged(runs_of(tmp_path, [FLAT] * 2, [FLAT] * 2), course_of(0.2, 0.3, 0.6), course_of(0.2, 0.5, 0.6))
    assert (found["mel-learns-faster"].verdict, found["mel-beats-grpo"].verdict) == ("holds", "undecided")
    assert not {"mel-beats-matched", "mel-beats-matched-avg8", "mel-heavy-beats-grpo"} & found.keys()


def rising(start: float, by: float, reward: float = 0.4) -> Course:
    return [(reward, start + by * step / 7, 4) for step in range(8)]


@pytest.mark.parametrize(("by", "verdict"), [(0.3, "holds"), (-0.3, "fails")])
def test_retention_and_reward_over_seeds(tmp_path: Path, by: float, verdict: str) -> None:
    mel = [rising(0.4, by + 0.01 * seed, 0.4 + by / 10 + 0.001 * seed) for seed in range(3)]
    found = judged(runs_of(tmp_path, [FLAT] * 3, mel), course_of(0.2, 0.6, seeds=3), course_of(0.2, 0.6, seeds=3))
    assert (found["retention-rises"].verdict, found["reward-higher"].verdict) == (verdict, verdict)
    assert found["retention-rises"].estimate == pytest.approx((by + 0.01) * 6 / 7)  # quarters: steps 1, 2 and 7, 8
    assert found["reward-higher"].estimate == pytest.approx(by / 10 + 0.001)


def test_seeds_that_disagree_leave_retention_and_reward_undecided(tmp_path: Path) -> None:
    mel = [rising(0.4, by, 0.4 + by / 10) for by in (-0.2, 0.3, 0.1)]
    found = judged(runs_of(tmp_path, [FLAT] * 3, mel), course_of(0.2, 0.6, seeds=3), course_of(0.2, 0.6, seeds=3))
    assert {found[name].verdict for name in ("retention-rises", "reward-higher")} == {"undecided"}


def test_retention_counts_reflections_not_steps(tmp_path: Path) -> None:
    """Two steps make a quarter: 1 of 10 and 1 of 1 are 2 of 11."""
    course = [(0.4, 0.1, 10), (0.4, 1.0, 1), *FLAT[2:6], (0.4, 0.5, 2), (0.4, 0.0, 0)]
    assert study.retention_ends(recorded(tmp_path / "run", course, True)) == pytest.approx((2 / 11, 0.5))
    none = recorded(tmp_path / "none", [(0.4, 0.0, 0)] * 4, True)
    assert all(map(math.isnan, study.retention_ends(none)))


@pytest.mark.parametrize("mel", [[rising(0.2, 0.6, 0.9)], [[(0.9, 0.0, 0)] * 8] * 2])
def test_what_no_interval_is_known_of_is_undecided_and_null(tmp_path: Path, mel: list[Course]) -> None:
    """One seed says nothing of others, and without reflections there is no retention at all."""
    seeds = len(mel)
    runs = runs_of(tmp_path, [FLAT] * seeds, mel)
    found = judged(runs, course_of(0.2, 0.6, seeds=seeds), course_of(0.2, 0.6, seeds=seeds))
    assert found["retention-rises"].verdict == "undecided"
    content = record(study.name, "mini", range(seeds), "", "cpu", Outcome(list(found.values()), [], {}))
    claims = {claim["id"]: claim for claim in strict(json.dumps(content, allow_nan=False))["claims"]}
    assert claims["retention-rises"]["interval"] is None
    if seeds == 1:
        assert claims["retention-rises"]["estimate"] == pytest.approx(0.6 * 6 / 7)
        assert claims["reward-higher"] == {
            **claims["reward-higher"],
            **{"verdict": "undecided", "estimate": pytest.approx(0.5), "interval": None},
        }
    else:
        assert claims["retention-rises"]["estimate"] is None
        assert claims["reward-higher"]["verdict"] == "holds"


def test_seeds_needed_are_unknown_with_one_and_fall_with_the_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "HALF_WIDTH", 0.03)  # on so few questions no number of seeds gives less

    def apart(scatter: float, seeds: int = 3) -> dict[str, Curve]:
        """MEL better by 5 points, and by so much more or less from seed to seed."""
        grpo, mel = course_of(0.2, 0.5, seeds=seeds), course_of(0.2, 0.55, seeds=seeds)
        last = mel[10][TOTAL]
        shift = scatter * np.linspace(-1, 1, seeds)[:, None]
        mel[10][TOTAL] = replace(last, accuracy=last.accuracy + shift)
        return {study.GRPO: grpo, study.MEL: mel}

    assert study.seeds_needed(apart(0.02, seeds=1)) is None
    few, many = (study.seeds_needed(apart(scatter)) for scatter in (0.02, 0.06))
    assert few is not None
    assert many is not None
    assert few < many


# --- pass@8 ----------------------------------------------------------------------------------------------------------


def answered(verdicts: Mapping[str, str]) -> list[Answer]:
    """One answer for each letter: c(orrect), w(rong)."""
    problems = problem_set("test", len(verdicts), levels=(2,))
    words = {"c": "correct", "w": "wrong"}
    return [
        Answer(name, p.family, 2, p.question, p.answer, i, words[v], None, 10 + i, "stop", "")
        for p, (name, row) in zip(problems, verdicts.items(), strict=True)
        for i, v in enumerate(row)
    ]


def test_any_right_is_pass_at_k() -> None:
    rng = np.random.default_rng(0)
    table = {f"p{i}": "".join(rng.choice(list("cw"), size=8, p=(p, 1 - p))) for i, p in enumerate(rng.random(40) ** 3)}
    answers = answered(table)
    chosen = study.any_right(answers)
    assert [one.problem for one in chosen] == list(table)
    expected = [pass_at_k(8, row.count("c"), 8) for row in table.values()]
    scores = Scores.of([chosen])
    assert scores.accuracy[0].tolist() == expected
    assert 0 < np.mean(expected) < 1
    assert scores.samples == 1
    shuffled = [answers[i] for i in rng.permutation(len(answers))]
    right = {one.problem: one.verdict for one in study.any_right(shuffled)}
    assert right == {one.problem: one.verdict for one in chosen}


# --- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says", "remedy"),
    [
        (("weight = 1.0, ", ""), "the arm mel has no reflections", "Set mel.weight above 0"),
        (("grpo = {}", "grpo = { mel = { weight = 1 } }"), "the arm grpo has reflections", "Set mel.weight to 0"),
        (("grpo-matched = {}", "grpo-matched = { mel = { weight = 1 } }"), "grpo-matched has reflections", "to 0"),
        (("mel = { mel", "mel = { learner = { lr = 1e-5 }, mel"), "mel differs from grpo in more than", "same host"),
        (("grpo-matched = {}", "grpo-matched = { rollout = { prompts = 13 } }"), "grpo-matched differs", "same host"),
        (("samples = 8\ntemp", "samples = 4\ntemp"), "4 answers do not make avg@8", "Set study.samples to 8"),
        (("every = 1, problems", "every = 0, problems"), "grpo is never evaluated", "Set evaluate.every"),
        (("mel = { mel", "mel = { evaluate = { problems = 13 }, mel"), "mel is evaluated in another way", "same"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_recipes_that_compare_nothing_are_refused(change: tuple[str, str], says: str, remedy: str) -> None:
    assert change[0] in MINI
    with pytest.raises(UserError) as mistake:
        study.pieces(plan(MINI.replace(*change)))
    assert says in str(mistake.value)
    assert remedy in str(mistake.value)


def test_the_command_says_so_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mini.toml").write_text(MINI.replace("samples = 8\ntemp", "samples = 4\ntemp"))
    out = tmp_path / "out"
    assert main(["study", study.name, "--recipe", str(tmp_path / "mini.toml"), "--out", str(out)]) == 2
    assert "avg@8" in capsys.readouterr().err
    (tmp_path / "mini.toml").write_text(MINI)
    arms = ["--arms", "grpo,grpo-matched"]
    assert main(["study", study.name, "--recipe", str(tmp_path / "mini.toml"), "--out", str(out), *arms]) == 2
    assert "needs the arm mel" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("scale", ["cpu", "gpu", "paper"])
def test_the_packaged_recipes_pass_the_studys_own_checks(scale: str, tmp_path: Path) -> None:
    recipe = study_recipe(study.name, scale)
    assert set(recipe.arms) <= set(STUDIES[study.name].arms)
    names = [piece.name for piece in study.pieces(Plan(study.name, recipe, (0,), tmp_path, []))]
    for arm in recipe.arms:
        assert {f"{arm} 0", f"answers of {arm} 0"} <= set(names)
    assert names[-1] == "answers of base"


def test_matched_waits_for_both_arms_and_every_seed_for_its_own(tmp_path: Path) -> None:
    needs = {piece.name: piece.needs for piece in study.pieces(plan(out=tmp_path))}
    for seed in SEEDS:
        assert needs[f"grpo-matched {seed}"] == (f"grpo {seed}", f"mel {seed}")
        assert needs[f"grpo {seed}"] == needs[f"mel {seed}"] == ()
