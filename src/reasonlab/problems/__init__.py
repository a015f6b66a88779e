"""Problems: what one is, and the families of the bundled tiny world."""

from __future__ import annotations

from reasonlab.problems.families import FAMILIES, Family, Parsed, Solution, Step, Style, parse, render
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import Drawn, Split, draw, problem_set, split_of, stream, verify

__all__ = [
    "FAMILIES",
    "Drawn",
    "Family",
    "Parsed",
    "Problem",
    "Solution",
    "Split",
    "Step",
    "Style",
    "draw",
    "parse",
    "problem_set",
    "render",
    "split_of",
    "stream",
    "verify",
]
