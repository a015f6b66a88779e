"""Small pools of the tiny world for the tests of judges: right and spoiled responses from the generators."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from random import Random

from reasonlab.judges.types import Candidate
from reasonlab.problems.families.steps import Style, render
from reasonlab.problems.reflections import spoiled
from reasonlab.problems.tiny_world import Split, stream


def pool(
    problems: int,
    each: int = 4,
    split: Split = "train",
    seed: int = 0,
    styles: Sequence[Style] = ("worked",),
    families: Sequence[str] = ("sum", "gcd", "counting"),
    level: int = 1,
) -> list[Candidate]:
    """Half of a problem's responses are right; the other half have a mistake."""
    rng = Random(seed)
    found = []
    for drawn in islice(stream(split, seed, families, {level: 1.0}), problems):
        problem = drawn.problem
        for number in range(each):
            right, style = number % 2 == 0, rng.choice(styles)
            text = render(drawn.solution, style, rng, 0.2) if right else spoiled(drawn, rng, style)
            found.append(
                Candidate(problem.id, problem.question, text, problem.answer, right, problem.family, problem.level)
            )
    return found
