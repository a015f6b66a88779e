"""Answers to tiny-world questions worked out from the question text alone, by other means than the families use."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(text: str) -> Fraction:
    def walk(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        assert isinstance(node, ast.Constant)
        return Fraction(node.value)  # type: ignore[arg-type]

    return walk(ast.parse(text, mode="eval").body)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _calculated(question: str) -> str:
    return str(_value(question.removesuffix("=?")))


def _divided(question: str) -> str:
    dividend, divisor = _numbers(question)
    quotient, remainder = divmod(dividend, divisor)
    return f"{quotient}r{remainder}"


def _powered(question: str) -> str:
    return str(pow(*_numbers(question)))


def _solved(question: str) -> str:
    """Two points of the difference of both sides give its zero."""
    equation = re.sub(r"(\d)(?=[x(])", r"\1*", question.removesuffix(",x=?"))
    left, right = equation.split("=")
    at_0, at_1 = (_value(f"{left}-({right})".replace("x", x)) for x in "01")
    return str(at_0 / (at_0 - at_1))


def _continued(question: str) -> str:
    """Constant factor, sum of the two before, constant growth of the differences, or constant last difference."""
    terms = _numbers(question)
    a, b, c, d = terms[-4:]
    steps = [y - x for x, y in pairwise(terms)]
    if len(terms) == 4 and steps[2] - steps[1] != steps[1] - steps[0]:
        if a * c == b * b and b * d == c * c:
            return str(d * d // c)
        if a + b == c and b + c == d:
            return str(c + d)
        return str(d + steps[2] * steps[2] // steps[1])
    rows = [terms]
    while any(rows[-1]) and len(rows[-1]) > 1:
        rows.append([y - x for x, y in pairwise(rows[-1])])
    return str(sum(row[-1] for row in rows))


def _converted(question: str) -> str:
    number, base = re.findall(r"\d+", question)
    if "from" in question:
        return str(int(number, int(base)))
    return _digits(int(number), int(base))


def _digits(number: int, base: int) -> str:
    places = range(int(math.log(number, base) + 1e-9), -1, -1)
    return "".join(str(number // base**place % base) for place in places)


def _counted(question: str) -> str:
    numbers = _numbers(question)
    high = numbers.pop()
    low = numbers.pop() if "from" in question else 1
    if question.startswith("numbers"):
        return str(len(range(low, high + 1)))
    of, *other = numbers

    def counts(n: int) -> bool:
        by_other = any(n % divisor == 0 for divisor in other)
        if "not" in question:
            return n % of == 0 and not by_other
        return n % of == 0 or by_other

    return str(sum(map(counts, range(low, high + 1))))


def _told(question: str) -> str:
    story, _ = question.split(":")
    opening, *events = story.split(",")
    heap = _numbers(opening)[0]
    for event in events:
        amount = heap // 2 if "half" in event else math.prod(_numbers(event))
        if " has " in event:
            heap += heap * amount if "times" in event else heap + amount
        else:
            heap += -amount if re.match("loses|sells|gives|uses", event) else amount
    return str(heap)


ORACLES: dict[str, Callable[[str], str]] = {
    "sum": _calculated,
    "product": _calculated,
    "division": _divided,
    "expression": _calculated,
    "gcd": lambda question: str(math.gcd(*_numbers(question))),
    "modpow": _powered,
    "linear": _solved,
    "fraction": _calculated,
    "sequence": _continued,
    "base": _converted,
    "counting": _counted,
    "word": _told,
}
