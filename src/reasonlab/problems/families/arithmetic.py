"""Families of plain arithmetic: sum, product, division with remainder, expression, fraction."""

from __future__ import annotations

from math import gcd
from random import Random

from reasonlab.problems.families.base import Family, between, same_fraction, same_quotient
from reasonlab.problems.families.steps import Solution, Work

# level: fewest terms, most terms, smallest term, largest term
_SUM_LEVELS = {
    1: (2, 3, 2, 30),
    2: (3, 3, 5, 60),
    3: (3, 4, 10, 99),
    4: (4, 4, 20, 200),
    5: (5, 5, 20, 250),
    6: (6, 6, 20, 300),
    7: (7, 8, 20, 400),
}


def _sum(level: int, rng: Random) -> tuple[str, Solution]:
    fewest, most, low, high = _SUM_LEVELS[level]
    work = Work()
    total = between(rng, low, high)
    question = str(total)
    for _ in range(between(rng, fewest, most) - 1):
        term = between(rng, low, high)
        # Differences come in at level 3, and only where the running total stays positive.
        if level >= 3 and term < total and rng.random() < 0.3:
            question += f"-{term}"
            total = work.subtract(total, term)
        else:
            question += f"+{term}"
            total = work.add(total, term)
    return question + "=?", work.solution(total)


def _times(work: Work, a: int, b: int) -> int:
    """A product by partial products, so that no single step is harder than two digits by one."""
    tens, units = b - b % 10, b % 10
    if a < 10 or b < 10 or units == 0:
        return work.multiply(a, b)
    return work.add(work.multiply(a, tens), work.multiply(a, units))


def _product(level: int, rng: Random) -> tuple[str, Solution]:
    work = Work()
    if level == 1:
        if rng.random() < 0.5:
            a, b, c = between(rng, 2, 9), between(rng, 2, 9), between(rng, 2, 9)
            return f"{a}*{b}*{c}=?", work.solution(work.multiply(work.multiply(a, b), c))
        a, b = between(rng, 11, 99), between(rng, 2, 9)
        return f"{a}*{b}=?", work.solution(work.multiply(a, b))
    if level <= 4:
        most = {2: (99, 19), 3: (60, 50), 4: (99, 99)}[level]
        a, b = between(rng, 11, most[0]), between(rng, 11, most[1])
        return f"{a}*{b}=?", work.solution(_times(work, a, b))
    most_factor = 70  # keeps the sum of two products below 10,000
    a, b = between(rng, 12, most_factor), between(rng, 12, most_factor)
    first = _times(work, a, b)
    if level == 5:
        c = between(rng, 100, 999)
        return f"{a}*{b}+{c}=?", work.solution(work.add(first, c))
    c = between(rng, 12, most_factor)
    d = between(rng, 3, 9) if level == 6 else between(rng, 12, most_factor)
    return f"{a}*{b}+{c}*{d}=?", work.solution(work.add(first, _times(work, c, d)))


# level: smallest divisor, largest divisor, smallest quotient, largest quotient, largest dividend
_DIVISION_LEVELS = {
    1: (3, 15, 2, 9, 150),
    2: (11, 40, 2, 9, 400),
    3: (3, 9, 11, 60, 540),
    4: (11, 25, 11, 60, 999),
    5: (16, 60, 11, 60, 999),
    6: (16, 60, 11, 99, 4999),
    7: (11, 50, 101, 399, 9999),
}


def _division(level: int, rng: Random) -> tuple[str, Solution]:
    low, high, least, most, largest = _DIVISION_LEVELS[level]
    divisor = between(rng, low, high)
    quotient = between(rng, least, min(most, largest // divisor - 1))
    dividend = divisor * quotient + between(rng, 0, divisor - 1)
    work = Work()
    rest, so_far = dividend, 0
    for place in (100, 10, 1):
        part = rest // (divisor * place) * place
        if part:
            rest = work.subtract(rest, divisor if part == 1 else work.multiply(divisor, part))
            so_far = work.add(so_far, part) if so_far else part
    return f"{dividend}/{divisor}=?", work.solution(f"{so_far}r{rest}")


# level: fewest operations, most operations, largest number
_EXPRESSION_LEVELS = {
    1: (2, 2, 9),
    2: (2, 3, 15),
    3: (3, 3, 30),
    4: (4, 4, 50),
    5: (5, 5, 60),
    6: (6, 7, 80),
    7: (8, 9, 99),
}
_NUMBER, _PRODUCT, _SUM = 3, 2, 1  # how tightly a piece of an expression holds together


def _expression(level: int, rng: Random) -> tuple[str, Solution]:
    fewest, most, largest = _EXPRESSION_LEVELS[level]
    work = Work()
    text, value, _ = _piece(rng, between(rng, fewest, most), largest, work)
    return text + "=?", work.solution(value)


def _piece(rng: Random, operations: int, largest: int, work: Work) -> tuple[str, int, int]:
    """A random expression: its text, its value and how tightly it binds."""
    if operations == 0:
        number = between(rng, 2, 9 if rng.random() < 0.5 else largest)
        return str(number), number, _NUMBER
    on_the_left = int(rng.random() * operations)
    left, a, left_binds = _piece(rng, on_the_left, largest, work)
    right, b, right_binds = _piece(rng, operations - 1 - on_the_left, largest, work)
    smaller, larger = (a, b) if a < b else (b, a)
    if 2 <= smaller <= 9 and larger <= 99 and rng.random() < 0.5:
        symbol, binds, value = "*", _PRODUCT, work.multiply(a, b)
    elif a > b and rng.random() < 0.6:
        symbol, binds, value = "-", _SUM, work.subtract(a, b)
    else:
        symbol, binds, value = "+", _SUM, work.add(a, b)
    if left_binds < binds:
        left = f"({left})"
    if right_binds <= binds:
        right = f"({right})"
    return f"{left}{symbol}{right}", value, binds


def _fraction(level: int, rng: Random) -> tuple[str, Solution]:
    work = Work()
    if level == 1:
        question, top, bottom = _same_denominator(work, rng)
    elif level == 2:
        question, top, bottom = _denominator_and_multiple(work, rng)
    elif level <= 5:
        question, top, bottom = _two_fractions(level, work, rng)
    else:
        question, top, bottom = _three_fractions(level, work, rng)
    common = gcd(top, bottom)
    if common > 1:
        top, bottom = work.divide(top, common), work.divide(bottom, common)
    return question, work.solution(top if bottom == 1 else f"{top}/{bottom}")


def _same_denominator(work: Work, rng: Random) -> tuple[str, int, int]:
    d = between(rng, 5, 25)
    a, b = between(rng, 1, d - 1), between(rng, 1, d - 1)
    if a > b and rng.random() < 0.5:
        return f"{a}/{d}-{b}/{d}=?", work.subtract(a, b), d
    return f"{a}/{d}+{b}/{d}=?", work.add(a, b), d


def _denominator_and_multiple(work: Work, rng: Random) -> tuple[str, int, int]:
    d = between(rng, 2, 9)
    larger = d * between(rng, 2, 5)
    a, b = between(rng, 1, d - 1), between(rng, 1, larger - 1)
    widened = work.multiply(a, work.divide(larger, d))
    if widened > b and rng.random() < 0.5:
        return f"{a}/{d}-{b}/{larger}=?", work.subtract(widened, b), larger
    return f"{a}/{d}+{b}/{larger}=?", work.add(widened, b), larger


def _two_fractions(level: int, work: Work, rng: Random) -> tuple[str, int, int]:
    largest = {3: 9, 4: 10, 5: 12}[level]
    while True:
        c, d = between(rng, 2, min(largest, 9)), between(rng, 2, largest)
        a, b = between(rng, 1, c - 1), between(rng, 1, d - 1)
        minus = a * d > b * c and rng.random() < 0.5
        top = a * d - b * c if minus else a * d + b * c
        # Level 5 always ends in a reduction, level 3 never.
        if c != d and (level == 4 or (gcd(top, c * d) > 1) == (level == 5)):
            break
    top, bottom = _combine(work, (a, c), (b, d), minus)
    return f"{a}/{c}{'-' if minus else '+'}{b}/{d}=?", top, bottom


def _three_fractions(level: int, work: Work, rng: Random) -> tuple[str, int, int]:
    largest = {6: 6, 7: 9}[level]
    while True:
        c, d, f = between(rng, 2, largest), between(rng, 2, largest), between(rng, 2, largest)
        a, b, e = between(rng, 1, c - 1), between(rng, 1, d - 1), between(rng, 1, f - 1)
        top = a * d + b * c
        if c != d and top < 100:  # the next step multiplies it, and stays two digits by one
            break
    minus = top * f > e * c * d and rng.random() < 0.5
    top, bottom = _combine(work, _combine(work, (a, c), (b, d), minus=False), (e, f), minus)
    return f"{a}/{c}+{b}/{d}{'-' if minus else '+'}{e}/{f}=?", top, bottom


def _combine(work: Work, first: tuple[int, int], second: tuple[int, int], minus: bool) -> tuple[int, int]:
    """The sum or difference of two fractions over the product of their denominators."""
    left, right = work.multiply(first[0], second[1]), work.multiply(second[0], first[1])
    top = work.subtract(left, right) if minus else work.add(left, right)
    return top, work.multiply(first[1], second[1])


SUM = Family("sum", "sums and differences of several numbers", _sum)
PRODUCT = Family("product", "products, from level 5 on with something added", _product)
DIVISION = Family("division", "quotient and remainder", _division, same_quotient)
EXPRESSION = Family("expression", "expressions with brackets and precedence", _expression)
FRACTION = Family("fraction", "sums and differences of fractions", _fraction, same_fraction)
