"""`reasonlab data curate`: choose the problems of a pool that are worth training on, and say what went and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from reasonlab import __version__
from reasonlab.errors import UserError
from reasonlab.options import add_device_argument
from reasonlab.problems.curation import (
    BEYOND_SIZE,
    BINS,
    FAMILY_CAP,
    GUESSABLE,
    NOT_MEASURED,
    STRUCTURE,
    TINY,
    TRIVIAL,
    UNSOLVED,
    Candidate,
    balance,
    counts,
    counts_by_family,
    cut_to_size,
    limited,
    read_pool,
    remaining,
    remove_by_pass_rate,
    remove_guessable,
    remove_unfit,
    write_curated,
)
from reasonlab.problems.registry import OWN_FILE_SUFFIXES, TINY_LEVELS
from reasonlab.problems.sources import DATA_VARIABLE
from reasonlab.runs.files import write_aside

REPORT_SUFFIX, ANSWERS_SUFFIX = ".report.json", ".answers"
TINY_PROBLEMS = 400
AUTO_BALANCE = 2.0  # times the median family
MANY_CUT = 0.2  # a share of cut guesses that says the model reasons although it was told not to

DESCRIPTION = "Choose training problems as in Kimi k1.5: structure, guesses without reasoning, pass rate, families."
EXAMPLES = """example: reasonlab data curate tiny --model tiny-1m --out curated.jsonl

more:
  reasonlab data curate my-pool.jsonl --model ~/models/Qwen3-0.6B --out curated/mine.jsonl --size 4000
  reasonlab data curate dapo_math_17k --data ~/sets --model http://localhost:8000/v1 --out curated/dapo.jsonl.gz
  reasonlab data curate my-pool.jsonl --samples 0 --guesses 0 --out structure-only.jsonl      (needs no model)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", metavar="POOL", help="a .jsonl or .jsonl.gz file, a registered training set, or tiny")
    parser.add_argument("--model", help="who answers: a bundled name, a checkpoint, a GGUF file, or an endpoint's URL")
    parser.add_argument("--out", type=Path, required=True, metavar="CURATED.jsonl", help="file for the chosen problems")
    choice = parser.add_argument_group("what is chosen")
    choice.add_argument("--samples", type=int, default=10, metavar="N", help="answers for the pass rate (0: skip)")
    choice.add_argument("--guesses", type=int, default=8, metavar="N", help="answers without reasoning (0: skip)")
    choice.add_argument("--easy", type=float, default=0.9, metavar="RATE", help="drop pass rates above this")
    choice.add_argument("--drop-unsolved", action="store_true", help="drop pass rate 0 as well (the report does not)")
    choice.add_argument(
        "--balance",
        default="auto",
        metavar="X|auto|off",
        help=f"no family above X times the median family (auto: {AUTO_BALANCE:g})",
    )
    choice.add_argument("--size", type=int, metavar="N", help="keep N, evenly over families and pass rates")
    pool = parser.add_argument_group("what is asked")
    pool.add_argument("--limit", type=int, metavar="N", help="look at N rows of the pool only, drawn by key")
    pool.add_argument("--problems", type=int, metavar="N", help=f"pool tiny only (default: {TINY_PROBLEMS})")
    pool.add_argument("--levels", help="pool tiny only, comma-separated (default: 2,3,4,5)")
    how = parser.add_argument_group("how answers are sampled")
    how.add_argument("--temperature", type=float, default=1.0)
    how.add_argument("--top-p", type=float, default=1.0)
    how.add_argument("--max-tokens", type=int, help="default: 160 for the tiny models, else 4096")
    how.add_argument("--template-arg", action="append", metavar="NAME=VALUE", help="for the chat template; repeatable")
    how.add_argument("--seed", type=int, default=0)
    where = parser.add_argument_group("where it runs")
    where.add_argument("--threads", type=int, default=2)
    add_device_argument(where)
    where.add_argument("--endpoint-model", metavar="NAME", help="which model of the endpoint")
    where.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="VARIABLE", help="holds the endpoint's key")
    where.add_argument("--concurrency", type=int, default=16, help="requests under way at the same time")
    where.add_argument("--retries", type=int, default=5, help="further attempts for each answer")
    where.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for each request")
    parser.add_argument("--data", help=f"directory with the training sets, or hub (default: ${DATA_VARIABLE})")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(force="")  # `open_model` looks for it; only an evaluation can force a style


def run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """`words` is the command line, for the report."""
    ratio = _checked(arguments)
    candidates = _pool(arguments)
    remove_unfit(candidates)
    model = _measure(arguments, candidates) if arguments.samples or arguments.guesses else {}
    if arguments.samples:
        left = remaining(candidates)
        if left and model["failed"] and all(candidate.pass_rate is None for candidate in left):
            text = f"no pass rate could be measured: {model['failed']} answers never came; nothing was written"
            print(f"error: {text}", file=sys.stderr)
            return 1
        remove_by_pass_rate(candidates, arguments.easy, arguments.drop_unsolved)
    if ratio is not None:
        balance(candidates, ratio, arguments.seed)
    if arguments.size is not None:
        cut_to_size(candidates, arguments.size, arguments.seed)
    report = {
        "version": 1,
        "pool": arguments.pool,
        "settings": _settings(arguments, ratio),
        "model": model,
        **counts(candidates),
        "families": counts_by_family(candidates),
        "reasonlab": __version__,
        "command": ["reasonlab", "data", *words],
    }
    kept = write_curated(candidates, arguments.out)
    report_path = _beside(arguments.out, REPORT_SUFFIX)
    write_aside(report_path, orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    if arguments.json:
        sys.stdout.buffer.write(report_path.read_bytes())
        sys.stdout.flush()
    else:
        _print(report)
    _last_words(arguments, report, kept)
    return 0


def _checked(arguments: argparse.Namespace) -> float | None:
    """Refuse what makes no sense before anything is read; the balance as a number, None for off."""
    out, pool = arguments.out, Path(arguments.pool)
    if not out.name.endswith(OWN_FILE_SUFFIXES):
        raise UserError(f"{out} does not end in .jsonl or .jsonl.gz", "Rename it: the curated pool is JSON lines")
    if pool.exists() and out.exists() and pool.samefile(out):
        raise UserError("--out is the pool itself", "Choose another file: the pool is not changed")
    if arguments.samples < 0 or arguments.guesses < 0:
        raise UserError("--samples and --guesses count answers", "Give 0 or more")
    if not 0 <= arguments.easy <= 1:
        raise UserError(f"--easy {arguments.easy:g} is no pass rate", "Give a number from 0 to 1")
    for name in ("size", "limit", "problems"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise UserError(f"--{name} {getattr(arguments, name)} leaves nothing", "Give a positive number")
    if arguments.pool != TINY and (arguments.problems or arguments.levels):
        raise UserError("--problems and --levels are for the pool tiny", "Use --limit for other pools")
    ratio = _ratio(arguments.balance)
    if arguments.samples or arguments.guesses:
        if not arguments.model:
            raise UserError("curate needs a model that answers", "Give --model, or --samples 0 --guesses 0")
        if arguments.temperature <= 0:
            raise UserError("at temperature 0 all answers to a problem are the same", "Give a --temperature above 0")
    return ratio


def _ratio(text: str) -> float | None:
    if text in ("off", "auto"):
        return AUTO_BALANCE if text == "auto" else None
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 1 <= ratio < float("inf"):
        raise UserError(f"--balance {text} is not a number from 1 on", "For instance --balance 1.5, auto or off")
    return ratio


def _pool(arguments: argparse.Namespace) -> list[Candidate]:
    try:
        levels = [int(word) for word in arguments.levels.split(",")] if arguments.levels else TINY_LEVELS
    except ValueError:
        raise UserError(f"--levels {arguments.levels!r} is not a list of numbers", "For instance 2,3") from None
    candidates = read_pool(arguments.pool, arguments.data, arguments.problems or TINY_PROBLEMS, levels)
    return limited(candidates, arguments.limit) if arguments.limit else candidates


def _measure(arguments: argparse.Namespace, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Let the model guess, take out what it guessed, and measure the pass rates of the rest."""
    # Only here: a model needs torch, and the rooms of models lie above this one.
    from reasonlab.evaluate.pass_rates import Examiner
    from reasonlab.terminal import make_observer

    failed, guesses_cut = 0, 0
    with make_observer(0, f"curate {arguments.pool}", quiet=arguments.json) as observer:
        examiner = Examiner(arguments, _beside(arguments.out, ANSWERS_SUFFIX), observer.progress)
        if arguments.guesses:
            asked = remaining(candidates)
            tallies = examiner.guesses([candidate.problem for candidate in asked], arguments.guesses)
            for candidate in asked:
                candidate.guessed = tallies[candidate.problem.id].correct
            failed += sum(tally.failed for tally in tallies.values())
            guesses_cut = sum(tally.cut for tally in tallies.values())
            remove_guessable(candidates)
        if arguments.samples:
            asked = remaining(candidates)
            tallies = examiner.samples([candidate.problem for candidate in asked], arguments.samples)
            for candidate in asked:
                candidate.pass_rate = tallies[candidate.problem.id].rate
            failed += sum(tally.failed for tally in tallies.values())
    guessed = sum(candidate.guessed is not None for candidate in candidates) * arguments.guesses
    return {
        "name": examiner.model.place,
        **examiner.model.identity,
        "max_tokens": examiner.model.sampling.max_tokens,
        "guesses": guessed,
        "guesses_cut": guesses_cut,
        "failed": failed,
    }


def _settings(arguments: argparse.Namespace, ratio: float | None) -> dict[str, Any]:
    names = (
        "samples",
        "temperature",
        "top_p",
        "max_tokens",
        "guesses",
        "easy",
        "drop_unsolved",
        "size",
        "limit",
        "seed",
    )
    chosen = {name: getattr(arguments, name) for name in names}
    tiny = {"problems": arguments.problems or TINY_PROBLEMS, "levels": arguments.levels or "2,3,4,5"}
    return {**chosen, "balance": ratio, "seed": arguments.seed, **(tiny if arguments.pool == TINY else {})}


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name.removesuffix(".gz").removesuffix(".jsonl") + suffix)


# --- the report on the terminal --------------------------------------------------------------------------------------

_COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("unfit", STRUCTURE),
    (GUESSABLE, (GUESSABLE,)),
    (NOT_MEASURED, (NOT_MEASURED,)),
    (TRIVIAL, (TRIVIAL,)),
    (UNSOLVED, (UNSOLVED,)),
    ("cap", (FAMILY_CAP,)),
    ("size", (BEYOND_SIZE,)),
)


def _print(report: dict[str, Any]) -> None:
    told = ", ".join(f"{reason} {count}" for reason in STRUCTURE if (count := report["removed"][reason]))
    used = [(name, reasons) for name, reasons in _COLUMNS if _sum(report, reasons)]
    families = {**report["families"], "all": report} if len(report["families"]) > 1 else {"all": report}
    measured = report["pass_rate"]["measured"]["mean"] is not None
    table = [
        ["family", "rows", *(name for name, _ in used), "kept", *(["pass rate", "of the kept"] if measured else [])]
    ]
    for family, found in families.items():
        cells = [str(_sum(found, reasons) or "-") for _, reasons in used]
        rates = [_percent(found["pass_rate"][which]["mean"]) for which in ("measured", "kept")] if measured else []
        table.append([family, str(found["rows"]), *cells, str(found["kept"]), *rates])
    _print_table(table)
    if told:
        print(f"\nunfit: {told}")
    if measured:
        print()
        rows = [
            [f"problems {which}", *(str(report["pass_rate"][which]["histogram"][name]) for name in BINS)]
            for which in ("measured", "kept")
        ]
        _print_table([["pass rate", *BINS], *rows])


def _sum(found: dict[str, Any], reasons: Sequence[str]) -> int:
    return sum(found["removed"][reason] for reason in reasons)


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        print("  ".join([name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]))


def _last_words(arguments: argparse.Namespace, report: dict[str, Any], kept: int) -> None:
    out, model = arguments.out, report["model"]
    text = f"\nwrote {kept:,} of {report['rows']:,} problems to {out}, and {_beside(out, REPORT_SUFFIX).name} beside it"
    if arguments.pool != TINY:
        text += f"\ncompare it with the benchmarks before training: reasonlab data check {out}"
    print(text, file=sys.stderr if arguments.json else sys.stdout)
    if model.get("failed"):
        print(f"warning: {model['failed']} answers never came; the same command asks for them again", file=sys.stderr)
    if model.get("guesses_cut", 0) > MANY_CUT * model.get("guesses", 0):
        share = 100 * model["guesses_cut"] / model["guesses"]
        text = f"{share:.0f} % of the guesses were cut off: the model reasons although it was told not to"
        print(f"warning: {text}; --template-arg enable_thinking=false may help", file=sys.stderr)
    if not kept:
        print("warning: no problem is left; try --guesses 0, or a higher --easy", file=sys.stderr)
