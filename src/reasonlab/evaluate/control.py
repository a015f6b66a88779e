"""The forced-style control: how much of a gain is choosing to think, and how much is thinking better.

A model that learns to write its steps may solve nothing better than before: it only stopped blurting. So both ends of
a run are also evaluated with thinking forced, and the gain is divided by that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from reasonlab.evaluate.evaluator import Answer, by_question
from reasonlab.evaluate.statistics import Interval, mean_interval
from reasonlab.runs import RunReader

SUITE, FORCED_SUITE = "tiny", "tiny-forced"
ALONE = "One evaluation so far: there is nothing to compare it with."
_ANSWER_FIELDS = tuple(field.name for field in fields(Answer))


@dataclass(frozen=True, slots=True)
class Split:
    """A gain in accuracy between two iterations, divided by the control; paired by question, as fractions of 1.

    skill = forced after − forced before: how much better the model thinks when it thinks.
    style = gain − skill: the rest, which comes from choosing to think.
    """

    before: int
    after: int
    gain: Interval
    style: Interval
    skill: Interval


def recorded_answers(reader: RunReader, suite: str, step: int) -> list[Answer]:
    return [
        Answer(**{name: row[name] for name in _ANSWER_FIELDS if name in row}) for row in reader.evaluation(suite, step)
    ]


def split_gain(free: dict[int, list[Answer]], forced: dict[int, list[Answer]]) -> Split | None:
    """The gain between the first and the last iteration that have both evaluations; None with fewer than two."""
    both = sorted(free.keys() & forced.keys())
    if len(both) < 2:
        return None
    before, after = both[0], both[-1]
    four = [_score_by_problem(suite[step]) for suite in (free, forced) for step in (before, after)]
    shared = [problem for problem in four[0] if all(problem in scores for scores in four)]
    if not shared:
        return None
    gain, skill = (
        np.array([after[problem] - before[problem] for problem in shared]) for before, after in (four[:2], four[2:])
    )
    return Split(before, after, mean_interval(gain), mean_interval(gain - skill), mean_interval(skill))


def _score_by_problem(answers: Sequence[Answer]) -> dict[str, float]:
    """The mean grade of each question; questions of which no answer could be graded are left out."""
    problems = dict.fromkeys(answer.problem for answer in answers)
    correct, _ = by_question(answers)
    return {
        problem: float(np.nanmean(row))
        for problem, row in zip(problems, correct, strict=True)
        if not np.isnan(row).all()
    }


def change_caption(free: dict[int, list[Answer]]) -> str:
    """The change between both ends, where there is no control: language models think as they like."""
    before, after = min(free), max(free)
    if before == after:
        return ALONE
    first, last = (_score_by_problem(free[step]) for step in (before, after))
    changes = np.array([last[problem] - first[problem] for problem in first if problem in last])
    if len(changes) and not changes.any():  # an interval of no width would look certain
        score = 100 * np.mean([last[problem] for problem in first if problem in last])
        unchanged = f"no question changed; accuracy {score:.1f} % at both ends"
        return f"Iteration {before} to {after}: {unchanged}, on all {len(changes):,} questions together."
    gain = _points(mean_interval(changes), " points") if len(changes) else "not comparable"
    return f"Iteration {before} to {after}: accuracy {gain}, paired, on all {len(changes):,} questions together."


def caption(split: Split | None, evaluations: int) -> str:
    """What the control supports about the gain, and no more."""
    if evaluations == 1:
        return ALONE
    if split is None:
        return (
            "No control at both ends of this run (accuracy with thinking forced), "
            "so the change cannot be divided into choosing to think and thinking better."
        )
    span = f"Iteration {split.before} to {split.after}: "
    gain, style, skill = split.gain, split.style, split.skill
    if gain.low <= 0:
        what = "fell" if gain.high < 0 else "shows no clear change"
        return f"{span}accuracy {what}, {_points(gain, ' points')}; with thinking forced, {_points(skill)}."
    whole = f"{span}of {_points(gain, ' points of accuracy')}, choosing to think accounts for about "
    chosen = _points(style) + (" (not clear of zero)" if style.low <= 0 <= style.high else "")
    if skill.low > 0:
        return f"{whole}{chosen} and thinking better for about {_points(skill)}."
    if skill.high < 0:
        return f"{whole}{chosen}, more than all of it: with thinking forced, accuracy fell, {_points(skill)}."
    return f"{whole}{chosen}; with thinking forced, {_points(skill)}: no clear evidence of better thinking."


def _points(interval: Interval, unit: str = "") -> str:
    """An estimate with its interval; the first one of a sentence, which has the unit, says what the brackets are."""
    level = f"{100 * interval.level:.0f} %: " if unit else ""
    return f"{_signed(interval.estimate)}{unit} [{level}{_signed(interval.low)}, {_signed(interval.high)}]"


def _signed(share: float) -> str:
    """A share of 1 in points, with a typographic minus and no sign on zero."""
    if not math.isfinite(share):
        return "∞" if share > 0 else "−∞"
    text = f"{100 * share:+.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text
