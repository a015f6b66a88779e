"""Labels beside points, none over another: a small search over places around each point, with leaders where needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reasonlab.figures.frame import text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

_ANGLES = np.radians(np.arange(0, 360, 22.5))
_DISTANCES = (5.0, 9.0, 14.0, 20.0, 28.0, 38.0, 50.0, 64.0)  # points from a marker's edge to its label
_LEADER = 10.0  # a label farther away than this has a line to its point
_GAP = 12.0  # side by side, two labels closer than this read as one
_SWEEPS = 6


@dataclass(frozen=True, slots=True)
class Label:
    """A text that belongs to a point of the plot, in data coordinates."""

    text: str
    x: float
    y: float
    colour: str
    weight: str = "normal"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, in points (1/72 inch) from the lower left corner of the axes."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlap(self, other: Box) -> float:
        """The area that both share."""
        width = min(self.x1, other.x1) - max(self.x0, other.x0)
        height = min(self.y1, other.y1) - max(self.y0, other.y0)
        return max(0.0, width) * max(0.0, height)

    def holds(self, points: Floats) -> int:
        """How many of the points [n, 2] are inside."""
        x, y = points[:, 0], points[:, 1]
        return int(((self.x0 <= x) & (x <= self.x1) & (self.y0 <= y) & (y <= self.y1)).sum())

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        return min(max(x, self.x0), self.x1), min(max(y, self.y0), self.y1)


def place_boxes(
    points: Floats, sizes: Sequence[tuple[float, float]], room: Box, drawn: Floats, marker: float = 4.0
) -> list[Box]:
    """A box of the given size (width, height) for each point, all in points of the axes.

    Each box in turn takes the cheapest of its candidates while the others stay, until none moves. Lying over another
    box, a marker or outside `room` costs most, then a leader that crosses a marker or a box, then standing close beside
    another box, then lying over `drawn` (points along lines), then the distance.
    """
    markers = [Box(x - marker, y - marker, x + marker, y + marker) for x, y in points]
    candidates = [_candidates(x, y, size, marker) for (x, y), size in zip(points, sizes, strict=True)]
    fixed = [
        [_fixed_cost(box, distance, point, number, markers, room, drawn) for box, distance in places]
        for number, (point, places) in enumerate(zip(points, candidates, strict=True))
    ]
    chosen = [places[int(np.argmin(costs))][0] for places, costs in zip(candidates, fixed, strict=True)]
    for _ in range(_SWEEPS):
        before = list(chosen)
        for number, (places, costs) in enumerate(zip(candidates, fixed, strict=True)):
            others = [(box, points[k]) for k, box in enumerate(chosen) if k != number]
            total = [
                cost + sum(_mutual_cost(box, points[number], other, point) for other, point in others)
                for (box, _), cost in zip(places, costs, strict=True)
            ]
            chosen[number] = places[int(np.argmin(total))][0]
        if chosen == before:
            break
    return chosen


def _candidates(x: float, y: float, size: tuple[float, float], marker: float) -> list[tuple[Box, float]]:
    """Boxes all around a point at growing distances, the right-hand side first."""
    width, height = size
    boxes = []
    for distance in _DISTANCES:
        for angle in _ANGLES:
            along, across = math.cos(angle), math.sin(angle)
            cx = x + along * (marker + distance + width / 2)
            cy = y + across * (marker + distance + height / 2)
            boxes.append((Box(cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2), distance))
    return boxes


def _fixed_cost(
    box: Box, distance: float, point: Floats, number: int, markers: Sequence[Box], room: Box, drawn: Floats
) -> float:
    area = (box.x1 - box.x0) * (box.y1 - box.y0)
    outside = area - box.overlap(room)
    over_markers = sum(box.overlap(marker) > 0 for k, marker in enumerate(markers) if k != number)
    crossed = sum(_crosses(box, point, marker) for k, marker in enumerate(markers) if k != number)
    return 100 * outside + 2000 * over_markers + 300 * crossed + 4 * box.holds(drawn) + distance


def _mutual_cost(box: Box, point: Floats, other: Box, other_point: Floats) -> float:
    crossed = _crosses(box, point, other) + _crosses(other, other_point, box)
    near = box.overlap(Box(other.x0 - _GAP, other.y0, other.x1 + _GAP, other.y1)) > 0
    return (500 + 100 * box.overlap(other)) * (box.overlap(other) > 0) + 300 * crossed + 100 * near


def _crosses(box: Box, point: Floats, other: Box) -> bool:
    """Whether the way from a point to its box leads through another box.

    The way is p + t (q − p); inside a slab between two parallel sides t lies in an interval, and inside the box in all
    of them.
    """
    px, py = float(point[0]), float(point[1])
    qx, qy = box.nearest(px, py)
    first, last = 0.0, 1.0
    for start, end, low, high in ((px, qx, other.x0, other.x1), (py, qy, other.y0, other.y1)):
        if start == end:
            if not low <= start <= high:
                return False
            continue
        enter, leave = sorted(((low - start) / (end - start), (high - start) / (end - start)))
        first, last = max(first, enter), min(last, leave)
    return first <= last


def write_labels(axes: Axes, labels: Sequence[Label], lines: Sequence[Floats] = (), size: float = 9.0) -> None:
    """Write the labels of an axes whose limits and place in the figure are final; `lines` hold data points to avoid."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    if not labels:
        return
    scale = 72 / figure.dpi
    corner = axes.transAxes.transform((0, 0))

    def in_points(data: Floats) -> Floats:
        placed: Floats = (axes.transData.transform(data) - corner) * scale
        return placed

    points = in_points(np.array([(label.x, label.y) for label in labels], dtype=float))
    drawn = np.concatenate([in_points(line) for line in lines]) if lines else np.empty((0, 2))
    width, height = (axes.transAxes.transform((1, 1)) - corner) * scale
    sizes = [(72 * text_width(label.text, size, label.weight) + 4, 1.25 * size) for label in labels]
    boxes = place_boxes(points, sizes, Box(2, 2, width - 2, height - 2), drawn)
    for label, point, box in zip(labels, points, boxes, strict=True):
        _write(axes, label, point, box, size)


def _write(axes: Axes, label: Label, point: Floats, box: Box, size: float) -> None:
    x, y = point
    end = box.nearest(x, y)
    leader = {"arrowstyle": "-", "color": label.colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 3}
    if math.dist(end, (x, y)) > _LEADER:
        axes.annotate(
            "", (label.x, label.y), (end[0] - x, end[1] - y), textcoords="offset points", arrowprops=leader, zorder=3
        )
    axes.annotate(
        label.text,
        (label.x, label.y),
        ((box.x0 + box.x1) / 2 - x, (box.y0 + box.y1) / 2 - y),
        textcoords="offset points",
        ha="center",
        va="center_baseline",
        fontsize=size,
        fontweight=label.weight,
        zorder=6,
        bbox={"boxstyle": "round,pad=0.08", "facecolor": "white", "edgecolor": "none", "alpha": 0.65},
    )
