"""The figures of the rm-scaling study: rm@8 of judges against training progress, as lines and as heatmaps.

Lines: a panel for each family and one for their average, a colour and a marker for each size, majority@8 and the oracle
as reference lines. Below stand the ends of training against the number of parameters, measured here and published.
Heatmaps: rows are sizes, columns are points of the epoch, and every cell says its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonlab.errors import UserError
from reasonlab.figures.frame import NO_BREAK_SPACE, WIDTH, Frame
from reasonlab.figures.panel_grid import panel_title, percent_scale
from reasonlab.figures.published import ACEMATH, acemath
from reasonlab.figures.record import Record
from reasonlab.figures.style import GREY, INK, bare, house_style, save
from reasonlab.figures.tables import (
    AVERAGE,
    MAJORITY,
    ORACLE,
    ProgressRow,
    ReferenceRow,
)
from reasonlab.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
COLOURS = "viridis"  # perceptually uniform, and safe for colour-blind readers
LINES: dict[str, dict[str, Any]] = {
    MAJORITY: {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.1},
    ORACLE: {"color": GREY, "linestyle": (0, (1, 1.5)), "linewidth": 1.3},
}

_ROW, _GAP = 1.2, 0.5  # inches: the height of a small panel, and of what lies between two
_HEAD, _TITLES, _FOOT, _BETWEEN, _LOWER = 0.9, 1.06, 0.9, 0.95, 2.5
_LEFT, _RIGHT = 0.75, 0.3
_AVERAGE_RIGHT, _FAMILIES_LEFT = 4.1, 4.65
_LEAST_SPAN = 10.0  # percentage points a panel shows at least
_SETS = ("GSM8K", "MATH500", "Minerva", "GaoKao2023En")  # whose curves could be read

References = Mapping[tuple[str, str], ReferenceRow]


def draw_rm_scaling(
    rows: Sequence[ProgressRow], references: Sequence[ReferenceRow], record: Record, out: Path
) -> list[Path]:
    """rm_scaling and rm_scaling_heatmap, .png and .svg each."""
    if AVERAGE not in {row.panel for row in rows}:
        raise UserError("progress.csv has no average", "Run the study again")
    known = {(row.panel, row.reference): row for row in references}
    if lacking := {row.panel for row in rows} - {panel for panel, name in known if name == MAJORITY}:
        raise UserError(f"references.csv has no {MAJORITY} for {min(lacking)}", "Run the study again")
    with house_style():
        title = _title("rm@8 over one epoch of training", rows)
        lines = save(lines_figure(rows, known, record, title), out / "rm_scaling", title)
        title = _title("rm@8 by size and progress", rows)
        heat = save(heatmap_figure(rows, known, record, title), out / "rm_scaling_heatmap", title)
    return [*lines, *heat]


# --- what both share -------------------------------------------------------------------------------------------------


def sizes_of(rows: Iterable[ProgressRow]) -> dict[str, int]:
    """Arms and their parameters, smallest first."""
    return dict(sorted({row.arm: row.parameters for row in rows}.items(), key=lambda pair: pair[1]))


def panels_of(rows: Iterable[ProgressRow]) -> list[str]:
    """The families, in the order of the table."""
    return [name for name in dict.fromkeys(row.panel for row in rows) if name != AVERAGE]


def of_panel(rows: Iterable[ProgressRow], panel: str, arm: str) -> list[ProgressRow]:
    return sorted((row for row in rows if row.panel == panel and row.arm == arm), key=lambda row: row.progress)


def parameters(count: float) -> str:
    """31k, 1.0m, 9.5m, 32b"""
    for size, unit in ((1e9, "b"), (1e6, "m")):
        if count >= 0.9995 * size:
            return f"{count / size:.1f}{unit}" if count < 9.95 * size else f"{count / size:.0f}{unit}"
    return f"{count / 1e3:.0f}k"


def styles(sizes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour from dark (small) to light (large), and a marker, for every size."""
    import matplotlib

    names = list(sizes)
    colours = matplotlib.colormaps[COLOURS]
    return {
        name: {"color": colours(0.87 * place / max(1, len(names) - 1)), "marker": MARKERS[place % len(MARKERS)]}
        for place, name in enumerate(names)
    }


def _title(what: str, rows: Sequence[ProgressRow]) -> str:
    """Judges of 31k to 1.0m parameters: rm@8 over one epoch of training, mean of 3 seeds"""
    sizes, seeds = list(sizes_of(rows).values()), max(row.seeds for row in rows)
    span = f"{parameters(sizes[0])} to {parameters(sizes[-1])}"
    return f"Judges of {span} parameters: {what}, {f'mean of {seeds} seeds' if seeds > 1 else 'one seed'}"


def _subtitle(rows: Sequence[ProgressRow], record: Record) -> str:
    """Held-out test problems: 240 questions (20 per family), 64 candidates each; best-scored of 8, all subsets"""
    protocol = record.protocol
    asked = {row.panel: row.questions for row in rows}
    each = {count for panel, count in asked.items() if panel != AVERAGE}
    families = f" ({min(each)} per family)" if len(each) == 1 else ""
    parts = [f"{counted(asked[AVERAGE], 'question')}{families}"]
    if "candidates" in protocol:
        parts.append(f"{protocol['candidates']} candidates each")
    parts.append("the best-scored of 8, mean over all subsets")
    return f"Held-out {protocol.get('split', 'test')} problems: {', '.join(parts)}"


def _training(record: Record) -> str:
    protocol = record.protocol
    if "lists" not in protocol:
        return ""
    size, batch = protocol.get("list_size", 6), protocol.get("batch")
    text = f"Training: one epoch over {protocol['lists']:,} lists of {size} answers"
    text += f", {batch} lists a step" if batch else ""
    return f"{text}, list-wise Bradley–Terry{', score-sorted' * bool(protocol.get('score_sorted'))}."


def _bands(rows: Sequence[ProgressRow]) -> str:
    if not any(math.isfinite(row.low) for row in rows):
        return "no intervals"
    return "95 % over questions" + " and seeds" * (max(row.seeds for row in rows) > 1)


# --- lines -----------------------------------------------------------------------------------------------------------


def lines_figure(rows: Sequence[ProgressRow], known: References, record: Record, title: str) -> Figure:
    families, looks = panels_of(rows), styles(sizes_of(rows))
    height_in_cells = max(2, math.ceil(len(families) / 4))
    columns = max(1, math.ceil(len(families) / height_in_cells))
    upper = height_in_cells * (_ROW + _GAP) - _GAP
    frame = Frame(_HEAD + _TITLES + upper + _BETWEEN + _LOWER + _FOOT)
    frame.heading(title, _subtitle(rows, record))
    top = frame.height - _HEAD
    note = f"bands: {_bands(rows)}, cut where a panel ends; every panel has its own scale; *: hard for the policies"
    frame.row_heading(top - 0.2, "Measured here", note)
    _legend(frame, rows, looks, top - 0.52)
    top -= _TITLES
    right = _AVERAGE_RIGHT if families else WIDTH - _RIGHT
    whole = frame.figure.add_gridspec(1, 1, **frame.edges(_LEFT, right, top - upper, top))
    average = frame.figure.add_subplot(whole[0])
    _panel(average, rows, AVERAGE, known, looks, size=1.5)
    average.set_ylabel("rm@8 (%)")
    edges = frame.edges(_FAMILIES_LEFT, WIDTH - _RIGHT, top - upper, top)
    grid = frame.figure.add_gridspec(height_in_cells, columns, wspace=0.24, hspace=_GAP / _ROW, **edges)
    for number, family in enumerate(families):
        axes = frame.figure.add_subplot(grid[number // columns, number % columns])
        _panel(axes, rows, family, known, looks)
        axes.tick_params(labelbottom=number + columns >= len(families))
    frame.write(WIDTH / 2, top - upper - 0.42, "training progress (share of the epoch)", fontsize=9.5, ha="center")
    bottom = top - upper - _BETWEEN
    _ends(frame, rows, known, looks, bottom, bottom - _LOWER)
    frame.caption(_lines_caption(rows, known, record), y=0.36)
    return frame.figure


def _panel(
    axes: Axes,
    rows: Sequence[ProgressRow],
    panel: str,
    known: References,
    looks: Mapping[str, dict[str, Any]],
    size: float = 1.0,
) -> None:
    from matplotlib.ticker import FixedLocator

    drawn: list[float] = []
    for reference, line in LINES.items():
        if (panel, reference) in known:
            value = 100 * known[panel, reference].score
            axes.axhline(value, **line, zorder=1)
            drawn.append(value)
    for arm, look in looks.items():
        points = of_panel(rows, panel, arm)
        x, y = [row.progress for row in points], [100 * row.score for row in points]
        low, high = [100 * row.low for row in points], [100 * row.high for row in points]
        axes.fill_between(x, low, high, color=look["color"], alpha=0.09, linewidth=0)
        width, marker = 0.8 + 0.4 * size, 1.4 + 1.5 * size
        axes.plot(x, y, **look, linewidth=width, markersize=marker, markeredgewidth=0, clip_on=False)
        drawn += y
        if size > 1:  # in the small panels bands may leave the panel, curves never
            drawn += [*low, *high]
    percent_scale(axes, drawn, size, _LEAST_SPAN)
    axes.set_xlim(0, 1.02)
    axes.xaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1] if size > 1 else [0, 0.5, 1]))
    axes.xaxis.set_major_formatter("{x:g}")
    hard = any(row.panel == panel and row.kind == "hard" for row in known.values())
    last = [100 * of_panel(rows, panel, arm)[-1].score for arm in (next(iter(looks)), list(looks)[-1])]
    ends = f"{last[0]:.0f} → {last[1]:.0f} %"
    notes = [f"at the end {last[0]:.1f} → {last[1]:.1f} %"] if size > 1 else [ends, ends.removesuffix(" %")]
    panel_title(axes, panel + "*" * hard, notes, size)


def _legend(frame: Frame, rows: Sequence[ProgressRow], looks: Mapping[str, dict[str, Any]], y: float) -> None:
    from matplotlib.lines import Line2D

    sizes = sizes_of(rows)
    handles = [Line2D([], [], **look, linewidth=1.6, markersize=5, markeredgewidth=0) for look in looks.values()]
    labels = [parameters(sizes[arm]) for arm in looks]
    handles += [Line2D([], [], **line) for line in LINES.values()]
    labels += ["majority@8", "oracle (pass@8)"]
    place = (0.5, y / frame.height)
    frame.figure.legend(
        handles,
        labels,
        loc="center",
        bbox_to_anchor=place,
        ncols=len(labels),
        fontsize=9,
        handlelength=2.6,
        borderpad=0,
    )


def _ends(
    frame: Frame,
    rows: Sequence[ProgressRow],
    known: References,
    looks: Mapping[str, dict[str, Any]],
    top: float,
    bottom: float,
) -> None:
    """First and last checkpoint against size: measured on the left, published on the right."""
    frame.row_heading(top + 0.06, "Measured: average against size", "")
    left = _FAMILIES_LEFT
    words = f"{ACEMATH}, Fig. 5, Table 6; by eye, ± 0.5; one run each; hollow: start"
    frame.write(left, top + 0.06, "Published", fontsize=11, fontweight="bold", va="center")
    frame.write(WIDTH - _RIGHT, top + 0.06, words, fontsize=8.5, color=GREY, va="center", ha="right")
    low, high = bottom + 0.5, top - 0.5
    sizes = sizes_of(rows)
    axes = frame.figure.add_subplot(frame.figure.add_gridspec(1, 1, **frame.edges(_LEFT, _AVERAGE_RIGHT, low, high))[0])
    drawn = [100 * known[AVERAGE, MAJORITY].score]
    axes.axhline(drawn[0], **LINES[MAJORITY])
    curves = {arm: of_panel(rows, AVERAGE, arm) for arm in looks}
    for place, filled in ((0, False), (-1, True)):
        y = [100 * curves[arm][place].score for arm in looks]
        axes.plot(list(sizes.values()), y, color=GREY, linewidth=1.0, linestyle="-" if filled else ":", zorder=1)
        for arm, look in looks.items():
            row = curves[arm][place]
            face = look["color"] if filled else "white"
            axes.plot([row.parameters], [100 * row.score], **look, markerfacecolor=face, markersize=5.5, zorder=3)
            if filled and math.isfinite(row.low):
                axes.vlines(row.parameters, 100 * row.low, 100 * row.high, color=look["color"], linewidth=1.4)
                drawn += [100 * row.low, 100 * row.high]
        drawn += y
    percent_scale(axes, drawn, 1.0, _LEAST_SPAN)
    _size_axis(axes, list(sizes.values()))
    axes.set_ylabel("rm@8 (%)")
    first = curves[next(iter(looks))][0].progress
    panel_title(axes, AVERAGE, [f"hollow: at {first:.0%} of the epoch, filled: at its end", f"hollow: at {first:.0%}"])
    figure = acemath()["figure"]
    table = acemath()["table"]
    grid = frame.figure.add_gridspec(1, len(_SETS), wspace=0.3, **frame.edges(left, WIDTH - _RIGHT, low, high))
    published = styles(figure["sizes"])
    for column, name in enumerate(_SETS):
        axes = frame.figure.add_subplot(grid[0, column])
        majority = 100 * table["scores"][MAJORITY][table["sets"].index(name)]
        axes.axhline(majority, **LINES[MAJORITY])
        drawn = [majority]
        ends: list[tuple[float, float]] = []
        for size, (begin, _, end) in figure["curves"][name].items():
            x, look = figure["sizes"][size], published[size]
            for value, face in ((begin, "white"), (end, look["color"])):
                if value is not None:
                    axes.plot([x], [100 * value], **look, markerfacecolor=face, markersize=5, zorder=3)
                    drawn.append(100 * value)
            ends.append((x, 100 * end))
        axes.plot(*zip(*ends, strict=True), color=GREY, linewidth=1.0, zorder=1)
        bare(axes)
        axes.grid(axis="y")
        margin = 0.1 * (max(drawn) - min(drawn))
        axes.set_ylim(min(drawn) - margin, max(drawn) + margin)
        axes.yaxis.set_major_formatter("{x:g}")
        _size_axis(axes, list(figure["sizes"].values()), every=2)
        panel_title(axes, name, [])
    middle = (left + WIDTH - _RIGHT) / 2
    for x in ((_LEFT + _AVERAGE_RIGHT) / 2, middle):
        frame.write(x, bottom + 0.1, "parameters of the judge", fontsize=9.5, ha="center", va="center")


def _size_axis(axes: Axes, sizes: Sequence[float], every: int = 1) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log")
    shown = list(sizes)[::-1][::every][::-1]
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([parameters(size) for size in shown])
    axes.set_xlim(min(sizes) / 1.5, max(sizes) * 1.5)


def _lines_caption(rows: Sequence[ProgressRow], known: References, record: Record) -> str:
    """Average, first to last checkpoint, %: 31k 52.1 → 55.0, …; majority@8 71.8, oracle 89.5. Ten times …"""
    ways = []
    for arm, count in sizes_of(rows).items():
        points = of_panel(rows, AVERAGE, arm)
        way = f"{parameters(count)} {100 * points[0].score:.1f} → {100 * points[-1].score:.1f}"
        ways.append(way.replace(" ", NO_BREAK_SPACE))
    references = [f"{name} {100 * known[AVERAGE, name].score:.1f}" for name in LINES if (AVERAGE, name) in known]
    text = f"Average, first to last checkpoint, %: {', '.join(ways)}; {', '.join(references)}."
    if trend := record.protocol.get("trend"):
        estimate, low, high = trend
        text += f" Ten times the parameters: {estimate:+.1f} points [{low:+.1f}, {high:+.1f}] at the end."
    return f"{text} {_training(record)}".replace("-", "−").replace("list−wise", "list-wise").replace("score−", "score-")


# --- heatmaps --------------------------------------------------------------------------------------------------------

_CELL = 0.235  # inches, the height of a row of a small heatmap
_HEAT_COLUMNS = 3


def heatmap_figure(rows: Sequence[ProgressRow], known: References, record: Record, title: str) -> Figure:
    families, sizes = panels_of(rows), sizes_of(rows)
    lines = math.ceil(len(families) / _HEAT_COLUMNS)
    small, big, gap = _CELL * len(sizes), 0.34 * len(sizes), 0.58
    height = 1.28 + big + 0.62 + lines * (small + gap) + 0.78
    frame = Frame(height)
    frame.heading(title, _subtitle(rows, record))
    top = height - 1.28
    half = any(math.isfinite(row.low) for row in rows)
    whole = frame.figure.add_gridspec(1, 1, **frame.edges(0.85, WIDTH - _RIGHT, top - big, top))
    axes = frame.figure.add_subplot(whole[0])
    _heatmap(axes, rows, AVERAGE, known, size=1.5, intervals=half)
    top -= big + 0.84
    edges = frame.edges(0.85, WIDTH - _RIGHT, top - lines * (small + gap) + gap, top)
    if families:
        grid = frame.figure.add_gridspec(lines, _HEAT_COLUMNS, wspace=0.14, hspace=gap / small, **edges)
    for number, family in enumerate(families):
        axes = frame.figure.add_subplot(grid[number // _HEAT_COLUMNS, number % _HEAT_COLUMNS])
        _heatmap(axes, rows, family, known)
        axes.tick_params(labelleft=number % _HEAT_COLUMNS == 0, labelbottom=number + _HEAT_COLUMNS >= len(families))
    middle = 0.5 * (0.85 + WIDTH - _RIGHT)
    frame.write(middle, 0.76, "training progress (share of the epoch)", fontsize=9.5, ha="center", va="center")
    frame.write(0.24, height / 2, "parameters of the judge", fontsize=9.5, rotation=90, ha="center", va="center")
    frame.caption(_heat_caption(rows, record), y=0.34)
    return frame.figure


def _heatmap(
    axes: Axes,
    rows: Sequence[ProgressRow],
    panel: str,
    known: References,
    size: float = 1.0,
    intervals: bool = False,
) -> None:
    """Largest judge on top. Each panel has its own colour scale, which its title states."""
    import matplotlib

    sizes = sizes_of(rows)
    table = [[100 * row.score for row in of_panel(rows, panel, arm)] for arm in reversed(sizes)]
    halves = [[50 * (row.high - row.low) for row in of_panel(rows, panel, arm)] for arm in reversed(sizes)]
    low, high = min(map(min, table)), max(map(max, table))
    colours = matplotlib.colormaps[COLOURS]
    span = max(high - low, 1e-9)
    axes.imshow(table, cmap=colours, vmin=low, vmax=low + span, aspect="auto", interpolation="nearest")
    for y, line in enumerate(table):
        for x, value in enumerate(line):
            red, green, blue, _ = colours((value - low) / span)
            light = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.45
            text = f"{value:.1f}" + (f" ±{halves[y][x]:.1f}" if intervals else "")
            axes.text(
                *(x, y, text),
                ha="center",
                va="center",
                fontsize=8.5 if size > 1 else 6.8,
                color=INK if light else "white",
            )
    progress = [row.progress for row in of_panel(rows, panel, next(iter(sizes)))]
    axes.set_xticks(range(len(progress)), [f"{value:.2g}" for value in progress])
    axes.set_yticks(range(len(sizes)), [parameters(count) for count in reversed(sizes.values())])
    axes.tick_params(length=0, pad=3)
    for side in axes.spines.values():
        side.set_visible(False)
    references = [f"{name} {100 * known[panel, name].score:.1f}" for name in LINES if (panel, name) in known]
    scale = f"colours {low:.1f} to {high:.1f} %"
    hard = any(row.panel == panel and row.kind == "hard" for row in known.values())
    short = [f"maj {100 * known[panel, MAJORITY].score:.0f}"]
    if (panel, ORACLE) in known:
        short.append(f"oracle {100 * known[panel, ORACLE].score:.0f}")
    rough = f"{low:.0f} to {high:.0f} %"
    notes = [", ".join(parts) for parts in ([scale, *references], [scale, *short], [rough, *short], [scale])]
    panel_title(axes, panel + "*" * hard, notes, size)


def _heat_caption(rows: Sequence[ProgressRow], record: Record) -> str:
    text = (
        f"Cells: rm@8 in %, in the average with half of the interval ({_bands(rows)}). Every panel has its own colour "
    )
    text += "scale, stated above it, from its lowest to its highest cell. *: hard for the policies; maj: majority@8."
    return f"{text} {_training(record)}"
