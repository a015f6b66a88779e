"""What all figures share: colours that colour-blind readers can tell apart, type, and files with reproducible bytes.

Figures are made with matplotlib's object interface, never with pyplot: no window, no list of open figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonlab.runs.files import write_aside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette. Colour is never the only channel: each series also has its own marker and dash.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
INK, GREY, HAIRLINE, GRID = "#1F2328", "#59636E", "#B6BDC5", "#E9ECEF"

PNG_DPI = 200  # twice the pixels of a README's width of 1200, for sharp screens

_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws the same letters
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": HAIRLINE,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": HAIRLINE,
    "ytick.color": HAIRLINE,
    "xtick.labelcolor": GREY,
    "ytick.labelcolor": GREY,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "svg.hashsalt": "reasonlab",  # element names do not depend on the clock
    "svg.fonttype": "path",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw and save inside this; the caller's own matplotlib settings are back afterwards."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches that never touches a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def bare(axes: Axes) -> None:
    """Leave only what carries information: no top and side lines, faint horizontal grid."""
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, pad=4)
    axes.tick_params(axis="x", length=3, width=0.8)


def marker_size(usual: float, points: int, most: int = 24) -> float:
    """Every point that was measured has a marker. Beyond so many they shrink, because they would hide the line."""
    return usual * min(1.0, most / points)


def save(figure: Figure, stem: Path, title: str) -> tuple[Path, Path]:
    """Write `stem`.png and `stem`.svg; the same figure gives the same bytes, because no date goes in."""
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=PNG_DPI, metadata={"Title": title, "Software": None})
    write_aside(png, buffer.getvalue())
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Title": title, "Creator": "reasonlab", "Date": None})
    write_aside(svg, buffer.getvalue())
    return png, svg
