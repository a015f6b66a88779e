"""How well a process judge finds the first wrong step: the measure of ProcessBench.

A judge calls the first step whose score is below a threshold the first wrong one, or says that there is none. With the
accuracy a on samples with a wrong step (the step must be met exactly) and b on samples without,

    F1 = 2ab / (a + b)

The threshold is part of the judge, so it is chosen on another split than the one that is scored, and reported. A judge
that always says the same has F1 = 0, because a or b is 0; beside the score stands what guessing can reach (`blind_f1`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reasonlab.errors import UserError
from reasonlab.evaluate.intervals import Interval, resampled_means
from reasonlab.judges.bench import Floats, intervals
from reasonlab.judges.labels import ALL_RIGHT
from reasonlab.keys import key


@dataclass(frozen=True, slots=True)
class Threshold:
    """A step is called wrong if its score is below `value`; `f1` is what that gave on the `split` it was chosen on."""

    value: float
    f1: float = math.nan
    split: str = ""


@dataclass(frozen=True, slots=True)
class ProcessScore:
    """Accuracy in placing the error of wrong samples and in passing right ones, and their harmonic mean."""

    f1: Interval
    location: Interval  # wrong samples whose first wrong step is found exactly
    passed: Interval  # right samples that are called right
    noticed: float  # wrong samples that are called wrong, wherever
    blind: float  # the highest F1 of a judge that reads nothing
    split: str
    threshold: Threshold
    wrong_samples: int
    right_samples: int


def first_below(steps: Sequence[float], threshold: float) -> int:
    """The first step that is called wrong, or -1."""
    return next((i for i, score in enumerate(steps) if score < threshold), ALL_RIGHT)


def choose_threshold(steps: Sequence[Sequence[float]], labels: Sequence[int], split: str) -> Threshold:
    """The threshold with the highest F1 on a split that is not the test.

    Sample i is judged rightly for exactly the thresholds θ with score[label] < θ ≤ min(scores before), or, if all its
    steps are right, with θ ≤ min(scores). So F1 is constant between neighbouring scores, and one pass over them finds
    its maximum. Of equal ones the middle of the widest stretch is taken.
    """
    low, high, wrong = _judged_rightly(steps, labels)
    edges = np.unique(np.concatenate([np.asarray(one, dtype=np.float64) for one in steps]))
    # Between edges[i - 1] and edges[i], the latter included; beyond the last, everything is called wrong.
    bounds = np.append(edges, np.inf)
    f1 = _harmonic(
        _covered(low[wrong], high[wrong], bounds) / wrong.sum(),
        _covered(low[~wrong], high[~wrong], bounds) / (~wrong).sum(),
    )
    best = np.flatnonzero(f1 == f1.max())
    stretches = np.split(best, np.flatnonzero(np.diff(best) > 1) + 1)

    def ends(stretch: NDArray[np.int64]) -> tuple[float, float]:
        first, last = int(stretch[0]), int(stretch[-1])
        above = float(edges[first - 1]) if first else float(edges[0])
        return above, float(edges[last]) if last < len(edges) else math.nextafter(float(edges[-1]), math.inf)

    start, end = max((ends(stretch) for stretch in stretches), key=lambda pair: pair[1] - pair[0])
    middle = (start + end) / 2
    return Threshold(middle if start < middle <= end else end, float(f1.max()), split)


def process_bench(
    steps: Sequence[Sequence[float]], labels: Sequence[int], split: str, threshold: Threshold, seed: int = 0
) -> ProcessScore:
    """F1 = 2ab / (a + b) of the accuracies a on wrong and b on right samples, with bootstrap intervals over samples.

    The threshold must come from another split (or be fixed beforehand: `Threshold(0.5)`).
    """
    if threshold.split == split:
        raise UserError(
            f"the threshold was chosen on {split}, the split to be scored", "Choose it on another, as published"
        )
    _judged_rightly(steps, labels)  # checks
    said = np.array([first_below(one, threshold.value) for one in steps])
    true = np.asarray(labels)
    hits, wrong = (said == true).astype(np.float64), true != ALL_RIGHT
    location, passed = (
        intervals([hits[group][:, None]], key(seed, "process", name))[0]
        for name, group in (("wrong", wrong), ("right", ~wrong))
    )
    a = resampled_means(hits[wrong][:, None], key(seed, "process-f1", "wrong"))[:, 0]
    b = resampled_means(hits[~wrong][:, None], key(seed, "process-f1", "right"))[:, 0]
    low, high = np.quantile(_harmonic(a, b), [0.025, 0.975])
    estimate = float(_harmonic(np.array(location.estimate), np.array(passed.estimate)))
    return ProcessScore(
        Interval(estimate, float(low), float(high)),
        location,
        passed,
        float((said[wrong] != ALL_RIGHT).mean()),
        blind_f1([len(one) for one in steps], labels),
        split,
        threshold,
        int(wrong.sum()),
        int((~wrong).sum()),
    )


def blind_f1(counts: Sequence[int], labels: Sequence[int]) -> float:
    """The highest F1, in expectation, of a judge that sees how many steps a solution has (`counts`) and nothing else.

    It says "no error" with probability p, else always the same place, counted from the first step or from the last.
    With the share s of wrong samples whose error is there, a = (1 − p)·s and b = p, so that

        max_p F1 = 2s / (1 + √s)²   at   p = √s / (1 + √s)

    Place and p are the best for the very samples that are scored, which favours guessing.
    """
    wrong = [(label, label - count) for count, label in zip(counts, labels, strict=True) if label != ALL_RIGHT]
    if not wrong or len(wrong) == len(labels):
        return 0.0
    most = max(Counter(places).most_common(1)[0][1] for places in zip(*wrong, strict=True))
    share = most / len(wrong)
    return 2 * share / (1 + math.sqrt(share)) ** 2


def _judged_rightly(
    steps: Sequence[Sequence[float]], labels: Sequence[int]
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """For each sample the thresholds (low, high] that judge it rightly, and whether it is a wrong sample."""
    if len(steps) != len(labels):
        raise UserError(f"{len(steps)} scored samples and {len(labels)} labels", "Score this very set")
    low, high = np.full(len(steps), -np.inf), np.full(len(steps), np.inf)
    for i, (scores, label) in enumerate(zip(steps, labels, strict=True)):
        if not scores or not ALL_RIGHT <= label < len(scores) or not np.isfinite(scores).all():
            raise UserError(
                f"sample {i} has {len(scores)} finite step scores at most and the label {label}",
                "Every step needs a score, and the label is one of them or -1",
            )
        before = scores if label == ALL_RIGHT else scores[:label]
        high[i] = min(before, default=np.inf)
        if label != ALL_RIGHT:
            low[i] = scores[label]
    wrong = np.asarray(labels) != ALL_RIGHT
    if not wrong.any() or wrong.all():
        raise UserError("F1 needs wrong samples and right ones", "Give a set that has both")
    return low, high, wrong


def _covered(low: Floats, high: Floats, thresholds: Floats) -> Floats:
    """How many intervals (low, high] hold each threshold."""
    open_ones = low < high
    begun = np.searchsorted(np.sort(low[open_ones]), thresholds, side="left")
    ended = np.searchsorted(np.sort(high[open_ones]), thresholds, side="left")
    return (begun - ended).astype(np.float64)


def _harmonic(a: Floats, b: Floats) -> Floats:
    mean: Floats = 2 * a * b / np.where(a + b > 0, a + b, 1.0)
    return mean
