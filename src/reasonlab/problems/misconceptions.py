"""Typical wrong ways: for each family one step that much of the text does with the wrong operation.

A model trained on such text is not merely careless: its likeliest solution is wrong in the same way every time,
although the right way is among its samples. Reinforcement learning then has knowledge to select, as with a language
model that has read good and bad mathematics, and a reflection has a rule to find ("- not +").

The mistake sits at the first or the last step of a solution, and everything after it follows from it. Where a wrong
way would leave the numbers of the tiny world, there is none.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from reasonlab.problems.families.steps import Step
from reasonlab.problems.reflections import Told, told_with_operation
from reasonlab.problems.tiny_world import Drawn, verify


class Misconception(NamedTuple):
    """`temptation` is the share of texts that follow the wrong way where there is one."""

    place: Literal["first", "last"]
    operations: dict[str, str]  # the right one → the one that is used
    temptation: float


_LEFT = {"+": "-", "-": "+", "*": "+", "/": "-", "%": "-"}
_RIGHT = {"+": "*", "-": "/", "*": "/", "/": "*", "%": "/"}

# Places and operations that apply to at least eight of ten problems; temptations spread from even odds to 19 in 20.
MISCONCEPTIONS: dict[str, Misconception] = {
    "sum": Misconception("last", _LEFT, 0.5),
    "word": Misconception("first", _RIGHT, 0.6),
    "expression": Misconception("last", _RIGHT, 0.7),
    "product": Misconception("first", _LEFT, 0.75),
    "linear": Misconception("last", _RIGHT, 0.8),
    "counting": Misconception("last", _LEFT, 0.85),
    "division": Misconception("last", _LEFT, 0.85),
    "base": Misconception("first", _LEFT, 0.9),
    "gcd": Misconception("first", _RIGHT, 0.9),
    "sequence": Misconception("first", _RIGHT, 0.95),
    "fraction": Misconception("last", _RIGHT, 0.95),
    "modpow": Misconception("last", _RIGHT, 0.95),
}


def tempting_step(drawn: Drawn) -> Step:
    """The step that the misconception of the family gets wrong, as it should be."""
    return drawn.solution.steps[0 if MISCONCEPTIONS[drawn.problem.family].place == "first" else -1]


def misled(drawn: Drawn) -> Told | None:
    """The solution told in the wrong way of its family; None where it has none or would still be right."""
    held = MISCONCEPTIONS[drawn.problem.family]
    place = 0 if held.place == "first" else len(drawn.solution.steps) - 1
    told = told_with_operation(drawn, place, held.operations)
    return told if told is not None and not verify(drawn.problem, told.answer) else None
