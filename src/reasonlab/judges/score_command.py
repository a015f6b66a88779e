"""`reasonlab judge score`: what a judge says of every candidate of a pool."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import orjson

from reasonlab.errors import UserError
from reasonlab.judges.opened import JUDGE_HELP, POOL_HELP, JudgeAtWork, add_judge_arguments
from reasonlab.judges.types import Candidate

DESCRIPTION = "Score every candidate of a pool. The same command goes on where a killed one stopped."
EXAMPLES = """example: reasonlab judge score pool.jsonl --judge runs/judge-1 --out scores.jsonl

more:
  reasonlab judge score evals/served --judge ~/models/Qwen2.5-Math-PRM-7B --device cuda --bfloat16 --out prm.jsonl.gz"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", type=Path, metavar="POOL", help=POOL_HELP)
    parser.add_argument("--judge", required=True, metavar="J", help=JUDGE_HELP)
    parser.add_argument("--out", type=Path, required=True, metavar="SCORES.jsonl", help="one line for each candidate")
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")
    add_judge_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from reasonlab import __version__
    from reasonlab.hardware import default_device
    from reasonlab.judges.inputs import ABOUT_SUFFIX, LOG_SUFFIX, open_from, read_candidates, scored_by
    from reasonlab.judges.types import write_scores
    from reasonlab.runs.files import write_aside

    out: Path = arguments.out
    candidates = read_candidates(arguments.pool)
    judging = open_from(arguments)
    about_path, log = out.with_name(out.name + ABOUT_SUFFIX), out.with_name(out.name + LOG_SUFFIX)
    if out.exists():
        return _finished_before(out, judging, candidates)
    started = time.monotonic()
    scored = scored_by(judging, candidates, log, arguments.json)
    about = {
        "judge": judging.identity,
        "place": judging.place,
        "probability": judging.probability,
        "pool": str(arguments.pool),
        "candidates": len(candidates),
        "steps": sum(len(one.steps) for one in scored),
        "in_windows": judging.in_windows,
        "device": arguments.device or default_device(),
        "reasonlab": __version__,
    }
    write_aside(about_path, orjson.dumps(about, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    write_scores(out, candidates, scored)
    log.unlink(missing_ok=True)
    seconds = time.monotonic() - started
    if arguments.json:
        print(orjson.dumps({**about, "out": str(out), "seconds": seconds}, option=orjson.OPT_INDENT_2).decode())
        return 0
    steps = f" and {about['steps']:,} steps" if about["steps"] else ""
    print(f"wrote {out}: {len(candidates):,} candidates{steps} scored by {judging.place} in {seconds:.1f} s")
    return 0


def _finished_before(out: Path, judging: JudgeAtWork, candidates: Sequence[Candidate]) -> int:
    """The file is there: fine if it is the one that would be written, else somebody's work."""
    from reasonlab.judges.inputs import read_about
    from reasonlab.judges.types import read_scores

    if read_about(out).get("judge") != judging.identity:
        raise UserError(f"{out} exists and is not by this judge", "Choose another --out, or remove it")
    read_scores(out, candidates)
    print(f"{out} is already there: {len(candidates):,} candidates scored by {judging.place}")
    return 0
