"""The language of reflections: what went wrong in a response, what should stand there, and the rule to remember.

A reflection has the three parts of Meta-Experience Learning, in one line of about thirty tokens:

    first wrong 2:12*7=94 because 12*7=84;rule * check /

The *bifurcation point* is the first place where a response leaves the worked solution, and what it says there. The
*critique* is what should stand there. The *heuristic* is a rule without the problem's numbers. Places count the steps
of a response from 1, the answer comes last, and a step that failed its check and was done again is not counted. So an
answer without any step is wrong at place 1, where the first step should stand.

`reflect` writes the true reflection on a wrong response, and `spoiled` a wrong response with a mistake of the kind
that the tiny models make.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Literal, NamedTuple

from reasonlab.problems.families.steps import Parsed, Solution, Step, Style, parse, plausible_mistake
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import Drawn, verify

_INVERSE = {"+": "-", "-": "+", "*": "/", "/": "*", "%": "-"}  # what checks an operation
_STEP = re.compile(r"(?P<a>[0-9]+)(?P<op>[-+*/%])(?P<b>[0-9]+)=-?[0-9]+")
_PIECE = r"(?:[0-9]+[-+*/%][0-9]+=-?[0-9]+|Answer:[-+/r0-9]*)"
_REFLECTION = re.compile(
    rf"first wrong (?P<bifurcation>[1-9][0-9]*:{_PIECE}) because (?P<critique>{_PIECE})"
    r";rule (?P<heuristic>[^0-9<>;\n]+)"
)


def retrospective_prompt(question: str, wrong: str, right: str | None) -> str:
    """What a reflection is written after; without a right response it has to be found from the wrong one alone."""
    lines = [f"<bos>{question}", f"wrong:{_without_end(wrong)}"]
    if right is not None:
        lines.append(f"right:{_without_end(right)}")
    return "\n".join(lines) + "\n"


def hinted_prompt(question: str, reflection: str) -> str:
    """The question again, with a reflection to help."""
    return f"<bos>{question}\nhint {_without_end(reflection)}\n"


def _without_end(text: str) -> str:
    return text.removesuffix("<eos>")


class Reflection(NamedTuple):
    """A reflection taken apart."""

    bifurcation: str
    critique: str
    heuristic: str

    @property
    def text(self) -> str:
        return f"first wrong {self.bifurcation} because {self.critique};rule {self.heuristic}"


def parse_reflection(text: str) -> Reflection | None:
    """The parts of a reflection; None if the text is not one."""
    match = _REFLECTION.fullmatch(_without_end(text))
    return Reflection(match["bifurcation"], match["critique"], match["heuristic"]) if match else None


def heuristic_only(reflection: str) -> str | None:
    """The rule alone, as a shorter hint that cannot give anything of the solution away; None if there is none."""
    parts = parse_reflection(reflection)
    return f"rule {parts.heuristic}" if parts else None


def reflect(solution: Solution, wrong_text: str) -> str | None:
    """The true reflection on a wrong response; None if it cannot be read or does not leave the solution anywhere."""
    try:
        response = parse(wrong_text)
    except ValueError:
        return None
    expected = [f"{step.expression}={step.result}" for step in solution.steps] + [f"Answer:{solution.answer}"]
    for place, (here, there) in enumerate(zip(_pieces(response), expected, strict=False), 1):
        if not _same(here, there):
            text = Reflection(f"{place}:{here}", there, _rule(place, here, there)).text
            return text if parse_reflection(text) else None
    return None


def _pieces(response: Parsed) -> list[str]:
    """The steps that a response stands by, and its answer."""
    steps = [f"{step.expression}={step.result}" for step in response.steps if step.verdict != "no"]
    return [*steps, f"Answer:{response.answer.strip()}"]


def _same(here: str, there: str) -> bool:
    """Equal, up to the order of terms and of factors."""
    step = _STEP.fullmatch(here)
    swapped = f"{step['b']}{step['op']}{step['a']}{here[step.end('b') :]}" if step and step["op"] in "+*" else here
    return there in (here, swapped)


def _rule(place: int, here: str, there: str) -> str:
    """The heuristic, from what stands somewhere and what should."""
    mine, true = _STEP.fullmatch(here), _STEP.fullmatch(there)
    if mine is None:
        if true is None:
            return "check Answer"
        return "not Answer first" if place == 1 else "more to Answer"
    if true is None:
        return "no more"
    op = true["op"]
    if mine["op"] != op:
        return f"{op} not {mine['op']}"
    pairs = [(mine["a"], mine["b"]), (mine["b"], mine["a"])]
    same_numbers = (true["a"], true["b"]) in (pairs if op in "+*" else pairs[:1])
    return f"{op} check {_INVERSE[op]}" if same_numbers else "check numbers"


# Wrong responses ---------------------------------------------------------------------------------------------------

Mistake = Literal["slip", "numbers", "operation", "skip", "extra", "answer"]
# About as often as in the wrong responses of tiny-1m that show steps.
MISTAKE_SHARES: dict[Mistake, float] = {
    "slip": 0.65,  # the result of a step is wrong
    "numbers": 0.18,  # a step is done with another number
    "operation": 0.03,  # a step is done with another operation
    "skip": 0.07,  # a step is left out
    "extra": 0.03,  # a step too many
    "answer": 0.04,  # the steps are right and the answer is not theirs
}
_CONFUSED = {"+": "-*", "-": "+/", "*": "+/", "/": "-*", "%": "-/"}
_TOO_LARGE = 10_000  # as in the families: no number of a step has more than four digits


def spoiled(drawn: Drawn, rng: Random, style: Style = "worked", mistakes: float = 0.0) -> str:
    """A wrong response to a problem: one mistake, and everything after it follows from it.

    In the checked style a wrong result is confirmed by a check that is wrong too; `mistakes` is, as in `render`, the
    chance per step of a mistake that is noticed and repaired.
    """
    problem, solution = drawn
    if style == "answer":
        return f"Answer:{_wrong_answer(problem, solution.answer, rng)}"
    while True:  # a mistake can be impossible here or lead to the right answer; a wrong answer to right steps never is
        kind = rng.choices(list(MISTAKE_SHARES), list(MISTAKE_SHARES.values()))[0]
        told = _told_with(kind, drawn, rng)
        if told is not None and not verify(problem, told.answer):
            return told.rendered(style, rng, mistakes)


class Line(NamedTuple):
    """A step and what it is said to give."""

    step: Step
    claimed: int


class Told(NamedTuple):
    """A solution as somebody tells it, right or wrong."""

    lines: list[Line]
    answer: str

    def rendered(self, style: Style, rng: Random, mistakes: float = 0.0) -> str:
        if style == "answer":
            return f"Answer:{self.answer}"
        steps = ";".join(_written(line, style, rng, mistakes) for line in self.lines)
        return f"<think>{steps}</think>Answer:{self.answer}"


def _told_with(kind: Mistake, drawn: Drawn, rng: Random) -> Told | None:
    """The solution told with a mistake somewhere; None where this mistake makes no sense there."""
    problem, solution = drawn
    if kind in ("answer", "extra"):
        telling = _Telling(drawn, rng)
        answer = telling.go_through()
        if kind == "answer":
            return Told(telling.lines, _wrong_answer(problem, answer, rng))
        last = telling.lines[-1]
        if answer != str(last.claimed):  # made of several numbers: what to go on with?
            return None
        telling.take(last.step._replace(a=last.claimed))
        told = Told(telling.lines, str(telling.lines[-1].claimed))
    else:
        if kind == "skip" and (len(solution.steps) < 2 or _repeats_until_done(drawn)):
            return None
        return _within_limits(_Telling(drawn, rng, kind, place=rng.randrange(len(solution.steps))).told())
    return _within_limits(told)


def told_with_operation(drawn: Drawn, place: int, instead: Mapping[str, str]) -> Told | None:
    """The solution told with another operation at a place: `instead` names one for each."""
    return _within_limits(_Telling(drawn, Random(0), "operation", place, instead).told())


def _within_limits(told: Told | None) -> Told | None:
    if told is None:
        return None
    numbers = [number for step, claimed in told.lines for number in (step.a, step.b, claimed)]
    return told if min(numbers) >= 0 and max(numbers) < _TOO_LARGE else None


def _repeats_until_done(drawn: Drawn) -> bool:
    """Whether the number of steps depends on their results: Euclid's algorithm, and the digits in another base."""
    return drawn.problem.family in ("gcd", "base") and drawn.solution.steps[0].op == "%"


class _Telling:
    """Goes through a solution again, with one mistake at a place, and with later steps that use what it gave."""

    def __init__(
        self,
        drawn: Drawn,
        rng: Random,
        kind: Mistake | None = None,
        place: int = -1,
        instead: Mapping[str, str] = _CONFUSED,
    ) -> None:
        self.drawn, self.rng, self.kind, self.place, self.instead = drawn, rng, kind, place, instead
        self.lines: list[Line] = []
        self.asked = [int(number) for number in re.findall("[0-9]+", drawn.problem.question)]
        self.misread: dict[int, int] = {}  # numbers that were chosen, like the digits of a quotient
        self._taken = 0

    def take(self, step: Step) -> int:
        """Write down a step, spoiled if this is the place; what it is said to give."""
        here = self.kind if self._taken == self.place else None
        self._taken += 1
        if here == "skip":
            return step.a
        if here == "operation":
            step = step._replace(op=self.rng.choice(self.instead[step.op]))
        elif here == "numbers":
            step = self._with_another_number(step)
        claimed = plausible_mistake(step.result, self.rng) if here == "slip" else step.result
        self.lines.append(Line(step, claimed))
        return claimed

    def _with_another_number(self, step: Step) -> Step:
        on_the_left = self.rng.random() < 0.5
        right = step.a if on_the_left else step.b
        others = [number for number in (*self.asked, *(line.claimed for line in self.lines)) if number != right]
        copied = others and self.rng.random() < 0.5
        wrong = self.rng.choice(others) if copied else plausible_mistake(right, self.rng)
        if right not in self.asked:
            self.misread[right] = wrong
        return step._replace(a=wrong) if on_the_left else step._replace(b=wrong)

    def told(self) -> Told | None:
        """None if the mistake leads to a division by zero."""
        try:
            answer = self.go_through()
        except ZeroDivisionError:
            return None
        return Told(self.lines, answer)

    def go_through(self) -> str:
        """Take every step; the answer they lead to."""
        first = self.drawn.solution.steps[0]
        if not _repeats_until_done(self.drawn):
            return self._follow()
        a, b = first.a, first.b
        if self.drawn.problem.family == "gcd":
            while b:
                a, b = b, self.take(Step("%", a, b))
            return str(a)
        numeral = ""
        while a >= b:
            numeral = str(self.take(Step("%", a, b))) + numeral
            a = self.take(Step("/", a, b))
        return str(a) + numeral

    def _follow(self) -> str:
        solution = self.drawn.solution
        results: list[int] = []

        def now(number: int, source: int | None) -> int:
            if source is not None:
                return results[source]
            return number if number in self.asked else self.misread.get(number, number)

        for step, (left, right) in zip(solution.steps, _operand_sources(solution.steps, self.asked), strict=True):
            results.append(self.take(Step(step.op, now(step.a, left), now(step.b, right))))
        numbers, separators = re.findall("[0-9]+", solution.answer), re.findall("[^0-9]", solution.answer)
        sources = _answer_sources(self.drawn)
        told = [str(now(int(number), source)) for number, source in zip(numbers, sources, strict=True)]
        return told[0] + "".join(map("".join, zip(separators, told[1:], strict=True)))


def _latest(steps: tuple[Step, ...], result: int) -> int | None:
    return next((i for i in reversed(range(len(steps))) if steps[i].result == result), None)


def _operand_sources(steps: tuple[Step, ...], asked: list[int]) -> list[tuple[int | None, int | None]]:
    """For both operands of each step the earlier step that gave them, or None for a number from elsewhere.

    A solution does not say where its numbers are from, so they are told by their values: a number of the question that
    is also the result of a step is taken for that result once, and after that for itself.
    """
    used: set[int] = set()
    sources: list[tuple[int | None, int | None]] = []
    for i, step in enumerate(steps):
        found: list[int | None] = []
        for operand in (step.a, step.b):
            source = _latest(steps[:i], operand)
            if source is not None and source in used and operand in asked:
                source = None
            if source is not None:
                used.add(source)
            found.append(source)
        sources.append((found[0], found[1]))
    return sources


def _answer_sources(drawn: Drawn) -> list[int | None]:
    """For each number of the answer the step that gave it, or None if no step did."""
    steps, answer = drawn.solution.steps, drawn.solution.answer
    if drawn.problem.family == "division":  # quotient and remainder can be equal, so values do not tell
        places = {step.op: i for i, step in enumerate(steps)}
        return [places.get("+"), places["-"]]
    return [_latest(steps, int(number)) for number in re.findall("[0-9]+", answer)]


def _wrong_answer(problem: Problem, right: str, rng: Random) -> str:
    """The answer with one of its numbers changed, wrong by the rule of the family."""
    while True:
        parts = re.split("([^0-9])", right)
        place = rng.randrange(0, len(parts), 2)
        parts[place] = str(plausible_mistake(int(parts[place]), rng))
        if not verify(problem, "".join(parts)):
            return "".join(parts)


def _written(line: Line, style: Style, rng: Random, mistakes: float) -> str:
    step, claimed = line
    text = f"{step.expression}={claimed}"
    if style == "worked":
        return text
    check, confirmed = step.check(claimed)
    text += f" check {check if confirmed else _blind_check(step, claimed)} ok"
    if rng.random() < mistakes:
        noticed = plausible_mistake(step.result, rng)
        text = f"{step.expression}={noticed} check {step.check(noticed)[0]} no;{text}"
    return text


def _blind_check(step: Step, claimed: int) -> str:
    """A check that confirms a wrong result: it says what a check of the right one would say."""
    a, b = step.a, step.b
    if step.op == "%":
        return f"{a}-{claimed}={b}*{a // b}"
    if step.op == "/" and a % b:
        return f"{a}-{claimed}*{b}={a % b}"
    return f"{claimed}{_INVERSE[step.op]}{b}={a}"
