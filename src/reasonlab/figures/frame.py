"""The frame that the figures share: twelve inches wide, with a title, a subtitle and a caption, placed in inches."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from reasonlab.figures.style import GREY, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 12.0
MARGIN = 0.3
NO_BREAK_SPACE = "\u00a0"


class Frame:
    """A figure measured in inches from its lower left corner."""

    def __init__(self, height: float) -> None:
        self.height = height
        self.figure: Figure = new_figure(WIDTH, height)

    def write(self, x: float, y: float, text: str, **options: Any) -> None:
        self.figure.text(x / WIDTH, y / self.height, text, **options)

    def heading(self, title: str, subtitle: str) -> None:
        self.write(MARGIN, self.height - 0.36, title, fontsize=14, fontweight="bold", va="center")
        self.write(MARGIN, self.height - 0.62, subtitle, fontsize=9.5, color=GREY, va="center")

    def caption(self, text: str, y: float = 0.34) -> None:
        self.write(WIDTH / 2, y, balanced(text), fontsize=9.5, ha="center", va="center", linespacing=1.4)

    def row_heading(self, y: float, name: str, note: str) -> None:
        """The name of a row of panels, under a line: what was measured is never mixed with what was published."""
        from matplotlib.lines import Line2D

        line = [y / self.height + 0.2 / self.height] * 2
        span = [MARGIN / WIDTH, 1 - MARGIN / WIDTH]
        self.figure.add_artist(Line2D(span, line, color=GREY, linewidth=0.8))
        self.write(MARGIN, y, name, fontsize=11, fontweight="bold", va="center")
        self.write(WIDTH - MARGIN, y, note, fontsize=8.5, color=GREY, va="center", ha="right")

    def edges(self, left: float, right: float, bottom: float, top: float) -> dict[str, float]:
        """Inches from the left, and from the bottom, as the fractions that a grid of axes wants."""
        height = self.height
        return {"left": left / WIDTH, "right": right / WIDTH, "bottom": bottom / height, "top": top / height}


def balanced(text: str, width: int = 150) -> str:
    """Wrapped into lines of about the same length, with every estimate and its interval on one line."""
    together = re.sub(r" (?=\[)| (?=[^\[]*\])", NO_BREAK_SPACE, text)
    return fill(together, len(text) // math.ceil(len(text) / width) + 15)


def text_width(text: str, size: float, weight: str = "normal") -> float:
    """How many inches a line of text takes."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", weight=weight, size=size)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72


def longest_fit(variants: Sequence[str], width: float, size: float) -> str:
    """The first of the variants, longest first, that fits into so many inches; nothing where none does."""
    return next((text for text in variants if text_width(text, size) <= width), "")
