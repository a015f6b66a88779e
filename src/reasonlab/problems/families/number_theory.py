"""Families about whole numbers: gcd, modular powers, number bases, counting multiples."""

from __future__ import annotations

from functools import cache
from itertools import chain, product
from math import gcd
from random import Random

from reasonlab.problems.families.base import Family, between
from reasonlab.problems.families.steps import Solution, Work

# level: fewest remainders, most remainders, largest divisor, largest number
_GCD_LEVELS = {
    1: (1, 2, 30, 99),
    2: (2, 2, 40, 300),
    3: (3, 3, 30, 400),
    4: (4, 4, 20, 600),
    5: (5, 5, 15, 999),
    6: (6, 6, 10, 999),
    7: (7, 8, 5, 999),
}


def _gcd(level: int, rng: Random) -> tuple[str, Solution]:
    fewest, most, largest_divisor, largest = _GCD_LEVELS[level]
    while True:  # Euclid backwards: choose the quotients, so that the number of remainders is known
        a, b = between(rng, 1, largest_divisor), 0
        for _ in range(between(rng, fewest, most)):
            a, b = a * between(rng, 1 if b else 2, 3 if rng.random() < 0.8 else 9) + b, a
        if a <= largest:
            break
    question = f"gcd({a},{b})=?" if rng.random() < 0.5 else f"gcd({b},{a})=?"
    work = Work()
    while b:
        a, b = b, work.remainder(a, b)
    return question, work.solution(a)


# level: fewest steps, most steps
_MODPOW_LEVELS = {1: (1, 2), 2: (3, 3), 3: (4, 4), 4: (5, 5), 5: (6, 6), 6: (7, 8), 7: (9, 11)}


def _modpow(level: int, rng: Random) -> tuple[str, Solution]:
    base, exponent, modulus = rng.choice(_powers()[level])
    work = Work()
    residue = _power(work, base, exponent, modulus)
    return f"{base}^{exponent} mod {modulus}=?", work.solution(residue)


@cache
def _powers() -> dict[int, list[tuple[int, int, int]]]:
    """All powers worth asking for, by level; the number of steps is only known by doing them."""
    powers: dict[int, list[tuple[int, int, int]]] = {level: [] for level in _MODPOW_LEVELS}
    small_bases = product(range(2, 10), range(2, 11), range(11, 100))
    small_moduli = product(range(11, 100), range(2, 7), range(3, 10))
    for base, exponent, modulus in chain(small_bases, small_moduli):
        work = Work()
        if _power(work, base, exponent, modulus):
            for level, (fewest, most) in _MODPOW_LEVELS.items():
                if fewest <= len(work.steps) <= most:
                    powers[level].append((base, exponent, modulus))
    return powers


def _power(work: Work, base: int, exponent: int, modulus: int) -> int:
    """Multiply and take the remainder, again and again; 0 if a factor of 0 or 1 makes the rest trivial."""
    if base >= modulus:
        base = work.remainder(base, modulus)
    residue = base
    for _ in range(exponent - 1):
        if base < 2 or residue == 0:
            return 0
        residue = work.multiply(residue, base)
        if residue >= modulus:
            residue = work.remainder(residue, modulus)
    return residue


# level: (base, smallest number, largest number), chosen at random
_BASE_LEVELS = {
    1: [(base, base, base * base - 1) for base in (4, 5, 6, 7, 8, 9)] + [(3, 9, 26)],
    2: [(4, 16, 63), (5, 25, 124), (6, 36, 215), (7, 49, 200)],
    3: [(7, 49, 342), (8, 64, 511), (9, 81, 728)],
    4: [(3, 27, 80), (4, 64, 255), (5, 125, 624)],
    5: [(5, 125, 624), (6, 216, 999), (7, 343, 999)],
    6: [(3, 81, 728), (4, 256, 999), (5, 625, 999)],
    7: [(2, 64, 255), (3, 243, 999)],
}


def _base(level: int, rng: Random) -> tuple[str, Solution]:
    base, low, high = rng.choice(_BASE_LEVELS[level])
    number = between(rng, low, high)
    work = Work()
    if rng.random() < 0.5:
        return f"{number} in base {base}=?", work.solution(_to_base(work, number, base))
    numeral = _to_base(Work(), number, base)
    return f"{numeral} from base {base}=?", work.solution(_from_base(work, numeral, base))


def _to_base(work: Work, number: int, base: int) -> str:
    numeral = ""
    while number >= base:
        numeral = str(work.remainder(number, base)) + numeral
        number = work.divide(number, base)
    return str(number) + numeral


def _from_base(work: Work, numeral: str, base: int) -> int:
    value = int(numeral[0])
    for digit in numeral[1:]:
        value = work.multiply(value, base)
        if digit != "0":
            value = work.add(value, int(digit))
    return value


_COPRIME_PAIRS = [(a, b) for a in range(2, 10) for b in range(a + 1, 10) if gcd(a, b) == 1]


def _counting(level: int, rng: Random) -> tuple[str, Solution]:
    work = Work()
    if level == 1 and rng.random() < 0.5:
        low = between(rng, 5, 50)
        high = low + between(rng, 5, 49)
        return f"numbers from {low} to {high}=?", work.solution(work.add(work.subtract(high, low), 1))
    if level == 1:
        of, high = between(rng, 2, 9), between(rng, 20, 99)
        return f"multiples of {of} to {high}=?", work.solution(work.divide(high, of))
    if level == 2:
        other, of = rng.choice(_COPRIME_PAIRS)
        high = between(rng, 20, 150)
        multiples = work.divide(high, of)
        count = work.subtract(multiples, work.divide(multiples, other))
        return f"multiples of {of} not {other} to {high}=?", work.solution(count)
    if level <= 4:
        of = between(rng, 2, 9)
        low = between(rng, 10, 50) if level == 3 else between(rng, 60, 400)
        high = low + between(rng, 20, 49) if level == 3 else low + between(rng, 50, 500)
        up_to_high, before = work.divide(high, of), work.divide(work.subtract(low, 1), of)
        count = work.subtract(up_to_high, before)
        return f"multiples of {of} from {low} to {high}=?", work.solution(count)
    return _counting_two_divisors(level, work, rng)


def _counting_two_divisors(level: int, work: Work, rng: Random) -> tuple[str, Solution]:
    of, other = rng.choice(_COPRIME_PAIRS)
    if level == 5:
        high = between(rng, 60, 499)
        return f"multiples of {of} or {other} to {high}=?", work.solution(_either(work, of, other, high))
    low = between(rng, 40, 300)
    high = low + between(rng, 40, 500)
    before = work.subtract(low, 1)
    if level == 6:
        if rng.random() < 0.5:
            of, other = other, of
        multiples, earlier = work.divide(high, of), work.divide(before, of)
        excluded = work.subtract(work.divide(multiples, other), work.divide(earlier, other))
        count = work.subtract(work.subtract(multiples, earlier), excluded)
        return f"multiples of {of} not {other} from {low} to {high}=?", work.solution(count)
    count = work.subtract(_either(work, of, other, high), _either(work, of, other, before))
    return f"multiples of {of} or {other} from {low} to {high}=?", work.solution(count)


def _either(work: Work, of: int, other: int, high: int) -> int:
    """How many numbers up to ``high`` are multiples of one of two coprime numbers.

    The common multiples are counted by dividing twice, which needs no two-digit divisor.
    """
    first, second = work.divide(high, of), work.divide(high, other)
    both = work.divide(first, other)
    return work.subtract(work.add(first, second), both)


GCD = Family("gcd", "greatest common divisor, by remainders", _gcd)
MODPOW = Family("modpow", "powers modulo a number", _modpow)
BASE = Family("base", "numerals in another base, both ways", _base)
COUNTING = Family("counting", "how many numbers of a kind lie in a range", _counting)
