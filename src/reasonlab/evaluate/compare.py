"""Two sets of answers to the same problems, compared problem by problem: accuracy and length, with what flipped.

Differences are B − A throughout. Answers are rows as an evaluation stores them (`Answer.row()`), and nothing here needs
the model that gave them. A problem takes part if both sides have an answer to it that could be graded; its panel is its
benchmark, or its family where there is only one benchmark. Lengths are compared where both sides know them: an endpoint
may not have counted tokens (−1), and an answer that never came (finish "error") has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reasonlab.errors import UserError
from reasonlab.evaluate.frontier import Dominance, dominance
from reasonlab.evaluate.intervals import Floats, Interval, ratio_interval, score_interval
from reasonlab.evaluate.lengths import Lengths, lengths
from reasonlab.evaluate.paired import (
    accuracy_difference,
    holm,
    mcnemar,
    minimum_detectable_effect,
    paired_difference,
    sign_flip,
    varies,
)

Row = Mapping[str, Any]
Identity = tuple[str, str]  # benchmark (or family) and problem

TOTAL = "all"
FEWEST = 5  # problems for what rests on an estimated scatter: t test, detectable change, dominance, resampled ratio
_SCORE = {"correct": 1.0, "wrong": 0.0}
_NEEDED = ("problem", "verdict", "tokens")
_NEVER_CAME = "error"  # the finish of an answer that failed and may be asked for again


@dataclass(frozen=True, slots=True)
class Side:
    """One system on the shared problems. `samples` is the largest number of answers to a problem; `truncated` and
    `repeating` are the shares of answers cut off at the token limit and stopped for repeating themselves."""

    accuracy: Interval
    lengths: Lengths | None
    samples: int
    ungraded: int
    truncated: float
    repeating: float


@dataclass(frozen=True, slots=True)
class Change:
    """How one measure changed from A to B. `p_holm` is `p_permutation` corrected for the number of panels.

    `detectable` is the smallest true change that would be found four times in five. Where the differences have no
    scatter, or are fewer than FEWEST, nothing can be said: `p_t` is then nan and `detectable` infinite.
    """

    difference: Interval
    p_t: float
    p_permutation: float
    p_holm: float
    detectable: float


@dataclass(frozen=True, slots=True)
class Panel:
    """The comparison on one benchmark or family, or on all problems.

    What concerns tokens, and dominance with it, is None where no problem has known lengths on both sides; dominance
    also where fewer than FEWEST have, or where one of the two measures changed by the same everywhere.
    A problem is solved if more than half of its answers are right; gained and lost ones are those where that changed.
    `both_right_tokens` is the change in the length of correct answers on problems that both sides answered correctly
    at least once (None without any), so that newly solved hard problems do not pass for longer thinking.
    """

    name: str
    problems: int
    a: Side
    b: Side
    accuracy: Change
    tokens: Change | None
    token_ratio: Interval | None
    both_right_tokens: Interval | None
    gained: tuple[str, ...]
    lost: tuple[str, ...]
    longer: int
    shorter: int
    mcnemar: float | None
    dominance: Dominance | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All shared problems together, each panel, and how many problems only one side has (or could be graded on)."""

    total: Panel
    panels: tuple[Panel, ...]
    only_a: int
    only_b: int
    unpaired_ungraded: int

    def as_dict(self) -> dict[str, Any]:
        """For machines: plain JSON values, with null for what is infinite or unknown."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


@dataclass(frozen=True, slots=True)
class _Problem:
    """The answers of one side to one problem."""

    grades: Floats
    tokens: Floats
    truncated: NDArray[np.bool_]
    repeating: NDArray[np.bool_]
    family: str
    question: str | None

    @property
    def is_graded(self) -> bool:
        return not bool(np.isnan(self.grades).all())

    @property
    def score(self) -> float:
        return float(np.nanmean(self.grades))

    def with_lengths(self) -> _Problem | None:
        """Its answers of known length alone; None if there are none or none of them is graded."""
        known = ~np.isnan(self.tokens)
        kept = replace(
            self,
            grades=self.grades[known],
            tokens=self.tokens[known],
            truncated=self.truncated[known],
            repeating=self.repeating[known],
        )
        return kept if known.any() and kept.is_graded else None


def compare(answers_a: Iterable[Row], answers_b: Iterable[Row], seed: int = 0) -> Comparison:
    """Compare two lists of answer rows; `seed` names the bootstrap draws, which are otherwise fixed."""
    a, b = _by_problem(answers_a, "A"), _by_problem(answers_b, "B")
    common = [identity for identity in a if identity in b]
    if not common:
        raise UserError(
            "the two sides share no problem", "Compare answers to the same benchmark, split and problem set"
        )
    for identity in common:
        if None not in (a[identity].question, b[identity].question) and a[identity].question != b[identity].question:
            raise UserError(
                f"problem {identity[1]} asks different questions on the two sides",
                "Compare answers to the same version of a benchmark",
            )
    shared = [identity for identity in common if a[identity].is_graded and b[identity].is_graded]
    if not shared:
        raise UserError("no shared problem has a graded answer on both sides", "Grade the answers first")
    members = _panel_members(shared, a)
    panels = [_panel(name, part, a, b, seed) for name, part in members.items()] if len(members) > 1 else []
    return Comparison(
        total=_panel(TOTAL, shared, a, b, seed),
        panels=tuple(_with_holm(panels)),
        only_a=len(a) - len(common),
        only_b=len(b) - len(common),
        unpaired_ungraded=len(common) - len(shared),
    )


def _by_problem(rows: Iterable[Row], side: str) -> dict[Identity, _Problem]:
    groups: dict[Identity, dict[object, Row]] = {}
    for number, row in enumerate(rows):
        if missing := [name for name in _NEEDED if row.get(name) is None]:
            raise UserError(
                f"row {number + 1} of {side} has no {missing[0]!r}",
                "Give answers written by `reasonlab eval --out`, or a run directory",
            )
        identity = (str(row.get("benchmark") or row.get("family") or ""), str(row["problem"]))
        group, sample = groups.setdefault(identity, {}), row.get("sample", number)
        if sample in group and _NEVER_CAME not in (row.get("finish"), group[sample].get("finish")):
            raise UserError(
                f"{side} holds answer {sample} to problem {identity[1]} twice", "Give each evaluation a file of its own"
            )
        if sample not in group or row.get("finish") != _NEVER_CAME:
            group[sample] = row
    if not groups:
        raise UserError(f"{side} holds no answers", "Evaluate first: reasonlab eval MODEL --out FILE.jsonl")
    return {identity: _problem(list(group.values())) for identity, group in groups.items()}


def _problem(rows: Sequence[Row]) -> _Problem:
    return _Problem(
        grades=np.array([_SCORE.get(row["verdict"], np.nan) for row in rows]),
        tokens=np.array(
            [np.nan if row["tokens"] < 0 or row.get("finish") == _NEVER_CAME else float(row["tokens"]) for row in rows]
        ),
        truncated=np.array([row.get("finish") == "length" for row in rows]),
        repeating=np.array([row.get("finish") == "repetition" for row in rows]),
        family=str(rows[0].get("family") or ""),
        question=rows[0].get("question"),
    )


def _panel_members(shared: Sequence[Identity], a: Mapping[Identity, _Problem]) -> dict[str, list[Identity]]:
    several = len({benchmark for benchmark, _ in shared}) > 1
    members: dict[str, list[Identity]] = {}
    for identity in shared:
        members.setdefault(identity[0] if several else a[identity].family, []).append(identity)
    return members


def _panel(
    name: str,
    members: Sequence[Identity],
    a: Mapping[Identity, _Problem],
    b: Mapping[Identity, _Problem],
    seed: int,
) -> Panel:
    side_a, side_b = [a[identity] for identity in members], [b[identity] for identity in members]
    score_a, score_b = (np.array([p.score for p in side]) for side in (side_a, side_b))
    gained = (score_a <= 0.5) & (score_b > 0.5)
    lost = (score_a > 0.5) & (score_b <= 0.5)
    single = all(p.grades.size == 1 for p in [*side_a, *side_b])
    both = [(p.with_lengths(), q.with_lengths()) for p, q in zip(side_a, side_b, strict=True)]
    measured = [(p, q) for p, q in both if p is not None and q is not None]
    tokens_a, tokens_b = (np.array([pair[side].tokens.mean() for pair in measured]) for side in (0, 1))
    right_a, right_b = (np.array([pair[side].score for pair in measured]) for side in (0, 1))
    return Panel(
        name=name,
        problems=len(members),
        a=_side(side_a),
        b=_side(side_b),
        accuracy=_change(accuracy_difference(score_a, score_b), score_a, score_b, seed),
        tokens=_change(_length_difference(tokens_a, tokens_b), tokens_a, tokens_b, seed) if measured else None,
        token_ratio=_ratio(tokens_a, tokens_b, seed) if measured and (tokens_a > 0).all() else None,
        both_right_tokens=_both_right(measured),
        gained=tuple(identity[1] for identity, flag in zip(members, gained, strict=True) if flag),
        lost=tuple(identity[1] for identity, flag in zip(members, lost, strict=True) if flag),
        longer=int((tokens_b > tokens_a).sum()),
        shorter=int((tokens_b < tokens_a).sum()),
        mcnemar=mcnemar(int(gained.sum()), int(lost.sum())) if single else None,
        dominance=dominance(right_a, tokens_a, right_b, tokens_b, seed)
        if _tells_scatter(right_b - right_a) and _tells_scatter(tokens_b - tokens_a)
        else None,
    )


def _side(problems: Sequence[_Problem]) -> Side:
    grades = [p.grades for p in problems]
    measured = [kept for p in problems if (kept := p.with_lengths()) is not None]
    return Side(
        accuracy=score_interval([row[~np.isnan(row)] for row in grades]),
        lengths=lengths(
            [p.grades for p in measured], [p.tokens for p in measured], [p.truncated | p.repeating for p in measured]
        )
        if measured
        else None,
        samples=max(row.size for row in grades),
        ungraded=sum(int(np.isnan(row).sum()) for row in grades),
        truncated=float(np.concatenate([p.truncated for p in problems]).mean()),
        repeating=float(np.concatenate([p.repeating for p in problems]).mean()),
    )


def _change(interval: Interval, a: Floats, b: Floats, seed: int) -> Change:
    p_permutation = sign_flip(b - a, seed)
    if not _tells_scatter(b - a):
        return Change(interval, math.nan, p_permutation, p_permutation, math.inf)
    p_t = paired_difference(a, b)[1]
    return Change(interval, p_t, p_permutation, p_permutation, minimum_detectable_effect(b - a))


def _tells_scatter(values: Floats) -> bool:
    """Whether there are enough values, and different ones, to estimate their scatter."""
    return values.size >= FEWEST and varies(values)


def _length_difference(a: ArrayLike, b: ArrayLike) -> Interval:
    """Lengths have no bound: where all change by the same, that says nothing about others, and the interval is open."""
    interval = paired_difference(a, b)[0]
    return interval if varies(np.subtract(b, a)) else replace(interval, low=-math.inf, high=math.inf)


def _ratio(a: Floats, b: Floats, seed: int) -> Interval:
    interval = ratio_interval(a, b, seed)
    return interval if _tells_scatter(b / a) else replace(interval, low=-math.inf, high=math.inf)


def _both_right(pairs: Sequence[tuple[_Problem, _Problem]]) -> Interval | None:
    right = [(p.tokens[p.grades == 1], q.tokens[q.grades == 1]) for p, q in pairs]
    means = [(x.mean(), y.mean()) for x, y in right if x.size and y.size]
    if not means:
        return None
    before, after = zip(*means, strict=True)
    return _length_difference(before, after)


def _with_holm(panels: list[Panel]) -> list[Panel]:
    accuracy = holm([panel.accuracy.p_permutation for panel in panels])
    measured = [panel.tokens.p_permutation for panel in panels if panel.tokens is not None]
    tokens = iter(holm(measured))
    return [
        replace(
            panel,
            accuracy=replace(panel.accuracy, p_holm=p),
            tokens=None if panel.tokens is None else replace(panel.tokens, p_holm=next(tokens)),
        )
        for panel, p in zip(panels, accuracy, strict=True)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
