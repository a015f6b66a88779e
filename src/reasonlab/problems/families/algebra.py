"""Families that look for an unknown: linear equations and the next number of a sequence."""

from __future__ import annotations

from random import Random

from reasonlab.problems.families.base import Family, between
from reasonlab.problems.families.steps import Solution, Work


def _linear(level: int, rng: Random) -> tuple[str, Solution]:
    work = Work()
    if level <= 2:
        equation, x = _one_side(level, work, rng)
    elif level <= 4:
        equation, x = (_two_sides if level == 3 else _bracket)(work, rng)
    else:
        equation, x = _brackets(level, work, rng)
    return equation + ",x=?", work.solution(x)


def _one_side(level: int, work: Work, rng: Random) -> tuple[str, int]:
    a = between(rng, 2, 9)
    x = between(rng, 2, 12) if level == 1 else between(rng, 8, 50)
    b = between(rng, 1, 20) if level == 1 else between(rng, 10, 99)
    if a * x > b and rng.random() < 0.4:
        c = a * x - b
        return f"{a}x-{b}={c}", work.divide(work.add(c, b), a)
    c = a * x + b
    return f"{a}x+{b}={c}", work.divide(work.subtract(c, b), a)


def _two_sides(work: Work, rng: Random) -> tuple[str, int]:
    c = between(rng, 2, 9)
    a, x, b = c + between(rng, 2, 9), between(rng, 2, 30), between(rng, 2, 60)
    d = (a - c) * x + b
    slope = work.subtract(a, c)
    return f"{a}x+{b}={c}x+{d}", work.divide(work.subtract(d, b), slope)


def _bracket(work: Work, rng: Random) -> tuple[str, int]:
    a, x, b, c = between(rng, 3, 9), between(rng, 5, 60), between(rng, 3, 35), between(rng, 10, 99)
    d = a * (x + b) + c
    inner = work.divide(work.subtract(d, c), a)
    return f"{a}(x+{b})+{c}={d}", work.subtract(inner, b)


def _brackets(level: int, work: Work, rng: Random) -> tuple[str, int]:
    """Brackets on both sides: collect the constants, collect the slopes, divide."""
    x = between(rng, 2, 40 if level == 5 else 60)
    right_slope = between(rng, 2, 9)
    a, b = right_slope + between(rng, 2, 9), between(rng, 2, 9)
    c, d = between(rng, 2, 9), between(rng, 2, 20)
    slope, constant = a - right_slope, a * b
    if level == 7:
        slope, constant = slope + c, constant + c * d
    else:
        c = between(rng, 2, 60)
        constant += c
    inner = between(rng, 2, 20) if level >= 6 else 0
    rest = slope * x + constant - right_slope * inner
    while rest <= 0:  # a large bracket on the right; a larger unknown makes room for it
        x, rest = x + 10, rest + 10 * slope

    left = f"{a}(x+{b})+{c}(x+{d})" if level == 7 else f"{a}(x+{b})+{c}"
    right = f"{right_slope}(x+{inner})+{rest}" if inner else f"{right_slope}x+{rest}"
    on_left = work.add(work.multiply(a, b), work.multiply(c, d) if level == 7 else c)
    on_right = work.add(work.multiply(right_slope, inner), rest) if inner else rest
    slopes = work.subtract(work.add(a, c) if level == 7 else a, right_slope)
    return f"{left}={right}", work.divide(work.subtract(on_right, on_left), slopes)


def _sequence(level: int, rng: Random) -> tuple[str, Solution]:
    work = Work()
    if level == 1:
        terms = _accumulate(between(rng, 1, 60), [between(rng, 2, 20)] * 3)
        following = _extend_evenly(work, terms)
    elif level == 2:
        terms, following = _level_two(work, rng)
    elif level <= 5:
        terms, following = _second_order(level, work, rng)
    else:
        most = 5 if level == 6 else 15
        bends = _accumulate(between(rng, 1, most), [between(rng, 1, most)] * 2)
        terms = _accumulate(between(rng, 1, 5 * most), _accumulate(between(rng, 1, 2 * most), bends))
        following = _extend_third_order(work, terms)
    return ",".join(map(str, terms)) + ",?", work.solution(following)


def _accumulate(start: int, differences: list[int]) -> list[int]:
    terms = [start]
    for difference in differences:
        terms.append(terms[-1] + difference)
    return terms


def _extend_evenly(work: Work, terms: list[int]) -> int:
    if terms[-1] < terms[-2]:
        return work.subtract(terms[-1], work.subtract(terms[-2], terms[-1]))
    return work.add(terms[-1], work.subtract(terms[-1], terms[-2]))


def _level_two(work: Work, rng: Random) -> tuple[list[int], int]:
    """Falling by equal steps, multiplied by equal factors, or each the sum of the two before."""
    kind = rng.random()
    if kind < 0.4:
        difference = between(rng, 3, 40)
        terms = _accumulate(5 * difference + between(rng, 0, 99), [-difference] * 3)
        return terms, _extend_evenly(work, terms)
    if kind < 0.6:
        start, ratio = between(rng, 2, 15), between(rng, 2, 3)
        terms = [start * ratio**power for power in range(4)]
        return terms, work.multiply(terms[3], work.divide(terms[3], terms[2]))
    a, b = between(rng, 2, 40), between(rng, 2, 40)
    if 3 * a == 2 * b:  # 2,3,5,8 would also continue by its second difference
        b += 1
    terms = [a, b, a + b, a + 2 * b]
    return terms, work.add(work.add(a, b), terms[3])


def _second_order(level: int, work: Work, rng: Random) -> tuple[list[int], int]:
    """Constant second difference, or (levels 4 and 5) differences that grow by a constant factor."""
    most_start, most_first, most_bend = {3: (30, 12, 6), 4: (99, 30, 12), 5: (300, 60, 25)}[level]
    start, first = between(rng, 1, most_start), between(rng, 1, most_first)
    if level >= 4 and rng.random() < 0.4:
        ratio = between(rng, 2, 3)
        first = between(rng, 2, 5 if level == 4 else 11)
        terms = _accumulate(start, [first, first * ratio, first * ratio * ratio])
        before, last = work.subtract(terms[2], terms[1]), work.subtract(terms[3], terms[2])
        return terms, work.add(terms[3], work.multiply(last, work.divide(last, before)))
    terms = _accumulate(start, _accumulate(first, [between(rng, 1, most_bend)] * 2))
    before, last = work.subtract(terms[2], terms[1]), work.subtract(terms[3], terms[2])
    return terms, work.add(terms[3], work.add(last, work.subtract(last, before)))


def _extend_third_order(work: Work, terms: list[int]) -> int:
    """Constant third difference: go down three rows of differences and come back up."""
    first = [work.subtract(terms[i + 1], terms[i]) for i in (1, 2, 3)]
    second = [work.subtract(first[i + 1], first[i]) for i in (0, 1)]
    third = work.subtract(second[1], second[0])
    return work.add(terms[4], work.add(first[2], work.add(second[1], third)))


LINEAR = Family("linear", "linear equations in one unknown", _linear)
SEQUENCE = Family("sequence", "the next number of a sequence", _sequence)
