"""The bundled tiny world: draws from the families, split into train, validation, test and harder problems.

The split of a question is a function of its text alone, so no question can be in two splits, whoever draws
it and with whatever seed. Levels 1 to 5 serve the first three splits; levels 6 and 7 are held out as the
harder split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from random import Random
from typing import Literal, NamedTuple

from reasonlab.errors import UserError
from reasonlab.keys import key
from reasonlab.problems.families import FAMILIES, HARDER_LEVELS, TRAINING_LEVELS, Family, Solution
from reasonlab.problems.problem import Problem

Split = Literal["train", "validation", "test", "harder"]

# Of a hundred buckets, the first bucket after each split's own.
_ENDS: dict[Split, int] = {"train": 80, "validation": 87, "test": 94, "harder": 100}
_SPLIT_OF_BUCKET: tuple[Split, ...] = tuple(
    next(split for split, end in _ENDS.items() if bucket < end) for bucket in range(100)
)
_MOST_ATTEMPTS = 10_000
_MOST_REPEATS = 200  # a cell that repeats itself this often in a row has nothing new to give

FAMILY_NAMES: tuple[str, ...] = tuple(FAMILIES)


class Drawn(NamedTuple):
    """A problem together with its worked solution."""

    problem: Problem
    solution: Solution


def split_of(question: str) -> Split:
    """The split a question belongs to."""
    digest = blake2b(question.encode(), digest_size=8).digest()
    return _SPLIT_OF_BUCKET[int.from_bytes(digest, "big") % 100]


def levels_of(split: Split) -> tuple[int, ...]:
    """The levels a split is drawn from."""
    return HARDER_LEVELS if split == "harder" else TRAINING_LEVELS


def family_of(problem: Problem) -> Family:
    """The family that made a problem."""
    return _family(problem.family)


def verify(problem: Problem, answer_text: str) -> bool:
    """Whether an answer is right, by the rule of the problem's family."""
    return family_of(problem).verify(answer_text, problem.answer)


def draw(family: str, level: int, split: Split, index: int, seed: int = 0) -> Drawn:
    """One problem of a family, level and split; the same arguments always give the same problem."""
    _check_level(level, split)
    generate = _family(family).generate
    for attempt in range(_MOST_ATTEMPTS):
        rng = Random(key(seed, "tiny", family, level, split, index, attempt))
        question, solution = generate(level, rng)
        if split_of(question) == split:
            name = f"{index:06d}" if seed == 0 else f"{seed}-{index:06d}"
            identity = f"{family}/{level}/{split}/{name}"
            return Drawn(Problem(identity, question, solution.answer, family, level), solution)
    raise RuntimeError(f"no {split} question of {family} level {level} in {_MOST_ATTEMPTS} attempts")


def solution_of(problem: Problem) -> Solution:
    """The worked solution of a drawn problem, made again from the key in its id."""
    family, level, split, name = problem.id.split("/")
    seed, _, index = name.rpartition("-")
    return draw(family, int(level), split, int(index), int(seed or 0)).solution  # type: ignore[arg-type]


def problem_set(
    split: Split,
    count: int,
    seed: int = 0,
    families: Sequence[str] = FAMILY_NAMES,
    levels: Sequence[int] | None = None,
) -> list[Problem]:
    """Problems with distinct questions, balanced over families and levels.

    The first n problems do not depend on ``count``. A family and level with no new question left drops out.
    """
    cells = [(family, level) for family in families for level in (levels or levels_of(split))]
    next_index = dict.fromkeys(cells, 0)
    questions: set[str] = set()
    problems: list[Problem] = []
    turn = 0
    while len(problems) < count:
        # A fresh order each turn, so that a short prefix is balanced too.
        order = sorted(next_index)
        Random(key(seed, "tiny-order", split, turn)).shuffle(order)
        for cell in order:
            problem, next_index[cell] = _next_new(cell, split, next_index[cell], seed, questions)
            if problem is None:
                del next_index[cell]
            else:
                questions.add(problem.question)
                problems.append(problem)
        if not next_index:
            raise UserError(
                f"the {split} split has only {len(problems)} such problems, not {count}",
                "Ask for fewer problems or for more families and levels.",
            )
        turn += 1
    return problems[:count]


def _next_new(
    cell: tuple[str, int], split: Split, index: int, seed: int, known: set[str]
) -> tuple[Problem | None, int]:
    for candidate in range(index, index + _MOST_REPEATS):
        problem = draw(*cell, split, candidate, seed).problem
        if problem.question not in known:
            return problem, candidate + 1
    return None, index


def stream(
    split: Split,
    seed: int = 0,
    families: Sequence[str] = FAMILY_NAMES,
    level_weights: Mapping[int, float] | None = None,
) -> Iterator[Drawn]:
    """Draws without end from one generator, for pre-training; families are equally likely.

    ``level_weights`` says how often each level is drawn; by default the split's levels are equally likely.
    """
    weights = level_weights or dict.fromkeys(levels_of(split), 1.0)
    for level in weights:
        _check_level(level, split)
    return _stream(split, seed, [_family(name) for name in families], weights)


def _stream(split: Split, seed: int, families: list[Family], weights: Mapping[int, float]) -> Iterator[Drawn]:
    rng = Random(key(seed, "tiny-stream", split))
    levels, chances = list(weights), list(weights.values())
    number = 0
    while True:
        for level in rng.choices(levels, chances, k=1000):  # in blocks: one call for each is slow
            name, _, generate, _ = families[int(rng.random() * len(families))]
            question, solution = generate(level, rng)
            while split_of(question) != split:
                question, solution = generate(level, rng)
            identity = f"{name}/{level}/{split}/stream-{seed}-{number}"
            yield Drawn(Problem(identity, question, solution.answer, name, level), solution)
            number += 1


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise UserError(f"there is no family {name!r}", f"The families are {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def _check_level(level: int, split: Split) -> None:
    levels = levels_of(split)
    if level not in levels:
        raise UserError(f"the {split} split has no level {level}", f"Its levels are {levels[0]} to {levels[-1]}.")
