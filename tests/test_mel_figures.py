"""The figures of the mel-vs-grpo study: drawn from small tables, with circles for GRPO and triangles for MEL."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reasonlab.errors import UserError
from reasonlab.figures import style
from reasonlab.figures.mel_reflection import draw_mel_reflection, reflection_figure, running_mean
from reasonlab.figures.mel_validation import GRPO, MATCHED, MEL, draw_mel_validation, validation_figure
from reasonlab.figures.panel_grid import FORCED, TOTAL
from reasonlab.figures.published import mel
from reasonlab.figures.record import VERDICTS, Record, read_record
from reasonlab.figures.redraw import redraw
from reasonlab.figures.style import BLUE, GREEN, VERMILION
from reasonlab.figures.tables import (
    EXPERIENCE,
    METRICS,
    PANELS,
    SCORES,
    ExperienceRow,
    PanelRow,
    ScoreRow,
    columns,
    read_table,
    write_table,
)
from reasonlab.problems.tiny_world import FAMILY_NAMES

ALL_ARMS = (GRPO, MEL, MATCHED)
FIVE = FAMILY_NAMES[:5]
STEPS = (0, 10, 20, 30)
NAN = math.nan
PROTOCOL: dict[str, Any] = {
    **{"model": "tiny-1m", "iterations": 30, "prompts": 64, "rollouts_per_prompt": 8, "lr": 3e-4, "mel_weight": 1.0},
    **{"pairs": 1, "temperature": 0.6, "max_tokens": 160, "split": "test", "questions": 480, "samples": 8},
    "token_ratio": 1.02,
}
RECORD = Record("mel-vs-grpo", PROTOCOL)


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pixels: the tests look at what is in the files, not at how sharp it is."""
    monkeypatch.setattr(style, "PNG_DPI", 40)


def around(value: float, width: float, seeds: int) -> tuple[float, float]:
    return (value - width, value + width) if seeds > 1 else (NAN, NAN)


def panels(
    arms: tuple[str, ...] = ALL_ARMS, families: tuple[str, ...] = FAMILY_NAMES, seeds: int = 3
) -> list[PanelRow]:
    """GRPO goes from 40 to 55 %, MEL to 57 %, matched GRPO to 59 %; the families are a little apart."""
    rows = []
    for number, arm in enumerate(arms):
        for place, name in enumerate((TOTAL, *families)):
            for step in STEPS:
                accuracy = 0.4 + 0.01 * place + step * (0.005 + 0.02 / 30 * number)
                low, high = around(accuracy, 0.04, seeds)
                questions = 40 * max(1, len(families) if name == TOTAL else 1)
                rows.append(PanelRow(arm, name, step, accuracy, low, high, 50, 49, 51, 5, 99, questions, 1, seeds))
    return rows


def scores(arms: tuple[str, ...] = ("base", *ALL_ARMS), seeds: int = 3) -> list[ScoreRow]:
    rows = []
    for number, arm in enumerate(arms):
        for place, metric in enumerate(METRICS):
            score = 0.4 + 0.05 * number + 0.1 * place
            low, high = around(score, 0.021, seeds)
            rows.append(ScoreRow(arm, metric, score, low, high, 480, 1 if place == 0 else 8, seeds))
    return rows


def experience(arms: tuple[str, ...] = ALL_ARMS, seeds: int = 3, steps: int = 30) -> list[ExperienceRow]:
    rows = []
    for arm in arms:
        for step in range(1, steps + 1):
            reward, retention = 0.3 + 0.01 * step, 0.4 + 0.005 * step + 0.05 * (step % 2)
            low, high = around(reward, 0.03, seeds)
            if arm == MEL:
                least, most = around(retention, 0.05, seeds)
                kept = (retention, least, most, 0.5, 34.0, 0.4, 9000.0)
            else:
                kept = (NAN, NAN, NAN, NAN, NAN, NAN, NAN)  # only MEL reflects
            rows.append(ExperienceRow(arm, step, reward, low, high, *kept, seeds))
    return rows


def study(
    directory: Path, some_panels: list[PanelRow], some_scores: list[ScoreRow], some_experience: list[ExperienceRow]
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_table(directory / PANELS, PanelRow, some_panels)
    write_table(directory / SCORES, ScoreRow, some_scores)
    write_table(directory / EXPERIENCE, ExperienceRow, some_experience)
    content = {"study": "mel-vs-grpo", "protocol": PROTOCOL}
    (directory / VERDICTS).write_text(json.dumps(content), encoding="utf-8")
    return directory


def words(svg: Path) -> str:
    """The texts of a figure, line after line: matplotlib draws letters as curves, and leaves the text as comments."""
    lines = re.findall(r"<!-- (.*?) -->", svg.read_text(encoding="utf-8"))
    return " ".join(lines).replace("\u00a0", " ")


def titled(figure: Any) -> dict[str, Any]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def curves(axes: Any) -> dict[str, Any]:
    """The lines of an axes that have markers, by colour."""
    return {line.get_color(): line for line in axes.lines if line.get_marker() != "None"}


# --- tables -----------------------------------------------------------------------------------------------------


def test_tables_read_back_what_was_written(tmp_path: Path) -> None:
    write_table(tmp_path / "e.csv", ExperienceRow, experience(seeds=1))
    assert str(read_table(tmp_path / "e.csv", ExperienceRow)) == str(experience(seeds=1))  # nan is not equal to nan
    assert (tmp_path / "e.csv").read_text(encoding="utf-8").splitlines()[1].endswith(",,,,,,,,,,1")
    write_table(tmp_path / "s.csv", ScoreRow, scores())
    assert read_table(tmp_path / "s.csv", ScoreRow) == scores()


def test_columns_are_those_agreed_on() -> None:
    assert ",".join(columns(ExperienceRow)) == (
        "arm,iteration,reward,reward_low,reward_high,retention,retention_low,retention_high,"
        "mixed,reflection_tokens,nll,extra_tokens,seeds"
    )
    assert ",".join(columns(ScoreRow)) == "arm,metric,score,low,high,questions,samples,seeds"


@pytest.mark.parametrize(
    ("kind", "line", "complaint"),
    [
        (ExperienceRow, "mel,1,,,,0.5,,,,,,,1", "reward must be a number"),
        (ExperienceRow, "mel,1,0.5,0.6,0.7,,,,,,,,1", "reward_low, reward, reward_high are not in increasing"),
        (ExperienceRow, "mel,1,0.5,,,50,,,,,,,1", "retention 50 is not a fraction"),
        (ExperienceRow, "mel,1,0.5,,,0.5,0.6,0.7,,,,,1", "retention_low"),
        (ExperienceRow, "mel,1,0.5,,,0.5,,,1.5,,,,1", "mixed 1.5 is not a fraction"),
        (ExperienceRow, "mel,1,0.5,,,0.5,,,,-3,,,1", "reflection_tokens -3"),
        (ExperienceRow, "mel,1,0.5,,,,,,,,,,0", "seeds is at least 1"),
        (ScoreRow, "mel,pass@4,0.5,,,480,8,1", "metric is 'pass@4'"),
        (ScoreRow, "mel,avg@8,50,,,480,8,1", "score 50 is not a fraction"),
        (ScoreRow, "mel,avg@8,0.5,0.6,0.7,480,8,1", "increasing"),
        (ScoreRow, "mel,avg@8,0.5,,,0,8,1", "at least 1"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, kind: Any, line: str, complaint: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{','.join(columns(kind))}\n{line}\n", encoding="utf-8")
    with pytest.raises(UserError, match=complaint) as caught:
        read_table(path, kind)
    assert f"{path}, line 2: " in str(caught.value)


def test_second_row_of_an_arm_and_words_for_numbers_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "e.csv", ExperienceRow, experience()[:1] * 2)
    with pytest.raises(UserError, match="second row of grpo, 1"):
        read_table(tmp_path / "e.csv", ExperienceRow)
    (tmp_path / VERDICTS).write_text('{"study": "mel-vs-grpo", "protocol": {"token_ratio": "same"}}', encoding="utf-8")
    with pytest.raises(UserError, match="token_ratio is 'same', not a number"):
        read_record(tmp_path / VERDICTS)


# --- both figures -----------------------------------------------------------------------------------------------


def test_study_is_drawn_from_its_tables_with_the_same_bytes(tmp_path: Path) -> None:
    """Also with more in the tables: neither ablations nor the control with thinking forced are in these figures."""
    more = [replace(row, arm="mel-no-filter", accuracy=0.99, accuracy_high=1.0) for row in panels((MEL,))]
    more += [replace(row, panel=FORCED) for row in panels((MEL,)) if row.panel == TOTAL]
    more_scores = [replace(row, arm="mel-no-filter") for row in scores((MEL,))]
    more_experience = [replace(row, arm="mel-no-filter") for row in experience((MEL,))]
    plain = study(tmp_path / "plain", panels(), scores(), experience())
    full = study(tmp_path / "full", panels() + more, scores() + more_scores, experience() + more_experience)
    first, second = redraw(plain, tmp_path / "a"), redraw(full, tmp_path / "b")
    stems = ("mel_validation", "mel_reflection")
    assert [path.name for path in first] == [f"{stem}.{ending}" for stem in stems for ending in ("png", "svg")]
    for here, there in zip(first, second, strict=True):
        assert here.read_bytes() == there.read_bytes()
    drawn = words(tmp_path / "a" / "mel_validation.svg")
    for text in (
        "MEL against GRPO: validation score, tiny-1m, mean of 3 seeds",
        "Held-out test problems: 480 questions (40 per family), one greedy answer each of at most 160 tokens, 3 seeds",
        "bands: 95 % over questions and seeds",
        "GRPO with as many generated tokens as MEL",
        "GRPO 55.0, MEL 57.0, matched 59.0 %",
        "GRPO 40.0 → 55.0 %, MEL 40.0 → 57.0 %, matched GRPO 40.0 → 59.0 % (step 0 to 30)",
        "Matched GRPO generated 1.02 times as many tokens as MEL",
        "64 prompts × 8 rollouts, learning rate 0.0003, MEL weight 1, 1 pair for a mixed prompt",
        "480 questions, 8 samples at T = 0.6, 3 seeds, 95 % intervals",
        "[37.9, 42.1]",
        *FAMILY_NAMES,
    ):
        assert text in drawn
    drawn = words(tmp_path / "a" / "mel_reflection.svg")
    for text in ("running mean over 9 steps", "14B, published", "read by eye", "8B GRPO 0.45, MEL 0.50"):
        assert text in drawn


def test_one_seed_has_lines_without_bands_and_says_so(tmp_path: Path) -> None:
    draw_mel_validation(panels(families=FIVE, seeds=1), scores(seeds=1), RECORD, tmp_path)
    drawn = words(tmp_path / "mel_validation.svg")
    for text in ("no intervals: one seed", "tiny-1m, one seed", "480 questions, 8 samples at T = 0.6, 1 seed base"):
        assert text in drawn
    assert "[" not in drawn
    draw_mel_reflection(experience(seeds=1), RECORD, tmp_path)
    assert "no intervals" in words(tmp_path / "mel_reflection.svg")


def test_study_without_matched_arm_base_protocol_and_some_metrics(tmp_path: Path) -> None:
    arms, record = (GRPO, MEL), Record("mel-vs-grpo")
    some = [row for row in scores(arms) if (row.arm, row.metric) != (MEL, "avg@8")]
    draw_mel_validation(panels(arms, FIVE), some, record, tmp_path)
    draw_mel_reflection(experience(arms), record, tmp_path)
    for name in ("mel_validation.svg", "mel_reflection.svg"):
        drawn = words(tmp_path / name)
        assert "atched" not in drawn
        assert "as many generated tokens" not in drawn
        assert "Training:" not in drawn
    assert " – " in words(tmp_path / "mel_validation.svg")


def test_an_arm_with_fewer_seeds_says_so(tmp_path: Path) -> None:
    rows = [replace(row, seeds=1) if row.arm == MATCHED else row for row in panels(families=FIVE)]
    draw_mel_validation(rows, scores(), RECORD, tmp_path)
    assert "GRPO with as many generated tokens as MEL (1 seed)" in words(tmp_path / "mel_validation.svg")


@pytest.mark.parametrize("arm", [GRPO, MEL])
def test_studies_without_one_of_the_two_methods_are_refused(tmp_path: Path, arm: str) -> None:
    others = tuple(one for one in ALL_ARMS if one != arm)
    only_families = [row for row in panels() if row.arm != arm or row.panel != TOTAL]
    with pytest.raises(UserError, match=rf"the arm {arm} has no average in panels\.csv"):
        draw_mel_validation(panels(others), scores(), RECORD, tmp_path)
    with pytest.raises(UserError, match=rf"the arm {arm} has no average in panels\.csv"):
        draw_mel_validation(only_families, scores(), RECORD, tmp_path)
    with pytest.raises(UserError, match=rf"the arm {arm} has no row in scores\.csv"):
        draw_mel_validation(panels(), scores(others), RECORD, tmp_path)
    with pytest.raises(UserError, match=rf"the arm {arm} has no row in experience\.csv"):
        draw_mel_reflection(experience(others), RECORD, tmp_path)


def test_missing_tables_and_missing_retention_are_refused(tmp_path: Path) -> None:
    made = study(tmp_path, panels(), scores(), experience())
    (made / SCORES).unlink()
    with pytest.raises(UserError, match=r"cannot read the table .*scores\.csv"):
        redraw(made, tmp_path)
    nothing = [replace(row, retention=NAN, retention_low=NAN, retention_high=NAN) for row in experience()]
    with pytest.raises(UserError, match="no retention ratio"):
        draw_mel_reflection(nothing, RECORD, tmp_path)


# --- what is in the axes ----------------------------------------------------------------------------------------


def test_grpo_has_circles_mel_triangles_and_matched_grpo_hollow_circles() -> None:
    figure = validation_figure(panels(), scores(), RECORD, "")
    for name in ("average", *FAMILY_NAMES):
        lines = curves(titled(figure)[name])
        assert set(lines) == {BLUE, VERMILION, GREEN}
        assert [lines[colour].get_marker() for colour in (BLUE, VERMILION, GREEN)] == ["o", "^", "o"]
        assert [lines[colour].get_markerfacecolor() for colour in (BLUE, VERMILION, GREEN)] == [
            BLUE,
            VERMILION,
            "white",
        ]
        assert [lines[colour].get_linestyle() for colour in (BLUE, VERMILION, GREEN)] == ["-", "-", "--"]
        for line in lines.values():  # a marker at every evaluated step
            assert list(line.get_xdata()) == list(STEPS)
            assert line.get_markevery() is None
        bands = titled(figure)[name].collections
        assert len(bands) == 3
    assert list(curves(titled(figure)["average"])[VERMILION].get_ydata()) == pytest.approx(
        [40, 45.667, 51.333, 57], 1e-4
    )


def test_published_panels_have_the_same_markers_and_end_where_the_table_does() -> None:
    axes = titled(validation_figure(panels(), scores(), RECORD, ""))
    for model in ("4B", "8B", "14B"):
        lines = curves(axes[model])
        assert {colour: line.get_marker() for colour, line in lines.items()} == {BLUE: "o", VERMILION: "^"}
        assert not axes[model].collections  # no intervals were published
        table = mel()["table"]["scores"][model]
        for colour, arm in ((BLUE, GRPO), (VERMILION, MEL)):
            y = lines[colour].get_ydata()
            ends = [100 * table["base"]["average"][0], 100 * table[arm]["average"][0]]
            assert [y[0], y[-1]] == pytest.approx(ends)


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 8, 9, 10, 12, 13])
def test_any_number_of_panels_finds_room_and_none_lies_over_another(count: int) -> None:
    names = tuple(f"family {number}" for number in range(count))
    figure = validation_figure(panels(families=names), scores(), RECORD, "")
    axes = titled(figure)
    assert set(axes) == {"average", *names, "4B", "8B", "14B"}
    boxes = [one.get_position() for one in figure.axes]
    for number, box in enumerate(boxes):
        assert 0 <= box.x0 < box.x1 <= 1
        assert 0 <= box.y0 < box.y1 <= 1
        assert not any(box.overlaps(other) for other in boxes[:number])
    average = axes["average"].get_position()
    for name in names:
        assert axes[name].get_position().x0 > average.x1
        assert axes[name].get_position().height <= average.height
    for one in figure.axes:  # nothing measured lies outside of what is shown
        low, high = one.get_ylim()
        assert 0 <= low < high <= 100
        for line in curves(one).values():
            assert low <= min(line.get_ydata())
            assert high >= max(line.get_ydata())


def test_reflection_figure_draws_steps_faintly_and_their_running_mean() -> None:
    rows = experience()
    axes = titled(reflection_figure(rows, RECORD, ""))
    reward = axes["Training reward"]
    assert {colour: line.get_marker() for colour, line in curves(reward).items()} == {
        BLUE: "o",
        VERMILION: "^",
        GREEN: "o",
    }
    raw = [line for line in reward.lines if line.get_marker() == "None"]
    assert len(raw) == 3
    assert all(line.get_alpha() < 0.5 for line in raw)
    retention = axes["Retention after replay"]
    mine = [row.retention for row in rows if row.arm == MEL]
    # Inside, nine steps hold four or five odd ones: the mean of the zigzag is nearly flat.
    assert curves(retention)[VERMILION].get_ydata()[14] == pytest.approx(100 * np.mean(mine[10:19]))
    dashed = [line for line in retention.lines if line.get_linestyle() == "--"]
    assert [list(line.get_xdata()) for line in dashed] == [
        [point[0] for point in points] for points in mel()["retention"]["curves"].values()
    ]
    assert axes["mixed groups (%)"].get_xlim() == retention.get_xlim()
    assert axes["tokens of a reflection"].get_xlim() == reward.get_xlim()


def test_running_mean_takes_what_is_there() -> None:
    assert running_mean([1, 2, 3, 4], [1.0, 2.0, 3.0, 6.0], window=3) == pytest.approx([1.5, 2.0, 11 / 3, 4.5])
    assert running_mean([1, 2, 3], [1.0, NAN, 4.0], window=3) == pytest.approx([1.0, 2.5, 4.0])
    assert running_mean([0, 10, 20], [1.0, 2.0, 4.0]) == pytest.approx([1.0, 2.0, 4.0])  # ten steps apart: alone
    assert math.isnan(running_mean([1, 2], [NAN, NAN])[0])


@pytest.mark.parametrize("steps", [1, 2])
def test_a_study_that_has_just_begun_is_drawn(tmp_path: Path, steps: int) -> None:
    rows = [row for row in panels(families=FIVE) if row.iteration == 0]
    draw_mel_validation(rows, scores(), RECORD, tmp_path)
    draw_mel_reflection(experience(steps=steps), RECORD, tmp_path)
    assert "MEL 0.0" in words(tmp_path / "mel_validation.svg")


# --- published numbers ------------------------------------------------------------------------------------------


def test_published_table_is_whole_and_its_averages_are_those_of_its_benchmarks() -> None:
    data = mel()
    assert "2602.10224" in data["source"]["paper"]
    assert tuple(data["table"]["metrics"]) == METRICS
    assert list(data["table"]["scores"]) == list(data["models"]) == ["4B", "8B", "14B"]
    for arms in data["table"]["scores"].values():
        assert list(arms) == ["base", GRPO, MEL]
        for benchmarks in arms.values():
            *single, average = benchmarks.values()
            assert list(benchmarks) == ["AIME24", "AIME25", "AMC23", "MATH500", "OlympiadBench", "average"]
            assert np.mean(single, axis=0) == pytest.approx(average, abs=1e-4)
    gains = [
        round(100 * (arms[MEL]["average"][0] - arms[GRPO]["average"][0]), 2)
        for arms in data["table"]["scores"].values()
    ]
    assert gains == [3.92, 4.36, 4.73]  # as the paper's text says


def test_published_curves_are_ordered_and_end_at_the_table() -> None:
    data = mel()
    table = data["table"]["scores"]
    for benchmark, models in data["validation"]["curves"].items():
        for model, lines in models.items():
            for arm, points in lines.items():
                steps = [step for step, _ in points]
                assert steps == sorted(set(steps))
                assert (steps[0], steps[-1]) == (0, 140)
                assert points[0][1] == table[model]["base"][benchmark][0]
                assert points[-1][1] == table[model][arm][benchmark][0]
    assert list(data["validation"]["curves"]["average"]) == ["4B", "8B", "14B"]
    last = [points[-1][1] for points in data["retention"]["curves"].values()]
    assert last == sorted(last)  # larger models keep more
    assert all(lines[MEL][-1] > lines[GRPO][-1] for lines in data["reward"]["curves"].values())
