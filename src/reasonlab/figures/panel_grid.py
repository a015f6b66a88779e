"""A grid of panels: accuracy and response length against RL iteration, the total large, the families around it.

Accuracy is on the left axis, length on the right one; all panels share both scales, so that they can be compared. A run
(`dynamics.py`), a study over several seeds and the published figure (`study_dynamics.py`) are drawn by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from reasonlab.figures.frame import WIDTH, Frame, longest_fit, text_width
from reasonlab.figures.style import BLUE, GREY, INK, VERMILION, bare, marker_size
from reasonlab.figures.tables import PanelRow
from reasonlab.problems.tiny_world import FAMILY_NAMES
from reasonlab.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOTAL, FORCED = "total", "total, thinking forced"
ACCURACY_LABEL = "accuracy, with 95 % interval over questions"
TOKENS_LABEL = "mean response tokens, with 5–95 % range of answers"

_PLACE = {name: place for place, name in enumerate(FAMILY_NAMES)}
_ROW = 1.66  # inches
_HEAD, _FOOT, _SIDE = 1.06, 1.42, 0.72
_ACCURACY: dict[str, Any] = {"color": BLUE, "marker": "o", "linestyle": "-"}
_TOKENS: dict[str, Any] = {"color": VERMILION, "marker": "s", "linestyle": (0, (4, 2))}
_FORCED: dict[str, Any] = {"color": INK, "marker": "D", "linestyle": ":", "markerfacecolor": "white"}
_ACCURACY_BAND: dict[str, Any] = {"color": BLUE, "alpha": 0.20, "linewidth": 0}
_TOKENS_BAND: dict[str, Any] = {"color": VERMILION, "alpha": 0.11, "linewidth": 0}


def of_panel(rows: Iterable[PanelRow], panel: str) -> list[PanelRow]:
    return sorted((row for row in rows if row.panel == panel), key=lambda row: row.iteration)


def family_names(rows: Iterable[PanelRow]) -> list[str]:
    """The panels beside the total: families in the order of the tiny world, then benchmarks as the table has them."""
    names = [name for name in dict.fromkeys(row.panel for row in rows) if name not in (TOTAL, FORCED)]
    return sorted(names, key=lambda name: _PLACE.get(name, len(_PLACE)))


def what_panels_are(names: Iterable[str]) -> tuple[str, str]:
    """Family or benchmark, and the plural."""
    return ("family", "families") if _PLACE.keys() >= set(names) else ("benchmark", "benchmarks")


def questions_asked(rows: Sequence[PanelRow]) -> str:
    """480 questions (40 per family)"""
    total = of_panel(rows, TOTAL)[0].questions
    by_family = {row.questions for row in rows if row.panel not in (TOTAL, FORCED)}
    one, _ = what_panels_are(family_names(rows))
    families = f" ({min(by_family):,} per {one})" if len(by_family) == 1 and by_family != {total} else ""
    return f"{counted(total, 'question')}{families}"


def draw_panel_grid(
    rows: Sequence[PanelRow],
    title: str,
    subtitle: str,
    caption: str,
    accuracy_label: str = ACCURACY_LABEL,
    tokens_label: str = TOKENS_LABEL,
    step_label: str = "RL iteration",
) -> Figure:
    """The rows of one arm, `total` among them: the total is a block of 2 × 2 cells at the top left."""
    families = family_names(rows)
    columns = 3 if len(families) <= 2 else 4
    height_in_cells = max(2, math.ceil((4 + len(families)) / columns))
    frame = Frame(_HEAD + height_in_cells * _ROW + _FOOT)
    edges = frame.edges(_SIDE, WIDTH - _SIDE, _FOOT, frame.height - _HEAD)
    grid = frame.figure.add_gridspec(height_in_cells, columns, wspace=0.08, hspace=0.42, **edges)
    longest = max(max(row.tokens, row.tokens_p95) for row in rows if row.panel != FORCED)
    total = frame.figure.add_subplot(grid[:2, :2])
    _panel(total, of_panel(rows, TOTAL), longest, size=1.5)
    _control(total, of_panel(rows, FORCED))
    cells = [(row, column) for row in range(height_in_cells) for column in range(columns) if row > 1 or column > 1]
    cells = cells[: len(families)]
    for family, (row, column) in zip(families, cells, strict=True):
        axes = frame.figure.add_subplot(grid[row, column])
        lengths = _panel(axes, of_panel(rows, family), longest)
        axes.tick_params(labelbottom=(row + 1, column) not in cells, labelleft=column == 0)
        lengths.tick_params(labelright=(row, column + 1) not in cells)
    _words(frame, title, subtitle, caption, step_label)
    _legend(frame, rows, accuracy_label, tokens_label)
    return frame.figure


def _panel(axes: Axes, points: Sequence[PanelRow], longest: float, size: float = 1.0) -> Axes:
    """Accuracy on the left axis, response tokens on the right one, which is returned."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, StrMethodFormatter

    lengths = axes.twinx()
    axes.set_zorder(lengths.get_zorder() + 1)  # accuracy in front
    axes.patch.set_visible(False)
    bare(axes)
    bare(lengths)
    top = 4 * next(step for step in _steps() if 4 * step >= longest)
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 25))
    lengths.set_ylim(0, top)
    lengths.set_yticks([top * quarter / 4 for quarter in range(5)])  # both scales share the grid lines
    lengths.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    lengths.grid(axis="y")
    lengths.tick_params(labelright=False)
    x = [point.iteration for point in points]
    margin = 0.04 * (x[-1] - x[0]) or 1
    axes.set_xlim(x[0] - margin, x[-1] + margin)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]) if len(x) > 1 else FixedLocator(x))
    _curve(lengths, x, [(p.tokens, p.tokens_p05, p.tokens_p95) for p in points], _TOKENS, _TOKENS_BAND, size)
    score = [(100 * p.accuracy, 100 * p.accuracy_low, 100 * p.accuracy_high) for p in points]
    _curve(axes, x, score, _ACCURACY, _ACCURACY_BAND, size)
    panel_title(axes, points[0].panel, _ends(points), size)
    return lengths


def panel_title(axes: Axes, name: str, variants: Sequence[str], size: float = 1.0) -> None:
    """The name of a panel, and at the right the first of the notes, longest first, for which it leaves room."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    room = axes.get_position().width * figure.get_figwidth() - text_width(name, 8 + 2 * size, "bold") - 0.1
    axes.set_title(name, loc="left", fontsize=8 + 2 * size, fontweight="bold", pad=6)
    note = longest_fit(variants, room, 6 + 2 * size)
    axes.set_title(note, loc="right", fontsize=6 + 2 * size, color=GREY, pad=6)


def percent_scale(axes: Axes, values: Iterable[float], size: float, least_span: float) -> None:
    """Limits that hold every value, within what is possible and at least so many points apart: noise is not blown up
    to look like an effect."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    bare(axes)
    axes.grid(axis="y")
    known = [value for value in values if math.isfinite(value)] or [0.0, 100.0]
    low, high = min(known), max(known)
    margin = max(0.08 * (high - low), (least_span - (high - low)) / 2)
    axes.set_ylim(max(0.0, low - margin), min(100.0, high + margin))
    axes.yaxis.set_major_locator(MaxNLocator(4 if size <= 1 else 7, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _curve(
    axes: Axes,
    x: Sequence[int],
    values: Sequence[tuple[float, float, float]],
    line: dict[str, Any],
    band: dict[str, Any],
    size: float,
) -> None:
    """A line through the estimates with its band; a single point has an error bar, because a band has no width."""
    estimate, low, high = zip(*values, strict=True)
    markers = marker_size(2.2 + 1.3 * size, len(x))
    axes.plot(x, estimate, **line, linewidth=1.2 + 0.4 * size, markersize=markers, clip_on=False)
    if len(x) > 1:
        axes.fill_between(x, low, high, **band)
    else:
        axes.vlines(x, low, high, color=line["color"], linewidth=5, alpha=band["alpha"])


def _control(axes: Axes, points: Sequence[PanelRow]) -> None:
    """Accuracy with thinking forced, with its interval."""
    from matplotlib.patheffects import Normal, Stroke

    if not points:
        return
    x = [point.iteration for point in points]
    y = [100 * point.accuracy for point in points]
    errors = [
        [100 * (p.accuracy - p.accuracy_low) for p in points],
        [100 * (p.accuracy_high - p.accuracy) for p in points],
    ]
    axes.errorbar(x, y, yerr=errors, **_FORCED, linewidth=1.3, markersize=6.5, elinewidth=1.0, capsize=3, clip_on=False)
    # A run that was stopped and continued has the control there too: the label goes where there is most room. Above the
    # line the curve of accuracy seldom comes, but a line that rises steeply would cross the label itself.
    at = max(range(len(x) - 1), key=lambda place: x[place + 1] - x[place], default=0)
    above = y[at] <= 92 and max(y[at : at + 2]) - y[at] <= 10
    axes.annotate(
        "thinking forced",
        (x[at], y[at]),
        xytext=(12, 6 if above else -12),
        textcoords="offset points",
        fontsize=9,
        color=INK,
        path_effects=[Stroke(linewidth=3, foreground="white", alpha=0.8), Normal()],  # legible across a line
    )


def _words(frame: Frame, title: str, subtitle: str, caption: str, step_label: str) -> None:
    middle = (_FOOT + frame.height - _HEAD) / 2
    frame.heading(title, subtitle)
    frame.write(0.34, middle, "accuracy (%)", color=BLUE, fontsize=9.5, rotation=90, ha="right", va="center")
    right = WIDTH - 0.24
    frame.write(right, middle, "response tokens", color=VERMILION, fontsize=9.5, rotation=270, ha="left", va="center")
    frame.write(WIDTH / 2, _FOOT - 0.36, step_label, fontsize=9.5, ha="center", va="center")
    frame.caption(caption)


def _legend(frame: Frame, rows: Sequence[PanelRow], accuracy_label: str, tokens_label: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    accuracy = Line2D([], [], **_ACCURACY, linewidth=1.8, markersize=5)
    banded = any(math.isfinite(row.accuracy_low) for row in rows)
    handles: list[Any] = [
        (Patch(**_ACCURACY_BAND), accuracy) if banded else accuracy,
        (Patch(**_TOKENS_BAND), Line2D([], [], **_TOKENS, linewidth=1.8, markersize=5)),
    ]
    labels = [accuracy_label, tokens_label]
    if of_panel(rows, FORCED):
        handles.append(Line2D([], [], **_FORCED, linewidth=1.3, markersize=6))
        labels.append("accuracy with thinking forced (control)")
    place = (0.5, (_FOOT - 0.66) / frame.height)
    frame.figure.legend(handles, labels, loc="center", bbox_to_anchor=place, ncols=3, fontsize=9, handlelength=3)


def _ends(points: Sequence[PanelRow]) -> list[str]:
    """The first and the last numbers, for those who read instead of measuring; then the same in fewer letters."""
    ends = points if len(points) == 1 else [points[0], points[-1]]
    accuracy = " → ".join(f"{100 * point.accuracy:.0f}" for point in ends) + " %"
    tokens = " → ".join(f"{p.tokens / 1000:.1f}k" if p.tokens >= 1000 else f"{p.tokens:.0f}" for p in ends)
    return [f"{accuracy},  {tokens} tokens", f"{accuracy},  {tokens}", accuracy]


def _steps() -> Iterator[int]:
    """Round distances between grid lines: 1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, …"""
    yield from (1, 2, 5)
    for power in count(1):
        yield from (10**power * factor // 10 for factor in (10, 15, 20, 25, 30, 40, 50, 60, 80))
