"""Accuracy against mean response length over the checkpoints of a run (Kimi k1.5, Fig. 6), and the slopes compared.

A slope here is what a checkpoint that writes one token more, on average, is better by. It is a correlation: length and
training time change together, and nothing in the figure tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reasonlab.figures.frame import MARGIN, WIDTH, Frame
from reasonlab.figures.panel_grid import FORCED, TOTAL, family_names, of_panel, panel_title, what_panels_are
from reasonlab.figures.published import KIMI, kimi_k15
from reasonlab.figures.record import Record
from reasonlab.figures.study_dynamics import MIRROR_DESCENT, main_arm, published_rows, subtitle
from reasonlab.figures.style import BLUE, GREY, HAIRLINE, INK, VERMILION, bare, house_style, save
from reasonlab.figures.tables import (
    PanelRow,
    SlopeRow,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

_ROW, _GAP = 1.62, 0.62  # inches: the height of a small panel, and of what lies between two
_LEFT, _RIGHT = 0.78, 0.35
_HEAD, _BETWEEN, _FOOT = 1.06, 1.65, 1.15
_FOREST_ROW = 0.175
_OWN: dict[str, Any] = {"marker": "o", "color": BLUE}
_TOTALS: dict[str, Any] = {"marker": "D", "color": VERMILION, "markerfacecolor": "white"}
_MINUS = "−"


@dataclass(frozen=True, slots=True)
class Unit:
    """The tokens that slopes are given for: one, or a thousand where one is worth next to nothing."""

    tokens: int

    @property
    def name(self) -> str:
        return "points per token" if self.tokens == 1 else f"points per {self.tokens:,} tokens"

    def points(self, slope: float) -> float:
        return 100 * self.tokens * slope

    @staticmethod
    def of(slopes: Iterable[float]) -> Unit:
        largest = max((abs(slope) for slope in slopes if math.isfinite(slope)), default=1.0)
        return Unit(1 if 100 * largest >= 0.05 else 1000)


def draw_accuracy_length(rows: Iterable[PanelRow], slopes: Iterable[SlopeRow], record: Record, out: Path) -> list[Path]:
    """accuracy-length.png and .svg: the arm mirror-descent, a panel each for the total and the families."""
    rows = [row for row in main_arm(rows) if row.panel != FORCED]
    slopes = [row for row in slopes if row.arm == MIRROR_DESCENT]
    names = [TOTAL, *family_names(rows)]
    title = "Accuracy against response length, checkpoint by checkpoint"
    with house_style():
        columns = 4
        height_in_cells = max(2, math.ceil((3 + len(names)) / columns))
        grid_height = height_in_cells * (_ROW + _GAP) - _GAP
        forest_height = _BETWEEN + _FOREST_ROW * max(len(names), 8) if slopes else 0.0
        frame = Frame(_HEAD + grid_height + forest_height + _FOOT)
        frame.heading(title, subtitle(rows, record))
        top = frame.height - _HEAD
        edges = frame.edges(_LEFT, WIDTH - _RIGHT, top - grid_height, top)
        grid = frame.figure.add_gridspec(height_in_cells, columns, wspace=0.14, hspace=_GAP / _ROW, **edges)
        cells = [(row, column) for row in range(height_in_cells) for column in range(columns) if row > 1 or column > 1]
        unit = Unit.of(row.slope for row in slopes)
        own = {row.panel: row for row in slopes if row.against == "own"}
        colours, limits = _colours(rows), _limits(rows)
        total = frame.figure.add_subplot(grid[:2, :2])
        _scatter(total, of_panel(rows, TOTAL), own.get(TOTAL), unit, colours, limits, size=1.5)
        for name, (row, column) in zip(names[1:], cells, strict=False):
            axes = frame.figure.add_subplot(grid[row, column])
            _scatter(axes, of_panel(rows, name), own.get(name), unit, colours, limits)
            axes.tick_params(labelleft=column == 0)
        frame.write(0.34, top - grid_height / 2, "accuracy (%)", fontsize=9.5, rotation=90, ha="right", va="center")
        frame.write(WIDTH / 2, top - grid_height - 0.4, "mean response tokens", fontsize=9.5, ha="center", va="center")
        _colour_bar(frame, colours)
        if slopes:
            _forests(frame, slopes, names, unit, top - grid_height - 0.95)
        frame.caption(_caption(slopes))
        return list(save(frame.figure, out / "accuracy-length", title))


def _colours(rows: Sequence[PanelRow]) -> ScalarMappable:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    iterations = [row.iteration for row in rows]
    first, last = min(iterations), max(iterations)
    seen_on_white = ListedColormap(colormaps["viridis"](np.linspace(0, 0.86, 256)))  # its yellow end is not
    return ScalarMappable(Normalize(first, max(last, first + 1)), seen_on_white)


def _limits(rows: Sequence[PanelRow]) -> tuple[int, int]:
    """The scale of accuracy that all panels share: whole tens that hold every interval."""
    ends = [(row.accuracy, row.accuracy_low, row.accuracy_high) for row in rows]
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    return 10 * min(9, math.floor(10 * low)), 10 * max(1, math.ceil(10 * high))


def _scatter(
    axes: Axes,
    points: Sequence[PanelRow],
    slope: SlopeRow | None,
    unit: Unit,
    colours: ScalarMappable,
    limits: tuple[int, int],
    size: float = 1.0,
) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    bare(axes)
    axes.grid(axis="y")
    axes.set_ylim(*limits)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(4 if size == 1 else 7, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    x = np.array([p.tokens for p in points])
    y = 100 * np.array([p.accuracy for p in points])
    axes.plot(x, y, color=HAIRLINE, linewidth=0.8, zorder=1.5)  # the way the run took
    for p, colour in zip(points, colours.to_rgba(np.array([p.iteration for p in points])), strict=True):
        bars = {"color": colour, "linewidth": 0.8 + 0.2 * size, "alpha": 0.55, "zorder": 2}
        axes.vlines(p.tokens, 100 * p.accuracy_low, 100 * p.accuracy_high, **bars)
        if math.isfinite(p.tokens_low) and math.isfinite(p.tokens_high):
            axes.hlines(100 * p.accuracy, p.tokens_low, p.tokens_high, **bars)
        marker: dict[str, Any] = {"markersize": 2.4 + 1.9 * size, "markeredgecolor": "white", "markeredgewidth": 0.5}
        axes.plot(p.tokens, 100 * p.accuracy, "o", color=colour, clip_on=False, zorder=3, **marker)
    if slope is not None and math.isfinite(slope.slope) and len(points) > 1:
        ends = np.array([x.min(), x.max()])
        # A least-squares line passes through the mean of the points.
        axes.plot(ends, y.mean() + 100 * slope.slope * (ends - x.mean()), color=INK, linewidth=1.1, dashes=(4, 2))
    axes.margins(x=0.06)
    panel_title(axes, points[0].panel, _slope_words(slope, unit, size > 1), size)


def _slope_words(row: SlopeRow | None, unit: Unit, large: bool) -> list[str]:
    """The slope with its interval and correlation; then the same in fewer letters."""
    if row is None or not math.isfinite(row.slope):
        return []
    estimate = _signed(unit.points(row.slope))
    known = math.isfinite(row.slope_low) and math.isfinite(row.slope_high)
    low, high = _signed(unit.points(row.slope_low)), _signed(unit.points(row.slope_high))
    interval = f" [{low}, {high}]" if known else ""
    correlation = f", r = {row.correlation:.2f}".replace("-", _MINUS) if math.isfinite(row.correlation) else ""
    full = [f"{estimate} {unit.name}{interval}{correlation}", f"{estimate}{interval}{correlation}"]
    return [*(full if large else []), f"{estimate}{interval}", estimate]


def _signed(value: float) -> str:
    """Three significant digits at most, with a typographic minus."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:+.{digits}f}".replace("-", _MINUS)


def _colour_bar(frame: Frame, colours: ScalarMappable) -> None:
    """The key of the colours, at the right of the heading."""
    right, width, y = WIDTH - _RIGHT - 0.3, 1.7, frame.height - 0.5
    place = frame.figure.add_axes(((right - width) / WIDTH, y / frame.height, width / WIDTH, 0.1 / frame.height))
    place.imshow([list(range(256))], cmap=colours.get_cmap(), aspect="auto")
    place.set_axis_off()
    first, last = (int(end or 0) for end in colours.get_clim())
    words: dict[str, Any] = {"fontsize": 8.5, "color": GREY, "va": "center"}
    frame.write(right - width - 0.08, y + 0.05, f"RL iteration  {first}", ha="right", **words)
    frame.write(right + 0.08, y + 0.05, str(last), ha="left", **words)


# --- the slopes side by side ------------------------------------------------------------------------------------


def _forests(frame: Frame, slopes: Sequence[SlopeRow], names: Sequence[str], unit: Unit, top: float) -> None:
    """Our slopes at the left, the published ones at the right."""
    from matplotlib.lines import Line2D

    frame.row_heading(top, "Slopes", "")
    handles = [Line2D([], [], **style, markersize=5, linestyle="") for style in (_OWN, _TOTALS)]
    labels = ["against the panel's own mean length", "against the mean length of the total"]
    place = (1 - MARGIN / WIDTH, top / frame.height)
    frame.figure.legend(handles, labels, loc="center right", bbox_to_anchor=place, ncols=2, fontsize=9, borderpad=0)
    edges = frame.edges(1.15, WIDTH - _RIGHT, _FOOT, top - 0.62)
    grid = frame.figure.add_gridspec(1, 2, wspace=0.32, **edges)
    ours = [(row.panel, row.against, row.slope, row.slope_low, row.slope_high) for row in slopes]
    note = "with 95 % intervals" if any(math.isfinite(row.slope_low) for row in slopes) else ""
    _forest(frame.figure.add_subplot(grid[0]), "Measured here", note, names, ours, unit)
    published = published_slopes()
    panels = list(dict.fromkeys(panel for panel, *_ in published))
    theirs = [(panel, against, slope, math.nan, math.nan) for panel, against, slope in published]
    axes = frame.figure.add_subplot(grid[1])
    _forest(axes, "Published", f"{KIMI}, Fig. 6", panels, theirs, Unit.of(slope for _, _, slope in published))


def published_slopes() -> list[tuple[str, str, float]]:
    """(panel, against, slope): against the total's length as printed, and against the panel's own length, fitted here
    to the published curves (Fig. 5)."""
    printed = kimi_k15()["slopes"]["panels"]
    rows = published_rows()
    slopes = []
    for panel, slope in printed.items():
        points = of_panel(rows, panel)
        fitted = np.polyfit([p.tokens for p in points], [p.accuracy for p in points], 1)[0]
        slopes += [(panel, "own", float(fitted)), (panel, "total", float(slope))]
    return slopes


def _forest(
    axes: Axes,
    name: str,
    note: str,
    panels: Sequence[str],
    slopes: Sequence[tuple[str, str, float, float, float]],
    unit: Unit,
) -> None:
    bare(axes)
    axes.grid(axis="x")
    axes.set_ylim(len(panels) - 0.4, -0.6)
    axes.set_yticks(range(len(panels)), panels)
    axes.axvline(0, color=HAIRLINE, linewidth=0.8)
    for against, style, shift in (("own", _OWN, -0.16), ("total", _TOTALS, 0.16)):
        kept = [(panels.index(p), *values) for p, a, *values in slopes if a == against and p in panels]
        for place, slope, low, high in kept:
            if math.isfinite(low) and math.isfinite(high):
                ends = unit.points(low), unit.points(high)
                axes.hlines(place + shift, *ends, color=style["color"], linewidth=1.1)
            axes.plot(unit.points(slope), place + shift, **style, markersize=4, linestyle="")
    axes.set_xlabel(unit.name, fontsize=8.5)
    panel_title(axes, name, [note])


def _caption(slopes: Sequence[SlopeRow]) -> str:
    if not slopes:
        return "Length and training time change together: what each of them does cannot be told apart here."
    own = [row for row in slopes if row.against == "own" and row.panel != TOTAL and math.isfinite(row.slope_low)]
    rising = sum(row.slope_low > 0 for row in own)
    _, panels = what_panels_are(row.panel for row in own)
    ours = f"The slope's interval is above zero in {rising} of {len(own)} {panels}. " if own else ""
    return (
        f"{ours}Length and training time change together, so a slope is a correlation, not what a token buys. "
        "The source draws all its panels over the mean length of the total; "
        "its slopes over a panel's own length are fitted here."
    )
