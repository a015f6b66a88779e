"""`reasonlab select`: the best candidates of a pool by a judge's scores, to train on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

import orjson

from reasonlab.errors import UserError
from reasonlab.judges.opened import JUDGE_HELP, POOL_HELP, add_judge_arguments, add_ranking_arguments
from reasonlab.options import Parser

DESCRIPTION = """Choose the best candidates of a pool by a judge's scores. Ties are broken by lot, keyed by the seed, so
the choice does not depend on the order of the file. What was chosen from what is printed and written beside FILE."""
EXAMPLES = """example: reasonlab select pool.jsonl --judge runs/judge-1 --top 1000 --out chosen.jsonl

more:
  reasonlab select pool.jsonl --scores scores.jsonl --top 1000 --per-family --one-per-problem --out chosen.jsonl
  reasonlab select pool.jsonl --scores scores.jsonl --top 500 --steps min --demonstrations --out sft.jsonl"""
REPORT_SUFFIX = ".report.json"


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="reasonlab select",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("pool", type=Path, metavar="POOL", help=POOL_HELP)
    made.add_argument("--judge", metavar="J", help=JUDGE_HELP)
    made.add_argument("--scores", type=Path, metavar="FILE", help="scores of this pool instead (`judge score`)")
    made.add_argument("--top", type=int, required=True, metavar="N", help="how many are chosen")
    made.add_argument("--out", type=Path, required=True, metavar="FILE", help="the chosen candidates, best first")
    made.add_argument(
        "--per-family",
        nargs="?",
        const="even",
        metavar="N",
        help="the same number of each family as far as there are enough, or at most N of each",
    )
    made.add_argument("--one-per-problem", action="store_true", help="only the best response to each problem")
    made.add_argument("--no-dedup", action="store_true", help="keep responses that differ in case and blanks only")
    made.add_argument(
        "--demonstrations",
        action="store_true",
        help="write FILE for `reasonlab train --method.type sft --method.data FILE` (tiny models)",
    )
    made.add_argument("--seed", type=int, default=0, help="of the lots between equal scores")
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    add_ranking_arguments(made)
    add_judge_arguments(made)
    return made


def run(words: list[str]) -> int:
    arguments = parser().parse_args(words)
    from reasonlab.judges.inputs import LOG_SUFFIX, given_or_scored, read_candidates
    from reasonlab.judges.selection import select
    from reasonlab.judges.types import write_pool
    from reasonlab.runs.files import write_aside

    out: Path = arguments.out
    if out.exists():
        raise UserError(f"{out} exists", "Choose another --out, or remove it")
    per_family = _per_family(arguments.per_family)
    candidates = read_candidates(arguments.pool)
    if not 1 <= arguments.top <= len(candidates):  # before the judge works for hours
        raise UserError(f"--top {arguments.top} of {len(candidates):,} candidates", "Give a number from 1 to that")
    log = out.with_name(out.name + LOG_SUFFIX)
    scored, _, judge = given_or_scored(arguments, candidates, lambda _: log, arguments.json)
    values = [one.overall(arguments.alpha, arguments.steps) for one in scored]
    chosen = select(
        candidates,
        values,
        arguments.top,
        per_family,
        not arguments.no_dedup,
        arguments.one_per_problem,
        arguments.seed,
    )
    report = {
        "judge": judge,
        "rank_by": {"steps": arguments.steps, "alpha": arguments.alpha},
        "seed": arguments.seed,
        **chosen.report.to_json(),
    }
    data = orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    write_aside(out.with_name(out.name + REPORT_SUFFIX), data)
    best_first = [candidates[i] for i in chosen.indices]
    if arguments.demonstrations:
        from reasonlab.judges.demonstrations import write_as_demonstrations

        write_as_demonstrations(out, best_first)
    else:
        write_pool(out, best_first)
    log.unlink(missing_ok=True)
    if arguments.json:
        print(data.decode(), end="")
        return 0
    print(chosen.report)
    print(f"wrote {out}, and {out.name}{REPORT_SUFFIX} beside it")
    return 0


def _per_family(text: str | None) -> int | Literal["even"] | None:
    if text is None or text == "even":
        return "even" if text else None
    if not text.isdecimal() or not int(text):
        raise UserError(f"--per-family {text} is no number of candidates", "For instance --per-family 100, or no value")
    return int(text)
