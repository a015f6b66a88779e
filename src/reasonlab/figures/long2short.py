"""The long2short study: accuracy against mean response length of ways to make a long-thinking model short (Fig. 7).

Each arm is a point with the joint 95 % ellipse of its two means, because one draw of questions moves both. Published
points stand in their own row, in the colours of the arms they answer to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reasonlab.figures.frame import WIDTH, Frame
from reasonlab.figures.labels import Label, write_labels
from reasonlab.figures.panel_grid import panel_title
from reasonlab.figures.published import KIMI_NOTE, kimi_k15
from reasonlab.figures.record import Record
from reasonlab.figures.style import BLUE, GREEN, GREY, INK, PURPLE, VERMILION, bare, house_style, save
from reasonlab.figures.tables import (
    ArmRow,
)
from reasonlab.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONG, RL = "long", "rl"
CHI_SQUARED = 5.991  # 95 % quantile with two degrees of freedom
_ORANGE = "#E69F00"
_STYLES: dict[str, dict[str, Any]] = {
    LONG: {"color": INK, "marker": "o"},
    RL: {"color": VERMILION, "marker": "D"},
    "dpo": {"color": BLUE, "marker": "s"},
    "merge+rs": {"color": GREEN, "marker": "^"},
    "merge": {"color": PURPLE, "marker": "v"},
    "shortest": {"color": _ORANGE, "marker": "p"},
}
_REFERENCE: dict[str, Any] = {"color": GREY, "marker": "o", "markerfacecolor": "white"}
_PUBLISHED_ARMS = {
    "k1.5-long": LONG,
    "k1.5-short w/ rl": RL,
    "k1.5-short w/ dpo": "dpo",
    "k1.5-short w/ merge + rs": "merge+rs",
    "k1.5-short w/ merge": "merge",
    "k1.5-shortest": "shortest",
}
_HEAD, _FOOT, _TITLES, _BETWEEN = 0.9, 1.2, 0.8, 1.55
_OURS, _THEIRS = 3.9, 3.0

Floats = NDArray[np.float64]


def draw_long2short(rows: Sequence[ArmRow], record: Record, out: Path) -> list[Path]:
    """long2short.png and .svg, a column for each panel of the table."""
    panels = list(dict.fromkeys(row.panel for row in rows))
    title = "From long to short: " + ", ".join(
        filter(None, [str(record.protocol.get("model", "")), _seeds(max(row.seeds for row in rows))])
    )
    published = kimi_k15()["long2short"]["panels"]
    with house_style():
        frame = Frame(_HEAD + _TITLES + _OURS + _BETWEEN + _THEIRS + _FOOT)
        frame.heading(title, _subtitle(record))
        top = frame.height - _HEAD
        over = "questions and seeds" if max(row.seeds for row in rows) > 1 else "questions"
        frame.row_heading(top - 0.2, "Measured here", f"ellipses: joint 95 % of both means, over {over}")
        edges = frame.edges(0.85, WIDTH - 0.35, top - _TITLES - _OURS, top - _TITLES)
        grid = frame.figure.add_gridspec(1, len(panels), wspace=0.16, **edges)
        for column, panel in enumerate(panels):
            _ours(frame.figure.add_subplot(grid[0, column]), [row for row in rows if row.panel == panel])
        frame.row_heading(_FOOT + _THEIRS + _TITLES - 0.2, "Published", KIMI_NOTE)
        edges = frame.edges(0.85, WIDTH - 0.35, _FOOT, _FOOT + _THEIRS)
        grid = frame.figure.add_gridspec(1, len(published), wspace=0.16, **edges)
        for column, (panel, points) in enumerate(published.items()):
            _theirs(frame.figure.add_subplot(grid[0, column]), panel, points)
        frame.caption(_caption(rows, panels))
        return list(save(frame.figure, out / "long2short", title))


def _seeds(seeds: int) -> str:
    return f"mean of {seeds} seeds" if seeds > 1 else "one seed"


def _subtitle(record: Record) -> str:
    protocol = record.protocol
    parts = [f"Held-out {protocol['split']} problems" if "split" in protocol else "Held-out problems"]
    if "temperature" in protocol:
        parts.append(f"temperature {protocol['temperature']:g}")
    if "max_tokens" in protocol:
        parts.append(f"at most {protocol['max_tokens']:,} tokens")
    return ", ".join(parts)


# --- the two kinds of panels ------------------------------------------------------------------------------------


def _ours(axes: Axes, rows: Sequence[ArmRow]) -> None:
    from matplotlib.patches import Polygon

    curves = [ellipse(row) for row in rows]
    arms = [(row.tokens, 100 * row.accuracy) for row in rows if row.arm in _STYLES]
    _scale(axes, np.concatenate([*curves, np.array([(row.tokens, 100 * row.accuracy) for row in rows])]))
    front = _front(axes, arms)
    for row, curve in zip(rows, curves, strict=True):
        style = _STYLES.get(row.arm, _REFERENCE)
        axes.add_patch(Polygon(curve, facecolor=style["color"], alpha=0.11, linewidth=0))
        axes.add_patch(Polygon(curve, fill=False, edgecolor=style["color"], alpha=0.7, linewidth=0.8))
        _mark(axes, row.tokens, 100 * row.accuracy, style)
    labels = [_label(row.label, row.tokens, 100 * row.accuracy, row.arm) for row in rows]
    write_labels(axes, labels, [*curves, front])
    most = max(rows, key=lambda row: row.seeds)  # a reference model is not trained, so it has one seed
    asked = [
        counted(most.questions, "question"),
        f"{counted(most.samples, 'sample')} each",
        counted(most.seeds, "seed"),
    ]
    panel_title(axes, most.panel, [", ".join(asked), asked[0]])


def _theirs(axes: Axes, panel: str, points: dict[str, list[float]]) -> None:
    places = {name: (tokens, 100 * accuracy) for name, (tokens, accuracy) in points.items()}
    _scale(axes, np.array(list(places.values())))
    front = _front(axes, [place for name, place in places.items() if name in _PUBLISHED_ARMS])
    for name, (x, y) in places.items():
        _mark(axes, x, y, _STYLES.get(_PUBLISHED_ARMS.get(name, ""), _REFERENCE))
    write_labels(axes, [_label(name, x, y, _PUBLISHED_ARMS.get(name, "")) for name, (x, y) in places.items()], [front])
    panel_title(axes, panel, ["Fig. 7; grey: other models"])


def ellipse(row: ArmRow, points: int = 120) -> Floats:
    """The joint 95 % ellipse as points (tokens, accuracy in %) around it, the last equal to the first.

    {m + √(χ²₂) · V diag(√λ) (cos φ, sin φ)ᵀ},   V diag(λ) Vᵀ = covariance of (tokens, 100 · accuracy)
    """
    covariance = np.array([[row.var_tokens, 100 * row.cov], [100 * row.cov, 1e4 * row.var_accuracy]])
    values, axes = np.linalg.eigh(covariance)
    angles = np.linspace(0, 2 * np.pi, points)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    turned = axes @ (np.sqrt(CHI_SQUARED * np.maximum(values, 0))[:, None] * circle)
    around: Floats = turned.T + np.array([row.tokens, 100 * row.accuracy])
    return around


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (tokens, accuracy) that no other one matches or beats in both, from the shortest to the longest."""
    front: list[tuple[float, float]] = []
    for tokens, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or accuracy > front[-1][1]:
            front.append((tokens, accuracy))
    return front


def _front(axes: Axes, points: Sequence[tuple[float, float]]) -> Floats:
    """The Pareto front as a thin staircase, the best accuracy for so many tokens; returns points along it."""
    front = pareto(points)
    if not front:
        return np.empty((0, 2))
    right = axes.get_xlim()[1]
    corners = [front[0]]
    for before, after in pairwise(front):
        corners += [(after[0], before[1]), after]
    corners.append((right, front[-1][1]))
    x, y = np.array(corners).T
    axes.plot(x, y, color=GREY, linewidth=0.9, linestyle=(0, (1, 1.5)), zorder=1.5)
    along = np.linspace(0, len(x) - 1, 60 * len(x))
    return np.stack([np.interp(along, range(len(x)), x), np.interp(along, range(len(y)), y)], axis=1)


def _scale(axes: Axes, points: Floats) -> None:
    """Limits that hold all points with room for labels, within what is possible."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    bare(axes)
    axes.grid(axis="both")
    low, high = points.min(axis=0), points.max(axis=0)
    margin = np.where(high > low, 0.12 * (high - low), np.maximum(1.0, 0.1 * high))
    axes.set_xlim(max(0.0, low[0] - margin[0]), high[0] + margin[0])
    axes.set_ylim(max(0.0, low[1] - margin[1]), min(100.0, high[1] + margin[1]))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlabel("mean response tokens")
    axes.set_ylabel("accuracy (%)")


def _mark(axes: Axes, x: float, y: float, style: dict[str, Any]) -> None:
    edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.7} if style is not _REFERENCE else {}
    axes.plot([x], [y], **style, **edge, markersize=7.5, linestyle="", clip_on=False, zorder=4)


def _label(text: str, x: float, y: float, arm: str) -> Label:
    return Label(text, x, y, _STYLES.get(arm, _REFERENCE)["color"], "bold" if arm == RL else "normal")


def _caption(rows: Sequence[ArmRow], panels: Sequence[str]) -> str:
    """What RL keeps and what it saves, panel by panel; whether it is more than noise is for the verdicts to say."""
    sentences = []
    for panel in panels:
        arms = {row.arm: row for row in rows if row.panel == panel}
        if LONG in arms and RL in arms and arms[LONG].tokens > 0:
            long, short = arms[LONG], arms[RL]
            points, tokens = (
                _signed(100 * (short.accuracy - long.accuracy), 1),
                _signed(100 * (short.tokens / long.tokens - 1), 0),
            )
            name = panel[:1].upper() + panel[1:] if " " in panel else panel  # a benchmark's name stays what it is
            sentences.append(f"{name}: RL against the long model, {points} points of accuracy and {tokens} % tokens.")
    return " ".join([*sentences, "Dotted: the Pareto front of the arms, the best accuracy for so many tokens."])


def _signed(value: float, digits: int) -> str:
    """With a typographic minus, and no sign on zero."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")
