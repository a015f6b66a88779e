"""What happens inside MEL: how many reflections help when the problem is tried again, and the reward in training.

The published retention curves lie beside ours as thin grey dashes with their names; everything in colour was measured
here. Iterations are noisy, so a faint line shows them as they are and a strong one their running mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reasonlab.errors import UserError
from reasonlab.figures.frame import NO_BREAK_SPACE, WIDTH, Frame
from reasonlab.figures.labels import Label, write_labels
from reasonlab.figures.mel_validation import (
    GRPO,
    MEL,
    NAMES,
    STYLES,
    arm_legend,
    check_arm,
    matched_words,
    mel_title,
    training_words,
)
from reasonlab.figures.panel_grid import panel_title
from reasonlab.figures.published import MEL_PAPER, mel
from reasonlab.figures.record import Record
from reasonlab.figures.style import bare, house_style, save
from reasonlab.figures.tables import (
    ExperienceRow,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WINDOW = 9  # steps of the running mean
_GREYS = ("#A3ABB3", "#7D8690", "#59636E")  # the larger the model, the darker
_HEAD, _TITLES, _FOOT = 0.9, 0.72, 1.62
_MAIN, _STRIP, _GAP = 3.3, 0.95, 0.62  # inches: the panels, the strips below them, and between the two

Floats = NDArray[np.float64]


def draw_mel_reflection(rows: Sequence[ExperienceRow], record: Record, out: Path) -> tuple[Path, Path]:
    """mel_reflection.png and .svg; arms other than GRPO, MEL and matched GRPO are not shown."""
    rows = sorted((row for row in rows if row.arm in STYLES), key=lambda row: row.iteration)
    for arm in (GRPO, MEL):
        check_arm(arm, (row.arm for row in rows), "no row in experience.csv")
    if not any(math.isfinite(row.retention) for row in rows if row.arm == MEL):
        raise UserError("the arm mel has no retention ratio in experience.csv", "Run the study again: it is drawn")
    title = mel_title("reflections and training reward", rows, record)
    with house_style():
        return save(reflection_figure(rows, record, title), out / "mel_reflection", title)


def reflection_figure(rows: Sequence[ExperienceRow], record: Record, title: str) -> Figure:
    frame = Frame(_HEAD + _TITLES + _MAIN + _GAP + _STRIP + _FOOT)
    frame.heading(title, _subtitle(rows))
    top = frame.height - _HEAD
    banded = any(math.isfinite(row.reward_low) for row in rows)
    arm_legend(frame, rows, top - 0.12, banded)
    top -= _TITLES
    edges = frame.edges(0.8, WIDTH - 0.3, top - _MAIN - _GAP - _STRIP, top)
    mean_height = (_MAIN + _STRIP) / 2  # what a grid measures its gaps in
    grid = frame.figure.add_gridspec(
        2, 2, height_ratios=[_MAIN, _STRIP], wspace=0.16, hspace=_GAP / mean_height, **edges
    )
    mine = [row for row in rows if row.arm == MEL]
    retention, reward = frame.figure.add_subplot(grid[0, 0]), frame.figure.add_subplot(grid[0, 1])
    mixed, lengths = frame.figure.add_subplot(grid[1, 0], sharex=retention), frame.figure.add_subplot(grid[1, 1])
    lengths.sharex(reward)
    _retention(retention, mine)
    _reward(reward, rows)
    _strip(mixed, mine, lambda row: 100 * row.mixed, "mixed groups (%)", "right and wrong rollouts in one group")
    _strip(lengths, mine, lambda row: row.reflection_tokens, "tokens of a reflection", "mean of an iteration")
    bottom = top - _MAIN - _GAP - _STRIP
    for place in (mixed, lengths):
        place.set_xlabel("training step", fontsize=9.5)
    frame.caption(_caption(rows, record), y=(bottom - 0.5) / 2)
    return frame.figure


def running_mean(steps: Sequence[int], values: Sequence[float] | Floats, window: int = WINDOW) -> Floats:
    """m_i = mean of the known v_j with |s_j − s_i| ≤ (window − 1)/2; at both ends of a run fewer steps are there."""
    at, known = np.asarray(steps, float), np.asarray(values, float)
    near = (np.abs(at[:, None] - at[None, :]) <= (window - 1) / 2) & np.isfinite(known)[None, :]
    total, count = np.where(near, np.nan_to_num(known)[None, :], 0.0).sum(axis=1), near.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


# --- panels -----------------------------------------------------------------------------------------------------


def _retention(axes: Axes, rows: Sequence[ExperienceRow]) -> None:
    """Ours in colour; the published curves in grey, each named at its end."""
    curves = {model: np.array(points, float) for model, points in mel()["retention"]["curves"].items()}
    for points, grey in zip(curves.values(), _GREYS, strict=True):
        axes.plot(points[:, 0], 100 * points[:, 1], color=grey, linewidth=1.1, linestyle=(0, (4, 2)), zorder=1.8)
    steps = [row.iteration for row in rows]
    values = [(100 * row.retention_low, 100 * row.retention, 100 * row.retention_high) for row in rows]
    _noisy(axes, steps, values, STYLES[MEL])
    _finish(axes)
    axes.set_ylim(0, 100)
    last = max(steps[-1], *(points[-1, 0] for points in curves.values()))
    axes.set_xlim(-0.03 * last, 1.04 * last)
    axes.set_ylabel("retention ratio (%)")
    panel_title(axes, "Retention after replay", ["grey dashes: published, read by eye"], size=1.2)
    ours = [np.column_stack([steps, column]) for column in np.array(values, float).T]
    drawn = [_along(line) for line in (*ours, *(points * [1, 100] for points in curves.values()))]
    labels = [
        Label(f"{model}, published", points[-1, 0], 100 * points[-1, 1], grey)
        for (model, points), grey in zip(curves.items(), _GREYS, strict=True)
    ]
    write_labels(axes, labels, drawn, size=8.5)


def _along(points: Floats) -> Floats:
    """Many points along a line, so that a label sees where it runs."""
    known = points[np.isfinite(points[:, 1])]
    if not len(known):
        return known
    x = np.linspace(known[0, 0], known[-1, 0], 300)
    return np.column_stack([x, np.interp(x, known[:, 0], known[:, 1])])


def _reward(axes: Axes, rows: Sequence[ExperienceRow]) -> None:
    for arm, style in STYLES.items():
        of_arm = [row for row in rows if row.arm == arm]
        if of_arm:
            values = [(row.reward_low, row.reward, row.reward_high) for row in of_arm]
            _noisy(axes, [row.iteration for row in of_arm], values, style)
    _finish(axes)
    axes.set_ylabel("mean training reward")
    panel_title(axes, "Training reward", [_ends(rows)], size=1.2)


def _strip(
    axes: Axes, rows: Sequence[ExperienceRow], value: Callable[[ExperienceRow], float], name: str, note: str
) -> None:
    values = [value(row) for row in rows]
    _noisy(axes, [row.iteration for row in rows], [(math.nan, one, math.nan) for one in values], STYLES[MEL])
    _finish(axes, ticks=3)
    known = [one for one in values if math.isfinite(one)]
    axes.set_ylim(0, 1.1 * max(known, default=1.0) or 1.0)
    panel_title(axes, name, [note])


def _noisy(
    axes: Axes, steps: Sequence[int], values: Sequence[tuple[float, float, float]], style: dict[str, Any]
) -> None:
    """A faint line of the iterations and a strong one of their running mean.

    The ends of the intervals are averaged in the same way: right where seeds stay apart from step to step, rather too
    wide where they differ by chance.
    """
    low, raw, high = (np.array(column, float) for column in zip(*values, strict=True))
    colour = style["color"]
    axes.plot(steps, raw, color=colour, linewidth=0.7, alpha=0.28)
    below, middle, above = (running_mean(steps, column) for column in (low, raw, high))
    if len(steps) > 1:
        axes.fill_between(steps, below, above, color=colour, alpha=0.14, linewidth=0)
    every = max(1, len(steps) // 10)
    axes.plot(steps, middle, **style, linewidth=1.8, markersize=5, markevery=every)


def _finish(axes: Axes, ticks: int = 5) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    bare(axes)
    axes.grid(axis="y")
    axes.yaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


# --- words ------------------------------------------------------------------------------------------------------


def _subtitle(rows: Sequence[ExperienceRow]) -> str:
    banded = any(math.isfinite(row.reward_low) or math.isfinite(row.retention_low) for row in rows)
    over = " over seeds" * (max(row.seeds for row in rows) > 1)
    bands = f"bands: 95 % intervals{over}, averaged alike" if banded else "no intervals"
    return f"Faint lines: every training step; strong lines: running mean over {WINDOW} steps; {bands}"


def _ends(rows: Sequence[ExperienceRow]) -> str:
    """The running means at the last step of GRPO and MEL."""
    parts = []
    for arm in (GRPO, MEL):
        of_arm = [row for row in rows if row.arm == arm]
        last = running_mean([row.iteration for row in of_arm], [row.reward for row in of_arm])[-1]
        parts.append(f"{NAMES[arm]} {last:.2f}")
    return f"at the end: {', '.join(parts)}"


def _caption(rows: Sequence[ExperienceRow], record: Record) -> str:
    published = []
    for model, curves in mel()["reward"]["curves"].items():
        (step, grpo), (_, own) = curves[GRPO][-1], curves[MEL][-1]
        published.append(f"{model} GRPO {grpo:.2f}, MEL {own:.2f}".replace(" ", NO_BREAK_SPACE))
    words = [
        f"Published training reward at step {step}, read by eye and approximate ({MEL_PAPER}, Fig. 3):",
        f"{'; '.join(published)}; all start at 0.15 to 0.20.",
        "Published retention (Fig. 9) is drawn through its turning points.",
        matched_words((row.arm for row in rows), record),
        training_words(record),
    ]
    return " ".join(filter(None, words))
