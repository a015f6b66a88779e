"""The small tables a study keeps beside its figures: typed rows in, typed rows out, and errors that name the line.

A figure of a study is drawn from these files alone, so it can be drawn again without the runs. The columns of a table
are the fields of its row, in their order. Accuracies are fractions of 1. An empty cell is a number that does not exist,
such as the interval of a slope through two points, and reads as nan. `record.py` reads the verdicts beside them.

    panels.csv     PanelRow       accuracy and length of an arm on a panel at an iteration
    slopes.csv     SlopeRow       accuracy regressed on length over the checkpoints of an arm
    arms.csv       ArmRow         accuracy and length of a finished model on a panel, with their covariance
    experience.csv ExperienceRow  reward of an arm at an iteration, and what became of its reflections
    reflections.csv ReflectionRow some reflections, to be read
    scores.csv     ScoreRow       a metric of a finished model, averaged over the panels
    progress.csv   ProgressRow    rm@8 of a judge on a panel at a point of its training
    references.csv ReferenceRow   what majority, oracle and a single answer reach on a panel
    selection.csv  SelectionRow   a student after learning from traces that somebody chose
    best_of_n.csv  BestOfRow      accuracy of the answer that somebody picks of N
    judge_rl.csv   JudgeRewardRow a policy after RL with a judge's reward
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

from reasonlab.errors import UserError
from reasonlab.runs.files import write_aside

PANELS, SLOPES, ARMS = "panels.csv", "slopes.csv", "arms.csv"
EXPERIENCE, REFLECTIONS, SCORES = "experience.csv", "reflections.csv", "scores.csv"
SELECTION, BEST_OF, JUDGE_RL = "selection.csv", "best_of_n.csv", "judge_rl.csv"
PROGRESS, REFERENCES = "progress.csv", "references.csv"
AVERAGE = "average"  # of all panels of judges
PASS_1, AVG_8, PASS_8 = METRICS = ("pass@1", "avg@8", "pass@8")
MAJORITY, ORACLE, SINGLE = REFERENCE_NAMES = ("majority@8", "oracle", "single answer")


@dataclass(frozen=True, slots=True)
class PanelRow:
    """One panel of one arm at one iteration, with 95 % intervals of both means and the 5 % and 95 % quantiles of the
    lengths of single answers."""

    KEY: ClassVar[tuple[str, ...]] = ("arm", "panel", "iteration")  # what tells rows apart

    arm: str
    panel: str
    iteration: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    tokens: float
    tokens_low: float
    tokens_high: float
    tokens_p05: float
    tokens_p95: float
    questions: int
    samples: int
    seeds: int

    def __post_init__(self) -> None:
        _check_scores(self)
        _check_order("tokens_p05, tokens_p95", self.tokens_p05, self.tokens_p95)


@dataclass(frozen=True, slots=True)
class SlopeRow:
    """Accuracy gained per token of mean length, over the checkpoints of an arm: a least-squares slope.

    `against` says whose length is regressed on: the panel's own, or the total's (as in Figure 6 of Kimi k1.5).
    """

    KEY: ClassVar[tuple[str, ...]] = ("arm", "panel", "against")

    arm: str
    panel: str
    slope: float
    slope_low: float
    slope_high: float
    correlation: float
    against: str = "own"

    def __post_init__(self) -> None:
        _check_order("slope_low, slope, slope_high", self.slope_low, self.slope, self.slope_high)
        if self.against not in ("own", "total"):
            raise ValueError(f"against is {self.against!r}, not own or total")
        if abs(self.correlation) > 1 + 1e-9:
            raise ValueError(f"correlation {self.correlation:g} is outside [-1, 1]")


@dataclass(frozen=True, slots=True)
class ArmRow:
    """A finished model on a panel: the means of accuracy and length, their intervals, and their joint covariance."""

    KEY: ClassVar[tuple[str, ...]] = ("panel", "arm")

    panel: str
    arm: str
    label: str
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    tokens: float
    tokens_low: float
    tokens_high: float
    var_accuracy: float
    var_tokens: float
    cov: float
    questions: int
    samples: int
    seeds: int

    def __post_init__(self) -> None:
        _check_scores(self)
        if not all(map(math.isfinite, (self.accuracy, self.tokens, self.var_accuracy, self.var_tokens, self.cov))):
            raise ValueError("accuracy, tokens, their variances and cov must be numbers")
        if min(self.var_accuracy, self.var_tokens) < 0:
            raise ValueError("a variance is below zero")
        if self.cov**2 > self.var_accuracy * self.var_tokens * (1 + 1e-6) + 1e-18:
            raise ValueError("the covariance is larger than the two variances allow")


@dataclass(frozen=True, slots=True)
class ExperienceRow:
    """One training iteration of an arm, as means over its seeds.

    `reward` is that of the rollouts. From `retention` on, cells are empty where nothing was reflected on: the share of
    reflections whose replay was right, the share of groups with right and wrong rollouts, the mean length of a
    reflection, the loss of the kept ones per token, and the tokens that reflections and replays took.
    """

    KEY: ClassVar[tuple[str, ...]] = ("arm", "iteration")

    arm: str
    iteration: int
    reward: float
    reward_low: float
    reward_high: float
    retention: float
    retention_low: float
    retention_high: float
    mixed: float
    reflection_tokens: float
    nll: float
    extra_tokens: float
    seeds: int

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError("reward must be a number")
        for name in ("retention", "mixed"):
            _check_fraction(name, getattr(self, name))
        for name in ("reflection_tokens", "extra_tokens"):
            if getattr(self, name) < 0 or math.isinf(getattr(self, name)):
                raise ValueError(f"{name} {getattr(self, name):g} is not a number of tokens")
        if self.seeds < 1:
            raise ValueError("seeds is at least 1")
        _check_order("reward_low, reward, reward_high", self.reward_low, self.reward, self.reward_high)
        retention = (self.retention_low, self.retention, self.retention_high)
        _check_order("retention_low, retention, retention_high", *retention)


@dataclass(frozen=True, slots=True)
class ReflectionRow:
    """A reflection to read: on which responses it was written, and what became of its replay.

    `success` is the share of right rollouts of the problem in that iteration."""

    KEY: ClassVar[tuple[str, ...]] = ("arm", "seed", "iteration", "problem")

    arm: str
    seed: int
    iteration: int
    problem: str
    success: float
    question: str
    wrong: str
    right: str
    reflection: str
    replay: str
    helped: str


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """A metric of a finished model, averaged over the panels, with its 95 % interval.

    pass@1 is the accuracy of greedy answers; avg@8 the mean accuracy of eight samples, pass@8 the share of questions
    that at least one of them answers.
    """

    KEY: ClassVar[tuple[str, ...]] = ("arm", "metric")

    arm: str
    metric: str
    score: float
    low: float
    high: float
    questions: int
    samples: int
    seeds: int

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric is {self.metric!r}, not one of {', '.join(METRICS)}")
        _check_fraction("score", self.score)
        if min(self.questions, self.samples, self.seeds) < 1:
            raise ValueError("questions, samples and seeds are at least 1")
        _check_order("low, score, high", self.low, self.score, self.high)


@dataclass(frozen=True, slots=True)
class ProgressRow:
    """rm@8 of a judge on a panel after a share of its training, exact and with its 95 % interval; and by 100 draws, as
    published, with the standard error of these."""

    KEY: ClassVar[tuple[str, ...]] = ("arm", "panel", "progress")

    arm: str
    panel: str
    progress: float
    lists: int
    parameters: int
    score: float
    low: float
    high: float
    drawn: float
    drawn_error: float
    questions: int
    seeds: int

    def __post_init__(self) -> None:
        for name in ("progress", "score", "drawn"):
            _check_fraction(name, getattr(self, name))
        if min(self.lists, self.parameters, self.questions, self.seeds) < 1:
            raise ValueError("lists, parameters, questions and seeds are at least 1")
        if not math.isfinite(self.score) or not math.isfinite(self.progress):
            raise ValueError("progress and score must be numbers")
        _check_order("low, score, high", self.low, self.score, self.high)


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """What judges are measured against on a panel; `kind` says whether the panel is hard or easy."""

    KEY: ClassVar[tuple[str, ...]] = ("panel", "reference")

    panel: str
    reference: str
    score: float
    low: float
    high: float
    kind: str

    def __post_init__(self) -> None:
        if self.reference not in REFERENCE_NAMES:
            raise ValueError(f"reference is {self.reference!r}, not one of {', '.join(REFERENCE_NAMES)}")
        if self.kind not in ("hard", "easy", "all"):
            raise ValueError(f"kind is {self.kind!r}, not hard, easy or all")
        _check_fraction("score", self.score)
        _check_order("low, score, high", self.low, self.score, self.high)


@dataclass(frozen=True, slots=True)
class SelectionRow:
    """A student after SFT on traces that were chosen from a pool, with the 95 % interval of its accuracy.

    `data` is the kind of judge that chose them, or random, curated, pool (all of it) and base (the student before).
    `judge` is the judge's model and `parameters` its size (none and 0 where nobody judged), `right` the share of chosen
    traces with a right answer, `sound` that of traces with every step right.
    """

    KEY: ClassVar[tuple[str, ...]] = ("data", "judge", "selected")

    data: str
    judge: str
    parameters: int
    selected: int
    accuracy: float
    low: float
    high: float
    tokens: float
    right: float
    sound: float
    questions: int
    samples: int
    seeds: int

    def __post_init__(self) -> None:
        for name in ("accuracy", "right", "sound"):
            _check_fraction(name, getattr(self, name))
        if min(self.parameters, self.selected) < 0 or min(self.questions, self.samples, self.seeds) < 1:
            raise ValueError("counts are not negative; questions, samples and seeds are at least 1")
        _check_order("low, accuracy, high", self.low, self.accuracy, self.high)


@dataclass(frozen=True, slots=True)
class BestOfRow:
    """How often the answer that a judge picks of N is right (or the majority's, or the best there is)."""

    KEY: ClassVar[tuple[str, ...]] = ("selector", "n")

    selector: str
    n: int
    accuracy: float
    low: float
    high: float
    questions: int

    def __post_init__(self) -> None:
        _check_fraction("accuracy", self.accuracy)
        if min(self.n, self.questions) < 1:
            raise ValueError("n and questions are at least 1")
        _check_order("low, accuracy, high", self.low, self.accuracy, self.high)


@dataclass(frozen=True, slots=True)
class JudgeRewardRow:
    """A policy after RL with (1 − weight)·outcome + weight·judge; empty weight: the model before."""

    KEY: ClassVar[tuple[str, ...]] = ("arm",)

    arm: str
    weight: float
    form: str
    accuracy: float
    low: float
    high: float
    tokens: float
    questions: int
    samples: int
    seeds: int

    def __post_init__(self) -> None:
        for name in ("accuracy", "weight"):
            _check_fraction(name, getattr(self, name))
        if min(self.questions, self.samples, self.seeds) < 1:
            raise ValueError("questions, samples and seeds are at least 1")
        _check_order("low, accuracy, high", self.low, self.accuracy, self.high)


def _check_scores(row: PanelRow | ArmRow) -> None:
    """Comparisons with nan are never true, so numbers that do not exist pass here."""
    _check_fraction("accuracy", row.accuracy)
    if row.tokens < 0 or math.isinf(row.tokens):
        raise ValueError(f"tokens {row.tokens:g} is not a length")
    if min(row.questions, row.samples, row.seeds) < 1:
        raise ValueError("questions, samples and seeds are at least 1")
    _check_order("accuracy_low, accuracy, accuracy_high", row.accuracy_low, row.accuracy, row.accuracy_high)
    _check_order("tokens_low, tokens, tokens_high", row.tokens_low, row.tokens, row.tokens_high)


def _check_fraction(name: str, value: float) -> None:
    if value < 0 or value > 1:
        raise ValueError(f"{name} {value:g} is not a fraction of 1")


def _check_order(names: str, *values: float) -> None:
    """Increasing, up to rounding."""
    if any(a > b + 1e-9 * max(1.0, abs(a)) for a, b in pairwise(values)):
        raise ValueError(f"{names} are not in increasing order")


Kind = TypeVar(
    "Kind",
    PanelRow,
    SlopeRow,
    ArmRow,
    ExperienceRow,
    ReflectionRow,
    ScoreRow,
    ProgressRow,
    ReferenceRow,
    SelectionRow,
    BestOfRow,
    JudgeRewardRow,
)
Row = (
    PanelRow
    | SlopeRow
    | ArmRow
    | ExperienceRow
    | ReflectionRow
    | ScoreRow
    | ProgressRow
    | ReferenceRow
    | SelectionRow
    | BestOfRow
    | JudgeRewardRow
)


def columns(kind: type[Row]) -> tuple[str, ...]:
    return tuple(column.name for column in fields(kind))


def write_table(path: Path, kind: type[Kind], rows: Iterable[Kind]) -> None:
    """Write rows with a header; numbers keep all their digits, so that reading gives back the same rows."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = columns(kind)
    writer.writerow(names)
    for row in rows:
        values = (getattr(row, name) for name in names)
        writer.writerow(["" if isinstance(value, float) and math.isnan(value) else value for value in values])
    write_aside(path, text.getvalue().encode())


def read_table(path: Path, kind: type[Kind]) -> list[Kind]:
    """The rows of a table; last columns that have a default may be absent."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read the table {path} ({error.strerror})", "Run the study that writes it") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a table: it is no UTF-8 text", REMEDY) from error
    reader = csv.reader(io.StringIO(text))
    try:
        header = tuple(next(reader, ()))
        _check_header(path, header, kind)
        rows: dict[tuple[Any, ...], Kind] = {}
        for cells in reader:
            if not cells:
                continue
            row = _parse(kind, header, cells)
            key = tuple(getattr(row, name) for name in kind.KEY)
            if key in rows:
                raise ValueError(f"a second row of {', '.join(map(str, key))}")
            rows[key] = row
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}", REMEDY) from error
    if not rows:
        raise UserError(f"{path} has no rows", REMEDY)
    return list(rows.values())


REMEDY = "Restore the file, or run its study again"


def _check_header(path: Path, header: tuple[str, ...], kind: type[Kind]) -> None:
    names = columns(kind)
    needed = tuple(column.name for column in fields(kind) if column.default is MISSING)
    if header[: len(needed)] != needed or header != names[: len(header)]:
        raise UserError(f"{path}, line 1: the columns are not {','.join(names)}", REMEDY)


def _parse(kind: type[Kind], header: tuple[str, ...], cells: list[str]) -> Kind:
    if len(cells) != len(header):
        raise ValueError(f"{len(cells)} cells instead of {len(header)}")
    types = get_type_hints(kind)
    return kind(**{name: _value(name, cell, types[name]) for name, cell in zip(header, cells, strict=True)})


def _value(name: str, cell: str, kind: type) -> Any:
    if kind is str:
        if not cell:
            raise ValueError(f"{name} is empty")
        return cell
    try:
        return int(cell) if kind is int else float(cell or math.nan)
    except ValueError:
        raise ValueError(f"{name} is {cell!r}, not a {'whole ' * (kind is int)}number") from None
