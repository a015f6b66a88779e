"""From graded answers to scores, in sentences and as data: each benchmark, the total, and what training had seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from reasonlab.evaluate.evaluator import Answer, Summary, summarise
from reasonlab.evaluate.panels import TINY_SUITE
from reasonlab.evaluate.statistics import Interval

BESIDE = " + "  # between a suite and the benchmarks asked with it, in the name of their total


@dataclass(frozen=True, slots=True)
class Seen:
    """What of a benchmark lies in the training pool; `questions` is None where that was never checked."""

    pool: str
    questions: int | None
    without: Interval | None = None  # accuracy on the rest

    def flag(self) -> str:
        if self.questions is None:
            return f"; overlap with {self.pool} not checked"
        if not self.questions:
            return ""
        rest = f", {100 * self.without.estimate:.1f} % without them" if self.without else ""
        return f"; OVERLAP: {self.questions} of the questions are in the training pool {self.pool}{rest}"


@dataclass(frozen=True, slots=True)
class Scores:
    """Summaries by name, the total first; `mean` is the unweighted mean over several benchmarks."""

    summaries: dict[str, Summary]
    seen: dict[str, Seen]
    mean: Interval | None
    benchmarks: int
    split: str = ""  # of the tiny world, where its suite was asked

    def sentences(self, sampling: Mapping[str, Any]) -> list[str]:
        lines = [
            summary.sentence(self._told(name), sampling["temperature"], sampling["max_tokens"], sampling["top_p"])
            + (self.seen[name].flag() if name in self.seen else "")
            for name, summary in self.summaries.items()
        ]
        if self.mean is not None:
            m = self.mean
            interval = f"{100 * m.estimate:.1f} % [{100 * m.low:.1f}, {100 * m.high:.1f}]"
            lines.append(f"mean of {self.benchmarks} benchmarks = {interval}")
        return lines

    def _told(self, name: str) -> str:
        """The name of a summary, with the split where it is the tiny suite's: `tiny validation`."""
        suite, beside, others = name.partition(BESIDE)
        return f"{suite} {self.split}{beside}{others}" if self.split and suite == TINY_SUITE else name

    def data(self) -> dict[str, Any]:
        scores = {name: asdict(summary) for name, summary in self.summaries.items()}
        for name, seen in self.seen.items():
            scores[name]["overlap"] = asdict(seen)
        mean = None if self.mean is None else asdict(self.mean)
        found: dict[str, Any] = _finite({"scores": scores, "mean_of_benchmarks": mean})
        return found


def score(answers: Sequence[Answer], settings: Mapping[str, Any]) -> Scores:
    """Scores of a whole evaluation, by the record's own settings."""
    by_family: dict[str, list[Answer]] = {
        family: [] for entry in settings["benchmarks"].values() for family in entry["families"]
    }
    for answer in answers:
        by_family[answer.family].append(answer)
    by_family = {family: part for family, part in by_family.items() if part}
    several = len(by_family) > 1
    panels = ({settings["suite"] or "total": list(answers)} if several or settings["suite"] else {}) | by_family
    summaries = {name: summarise(part) for name, part in panels.items()}
    benchmarks = [family for family in by_family if math.isfinite(summaries[family].accuracy.estimate)]
    is_tiny = settings["suite"].partition(BESIDE)[0] == TINY_SUITE
    return Scores(
        summaries,
        _seen(by_family, settings["about"].get("overlap")),
        mean_of([summaries[name].accuracy for name in benchmarks]) if len(benchmarks) > 1 and not is_tiny else None,
        len(benchmarks),
        settings["about"].get("split", ""),
    )


def mean_of(parts: Sequence[Interval]) -> Interval:
    """The mean of independent estimates; each side's distance is the root of the summed squares of the parts' own
    (Zou and Donner's recovery of variances), so the asymmetry of Wilson's intervals survives."""
    n = len(parts)
    mean = sum(part.estimate for part in parts) / n
    below = math.sqrt(sum((part.estimate - part.low) ** 2 for part in parts)) / n
    above = math.sqrt(sum((part.high - part.estimate) ** 2 for part in parts)) / n
    return Interval(mean, mean - below, mean + above, parts[0].level)


def _seen(by_family: Mapping[str, list[Answer]], overlap: Mapping[str, Any] | None) -> dict[str, Seen]:
    if overlap is None:
        return {}
    found = {}
    for family, answers in by_family.items():
        ids = overlap["problems"].get(family)
        if ids is None:
            found[family] = Seen(overlap["pool"], None)
            continue
        known = set(ids)
        rest = [answer for answer in answers if answer.problem not in known]
        questions = len({answer.problem for answer in answers} & known)
        found[family] = Seen(overlap["pool"], questions, summarise(rest).accuracy if questions and rest else None)
    return found


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
