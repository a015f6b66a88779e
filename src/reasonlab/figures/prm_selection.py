"""The study prm-selection: what a student learns from traces that judges choose (ReasonFlux-PRM, Fig. 6).

Left: accuracy against the number of traces. Right: accuracy after the fewest traces against the size of the judge that
chose them. Ours above with intervals, the published points below. A second figure shows the best of N (Fig. 5) and the
judge's reward in RL (Table 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonlab.figures.frame import WIDTH, Frame
from reasonlab.figures.labels import Label, write_labels
from reasonlab.figures.panel_grid import panel_title
from reasonlab.figures.published import REASONFLUX, reasonflux
from reasonlab.figures.record import Record
from reasonlab.figures.style import BLUE, GREEN, GREY, INK, PURPLE, VERMILION, bare, house_style, save
from reasonlab.figures.tables import (
    BestOfRow,
    JudgeRewardRow,
    SelectionRow,
)
from reasonlab.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAJECTORY, POOL, CURATED, RANDOM, BASE = "trajectory-aware", "pool", "curated", "random", "base"
RIGHT, THINKING = "random, right", "base, thinking forced"
_ORANGE = "#E69F00"
_STYLES: dict[str, dict[str, Any]] = {
    TRAJECTORY: {"color": BLUE, "marker": "o"},
    "response-only": {"color": VERMILION, "marker": "^"},
    "response-only, on responses": {"color": _ORANGE, "marker": "v"},
    "skywork-style": {"color": PURPLE, "marker": "s"},
    RANDOM: {"color": GREY, "marker": "D"},
    RIGHT: {"color": GREY, "marker": "X"},
    CURATED: {"color": GREEN, "marker": "P"},
    POOL: {"color": INK, "marker": "s"},
    BASE: {"color": GREY, "marker": "o", "markerfacecolor": "white"},
    "majority": {"color": GREY, "marker": "D"},
    "weighted majority": {"color": GREEN, "marker": "P"},
    "any distinct text": {"color": GREY, "marker": "X"},
    "oracle": {"color": INK, "marker": "s"},
}
_HEAD, _FOOT, _TITLES, _BETWEEN, _OURS, _THEIRS = 0.9, 1.35, 0.8, 1.55, 3.6, 2.9
_DODGE = 1.03  # neighbours at one place stand so far apart, as a factor
_NOTE = f"{REASONFLUX}; read off its images, one run each, no intervals given"


def draw_prm_selection(
    rows: Sequence[SelectionRow],
    best: Sequence[BestOfRow],
    rewards: Sequence[JudgeRewardRow],
    record: Record,
    out: Path,
) -> list[Path]:
    """prm-selection.png and prm-uses.png, each with its .svg."""
    return [*_selection(rows, record, out), *_uses(best, rewards, record, out)]


def _selection(rows: Sequence[SelectionRow], record: Record, out: Path) -> list[Path]:
    seeds, published = max(row.seeds for row in rows), reasonflux()
    title = f"What a judge chooses to learn from: {record.protocol.get('model', 'a student')}, {_seeds(seeds)}"
    with house_style():
        frame = Frame(_HEAD + _TITLES + _OURS + _BETWEEN + _THEIRS + _FOOT)
        frame.heading(title, _subtitle(record))
        top = frame.height - _HEAD
        over = "questions and seeds" if seeds > 1 else "questions"
        frame.row_heading(top - 0.2, "Measured here", f"bars: 95 % intervals over {over}")
        edges = frame.edges(0.85, WIDTH - 0.35, top - _TITLES - _OURS, top - _TITLES)
        grid = frame.figure.add_gridspec(1, 2, wspace=0.16, **edges)
        note = _asked(rows)
        _by_number(frame.figure.add_subplot(grid[0, 0]), _number_series(rows), _lines(rows), note)
        fewest = min(row.selected for row in rows if row.data == TRAJECTORY)
        judged = [row for row in rows if row.parameters and row.selected == fewest]
        points = [_Point(r.data, r.parameters, r.accuracy, r.low, r.high, r.data) for r in judged]
        _by_size(frame.figure.add_subplot(grid[0, 1]), points, f"{fewest:,} traces by each judge")
        frame.row_heading(_FOOT + _THEIRS + _TITLES - 0.2, "Published", _NOTE)
        edges = frame.edges(0.85, WIDTH - 0.35, _FOOT, _FOOT + _THEIRS)
        grid = frame.figure.add_gridspec(1, 2, wspace=0.16, **edges)
        theirs = {
            data: [_Point(data, number, accuracy) for number, accuracy in published["selection"][data]]
            for data in (TRAJECTORY, CURATED, POOL)
        }
        axes = frame.figure.add_subplot(grid[0, 0])
        _by_number(axes, theirs, {}, "MATH500, Qwen2.5-14B-Instruct; Fig. 6, left")
        sizes = published["judge_sizes"]["points"].items()
        points = [_Point(data, size, accuracy, label=label) for label, (data, size, accuracy) in sizes]
        _by_size(frame.figure.add_subplot(grid[0, 1]), points, "1,000 traces by each judge; Fig. 6, right")
        frame.caption(_caption(rows, record))
        return list(save(frame.figure, out / "prm-selection", title))


class _Point:
    """Something to draw: at `x` an accuracy, with its interval where there is one."""

    def __init__(
        self, data: str, x: float, accuracy: float, low: float | None = None, high: float | None = None, label: str = ""
    ) -> None:
        self.data, self.x, self.label = data, x, label or data
        self.accuracy = 100 * accuracy
        self.low = 100 * (accuracy if low is None else low)
        self.high = 100 * (accuracy if high is None else high)


def _number_series(rows: Sequence[SelectionRow]) -> dict[str, list[_Point]]:
    """What depends on the number of traces: the judge with every number, and those without a judge."""
    judge = max((row for row in rows if row.data == TRAJECTORY), key=lambda row: row.parameters).judge
    kept = [
        row for row in rows if row.selected and (not row.parameters or (row.data, row.judge) == (TRAJECTORY, judge))
    ]
    series: dict[str, list[_Point]] = {}
    for row in kept:
        label = f"{row.data} ({judge})" if row.parameters else row.data
        series.setdefault(row.data, []).append(_Point(row.data, row.selected, row.accuracy, row.low, row.high, label))
    return series


def _lines(rows: Sequence[SelectionRow]) -> dict[str, float]:
    """Where the student began, and where it would be if it were only made to think."""
    names = {BASE: "before SFT", THINKING: "before SFT, made to think"}
    return {names[row.data]: 100 * row.accuracy for row in rows if row.data in names}


def _by_number(axes: Axes, series: Mapping[str, Sequence[_Point]], lines: Mapping[str, float], note: str) -> None:
    _prepare(axes)
    axes.set_xscale("log")
    xs = sorted({point.x for points in series.values() for point in points})
    axes.set_xlim(xs[0] / 1.4, xs[-1] * 1.5)
    axes.set_xticks(xs, [f"{x:,.0f}" for x in xs])
    axes.minorticks_off()
    axes.set_xlabel("traces that the student learns from")
    for height in lines.values():
        axes.axhline(height, color=GREY, linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=1.5)
    _dodged(list(series.values()))
    for data, points in series.items():
        _draw(axes, data, points, joined=len(points) > 1)
    _limits(axes, [p for points in series.values() for p in points], list(lines.values()))
    ends = [
        Label(points[-1].label, points[-1].x, points[-1].accuracy, _STYLES[d]["color"]) for d, points in series.items()
    ]
    ends += [Label(text, xs[-1], height, GREY) for text, height in lines.items()]
    write_labels(axes, ends, [])
    panel_title(axes, "Number of traces", [note, ""])


def _by_size(axes: Axes, points: Sequence[_Point], note: str) -> None:
    _prepare(axes)
    axes.set_xscale("log")
    xs = sorted({point.x for point in points})
    axes.set_xlim(xs[0] / 1.8, xs[-1] * 1.8)
    axes.set_xticks(xs, [_parameters(x) for x in xs])
    axes.minorticks_off()
    axes.set_xlabel("parameters of the judge")
    _dodged([points])
    for data in dict.fromkeys(point.data for point in points):
        mine = sorted((point for point in points if point.data == data), key=lambda point: point.x)
        _draw(axes, data, mine, joined=len(mine) > 1)
    _limits(axes, points, [], room=0.35 if any(point.low < point.high for point in points) else 0.14)
    if any(point.low < point.high for point in points):
        axes.legend(loc="upper left", fontsize=8)
    else:
        write_labels(axes, [Label(p.label, p.x, p.accuracy, _STYLES[p.data]["color"]) for p in points], [])
    panel_title(axes, "Size of the judge", [note, ""])


def _parameters(count: float) -> str:
    return f"{count / 1e9:g}B" if count >= 1e9 else f"{count / 1e6:.2g}m"


# --- the judge's other uses -------------------------------------------------------------------------------------


def _uses(best: Sequence[BestOfRow], rewards: Sequence[JudgeRewardRow], record: Record, out: Path) -> list[Path]:
    title = f"Other uses of the judges: {record.protocol.get('model', 'a student')}"
    with house_style():
        frame = Frame(_HEAD + _TITLES + _OURS + _FOOT)
        frame.heading(title, _subtitle(record, students=False))
        edges = frame.edges(0.85, WIDTH - 0.35, _FOOT, frame.height - _HEAD - 0.4)
        grid = frame.figure.add_gridspec(1, 2 if rewards else 1, wspace=0.16, **edges)
        _best_of(frame.figure.add_subplot(grid[0, 0]), best)
        if rewards:
            _rewards(frame.figure.add_subplot(grid[0, 1]), rewards)
        over = "over questions, and over seeds where there are several" if rewards else "over questions"
        note = "Oracle: any of the N answers is right. Any distinct text: picked by lot."
        frame.caption(f"Bars: 95 % intervals {over}. {note}")
        return list(save(frame.figure, out / "prm-uses", title))


def _best_of(axes: Axes, rows: Sequence[BestOfRow]) -> None:
    _prepare(axes)
    axes.set_xscale("log", base=2)
    numbers = sorted({row.n for row in rows})
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.minorticks_off()
    axes.set_xlim(numbers[0] / 1.15, numbers[-1] * 1.15)
    axes.set_xlabel("answers to pick from")
    selectors = list(dict.fromkeys(row.selector for row in rows))
    kinds = [selector if selector in _STYLES else selector.rsplit(" ", 1)[0] for selector in selectors]
    for place, (selector, kind) in enumerate(zip(selectors, kinds, strict=True)):
        mine = sorted((row for row in rows if row.selector == selector), key=lambda row: row.n)
        smaller = kind in kinds[place + 1 :]  # of two judges of a kind the larger comes last
        axes.plot(
            [row.n for row in mine],
            [100 * row.accuracy for row in mine],
            **_STYLES[kind],
            linewidth=1.1 if smaller else 1.6,
            linestyle=(0, (4, 2)) if smaller else "-",
            markersize=5,
            label=selector,
        )
    _limits(axes, [_Point(row.selector, row.n, row.accuracy) for row in rows], [])
    axes.legend(loc="upper left", fontsize=8)  # the judges end too close to each other for labels
    panel_title(axes, "Best of N", [counted(rows[0].questions, "question"), ""])


def _rewards(axes: Axes, rows: Sequence[JudgeRewardRow]) -> None:
    _prepare(axes)
    for place, row in enumerate(rows):
        colour = GREY if row.weight != row.weight else INK if row.weight == 0 else BLUE
        ends = [[100 * (row.accuracy - row.low)], [100 * (row.high - row.accuracy)]]
        axes.errorbar([place], [100 * row.accuracy], yerr=ends, color=colour, marker="o", markersize=7, elinewidth=1.2)
        text = f"{100 * row.accuracy:.1f}"
        axes.annotate(text, (place, 100 * row.accuracy), (7, 4), textcoords="offset points", color=colour)
    axes.set_xlim(-0.5, len(rows) - 0.3)
    axes.set_xticks(range(len(rows)), [_reward_name(row) for row in rows])
    axes.grid(axis="x", visible=False)
    panel_title(axes, "Reward in RL", [_seeds(max(row.seeds for row in rows)), ""])


def _reward_name(row: JudgeRewardRow) -> str:
    if row.weight != row.weight:
        return "before RL"
    return "outcome" if row.weight == 0 else f"β = {row.weight:g},\n{row.form}"


# --- what the panels share --------------------------------------------------------------------------------------


def _prepare(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    bare(axes)
    axes.grid(axis="both")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylabel("accuracy (%)")


def _dodged(series: Sequence[Sequence[_Point]]) -> None:
    """Move points that share a place on the logarithmic axis a little apart, so that their bars can be told apart.

    Points without bars stay where they are."""
    if all(point.low == point.high for points in series for point in points):
        return
    for x in {point.x for points in series for point in points}:
        shared = [point for points in series for point in points if point.x == x]
        for place, point in enumerate(shared):
            point.x = x * _DODGE ** (2 * place - len(shared) + 1)


def _draw(axes: Axes, data: str, points: Sequence[_Point], joined: bool) -> None:
    style = _STYLES[data]
    x, y = [point.x for point in points], [point.accuracy for point in points]
    ends = [[p.accuracy - p.low for p in points], [p.high - p.accuracy for p in points]]
    axes.errorbar(x, y, yerr=ends, fmt="none", ecolor=style["color"], elinewidth=1.0, alpha=0.7, zorder=2)
    axes.plot(
        x,
        y,
        **style,
        linewidth=1.6 if joined else 0,
        markersize=7,
        markeredgecolor="white",
        markeredgewidth=0.7,
        zorder=4,
        label=data,
    )


def _limits(axes: Axes, points: Sequence[_Point], lines: Sequence[float], room: float = 0.14) -> None:
    """Limits that hold all bars, with `room` above them as a share of their span."""
    values = [end for point in points for end in (point.low, point.high)] + list(lines)
    span = (max(values) - min(values)) or 10.0
    axes.set_ylim(max(0.0, min(values) - 0.14 * span), min(100.0, max(values) + room * span))


def _seeds(seeds: int) -> str:
    return f"mean of {seeds} seeds" if seeds > 1 else "one seed"


def _asked(rows: Sequence[SelectionRow]) -> str:
    most = max(rows, key=lambda row: row.seeds)
    return (
        f"{counted(most.questions, 'question')}, {counted(most.samples, 'sample')} each, {counted(most.seeds, 'seed')}"
    )


def _subtitle(record: Record, students: bool = True) -> str:
    protocol = record.protocol
    parts = [f"Held-out {protocol['split']} problems" if "split" in protocol else "Held-out problems"]
    if "temperature" in protocol:
        parts.append(f"temperature {protocol['temperature']:g}")
    if students and "updates" in protocol:
        parts.append(f"{protocol['updates']} updates on {protocol['batch']} traces for every student")
    return ", ".join(parts)


def _caption(rows: Sequence[SelectionRow], record: Record) -> str:
    """What was in the sets; whether differences are more than noise is for the verdicts to say."""
    fewest = min(row.selected for row in rows if row.data == TRAJECTORY)
    named = []
    for row in rows:
        if row.selected == fewest or row.data == POOL:
            label = f"{row.data} {row.judge}" if row.parameters else row.data
            named.append(f"{label} {100 * row.right:.0f} %")
    dotted = " Dotted: the student before SFT."
    return f"Right answers in the sets of {fewest:,} and in the pool: {', '.join(named)}.{dotted}"
