"""Training dynamics: accuracy and response length against RL iteration, in total and by family (Kimi k1.5, Fig. 5).

Every number is computed again from the answers the run kept. The total panel also shows the control, accuracy with
thinking forced, and the caption divides the gain by it: what the control does not support is not said.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from reasonlab.config import Config, GrpoConfig, load_recipe
from reasonlab.errors import UserError
from reasonlab.evaluate.control import FORCED_SUITE, SUITE, Split, caption, recorded_answers, split_gain
from reasonlab.evaluate.evaluator import Answer, summarise
from reasonlab.evaluate.statistics import Interval
from reasonlab.figures.style import BLUE, GREY, INK, VERMILION, bare, house_style, new_figure, save
from reasonlab.problems.tiny_world import FAMILY_NAMES
from reasonlab.runs import RunReader
from reasonlab.runs.files import write_aside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOTAL, FORCED = "total", "total, thinking forced"
COLUMNS = (
    *("panel", "iteration", "accuracy", "accuracy_low", "accuracy_high"),
    *("tokens", "tokens_low", "tokens_high", "tokens_p05", "tokens_p95", "questions", "samples"),
)
_ORDER = {name: place for place, name in enumerate(FAMILY_NAMES)}


@dataclass(frozen=True, slots=True)
class Point:
    """One panel at one iteration."""

    panel: str
    iteration: int
    accuracy: Interval
    tokens: Interval
    p05: float
    p95: float
    questions: int
    samples: int

    def row(self) -> tuple[str | int | float, ...]:
        a, t = self.accuracy, self.tokens
        scores = (a.estimate, a.low, a.high, t.estimate, t.low, t.high)
        return (self.panel, self.iteration, *scores, self.p05, self.p95, self.questions, self.samples)


@dataclass(frozen=True, slots=True)
class Dynamics:
    """The numbers behind the figure."""

    points: tuple[Point, ...]
    split: Split | None
    title: str
    subtitle: str
    caption: str

    def panel(self, name: str) -> list[Point]:
        return [point for point in self.points if point.panel == name]

    @property
    def families(self) -> list[str]:
        return [name for name in dict.fromkeys(point.panel for point in self.points) if name not in (TOTAL, FORCED)]


@dataclass(frozen=True, slots=True)
class DynamicsFiles:
    """What `draw_dynamics` wrote, and the numbers in it."""

    png: Path
    svg: Path
    csv: Path
    dynamics: Dynamics


def draw_dynamics(run: Path, out: Path) -> DynamicsFiles:
    """Draw a run's training dynamics into `out`: dynamics.png, dynamics.svg and dynamics.csv."""
    dynamics = read_dynamics(run)
    table = out / "dynamics.csv"
    write_aside(table, _csv(dynamics.points))
    with house_style():
        png, svg = save(_draw(dynamics), out / "dynamics", dynamics.title)
    return DynamicsFiles(png, svg, table, dynamics)


# --- the numbers -----------------------------------------------------------------------------------------------


def read_dynamics(run: Path) -> Dynamics:
    """All points of the figure, from the stored answers."""
    reader = RunReader(run)
    config = load_recipe(run / "config.toml")
    free = {step: recorded_answers(reader, SUITE, step) for step in reader.evaluation_steps(SUITE)}
    forced = {step: recorded_answers(reader, FORCED_SUITE, step) for step in reader.evaluation_steps(FORCED_SUITE)}
    if not free:
        raise UserError(
            f"the run in {run} holds no evaluation to draw",
            "Wait for its first one, or train again with --evaluate.every 5",
        )
    points = [_point(TOTAL, step, answers) for step, answers in free.items()]
    points += [_point(FORCED, step, answers) for step, answers in forced.items()]
    families = {answer.family for answers in free.values() for answer in answers}
    for family in sorted(families, key=lambda name: (_ORDER.get(name, len(_ORDER)), name)):
        for step, answers in free.items():
            if part := [answer for answer in answers if answer.family == family]:
                points.append(_point(family, step, part))
    split = split_gain(free, forced)
    return Dynamics(tuple(points), split, _title(config), _subtitle(config, points), caption(split, len(free)))


def _point(panel: str, step: int, answers: Sequence[Answer]) -> Point:
    summary = summarise(answers)
    p05, p95 = np.quantile([answer.tokens for answer in answers], [0.05, 0.95])
    return Point(
        panel, step, summary.accuracy, summary.tokens, float(p05), float(p95), summary.questions, summary.samples
    )


def _csv(points: Iterable[Point]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(point.row() for point in points)
    return text.getvalue().encode()


# --- the words -------------------------------------------------------------------------------------------------


def _title(config: Config) -> str:
    method = config.method.variant if isinstance(config.method, GrpoConfig) else config.method.type
    return f"Training dynamics: {Path(config.model.path).name}, {method.replace('_', ' ')}, seed {config.seed}"


def _subtitle(config: Config, points: Sequence[Point]) -> str:
    total = points[0]
    by_family = {point.questions for point in points if point.panel not in (TOTAL, FORCED)}
    families = f" ({min(by_family)} per family)" if len(by_family) == 1 and by_family != {total.questions} else ""
    samples = f"{total.samples} sample{'s' * (total.samples > 1)} each"
    return (
        f"Held-out {config.evaluate.split} problems: {total.questions} questions{families}, {samples}, "
        f"temperature {config.evaluate.temperature:g}"
    )


# --- the drawing -----------------------------------------------------------------------------------------------

_WIDTH, _ROW = 12.0, 1.66  # inches
_HEAD, _FOOT, _SIDE = 1.06, 1.42, 0.72
NO_BREAK_SPACE = "\u00a0"
_ACCURACY: dict[str, Any] = {"color": BLUE, "marker": "o", "linestyle": "-"}
_TOKENS: dict[str, Any] = {"color": VERMILION, "marker": "s", "linestyle": (0, (4, 2))}
_FORCED: dict[str, Any] = {"color": INK, "marker": "D", "linestyle": ":", "markerfacecolor": "white"}
_ACCURACY_BAND: dict[str, Any] = {"color": BLUE, "alpha": 0.20, "linewidth": 0}
_TOKENS_BAND: dict[str, Any] = {"color": VERMILION, "alpha": 0.11, "linewidth": 0}


def _draw(dynamics: Dynamics) -> Figure:
    """The total as a block of 2 × 2 cells at the top left, the families around it; all share their scales."""
    families = dynamics.families
    columns = 3 if len(families) <= 2 else 4
    rows = max(2, math.ceil((4 + len(families)) / columns))
    height = _HEAD + rows * _ROW + _FOOT
    figure = new_figure(_WIDTH, height)
    edges = {"left": _SIDE / _WIDTH, "right": 1 - _SIDE / _WIDTH, "top": 1 - _HEAD / height, "bottom": _FOOT / height}
    grid = figure.add_gridspec(rows, columns, wspace=0.08, hspace=0.42, **edges)
    longest = max(max(point.p95, point.tokens.estimate) for point in dynamics.points if point.panel != FORCED)
    total = figure.add_subplot(grid[:2, :2])
    _panel(total, dynamics.panel(TOTAL), longest, size=1.5)
    _control(total, dynamics.panel(FORCED))
    cells = [(row, column) for row in range(rows) for column in range(columns) if row > 1 or column > 1]
    cells = cells[: len(families)]
    for family, (row, column) in zip(families, cells, strict=True):
        axes = figure.add_subplot(grid[row, column])
        lengths = _panel(axes, dynamics.panel(family), longest)
        axes.tick_params(labelbottom=(row + 1, column) not in cells, labelleft=column == 0)
        lengths.tick_params(labelright=(row, column + 1) not in cells)
    _words(figure, dynamics, height)
    return figure


def _panel(axes: Axes, points: Sequence[Point], longest: float, size: float = 1.0) -> Axes:
    """Accuracy on the left axis, response tokens on the right one, which is returned."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

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
    lengths.grid(axis="y")
    lengths.tick_params(labelright=False)
    x = [point.iteration for point in points]
    margin = 0.04 * (x[-1] - x[0]) or 1
    axes.set_xlim(x[0] - margin, x[-1] + margin)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]) if len(x) > 1 else FixedLocator(x))
    _curve(lengths, x, [(p.tokens.estimate, p.p05, p.p95) for p in points], _TOKENS, _TOKENS_BAND, size)
    score = [(100 * p.accuracy.estimate, 100 * p.accuracy.low, 100 * p.accuracy.high) for p in points]
    _curve(axes, x, score, _ACCURACY, _ACCURACY_BAND, size)
    axes.set_title(points[0].panel, loc="left", fontsize=8 + 2 * size, fontweight="bold", pad=6)
    axes.set_title(_ends(points), loc="right", fontsize=6 + 2 * size, color=GREY, pad=6)
    return lengths


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
    many = len(x) <= 24  # beyond that markers would hide the line: then only some are drawn
    axes.plot(
        x,
        estimate,
        **line,
        linewidth=1.2 + 0.4 * size,
        markersize=2.2 + 1.3 * size,
        markevery=1 if many else len(x) // 12,
        clip_on=False,
    )
    if len(x) > 1:
        axes.fill_between(x, low, high, **band)
    else:
        axes.vlines(x, low, high, color=line["color"], linewidth=5, alpha=band["alpha"])


def _control(axes: Axes, points: Sequence[Point]) -> None:
    """Accuracy with thinking forced, with its interval."""
    from matplotlib.patheffects import Normal, Stroke

    if not points:
        return
    x = [point.iteration for point in points]
    y = [100 * point.accuracy.estimate for point in points]
    errors = [
        [100 * (p.accuracy.estimate - p.accuracy.low) for p in points],
        [100 * (p.accuracy.high - p.accuracy.estimate) for p in points],
    ]
    axes.errorbar(x, y, yerr=errors, **_FORCED, linewidth=1.3, markersize=6.5, elinewidth=1.0, capsize=3, clip_on=False)
    axes.annotate(
        "thinking forced",
        (x[0], y[0]),
        xytext=(12, 6 if y[-1] <= y[0] else -12),
        textcoords="offset points",
        fontsize=9,
        color=INK,
        path_effects=[Stroke(linewidth=3, foreground="white", alpha=0.8), Normal()],  # legible across a line
    )


def _words(figure: Figure, dynamics: Dynamics, height: float) -> None:
    """Title, axis names, legend and caption, placed in inches from the edges."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def write(x: float, y: float, text: str, **options: Any) -> None:
        figure.text(x / _WIDTH, y / height, text, **options)

    middle = (_FOOT + height - _HEAD) / 2
    write(0.3, height - 0.36, dynamics.title, fontsize=14, fontweight="bold", va="center")
    write(0.3, height - 0.62, dynamics.subtitle, fontsize=9.5, color=GREY, va="center")
    write(0.34, middle, "accuracy (%)", color=BLUE, fontsize=9.5, rotation=90, ha="right", va="center")
    write(_WIDTH - 0.34, middle, "response tokens", color=VERMILION, fontsize=9.5, rotation=270, ha="left", va="center")
    write(_WIDTH / 2, _FOOT - 0.36, "RL iteration", fontsize=9.5, ha="center", va="center")
    handles: list[Any] = [
        (Patch(**_ACCURACY_BAND), Line2D([], [], **_ACCURACY, linewidth=1.8, markersize=5)),
        (Patch(**_TOKENS_BAND), Line2D([], [], **_TOKENS, linewidth=1.8, markersize=5)),
    ]
    labels = ["accuracy, with 95 % interval over questions", "mean response tokens, with 5–95 % range of answers"]
    if dynamics.panel(FORCED):
        handles.append(Line2D([], [], **_FORCED, linewidth=1.3, markersize=6))
        labels.append("accuracy with thinking forced (control)")
    place = (0.5, (_FOOT - 0.66) / height)
    figure.legend(handles, labels, loc="center", bbox_to_anchor=place, ncols=3, fontsize=9, handlelength=3)
    write(_WIDTH / 2, 0.34, _balanced(dynamics.caption), fontsize=9.5, ha="center", va="center", linespacing=1.4)


def _balanced(text: str, width: int = 150) -> str:
    """Wrapped into lines of about the same length, with every estimate and its interval on one line."""
    together = re.sub(r" (?=\[)| (?=[^\[]*\])", NO_BREAK_SPACE, text)
    return fill(together, len(text) // math.ceil(len(text) / width) + 15)


def _ends(points: Sequence[Point]) -> str:
    """The first and the last numbers, for those who read instead of measuring."""
    ends = points if len(points) == 1 else [points[0], points[-1]]
    accuracy = " → ".join(f"{100 * point.accuracy.estimate:.0f}" for point in ends)
    tokens = " → ".join(f"{point.tokens.estimate:.0f}" for point in ends)
    return f"{accuracy} %,  {tokens} tokens"


def _steps() -> Iterator[int]:
    """Round distances between grid lines: 1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 150, …"""
    yield from (1, 2, 5)
    for power in count(1):
        yield from (10**power * factor // 10 for factor in (10, 15, 20, 25, 30, 40, 50, 60, 80))
