"""Whether two numbers say the same: with units and percent signs, in a base, as a ratio."""

from __future__ import annotations

from fractions import Fraction

from reasonlab.grading import numeric
from reasonlab.grading.expression import Node, symbols
from reasonlab.grading.values import Based, Ratio, Scalar, Value

ENOUGH_DIGITS = 6  # of a decimal that stands for an irrational number


def based(a: Value, b: Value) -> bool | None:
    if isinstance(a, Based) and isinstance(b, Based):
        return a == b
    based, other = (a, b) if isinstance(a, Based) else (b, a)
    assert isinstance(based, Based)
    if not isinstance(other, Scalar):
        return False
    value = numeric.exact(other.node) if not symbols(other.node) else None
    if based.base == 10 and value is not None and based.digits.isdigit():
        return value == int(based.digits)
    return value is not None and str(value) == based.digits  # the question named the base


def ratios(a: Value, b: Value) -> bool | None:
    first, second = _ratio_nodes(a), _ratio_nodes(b)
    if first is None or second is None or len(first) != len(second):
        return False
    return all(
        numeric.equal(("mul", first[0], theirs), ("mul", ours, second[0]))
        for ours, theirs in zip(first[1:], second[1:], strict=True)
    )


def _ratio_nodes(value: Value) -> list[Node] | None:
    if isinstance(value, Ratio) and all(isinstance(item, Scalar) for item in value.items):
        return [item.node for item in value.items if isinstance(item, Scalar)]
    if isinstance(value, Scalar):
        return [value.node, ("num", Fraction(1), 0)]
    return None


def scalars(a: Scalar, b: Scalar, tolerance: float) -> bool | None:
    if a.percent != b.percent:
        percent, plain = (a.node, b.node) if a.percent else (b.node, a.node)
        hundredth: Node = ("div", percent, ("num", Fraction(100), 0))
        return _numbers(percent, plain, tolerance) or _numbers(hundredth, plain, tolerance)
    if a.unit is not None and b.unit is not None and a.unit != b.unit:
        if a.unit[0] != b.unit[0]:
            return False
        return _numbers(("mul", a.node, _num(a.unit[1])), ("mul", b.node, _num(b.unit[1])), tolerance)
    return _numbers(a.node, b.node, tolerance)


def _num(value: Fraction) -> Node:
    return ("num", value, 0)


def _numbers(a: Node, b: Node, tolerance: float) -> bool:
    if numeric.equal(a, b):
        return True
    if symbols(a) or symbols(b):
        return False
    for decimal, other in ((a, b), (b, a)):
        literal = decimal[1] if decimal[0] == "neg" else decimal
        if literal[0] == "num" and literal[2] > 0 and not (other[0] == "num" and other[2] >= 0):
            value = numeric.exact(decimal)
            assert value is not None
            digits = len(str(abs(literal[1].numerator * 10 ** literal[2] // literal[1].denominator)))
            if digits >= ENOUGH_DIGITS and literal[2] >= 3 and not _terminates(other):
                return numeric.rounds_to(other, value, literal[2])
    return bool(tolerance) and _within(a, b, tolerance)


def _terminates(node: Node) -> bool:
    """Whether a number can be written in decimals to the end: then it has to be."""
    value = numeric.exact(node)
    if value is None:
        return False
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _within(a: Node, b: Node, tolerance: float) -> bool:
    try:
        left, right = numeric.evaluate_float(a, 0), numeric.evaluate_float(b, 0)
    except (ArithmeticError, ValueError):
        return False
    return abs(left - right) <= tolerance * abs(right)
