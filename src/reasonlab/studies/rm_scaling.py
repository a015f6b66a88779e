"""The study `rm-scaling`: bigger judges, more lists, better choices? (AceMath, arXiv 2412.15084, Fig. 5.)

Outcome judges of several sizes learn for one epoch from lists of six answers to one training problem, by the list-wise
Bradley–Terry loss. At equal fractions of the epoch each chooses among answers to test problems it has not seen:

    rm@8        the best-scored of 8 answers is right, the mean over all subsets of 8 out of 64 (`judges/bench.py`);
                also by 100 draws, as published
    majority@8  the commonest of 8 answers is right
    oracle      one of 8 answers is right (pass@8)

Answers come from eight policies: models at several temperatures, thinking first, some of them with
misconceptions, so that a majority can err. All judges and all seeds see the same answers; a seed decides which of them
make the lists, their order, and the weights of the new head.

Panels are the families of the tiny world; the average is the mean of the panels. Intervals are over questions within
panels, and over seeds if there are several. A panel is hard if the policies' single answers are seldom right on it:
half of the panels are, whatever the judges make of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reasonlab.config import Config
from reasonlab.errors import UserError
from reasonlab.evaluate.curves import maj_at_k, pass_at_k
from reasonlab.evaluate.statistics import (
    Interval,
    mean_interval,
    score_interval,
    seed_mean_interval,
    seed_score_interval,
)
from reasonlab.figures.tables import (
    AVERAGE,
    MAJORITY,
    ORACLE,
    PROGRESS,
    REFERENCES,
    SINGLE,
    ProgressRow,
    ReferenceRow,
    write_table,
)
from reasonlab.judges.bench import PUBLISHED_K, PUBLISHED_SEEDS, Drawn, answer_given, by_question
from reasonlab.judges.lists import LIST_SIZE
from reasonlab.judges.types import Candidate, read_pool
from reasonlab.model.ladder import SIZES
from reasonlab.problems.tiny_world import FAMILY_NAMES
from reasonlab.studies.answers import asked_problems
from reasonlab.studies.plan import Plan, base_pieces
from reasonlab.studies.rm_judges import (
    COST,
    POOL,
    TEST,
    TRAIN,
    candidates_file,
    join,
    judge_config,
    label,
    measure,
    read_measured,
    sample,
    sort,
)
from reasonlab.studies.rm_scaling_estimate import PUBLISHED_SIZES, estimate
from reasonlab.studies.runner import Piece, train_judge
from reasonlab.studies.scores import Floats, interval, points
from reasonlab.studies.verdicts import ArmCost, Claim, Outcome, Verdict, judge

__all__ = ["arms", "check", "estimate", "found", "name", "needed", "pieces"]

name = "rm-scaling"
arms = (*SIZES, *PUBLISHED_SIZES)  # an arm is a size
needed: tuple[str, ...] = ()


# --- the work --------------------------------------------------------------------------------------------------------


def pieces(plan: Plan) -> list[Piece]:
    check(plan)
    settings, pools = plan.recipe.settings, plan.out / "pools"
    config = _common(plan)
    models = [one.model.path for one in plan.recipe.arms.values()]
    bases = base_pieces([*(policy.model for policy in settings.writers), *models], plan.device)
    work = list(bases.values())
    for part in (TRAIN, TEST):
        written = []
        for number, policy in enumerate(settings.writers):
            written.append(f"{part} candidates of {label(policy)}")
            arguments = (part, policy, config, settings, candidates_file(pools, part, number))
            work.append(Piece(written[-1], sample, arguments, tuple(set(bases) & {policy.model})))
        files = [candidates_file(pools, part, number) for number in range(len(settings.writers))]
        work.append(Piece(f"{part} pool", join, (files, pools / part), tuple(written)))
    ready = [f"{TRAIN} pool"]
    if settings.sorter:
        ready.append("sorting scores")
        work.append(Piece("sorting scores", sort, (settings.sorter, pools / TRAIN, config), (f"{TRAIN} pool",)))
    for arm in plan.recipe.arms:
        for seed in plan.seeds:
            run, model = plan.run(arm, seed), plan.recipe.arms[arm].model.path
            learning = judge_config(plan.config(arm, seed), settings, pools / TRAIN)
            needs = (*ready, *(set(bases) & {model}))
            work.append(Piece(f"judge {arm} {seed}", train_judge, (learning, run, plan.command), needs))
            asked = (run, pools / TEST, learning.device, learning.threads)
            work.append(Piece(f"scores of {arm} {seed}", measure, asked, (f"judge {arm} {seed}", f"{TEST} pool")))
    return work


def check(plan: Plan) -> None:
    """What would otherwise be found after hours."""
    recipe, settings = plan.recipe, plan.recipe.settings
    if len(recipe.arms) < 2:
        raise UserError("one size makes no trend", "Name at least two sizes as arms")
    if len({one.model.path for one in recipe.arms.values()}) < len(recipe.arms):
        raise UserError("two arms have the same model", "Give every arm its own model.path")
    common = _common(plan)
    for arm, config in recipe.arms.items():
        same = {"model": common.model, "learner": common.learner}
        if config.model_copy(update=same) != common:
            raise UserError(f"the arm {arm} differs in more than model and learner", "Ask all judges the same")
    if not settings.writers:
        raise UserError("nobody writes candidates", 'Add writers = [{ model = "tiny-1m" }] to [study]')
    if len({label(policy) for policy in settings.writers}) < len(settings.writers):
        raise UserError("a policy is named twice", "Give every policy another temperature, style or model")
    if len(settings.writers) * settings.samples < PUBLISHED_K:
        raise UserError(f"rm@{PUBLISHED_K} needs {PUBLISHED_K} candidates a question", "Raise samples in [study]")
    families: dict[str, int] = {}
    for problem in asked_problems(common, settings):
        families[problem.family] = families.get(problem.family, 0) + 1
    if len(families) < 2 or min(families.values()) < 2:
        raise UserError("a panel needs two questions, and the average two panels", "Raise questions in [study]")
    if settings.sampled_problems // settings.list_batch < settings.judge_checkpoints:
        raise UserError(
            f"{settings.sampled_problems} lists in batches of {settings.list_batch} are fewer steps than the "
            f"{settings.judge_checkpoints} checkpoints",
            "Raise sampled_problems or lower list_batch",
        )


def _common(plan: Plan) -> Config:
    """What all arms share: problems, limits, device."""
    return next(iter(plan.recipe.arms.values()))


# --- what was found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Panels:
    """Which panel each question belongs to, in the order of `Measured.rm`, and what is possible on it."""

    of_question: tuple[str, ...]
    majority: Floats
    oracle: Floats
    single: Floats  # a random candidate

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(self.of_question))

    @property
    def hard(self) -> list[str]:
        """The half of the panels on which single answers are most seldom right."""
        rate = {panel: float(self.single[self.on(panel)].mean()) for panel in self.names}
        return sorted(sorted(rate, key=lambda panel: rate[panel])[: len(rate) // 2], key=self.names.index)

    def on(self, panel: str) -> Any:
        return np.array([one == panel for one in self.of_question])

    def average_of(self, values: Floats, chosen: Sequence[str] | None = None) -> Interval:
        """The plain mean over panels of a quantity [seed, question], with its interval."""
        chosen = list(chosen or self.names)
        return self.weighted(values, dict.fromkeys(chosen, 1 / len(chosen)))

    def between(self, values: Floats, a: Sequence[str], b: Sequence[str]) -> Interval:
        """The mean over panels `a` minus that over panels `b`: other questions, but the same training seeds."""
        return self.weighted(values, dict.fromkeys(a, 1 / len(a)) | dict.fromkeys(b, -1 / len(b)))

    def weighted(self, values: Floats, weights: Mapping[str, float]) -> Interval:
        """Σ_p w_p · (mean over panel p) of a quantity [seed, question], with its interval.

        Questions weigh in inverse proportion to their panel's number of them, and scatter around the mean of their own
        panel: the panels are given, the questions in them are drawn. For P panels of Q questions the deviations are
        stretched by √((Q − 1) / (Q − P)), because P means were taken out and not one.
        """
        parts = {panel: values[:, self.on(panel)] for panel in weights}
        count = sum(part.shape[1] for part in parts.values())
        mean = sum(weights[panel] * float(part.mean()) for panel, part in parts.items())
        stretch = math.sqrt((count - 1) / (count - len(parts)))
        around = [
            (part - part.mean()) * stretch * count * weights[panel] / part.shape[1] for panel, part in parts.items()
        ]
        return interval(mean + np.concatenate(around, axis=1))

    def score(self, values: Floats, panel: str) -> Interval:
        """A panel's score, or that of the average, with an interval that stays between 0 and 1."""
        if panel == AVERAGE:
            value = self.average_of(values)
            return Interval(value.estimate, max(0.0, value.low), min(1.0, value.high))
        part = values[:, self.on(panel)]
        return seed_score_interval(part) if len(part) > 1 else score_interval([[x] for x in part[0]])


@dataclass(frozen=True, slots=True)
class Judges:
    """All judges: their sizes, smallest first, the points of the epoch, and rm@8 [size, point, seed, question]."""

    names: tuple[str, ...]
    parameters: Floats
    progress: Floats
    lists: tuple[int, ...]
    rm: Floats
    drawn: Floats  # [size, point, seed, family, 2]

    @property
    def decades(self) -> Floats:
        return np.log10(self.parameters)

    def trend(self, sizes: slice = slice(None)) -> Floats:
        """The least-squares slope of rm@8 at the end against log10 of the parameters, [seed, question]."""
        x = self.decades[sizes] - self.decades[sizes].mean()
        slope: Floats = np.tensordot(x / (x**2).sum(), self.rm[sizes, -1], axes=1)
        return slope

    def gain(self, sizes: slice = slice(None)) -> Floats:
        """rm@8 at the last checkpoint minus the first, the mean of these sizes, [seed, question]."""
        mean: Floats = (self.rm[sizes, -1] - self.rm[sizes, 0]).mean(axis=0)
        return mean


def found(plan: Plan) -> Outcome:
    settings, pools = plan.recipe.settings, plan.out / "pools"
    candidates = read_pool(pools / TEST / POOL)
    panels, judges = panels_of(candidates), judges_of(plan)
    write_table(plan.out / PROGRESS, ProgressRow, progress_rows(judges, panels))
    write_table(plan.out / REFERENCES, ReferenceRow, reference_rows(panels))
    config = _common(plan)
    protocol = {
        "sizes": {one: int(count) for one, count in zip(judges.names, judges.parameters, strict=True)},
        "lists": judges.lists[-1],
        "list_size": LIST_SIZE,
        "batch": settings.list_batch,
        "epochs": 1,
        "learning_rates": {arm: plan.recipe.arms[arm].learner.lr for arm in judges.names},
        "score_sorted": bool(settings.sorter),
        "policies": [label(policy) for policy in settings.writers],
        "candidates": len(settings.writers) * settings.samples,
        "draws": PUBLISHED_SEEDS,
        "split": settings.split,
        "levels": list(config.evaluate.levels),
        "questions": len(panels.of_question),
        "max_tokens": config.rollout.max_tokens,
        "hard_panels": panels.hard,
        "gain": {one: _rounded(panels.average_of(judges.gain(_only(i)))) for i, one in enumerate(judges.names)},
        "trend": _rounded(panels.average_of(judges.trend())),
    }
    if len(judges.names) > 2:  # whether the trend hangs on one judge
        protocol["trend_without_largest"] = _rounded(panels.average_of(judges.trend(slice(None, -1))))
        protocol["trend_without_smallest"] = _rounded(panels.average_of(judges.trend(slice(1, None))))
    costs = [_pool_cost(part, pools / part, len(settings.writers)) for part in (TRAIN, TEST)]
    runs = {arm: [plan.run(arm, seed) for seed in plan.seeds] for arm in judges.names}
    length = costs[0].tokens
    costs += [_judge_cost(arm, judges.rm[i, -1], panels, length, runs[arm]) for i, arm in enumerate(judges.names)]
    return Outcome(claims(judges, panels), costs, protocol)


def _only(place: int) -> slice:
    return slice(place, place + 1)


def _rounded(value: Interval) -> list[float]:
    """Points: estimate, low, high."""
    return [round(100 * x, 3) for x in (value.estimate, value.low, value.high)]


def panels_of(candidates: Sequence[Candidate]) -> Panels:
    """What majority and oracle reach on every question, in the order in which judges are measured."""
    families = by_question(candidates, np.zeros(len(candidates)), answer_given).families
    questions = [(family, one) for family, some in families.items() for one in some]
    k = PUBLISHED_K
    return Panels(
        tuple(family for family, _ in questions),
        np.array([float(maj_at_k(one.votes, one.correct)[k - 1]) for _, one in questions]),
        np.array([pass_at_k(len(one.correct), int(one.correct.sum()), k) for _, one in questions]),
        np.array([float(one.correct.mean()) for _, one in questions]),
    )


def judges_of(plan: Plan) -> Judges:
    measured = {arm: [read_measured(plan.run(arm, seed)) for seed in plan.seeds] for arm in plan.recipe.arms}
    order = sorted(measured, key=lambda arm: measured[arm][0][0].parameters)
    first = measured[order[0]][0]
    return Judges(
        tuple(order),
        np.array([float(measured[arm][0][0].parameters) for arm in order]),
        np.array([one.progress for one in first]),
        tuple(one.lists for one in first),
        np.array([[[run[i].rm for run in measured[arm]] for i in range(len(first))] for arm in order]),
        np.array([[[run[i].drawn for run in measured[arm]] for i in range(len(first))] for arm in order]),
    )


def progress_rows(judges: Judges, panels: Panels) -> list[ProgressRow]:
    rows = []
    for size, arm in enumerate(judges.names):
        for point, progress in enumerate(judges.progress):
            for panel in _shown(panels):
                values = judges.rm[size, point]
                score, drawn = panels.score(values, panel), _drawn(judges.drawn[size, point], panels, panel)
                asked = len(panels.of_question) if panel == AVERAGE else int(panels.on(panel).sum())
                rows.append(
                    ProgressRow(
                        arm=arm,
                        panel=panel,
                        progress=round(float(progress), 6),
                        lists=judges.lists[point],
                        parameters=int(judges.parameters[size]),
                        score=score.estimate,
                        low=score.low,
                        high=score.high,
                        drawn=drawn.mean,
                        drawn_error=drawn.error,
                        questions=asked,
                        seeds=values.shape[0],
                    )
                )
    return rows


def _shown(panels: Panels) -> list[str]:
    """The average, then the panels in the order of the tiny world's families."""
    place = {family: number for number, family in enumerate(FAMILY_NAMES)}
    return [AVERAGE, *sorted(panels.names, key=lambda panel: place.get(panel, len(place)))]


def _drawn(drawn: Floats, panels: Panels, panel: str) -> Drawn:
    """rm@8 by draws [seed, family, 2] on a panel: every training seed has its own 100 draws of the same questions."""
    chosen = drawn if panel == AVERAGE else drawn[:, [panels.names.index(panel)]]
    # The draws are the same for all training seeds, so their errors do not average out over these.
    deviation = float(np.sqrt((chosen[..., 1] ** 2).sum(axis=1)).mean()) / chosen.shape[1]
    return Drawn(float(chosen[..., 0].mean()), deviation, PUBLISHED_SEEDS)


def reference_rows(panels: Panels) -> list[ReferenceRow]:
    kinds = {panel: "hard" if panel in panels.hard else "easy" for panel in panels.names} | {AVERAGE: "all"}
    rows = []
    for reference, values in ((MAJORITY, panels.majority), (ORACLE, panels.oracle), (SINGLE, panels.single)):
        for panel in _shown(panels):
            score = panels.score(values[None], panel)
            rows.append(ReferenceRow(panel, reference, score.estimate, score.low, score.high, kinds[panel]))
    return rows


# --- the claims ------------------------------------------------------------------------------------------------------


def claims(judges: Judges, panels: Panels) -> list[Claim]:
    few = max(1, len(judges.names) // 3)  # of six sizes the two smallest and the two largest
    small, large = slice(0, few), slice(-few, None)
    names = f"{' and '.join(judges.names[large])} minus {' and '.join(judges.names[small])}"
    trend, gain = judges.trend(), judges.gain()
    data_decades = math.log10(judges.progress[-1] / judges.progress[0])
    apart = judges.gain(large) - judges.gain(small)
    hard, easy = panels.hard, [panel for panel in panels.names if panel not in panels.hard]
    majority = panels.majority[None]
    return [
        judge(
            "bigger-is-better",
            "slope of average rm@8 at the end against log10 of the parameters, points for ten times as many",
            points(panels.average_of(trend)),
            "Average panel: about 63–64 (0.5B) to 69 (32B) from its axis, some 3 points for ten times as many",
        ),
        _on_every_panel(trend, panels),
        judge(
            "more-data-helps",
            f"average rm@8 at the last checkpoint minus the first ({judges.progress[0]:.0%} of the lists), mean of all "
            "sizes, points",
            points(panels.average_of(gain)),
            "rises; by eye +0.7 (0.5B), +0.1 (1.5B) and about 0 (3B) on GSM8K, small judges dip first",
        ),
        judge(
            "large-judges-gain-more-on-hard",
            f"rm@8 gained from the first to the last checkpoint on hard panels, {names}, points",
            points(panels.average_of(apart, hard)),
            "0.5B and 1.5B hardly move on Minerva, MMLU-STEM and OlympiadBench, 14B and 32B do",
        ),
        judge(
            "hard-panels-need-size",
            f"the same difference ({names}) on hard panels minus on easy ones, points",
            points(panels.between(apart, hard, easy)),
            "on easy sets (GSM8K) every size goes on improving",
        ),
        judge(
            "size-matters-more-than-data",
            "average rm@8 for ten times the parameters minus for ten times the lists, points",
            points(panels.average_of(trend - gain / data_decades)),
            "said so; by eye GSM8K +1.0 for ten times the parameters, at most +0.7 over the epoch",
        ),
        judge(
            "largest-beats-majority",
            f"average rm@8 of {judges.names[-1]} at the end minus majority@8, points",
            points(panels.average_of(judges.rm[-1, -1] - majority)),
            "AceMath-72B-RM 69.53, 7B 67.41, majority@8 64.95",
        ),
    ]


def _on_every_panel(trend: Floats, panels: Panels) -> Claim:
    """Holds if the interval of the slope lies above zero on every panel. Fails if it lies below on one, at the level
    1 − 0.05 / panels: among many panels, some interval of 95 % would lie below by chance."""
    parts = {panel: trend[:, panels.on(panel)] for panel in panels.names}
    above = [panel for panel, part in parts.items() if interval(part).low > 0]
    strict = 1 - 0.05 / len(parts)
    below = [panel for panel, part in parts.items() if _at_level(part, strict).high < 0]
    verdict: Verdict = "holds" if len(above) == len(parts) else "fails" if below else "undecided"
    text = f"share of the {len(parts)} panels on which the interval of that slope lies above zero"
    if below:
        text += f" (below it: {', '.join(below)})"
    published = "the curves of larger judges lie higher on all seven sets"
    return Claim("bigger-is-better-everywhere", text, verdict, len(above) / len(parts), None, published)


def _at_level(values: Floats, level: float) -> Interval:
    if min(values.shape) > 1:
        return seed_mean_interval(values, level)
    return mean_interval(values.mean(axis=0), level)


# --- what it took ----------------------------------------------------------------------------------------------------


def _pool_cost(part: str, pool: Path, policies: int) -> ArmCost:
    taken = [json.loads((pool / f"policy-{number}" / COST).read_text()) for number in range(policies)]
    tokens, responses = (sum(one[what] for one in taken) for what in ("generated_tokens", "responses"))
    right = [candidate.correct for candidate in read_pool(pool / POOL) if candidate.correct is not None]
    return ArmCost(
        f"{part} candidates",
        float(np.mean(right)),
        tokens / responses,
        tokens,
        round(sum(one["seconds"] for one in taken), 1),
    )


def _judge_cost(arm: str, rm: Floats, panels: Panels, tokens: float, runs: Sequence[Path]) -> ArmCost:
    """A judge generates nothing; its accuracy is rm@8 at the end, its tokens are those of a candidate."""
    seconds = 0.0
    for run in runs:
        newest = (run / "checkpoints" / "latest").read_text().strip()
        seconds += json.loads((run / "checkpoints" / newest / "trainer" / "state.json").read_text())["seconds"]
    return ArmCost(arm, panels.average_of(rm).estimate, tokens, 0, round(seconds, 1))
