"""`reasonlab compare A B`: what changed between two evaluations, in sentences or as JSON."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from reasonlab.errors import UserError
from reasonlab.evaluate.compare import FEWEST, Change, Comparison, Panel, Side, compare
from reasonlab.evaluate.intervals import Interval
from reasonlab.evaluate.lengths import Lengths
from reasonlab.evaluate.selection import Selection, best_checkpoint
from reasonlab.options import Parser
from reasonlab.runs.files import evaluation_prefix
from reasonlab.runs.reader import RunReader
from reasonlab.wording import counted

_IDS_SHOWN = 8
_CONTROL = "tiny-forced"  # `control.FORCED_SUITE`, named here because that room imports torch


@dataclass(frozen=True, slots=True)
class Source:
    """The answers of one side, where they come from, and how they were sampled as far as that is known."""

    name: str
    rows: list[dict[str, Any]]
    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    selection: Selection | None = None
    asked: int | None = None  # answers that the evaluation is to have, where that is known
    overlap: dict[str, Any] | None = None  # which problems were in the training pool, where that was checked

    def settings(self) -> str:
        known = [f"T={self.temperature:g}"] if self.temperature is not None else []
        known += [f"top-p {self.top_p:g}"] if self.top_p is not None and self.top_p < 1 else []
        return ", ".join(known + ([f"{self.max_tokens:,} tokens at most"] if self.max_tokens is not None else []))


def run(words: list[str]) -> int:
    arguments = _parser().parse_args(words)
    suite = arguments.suite or shared_suite(arguments.a, arguments.b)
    a = load(arguments.a, arguments.step_a, suite, "--step-a")
    b = load(arguments.b, arguments.step_b, suite, "--step-b")
    comparison = compare(a.rows, b.rows)
    if arguments.json:
        print(json.dumps({"a": _described(a), "b": _described(b), **comparison.as_dict()}, indent=1))
    else:
        print("\n".join(report(comparison, a, b)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="reasonlab compare",
        description="compare two evaluations problem by problem: accuracy, length, flips, what could have been seen",
        epilog="example: reasonlab compare runs/demo-1 runs/demo-1 --step-a 0",
        allow_abbrev=False,
    )
    parser.add_argument("a", metavar="A", type=Path, help="a run directory, or what eval --out wrote")
    parser.add_argument("b", metavar="B", type=Path, help="the other one; differences are B − A")
    parser.add_argument("--step-a", type=int, metavar="N", help="which evaluation of run A (default: the last)")
    parser.add_argument("--step-b", type=int, metavar="N", help="which evaluation of run B (default: the last)")
    parser.add_argument("--suite", help="which suite of the runs (default: the one that they share)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, with all flipped problems")
    return parser


def shared_suite(*sides: Path) -> str:
    """The one suite that all runs among the sides were evaluated on; empty where no side is a run.

    The control with a forced style does not count: it stands beside the suite that it controls.
    """
    runs = {side: RunReader(side).evaluation_suites() for side in sides if _is_run(side)}
    shared = [suite for suite in next(iter(runs.values()), []) if all(suite in found for found in runs.values())]
    candidates = [suite for suite in shared if suite != _CONTROL] or shared
    if len(candidates) == 1 or not runs:
        return "".join(candidates)
    if candidates:
        raise UserError(f"there are several suites to compare: {', '.join(candidates)}", "Choose one with --suite")
    told = "; ".join(f"{side} has {', '.join(found) or 'none at all yet'}" for side, found in runs.items())
    raise UserError(f"there is no evaluation to compare: {told}", "Compare runs with a suite in common")


def _is_run(path: Path) -> bool:
    return path.is_dir() and not _is_evaluation(path)


def _is_evaluation(path: Path) -> bool:
    return (path / "settings.json").exists() and (path / "answers.jsonl").exists()


def load(path: Path, step: int | None, suite: str, flag: str = "--step") -> Source:
    """The answers of a run's evaluation, of an evaluation directory, or of a .jsonl (or .jsonl.gz) file."""
    if path.is_file():
        if step is not None:
            raise UserError(f"{flag} chooses an evaluation of a run, but {path} is a file", f"Leave {flag} out")
        return _from_file(path)
    if not path.exists():
        raise UserError(f"{path} does not exist", "Give a run directory, or what `reasonlab eval --out` wrote")
    if _is_evaluation(path):
        if step is not None:
            raise UserError(f"{flag} chooses an evaluation of a run, but {path} is one evaluation", f"Leave {flag} out")
        return _from_evaluation(path)
    return _from_run(RunReader(path), step, suite, flag)


def _from_file(path: Path) -> Source:
    data = path.read_bytes()
    rows = _rows(path, data)
    first = rows[0] if rows else {}
    return Source(str(path), rows, first.get("temperature"), first.get("max_tokens"), first.get("top_p"))


def _from_evaluation(path: Path) -> Source:
    """A directory that `reasonlab eval --out` keeps; a last line without its end is still being written."""
    settings = orjson.loads((path / "settings.json").read_bytes())
    whole, _, _ = (path / "answers.jsonl").read_bytes().rpartition(b"\n")
    sampling = settings.get("sampling", {})
    return Source(
        name=str(path),
        rows=_rows(path / "answers.jsonl", whole),
        temperature=sampling.get("temperature"),
        max_tokens=sampling.get("max_tokens"),
        top_p=sampling.get("top_p"),
        asked=settings.get("k", 0) * sum(one["questions"] for one in settings.get("benchmarks", {}).values()) or None,
        overlap=settings.get("about", {}).get("overlap"),
    )


def _rows(path: Path, data: bytes) -> list[dict[str, Any]]:
    wanted = "Give answers written by `reasonlab eval --out`, one JSON object a line"
    try:
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        rows = [orjson.loads(line) for line in data.splitlines() if line.strip()]
    except (orjson.JSONDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise UserError(f"{path} is not a file of JSON lines ({error})", wanted) from None
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} holds lines that are not JSON objects", wanted)
    return rows


def _from_run(reader: RunReader, step: int | None, suite: str, flag: str) -> Source:
    steps = reader.evaluation_steps(suite)
    if not steps:
        names = reader.evaluation_suites()
        remedy = f"It has {', '.join(names)}: choose one with --suite" if names else "It has no evaluation at all yet"
        raise UserError(f"{reader.directory} holds no evaluation of suite {suite!r}", remedy)
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise UserError(f"{reader.directory} has no {suite} evaluation at step {step}", f"{flag} can be {known}")
    chosen = steps[-1] if step is None else step
    config = tomllib.loads(reader.config_toml)
    return Source(
        name=f"{reader.directory} {evaluation_prefix(suite)}{chosen}",
        rows=reader.evaluation(suite, chosen),
        temperature=config.get("evaluate", {}).get("temperature"),
        max_tokens=config.get("rollout", {}).get("max_tokens"),
        selection=_selection(reader, suite, steps, chosen) if step is not None else None,
    )


def _selection(reader: RunReader, suite: str, steps: list[int], chosen: int) -> Selection | None:
    """What choosing this step may have cost in honesty: None unless it is the best of at least three."""
    if len(steps) < 3:
        return None
    by_step = {step: _grades(reader.evaluation(suite, step)) for step in steps}
    problems = [problem for problem in by_step[chosen] if all(problem in grades for grades in by_step.values())]
    if not problems:
        return None
    best = best_checkpoint({step: [grades[problem] for problem in problems] for step, grades in by_step.items()})
    return best if best.step == chosen else None


def _grades(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    grades: dict[str, list[float]] = {}
    for row in rows:
        if row["verdict"] in ("correct", "wrong"):
            grades.setdefault(row["problem"], []).append(float(row["verdict"] == "correct"))
    return grades


def report(comparison: Comparison, a: Source, b: Source) -> list[str]:
    """The comparison in sentences, the most important first."""
    total = comparison.total
    lines = [
        f"A: {a.name}",
        f"B: {b.name}",
        f"{counted(total.problems, 'shared problem')}; differences are B − A; "
        "brackets hold 95 % intervals over problems",
        "",
        _side_sentence("A", total, total.a, a),
        _side_sentence("B", total, total.b, b),
        "",
        *_changes(total),
        *_flips(total),
        *(["", *_table(comparison)] if comparison.panels else []),
    ]
    notes = _notes(comparison, a, b)
    return [*lines, "", *notes] if notes else lines


def _side_sentence(letter: str, panel: Panel, side: Side, source: Source) -> str:
    facts = [
        counted(panel.problems, "question"),
        source.settings(),
        f"{100 * side.truncated:.1f} % truncated",
        f"{100 * side.repeating:.1f} % stopped for repeating themselves" if side.repeating else "",
        *(_length_facts(side.lengths) if side.lengths else ["unknown tokens/answer"]),
    ]
    low, high = 100 * side.accuracy.low, 100 * side.accuracy.high
    score = f"avg@{side.samples} = {100 * side.accuracy.estimate:.1f} % [{low:.1f}, {high:.1f}]"
    return f"{letter}: {score} ({'; '.join(filter(None, facts))})"


def _length_facts(lengths: Lengths) -> list[str]:
    halves = {"correct": lengths.correct, "wrong": lengths.wrong}
    split = ", ".join(f"{name} {part}" for name, part in halves.items() if part)
    cost, bound = lengths.per_correct.estimate, "≥ " if lengths.every.is_lower_bound else ""
    return [
        f"{lengths.every} tokens/answer" + (f": {split}" if split else ""),
        f"{bound}{cost:,.1f} tokens per correct answer" if math.isfinite(cost) else "none correct",
    ]


def _changes(panel: Panel) -> list[str]:
    mcnemar = f", McNemar {_p(panel.mcnemar)}" if panel.mcnemar is not None else ""
    lines = [
        f"accuracy: {_points(panel.accuracy.difference)} points ({_tests(panel.accuracy)}{mcnemar})"
        + _detectable(100 * panel.accuracy.detectable, " points")
    ]
    if panel.tokens is not None:
        ratio = panel.token_ratio
        times = f", {ratio.estimate:.2f} times" if ratio else ""
        times += f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio and math.isfinite(ratio.high) else ""
        lines.append(
            f"tokens: {_signed(panel.tokens.difference)}{times} ({_tests(panel.tokens)})"
            + _detectable(panel.tokens.detectable)
        )
    if panel.both_right_tokens is not None:
        lines.append(f"tokens of correct answers where both sides have one: {_signed(panel.both_right_tokens)}")
    if panel.dominance is not None:
        lines.append(
            "dominates (at least as accurate and no longer, better in one): "
            f"B over A with probability {panel.dominance.b:.2f}, A over B {panel.dominance.a:.2f}"
        )
    return lines


def _detectable(change: float, unit: str = "") -> str:
    """How large a change these problems can show; few problems, or differences without scatter, do not tell."""
    found = f"; a true change of {change:,.1f}{unit} would be found four times in five"
    return found if math.isfinite(change) else ""


def _flips(panel: Panel) -> list[str]:
    lines = [
        f"flips: {counted(len(panel.gained), 'problem')} gained, {len(panel.lost)} lost; "
        f"answers are longer on {panel.longer}, shorter on {panel.shorter}"
    ]
    for word, ids in (("gained", panel.gained), ("lost", panel.lost)):
        if ids:
            more = len(ids) - _IDS_SHOWN
            lines.append(f"{word}: {', '.join(ids[:_IDS_SHOWN])}" + (f" and {more} more (--json)" if more > 0 else ""))
    return lines


def _table(comparison: Comparison) -> list[str]:
    """One line a panel; p-values are Holm's over the panels."""
    header = ["", "n", "A %", "B %", "accuracy, points", "p (Holm)", "gained/lost", "tokens", "p (Holm)"]
    rows = [
        [
            panel.name,
            str(panel.problems),
            f"{100 * panel.a.accuracy.estimate:.1f}",
            f"{100 * panel.b.accuracy.estimate:.1f}",
            _points(panel.accuracy.difference),
            _p(panel.accuracy.p_holm, ""),
            f"{len(panel.gained)}/{len(panel.lost)}",
            _signed(panel.tokens.difference) if panel.tokens else "unknown",
            _p(panel.tokens.p_holm, "") if panel.tokens else "",
        ]
        for panel in comparison.panels
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(
            word.ljust(width) if column == 0 else word.rjust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows]
    ]


def _notes(comparison: Comparison, a: Source, b: Source) -> list[str]:
    total = comparison.total
    notes = [note for letter, side in (("A", a), ("B", b)) if (note := _unfinished(letter, side))]
    if comparison.only_a or comparison.only_b:
        notes.append(f"{comparison.only_a} problems of A and {comparison.only_b} of B have no partner and are left out")
    if comparison.unpaired_ungraded:
        notes.append(f"{comparison.unpaired_ungraded} shared problems have no graded answer on one side: left out")
    if ungraded := total.a.ungraded + total.b.ungraded:
        notes.append(f"{ungraded} answers could not be graded (A {total.a.ungraded}, B {total.b.ungraded})")
    changes = {"accuracy": total.accuracy, "length": total.tokens}
    if unknown := [name for name, change in changes.items() if change and math.isnan(change.p_t)]:
        notes.append(
            f"{' and '.join(unknown)} compared on fewer than {FEWEST} problems, or changed by the same on all: "
            "no t test, detectable change or dominance"
        )
    if any(side.lengths and side.lengths.every.is_lower_bound for side in (total.a, total.b)):
        notes.append("answers were cut off before their end: lengths marked ≥ are lower bounds")
    if a.settings() and b.settings() and a.settings() != b.settings():
        notes.append(f"sampled differently (A {a.settings()}; B {b.settings()}): the differences include that")
    notes += [f"{letter} is {side.selection}" for letter, side in (("A", a), ("B", b)) if side.selection]
    notes += [note for letter, side in (("A", a), ("B", b)) if (note := _seen(letter, side))]
    return [f"note: {note}" for note in notes]


def _unfinished(letter: str, source: Source) -> str:
    there = len({(row.get("family"), row["problem"], row.get("sample")) for row in source.rows})
    if source.asked is None or there >= source.asked:
        return ""
    return f"{letter} is unfinished: {there:,} of {counted(source.asked, 'answer')}"


def _seen(letter: str, source: Source) -> str:
    """Whether the training pool of a side held some of the problems it was asked."""
    if source.overlap is None:
        return ""
    known = {(family, problem) for family, ids in source.overlap["problems"].items() for problem in ids or ()}
    seen = {(row.get("family"), row["problem"]) for row in source.rows} & known
    pool = source.overlap["pool"]
    return f"OVERLAP: {len(seen)} problems of {letter} are in its training pool {pool}" if seen else ""


def _described(source: Source) -> dict[str, Any]:
    selected = source.selection
    return {
        "source": source.name,
        "temperature": source.temperature,
        "max_tokens": source.max_tokens,
        "top_p": source.top_p,
        "answers": len(source.rows),
        "answers_asked": source.asked,
        "selected_best_of": selected.looks if selected else None,
        "cross_fitted_score": selected.honest if selected else None,
    }


def _tests(change: Change) -> str:
    """The t test only where it says something."""
    t = "" if math.isnan(change.p_t) else f", t {_p(change.p_t)}"
    return f"permutation {_p(change.p_permutation)}{t}"


def _p(p: float, equals: str = "p = ") -> str:
    if p < 0.0001:
        return equals.replace("=", "<") + ("" if equals else "< ") + "0.0001"
    return f"{equals}{p:.4f}" if p < 0.01 else f"{equals}{p:.3f}"


def _points(interval: Interval) -> str:
    """A difference of accuracies in points. Few questions give intervals beyond what a difference can be."""
    i = interval
    low, high = (max(i.low, -1.0), min(i.high, 1.0)) if math.isfinite(i.high - i.low) else (i.low, i.high)
    return _signed(Interval(100 * i.estimate, 100 * low, 100 * high, i.level))


def _signed(interval: Interval) -> str:
    """With its brackets, unless they hold everything."""
    known = math.isfinite(interval.high - interval.low)
    brackets = f" [{_number(interval.low)}, {_number(interval.high)}]" if known else ""
    return _number(interval.estimate) + brackets


def _number(value: float) -> str:
    """With a typographic minus, and no sign on zero."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:+,.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text
