r"""The solutions that come with a pool of problems, as responses for a language model to imitate.

How they write the final answer decides what the model learns to write, so it is made one form, the one that the
instruction asks for:

- GSM8K's notes for a calculator (`<<48/2=24>>`) go, and its last line `#### 72` becomes `The answer is \boxed{72}.`;
- a solution that has its answer in a box (MATH) stays as it is;
- any other gets that sentence with the pool's answer at its end.

What then does not grade as right is not imitated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from reasonlab.config import Config
from reasonlab.errors import UserError
from reasonlab.methods.group import Group
from reasonlab.problems.curation import read_pool
from reasonlab.train.exchange import Exchange
from reasonlab.train.recorded import demonstration

_CALCULATOR = re.compile(r"<<[^<>]*>>")
_HASH_LINE = re.compile(r"\n?####\s*(.+?)\s*$")


def worked_solution(solution: str, answer: str) -> str:
    """A pool's solution in the form that the module describes; `answer` is the pool's."""
    text = _CALCULATOR.sub("", solution).strip()
    if "\\boxed" in text:
        return text
    marked = _HASH_LINE.search(text)
    steps = text[: marked.start()].rstrip() if marked else text
    return f"{steps}\nThe answer is \\boxed{{{marked[1].replace(',', '') if marked else answer}}}."


def solutions_of_pool(config: Config, exchange: Exchange, note: Callable[[str], None]) -> list[Group]:
    """One group for each problem of `problems.path` that has a solution which grades as right."""
    groups, without, wrong = [], 0, 0
    for candidate in read_pool(str(Path(config.problems.path).expanduser()), config.data or None):
        problem, solution = candidate.problem, candidate.row.get("solution")
        if not isinstance(solution, str) or not solution.strip() or not problem.answer:
            without += 1
            continue
        text = worked_solution(solution, problem.answer)
        grade = exchange.grade(problem, text)
        if grade.verdict == "correct":
            groups.append(Group(problem, [demonstration(problem, text, exchange)], [grade], np.ones(1)))
        else:
            wrong += 1
    if not groups:
        raise UserError(
            f"{config.problems.path} has no solutions to imitate",
            "Its rows need a column `solution`; or give demonstrations with method.data, or train by RL",
        )
    if without or wrong:
        note(f"{without} problems without a solution and {wrong} whose solution does not grade as right are left out")
    return groups
