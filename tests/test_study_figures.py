"""The figures of the studies: drawn from small tables alone, with the same bytes every time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_figures import make_run

from reasonlab.errors import UserError
from reasonlab.figures import style
from reasonlab.figures.ablations import draw_ablations
from reasonlab.figures.accuracy_length import draw_accuracy_length, published_slopes
from reasonlab.figures.labels import Box, place_boxes
from reasonlab.figures.long2short import ellipse, pareto
from reasonlab.figures.panel_grid import FORCED, TOTAL, of_panel
from reasonlab.figures.published import kimi_k15
from reasonlab.figures.record import VERDICTS, Record, read_record
from reasonlab.figures.redraw import redraw
from reasonlab.figures.study_dynamics import draw_study_dynamics, published_rows
from reasonlab.figures.tables import (
    ARMS,
    PANELS,
    SLOPES,
    ArmRow,
    PanelRow,
    SlopeRow,
    columns,
    read_table,
    write_table,
)

ALL_ARMS = ("mirror-descent", "rest", "curriculum", "uniform", "other-size")
FAMILIES = ("sum", "gcd")
LABELS = {
    "long": "long",
    "shortest": "shortest",
    "merge": "short w/ merge",
    "merge+rs": "short w/ merge + rs",
    "dpo": "short w/ dpo",
    "rl": "short w/ rl",
    "base": "base",
    "base, thinking forced": "base, thinking forced",
}


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pixels: the tests look at what is in the files, not at how sharp it is."""
    monkeypatch.setattr(style, "PNG_DPI", 40)


def panel(arm: str, name: str, iteration: int, accuracy: float, tokens: float, seeds: int = 3) -> PanelRow:
    low, high = max(0.0, accuracy - 0.04), min(1.0, accuracy + 0.04)
    return PanelRow(
        arm, name, iteration, accuracy, low, high, tokens, tokens - 1, tokens + 1, tokens / 4, 2 * tokens, 60, 4, seeds
    )


def panels(arms: tuple[str, ...] = ALL_ARMS, iterations: tuple[int, ...] = (0, 10, 20)) -> list[PanelRow]:
    rows = []
    for number, arm in enumerate(arms):
        for name in (TOTAL, *FAMILIES):
            rows += [panel(arm, name, i, 0.4 + 0.01 * i + 0.02 * number, 20.0 + i + 2 * number) for i in iterations]
    rows += [panel("mirror-descent", FORCED, i, 0.7, 60.0) for i in (iterations[0], iterations[-1])]
    return rows


def arms() -> list[ArmRow]:
    rows = []
    for name in ("all levels", "level 5"):
        for number, (arm, label) in enumerate(LABELS.items()):
            accuracy, tokens = 0.5 + 0.03 * number, 30.0 + 4 * number
            rows.append(
                ArmRow(
                    *(name, arm, label, accuracy, accuracy - 0.04, accuracy + 0.04, tokens, tokens - 2, tokens + 2),
                    *(4e-4, 1.0, -6e-3, 60, 4, 3),
                )
            )
    return rows


def dynamics_study(directory: Path, rows: list[PanelRow] | None = None, **record: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    protocol = {"model": "tiny-1m", "other_model": "tiny-4m", "temperature": 1.0, "max_tokens": 160, "split": "test"}
    content = {"study": "k15-dynamics", "scale": "cpu", "claims": [], "protocol": protocol, **record}
    (directory / VERDICTS).write_text(json.dumps(content), encoding="utf-8")
    rows = panels() if rows is None else rows
    write_table(directory / PANELS, PanelRow, rows)
    slopes = [SlopeRow("mirror-descent", name, 0.01, 0.008, 0.012, 0.97) for name in (TOTAL, *FAMILIES)]
    slopes += [replace(row, slope=0.009, against="total") for row in slopes]
    write_table(directory / SLOPES, SlopeRow, slopes)
    return directory


def long2short_study(directory: Path, rows: list[ArmRow]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / VERDICTS).write_text(json.dumps({"study": "long2short"}), encoding="utf-8")
    write_table(directory / ARMS, ArmRow, rows)
    return directory


def words(svg: Path) -> str:
    """The texts of a figure: matplotlib draws letters as curves, and leaves the text beside them as comments."""
    return svg.read_text(encoding="utf-8")


# --- tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (PanelRow, [*panels(), replace(panels()[0], arm='odd, "name"', accuracy=1.1 / 3, tokens_low=math.nan)]),
        (SlopeRow, [SlopeRow("a", "total", 1e-5 / 3, math.nan, math.nan, -1.0, "total")]),
        (ArmRow, arms()),
    ],
)
def test_tables_read_back_what_was_written(tmp_path: Path, kind: type, rows: list[PanelRow]) -> None:
    write_table(tmp_path / "t.csv", kind, rows)
    assert str(read_table(tmp_path / "t.csv", kind)) == str(rows)  # as text, because nan is not equal to nan
    assert (tmp_path / "t.csv").read_text(encoding="utf-8").splitlines()[0] == ",".join(columns(kind))


def test_columns_are_those_agreed_on() -> None:
    assert ",".join(columns(PanelRow)) == (
        "arm,panel,iteration,accuracy,accuracy_low,accuracy_high,tokens,tokens_low,tokens_high,tokens_p05,tokens_p95,"
        "questions,samples,seeds"
    )
    assert ",".join(columns(SlopeRow)) == "arm,panel,slope,slope_low,slope_high,correlation,against"
    assert ",".join(columns(ArmRow)) == (
        "panel,arm,label,accuracy,accuracy_low,accuracy_high,tokens,tokens_low,tokens_high,"
        "var_accuracy,var_tokens,cov,questions,samples,seeds"
    )


def test_column_with_a_default_may_be_absent(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("arm,panel,slope,slope_low,slope_high,correlation\na,total,1,0,2,0.5\n")
    assert read_table(tmp_path / "s.csv", SlopeRow) == [SlopeRow("a", "total", 1.0, 0.0, 2.0, 0.5, "own")]


HEADER = ",".join(columns(PanelRow))
GOOD = "mirror-descent,total,0,0.5,0.4,0.6,20,19,21,5,40,60,4,3"


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("arm,panel\n", 1, "columns"),
        (f"{HEADER}\n{GOOD}\n{GOOD.replace(',0.5,', ',half,')}\n", 3, "accuracy is 'half', not a number"),
        (f"{HEADER}\n{GOOD.replace(',0,0.5', ',0.5,0.5')}\n", 2, "not a whole number"),
        (f"{HEADER}\n{GOOD},7\n", 2, "15 cells instead of 14"),
        (f"{HEADER}\n{GOOD.replace('0.5,0.4,0.6', '50,40,60')}\n", 2, "not a fraction of 1"),
        (f"{HEADER}\n{GOOD.replace('0.4,0.6', '0.6,0.4')}\n", 2, "increasing"),
        (f"{HEADER}\n\n{GOOD}\n{GOOD}\n", 4, "second row of mirror-descent, total, 0"),
        (f"{HEADER}\n{GOOD.replace('total', '')}\n", 2, "panel is empty"),
    ],
)
def test_bad_table_names_file_and_line(tmp_path: Path, text: str, line: int, complaint: str) -> None:
    path = tmp_path / PANELS
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=complaint) as caught:
        read_table(path, PanelRow)
    assert f"{path}, line {line}: " in str(caught.value)


def test_impossible_covariance_and_empty_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="covariance"):
        replace(arms()[0], cov=0.03)
    (tmp_path / PANELS).write_text(HEADER + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="has no rows"):
        read_table(tmp_path / PANELS, PanelRow)
    with pytest.raises(UserError, match="cannot read the table"):
        read_table(tmp_path / "absent.csv", PanelRow)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "not the record of a study"),
        ("{}", "'study' is missing"),
        ('{"study": "s", "protocol": {"temperature": "warm"}}', "temperature is 'warm', not a number"),
        ('{"study": "s", "gain_split": {"before": 0}}', "'gain' is missing"),
    ],
)
def test_bad_record_is_explained(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / VERDICTS).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=complaint):
        read_record(tmp_path / VERDICTS)


# --- figures ----------------------------------------------------------------------------------------------------


def test_dynamics_study_is_drawn_from_its_tables_with_the_same_bytes(tmp_path: Path) -> None:
    split = {"before": 0, "after": 20, "gain": [0.2, 0.15, 0.25], "style": [0.2, 0.1, 0.3], "skill": [0, -0.1, 0.1]}
    study = dynamics_study(tmp_path / "study", gain_split=split)
    first, second = redraw(study, tmp_path / "a"), redraw(study, tmp_path / "b")
    stems = ("dynamics", "dynamics-published", "accuracy-length", "ablations")
    assert [path.name for path in first] == [f"{stem}.{ending}" for stem in stems for ending in ("png", "svg")]
    for here, there in zip(first, second, strict=True):
        assert here.read_bytes() == there.read_bytes()
    dynamics = words(tmp_path / "a" / "dynamics.svg")
    for text in (
        "Training dynamics: tiny-1m, mirror descent, mean of 3 seeds",
        "Held-out test problems: 60 questions, 4 samples each, 3 seeds, temperature 1, at most 160 tokens",
        "of +20.0 points of accuracy",
        "thinking forced",
        "40 → 60 %,  20 → 40 tokens",
        *FAMILIES,
    ):
        assert text in dynamics
    for text in ("ReST, 62.0 %", "curriculum, 64.0 %", "uniform, 66.0 %", "tiny-4m, 68.0 %", "Published", "Fig. 8"):
        assert text in words(tmp_path / "a" / "ablations.svg")
    for text in ("+1.00 points per token [+0.80, +1.20], r = 0.97", "Length and training time change together", "GPQA"):
        assert text in words(tmp_path / "a" / "accuracy-length.svg")


@pytest.mark.parametrize("iterations", [(0,), (0, 5)])
def test_short_studies_without_other_arms_are_drawn(tmp_path: Path, iterations: tuple[int, ...]) -> None:
    rows = [replace(row, seeds=1) for row in panels(("mirror-descent",), iterations)]
    without_control = [row for row in rows if row.panel != FORCED]
    record = Record("k15-dynamics")
    assert draw_ablations(without_control, record, tmp_path) == []
    draw_accuracy_length(without_control, [], record, tmp_path)
    draw_study_dynamics(without_control, record, tmp_path)
    assert "Slopes" not in words(tmp_path / "accuracy-length.svg")
    assert "one seed" in words(tmp_path / "dynamics.svg")
    assert "thinking forced" not in words(tmp_path / "dynamics.svg")


def test_ablations_leave_out_absent_arms_and_fall_back_to_mirror_descent(tmp_path: Path) -> None:
    draw_ablations(panels(("mirror-descent", "curriculum")), Record("k15-dynamics"), tmp_path)
    drawn = words(tmp_path / "ablations.svg")
    assert "uniform, 60.0 %" in drawn
    assert "curriculum, 62.0 %" in drawn
    assert "ReST" not in drawn
    assert "Fig. 8" not in drawn


@pytest.mark.parametrize(
    ("model", "other", "sizes"),
    [
        ("tiny-1m", "tiny-4m", ("small", "large")),
        ("tiny-1m", "tiny-0.3m", ("large", "small")),
        ("Qwen2.5-Coder-1.5B-Instruct", "SmolLM2-135M", ("large", "small")),
        ("mine", "yours", ("small", "large")),
    ],
)
def test_the_larger_model_looks_the_same_in_both_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, other: str, sizes: tuple[str, str]
) -> None:
    keys: list[list[str]] = []

    def kept(axes: object, title: str, key: list[tuple[str, str, dict[str, object]]], when: str = "") -> None:
        assert [style["marker"] for *_, style in key] == ["o", "^"]
        keys.append([name for name, *_ in key])

    monkeypatch.setattr("reasonlab.figures.ablations._head", kept)
    record = Record("k15-dynamics", {"model": model, "other_model": other})
    draw_ablations(panels(("mirror-descent", "other-size")), record, tmp_path)
    assert keys == [[model, other], list(sizes)]


def test_accuracies_in_a_key_name_their_iteration_where_a_line_goes_on(tmp_path: Path) -> None:
    data = kimi_k15()["curriculum"]
    ends = [data[name][-1][0] for name in ("uniform", "curriculum")]
    assert ends == [42, 44]
    at = dict(data["curriculum"])[42]
    record = Record("k15-dynamics")
    draw_ablations(panels(("mirror-descent", "curriculum", "rest")), record, tmp_path)
    drawn = words(tmp_path / "ablations.svg")
    assert f"<!-- curriculum, {100 * at:.1f} % -->" in drawn
    assert drawn.count("<!-- both at iteration 42 -->") == 1
    assert drawn.count("both at iteration") == 1  # all other lines end together


def test_study_without_the_main_arm_says_so(tmp_path: Path) -> None:
    rows = [row for row in panels() if row.arm != "mirror-descent"]
    with pytest.raises(UserError, match="no total of the arm mirror-descent"):
        redraw(dynamics_study(tmp_path, rows), tmp_path)


def test_long2short_is_drawn_with_all_its_labels_and_the_same_bytes(tmp_path: Path) -> None:
    study = long2short_study(tmp_path / "study", arms())
    first, second = redraw(study, tmp_path / "a"), redraw(study, tmp_path / "b")
    assert [path.name for path in first] == ["long2short.png", "long2short.svg"]
    for here, there in zip(first, second, strict=True):
        assert here.read_bytes() == there.read_bytes()
    drawn = words(tmp_path / "a" / "long2short.svg")
    published = kimi_k15()["long2short"]["panels"]
    for text in (*LABELS.values(), "all levels", "level 5", *published, *published["MATH500"]):
        assert f"<!-- {text} -->" in drawn
    assert "All levels: RL against the long model, +15.0 points of accuracy and +67 % tokens." in drawn


def test_arms_at_the_bounds_and_in_one_place_are_drawn(tmp_path: Path) -> None:
    certain = {"var_accuracy": 0.0, "var_tokens": 0.0, "cov": 0.0}
    place = {"accuracy": 1.0, "accuracy_high": 1.0, "tokens": 30.0, "tokens_low": 29.0, "tokens_high": 31.0}
    same = [replace(row, **certain, **place) for row in arms()]
    assert all(path.exists() for path in redraw(long2short_study(tmp_path, same), tmp_path))


def test_redraw_of_a_run_and_of_nothing(tmp_path: Path) -> None:
    files = redraw(make_run(tmp_path / "run", families=("gcd",)), tmp_path / "out")
    assert [path.name for path in files] == ["dynamics.png", "dynamics.svg", "dynamics.csv"]
    assert {row.panel for row in read_table(files[-1], PanelRow)} == {TOTAL, FORCED, "gcd"}
    with pytest.raises(UserError, match="neither a study nor a run"):
        redraw(tmp_path, tmp_path)
    (tmp_path / VERDICTS).write_text('{"study": "alchemy"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"'alchemy'.*k15-dynamics and long2short"):
        redraw(tmp_path, tmp_path)


# --- geometry ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cov", [0.0, -0.012, 0.019])
def test_ellipse_has_the_axes_of_the_closed_form(cov: float) -> None:
    """Half axes √(χ² λ), with λ the eigenvalues of [[a, b], [b, c]]: (a + c)/2 ± √(((a − c)/2)² + b²)."""
    row = replace(arms()[0], var_accuracy=4e-4, var_tokens=1.0, cov=cov)
    a, b, c = 1.0, 100 * cov, 4.0  # tokens², tokens · points, points²
    middle, spread = (a + c) / 2, math.hypot((a - c) / 2, b)
    curve = ellipse(row, points=20001) - [row.tokens, 100 * row.accuracy]
    radii = np.hypot(curve[:, 0], curve[:, 1])
    assert radii.max() == pytest.approx(math.sqrt(5.991 * (middle + spread)), rel=1e-6)
    assert radii.min() == pytest.approx(math.sqrt(5.991 * (middle - spread)), rel=1e-6)
    # Every point is at Mahalanobis distance √χ², and the curve reaches √(χ² a) to the sides.
    inverse = np.linalg.inv(np.array([[a, b], [b, c]]))
    assert np.einsum("ni,ij,nj->n", curve, inverse, curve) == pytest.approx(np.full(len(curve), 5.991))
    assert curve[:, 0].max() == pytest.approx(math.sqrt(5.991 * a), rel=1e-6)


def test_pareto_front_keeps_what_nothing_beats() -> None:
    points = [(30.0, 60.0), (20.0, 50.0), (30.0, 55.0), (40.0, 60.0), (25.0, 40.0), (50.0, 70.0)]
    assert pareto(points) == [(20.0, 50.0), (30.0, 60.0), (50.0, 70.0)]
    for tokens, accuracy in points:
        beaten = any((t <= tokens and a >= accuracy) and (t, a) != (tokens, accuracy) for t, a in points)
        assert beaten == ((tokens, accuracy) not in pareto(points))


@pytest.mark.parametrize("spread", [0.0, 3.0, 60.0])
def test_labels_do_not_touch_each_other_nor_leave_their_room(spread: float) -> None:
    generator = np.random.default_rng(7)
    points = np.array([180.0, 120.0]) + spread * generator.standard_normal((8, 2))
    room = Box(0, 0, 360, 240)
    sizes = [(40.0 + 10 * number, 11.0) for number in range(8)]
    boxes = place_boxes(points, sizes, room, np.empty((0, 2)))
    for number, box in enumerate(boxes):
        area = (box.x1 - box.x0) * (box.y1 - box.y0)
        assert box.overlap(room) == pytest.approx(area)
        assert all(box.overlap(other) == 0 for other in boxes[:number])
        assert box.holds(points) == 0


def test_labels_side_by_side_keep_a_gap() -> None:
    """In a strip that ends behind the second point, its label has to stand between both points."""
    points = np.array([[100.0, 100.0], [140.0, 100.0]])
    first, second = place_boxes(points, [(10.0, 11.0)] * 2, Box(0, 92, 146, 108), np.empty((0, 2)))
    assert second.x1 < 140
    assert second.x0 - first.x1 >= 12


# --- published numbers ------------------------------------------------------------------------------------------


def test_published_curves_reproduce_the_printed_slopes() -> None:
    """Fitted to Fig. 5, with the total's length as the horizontal axis, each slope of Fig. 6 comes out as printed."""
    rows = published_rows()
    length = [row.tokens for row in of_panel(rows, TOTAL)]
    printed = {name: slope for name, against, slope in published_slopes() if against == "total"}
    assert len(printed) == 8
    for name, slope in printed.items():
        fitted = np.polyfit(length, [row.accuracy for row in of_panel(rows, name)], 1)[0]
        assert fitted == pytest.approx(slope, abs=1.1e-7)


def test_published_numbers_are_complete_and_say_where_they_are_from() -> None:
    data = kimi_k15()
    assert "2501.12599" in data["source"]["report"]
    assert {name: len(series["iteration"]) for name, series in data["dynamics"]["panels"].items()} == dict.fromkeys(
        data["dynamics"]["panels"], 40
    )
    assert len(data["dynamics"]["panels"]) == 12
    assert [len(points) for points in data["long2short"]["panels"].values()] == [10, 10]
