"""Step labels that people gave: PRM800K and ProcessBench, as JSON lines (plain or gzip) in the form in which they are
commonly kept.

ProcessBench: one line a solution, `id`, `problem`, `steps` (texts), `label` (index of the first wrong step, -1 for
none), and where known `generator` and `final_answer_correct`. Steps after the first wrong one have no label of their
own and count as wrong.

PRM800K: one line a step, `id`, `problem`, `prev_steps` (texts), `step`, `rating` (-1, 0 or 1; absent for steps that a
labeller wrote, which count as right). The lines are put together into whole beginnings of solutions: one for each step
that no other line goes on from. A neutral step (0) counts as right by default, as in the original work; 0.5 keeps the
difference, and is not wrong either.

The texts of the steps are joined by blank lines. Because a step may hold a blank line itself, candidates say where
their steps end (`step_ends`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from reasonlab.errors import UserError
from reasonlab.judges.labels import ALL_RIGHT, StepLabels
from reasonlab.judges.types import Candidate, Labelled
from reasonlab.problems.sources import json_lines

_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class Example:
    """A candidate with labels from data."""

    candidate: Candidate
    labels: StepLabels

    @property
    def labelled(self) -> Labelled:
        return self.labels.labelled(self.candidate)


def read_processbench(path: Path) -> list[Example]:
    """The solutions of one ProcessBench file; the family is the file's name without its endings."""
    family = path.name.split(".")[0]
    examples = []
    for number, _, row in json_lines(path):
        problem, steps, label = row.get("problem"), row.get("steps"), row.get("label")
        if not isinstance(problem, str) or not isinstance(steps, list) or not steps or not _are_texts(steps):
            raise _mistake(path, number, "`problem` is a text and `steps` a list of texts")
        if not isinstance(label, int) or isinstance(label, bool) or not ALL_RIGHT <= label < len(steps):
            raise _mistake(path, number, f"`label` is -1 or the index of one of {len(steps)} steps, not {label!r}")
        correct = row.get("final_answer_correct")
        candidate = _candidate(
            str(row.get("id", f"{family}-{number}")),
            problem,
            steps,
            family,
            correct if isinstance(correct, bool) else None,
            str(row.get("generator", "")),
        )
        examples.append(Example(candidate, StepLabels.until(label, len(steps))))
    return examples


def read_prm800k(path: Path, neutral: float = 1.0) -> list[Example]:
    """The solutions of a PRM800K file of steps, as far as they were labelled; a rating of 0 counts `neutral`."""
    if not 0.5 <= neutral <= 1:
        raise UserError(f"a neutral step cannot count {neutral:g}", "It is not wrong: give a number from 0.5 to 1")
    worth = {-1: 0.0, 0: neutral, 1: 1.0, None: 1.0}
    values: dict[tuple[str, ...], float] = {}  # of the last step, by problem and steps
    gone_on_from: set[tuple[str, ...]] = set()
    for number, _, row in json_lines(path):
        problem, before, step, rating = (row.get(name) for name in ("problem", "prev_steps", "step", "rating"))
        if not isinstance(problem, str) or not isinstance(before, list) or not _are_texts([*before, step]):
            raise _mistake(path, number, "`problem` and `step` are texts and `prev_steps` is a list of texts")
        if rating not in worth or isinstance(rating, bool | float):
            raise _mistake(path, number, f"`rating` is -1, 0 or 1 or absent, not {rating!r}")
        so_far = (problem, *before, step)
        values[so_far] = min(worth[rating], values.get(so_far, 1.0))  # rated twice: the worse opinion counts
        gone_on_from.update(so_far[:length] for length in range(2, len(so_far)))
    if missing := gone_on_from - values.keys():
        step = min(missing)[-1]
        raise UserError(f"{path} goes on from a step that it does not rate: {step!r}", "Fetch the whole file")
    examples = []
    for problem, *steps in values:
        if (problem, *steps) not in gone_on_from:
            labels = StepLabels.of([values[problem, *steps[:length]] for length in range(1, len(steps) + 1)])
            name = f"prm800k-{blake2b(problem.encode(), digest_size=6).hexdigest()}"
            examples.append(Example(_candidate(name, problem, steps, "prm800k"), labels))
    return examples


def _candidate(
    name: str, problem: str, steps: Sequence[str], family: str, correct: bool | None = None, source: str = ""
) -> Candidate:
    parts = [*(step + _BETWEEN for step in steps[:-1]), steps[-1]]
    ends: list[int] = []
    for part in parts:
        ends.append((ends[-1] if ends else 0) + len(part))
    return Candidate(name, problem, "".join(parts), "", correct, family, 0, source, tuple(ends))


def _are_texts(values: Sequence[object]) -> bool:
    return all(isinstance(text, str) and text for text in values)


def _mistake(path: Path, number: int, what: str) -> UserError:
    return UserError(f"{path}, line {number}: {what}", "judges/label_data.py says what a line holds")
