"""How many of a run's answers are worth the gold answer, and how many of those are worked out (lab notes, §17).

    python scripts/worked_out.py RUN --out DIR [--beside OTHER]

Regrades what a run has recorded, its evaluations and the rollouts of its training, with the rule of
`reasonlab/grading/finished.py`, and writes worked-out.csv, worked-out.png and worked-out.svg. Runs that were rewarded
before that rule need it; in later ones `train/not_worked_out` says the same of every iteration. OTHER is what was
written for another run: its evaluations are drawn in grey.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from reasonlab.evaluate.intervals import wilson
from reasonlab.figures.frame import MARGIN, WIDTH, Frame
from reasonlab.figures.style import BLUE, GREEN, GREY, PURPLE, VERMILION, bare, house_style, save
from reasonlab.grading.finished import RULE, worked_out
from reasonlab.grading.grade import Grade
from reasonlab.grading.verifier import grade_quickly
from reasonlab.runs.files import write_aside
from reasonlab.runs.reader import RunReader

TRAINING = "training, "
Row = tuple[str, int, int, int, int]  # what, iteration, answers, those worth the gold answer, those worked out


def counted(what: str, step: int, lines: Iterable[dict[str, Any]]) -> Row:
    answers = list(lines)
    right = [line for line in answers if line["verdict"] == "correct" or line.get("rule") == RULE]
    return what, step, len(answers), len(right), sum(map(is_worked_out, right))


def is_worked_out(line: dict[str, Any]) -> bool:
    quick = grade_quickly(line["extracted"], line["gold"], kind="answer", question=line["question"])
    return quick.rule != RULE if isinstance(quick, Grade) else worked_out(*quick, line["question"])


def rows_of(run: Path) -> list[Row]:
    reader, rows = RunReader(run), []
    for suite in reader.evaluation_suites():
        for step in reader.evaluation_steps(suite):
            lines = reader.evaluation(suite, step)
            for family in dict.fromkeys(line["family"] for line in lines):
                rows.append(counted(family, step, (line for line in lines if line["family"] == family)))
    for step in reader.rollout_steps():
        lines = reader.rollouts(step)
        for source in sorted({source_of(line) for line in lines}):
            rows.append(counted(TRAINING + source, step, (line for line in lines if source_of(line) == source)))
    return rows


def source_of(line: dict[str, Any]) -> str:
    """`math-train` of the problem `math-train-7156`."""
    return str(line["problem"]).rpartition("-")[0]


def line(
    axes: Any,
    steps: Sequence[int],
    counts: Sequence[int],
    totals: Sequence[int],
    colour: str,
    marker: str,
    dash: tuple[int, int],
    label: str,
) -> None:
    found = [wilson(right / total, total) for right, total in zip(counts, totals, strict=True)]
    middle = [100 * right / total for right, total in zip(counts, totals, strict=True)]
    reach = [[m - 100 * f.low for m, f in zip(middle, found, strict=True)]]
    reach.append([100 * f.high - m for m, f in zip(middle, found, strict=True)])
    axes.errorbar(steps, middle, reach, color=colour, marker=marker, dashes=dash, label=label, markersize=4)


def draw(rows: Sequence[Row], stem: Path, beside: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row[0] for row in rows if not row[0].startswith(TRAINING)))
    frame = Frame(4.1)
    frame.heading(
        "Answers that are worth the gold answer, and those that are worked out",
        "Share of answers, in percent, with 95 % intervals over the questions; one run" + (" each" if beside else ""),
    )
    edges = frame.edges(MARGIN + 0.35, WIDTH - MARGIN, 0.95, 2.95)
    panels = frame.figure.subplots(1, len(names) + 1, gridspec_kw={**edges, "wspace": 0.28})
    for axes, name in zip(panels[:-1], names, strict=True):
        for run, colours, which in ((beside, (GREY, GREY), "other run: "), (rows, (VERMILION, BLUE), "")):
            if own := [row[1:] for row in run if row[0] == name]:
                steps, totals, worth, worked = zip(*own, strict=True)
                line(axes, steps, worth, totals, colours[0], "s", (4, 2), which + "worth it")
                line(axes, steps, worked, totals, colours[1], "o", (1, 0), which + "worked out")
        axes.set_title(f"{name}, {totals[0]:,} questions", fontsize=9.5, loc="left", pad=8)
        axes.set_ylim(bottom=0)
    panels[len(names) // 2].legend(fontsize=8, loc="lower right")
    sources = sorted({row[0] for row in rows} - set(names))
    for source, colour, marker in zip(sources, (GREEN, PURPLE, GREY), "^Dv", strict=False):
        steps, _, worth, worked = zip(*(row[1:] for row in rows if row[0] == source), strict=True)
        share = [100 * (w - o) / max(w, 1) for w, o in zip(worth, worked, strict=True)]
        panels[-1].plot(steps, share, color=colour, marker=marker, markersize=4, label=source.removeprefix(TRAINING))
    panels[-1].legend(fontsize=8, loc="upper left")
    panels[-1].set_title("in training, not worked out", fontsize=9.5, loc="left", pad=8)
    panels[-1].set_ylim(bottom=0)
    for axes in panels:
        bare(axes)
        axes.grid(axis="y")
        axes.set_xlabel("iteration", fontsize=8.5)
    frame.caption(
        "`36 + 54` instead of 90, or the question's own formula, is worth the gold answer and not worked out."
    )
    save(frame.figure, stem, "Answers that are worked out, and answers that are only worth the gold answer")


def written(directory: Path, parser: argparse.ArgumentParser) -> list[Row]:
    table = directory / "worked-out.csv"
    if not table.is_file():
        parser.error(f"{table} does not exist")
    with table.open(encoding="utf-8", newline="") as lines:
        _, *found = csv.reader(lines)
    return [(name, int(step), int(answers), int(worth), int(worked)) for name, step, answers, worth, worked in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--beside", type=Path, metavar="OTHER", help="a directory with another run's worked-out.csv")
    arguments = parser.parse_args()
    if not (arguments.run / "run.json").is_file():
        parser.error(f"{arguments.run} is no run")
    beside = written(arguments.beside, parser) if arguments.beside else []
    rows = rows_of(arguments.run)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["set", "iteration", "answers", "worth the gold answer", "worked out"])
    writer.writerows(rows)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_aside(arguments.out / "worked-out.csv", table.getvalue().encode())
    with house_style():
        draw(rows, arguments.out / "worked-out", beside)
    print(table.getvalue(), end="")


if __name__ == "__main__":
    main()
