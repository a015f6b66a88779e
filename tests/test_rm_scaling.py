"""The study rm-scaling: on a recipe that takes seconds, its statistics on judges of known quality, its estimate, its
tables and figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judge_pools import pool as spoiled_pool

from reasonlab.cli import main
from reasonlab.config import validate
from reasonlab.errors import UserError
from reasonlab.figures.published import acemath
from reasonlab.figures.record import Record
from reasonlab.figures.redraw import redraw
from reasonlab.figures.rm_scaling import draw_rm_scaling, parameters
from reasonlab.figures.tables import (
    AVERAGE,
    MAJORITY,
    ORACLE,
    PROGRESS,
    REFERENCES,
    SINGLE,
    ProgressRow,
    ReferenceRow,
    read_table,
)
from reasonlab.judges.settings import JudgeConfig
from reasonlab.judges.types import Candidate, read_pool, write_pool
from reasonlab.model.checkpoint import save_model
from reasonlab.model.ladder import SIZES, tiny_config
from reasonlab.model.tiny_tokenizer import TinyTokenizer, save
from reasonlab.model.transformer import Transformer
from reasonlab.studies.plan import Plan
from reasonlab.studies.recipe import SCALES, StudyRecipe, StudySettings, Writer, own_recipe, study_recipe
from reasonlab.studies.rm_judges import measure, read_measured, rm_at_8, sample
from reasonlab.studies.rm_scaling import Judges, Panels, claims, panels_of, pieces
from reasonlab.studies.rm_scaling_estimate import estimate, judge_estimate
from reasonlab.studies.runner import train_judge
from reasonlab.train.pretrain import RECIPES

MINIATURE = """
[problems]
levels = [1]
families = ["sum", "gcd", "counting"]
[rollout]
max_tokens = 48
[evaluate]
levels = [1]
[learner]
lr = 1e-3
[arms."tiny-0.3m"]
model = { path = "tiny-0.3m" }
[arms."tiny-1m"]
model = { path = "tiny-1m" }
[study]
questions = 12
samples = 5
sampled_problems = 32
list_answers = 3
list_batch = 4
judge_checkpoints = 3
writers = [{ model = "tiny-0.3m", temperature = 1.2 }, { model = "tiny-0.3m", thinking = true }]
"""


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("rm")
    (where / "mini.toml").write_text(MINIATURE)
    assert study(where) == 0
    return where / "out"


def study(where: Path, *more: str) -> int:
    words = ["study", "rm-scaling", "--recipe", str(where / "mini.toml"), "--out", str(where / "out"), *more]
    return main(words)


# --- from the command line -------------------------------------------------------------------------------------------


def test_a_study_leaves_verdicts_tables_and_figures(miniature: Path) -> None:
    content = json.loads((miniature / "verdicts.json").read_text())
    judged = {claim["id"]: claim for claim in content["claims"]}
    assert {"bigger-is-better", "more-data-helps", "size-matters-more-than-data", "largest-beats-majority"} <= set(
        judged
    )
    assert all(claim["verdict"] in ("holds", "fails", "undecided") for claim in judged.values())
    rows = read_table(miniature / PROGRESS, ProgressRow)
    assert {row.arm for row in rows} == {"tiny-0.3m", "tiny-1m"}
    assert {row.panel for row in rows} == {AVERAGE, "sum", "gcd", "counting"}
    steps = {row.progress for row in rows}
    assert len(steps) == 3
    assert max(steps) == 1
    for stem in ("rm_scaling", "rm_scaling_heatmap"):
        assert (miniature / f"{stem}.png").stat().st_size > 10_000
        assert (miniature / f"{stem}.svg").exists()


def test_rm_at_8_lies_between_what_is_possible_and_agrees_with_the_published_draws(miniature: Path) -> None:
    best = {row.panel: row.score for row in read_table(miniature / REFERENCES, ReferenceRow) if row.reference == ORACLE}
    for row in read_table(miniature / PROGRESS, ProgressRow):
        assert row.score <= best[row.panel] + 1e-9
        assert abs(row.drawn - row.score) <= 5 * row.drawn_error + 1e-9


def test_the_average_is_the_plain_mean_of_the_panels(miniature: Path) -> None:
    rows = read_table(miniature / PROGRESS, ProgressRow)
    for arm, progress in {(row.arm, row.progress) for row in rows}:
        at = {row.panel: row.score for row in rows if (row.arm, row.progress) == (arm, progress)}
        average = at.pop(AVERAGE)
        assert average == pytest.approx(np.mean(list(at.values())))


def test_pools_hold_all_writers_and_the_two_splits_share_no_question(miniature: Path) -> None:
    pools = {part: read_pool(miniature / "pools" / part / "pool.jsonl.gz") for part in ("train", "test")}
    assert len(pools["train"]) == 32 * 2 * 3
    assert len(pools["test"]) == 12 * 2 * 5
    assert {one.source for one in pools["test"]} == {"tiny-0.3m at 1.2", "tiny-0.3m at 1, thinking"}
    assert not {one.question for one in pools["train"]} & {one.question for one in pools["test"]}
    thinking = [one for one in pools["test"] if one.source.endswith("thinking")]
    assert all(one.response.startswith("<think>") for one in thinking)
    assert not any("<eos>" in one.response for one in pools["test"])


def test_what_was_lost_is_made_again_to_the_same_numbers(miniature: Path) -> None:
    """As after a kill: a policy's candidates, the joined pool and one measurement are gone."""
    before = {name: (miniature / name).read_bytes() for name in (PROGRESS, REFERENCES)}
    lost = [
        miniature / "pools" / "test" / "policy-0" / "pool.jsonl.gz",
        miniature / "pools" / "test" / "pool.jsonl.gz",
        next((miniature / "runs" / "seed-0" / "tiny-0.3m" / "rm8").glob("*.npz")),
    ]
    kept = miniature / "runs" / "seed-0" / "tiny-1m" / "checkpoints" / "latest"
    time = kept.stat().st_mtime_ns
    for file in lost:
        file.unlink()
    assert study(miniature.parent) == 0
    assert {name: (miniature / name).read_bytes() for name in before} == before
    assert all(file.exists() for file in lost)
    assert kept.stat().st_mtime_ns == time  # no judge was trained again


def test_another_recipe_in_the_same_place_is_refused(miniature: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = miniature.parent / "other.toml"
    other.write_text(MINIATURE.replace("lr = 1e-3", "lr = 2e-3"))
    words = ["study", "rm-scaling", "--recipe", str(other), "--out", str(miniature)]
    assert main(words) != 0
    assert "lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('[arms."tiny-1m"]\nmodel = { path = "tiny-1m" }\n', ""), "trend"),
        (('[arms."tiny-1m"]\nmodel = { path = "tiny-1m" }', '[arms."tiny-1m"]'), "same model"),
        (("judge_checkpoints = 3", "judge_checkpoints = 9"), "checkpoints"),
        (("samples = 5", "samples = 3"), "rm@8"),
        (("questions = 12", "questions = 4"), "panel"),
        ((', { model = "tiny-0.3m", thinking = true }', ', { model = "tiny-0.3m", temperature = 1.2 }'), "twice"),
    ],
)
def test_recipes_that_would_fail_late_fail_before_anything_is_written(
    change: tuple[str, str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert change[0] in MINIATURE
    text = MINIATURE.replace('[arms."tiny-0.3m"]\nmodel = { path = "tiny-0.3m" }', '[arms."tiny-0.3m"]')
    base = '\n[model]\npath = "tiny-0.3m"\n' + text
    (tmp_path / "mini.toml").write_text(base.replace(*change))
    assert study(tmp_path) != 0
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- statistics ------------------------------------------------------------------------------------------------------


def pool(right_first: bool) -> tuple[list[Candidate], np.ndarray[Any, Any]]:
    """Two families, 3 questions each, 16 candidates, half of them right, all wrong ones alike."""
    candidates, scores = [], []
    for family, question, number in product("ab", range(3), range(16)):
        right = number % 2 == 0
        text = f"<answer>{7 if right else 3}</answer>"
        candidates.append(Candidate(f"{family}{question}", f"{family}{question}", text, "7", right, family))
        scores.append(float(right == right_first))
    return candidates, np.array(scores)


def test_a_perfect_judge_reaches_the_oracle_and_a_perverse_one_misses_it() -> None:
    for right_first in (True, False):
        candidates, scores = pool(right_first)
        exact, drawn = rm_at_8(candidates, scores)
        # Of 8 out of 16, half of them right, all are wrong with chance C(8,8)/C(16,8).
        expected = 1 - 1 / math.comb(16, 8) if right_first else 1 / math.comb(16, 8)
        assert exact == pytest.approx(np.full(6, expected))
        assert drawn.shape == (2, 2)
        assert drawn[:, 0] == pytest.approx([expected] * 2, abs=0.01)


def test_references_by_question() -> None:
    panels = panels_of(pool(True)[0])
    assert panels.names == ["a", "b"]
    assert panels.single == pytest.approx(np.full(6, 0.5))
    assert panels.majority == pytest.approx(np.full(6, 0.5))  # as many right as wrong ones, by symmetry
    assert panels.oracle == pytest.approx(np.full(6, 1 - 1 / math.comb(16, 8)))


FAMILIES, EACH, CHECKPOINTS = tuple("abcdef"), 80, 10
HARD = ("a", "b", "c")


def made_up(
    seeds: int = 3, slope: float = 0.1, gain: float = 0.1, extra: float = 0.0, noise: float = 0.1, seed: int = 0
) -> tuple[Judges, Panels]:
    """Six judges whose rm@8 rises with log10 of size and of progress by so much; on hard panels large ones gain
    `extra` more for every decade of size."""
    rng = np.random.default_rng(seed)
    of_question = tuple(family for family in FAMILIES for _ in range(EACH))
    hard = np.array([family in HARD for family in of_question])
    questions = rng.normal(0, 0.2, len(of_question))
    sizes, progress = 10.0 ** np.linspace(4.5, 6, 6), np.arange(1, CHECKPOINTS + 1) / CHECKPOINTS
    rm = np.zeros((6, CHECKPOINTS, seeds, len(of_question)))
    for size, point in product(range(6), range(CHECKPOINTS)):
        decade, grown = size * 0.3, math.log10(10 * progress[point])
        mean = 0.4 + slope * decade + (gain + extra * decade * hard) * grown
        rm[size, point] = mean + questions + rng.normal(0, noise, (seeds, len(of_question)))
    single = np.where(hard, 0.2, 0.6)
    panels = Panels(of_question, np.full(len(single), 0.45), np.full(len(single), 0.95), single)
    drawn = np.zeros((6, CHECKPOINTS, seeds, len(FAMILIES), 2))
    return Judges(tuple(SIZES[:6]), sizes, progress, tuple(range(1, 11)), rm, drawn), panels


def verdicts(*parts: Any) -> dict[str, Any]:
    return {claim.id: claim for claim in claims(*parts)}


@pytest.mark.parametrize("seeds", [1, 3])
def test_claims_find_what_was_built_in(seeds: int) -> None:
    judged = verdicts(*made_up(seeds, slope=0.2, gain=0.05, extra=0.1))
    assert judged["bigger-is-better"].verdict == "holds"
    low, high = judged["bigger-is-better"].interval
    assert low < 20 + 100 * 0.1 / 2 < high  # the end also has what large ones gained on the hard half
    assert judged["more-data-helps"].verdict == "holds"
    assert judged["large-judges-gain-more-on-hard"].verdict == "holds"
    assert judged["hard-panels-need-size"].verdict == "holds"
    assert judged["size-matters-more-than-data"].verdict == "holds"
    assert judged["bigger-is-better-everywhere"].verdict == "holds"
    assert judged["largest-beats-majority"].verdict == "holds"


def test_a_trend_that_hangs_on_the_largest_judge_is_gone_without_it() -> None:
    judges, panels = made_up(slope=0, noise=0.01)
    rm = judges.rm.copy()
    rm[-1] += 0.3
    steep = replace(judges, rm=rm)
    assert panels.average_of(steep.trend()).low > 0.1
    assert abs(panels.average_of(steep.trend(slice(None, -1))).estimate) < 0.02


def test_claims_fail_where_the_opposite_was_built_in() -> None:
    judged = verdicts(*made_up(slope=-0.2, gain=-0.05, extra=-0.1))
    for name in ("bigger-is-better", "more-data-helps", "large-judges-gain-more-on-hard", "hard-panels-need-size"):
        assert judged[name].verdict == "fails", name
    assert judged["bigger-is-better-everywhere"].verdict == "fails"
    assert judged["largest-beats-majority"].verdict == "fails"


def test_nothing_is_claimed_of_judges_that_do_not_differ() -> None:
    """Of 40 made-up studies without any effect, an interval of 95 % excludes zero in few."""
    wrong = 0
    for seed in range(40):
        judged = verdicts(*made_up(seeds=1, slope=0, gain=0, seed=seed))
        wrong += judged["bigger-is-better"].verdict != "undecided"
    assert wrong <= 6


def test_hard_panels_are_those_where_single_answers_are_seldom_right() -> None:
    assert made_up()[1].hard == list(HARD)


def test_an_average_weighs_panels_alike_and_ignores_how_far_apart_they_are() -> None:
    """Panels of different size and level: the interval is that of scatter within panels."""
    rng = np.random.default_rng(1)
    within = rng.normal(0, 0.1, 90)
    panels = Panels(("a",) * 60 + ("b",) * 30, *(np.zeros(90),) * 3)
    shift = np.array([0.0] * 60 + [5.0] * 30)
    near, far = panels.average_of(within[None]), panels.average_of((within + shift)[None])
    assert far.estimate == pytest.approx(near.estimate + 2.5)
    assert far.high - far.low == pytest.approx(near.high - near.low)
    error = math.sqrt(within[:60].var(ddof=1) / 60 + within[60:].var(ddof=1) / 30) / 2
    assert (far.high - far.low) / 2 == pytest.approx(1.99 * error, rel=0.05)


# --- recipes, sizes and estimate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_has_six_sizes_ten_checkpoints_and_an_estimate(
    scale: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = study_recipe("rm-scaling", scale)
    assert len(recipe.arms) == 6
    assert recipe.settings.judge_checkpoints >= 10
    assert main(["study", "rm-scaling", "--scale", scale, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert all(arm in text for arm in recipe.arms)


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_the_tiny_scales_have_64_candidates_and_equal_panels(scale: str) -> None:
    recipe = study_recipe("rm-scaling", scale)
    settings = recipe.settings
    assert len(settings.writers) * settings.samples == 64
    assert {one.temperature for one in settings.writers} == {0.7, 1.0, 1.2}
    assert settings.questions % (12 * len(recipe.arms["tiny-1m"].evaluate.levels)) == 0
    assert all(arm in RECIPES for arm in recipe.arms)  # a base that does not ship can be made


def test_a_base_that_does_not_ship_is_made_before_its_judge_and_its_candidates() -> None:
    plan = Plan("rm-scaling", study_recipe("rm-scaling", "gpu"), (0, 1), Path("out"), [])
    needs = {piece.name: piece.needs for piece in pieces(plan)}
    assert needs["tiny-32m"] == ()
    assert "tiny-32m" in needs["judge tiny-32m 1"]
    assert "tiny-3m" in needs["train candidates of tiny-3m at 1, thinking"]
    assert set(needs["scores of tiny-32m 1"]) == {"judge tiny-32m 1", "test pool"}
    assert not any("32m" in need for name, of in needs.items() for need in of if "32m" not in name)


def test_score_sorted_lists_wait_for_the_scores(tmp_path: Path) -> None:
    (tmp_path / "mini.toml").write_text(MINIATURE + '\nsorter = "judges/sorter"\n')
    plan = Plan("rm-scaling", own_recipe(tmp_path / "mini.toml"), (0,), tmp_path, [])
    work = {piece.name: piece for piece in pieces(plan)}
    assert "sorting scores" in work["judge tiny-1m 0"].needs
    learning = work["judge tiny-1m 0"].arguments[0]
    assert learning.scores == str(tmp_path / "pools" / "train" / "scores.jsonl.gz")


@pytest.mark.parametrize("rung", ["tiny-0.03m", "tiny-0.06m", "tiny-0.1m", "tiny-0.2m"])
def test_small_rungs_make_judges_and_writers(rung: str, tmp_path: Path) -> None:
    """Also where heads × 32 is not the hidden size. The weights are random: these rungs need not ship."""
    tokenizer = TinyTokenizer.load()
    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    model = Transformer(tiny_config(rung, tokenizer.vocab_size, **ids))
    model.initialise(0)
    (tmp_path / rung).mkdir()
    save_model(model, tmp_path / rung)
    save(tmp_path / rung)
    policy = Writer(model=str(tmp_path / rung), thinking=True)
    settings = StudySettings(questions=4, samples=2, writers=(policy,))
    few = validate({"rollout": {"max_tokens": 12}, "threads": 1}, "test")
    sample("test", policy, few, settings, tmp_path / "pool.jsonl.gz")
    assert len(read_pool(tmp_path / "pool.jsonl.gz")) == 8
    write_pool(tmp_path / "lists.jsonl.gz", spoiled_pool(8))
    learning = JudgeConfig(model=str(tmp_path / rung), data=str(tmp_path / "lists.jsonl.gz"), batch=4, checkpoints=2)
    train_judge(learning, tmp_path / "run", [])
    (tmp_path / "questions").mkdir()
    write_pool(tmp_path / "questions" / "pool.jsonl.gz", spoiled_pool(6, each=8, split="validation"))
    measure(tmp_path / "run", tmp_path / "questions", "cpu", 1)
    first, last = read_measured(tmp_path / "run")
    assert (first.progress, last.progress, first.lists, last.lists) == (0.5, 1, 4, 8)
    head = model.config.hidden_size
    assert last.parameters == model.config.parameter_count() + head
    assert len(last.rm) == 6
    assert ((last.rm >= 0) & (last.rm <= 1)).all()


def test_the_paper_recipe_is_the_published_one() -> None:
    recipe = study_recipe("rm-scaling", "paper")
    settings = recipe.settings
    assert (settings.sampled_problems, settings.list_batch, settings.samples) == (356_000, 256, 64)
    assert set(recipe.arms) == set(acemath()["figure"]["sizes"])


def test_an_estimate_counts_tokens_and_grows_with_lists_and_size() -> None:
    recipe = study_recipe("rm-scaling", "cpu")
    small, large = (_estimated(recipe, arm) for arm in ("tiny-0.03m", "tiny-1m"))
    settings = recipe.settings
    assert small.trained_tokens == settings.sampled_problems * (15 + 6 * 50)
    assert small.scored_tokens == 10 * settings.questions * (15 + 64 * 50)
    assert large.flops > 10 * small.flops
    more = replace(recipe, settings=settings.model_copy(update={"sampled_problems": 2 * settings.sampled_problems}))
    assert _estimated(more, "tiny-1m").trained_tokens == 2 * large.trained_tokens
    assert "policy" in estimate(recipe)


def _estimated(recipe: StudyRecipe, arm: str) -> Any:
    from reasonlab.studies.machines import ThisMachine

    return judge_estimate(arm, recipe.arms[arm], recipe, ThisMachine())


def test_a_recipe_with_a_misspelt_writer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mini.toml").write_text(MINIATURE.replace("thinking = true", "thinks = true"))
    with pytest.raises(UserError, match="writers"):
        own_recipe(tmp_path / "mini.toml")


# --- figures and published numbers -----------------------------------------------------------------------------------


def test_figures_are_drawn_again_to_the_same_bytes(miniature: Path, tmp_path: Path) -> None:
    files = redraw(miniature, tmp_path)
    assert {file.name for file in files} == {
        f"{stem}.{kind}" for stem in ("rm_scaling", "rm_scaling_heatmap") for kind in ("png", "svg")
    }
    assert (tmp_path / "rm_scaling.png").read_bytes() == (miniature / "rm_scaling.png").read_bytes()


def test_figures_without_an_average_or_a_reference_are_refused(miniature: Path, tmp_path: Path) -> None:
    rows = read_table(miniature / PROGRESS, ProgressRow)
    references = read_table(miniature / REFERENCES, ReferenceRow)
    with pytest.raises(UserError, match="average"):
        draw_rm_scaling([row for row in rows if row.panel != AVERAGE], references, Record("rm-scaling"), tmp_path)
    lacking = [row for row in references if (row.panel, row.reference) != ("gcd", MAJORITY)]
    with pytest.raises(UserError, match="gcd"):
        draw_rm_scaling(rows, lacking, Record("rm-scaling"), tmp_path)


@pytest.mark.parametrize(
    ("count", "text"),
    [(30_880, "31k"), (999_700, "1.0m"), (9.55e6, "9.6m"), (2.9e7, "29m"), (5e8, "500m"), (32e9, "32b")],
)
def test_sizes_are_written_short(count: float, text: str) -> None:
    assert parameters(count) == text


@pytest.mark.parametrize("change", [{"score": 1.2}, {"low": 0.9}, {"lists": 0}, {"progress": math.nan}])
def test_rows_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    row: dict[str, Any] = {"arm": "a", "panel": "sum", "progress": 0.5, "lists": 10, "parameters": 100}
    row |= {"score": 0.5, "low": 0.4, "high": 0.6, "drawn": 0.5, "drawn_error": 0.01, "questions": 12, "seeds": 1}
    ProgressRow(**row)
    with pytest.raises(ValueError, match=r"progress|score|low|lists"):
        ProgressRow(**row | change)
    with pytest.raises(ValueError, match="reference"):
        ReferenceRow("sum", "pass@9", 0.5, 0.4, 0.6, "hard")
    ReferenceRow("sum", SINGLE, 0.5, 0.4, 0.6, "hard")


def test_published_averages_are_the_means_of_the_seven_sets() -> None:
    table = acemath()["table"]
    for name, scores in table["scores"].items():
        *sets, average = scores
        assert len(sets) == 7, name
        assert np.mean(sets) == pytest.approx(average, abs=2e-4), name


def test_published_curves_lie_within_their_axes() -> None:
    figure = acemath()["figure"]
    for name, curves in figure["curves"].items():
        low, high = figure["axes"][name]
        values = [value for curve in curves.values() for value in curve if value is not None]
        assert low - 0.006 <= min(values), name
        assert max(values) <= high + 0.006, name
