"""Which responses of a pool to train on: the best by a judge's scores, a curated set without one, or a random subset.

No choice depends on the order of the file. Ties, which a judge that saturates has by the thousand, are broken by a hash
of the response, keyed by the seed: taking the first ones of the file would select its first source.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reasonlab.errors import UserError
from reasonlab.grading.extract import extract
from reasonlab.grading.grade import extract_answer
from reasonlab.judges.steps import Rule, steps_of
from reasonlab.judges.targets import bare
from reasonlab.judges.types import Candidate
from reasonlab.keys import key

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
BINS = 20
REPEATED_STEPS = 4  # so many times the same in a row, and nobody is thinking any more
_SHORTEST_BLOCK, _LONGEST_BLOCK = 8, 2000  # characters

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of scores between the edges, in the pool and among the chosen, for each source and each family."""

    edges: tuple[float, ...]
    pool_by_source: dict[str, list[int]]
    chosen_by_source: dict[str, list[int]]
    pool_by_family: dict[str, list[int]]
    chosen_by_family: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Report:
    """What was chosen from what."""

    pool: int
    chosen: int
    duplicates: int  # of a response to the same question
    same_problem: int  # left out because a better response to the problem is in
    over_limit: int  # left out, though good enough, because their family has its share
    threshold: float  # the lowest score that was chosen
    tied: int  # candidates with that score, duplicates aside
    tied_chosen: int
    right_in_pool: float  # share of right responses where that is known (nan: of none)
    right_in_chosen: float
    quantiles: tuple[float, ...]
    pool_quantiles: tuple[float, ...]
    chosen_quantiles: tuple[float, ...]
    histogram: Histogram

    def to_json(self) -> dict[str, Any]:
        """For a file; nan, which JSON does not know, becomes None."""
        row = asdict(self)
        return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}

    def __str__(self) -> str:
        highest = self.chosen_quantiles[-1]
        text = f"{self.chosen:,} of {self.pool:,} chosen, scores from {self.threshold:.4g} to {highest:.4g}"
        left = ((self.duplicates, "duplicates"), (self.same_problem, "others of the same problem"))
        text += "".join(f"; {count:,} {what} left out" for count, what in left if count)
        if self.tied > self.tied_chosen:
            text += f"; {self.tied_chosen:,} of {self.tied:,} with the lowest score, by lot"
        if not math.isnan(self.right_in_chosen):
            text += f"; {100 * self.right_in_chosen:.1f} % are right ({100 * self.right_in_pool:.1f} % of the pool)"
        return text


@dataclass(frozen=True, slots=True)
class Chosen:
    """The places of the chosen candidates in the pool, best first."""

    indices: tuple[int, ...]
    report: Report


def select(
    candidates: Sequence[Candidate],
    scores: ArrayLike,
    top: int,
    per_family: int | Literal["even"] | None = None,
    dedup: bool = True,
    one_per_problem: bool = False,
    seed: int = 0,
) -> Chosen:
    """The `top` candidates with the highest scores.

    `per_family` is the most that one family may have, or "even" for the same number of each, as far as there are
    enough. With `dedup` a response counts once for a question, whatever its case and blanks.
    """
    values = _checked(candidates, scores, top)
    order = sorted(range(len(candidates)), key=lambda i: (-values[i], _lot(candidates[i], "tie", seed)))
    kept, duplicates = _distinct(order, lambda i: _normal(candidates[i])) if dedup else (order, 0)
    kept, same_problem = _distinct(kept, lambda i: candidates[i].problem) if one_per_problem else (kept, 0)
    limits = _limits(Counter(candidates[i].family for i in kept), per_family, top)
    taken: Counter[str] = Counter()
    chosen: list[int] = []
    over_limit = 0
    for i in kept:
        family = candidates[i].family
        if len(chosen) == top:
            break
        if taken[family] == limits[family]:
            over_limit += 1
            continue
        taken[family] += 1
        chosen.append(i)
    if len(chosen) < top:
        raise UserError(
            f"only {len(chosen)} of {len(candidates)} candidates can be chosen, not {top}"
            f" ({duplicates} duplicates, {same_problem} others of the same problem, {over_limit} beyond the limit of "
            "their family)",
            "Choose fewer, or allow more of a family or a problem",
        )
    counts = {"duplicates": duplicates, "same_problem": same_problem, "over_limit": over_limit}
    return Chosen(tuple(chosen), _report(candidates, values, chosen, kept, counts))


def random_subset(candidates: Sequence[Candidate], top: int, seed: int = 0, one_per_problem: bool = False) -> list[int]:
    """A subset by lot. A smaller one is the beginning of a larger one with the same seed."""
    _checked(candidates, np.zeros(len(candidates)), top)
    times: Counter[Candidate] = Counter()
    lots: list[tuple[int, int]] = []
    for i, candidate in enumerate(candidates):  # copies are the same candidate, but each has a lot of its own
        lots.append((key(_lot(candidate, "random", seed), times[candidate]), i))
        times[candidate] += 1
    order = [i for _, i in sorted(lots)]
    if one_per_problem:
        order, _ = _distinct(order, lambda i: candidates[i].problem)
    return _enough(order, top, "by lot")


def curated(
    candidates: Sequence[Candidate], top: int, rule: Rule = "tiny", seed: int = 0
) -> tuple[list[int], dict[str, int]]:
    """A set chosen without a judge, in the spirit of s1: quality, then difficulty, then diversity.

    Quality: the response is right, ends in an answer, closes its thought, does not repeat itself, and is no duplicate.
    Difficulty: somebody in the pool fails at the problem, or, where nobody else tried it, its level lies above the mean
    level of all that are left (easier ones come in only if these do not suffice), and longer responses are likelier: of
    a family's responses in order of length, the one at place r is drawn with chance ∝ 2^−r. Diversity: one response a
    problem, and the families take turns.

    Returns the chosen places and how many candidates each stage left.
    """
    _checked(candidates, np.zeros(len(candidates)), top)
    right = [i for i, candidate in enumerate(candidates) if candidate.correct]
    if not right:
        raise UserError("no candidate is known to be right", "Grade the pool first: curation needs `correct`")
    sound = [i for i in right if _is_well_formed(candidates[i].response)]
    sound = [i for i in sound if not repeats_itself(candidates[i], rule)]
    by_lot = sorted(sound, key=lambda i: _lot(candidates[i], "curated", seed))
    distinct, _ = _distinct(by_lot, lambda i: _normal(candidates[i]))
    failed_at = {candidate.problem for candidate in candidates if candidate.correct is False}
    tried = Counter(candidate.problem for candidate in candidates)
    middle = sum(candidates[i].level for i in distinct) / max(1, len(distinct))

    def is_hard(i: int) -> bool:
        problem = candidates[i].problem
        return problem in failed_at if tried[problem] > 1 else candidates[i].level > middle

    hard, easy = [i for i in distinct if is_hard(i)], [i for i in distinct if not is_hard(i)]
    stages = {"pool": len(candidates), "right": len(right), "sound": len(sound), "distinct": len(distinct)}
    stages["hard"] = len(hard)
    chosen = _in_turns(candidates, hard, top, seed)
    chosen += _in_turns(candidates, easy, top - len(chosen), seed)
    return _enough(chosen, top, "after curation"), stages


def repeats_itself(candidate: Candidate, rule: Rule) -> bool:
    """Whether a step stands four times in a row, or the response ends in a block that does."""
    steps = [bare(step) for step in steps_of(candidate, rule)]
    runs = range(len(steps) - REPEATED_STEPS + 1)
    if any(len(set(steps[start : start + REPEATED_STEPS])) == 1 for start in runs):
        return True
    text = candidate.response.rstrip()
    lengths = range(_SHORTEST_BLOCK, min(len(text) // REPEATED_STEPS, _LONGEST_BLOCK) + 1)
    # The end is n characters, four times over, if it is the same when moved by n.
    return any(text[-REPEATED_STEPS * n : -n] == text[-(REPEATED_STEPS - 1) * n :] for n in lengths)


def _in_turns(candidates: Sequence[Candidate], among: Sequence[int], top: int, seed: int) -> list[int]:
    """Families take turns; each draws one of its responses, the longer the likelier, of a problem not yet taken."""
    waiting: dict[str, list[int]] = defaultdict(list)
    for i in sorted(among, key=lambda i: -len(candidates[i].response)):  # stable: equal lengths stay in order of lot
        waiting[candidates[i].family].append(i)
    rng = Random(key(seed, "curated-draws"))
    problems: set[str] = set()
    chosen: list[int] = []
    while waiting and len(chosen) < top:
        for family in sorted(waiting, key=lambda name: key(seed, "curated-turn", name, len(chosen))):
            line = waiting[family] = [i for i in waiting[family] if candidates[i].problem not in problems]
            if not line:
                del waiting[family]
            elif len(chosen) < top:
                place = min(int(-math.log2(1 - rng.random())), len(line) - 1)
                chosen.append(line.pop(place))
                problems.add(candidates[chosen[-1]].problem)
    return chosen


def _is_well_formed(response: str) -> bool:
    closed = "<think>" not in response or "</think>" in response
    return closed and (extract_answer(response) is not None or extract(response) is not None)


def _checked(candidates: Sequence[Candidate], scores: ArrayLike, top: int) -> Floats:
    values = np.asarray(scores, dtype=np.float64)
    if values.shape != (len(candidates),):
        raise UserError(f"{values.size} scores for {len(candidates)} candidates", "Score this very pool")
    if np.isnan(values).any():
        raise UserError(f"{int(np.isnan(values).sum())} scores are not numbers", "Score the pool again")
    if not 1 <= top <= len(candidates):
        raise UserError(f"{top} of {len(candidates)} candidates cannot be chosen", "Give a number from 1 to the pool's")
    return values


def _enough(order: list[int], top: int, where: str) -> list[int]:
    if len(order) < top:
        raise UserError(f"only {len(order)} candidates are left {where}, not {top}", "Choose fewer or give more")
    return order[:top]


def _lot(candidate: Candidate, what: str, seed: int) -> int:
    return key(seed, what, candidate.problem, candidate.response, candidate.source)


def _normal(candidate: Candidate) -> tuple[str, str]:
    """Question and response in one spelling of case, width and blanks. Signs stay: mathematics is about them."""
    texts = (candidate.question, candidate.response.replace("<eos>", ""))
    question, response = (" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in texts)
    return question, response


def _distinct(order: Sequence[int], name: Callable[[int], object]) -> tuple[list[int], int]:
    """The first of each name, and how many others there are."""
    first: dict[object, int] = {}
    for i in order:
        first.setdefault(name(i), i)
    return list(first.values()), len(order) - len(first)


def _limits(sizes: Counter[str], per_family: int | Literal["even"] | None, top: int) -> dict[str, int]:
    """How many each family may have at most."""
    if per_family is None:
        return dict(sizes)
    if per_family != "even":
        if per_family < 1:
            raise UserError("a family may have at least one candidate", "Give a positive limit, or none")
        return dict.fromkeys(sizes, per_family)
    limits: dict[str, int] = {}
    left = top
    # The smallest families first: what they cannot fill goes to the others in equal parts.
    for done, family in enumerate(sorted(sizes, key=lambda name: (sizes[name], name))):
        limits[family] = min(sizes[family], left // (len(sizes) - done))
        left -= limits[family]
    return limits


def _report(
    candidates: Sequence[Candidate], values: Floats, chosen: Sequence[int], kept: Sequence[int], counts: dict[str, int]
) -> Report:
    threshold = float(values[list(chosen)].min())
    tied = [i for i in kept if values[i] == threshold]
    everyone = range(len(candidates))
    low, high = float(values.min()), float(values.max())
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)

    def counted(which: Iterable[int], name: Literal["source", "family"]) -> dict[str, list[int]]:
        groups: dict[str, list[float]] = defaultdict(list)
        for i in which:
            groups[getattr(candidates[i], name)].append(float(values[i]))
        return {group: np.histogram(groups[group], edges)[0].tolist() for group in sorted(groups)}

    return Report(
        pool=len(candidates),
        chosen=len(chosen),
        **counts,
        threshold=threshold,
        tied=len(tied),
        tied_chosen=len(set(tied) & set(chosen)),
        right_in_pool=_right(candidates, everyone),
        right_in_chosen=_right(candidates, chosen),
        quantiles=QUANTILES,
        pool_quantiles=tuple(map(float, np.quantile(values, QUANTILES))),
        chosen_quantiles=tuple(map(float, np.quantile(values[list(chosen)], QUANTILES))),
        histogram=Histogram(
            tuple(map(float, edges)),
            counted(everyone, "source"),
            counted(chosen, "source"),
            counted(everyone, "family"),
            counted(chosen, "family"),
        ),
    )


def _right(candidates: Sequence[Candidate], which: Iterable[int]) -> float:
    known = [candidates[i].correct for i in which if candidates[i].correct is not None]
    return sum(map(bool, known)) / len(known) if known else math.nan
