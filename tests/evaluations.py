"""`reasonlab eval` for the tests: a set of sums to ask, what the command prints, and what it records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reasonlab.cli import main


def own_set(path: Path, count: int = 6) -> Path:
    """A user's file: what is n + n?"""
    rows = [{"id": f"q{n}", "question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(["eval", *words])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "answers.jsonl").read_text().splitlines()]
