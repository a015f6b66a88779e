"""Worked solutions: the steps of a calculation, how they are written, checked, spoiled and read back.

A solution is a chain of single integer operations. The same chain is written in three styles: the answer
alone, the steps followed by the answer, or the steps each followed by a reverse calculation that confirms
it. In the last style a mistake can be planted, noticed by its check, and repaired.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import add, floordiv, mod, mul, sub
from random import Random
from typing import Literal, NamedTuple, get_args

Style = Literal["answer", "worked", "checked"]
STYLES: tuple[Style, ...] = get_args(Style)
MOST_MISTAKES = 2

_COMPUTE: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "/": floordiv, "%": mod}


class Step(NamedTuple):
    """One integer operation; ``/`` is floor division."""

    op: str
    a: int
    b: int

    @property
    def expression(self) -> str:
        return f"{self.a}{self.op}{self.b}"

    @property
    def result(self) -> int:
        return _COMPUTE[self.op](self.a, self.b)

    def check(self, claimed: int) -> tuple[str, bool]:
        """The reverse calculation from a claimed result, and whether it confirms the claim."""
        return _CHECKS[self.op](self.a, self.b, claimed)


def _check_sum(a: int, b: int, claimed: int) -> tuple[str, bool]:
    return f"{claimed}-{b}={claimed - b}", claimed - b == a


def _check_difference(a: int, b: int, claimed: int) -> tuple[str, bool]:
    return f"{claimed}+{b}={claimed + b}", claimed + b == a


def _check_product(a: int, b: int, claimed: int) -> tuple[str, bool]:
    if b == 0:  # nothing to divide by: swap the factors instead
        return f"{b}*{a}=0", claimed == 0
    if claimed % b:
        return f"{claimed}%{b}={claimed % b}", False
    return f"{claimed}/{b}={claimed // b}", claimed // b == a


def _check_quotient(a: int, b: int, claimed: int) -> tuple[str, bool]:
    product = claimed * b
    if a % b == 0:
        return f"{claimed}*{b}={product}", product == a
    return f"{a}-{claimed}*{b}={a - product}", 0 <= a - product < b


def _check_remainder(a: int, b: int, claimed: int) -> tuple[str, bool]:
    rest = a - claimed
    if 0 <= claimed < b and rest % b == 0:
        return f"{a}-{claimed}={b}*{rest // b}", True
    return f"{a}-{claimed}={rest}", False


_CHECKS: dict[str, Callable[[int, int, int], tuple[str, bool]]] = {
    "+": _check_sum,
    "-": _check_difference,
    "*": _check_product,
    "/": _check_quotient,
    "%": _check_remainder,
}


class Solution(NamedTuple):
    """The steps that lead to an answer."""

    steps: tuple[Step, ...]
    answer: str


class Work:
    """Calculates while writing down every step; the families solve their own problems with it."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add(self, a: int, b: int) -> int:
        self.steps.append(Step("+", a, b))
        return a + b

    def subtract(self, a: int, b: int) -> int:
        self.steps.append(Step("-", a, b))
        return a - b

    def multiply(self, a: int, b: int) -> int:
        self.steps.append(Step("*", a, b))
        return a * b

    def divide(self, a: int, b: int) -> int:
        self.steps.append(Step("/", a, b))
        return a // b

    def remainder(self, a: int, b: int) -> int:
        self.steps.append(Step("%", a, b))
        return a % b

    def solution(self, answer: int | str) -> Solution:
        return Solution(tuple(self.steps), str(answer))


def render(solution: Solution, style: Style, rng: Random, mistakes: float = 0.0) -> str:
    """The response text of a solution, without ``<bos>`` and ``<eos>``.

    ``mistakes`` is the chance, per step of the checked style, that a wrong result is written first, fails
    its check, and is done again; at most two per solution.
    """
    if style == "answer":
        return f"Answer:{solution.answer}"
    if style == "worked":
        written = [f"{step.expression}={step.result}" for step in solution.steps]
    else:
        written = _written_with_checks(solution.steps, rng, mistakes)
    return f"<think>{';'.join(written)}</think>Answer:{solution.answer}"


def _written_with_checks(steps: tuple[Step, ...], rng: Random, mistakes: float) -> list[str]:
    written = []
    left = MOST_MISTAKES if mistakes > 0.0 else 0
    for step in steps:
        if left and rng.random() < mistakes:
            left -= 1
            written.append(_checked(step, plausible_mistake(step.result, rng)))
        written.append(_checked(step, step.result))
    return written


def _checked(step: Step, claimed: int) -> str:
    check, confirmed = step.check(claimed)
    return f"{step.expression}={claimed} check {check} {'ok' if confirmed else 'no'}"


def plausible_mistake(right: int, rng: Random) -> int:
    """A wrong result of the kind people write: a digit changed, off by one or ten, two digits swapped."""
    while True:
        kind = int(rng.random() * 3)
        if kind == 0:
            wrong = right + rng.choice((-10, -1, 1, 10))
        else:
            digits = list(str(right))
            place = int(rng.random() * len(digits))
            if kind == 1:
                digits[place] = str(int(rng.random() * 10))
            else:
                digits[place - 1], digits[place] = digits[place], digits[place - 1]
            # A leading zero would betray the mistake by its form alone.
            wrong = int("".join(digits)) if digits[0] != "0" else right
        if wrong != right and wrong >= 0:
            return wrong


class ParsedStep(NamedTuple):
    """A step as written; ``check`` and ``verdict`` are None in the worked style."""

    expression: str
    result: int
    check: str | None
    verdict: Literal["ok", "no"] | None


class Parsed(NamedTuple):
    """A response taken apart."""

    style: Style
    steps: list[ParsedStep]
    answer: str


_RESPONSE = re.compile(r"(?:<think>(?P<thought>[^<>]*)</think>)?Answer:(?P<answer>[^<>\n]*)(?:<eos>)?")
_STEP = re.compile(
    r"(?P<expression>[0-9]+[-+*/%][0-9]+)=(?P<result>-?[0-9]+)"
    r"(?: check (?P<check>[-+*/%=0-9]+) (?P<verdict>ok|no))?"
)


def parse(text: str) -> Parsed:
    """Read a response back, in any style; ValueError if it does not follow the format."""
    response = _RESPONSE.fullmatch(text)
    if response is None:
        raise ValueError(f"not a response: {text!r}")
    if response["thought"] is None:
        return Parsed("answer", [], response["answer"])
    steps = [_parse_step(part) for part in response["thought"].split(";")]
    checked = steps[0].check is not None
    if any((step.check is not None) != checked for step in steps):
        raise ValueError(f"some steps are checked and some are not: {text!r}")
    return Parsed("checked" if checked else "worked", steps, response["answer"])


def _parse_step(text: str) -> ParsedStep:
    step = _STEP.fullmatch(text)
    if step is None:
        raise ValueError(f"not a step: {text!r}")
    verdict: Literal["ok", "no"] | None = None
    if step["verdict"] is not None:
        verdict = "ok" if step["verdict"] == "ok" else "no"
    return ParsedStep(step["expression"], int(step["result"]), step["check"], verdict)
