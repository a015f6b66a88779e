"""`reasonlab judge`: make pools, label steps, train judges, score with them, and measure how good they are."""

from __future__ import annotations

import argparse
from typing import Any

from reasonlab.judges import bench_command, label_command, pool_command, score_command, train_command
from reasonlab.options import Parser, without_overrides

EXAMPLES = """example: reasonlab judge train recipes/judge.toml --data pool.jsonl --out runs/judge

from nothing to a measured judge:
  reasonlab judge pool tiny-1m tiny-0.3m --problems 1000 --samples 8 --out pool.jsonl
  reasonlab judge train recipes/judge.toml --data pool.jsonl --out runs/judge
  reasonlab judge pool tiny-1m --split test --problems 240 --samples 16 --out test.jsonl
  reasonlab judge score test.jsonl --judge runs/judge --out scores.jsonl
  reasonlab judge bench rm test.jsonl --scores scores.jsonl
  reasonlab select pool.jsonl --judge runs/judge --top 500 --out chosen.jsonl"""


def run(words: list[str]) -> int:
    """Entry point of the command."""
    own, overrides = without_overrides(words, train_command.OWN_OPTIONS) if words[:1] == ["train"] else (words, [])
    arguments = _parser(words).parse_args(own)
    if arguments.what == "train":
        return train_command.run(arguments, overrides, words[1:])
    runs = {
        "pool": pool_command.run,
        "label": label_command.run,
        "score": score_command.run,
        "bench": bench_command.run,
    }
    return runs[arguments.what](arguments)


def _parser(words: list[str]) -> argparse.ArgumentParser:
    shape: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(prog="reasonlab judge", description=__doc__, epilog=EXAMPLES, **shape)
    parts = parser.add_subparsers(dest="what", required=True, metavar="pool|label|train|score|bench")
    for name, module in (("pool", pool_command), ("label", label_command), ("score", score_command)):
        part = parts.add_parser(name, description=module.DESCRIPTION, epilog=module.EXAMPLES, **shape)
        module.add_arguments(part)
    keys = ""
    if words[:1] == ["train"] and {"-h", "--help"} & set(words):
        from reasonlab.judges.settings import described

        keys = "\n\nrecipe keys, each also an override (--lr 1e-4):\n" + described()
    train = parts.add_parser(
        "train", description=train_command.DESCRIPTION, epilog=train_command.EXAMPLES + keys, **shape
    )
    train_command.add_arguments(train)
    bench = parts.add_parser("bench", description=bench_command.__doc__, epilog=bench_command.EXAMPLES, **shape)
    bench_command.add_arguments(bench, shape)
    return parser
