"""The family of word problems: a person, a heap of things, and what happens to it."""

from __future__ import annotations

from random import Random

from reasonlab.problems.families.base import Family, between
from reasonlab.problems.families.steps import Solution, Work

NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Mia", "Sam", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "eggs", "nuts", "pens", "shells")
GAINS = ("buys", "finds", "gets", "wins")
LOSSES = ("loses", "sells", "gives", "uses")
PACKS = ("bags", "boxes", "packs", "rows")
OTHER_WORDS = ("has", "of", "half", "more", "times", "as", "many", "both")

# level: steps, largest number, largest pack content
_WORD_LEVELS = {
    1: (1, 20, 5),
    2: (2, 30, 9),
    3: (3, 50, 12),
    4: (4, 99, 15),
    5: (5, 120, 20),
    6: (7, 200, 50),
    7: (9, 300, 90),
}


def _word(level: int, rng: Random) -> tuple[str, Solution]:
    goal, most, most_content = _WORD_LEVELS[level]
    if level == 1:
        goal += between(rng, 0, 1)
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    # The comparison at the end is worth two steps and makes the question longer.
    compares = level >= 3 and rng.random() < 0.4
    work = Work()
    heap = between(rng, 5, most)
    story = f"{name} has {heap} {thing}"
    for_events = goal - 2 if compares else goal
    while len(work.steps) < for_events:
        packs = rng.random() < 0.4 and len(work.steps) + 2 <= for_events  # packs take two steps
        event, heap = _event(work, heap, most, most_content if packs else 0, rng)
        story += f",{event}"
    asked = thing
    if compares:
        other = NAMES[(NAMES.index(name) + between(rng, 1, len(NAMES) - 1)) % len(NAMES)]
        comparison, heap = _comparison(work, heap, most, rng)
        story += f",{other} has {comparison}"
        asked = "both"
    return f"{story}:{asked}=?", work.solution(heap)


def _event(work: Work, heap: int, most: int, most_content: int, rng: Random) -> tuple[str, int]:
    """Something happens to the heap: what is told, and its size after. Without a pack content, no packs."""
    if most_content:
        packs, content = between(rng, 2, 9), between(rng, 3, most_content)
        amount, told = work.multiply(packs, content), f"{packs} {rng.choice(PACKS)} of {content}"
    elif heap > 9 and heap % 2 == 0 and rng.random() < 0.25:
        return f"{rng.choice(LOSSES)} half", work.divide(heap, 2)
    else:
        amount = between(rng, 2, most)
        told = str(amount)
    if heap > amount and rng.random() < 0.6:
        return f"{rng.choice(LOSSES)} {told}", work.subtract(heap, amount)
    return f"{rng.choice(GAINS)} {told}", work.add(heap, amount)


def _comparison(work: Work, heap: int, most: int, rng: Random) -> tuple[str, int]:
    """A second person's heap is told by the first's; both together are asked for."""
    if 2 <= heap < 100 and rng.random() < 0.4:
        factor = between(rng, 2, 9)
        return f"{factor} times as many", work.add(heap, work.multiply(heap, factor))
    more = between(rng, 2, most)
    return f"{more} more", work.add(heap, work.add(heap, more))


WORD = Family("word", "short stories about a heap of things", _word)
