"""`reasonlab judge bench rm | processbench | best-of-n`: how well a judge chooses answers and finds mistakes."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reasonlab.errors import UserError
from reasonlab.judges.opened import EXACT, JUDGE_HELP, POOL_HELP, add_judge_arguments, add_ranking_arguments

if TYPE_CHECKING:  # which import numpy
    from reasonlab.judges.bench import Questions
    from reasonlab.judges.opened import JudgeAtWork
    from reasonlab.judges.process_bench import ProcessScore, Threshold
    from reasonlab.judges.types import Candidate

EXAMPLES = """example: reasonlab judge bench rm pool.jsonl --judge runs/judge-1

more:
  reasonlab judge bench rm evals/served --scores scores.jsonl --k 8 --seeds 100 --out rm8.json
  reasonlab judge bench processbench --data ~/sets --judge ~/models/Qwen2.5-Math-PRM-7B --device cuda --bfloat16
  reasonlab judge bench processbench gsm8k.jsonl math.jsonl --judge runs/prm --choose-on gsm8k
  reasonlab judge bench best-of-n pool.jsonl --scores scores.jsonl --n 1,2,4,8"""
DESCRIPTIONS = {
    "rm": "rm@k by family: the accuracy of the best-scored of k answers, beside majority, oracle and a random answer.",
    "processbench": "F1 of finding the first wrong step, in files of ProcessBench's layout or of `judge label`.",
    "best-of-n": "Accuracy against the number of answers: best-of-N, weighted majority, majority, oracle.",
}
KEPT = """

What --judge says is kept beside the pool (POOL.judged-…, one file a judge): a killed benchmark goes on, and another one
of the same pool asks the judge nothing."""
FIXED = 0.5  # a probability below which a step is called wrong, fixed before anything was scored


def add_arguments(parser: argparse.ArgumentParser, shape: dict[str, Any]) -> None:
    parts = parser.add_subparsers(dest="bench", required=True, metavar="rm|processbench|best-of-n")
    made = {
        name: parts.add_parser(name, description=text + KEPT, epilog=EXAMPLES, **shape)
        for name, text in DESCRIPTIONS.items()
    }
    for name, part in made.items():
        if name == "processbench":
            part.add_argument("files", nargs="*", type=Path, metavar="FILE", help="JSON lines; or --data")
            part.add_argument("--data", metavar="DIR", help="directory with the registered processbench_* files")
            part.add_argument("--threshold", type=float, help=f"a step below it is called wrong (default: {FIXED})")
            part.add_argument("--choose-on", metavar="SPLIT", help="choose the threshold on this split, score the rest")
            part.add_argument("--judge", required=True, metavar="J", help=JUDGE_HELP)
        else:
            part.add_argument("pool", type=Path, metavar="POOL", help=POOL_HELP)
            part.add_argument("--judge", metavar="J", help=JUDGE_HELP)
            part.add_argument("--scores", type=Path, metavar="FILE", help="scores of this pool (`judge score`)")
            add_ranking_arguments(part)
        part.add_argument("--out", type=Path, metavar="FILE.json", help="write the results here")
        part.add_argument("--json", action="store_true", help="print the results as JSON")
        part.add_argument("--seed", type=int, default=0, help="of draws and resamples")
        add_judge_arguments(part)
    made["rm"].add_argument("--k", type=int, default=8, help="answers to choose from (default: 8)")
    made["rm"].add_argument("--seeds", type=int, default=100, help="draws of k answers, as published (default: 100)")
    made["best-of-n"].add_argument("--n", default="1,2,4,8", metavar="N,…", help="numbers of answers")
    made["best-of-n"].add_argument(
        "--weight",
        choices=["auto", "score", "sigmoid"],
        default="auto",
        help="of a vote; auto: the score if it is a probability, else its logistic function",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.out is not None and arguments.out.exists():
        raise UserError(f"{arguments.out} exists", "Choose another --out, or remove it")
    what = {"rm": _rm, "processbench": _processbench, "best-of-n": _best_of_n}[arguments.bench]
    results = what(arguments)
    if arguments.json:
        print(json.dumps(results, indent=1))
    if arguments.out is not None:
        from reasonlab.runs.files import write_aside

        write_aside(arguments.out, json.dumps(results, indent=1).encode() + b"\n")
        if not arguments.json:
            print(f"wrote {arguments.out}")
    return 0


# --- pools -------------------------------------------------------------------------------------------------------


def _rm(arguments: argparse.Namespace) -> dict[str, Any]:
    from reasonlab.judges.bench import reward_bench
    from reasonlab.judges.inputs import percent, print_table

    if arguments.k < 1 or arguments.seeds < 2:
        raise UserError("--k is at least 1 and --seeds at least 2", "As published: --k 8 --seeds 100")
    questions, judge, _ = _questions(arguments)
    rows = reward_bench(questions.families, arguments.k, arguments.seeds, arguments.seed)
    k = arguments.k
    if not arguments.json:
        heads = ("family", "questions", f"rm@{k}", f"rm@{k}, {arguments.seeds} seeds", f"maj@{k}", f"pass@{k}", "one")
        table = [heads]
        for family, row in rows.items():
            drawn = f"{100 * row.rm_drawn.mean:.1f} % ± {100 * row.rm_drawn.error:.2f}"
            cells = (percent(row.rm), drawn, percent(row.majority), percent(row.oracle), percent(row.single))
            table.append((family or "(no family)", f"{row.questions:,}", *cells))
        print_table(table)
        short = max(row.short for row in rows.values())
        print(
            f"judge: {judge}; intervals are over questions, ± is the standard error of the draws"
            + _left_out(
                (short, f"questions with fewer than {k} graded answers"), (questions.ungraded, "ungraded candidates")
            )
        )
    data = {
        family: {**asdict(row), "rm_drawn": {**asdict(row.rm_drawn), "error": row.rm_drawn.error}}
        for family, row in rows.items()
    }
    return {"bench": "rm", "judge": judge, "k": k, "ungraded": questions.ungraded, "families": data}


def _best_of_n(arguments: argparse.Namespace) -> dict[str, Any]:
    from reasonlab.judges.bench import selection_curves
    from reasonlab.judges.inputs import percent, print_table

    try:
        numbers = sorted({int(n) for n in arguments.n.split(",")})
    except ValueError:
        raise UserError(f"--n {arguments.n} is no list of numbers", "For instance --n 1,2,4,8") from None
    questions, judge, probability = _questions(arguments)
    everything = [question for family in questions.families.values() for question in family]
    kept = [question for question in everything if len(question.scores) >= max(numbers)]
    if not kept:
        raise UserError(f"no question has {max(numbers)} graded answers", "Choose smaller --n")
    weight = vote_weight(arguments.weight, probability, min(float(q.scores.min()) for q in kept))
    curves = selection_curves(kept, numbers, weight, seed=arguments.seed)
    columns = {
        "best-of-N": curves.best_of_n,
        "weighted majority": curves.weighted_majority,
        "majority": curves.majority,
        "oracle": curves.oracle,
    }
    if not arguments.json:
        print_table(
            [("N", *columns), *((str(n), *(percent(c[i]) for c in columns.values())) for i, n in enumerate(numbers))]
        )
        short = len(everything) - len(kept)
        print(
            f"judge: {judge}; {len(kept):,} questions, votes weighted by the {_weight_in_words(weight)}"
            + _left_out(
                (short, f"questions with fewer than {max(numbers)} graded answers"),
                (questions.ungraded, "ungraded candidates"),
            )
        )
    data = {name: [asdict(interval) for interval in intervals] for name, intervals in columns.items()}
    return {"bench": "best-of-n", "judge": judge, "n": numbers, "weight": weight, "questions": len(kept), **data}


def _questions(arguments: argparse.Namespace) -> tuple[Questions, str, bool | None]:
    """The pool with its scores by family and question, whose scores they are, and whether they are probabilities."""
    from reasonlab.judges.bench import by_question
    from reasonlab.judges.inputs import given_or_scored, read_candidates

    candidates = read_candidates(arguments.pool)
    if all(candidate.correct is None for candidate in candidates):
        raise UserError(f"no candidate of {arguments.pool} says whether it is right", "Grade the pool: set `correct`")
    kept = partial(_kept_beside, arguments.pool)
    scored, probability, judge = given_or_scored(arguments, candidates, kept, arguments.json)
    values = [one.overall(arguments.alpha, arguments.steps) for one in scored]
    return by_question(candidates, values), judge, probability


def _kept_beside(pool: Path, judging: JudgeAtWork) -> Path | None:
    """Where the judge's scores of a pool stay. Those of the judge that knows are made sooner than read."""
    from reasonlab.judges.score_log import kept_beside

    if judging.place == EXACT:
        return None
    path = kept_beside(pool, judging.identity)
    if os.access(path if path.exists() else path.parent, os.W_OK):
        return path
    print(f"note: the scores are not kept, because {path} cannot be written", file=sys.stderr)
    return None


def vote_weight(named: str, probability: bool | None, lowest: float) -> Literal["score", "sigmoid"]:
    """What a vote counts. Where nobody knows if scores are probabilities, negative ones say that they are not."""
    if named == "auto":
        return "score" if (lowest >= 0 if probability is None else probability) else "sigmoid"
    return "sigmoid" if named == "sigmoid" else "score"


def _weight_in_words(weight: str) -> str:
    return "score" if weight == "score" else "logistic function of the score"


def _left_out(*parts: tuple[int, str]) -> str:
    return "".join(f"; {count:,} {what} left out" for count, what in parts if count)


# --- steps -------------------------------------------------------------------------------------------------------


def _processbench(arguments: argparse.Namespace) -> dict[str, Any]:
    from reasonlab.judges.inputs import open_from, percent, print_table, scored_by
    from reasonlab.judges.process_bench import Threshold, choose_threshold, process_bench

    if arguments.threshold is not None and arguments.choose_on is not None:
        raise UserError("--threshold and --choose-on are two ways to the same thing", "Give one of them")
    splits = _splits(arguments)
    if arguments.choose_on is not None and arguments.choose_on not in splits:
        raise UserError(f"there is no split {arguments.choose_on!r}", f"The splits are {', '.join(splits)}")
    if arguments.choose_on is not None and len(splits) == 1:
        raise UserError("nothing is left to score", "Give another split beside the one to choose the threshold on")
    judging = open_from(arguments)
    if not judging.scores_steps:
        raise UserError(f"{judging.place} gives no scores to steps", "ProcessBench is for process judges")
    steps: dict[str, list[tuple[float, ...]]] = {}
    for name, split in splits.items():
        judging.in_windows = 0  # each split has a notice of its own
        pool = [candidate for candidate, _ in split.examples]
        scored = scored_by(judging, pool, _kept_beside(split.file, judging), arguments.json)
        steps[name] = [one.steps for one in scored]
    labels = {name: [first_wrong for _, first_wrong in split.examples] for name, split in splits.items()}
    if arguments.choose_on is not None:
        threshold = choose_threshold(steps[arguments.choose_on], labels[arguments.choose_on], arguments.choose_on)
    else:
        threshold = Threshold(FIXED if arguments.threshold is None else arguments.threshold)
    rows = {
        name: process_bench(steps[name], labels[name], name, threshold, arguments.seed)
        for name in splits
        if name != arguments.choose_on
    }
    mean = sum(row.f1.estimate for row in rows.values()) / len(rows)
    if not arguments.json:
        table = [("split", "wrong", "right", "F1", "error found", "right passed", "noticed", "blind F1")]
        for name, row in rows.items():
            cells = (percent(row.f1), percent(row.location), percent(row.passed), f"{100 * row.noticed:.1f} %")
            blind = f"{100 * row.blind:.1f} %"
            table.append((name, f"{row.wrong_samples:,}", f"{row.right_samples:,}", *cells, blind))
        print_table(table)
        if len(rows) > 1:
            print(f"mean F1 of {len(rows)} splits = {100 * mean:.1f} %")
        print(f"judge: {judging.place}; {_threshold_in_words(threshold)}")
    return _process_data(judging.place, threshold, rows, mean)


class _Split(NamedTuple):
    file: Path
    examples: list[tuple[Candidate, int]]  # with their first wrong step


def _splits(arguments: argparse.Namespace) -> dict[str, _Split]:
    """The files by their names."""
    files = list(arguments.files)
    if not files:
        from reasonlab.problems.registry import benchmarks
        from reasonlab.problems.sources import local_file

        entries = [entry for name, entry in benchmarks().items() if name.startswith("processbench_")]
        files = [file for entry in entries if (file := local_file(entry, arguments.data)) is not None]
        if not files:
            raise UserError(
                "there are no files of ProcessBench here", "Name files, or --data DIR with processbench_gsm8k.jsonl, …"
            )
    found: dict[str, _Split] = {}
    for file in files:
        name = file.name.split(".")[0].removeprefix("processbench_")
        if name in found:
            raise UserError(f"two files are called {name}", "A split has the name of its file: rename one of them")
        found[name] = _Split(file, _examples(file))
    return found


def _examples(file: Path) -> list[tuple[Candidate, int]]:
    from reasonlab.judges.label_data import read_processbench
    from reasonlab.judges.labels import StepLabels
    from reasonlab.judges.types import read_labels
    from reasonlab.problems.sources import json_lines

    if not file.is_file():
        raise UserError(f"there is no file {file}", "Give JSON lines in the layout of ProcessBench or `judge label`")
    first = next(iter(json_lines(file)), None)
    if first is None:
        raise UserError(f"{file} is empty", "Fetch it again")
    if "step_labels" in first.row:
        return [(one.candidate, StepLabels.of(one.steps).first_wrong) for one in read_labels(file)]
    return [(example.candidate, example.labels.first_wrong) for example in read_processbench(file)]


def _threshold_in_words(threshold: Threshold) -> str:
    if not threshold.split:
        return f"a step below {threshold.value:g} is called wrong, fixed beforehand"
    return (
        f"a step below {threshold.value:.4g} is called wrong, chosen on {threshold.split} "
        f"(F1 {100 * threshold.f1:.1f} % there), which is therefore not scored"
    )


def _process_data(judge: str, threshold: Threshold, rows: dict[str, ProcessScore], mean: float) -> dict[str, Any]:
    told = {**asdict(threshold), "f1": None if math.isnan(threshold.f1) else threshold.f1}
    data = {name: {k: v for k, v in asdict(row).items() if k != "threshold"} for name, row in rows.items()}
    return {"bench": "processbench", "judge": judge, "threshold": told, "mean_f1": mean, "splits": data}
