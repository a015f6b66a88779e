"""What the rule of `reasonlab/grading/finished.py` costs honest answers, and what still gets around it.

    python benchmarks/grading_finished.py --data DIR [--answers EVALUATION]

rewrites   other spellings of every gold (those of `grading.py`), with their questions: none should be lost
honest     answers in PRM800K and ProcessBench that are worth the gold answer: those that the rule changes are printed
copies     formulas of MATH's training questions that are worth the gold answer in another form, as they are and in
           disguises: how many are accepted
answers    of an evaluation (`answers.jsonl` in its directory): right answers that the rule changes, and how many of
           them math-verify accepts
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from grading import SKIPPED, rewrites

from reasonlab.grading.equivalence import AS_WRITTEN
from reasonlab.grading.finished import FORMULA
from reasonlab.grading.grade import Grade
from reasonlab.grading.normalise import normalise
from reasonlab.grading.pool import shared_pool
from reasonlab.grading.verifier import grade_quickly

MOST = 3000  # problems of a set
DISGUISES: dict[str, Callable[[str], str]] = {
    "as it is": lambda f: f,
    "times one": lambda f: rf"1 \cdot ({f})",
    "plus nothing": lambda f: f"{f} + 0",
    "over one": lambda f: rf"\frac{{{f}}}{{1}}",
    "twice inverted": lambda f: rf"\frac{{1}}{{\frac{{1}}{{{f}}}}}",
    "x A / x": lambda f: rf"\frac{{x({f})}}{{x}}",
    "root of the square": lambda f: rf"\sqrt{{({f})^2}}",
    "exp of ln": lambda f: rf"\exp(\ln({f}))",
    "absolute value": lambda f: f"|{f}|",
    "approximately 7": lambda f: rf"{f} \approx 7",
    "in quotes": lambda f: f"'{f}'",
}


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from map(json.loads, lines)


def right(answer: str, gold: str, question: str | None = None, kind: Any = "answer") -> Grade | None:
    """The grade without math-verify, where it is `correct`."""
    grade = grade_quickly(answer, gold, "free", kind, question=question)
    return grade if isinstance(grade, Grade) and grade.verdict == "correct" else None


def measure_rewrites(data: Path) -> str:
    seen = lost = 0
    for path in sorted(data.glob("*.jsonl*")):
        if path.name.startswith(SKIPPED):
            continue
        for row in islice(lines_of(path), MOST):
            gold = str(row.get("answer") or "")
            for _, rewrite in rewrites(gold) if gold else ():
                if right(rewrite, gold):
                    seen += 1
                    lost += right(rewrite, gold, row["problem"]) is None
    return f"rewrites: {lost} of {seen:,} lost"


def honest_answers(data: Path) -> Iterator[tuple[str, str, str, str]]:
    """Answer, gold, question, kind."""
    for path in sorted(data.glob("processbench_*")):
        for row in lines_of(path):
            yield "\n".join(row["steps"]), str(row["answer"]), row["problem"], "text"
    golds = {
        "".join(r["problem"].split()): r["answer"]
        for n in ("math_train.jsonl.gz", "math500.jsonl")
        for r in lines_of(data / n)
    }
    for path in sorted(data.glob("prm800k_*")):
        for row in lines_of(path):
            gold = golds.get("".join(row["problem"].split()))
            if row["is_solution"] and row["answer"] and gold:
                yield str(row["answer"]), gold, row["problem"], "answer"


def measure_honest(data: Path) -> str:
    seen, changed = 0, []
    for answer, gold, question, kind in honest_answers(data):
        if grade := right(answer, gold, kind=kind):
            seen += 1
            if right(answer, gold, question, kind) is None:
                changed.append(f"  {grade.extracted} for {gold}")
    return "\n".join([f"honest: {len(changed)} of {seen:,} changed", *changed])


def measure_copies(data: Path) -> str:
    copies, accepted = 0, Counter(dict.fromkeys(DISGUISES, 0))
    for row in lines_of(data / "math_train.jsonl.gz"):
        gold, question = row["answer"], row["problem"]
        for groups in FORMULA.findall(question):
            formula = "".join(groups).strip().rstrip(".,?= ")
            by_worth = right(formula, gold)
            if by_worth is None or by_worth.rule in AS_WRITTEN:
                continue
            copies += 1
            for name, disguised in DISGUISES.items():
                accepted[name] += right(disguised(formula), gold, question) is not None
    return f"copies: of {copies} " + ", ".join(f"{name} {count}" for name, count in accepted.items())


def measure_answers(path: Path) -> str:
    seen, changed = 0, []
    for row in lines_of(path / "answers.jsonl"):
        grade = grade_quickly(row["extracted"] or "", row["gold"], kind="answer")
        if row["extracted"] is None or not isinstance(grade, Grade) or grade.verdict != "correct":
            continue
        seen += 1
        if right(row["extracted"], row["gold"], row["question"]) is None:
            changed.append((row["extracted"], row["gold"]))
    accepted = sum(shared_pool().ask(normalise(a), normalise(g)).get("equal") is True for a, g in changed)
    return f"answers: {len(changed)} of {seen:,} changed; math-verify accepts {accepted} of them"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with the benchmark files")
    parser.add_argument("--answers", type=Path, nargs="*", default=[], help="directories of `reasonlab eval`")
    arguments = parser.parse_args()
    if not (arguments.data / "math_train.jsonl.gz").is_file():
        parser.error(f"there is no math_train.jsonl.gz in {arguments.data}: see docs/benchmarks.md")
    for measure in (measure_rewrites, measure_honest, measure_copies):
        print(measure(arguments.data), flush=True)
    for path in arguments.answers:
        print(path, measure_answers(path), flush=True)


if __name__ == "__main__":
    main()
