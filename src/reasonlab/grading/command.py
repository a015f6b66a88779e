"""`reasonlab grade FILE.jsonl`: grade predictions, row by row; the rows come back with their verdicts, in order."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from reasonlab.errors import UserError
from reasonlab.grading.extract import Policy
from reasonlab.grading.grade import Grade
from reasonlab.grading.pool import shared_pool
from reasonlab.grading.verifier import Kind, grade_text
from reasonlab.runs.files import explained
from reasonlab.wording import counted

# Rows handed to the threads at a time: enough to keep the workers busy, few enough for any file to fit in memory.
CHUNK = 2048


def run(arguments: argparse.Namespace) -> int:
    """`arguments` has `file`, `out` (a path or None), `policy` (perhaps empty) and `json` (bool)."""
    source = Path(arguments.file)
    if not source.is_file():
        raise UserError(f"there is no file {source}", "Give a .jsonl file with prediction and gold in every row")
    policy = _policy(getattr(arguments, "policy", ""))
    counts: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    with source.open("rb") as lines:
        if arguments.out:
            target = Path(arguments.out)
            if target.is_dir():
                raise UserError(f"{target} is a directory", "Give a file with --out")
            part = target.with_name(target.name + ".part")  # whole or absent, as every file of ours
            with explained(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                with part.open("w") as sink:
                    first_error = _grade_all(lines, sink, policy, counts, rules)
                if counts:
                    part.replace(target)
                else:
                    part.unlink()
        else:
            first_error = _grade_all(lines, sys.stdout, policy, counts, rules)
    if not counts:
        raise UserError(f"{source} holds no rows", "Give a .jsonl file with prediction and gold in every row")
    _summary(counts, rules, first_error, bool(arguments.json))
    return 0 if counts["correct"] + counts["wrong"] else 1


def _policy(name: str) -> Policy | None:
    try:
        return Policy(name) if name else None
    except ValueError:
        raise UserError(f"there is no policy {name!r}", "Choose one of " + ", ".join(Policy)) from None


def _policy_of_benchmark(name: Any) -> Policy:
    """The marks a benchmark's prompt asks for; text from elsewhere is read freely."""
    if not isinstance(name, str):
        return Policy.FREE
    from reasonlab.problems.registry import benchmarks

    entry = benchmarks().get(name)
    return Policy(entry.extraction) if entry else Policy.FREE


def grade_row(row: Any, policy: Policy | None = None) -> dict[str, Any]:
    """One row with its verdict; a row that cannot be graded is an `error` row. No policy: its benchmark's."""
    if not isinstance(row, dict):
        return {"row": row, **_verdict(Grade("error", None, "not a JSON object"))}
    try:
        grade = _grade(row, policy)
    except Exception as error:  # one bad row must not cost the others their verdicts
        grade = Grade("error", None, f"{type(error).__name__}: {error}"[:200])
    return {**row, **_verdict(grade)}


def _verdict(grade: Grade) -> dict[str, Any]:
    return {
        "verdict": grade.verdict,
        "extracted": grade.extracted,
        "rule": grade.rule,
        "seconds": round(grade.seconds, 6),
    }


def _grade(row: dict[str, Any], policy: Policy | None) -> Grade:
    prediction, gold = row.get("prediction"), row.get("gold")
    kind: Kind = row.get("kind") or "text"
    if not isinstance(prediction, str):
        return Grade("error", None, "the row has no text `prediction`")
    if isinstance(gold, int | float) and not isinstance(gold, bool):
        gold = str(gold)
    if not isinstance(gold, str):
        return Grade("error", None, "the row has no text `gold`")
    if kind not in ("text", "answer"):
        return Grade("error", None, f"kind {kind!r} is neither text nor answer")
    question = row.get("question")
    if not isinstance(question, str | None):
        return Grade("error", None, "the row's `question` is no text")
    policy = policy or _policy_of_benchmark(row.get("benchmark"))
    return grade_text(prediction, gold, policy, kind, question=question)


def _grade_all(
    lines: IO[bytes], sink: IO[str], policy: Policy | None, counts: Counter[str], rules: Counter[str]
) -> str:
    """Write every row with its verdict and count them; where and what the first error was, or nothing."""
    first_error = ""
    with ThreadPoolExecutor(shared_pool().size) as threads:
        for chunk in _chunks(lines):
            graded = threads.map(lambda numbered: _grade_line(numbered[0], numbered[1], policy), chunk)
            for (number, _), row in zip(chunk, graded, strict=True):
                counts[row["verdict"]] += 1
                rules[row["rule"]] += 1
                if row["verdict"] == "error" and not first_error:
                    first_error = f"line {number}: {row['rule']}"
                sink.write(json.dumps(row, ensure_ascii=False) + "\n")
    return first_error


def _chunks(lines: IO[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Lines that are not blank, with their numbers."""
    chunk: list[tuple[int, bytes]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            chunk.append((number, line))
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _grade_line(number: int, line: bytes, policy: Policy | None) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        text = line.decode(errors="replace").rstrip("\n")
        return {"line": number, "row": text, **_verdict(Grade("error", None, "not JSON"))}
    return grade_row(row, policy)


def _summary(counts: Counter[str], rules: Counter[str], first_error: str, as_json: bool) -> None:
    total = sum(counts.values())
    shown = {verdict: counts[verdict] for verdict in ("correct", "wrong", "error", "timeout")}
    if as_json:
        told = {"rows": total, **shown, "first_error": first_error or None, "rules": dict(rules.most_common())}
        print(json.dumps(told), file=sys.stderr)
        return
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in shown.items())
    print(f"{counted(total, 'row')}: {verdicts}", file=sys.stderr)
    if first_error:
        print(f"first error: {first_error}", file=sys.stderr)
