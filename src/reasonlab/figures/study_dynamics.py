"""The panel grid of the k15-dynamics study over all its seeds, and the published figure it answers to, drawn alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import nan
from pathlib import Path

from reasonlab.errors import UserError
from reasonlab.evaluate.control import caption
from reasonlab.figures.panel_grid import TOTAL, draw_panel_grid, of_panel, questions_asked
from reasonlab.figures.published import KIMI, kimi_k15
from reasonlab.figures.record import Record
from reasonlab.figures.style import house_style, save
from reasonlab.figures.tables import (
    PanelRow,
)
from reasonlab.wording import counted

MIRROR_DESCENT = "mirror-descent"


def draw_study_dynamics(rows: Iterable[PanelRow], record: Record, out: Path) -> list[Path]:
    """dynamics.png and .svg: the arm mirror-descent."""
    rows = main_arm(rows)
    seeds = max(row.seeds for row in rows)
    model = record.protocol.get("model")
    title = "Training dynamics: " + ", ".join(
        filter(None, [model and str(model), "mirror descent", f"mean of {seeds} seeds" if seeds > 1 else "one seed"])
    )
    over = "questions and seeds" if seeds > 1 else "questions"
    with house_style():
        figure = draw_panel_grid(
            rows,
            title,
            subtitle(rows, record),
            _caption(of_panel(rows, TOTAL), record),
            accuracy_label=f"accuracy, with 95 % interval over {over}",
        )
        return list(save(figure, out / "dynamics", title))


def draw_published_dynamics(out: Path) -> list[Path]:
    """dynamics-published.png and .svg: Figure 5 of the Kimi k1.5 report in the same manner."""
    rows = published_rows()
    total = of_panel(rows, TOTAL)
    cap = max(row.tokens_p95 for row in rows)
    capped = [
        name for name in dict.fromkeys(r.panel for r in rows) if max(r.tokens_p95 for r in of_panel(rows, name)) == cap
    ]
    title = "Published: training dynamics of a smaller Kimi k1.5 model, one run"
    with house_style():
        figure = draw_panel_grid(
            rows,
            title,
            f"Figure 5 of the {KIMI}, read off and drawn again; temperature 1, model size not disclosed",
            f"{_change(total)} The report gives no intervals of accuracy. The upper edge of the band stops at "
            f"{cap:,.0f} tokens in {', '.join(capped[:-1])} and {capped[-1]}: answers were probably cut there.",
            accuracy_label="accuracy",
            tokens_label="mean response tokens, with the report's band (“95 % percentile”)",
        )
        return list(save(figure, out / "dynamics-published", title))


def published_rows() -> list[PanelRow]:
    """The published curves as rows; numbers of questions are not given, so they are written as 1 and never shown."""
    rows = []
    for panel, series in kimi_k15()["dynamics"]["panels"].items():
        columns = (series[name] for name in ("iteration", "accuracy", "tokens", "tokens_low", "tokens_high"))
        for iteration, accuracy, tokens, low, high in zip(*columns, strict=True):
            rows.append(
                PanelRow("published", panel, iteration, accuracy, nan, nan, tokens, nan, nan, low, high, 1, 1, 1)
            )
    return rows


def main_arm(rows: Iterable[PanelRow]) -> list[PanelRow]:
    kept = [row for row in rows if row.arm == MIRROR_DESCENT]
    if not of_panel(kept, TOTAL):
        raise UserError(
            f"the panels of this study hold no total of the arm {MIRROR_DESCENT}",
            "Run the study again: it is the arm shown",
        )
    return kept


def subtitle(rows: Sequence[PanelRow], record: Record) -> str:
    """Held-out test problems: 480 questions (40 per family), 4 samples each, 3 seeds, temperature 1, …"""
    protocol, total = record.protocol, of_panel(rows, TOTAL)[0]
    split = f"{protocol['split']} " if "split" in protocol else ""
    parts = [questions_asked(rows), f"{counted(total.samples, 'sample')} each", counted(total.seeds, "seed")]
    if "temperature" in protocol:
        parts.append(f"temperature {protocol['temperature']:g}")
    if "max_tokens" in protocol:
        parts.append(f"at most {protocol['max_tokens']:,} tokens")
    return f"Held-out {split}problems: {', '.join(parts)}"


def _caption(total: Sequence[PanelRow], record: Record) -> str:
    if record.gain is None:
        return _change(total)
    return f"{caption(record.gain, len(total))} {_length_change(total)}"


def _change(total: Sequence[PanelRow]) -> str:
    """What the table says on its own: the ends of the curve, without an interval of their paired difference."""
    if len(total) == 1:
        return "One evaluation so far: there is nothing to compare it with."
    first, last = total[0], total[-1]
    points = f"{100 * first.accuracy:.1f} → {100 * last.accuracy:.1f} %"
    return f"Iteration {first.iteration} to {last.iteration}: accuracy {points}. {_length_change(total)}"


def _length_change(total: Sequence[PanelRow]) -> str:
    if len(total) == 1 or not total[0].tokens:
        return ""
    first, last = total[0].tokens, total[-1].tokens
    return f"Mean length {_tokens(first)} → {_tokens(last)} tokens, {last / first:.1f}-fold."


def _tokens(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
