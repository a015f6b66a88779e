"""Learning curves of the arms of a study: the scores of every panel at every evaluated iteration, over all seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from reasonlab.config import Config
from reasonlab.errors import UserError
from reasonlab.evaluate.control import FORCED_SUITE, recorded_answers
from reasonlab.evaluate.evaluator import Answer
from reasonlab.figures.panel_grid import FORCED, TOTAL
from reasonlab.figures.tables import PanelRow
from reasonlab.runs import RunReader
from reasonlab.studies.answers import STATE, final
from reasonlab.studies.plan import Plan
from reasonlab.studies.scores import Scores, arm_cost, difference, panels_of, points
from reasonlab.studies.verdicts import ArmCost, Claim, judge

Curve = dict[int, dict[str, Scores]]  # iteration → panel → scores


def check_evaluations(plan: Plan, main_arm: str) -> None:
    """The claims compare arms question by question, so all of them must be asked the same ones."""

    def questions(config: Config) -> tuple[object, ...]:
        asked, rollout = config.evaluate, config.rollout
        limits = rollout.max_tokens, rollout.repetition_window
        return (
            asked.suite,
            asked.problems,
            asked.samples,
            asked.levels,
            asked.split,
            asked.temperature,
            config.problems.families,
            limits,
        )

    main = plan.recipe.arms[main_arm]
    for arm, config in plan.recipe.arms.items():
        if not config.evaluate.every:
            raise UserError(f"the arm {arm} is never evaluated", "Set evaluate.every to 1 or more")
        if questions(config) != questions(main):
            raise UserError(
                f"the arm {arm} is evaluated in another way than {main_arm}",
                "Give all arms the same [evaluate], apart from `every`, and the same families and token limits",
            )


def read_curve(runs: Sequence[Path]) -> Curve:
    """Scores of every panel at every evaluated iteration, over the runs of all seeds.

    Panels are the families of the tiny world, or the benchmarks that a language model is evaluated on.
    """
    readers = [RunReader(run) for run in runs]

    def answers(suite: str, step: int) -> list[list[Answer]]:
        return [recorded_answers(reader, suite, step) for reader in readers]

    suite = next(name for name in readers[0].evaluation_suites() if name != FORCED_SUITE)
    curve: Curve = {}
    for step in readers[0].evaluation_steps(suite):
        free = answers(suite, step)
        curve[step] = {TOTAL: Scores.of(free), **panels_of(free, lambda answer: answer.family)}
    for step in readers[0].evaluation_steps(FORCED_SUITE):
        curve[step][FORCED] = Scores.of(answers(FORCED_SUITE, step))
    return curve


def on_shared_questions(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """A question that could not be graded at one point is left out at all, so that every pair is of one question."""
    kept = set.intersection(
        *(
            set(panels[panel].problems)
            for curve in curves.values()
            for panels in curve.values()
            for panel in (TOTAL, FORCED)
            if panel in panels
        )
    )
    return {
        arm: {step: {panel: scores.only(kept) for panel, scores in panels.items()} for step, panels in curve.items()}
        for arm, curve in curves.items()
    }


def panel_rows(arm: str, curve: Curve) -> list[PanelRow]:
    rows = []
    for step, panels in curve.items():
        for panel, scores in panels.items():
            accuracy, tokens = scores.accuracy_interval(), scores.tokens_interval()
            low, high = np.quantile(scores.lengths, [0.05, 0.95])
            measured = (accuracy.estimate, accuracy.low, accuracy.high, tokens.estimate, tokens.low, tokens.high)
            counts = (len(scores.problems), scores.samples, scores.seeds)
            rows.append(PanelRow(arm, panel, step, *measured, float(low), float(high), *counts))
    return rows


def judge_ends(claim: str, text: str, a: Curve, b: Curve, published: str) -> Claim:
    """Accuracy of b minus a, in points, at the last iteration both were evaluated at.

    Undecided if they share none but their beginning: nothing has been compared then.
    """
    last = max(set(a) & set(b), default=0)
    if last == 0:
        return Claim(claim, text, "undecided", None, None, published)
    if last < max(*a, *b):
        text += f"; at iteration {last}, the last that both have"
    return judge(claim, text, points(difference(a[last][TOTAL].accuracy, b[last][TOTAL].accuracy)), published)


def cost(arm: str, curve: Curve, runs: Sequence[Path]) -> ArmCost:
    return arm_cost(arm, curve[max(curve)][TOTAL], [final(run) / STATE for run in runs])
