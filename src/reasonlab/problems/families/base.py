"""What a family is, and how answers are compared.

A family is a generator of problems with worked solutions plus the rule that decides whether an answer is
right. Comparison is exact, and an answer is only ever matched against a pattern, never evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from reasonlab.problems.families.steps import Solution

TRAINING_LEVELS = (1, 2, 3, 4, 5)
HARDER_LEVELS = (6, 7)

_LONGEST_NUMBER = 18  # digits: far above any gold answer, and below what would make int() slow
_INTEGER = re.compile(rf"[-+]?[0-9]{{1,{_LONGEST_NUMBER}}}")


def between(rng: Random, low: int, high: int) -> int:
    """A uniform integer from low to high, both included; several times faster than ``randint``."""
    return low + int(rng.random() * (high - low + 1))


def _integer(text: str) -> int | None:
    return int(text) if _INTEGER.fullmatch(text) else None


def same_integer(answer: str, gold: str) -> bool:
    """Equal as integers: blanks around, a plus sign and leading zeros do not matter."""
    value = _integer(answer.strip())
    return value is not None and value == _integer(gold)


def _pair(text: str, separator: str, default: int) -> tuple[int, int] | None:
    first, found, second = text.strip().partition(separator)
    a, b = _integer(first), _integer(second) if found else default
    return None if a is None or b is None else (a, b)


def same_fraction(answer: str, gold: str) -> bool:
    """Equal as rational numbers, so an unreduced fraction counts; ``3`` means ``3/1``."""
    mine, theirs = _pair(answer, "/", 1), _pair(gold, "/", 1)
    if mine is None or theirs is None or mine[1] == 0:
        return False
    return mine[0] * theirs[1] == theirs[0] * mine[1]


def same_quotient(answer: str, gold: str) -> bool:
    """Same quotient and same remainder, written ``41r4``; ``41`` means ``41r0``."""
    mine = _pair(answer, "r", 0)
    return mine is not None and mine == _pair(gold, "r", 0)


class Family(NamedTuple):
    """A kind of problem, with levels 1 to 5 for training and 6 and 7 held out as harder ones."""

    name: str
    asks: str
    generate: Callable[[int, Random], tuple[str, Solution]]
    verify: Callable[[str, str], bool] = same_integer
