"""Runs of small random language models for the tests: pools of sums, a recipe, and a model that has learnt some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chat_checkpoints import checkpoint
from test_loop import Silent

from reasonlab.config import validate
from reasonlab.runs import RunReader
from reasonlab.train.loop import start


def rows_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pool(path: Path, count: int = 6, **more: Any) -> str:
    rows = [{"id": f"p{n}", "question": f"What is {n} plus {n}?", "answer": str(2 * n), **more} for n in range(count)]
    return rows_file(path, rows)


def held_out(path: Path) -> str:
    return rows_file(
        path, [{"id": f"h{n}", "question": f"How much is {n} times 3?", "answer": f"{3 * n}"} for n in (1, 2)]
    )


def sums_recipe(where: Path) -> dict[str, Any]:
    """A random chat model on a pool of sums."""
    checkpoint(where / "model")
    return {
        "iterations": 3,
        "threads": 1,
        "model": {"path": str(where / "model")},
        "problems": {"path": pool(where / "pool.jsonl")},
        "rollout": {"prompts": 3, "samples": 4, "max_tokens": 24, "repetition_window": 0},
        "method": {"type": "grpo"},
        "learner": {"lr": 1e-3},
        "evaluate": {"every": 2, "suite": held_out(where / "held.jsonl"), "temperature": 0.0},
        "checkpoint": {"every": 1, "keep": 3},
    }


def teach(where: Path) -> Path:
    """The random model after it has seen the sums a few times: some of its answers are right."""
    checkpoint(where / "model")
    rows = [{"question": f"What is {n} plus {n}?", "response": f"\\boxed{{{2 * n}}}"} for n in range(6)]
    raw = {
        "iterations": 30,  # about half of what it then says is right
        "threads": 1,
        "model": {"path": str(where / "model")},
        "method": {"type": "sft", "data": rows_file(where / "sums.jsonl", rows)},
        "rollout": {"prompts": 6},
        "learner": {"lr": 1e-2},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 500},
    }
    trained(raw, where / "run")
    return where / "run/checkpoints/final"


def trained(raw: dict[str, Any], out: Path) -> tuple[RunReader, Silent]:
    observer = Silent()
    assert start(validate(raw, "test"), out, ["test"], observer).run().status == "finished"
    return RunReader(out), observer


def event(reader: RunReader, kind: str) -> dict[str, Any]:
    return next(one for one in reader.events() if one["kind"] == kind)
