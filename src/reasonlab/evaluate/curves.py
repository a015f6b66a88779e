"""What k answers are worth: pass@k, maj@k and rm@k for every k up to n, from one set of n answers a question.

Each is the exact mean over all subsets of k out of the n answers, which is unbiased for k fresh ones. Past k = n/2 the
subsets overlap so much that the curve, though unbiased, moves as one with the few answers there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from reasonlab.evaluate.intervals import Floats, Interval, resampled_means, vector, wilson
from reasonlab.keys import key

_MOST_ANSWERS = 1000  # C(n, n/2) of more no longer fits into a float


@dataclass(frozen=True, slots=True)
class Curve:
    """A benchmark's score against k = 1, 2, …, with a band over questions; `answers` is n, the answers a question."""

    points: tuple[Interval, ...]
    answers: int

    def at(self, k: int) -> Interval:
        if not 1 <= k <= len(self.points):
            raise ValueError(f"k={k} is not between 1 and {len(self.points)}, the answers to every question")
        return self.points[k - 1]

    @property
    def reliable_k(self) -> int:
        """The largest k with n ≥ 2k; beyond it, sample more answers."""
        return self.answers // 2


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k answers is right, estimated without bias from c right ones among n:

    pass@k = 1 − C(n − c, k) / C(n, k)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n={n}, c={c}, k={k}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_curve(correct: Iterable[ArrayLike], seed: int = 0, level: float = 0.95) -> Curve:
    """pass@k over questions; `correct[i]` holds the grades (0 or 1) of question i's answers."""
    grades = [_grades(row) for row in correct]
    return _curve([1 - _below(len(row))[1:, len(row) - int(row.sum())] for row in grades], seed, "pass", level)


def maj_at_k(votes: Sequence[Hashable | None], correct: ArrayLike) -> Floats:
    """The chance that the commonest of k answers is right, for k = 1 … n; among equally common ones a draw decides.

    All correct answers are one answer, however they are written; wrong ones are the same if their votes are equal;
    None is an answer that casts no vote, and k of those are wrong. For each number v of right votes, the subsets are
    counted in which no rival has more than v, by how many have exactly v: rivals with fewer than v answers, and those
    without a vote, can be drawn in any number.
    """
    right = _grades(correct)
    n, c = len(right), int(right.sum())
    if len(votes) != n:
        raise ValueError(f"one vote for each answer is needed, not {len(votes)} for {n}")
    rivals = Counter(vote for vote, is_right in zip(votes, right, strict=True) if not is_right and vote is not None)
    wins = np.zeros(n + 1)
    for v in range(1, c + 1):
        strong = [count for count in rivals.values() if count >= v]
        won = _convolved(_shared_wins(strong, v, n), _binomials(n - c - sum(strong)))
        wins[v:] += math.comb(c, v) * won[: n + 1 - v]
    return wins[1:] / _binomials(n)[1:]


def maj_curve(
    votes: Iterable[Sequence[Hashable | None]], correct: Iterable[ArrayLike], seed: int = 0, level: float = 0.95
) -> Curve:
    """maj@k over questions; see `maj_at_k`."""
    rows = [maj_at_k(v, c) for v, c in zip(votes, correct, strict=True)]
    return _curve(rows, seed, "maj", level)


def rm_at_k(scores: ArrayLike, correct: ArrayLike) -> Floats:
    """The chance that the best-scored of k answers is right, for k = 1 … n; among equal scores a draw decides.

    The best score of a subset is that of a tied group with g members and L answers below it with chance
    (C(L + g, k) − C(L, k)) / C(n, k), and the answer taken is then any of the g alike.
    """
    s, right = vector(scores), _grades(correct)
    if s.shape != right.shape or np.isnan(s).any():
        raise ValueError("one score for each answer is needed, and no nan")
    _, group, sizes = np.unique(s, return_inverse=True, return_counts=True)
    share_right = np.bincount(group, weights=right) / sizes
    edges = np.concatenate([[0], np.cumsum(sizes)])
    best: Floats = np.diff(_below(len(s))[1:, edges], axis=1) @ share_right
    return best


def rm_curve(scores: Iterable[ArrayLike], correct: Iterable[ArrayLike], seed: int = 0, level: float = 0.95) -> Curve:
    """rm@k over questions; see `rm_at_k`."""
    return _curve([rm_at_k(s, c) for s, c in zip(scores, correct, strict=True)], seed, "rm", level)


def _curve(rows: list[Floats], seed: int, name: str, level: float) -> Curve:
    """Means over questions with a bootstrap band over questions; k runs to the fewest answers of any question."""
    if not rows:
        raise ValueError("a curve needs at least one question")
    answers = min(map(len, rows))
    values = np.stack([row[:answers] for row in rows])
    means = resampled_means(values, key(seed, "curve", name))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    points = []
    for k, mean in enumerate(values.mean(axis=0)):
        # Where all questions are at 0 or all at 1, every resample is too, and says nothing about other questions.
        settled = mean in (0.0, 1.0)
        points.append(
            wilson(float(mean), len(rows), level)
            if settled
            else Interval(float(mean), float(low[k]), float(high[k]), level)
        )
    return Curve(tuple(points), answers)


def _shared_wins(rivals: list[int], v: int, n: int) -> Floats:
    """For u = 0 … n: the ways in which rivals give u answers and none more than v, each way with t of them at v
    counted 1/(t + 1), the chance of the right answer in the draw."""
    ways = np.zeros((len(rivals) + 1, n + 1))
    ways[0, 0] = 1.0
    for rival in rivals:
        new = np.zeros_like(ways)
        for j in range(v):
            new[:, j:] += math.comb(rival, j) * ways[:, : n + 1 - j]
        new[1:, v:] += math.comb(rival, v) * ways[:-1, : n + 1 - v]
        ways = new
    shared: Floats = (ways / np.arange(1, len(rivals) + 2)[:, None]).sum(axis=0)
    return shared


def _convolved(a: Floats, b: Floats) -> Floats:
    return np.convolve(a, b)[: len(a)]


def _binomials(n: int) -> Floats:
    return np.array([math.comb(n, j) for j in range(n + 1)], dtype=np.float64)


def _below(n: int) -> Floats:
    """C(L, k) / C(n, k) for k (rows) and L (columns) from 0 to n: the chance that all of k answers are among L."""
    table = np.ones((n + 1, n + 1))
    columns = np.arange(n + 1)
    for k in range(n):
        table[k + 1] = table[k] * np.maximum(columns - k, 0) / (n - k)
    return table


def _grades(correct: ArrayLike) -> Floats:
    right = vector(correct)
    if not np.isin(right, (0.0, 1.0)).all():
        raise ValueError("grades must be 0 or 1: leave out answers that could not be graded")
    if right.size > _MOST_ANSWERS:
        raise ValueError(f"{right.size} answers to one question are too many for exact counts ({_MOST_ANSWERS})")
    return right
