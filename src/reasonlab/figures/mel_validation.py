"""The validation figure of the mel-vs-grpo study: greedy accuracy against training step, ours above, published below.

GRPO has circles, MEL triangles. Hollow circles are GRPO with as many generated tokens as MEL, which also writes
reflections and replays. Below stand the published averages and a table of finished models; in the table a measured
block and published blocks are told apart by their heads and their ground.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reasonlab.errors import UserError
from reasonlab.figures.frame import MARGIN, NO_BREAK_SPACE, WIDTH, Frame, text_width
from reasonlab.figures.panel_grid import (
    FORCED,
    TOTAL,
    family_names,
    of_panel,
    panel_title,
    percent_scale,
    questions_asked,
)
from reasonlab.figures.published import MEL_PAPER, mel
from reasonlab.figures.record import Record
from reasonlab.figures.style import BLUE, GREEN, GREY, HAIRLINE, VERMILION, house_style, save
from reasonlab.figures.tables import (
    METRICS,
    PASS_1,
    PanelRow,
    ScoreRow,
)
from reasonlab.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASE, GRPO, MEL, MATCHED = "base", "grpo", "mel", "grpo-matched"
NAMES = {BASE: "base", GRPO: "GRPO", MEL: "MEL", MATCHED: "GRPO, matched tokens"}
_SHORT = {**NAMES, MATCHED: "matched GRPO"}
STYLES: dict[str, dict[str, Any]] = {  # in the order of drawing: what matters most lies on top
    MATCHED: {"color": GREEN, "marker": "o", "markerfacecolor": "white", "linestyle": (0, (4, 2))},
    GRPO: {"color": BLUE, "marker": "o", "linestyle": "-"},
    MEL: {"color": VERMILION, "marker": "^", "linestyle": "-"},
}
AVERAGE = "average"

_ROW, _GAP = 1.3, 0.52  # inches: the height of a small panel, and of what lies between two
_HEAD, _TITLES, _FOOT = 0.9, 1.06, 1.0
_LEFT, _RIGHT = 0.75, 0.3
_AVERAGE_RIGHT, _FAMILIES_LEFT = 4.1, 4.65  # the average ends, and the families begin
_PUBLISHED_RIGHT, _TABLE_LEFT = 5.45, 6.05
_BETWEEN = 0.95  # from the axes of one row down to the next row's heading
_LINE = 0.19  # of the table
_LEAST_SPAN = 20.0  # percentage points a panel shows at least


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the table: who was measured, and the scores [arm][metric] with their intervals, which may be nan."""

    head: str
    note: str
    measured: bool
    scores: Mapping[str, Mapping[str, tuple[float, float, float]]]


def draw_mel_validation(
    rows: Iterable[PanelRow], scores: Sequence[ScoreRow], record: Record, out: Path
) -> tuple[Path, Path]:
    """mel_validation.png and .svg; arms other than GRPO, MEL and matched GRPO are not shown."""
    rows = [row for row in rows if row.arm in STYLES and row.panel != FORCED]
    for arm in (GRPO, MEL):
        check_arm(arm, (row.arm for row in rows if row.panel == TOTAL), "no average in panels.csv")
        check_arm(arm, (row.arm for row in scores), "no row in scores.csv")
    title = mel_title("validation score", rows, record)
    with house_style():
        figure = validation_figure(rows, scores, record, title)
        return save(figure, out / "mel_validation", title)


def check_arm(arm: str, arms: Iterable[str], lacks: str) -> None:
    if arm not in set(arms):
        raise UserError(f"the arm {arm} has {lacks}", "Run the study again: the figure compares grpo with mel")


def mel_title(what: str, rows: Sequence[Any], record: Record) -> str:
    """MEL against GRPO: validation score, tiny-1m, mean of 3 seeds"""
    seeds = max(row.seeds for row in rows)
    model = str(record.protocol.get("model", ""))
    parts = [what, model, f"mean of {seeds} seeds" if seeds > 1 else "one seed"]
    return "MEL against GRPO: " + ", ".join(filter(None, parts))


def validation_figure(rows: Sequence[PanelRow], scores: Sequence[ScoreRow], record: Record, title: str) -> Figure:
    families = family_names(rows)
    height_in_cells = max(2, math.ceil(len(families) / 4))
    columns = max(1, math.ceil(len(families) / height_in_cells))
    upper = height_in_cells * (_ROW + _GAP) - _GAP
    blocks = [_measured(scores, record), *_published()]
    lower = _table_height(blocks)
    frame = Frame(_HEAD + _TITLES + upper + _BETWEEN + lower + _FOOT)
    frame.heading(title, _subtitle(rows, record))

    top = frame.height - _HEAD
    frame.row_heading(top - 0.2, "Measured here", _note(rows))
    arm_legend(frame, rows, top - 0.52, banded=any(math.isfinite(row.accuracy_low) for row in rows))
    top -= _TITLES
    right = _AVERAGE_RIGHT if families else WIDTH - _RIGHT
    whole = frame.figure.add_gridspec(1, 1, **frame.edges(_LEFT, right, top - upper, top))
    average = frame.figure.add_subplot(whole[0])
    _panel(average, of_panel(rows, TOTAL), AVERAGE, size=1.5)
    average.set_ylabel("greedy accuracy (%)")
    edges = frame.edges(_FAMILIES_LEFT, WIDTH - _RIGHT, top - upper, top)
    grid = frame.figure.add_gridspec(height_in_cells, columns, wspace=0.22, hspace=_GAP / _ROW, **edges)
    for number, family in enumerate(families):
        axes = frame.figure.add_subplot(grid[number // columns, number % columns])
        _panel(axes, of_panel(rows, family), family)
        axes.tick_params(labelbottom=number + columns >= len(families))
    frame.write(WIDTH / 2, top - upper - 0.42, "training step", fontsize=9.5, ha="center", va="center")

    bottom = top - upper - _BETWEEN
    frame.row_heading(bottom + 0.06, "Published", "")
    frame.write(_TABLE_LEFT, bottom + 0.06, "Averages side by side", fontsize=11, fontweight="bold", va="center")
    _published_curves(frame, bottom - 0.5, bottom - lower)
    _table(frame, blocks, bottom - 0.2)
    frame.caption(_caption(rows, record), y=0.42)
    return frame.figure


# --- words ------------------------------------------------------------------------------------------------------


def _subtitle(rows: Sequence[PanelRow], record: Record) -> str:
    """Held-out test problems: 480 questions (40 per family), one greedy answer each of at most 160 tokens, 3 seeds"""
    protocol, seeds = record.protocol, max(row.seeds for row in rows)
    split = f"{protocol['split']} " if "split" in protocol else ""
    limit = f" of at most {protocol['max_tokens']:,} tokens" if "max_tokens" in protocol else ""
    parts = [questions_asked(rows), f"one greedy answer each{limit}", counted(seeds, "seed")]
    return f"Held-out {split}problems: {', '.join(parts)}"


def _note(rows: Sequence[PanelRow]) -> str:
    several = max(row.seeds for row in rows) > 1
    if any(math.isfinite(row.accuracy_low) for row in rows):
        bands = f"bands: 95 % over questions{' and seeds' * several}"
    else:
        bands = "no intervals" if several else "no intervals: one seed"
    return f"{bands}; “MEL ±”: points above GRPO at their last common step; every panel has its own scale"


def training_words(record: Record) -> str:
    """Training: 150 steps of 64 prompts × 8 rollouts, learning rate 1e-4, MEL weight 1, 1 pair for a mixed prompt."""
    protocol = record.protocol
    steps = f"{protocol['iterations']} steps" if "iterations" in protocol else ""
    batch = f"{protocol['prompts']} prompts" if "prompts" in protocol else ""
    if batch and "rollouts_per_prompt" in protocol:
        batch = f"{batch} × {protocol['rollouts_per_prompt']} rollouts".replace(" ", NO_BREAK_SPACE)
    parts = [" of ".join(filter(None, [steps, batch]))]
    if "lr" in protocol:
        parts.append(f"learning rate {protocol['lr']:g}")
    if "mel_weight" in protocol:
        parts.append(f"MEL weight {protocol['mel_weight']:g}")
    if "pairs" in protocol:
        parts.append(f"{counted(int(protocol['pairs']), 'pair')} for a mixed prompt")
    words = ", ".join(filter(None, parts))
    return f"Training: {words}." if words else ""


def matched_words(arms: Iterable[str], record: Record) -> str:
    ratio = record.protocol.get("token_ratio")
    if MATCHED not in set(arms) or ratio is None:
        return ""
    return f"Matched GRPO generated {ratio:.2f} times as many tokens as MEL in training."


def _caption(rows: Sequence[PanelRow], record: Record) -> str:
    """Average: GRPO 41.1 → 63.4 %, MEL 41.1 → 66.0 % (step 0 to 150). …"""
    curves = {arm: [row for row in of_panel(rows, TOTAL) if row.arm == arm] for arm in (GRPO, MEL, MATCHED)}
    ways: dict[str, list[str]] = {}  # by the steps they cover, which are mostly the same
    for arm, points in curves.items():
        if points:
            first, last = points[0], points[-1]
            way = f"{_SHORT[arm]} {100 * first.accuracy:.1f} → {100 * last.accuracy:.1f} %"
            steps = f"(step {first.iteration:,} to {last.iteration:,})"
            ways.setdefault(steps.replace(" ", NO_BREAK_SPACE), []).append(way.replace(" ", NO_BREAK_SPACE))
    average = "; ".join(f"{', '.join(some)} {steps}" for steps, some in ways.items())
    words = [f"Average: {average}.", matched_words((row.arm for row in rows), record), training_words(record)]
    return " ".join(filter(None, words))


def arm_legend(frame: Frame, rows: Sequence[Any], y: float, banded: bool) -> None:
    """The key of the arms that have rows, centred; an arm with fewer seeds than the others says so."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seeds = {arm: max(row.seeds for row in rows if row.arm == arm) for arm in dict.fromkeys(row.arm for row in rows)}
    handles: list[Any] = []
    labels = []
    for arm in (GRPO, MEL, MATCHED):
        if arm not in seeds:
            continue
        line = Line2D([], [], **STYLES[arm], linewidth=1.8, markersize=5.5)
        handles.append((Patch(color=STYLES[arm]["color"], alpha=0.16, linewidth=0), line) if banded else line)
        name = "GRPO with as many generated tokens as MEL" if arm == MATCHED else NAMES[arm]
        labels.append(name if seeds[arm] == max(seeds.values()) else f"{name} ({counted(seeds[arm], 'seed')})")
    place = (0.5, y / frame.height)
    frame.figure.legend(
        handles, labels, loc="center", bbox_to_anchor=place, ncols=3, fontsize=9, handlelength=3, borderpad=0
    )


# --- panels -----------------------------------------------------------------------------------------------------


def _panel(axes: Axes, rows: Sequence[PanelRow], name: str, size: float = 1.0) -> None:
    """The curves of all arms on one panel, with a marker at every evaluated step."""
    drawn: list[float] = []
    for arm, style in STYLES.items():
        points = [row for row in rows if row.arm == arm]
        if not points:
            continue
        x = [row.iteration for row in points]
        estimate = [100 * row.accuracy for row in points]
        low, high = [100 * row.accuracy_low for row in points], [100 * row.accuracy_high for row in points]
        if len(x) > 1:
            axes.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)
        else:  # a band has no width
            axes.vlines(x, low, high, color=style["color"], linewidth=5, alpha=0.2)
        _line(axes, x, estimate, style, size)
        drawn += [*estimate, *low, *high]
    _scales(axes, drawn, size)
    ends = _ends({arm: [(row.iteration, row.accuracy) for row in rows if row.arm == arm] for arm in STYLES})
    gap = _gap(ends)
    named = ", ".join(f"{_SHORT[arm].removesuffix(' GRPO')} {100 * end:.1f}" for arm, end in ends.items())
    panel_title(axes, name, [*([f"{named} %"] if size > 1 else []), gap], size)


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], style: dict[str, Any], size: float) -> None:
    width, marker = 0.8 + 0.5 * size, 1.9 + 1.5 * size
    axes.plot(x, y, **style, linewidth=width, markersize=marker, markeredgewidth=0.5 + 0.3 * size, clip_on=False)


def _scales(axes: Axes, values: Iterable[float], size: float) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    percent_scale(axes, values, size, _LEAST_SPAN)
    axes.xaxis.set_major_locator(MaxNLocator(4 if size <= 1 else 6, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _ends(curves: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    """The scores (GRPO, MEL, matched GRPO) at the last step that GRPO and MEL share; nothing where they share none."""
    tables = {arm: dict(points) for arm, points in curves.items()}
    shared = set(tables.get(GRPO, ())) & set(tables.get(MEL, ()))
    if not shared:
        return {}
    last = max(shared)
    return {arm: tables[arm][last] for arm in (GRPO, MEL, MATCHED) if last in tables.get(arm, ())}


def _gap(ends: Mapping[str, float]) -> str:
    """MEL +3.2"""
    if not ends:
        return ""
    points = f"{100 * (ends[MEL] - ends[GRPO]):+.1f}"
    return f"MEL {points[1:] if float(points) == 0 else points.replace('-', '−')}"


def _published_curves(frame: Frame, top: float, bottom: float) -> None:
    """The averages of three model sizes side by side."""
    curves = mel()["validation"]["curves"][AVERAGE]
    edges = frame.edges(_LEFT, _PUBLISHED_RIGHT, bottom + 1.02, top)
    grid = frame.figure.add_gridspec(1, len(curves), wspace=0.26, **edges)
    for column, (model, lines) in enumerate(curves.items()):
        axes = frame.figure.add_subplot(grid[0, column])
        drawn: list[float] = []
        for arm in (GRPO, MEL):
            x, y = np.array(lines[arm]).T
            _line(axes, x, 100 * y, STYLES[arm], size=1.0)
            drawn += list(100 * y)
        _scales(axes, drawn, size=1.0)
        panel_title(axes, model, [_gap(_ends({arm: [(x, y) for x, y in lines[arm]] for arm in (GRPO, MEL)}))])
        if column == 0:
            axes.set_ylabel("average score (%)")
    middle = (_LEFT + _PUBLISHED_RIGHT) / 2
    frame.write(middle, bottom + 0.62, "training step", fontsize=9.5, ha="center", va="center")
    note = (
        f"{MEL_PAPER}, Fig. 6 to 8, Qwen3 base models, average of five benchmarks.\n"
        "Points are read by eye and approximate, but for the first and the last, which\n"
        "are from Table 1; not every point could be read. One run each, no intervals."
    )
    frame.write(MARGIN, bottom + 0.2, note, fontsize=8.5, color=GREY, va="center", linespacing=1.35)


# --- the table --------------------------------------------------------------------------------------------------


def _measured(scores: Sequence[ScoreRow], record: Record) -> Block:
    table: dict[str, dict[str, tuple[float, float, float]]] = {}
    shown = [row for row in scores if row.arm in NAMES]
    for row in shown:
        table.setdefault(row.arm, {})[row.metric] = (row.score, row.low, row.high)
    most = max(shown, key=lambda row: (row.seeds, row.questions))
    temperature = float(record.protocol.get("temperature", 0.6))
    sampled = max(row.samples for row in shown)
    numbers = sorted({row.questions for row in shown}, reverse=True)  # fewer may be asked for samples than greedily
    parts = [" and ".join([*(f"{number:,}" for number in numbers[:-1]), counted(numbers[-1], "question")])]
    parts += [f"{counted(sampled, 'sample')} at T = {temperature:g}", counted(most.seeds, "seed")]
    if any(math.isfinite(row.low) for row in shown):
        parts.append("95 % intervals")
    head = "Measured here" + (f": {record.protocol['model']}" if "model" in record.protocol else "")
    return Block(head, ", ".join(parts), True, table)


def _published() -> list[Block]:
    data = mel()
    blocks = []
    for size, arms in data["table"]["scores"].items():
        scores = {
            arm: {
                metric: (score, math.nan, math.nan)
                for metric, score in zip(data["table"]["metrics"], benchmarks[AVERAGE], strict=True)
            }
            for arm, benchmarks in arms.items()
        }
        note = "Table 1: five benchmarks, 8 samples at T = 0.6"
        blocks.append(Block(f"Published: {data['models'][size]}", note, False, scores))
    return blocks


def _arms(block: Block) -> list[str]:
    return [arm for arm in (BASE, GRPO, MEL, MATCHED) if arm in block.scores]


def _table_height(blocks: Sequence[Block]) -> float:
    return 0.52 + sum(_block_height(block) for block in blocks)


def _block_height(block: Block) -> float:
    """Its head, its rows, and the space to the next block."""
    return _LINE * (len(_arms(block)) + 1.5) + 0.08


def _table(frame: Frame, blocks: Sequence[Block], top: float) -> None:
    """Numbers stand under their metric: a measured one with its interval beside it, a published one as printed."""
    right = WIDTH - MARGIN
    first, step = _TABLE_LEFT + 2.12, 1.28  # inches: where the first column of estimates ends, and from one to the next
    places = {metric: first + column * step for column, metric in enumerate(METRICS)}
    y = top - 0.12
    for metric, x in places.items():
        frame.write(x, y, metric.capitalize(), fontsize=9, fontweight="bold", ha="right", va="center")
        how = "greedy" if metric == PASS_1 else "sampled"
        frame.write(x + 0.06, y, how, fontsize=7.5, color=GREY, va="center")
    y -= 0.2
    for block in blocks:
        _ground(frame, _TABLE_LEFT, y - _block_height(block) + 0.08, right, y, block.measured)
        head = y - 0.65 * _LINE
        frame.write(_TABLE_LEFT + 0.06, head, block.head, fontsize=8.5, fontweight="bold", va="center")
        frame.write(right - 0.06, head, block.note, fontsize=7.5, color=GREY, ha="right", va="center")
        for line, arm in enumerate(_arms(block), 1):
            _table_row(frame, block, arm, head - (line + 0.1) * _LINE, places)
        y -= _block_height(block)


def _ground(frame: Frame, left: float, bottom: float, right: float, top: float, measured: bool) -> None:
    """A tint under what was measured here, a line over what was published."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    if measured:
        place, size = (left / WIDTH, bottom / frame.height), ((right - left) / WIDTH, (top - bottom) / frame.height)
        transform = frame.figure.transFigure
        frame.figure.add_artist(Rectangle(place, *size, transform=transform, color="#EEF4F9", linewidth=0, zorder=-1))
    else:
        line = Line2D([left / WIDTH, right / WIDTH], [top / frame.height] * 2, color=HAIRLINE, linewidth=0.8)
        frame.figure.add_artist(line)


def _table_row(frame: Frame, block: Block, arm: str, y: float, places: Mapping[str, float]) -> None:
    from matplotlib.lines import Line2D

    if arm in STYLES:
        marker = {name: value for name, value in STYLES[arm].items() if name != "linestyle"}
        place = [(_TABLE_LEFT + 0.14) / WIDTH], [y / frame.height]
        frame.figure.add_artist(Line2D(*place, **marker, linestyle="", markersize=4.5))
    frame.write(_TABLE_LEFT + 0.26, y, NAMES[arm], fontsize=8.5, va="center_baseline")
    for metric, x in places.items():
        score, low, high = block.scores[arm].get(metric, (math.nan,) * 3)
        digits = 1 if block.measured else 2
        number = f"{100 * score:.{digits}f}" if math.isfinite(score) else "–"
        # The points of all numbers are in one line: a second digit stands beyond the column's edge.
        edge = x + (digits - 1) * text_width("0", 8.5)
        frame.write(edge, y, number, fontsize=8.5, ha="right", va="center_baseline")
        if math.isfinite(low) and math.isfinite(high):
            interval = f"[{100 * low:.1f}, {100 * high:.1f}]"
            frame.write(x + 0.06, y, interval, fontsize=7.5, color=GREY, va="center_baseline")
