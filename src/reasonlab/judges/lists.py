"""From a pool to training lists: k right and n − k wrong responses to one problem, as balanced as the pool allows.

Score-sorted sampling (AceMath) guards against false labels with the scores of another judge: right responses are drawn
from the `top` best-scored right ones, wrong responses from the `top` worst-scored wrong ones, so that a response which
the grader and the judge see differently is seldom taken. Without scores all are equally likely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from reasonlab.errors import UserError
from reasonlab.judges.types import Candidate
from reasonlab.keys import key

LIST_SIZE = 6
TOP = 14


@dataclass(frozen=True, slots=True)
class CandidateList:
    """Right and wrong responses to one problem, at least one of each."""

    problem: str
    right: tuple[Candidate, ...]
    wrong: tuple[Candidate, ...]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.right + self.wrong


@dataclass(frozen=True, slots=True)
class ListReport:
    """What became of a pool."""

    candidates: int  # in the pool
    unlabelled: int  # left out: nobody said whether they are right
    repeated: int  # left out: the same response to the same problem, word for word
    problems: int
    all_right: int  # problems left out: nothing to compare
    all_wrong: int
    lists: int  # problems kept
    short: int  # lists of fewer than the wanted responses
    used_right: int
    used_wrong: int

    def __str__(self) -> str:
        return (
            f"{self.lists:,} lists from {self.problems:,} problems with {self.candidates:,} candidates: "
            f"{self.used_right:,} right and {self.used_wrong:,} wrong responses are used; left out are "
            f"{self.all_right:,} problems all right, {self.all_wrong:,} all wrong, {self.repeated:,} repeated and "
            f"{self.unlabelled:,} unlabelled responses; {self.short:,} lists are short"
        )


def group(pool: Sequence[Candidate]) -> dict[str, list[int]]:
    """The places of each problem's candidates in the pool. Two questions under one id are refused."""
    places: dict[str, list[int]] = {}
    for place, candidate in enumerate(pool):
        mine = places.setdefault(candidate.problem, [])
        if mine and pool[mine[0]].question != candidate.question:
            raise UserError(
                f"candidates {mine[0] + 1} and {place + 1} ask different questions as {candidate.problem!r}",
                "Give every question an id of its own",
            )
        mine.append(place)
    return places


def make_lists(
    pool: Sequence[Candidate],
    size: int = LIST_SIZE,
    scores: Sequence[float] | None = None,
    top: int = TOP,
    seed: int = 0,
) -> tuple[list[CandidateList], ListReport]:
    """One list of at most `size` responses for each problem that has right and wrong ones.

    Half of a list is right, unless there are too few of one sort; then the other fills up. `scores` of another judge,
    one for each candidate, switch on score-sorted sampling. Draws are keyed by seed and problem.
    """
    if size < 2:
        raise UserError(f"a list of {size} has nothing to compare", "Lists hold at least 2 responses")
    if scores is not None and len(scores) != len(pool):
        raise UserError(f"there are {len(scores)} scores for {len(pool)} candidates", "Score the whole pool")
    if scores is not None and not all(map(math.isfinite, scores)):
        raise UserError("some scores of the pool are not finite", "Score the pool again")
    lists: list[CandidateList] = []
    unlabelled = repeated = all_right = all_wrong = 0
    grouped = group(pool)
    for problem, places in grouped.items():
        distinct: dict[str, int] = {}
        for place in places:
            distinct.setdefault(pool[place].response, place)
        repeated += len(places) - len(distinct)
        right = [place for place in distinct.values() if pool[place].correct is True]
        wrong = [place for place in distinct.values() if pool[place].correct is False]
        unlabelled += len(distinct) - len(right) - len(wrong)
        if not right or not wrong:
            all_right += bool(right)
            all_wrong += bool(wrong)
            continue
        if scores is not None:
            right = sorted(right, key=lambda place: -scores[place])[:top]
            wrong = sorted(wrong, key=lambda place: scores[place])[:top]
        of_wrong = min(len(wrong), size - min(len(right), size // 2))
        of_right = min(len(right), size - of_wrong)
        rng = Random(key(seed, "list", problem))
        lists.append(CandidateList(problem, _drawn(pool, right, of_right, rng), _drawn(pool, wrong, of_wrong, rng)))
    report = ListReport(
        candidates=len(pool),
        unlabelled=unlabelled,
        repeated=repeated,
        problems=len(grouped),
        all_right=all_right,
        all_wrong=all_wrong,
        lists=len(lists),
        short=sum(len(one.candidates) < size for one in lists),
        used_right=sum(len(one.right) for one in lists),
        used_wrong=sum(len(one.wrong) for one in lists),
    )
    return lists, report


def _drawn(pool: Sequence[Candidate], places: Iterable[int], count: int, rng: Random) -> tuple[Candidate, ...]:
    return tuple(pool[place] for place in sorted(rng.sample(list(places), count)))
