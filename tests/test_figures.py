"""The training-dynamics figure: its files, the numbers behind it, and the caption that the control supports."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reasonlab.config import Config, EvaluateConfig, to_toml, validate
from reasonlab.errors import UserError
from reasonlab.evaluate.control import Split, caption, change_caption
from reasonlab.evaluate.evaluator import Answer
from reasonlab.evaluate.statistics import Interval, mean_interval, paired_difference, score_interval
from reasonlab.figures.dynamics import FORCED, TOTAL, draw_dynamics, panel_row, read_dynamics
from reasonlab.figures.panel_grid import draw_panel_grid, family_names
from reasonlab.figures.style import marker_size
from reasonlab.keys import key
from reasonlab.problems.tiny_world import FAMILY_NAMES
from reasonlab.runs import RunRecord

QUESTIONS, SAMPLES = 6, 2  # of each family


def answers(step: int, chance: float, families: tuple[str, ...], forced: bool = False) -> list[Answer]:
    """Made-up but keyed answers: right with the given chance, longer with every step."""
    rows = []
    for family in families:
        for question in range(QUESTIONS):
            for sample in range(SAMPLES):
                draw = key(step, family, question, sample, int(forced)) % 1000 / 1000
                rows.append(
                    Answer(
                        problem=f"{family}/2/validation/{question}",
                        family=family,
                        level=2,
                        question="1+1?",
                        gold="2",
                        sample=sample,
                        verdict="correct" if draw < chance else "wrong",
                        extracted="2" if draw < chance else "3",
                        tokens=4 + step + int(20 * draw),
                        finish="stop",
                        text="Answer:2<eos>",
                    )
                )
    return rows


def make_run(
    directory: Path, families: tuple[str, ...] = FAMILY_NAMES, steps: tuple[int, ...] = (0, 5, 10), control: bool = True
) -> Path:
    config = Config(evaluate=EvaluateConfig(samples=SAMPLES))
    record = RunRecord.create(directory, to_toml(config), ["train"])
    for step in steps:
        record.evaluation("tiny", step, [a.row() for a in answers(step, 0.3 + 0.03 * step, families)])
    if control:
        for step in {steps[0], steps[-1]}:
            record.evaluation("tiny-forced", step, [a.row() for a in answers(step, 0.7, families, forced=True)])
    record.finish("finished")
    return directory


def test_figure_files_are_whole_and_reproducible(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first = draw_dynamics(run, tmp_path / "a")
    second = draw_dynamics(run, tmp_path / "b")
    assert first.png.read_bytes().startswith(b"\x89PNG\r\n")
    assert first.svg.read_text(encoding="utf-8").rstrip().endswith("</svg>")
    for ending in ("png", "svg", "csv"):
        here, there = (tmp_path / folder / f"dynamics.{ending}" for folder in ("a", "b"))
        assert here.read_bytes() == there.read_bytes()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {first.png.name, first.svg.name, second.csv.name}


def test_table_holds_the_numbers_of_the_stored_answers(tmp_path: Path) -> None:
    files = draw_dynamics(make_run(tmp_path / "run"), tmp_path)
    with files.csv.open(encoding="utf-8", newline="") as file:
        rows = {(row["panel"], int(row["iteration"])): row for row in csv.DictReader(file)}
    panels = {TOTAL: FAMILY_NAMES} | {family: (family,) for family in FAMILY_NAMES}
    assert rows.keys() == {(panel, step) for panel in panels for step in (0, 5, 10)} | {(FORCED, 0), (FORCED, 10)}
    for (panel, step), row in rows.items():
        forced = panel == FORCED
        kept = answers(step, 0.7 if forced else 0.3 + 0.03 * step, panels.get(panel, FAMILY_NAMES), forced)
        right = np.array([a.verdict == "correct" for a in kept], dtype=float).reshape(-1, SAMPLES)
        lengths = np.array([a.tokens for a in kept], dtype=float).reshape(-1, SAMPLES)
        accuracy, tokens = score_interval(right), mean_interval(lengths.mean(axis=1))
        expected = {
            "accuracy": accuracy.estimate,
            "accuracy_low": accuracy.low,
            "accuracy_high": accuracy.high,
            "tokens": tokens.estimate,
            "tokens_low": tokens.low,
            "tokens_high": tokens.high,
            "tokens_p05": np.quantile(lengths, 0.05),
            "tokens_p95": np.quantile(lengths, 0.95),
            "questions": len(right),
            "samples": SAMPLES,
        }
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected, abs=1e-12)


def test_split_pairs_questions_and_adds_up(tmp_path: Path) -> None:
    split = read_dynamics(make_run(tmp_path / "run")).split
    assert split is not None
    means = [
        np.array([a.verdict == "correct" for a in answers(step, chance, FAMILY_NAMES, forced)], dtype=float)
        .reshape(-1, SAMPLES)
        .mean(axis=1)
        for step, chance, forced in ((0, 0.3, False), (10, 0.6, False), (0, 0.7, True), (10, 0.7, True))
    ]
    assert (split.before, split.after) == (0, 10)
    assert split.gain == paired_difference(means[0], means[1])[0]
    assert split.skill == paired_difference(means[2], means[3])[0]
    assert split.style.estimate == pytest.approx(split.gain.estimate - split.skill.estimate)


def around(points: float, half: float) -> Interval:
    return Interval(points / 100, (points - half) / 100, (points + half) / 100)


def say(gain: Interval, skill: Interval, half: float = 4) -> str:
    style = around(100 * (gain.estimate - skill.estimate), half)
    return caption(Split(0, 40, gain, style, skill), evaluations=9)


def test_caption_divides_the_gain_when_skill_is_clear() -> None:
    text = say(around(35, 5), around(5, 3))
    assert text == (
        "Iteration 0 to 40: of +35.0 points of accuracy [95 %: +30.0, +40.0], choosing to think accounts for about "
        "+30.0 [+26.0, +34.0] and thinking better for about +5.0 [+2.0, +8.0]."
    )


def test_caption_claims_no_skill_when_its_interval_includes_zero() -> None:
    text = say(around(35, 5), around(2, 3))
    assert "with thinking forced, +2.0 [−1.0, +5.0]: no clear evidence of better thinking" in text
    assert "thinking better for" not in text


def test_caption_says_when_skill_was_lost() -> None:
    text = say(around(35, 5), around(-6, 3))
    assert "choosing to think accounts for about +41.0" in text
    assert "with thinking forced, accuracy fell, −6.0 [−9.0, −3.0]" in text
    assert "thinking better for" not in text


@pytest.mark.parametrize(("gain", "words"), [(1, "shows no clear change, +1.0 points"), (-20, "fell, −20.0 points")])
def test_caption_divides_nothing_without_a_gain(gain: float, words: str) -> None:
    text = say(around(gain, 5), around(4, 2))
    assert words in text
    assert "accounts for" not in text


def test_caption_marks_a_style_share_that_may_be_zero() -> None:
    assert "about +1.0 [−3.0, +5.0] (not clear of zero) and thinking better" in say(around(35, 5), around(34, 3))


def test_caption_without_control_says_so(tmp_path: Path) -> None:
    dynamics = read_dynamics(make_run(tmp_path / "run", control=False))
    assert dynamics.caption.startswith("No control at both ends")
    assert draw_dynamics(tmp_path / "run", tmp_path).png.exists()


def test_caption_of_a_run_that_has_no_control_is_the_paired_change() -> None:
    ends = {step: answers(step, chance, FAMILY_NAMES, False) for step, chance in ((0, 0.3), (10, 0.6))}
    means = [
        np.array([a.verdict == "correct" for a in ends[step]], dtype=float).reshape(-1, SAMPLES).mean(axis=1)
        for step in ends
    ]
    gain = paired_difference(*means)[0]
    assert change_caption(ends) == (
        f"Iteration 0 to 10: accuracy {100 * gain.estimate:+.1f} points [95 %: {100 * gain.low:+.1f}, "
        f"{100 * gain.high:+.1f}], paired, on all {len(means[0])} questions together."
    )
    assert change_caption({0: ends[0]}).startswith("One evaluation so far")


def test_caption_claims_no_certainty_where_no_question_changed() -> None:
    wrong = {step: answers(step, 0.0, ("gcd",)) for step in (0, 10)}
    assert change_caption(wrong) == (
        "Iteration 0 to 10: no question changed; accuracy 0.0 % at both ends, on all 6 questions together."
    )
    other = [replace(wrong[10][0], verdict="correct"), *wrong[10][1:]]
    assert "accuracy +8.3 points [95 %" in change_caption({0: wrong[0], 10: other})


@pytest.mark.parametrize("families", [("gcd",), FAMILY_NAMES[:5]])
@pytest.mark.parametrize("steps", [(0,), (0, 3)])
def test_small_runs_are_drawn(tmp_path: Path, families: tuple[str, ...], steps: tuple[int, ...]) -> None:
    files = draw_dynamics(make_run(tmp_path / "run", families, steps), tmp_path / "new" / "out")
    assert files.dynamics.families == list(families)
    assert files.png.exists()


def test_title_names_model_method_and_sample_sizes(tmp_path: Path) -> None:
    dynamics = read_dynamics(make_run(tmp_path / "run"))
    assert dynamics.title == "Training dynamics: tiny-1m, mirror descent, seed 0"
    assert dynamics.subtitle.endswith("72 questions (6 per family), 2 samples each, temperature 1, at most 160 tokens")


@pytest.mark.parametrize(
    ("variant", "name"), [("dapo", "GRPO (dapo)"), ("dr_grpo", "GRPO (dr grpo)"), ("grpo", "GRPO")]
)
def test_title_and_subtitle_of_a_language_model_name_its_method_benchmarks_and_what_was_cut(
    tmp_path: Path, variant: str, name: str
) -> None:
    sections = {"evaluate": {"suite": "gsm8k_test,svamp"}, "method": {"type": "grpo", "variant": variant}}
    record = RunRecord.create(tmp_path / "run", to_toml(validate(sections, "test")), ["train"])
    for step, cut in ((0, 6), (10, 1)):
        rows = [replace(answer, finish="stop") for answer in answers(step, 0.5, ("gsm8k_test", "svamp"))]
        rows[:cut] = [replace(answer, finish="length") for answer in rows[:cut]]
        record.evaluation("gsm8k_test,svamp", step, [answer.row() for answer in rows])
    record.finish("finished")
    dynamics = read_dynamics(tmp_path / "run")
    assert dynamics.title == f"Training dynamics: tiny-1m, {name}, seed 0"
    assert "12 questions (6 per benchmark)" in dynamics.subtitle
    assert dynamics.subtitle.endswith("at most 160 tokens (answers cut: 25 % at iteration 0, 4 % at iteration 10)")


def test_every_evaluation_has_a_marker_and_many_have_small_ones() -> None:
    assert marker_size(4.0, 24) == 4.0
    assert marker_size(4.0, 96) == 1.0
    rows = [panel_row("a", TOTAL, step, answers(step, 0.5, ("gcd",))) for step in range(96)]
    axes = draw_panel_grid(rows, "title", "subtitle", "caption").axes[0]
    (line,) = axes.lines
    assert line.get_markevery() is None
    assert line.get_markersize() == pytest.approx((2.2 + 1.3 * 1.5) / 4)


def test_the_control_is_labelled_where_its_points_leave_room() -> None:
    steps = (0, 3, 10, 60)
    rows = [panel_row("a", TOTAL, step, answers(step, 0.5, ("gcd",))) for step in steps]
    rows += [panel_row("a", FORCED, step, answers(step, 0.7, ("gcd",), forced=True)) for step in (0, 3, 60)]
    (label,) = [text for text in draw_panel_grid(rows, "title", "subtitle", "caption").axes[0].texts if text.get_text()]
    assert label.get_text() == "thinking forced"
    assert label.xy[0] == 3  # a run that was stopped there


def test_panels_come_in_the_order_of_the_families() -> None:
    names = (*FAMILY_NAMES[::-1], "zebra", "aime")
    rows = [panel_row("a", name, 0, answers(0, 0.5, (name,))) for name in names]
    assert family_names(rows) == [*FAMILY_NAMES, "zebra", "aime"]


def test_run_without_evaluations_says_what_to_do(tmp_path: Path) -> None:
    RunRecord.create(tmp_path / "run", to_toml(Config()), ["train"]).finish("finished")
    with pytest.raises(UserError, match=r"no evaluation to draw.*evaluate\.every"):
        draw_dynamics(tmp_path / "run", tmp_path)
