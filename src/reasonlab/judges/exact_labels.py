"""Exact labels for the tiny world, where the true steps of every problem are known.

A step of a thought is *right* if

1. everything it says is true: the result of its operation, the equation of its check, and the verdict on the result;
2. and it belongs there. It is the next step of the worked solution (terms and factors either way round), or it *leads
   on*: the response goes another way that is right, and the answer comes from this step, by way of others.

Another way (another order, other operations, steps done in the head) is right if it gives the right answer once every
operation in it is done correctly. So the response is done again as a program: an operand or an answer that is no number
of the question but the result of an earlier step takes that step's true result. A slip on another way is therefore
blamed on the slip and not on the way. There a step that takes a number from a wrong step is wrong too.

A result that the step's own check rejects is taken back, and nothing stands on it: such a step is right if the result
was wrong indeed and the check is true. The answer is the last step, right by the rule of its family. What cannot be
read is wrong. After a wrong step the others are still labelled one by one: a later step of the solution that does not
depend on it is right.

Limits, rare in what the tiny models write: another way that ends in a wrong answer for a reason beyond slips is
blamed from where it leaves the solution; a misread number that changes nothing is forgiven. The rule looks at the whole
response, which a judge cannot: a step off the solution is told from a wrong one by what comes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from reasonlab.errors import UserError
from reasonlab.grading.grade import extract_answer
from reasonlab.judges.labels import StepLabels
from reasonlab.judges.steps import steps_of
from reasonlab.judges.types import Candidate, Progress, Scored
from reasonlab.problems.curation import of_tiny_world
from reasonlab.problems.families.steps import Solution, Step
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import solution_of, verify

_NUMBER = r"[0-9]{1,12}"  # longer ones are no number of this world, and arithmetic on them is slow
_TOO_LARGE = 10**18  # a chain of squares must not keep us busy
_SAID = re.compile(
    rf"(?P<a>{_NUMBER})(?P<op>[-+*/%])(?P<b>{_NUMBER})=(?P<result>-?{_NUMBER})"
    r"(?: check (?P<check>[-+*/%=0-9]+) (?P<verdict>ok|no))?"
)
_ANSWER = re.compile(r"Answer:[^<>\n]*(?:<eos>)?\s*")
_TERM = re.compile(rf"([-+])({_NUMBER}(?:[*/%]{_NUMBER})*)")


def exact_labels(candidate: Candidate, solution: Solution | None = None) -> StepLabels:
    """Labels of 1 and 0. `solution` is for problems that cannot be drawn again from their id."""
    if solution is None:
        solution = solution_for(candidate)
    problem = _problem(candidate)
    return StepLabels.of(_Reading(problem, solution, steps_of(candidate, "tiny"), candidate.response).values())


def solution_for(candidate: Candidate) -> Solution:
    """The worked solution of a candidate's problem."""
    return _solution(_problem(candidate))


def _problem(candidate: Candidate) -> Problem:
    return Problem(candidate.problem, candidate.question, candidate.answer, candidate.family, candidate.level)


class ExactJudge:
    """The judge that knows: exact labels as scores, and 1 or 0 for the answer."""

    def score(self, candidates: Sequence[Candidate], progress: Progress | None = None) -> list[Scored]:
        found = []
        for candidate in candidates:
            labels = exact_labels(candidate)
            answer = extract_answer(candidate.response)
            found.append(Scored(labels.values, float(answer is not None and verify(_problem(candidate), answer))))
            if progress:
                progress(1)
        return found


@lru_cache(maxsize=4096)
def _solution(problem: Problem) -> Solution:
    if not of_tiny_world(problem):
        raise UserError(
            f"{problem.id} is no problem of the tiny world, so its true steps are not known",
            "Label it by Monte-Carlo rollouts or with a language model",
        )
    try:
        solution = solution_of(problem)
    except ValueError:
        raise UserError(
            f"{problem.id} cannot be drawn again from its id", "Use problems of `problem_set` or `draw`"
        ) from None
    if solution.answer != problem.answer:
        raise UserError(
            f"{problem.id} has the answer {solution.answer}, not {problem.answer!r} as in the pool",
            "Make the pool again: its problems are of another version of the families",
        )
    return solution


class _Line(NamedTuple):
    """A step as it was written."""

    step: Step
    claimed: int
    rejected: bool  # by its own check
    true: bool  # in everything it says


class _Reading:
    """A response and what is known about its problem."""

    def __init__(self, problem: Problem, solution: Solution, pieces: Sequence[str], response: str) -> None:
        self.problem, self.response = problem, response
        has_answer = bool(pieces) and bool(_ANSWER.fullmatch(pieces[-1]))
        self.lines = [_line(piece) for piece in (pieces[:-1] if has_answer else pieces)]
        self.answer = extract_answer(response) if has_answer else None
        self.has_answer = has_answer
        self.path = [_either_way(step) for step in solution.steps]
        self.asked = {int(number) for number in re.findall(_NUMBER, problem.question)}

    def values(self) -> list[float]:
        leading = self._leading() if self._another_way_is_right() else set()
        right: list[bool] = []
        done = 0  # steps of the solution that are behind us
        for place, line in enumerate(self.lines):
            if line is None or line.rejected:
                right.append(line is not None and line.true)
                continue
            # As long as nothing is wrong the next step is expected; after that, whatever of the solution comes.
            ahead = self._place_on_path(line.step, done, len(self.path) if False in right else done + 1)
            leads_on = place in leading and not any(self._is_from_a_wrong_step(n, right) for n in line.step[1:])
            right.append(line.true and (ahead is not None or leads_on))
            passed = ahead if ahead is not None else self._place_on_path(line.step, done, len(self.path))
            if passed is not None and (ahead is not None or leads_on):
                done = passed + 1
        if self.has_answer:
            right.append(self.answer is not None and verify(self.problem, self.answer))
        return [float(one) for one in right]

    def _place_on_path(self, step: Step, start: int, end: int) -> int | None:
        """Where a step stands in this part of the solution."""
        wanted = _either_way(step)
        return next((place for place in range(start, min(end, len(self.path))) if self.path[place] == wanted), None)

    def _is_from_a_wrong_step(self, number: int, right: Sequence[bool]) -> bool:
        sources = [] if number in self.asked else self._sources(number, len(right))
        return bool(sources) and not any(right[source] for source in sources)

    def _sources(self, number: int, before: int) -> list[int]:
        """The standing steps that gave a number."""
        earlier = enumerate(self.lines[:before])
        return [i for i, line in earlier if line is not None and not line.rejected and line.claimed == number]

    def _leading(self) -> set[int]:
        """The steps that the numbers of the answer come from, by way of others; of equal results, all."""
        found: set[int] = set()
        wanted = [(number, len(self.lines)) for number in _numbers(self.answer or "")]
        while wanted:
            for source in self._sources(*wanted.pop()):
                line = self.lines[source]
                if source not in found and line is not None:
                    found.add(source)
                    wanted += [(line.step.a, source), (line.step.b, source)]
        return found

    def _another_way_is_right(self) -> bool:
        """Whether the response gives the right answer if every operation is done correctly."""
        if self.answer is None:
            return False
        true: dict[int, int] = {}

        def now(number: int, before: int) -> int:
            sources = [] if number in self.asked else self._sources(number, before)
            return true[sources[-1]] if sources else number

        for place, line in enumerate(self.lines):
            if line is None or line.rejected:
                continue
            a, b = now(line.step.a, place), now(line.step.b, place)
            if b == 0 and line.step.op in "/%":
                return False
            true[place] = Step(line.step.op, a, b).result
            if abs(true[place]) > _TOO_LARGE:
                return False
        end = len(self.lines)
        answer = re.sub(_NUMBER, lambda found: str(now(int(found[0]), end)), self.answer)
        return verify(self.problem, answer)


def _line(piece: str) -> _Line | None:
    """A step read back; None if it is none."""
    text = piece.strip().removeprefix("<think>").removesuffix("</think>").removesuffix(";")
    said = _SAID.fullmatch(text)
    if said is None:
        return None
    step, claimed = Step(said["op"], int(said["a"]), int(said["b"])), int(said["result"])
    possible = step.b != 0 or step.op not in "/%"
    holds = possible and step.result == claimed
    rejected = said["verdict"] == "no"
    true = holds if said["check"] is None else possible and _equation_holds(said["check"]) and holds != rejected
    return _Line(step, claimed, rejected, true)


def _either_way(step: Step) -> Step:
    """The same step with its terms or factors in order."""
    return Step(step.op, *sorted((step.a, step.b))) if step.op in "+*" else step


def _equation_holds(text: str) -> bool:
    left, _, right = text.partition("=")
    a, b = _value(left), _value(right)
    return a is not None and a == b


def _value(expression: str) -> int | None:
    """The value of sums of products as checks have them, like 412-45*9; None if it is no such thing."""
    signed = expression if expression.startswith("-") else f"+{expression}"
    terms = list(_TERM.finditer(signed))
    if "".join(term[0] for term in terms) != signed:
        return None
    total = 0
    for sign, product in (term.groups() for term in terms):
        first, *rest = re.split(r"([*/%])", product)
        value = int(first)
        for op, factor in zip(rest[::2], map(int, rest[1::2]), strict=True):
            if factor == 0 and op in "/%":
                return None
            value = Step(op, value, factor).result
        total += value if sign == "+" else -value
    return total


def _numbers(text: str) -> Iterable[int]:
    return map(int, re.findall(_NUMBER, text))
