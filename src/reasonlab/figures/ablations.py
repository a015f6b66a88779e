"""Three comparisons of the k15-dynamics study, ours above, the published ones below (Kimi k1.5, Fig. 10, 9 and 8).

Mirror descent against ReST, which learns from right answers alone; a curriculum against uniform draws; and a second
model size, where accuracy is drawn against length. A comparison whose arms were not run is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reasonlab.figures.frame import WIDTH, Frame, longest_fit, text_width
from reasonlab.figures.panel_grid import TOTAL, family_names, of_panel, what_panels_are
from reasonlab.figures.published import KIMI_NOTE, kimi_k15
from reasonlab.figures.record import Record
from reasonlab.figures.study_dynamics import MIRROR_DESCENT, main_arm, subtitle
from reasonlab.figures.style import BLUE, GREEN, GREY, PURPLE, VERMILION, bare, house_style, marker_size, save
from reasonlab.figures.tables import (
    PanelRow,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.gridspec import SubplotSpec

REST, CURRICULUM, UNIFORM, OTHER_SIZE = "rest", "curriculum", "uniform", "other-size"
_HEAD, _FOOT = 0.9, 0.62
_OURS, _THEIRS, _BETWEEN = 3.1, 2.5, 1.8  # inches: the rows, and from one to the other
_TITLES = 0.95  # from a row's heading down to its axes
_BASE: dict[str, Any] = {"color": BLUE, "marker": "o", "linestyle": "-"}
_REST: dict[str, Any] = {"color": PURPLE, "marker": "s", "linestyle": (0, (4, 2))}
_CURRICULUM: dict[str, Any] = {"color": GREEN, "marker": "D", "linestyle": (0, (4, 2))}
_SIZE: dict[str, Any] = {"color": VERMILION, "marker": "^", "linestyle": (0, (4, 2))}


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a comparison."""

    label: str
    points: Sequence[PanelRow]
    style: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A column of the figure: our two lines, and how the published ones are drawn."""

    title: str
    ours: tuple[Series, Series]
    by_length: bool
    switch: int | None
    published: Callable[[Frame, SubplotSpec], None]


def draw_ablations(rows: Sequence[PanelRow], record: Record, out: Path) -> list[Path]:
    """ablations.png and .svg; nothing where no arm stands beside mirror descent."""
    comparisons = _comparisons(rows, record)
    if not comparisons:
        return []
    title = "Ablations: " + ", ".join(comparison.title[0].lower() + comparison.title[1:] for comparison in comparisons)
    with house_style():
        frame = Frame(_HEAD + _TITLES + _OURS + _BETWEEN + _THEIRS + _FOOT)
        frame.heading(title, subtitle(main_arm(rows), record))
        seeds = "questions and seeds" if max(row.seeds for row in rows) > 1 else "questions"
        top = frame.height - _HEAD
        _, panels = what_panels_are(family_names(rows))
        frame.row_heading(top - 0.2, "Measured here", f"total over all {panels}; bands and bars: 95 % over {seeds}")
        upper = _columns(frame, len(comparisons), top - _TITLES - _OURS, top - _TITLES)
        frame.row_heading(_FOOT + _THEIRS + _TITLES - 0.2, "Published", KIMI_NOTE)
        lower = _columns(frame, len(comparisons), _FOOT, _FOOT + _THEIRS)
        for comparison, above, below in zip(comparisons, upper, lower, strict=True):
            _ours(frame, above, comparison)
            comparison.published(frame, below)
        return list(save(frame.figure, out / "ablations", title))


def _comparisons(rows: Iterable[PanelRow], record: Record) -> list[Comparison]:
    total = of_panel(rows, TOTAL)
    arms = {arm: [row for row in total if row.arm == arm] for arm in dict.fromkeys(row.arm for row in total)}
    base = arms.get(MIRROR_DESCENT, [])
    uniform = arms.get(UNIFORM) or base
    switch = record.protocol.get("curriculum_switch")
    sizes = [
        str(record.protocol.get(name, word)) for name, word in (("model", "first size"), ("other_model", "other size"))
    ]
    falling = _parameters(sizes[1]) < _parameters(sizes[0])
    candidates = [
        Comparison(
            "Mirror descent against ReST",
            (Series("mirror descent", base, _BASE), Series("ReST", arms.get(REST, []), _REST)),
            by_length=False,
            switch=None,
            published=_published_rest,
        ),
        Comparison(
            "Curriculum against uniform draws",
            (Series("uniform", uniform, _BASE), Series("curriculum", arms.get(CURRICULUM, []), _CURRICULUM)),
            by_length=False,
            switch=None if switch is None else int(switch),
            published=_published_curriculum,
        ),
        Comparison(
            "Model size against length",
            (Series(sizes[0], base, _BASE), Series(sizes[1], arms.get(OTHER_SIZE, []), _SIZE)),
            by_length=True,
            switch=None,
            published=partial(_published_sizes, sizes=("large", "small") if falling else ("small", "large")),
        ),
    ]
    return [candidate for candidate in candidates if all(series.points for series in candidate.ours)]


def _parameters(model: str) -> float:
    """Millions, as its name says (tiny-0.3m, Qwen2.5-0.5B-Instruct); not a number where it does not."""
    found = re.findall(r"(\d+(?:\.\d+)?)([mb])(?![a-z0-9])", model.lower())
    return float(found[-1][0]) * {"m": 1, "b": 1000}[found[-1][1]] if found else math.nan


def _columns(frame: Frame, count: int, bottom: float, top: float) -> list[SubplotSpec]:
    grid = frame.figure.add_gridspec(1, count, wspace=0.24, **frame.edges(0.85, WIDTH - 0.35, bottom, top))
    return [grid[0, column] for column in range(count)]


# --- ours -------------------------------------------------------------------------------------------------------


def _ours(frame: Frame, cell: SubplotSpec, comparison: Comparison) -> None:
    """Accuracy, with a strip of mean lengths below it; or accuracy against length."""
    if comparison.by_length:
        axes = frame.figure.add_subplot(cell)
        for series in comparison.ours:
            _against_length(axes, series)
        axes.set_xlabel("mean response tokens")
    else:
        parts = cell.subgridspec(2, 1, height_ratios=[2.3, 1], hspace=0.14)
        axes, strip = frame.figure.add_subplot(parts[0]), frame.figure.add_subplot(parts[1])
        strip.sharex(axes)
        for series in comparison.ours:
            _against_iteration(axes, strip, series)
        axes.tick_params(labelbottom=False)
        _finish(strip, bounds=(0.0, math.inf), ticks=3)
        strip.set_ylabel("tokens")
        strip.set_xlabel("RL iteration")
        if comparison.switch is not None:
            _mark_switch(axes, comparison.switch)
            strip.axvline(comparison.switch, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_ylabel("accuracy (%)")
    _finish(axes)
    if comparison.by_length:
        ends, when = [line.points[-1].accuracy for line in comparison.ours], ""
    else:
        ends, when = _shared_ends([[(row.iteration, row.accuracy) for row in line.points] for line in comparison.ours])
    _head(axes, comparison.title, _key([(line.label, line.style) for line in comparison.ours], ends), when)


def _against_iteration(axes: Axes, strip: Axes, series: Series) -> None:
    x = [row.iteration for row in series.points]
    accuracy = [(row.accuracy_low, row.accuracy, row.accuracy_high) for row in series.points]
    tokens = [(row.tokens_low, row.tokens, row.tokens_high) for row in series.points]
    for where, values, factor in ((axes, accuracy, 100), (strip, tokens, 1)):
        low, middle, high = factor * np.array(values).T
        low, high = (np.where(np.isfinite(end), end, middle) for end in (low, high))  # one question has no interval
        _line(where, x, middle, series.style)
        if len(x) > 1:
            where.fill_between(x, low, high, color=series.style["color"], alpha=0.16, linewidth=0)
        else:
            where.vlines(x, low, high, color=series.style["color"], alpha=0.5)


def _against_length(axes: Axes, series: Series) -> None:
    """Bars in both directions, because the way of a run through this plane may turn back."""
    points = series.points
    bars = {"color": series.style["color"], "alpha": 0.35, "linewidth": 1.0}
    axes.vlines(
        [p.tokens for p in points],
        [100 * p.accuracy_low for p in points],
        [100 * p.accuracy_high for p in points],
        **bars,
    )
    wide = [p for p in points if math.isfinite(p.tokens_low) and math.isfinite(p.tokens_high)]
    axes.hlines([100 * p.accuracy for p in wide], [p.tokens_low for p in wide], [p.tokens_high for p in wide], **bars)
    _line(axes, [p.tokens for p in points], [100 * p.accuracy for p in points], series.style)


# --- published --------------------------------------------------------------------------------------------------


def _published_rest(frame: Frame, cell: SubplotSpec) -> None:
    data = kimi_k15()["rest"]
    lines = [("mirror descent", data["mirror descent"], _BASE), ("ReST", data["ReST"], _REST)]
    _published_lines(frame, cell, "Fig. 10, total", lines)


def _published_curriculum(frame: Frame, cell: SubplotSpec) -> None:
    data = kimi_k15()["curriculum"]
    lines = [("uniform", data["uniform"], _BASE), ("curriculum", data["curriculum"], _CURRICULUM)]
    _mark_switch(_published_lines(frame, cell, "Fig. 9, set not named", lines), data["switch"])


def _published_lines(
    frame: Frame, cell: SubplotSpec, title: str, lines: Sequence[tuple[str, Sequence[Sequence[float]], dict[str, Any]]]
) -> Axes:
    axes = frame.figure.add_subplot(cell)
    for _, points, style in lines:
        x, y = np.array(points).T
        _line(axes, x, 100 * y, style)
    _finish(axes)
    axes.set_xlabel("RL iteration")
    axes.set_ylabel("accuracy (%)")
    ends, when = _shared_ends([points for _, points, _ in lines])
    _head(axes, title, _key([(label, style) for label, _, style in lines], ends), when)
    return axes


def _published_sizes(frame: Frame, cell: SubplotSpec, sizes: tuple[str, str]) -> None:
    """Four small panels, one a benchmark; all checkpoints with a linear fit, over the mean length of the total.

    The first of the sizes is drawn like our first model: the smaller one of both rows looks the same, and the larger.
    """
    whole = frame.figure.add_subplot(cell)
    whole.set_axis_off()
    styles = dict(zip(sizes, (_BASE, _SIZE), strict=True))
    _head(whole, "Fig. 8, four benchmarks", [(size, "", style) for size, style in styles.items()])
    grid = cell.subgridspec(3, 2, height_ratios=[0.01, 1, 1], hspace=0.62, wspace=0.24)
    for number, (name, data) in enumerate(kimi_k15()["sizes"]["panels"].items()):
        axes = frame.figure.add_subplot(grid[1 + number // 2, number % 2])
        for size, style in styles.items():
            x, y = np.array(data[size]).T
            points = {**style, "linestyle": "", "alpha": 0.75, "markeredgewidth": 0}
            axes.plot(x, 100 * y, **points, markersize=3.4, clip_on=False)
            ends = np.array([x.min(), x.max()])
            axes.plot(ends, 100 * np.polyval(np.polyfit(x, y, 1), ends), color=style["color"], linewidth=1.4)
        _finish(axes, ticks=3)
        axes.tick_params(labelsize=7, pad=2)
        axes.set_title(name, fontsize=8, color=GREY, pad=2)
    place = cell.get_position(frame.figure)
    frame.write((place.x0 + place.x1) / 2 * WIDTH, _FOOT - 0.36, "mean tokens of the total", ha="center", va="center")


# --- what they share --------------------------------------------------------------------------------------------


def _line(axes: Axes, x: Any, y: Any, style: dict[str, Any]) -> None:
    axes.plot(x, y, **style, linewidth=1.6, markersize=marker_size(4, len(x)), clip_on=False)


def _finish(axes: Axes, bounds: tuple[float, float] = (0.0, 100.0), ticks: int = 4) -> None:
    """Ticks, grid, and limits that hold all that is drawn and leave the possible values only for a margin."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    bare(axes)
    axes.grid(axis="y")
    low, high = axes.dataLim.intervaly
    margin = 0.06 * (high - low) or 1.0
    axes.set_ylim(max(bounds[0], low - margin), min(bounds[1], high + margin))
    axes.yaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(ticks + 1, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _mark_switch(axes: Axes, iteration: int) -> None:
    axes.axvline(iteration, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate(
        "curriculum starts",
        (iteration, 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=8,
        color=GREY,
    )


def _shared_ends(lines: Sequence[Sequence[Sequence[float]]]) -> tuple[list[float], str]:
    """The accuracies at the last iteration that all lines have, and which that is if one goes on behind it; nothing
    where they share none."""
    tables = [{point[0]: point[1] for point in line} for line in lines]
    shared = set.intersection(*(set(table) for table in tables))
    if not shared:
        return [], ""
    last = max(shared)
    goes_on = any(max(table) > last for table in tables)
    return [table[last] for table in tables], f"both at iteration {last:.0f}" if goes_on else ""


def _key(lines: Sequence[tuple[str, dict[str, Any]]], ends: Sequence[float]) -> list[tuple[str, str, dict[str, Any]]]:
    notes = [f", {100 * accuracy:.1f} %" for accuracy in ends] or [""] * len(lines)
    return [(name, note, style) for (name, style), note in zip(lines, notes, strict=True)]


def _head(axes: Axes, title: str, key: Sequence[tuple[str, str, dict[str, Any]]], when: str = "") -> None:
    """The title, and below it the key of the lines with where they end: never in the way of a curve.

    An entry is a name, what to add to it where there is room, and a style; names too long for the panel are cut short.
    `when` stands at the right of the title and says of which iteration the numbers are.
    """
    from matplotlib.lines import Line2D
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure(root=True)
    assert figure is not None
    room = axes.get_position().width * figure.get_figwidth() - 0.46 * len(key)
    axes.legend(
        [Line2D([], [], **style, linewidth=1.6, markersize=4) for *_, style in key],
        _fitting(key, room),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        bbox_transform=axes.transAxes + ScaledTranslation(0, 6 / 72, figure.dpi_scale_trans),
        ncols=len(key),
        fontsize=8.5,
        borderpad=0,
        borderaxespad=0,
        handlelength=2.4,
        columnspacing=1.2,
    )
    above: dict[str, Any] = {"xycoords": "axes fraction", "xytext": (0, 25), "textcoords": "offset points"}
    axes.annotate(title, (0, 1), **above, fontsize=10, fontweight="bold")
    axes.annotate(when, (1, 1), **above, fontsize=8.5, color=GREY, ha="right")


def _fitting(key: Sequence[tuple[str, str, dict[str, Any]]], room: float, size: float = 8.5) -> list[str]:
    """The names with their notes, or without them, or each cut to an equal share of so many inches."""
    for labels in ([name + note for name, note, _ in key], [name for name, *_ in key]):
        if sum(text_width(label, size) for label in labels) <= room:
            return labels
    shorter = ([name, *(name[:end] + "…" for end in range(len(name), 0, -1))] for name, *_ in key)
    return [longest_fit(variants, room / len(key), size) for variants in shorter]
