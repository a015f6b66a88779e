"""The study `k15-dynamics`: accuracy and thinking length during Kimi k1.5's RL (report Figs. 5, 6, 8, 9 and 10).

Arms, all from the same base model unless they say otherwise:

    mirror-descent   the method itself, problems drawn uniformly
    grpo             as mirror-descent, by GRPO (not in the report)
    rest             ReST, which only imitates good samples: no negative gradient (Fig. 10)
    curriculum       as mirror-descent, but only hard problems from an iteration on (Fig. 9)
    other-size       as mirror-descent, from another rung of the ladder (Fig. 8)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from reasonlab.config import Config
from reasonlab.evaluate.statistics import Interval
from reasonlab.figures.panel_grid import FORCED, TOTAL
from reasonlab.figures.tables import PANELS, SLOPES, PanelRow, SlopeRow, write_table
from reasonlab.keys import key
from reasonlab.model.checkpoint import load_config
from reasonlab.model.ladder import model_name, resolve_model
from reasonlab.studies.answers import asks_tiny_world
from reasonlab.studies.curves import (
    Curve,
    check_evaluations,
    cost,
    judge_ends,
    on_shared_questions,
    panel_rows,
    read_curve,
)
from reasonlab.studies.plan import Plan, base_pieces
from reasonlab.studies.runner import Piece, train
from reasonlab.studies.scores import Floats, difference, interval, points, ratio
from reasonlab.studies.verdicts import Claim, Outcome, Verdict, judge

name = "k15-dynamics"
MAIN, GRPO, REST, CURRICULUM, OTHER_SIZE = "mirror-descent", "grpo", "rest", "curriculum", "other-size"
arms = (MAIN, GRPO, REST, CURRICULUM, OTHER_SIZE)
needed = (MAIN,)
RESAMPLES = 500


def pieces(plan: Plan) -> list[Piece]:
    """The base models that do not ship, then every arm of every seed."""
    check(plan)
    chosen = list(plan.recipe.arms)
    models = {arm: plan.recipe.arms[arm].model.path for arm in chosen}
    bases = base_pieces(models.values(), plan.device)
    runs = [
        Piece(
            f"{arm} {seed}",
            train,
            (plan.config(arm, seed), plan.run(arm, seed), plan.command),
            needs=(models[arm],) if models[arm] in bases else (),
        )
        for arm in chosen
        for seed in plan.seeds
    ]
    return [*bases.values(), *runs]


def check(plan: Plan) -> None:
    check_evaluations(plan, MAIN)


def found(plan: Plan) -> Outcome:
    curves = on_shared_questions(
        {arm: read_curve([plan.run(arm, seed) for seed in plan.seeds]) for arm in plan.recipe.arms}
    )
    rows = [row for arm, curve in curves.items() for row in panel_rows(arm, curve)]
    write_table(plan.out / PANELS, PanelRow, rows)
    write_table(plan.out / SLOPES, SlopeRow, slope_rows(MAIN, curves[MAIN]))
    main = curves[MAIN]
    split = gain_split(main)
    config = plan.recipe.arms[MAIN]
    other = plan.recipe.arms.get(OTHER_SIZE)
    protocol = {
        "model": model_name(config.model.path),
        "other_model": model_name(other.model.path) if other else None,
        "iterations": config.iterations,
        "prompts": config.rollout.prompts,
        "rollouts_per_prompt": config.rollout.samples,
        "inner_steps": config.learner.inner_steps,
        "lr": config.learner.lr,
        "adam_eps": config.learner.eps,
        "temperature": config.evaluate.temperature,
        "max_tokens": config.rollout.max_tokens,
        **asked(config),
        "questions": len(main[min(main)][TOTAL].problems),
        "samples": config.evaluate.samples,
        "curriculum_switch": plan.recipe.arms[CURRICULUM].problems.curriculum_from if CURRICULUM in curves else None,
    }
    return Outcome(
        claims=claims(curves, main_is_larger=other is not None and parameters(config) > parameters(other)),
        arms=[cost(arm, curve, [plan.run(arm, seed) for seed in plan.seeds]) for arm, curve in curves.items()],
        protocol={name: value for name, value in protocol.items() if value is not None},
        gain_split=split,
    )


def asked(config: Config) -> dict[str, object]:
    """What the models are asked, for the record."""
    if asks_tiny_world(config):
        return {"split": config.evaluate.split, "levels": list(config.evaluate.levels)}
    return {"suite": config.evaluate.suite, "training_problems": config.problems.path}


def parameters(config: Config) -> int:
    return load_config(resolve_model(config.model.path)).parameter_count()


# --- the numbers -----------------------------------------------------------------------------------------------------


def slope_rows(arm: str, curve: Curve) -> list[SlopeRow]:
    """Accuracy per token over the checkpoints, regressed on the panel's own length and on the total's."""
    total = [panels[TOTAL].tokens.mean() for panels in curve.values()]
    rows = []
    for panel in families(curve, with_total=True):
        accuracy = np.array([panels[panel].accuracy.mean() for panels in curve.values()])
        own = [panels[panel].tokens.mean() for panels in curve.values()]
        for against, x in (("own", own), ("total", total)):
            slope, correlation = _fit(np.array(x), accuracy)
            draws = _resampled_slopes(curve, panel, TOTAL if against == "total" else panel)
            low, high = np.quantile(draws, [0.025, 0.975]) if len(curve) > 2 else (math.nan, math.nan)
            rows.append(SlopeRow(arm, panel, slope, min(low, slope), max(high, slope), correlation, against))
    return rows


def _fit(x: Floats, y: Floats) -> tuple[float, float]:
    dx, dy = x - x.mean(), y - y.mean()
    sxx, syy, sxy = (dx * dx).sum(), (dy * dy).sum(), (dx * dy).sum()
    slope = float(sxy / sxx) if sxx > 0 else 0.0
    return slope, float(np.clip(sxy / math.sqrt(sxx * syy), -1, 1)) if sxx * syy > 0 else 0.0


def _resampled_slopes(curve: Curve, panel: str, against: str) -> Floats:
    """Slopes over draws of seeds and questions with replacement."""
    y = np.stack([panels[panel].accuracy for panels in curve.values()])
    x = np.stack([panels[against].tokens for panels in curve.values()])
    rng = np.random.default_rng(key(0, "slopes", panel, against))
    slopes = np.empty(RESAMPLES)
    for i in range(len(slopes)):
        seeds = rng.integers(y.shape[1], size=y.shape[1])
        questions = rng.integers(y.shape[2], size=y.shape[2])
        own = questions if x.shape == y.shape else rng.integers(x.shape[2], size=x.shape[2])
        slopes[i], _ = _fit(x[:, seeds][:, :, own].mean((1, 2)), y[:, seeds][:, :, questions].mean((1, 2)))
    return slopes


def families(curve: Curve, with_total: bool = False) -> list[str]:
    names = [panel for panel in next(iter(curve.values())) if panel not in (TOTAL, FORCED)]
    return [TOTAL, *names] if with_total else names


def gain_split(curve: Curve) -> dict[str, object] | None:
    """The total gain between the ends, divided by the control into choosing to think and thinking better."""
    first, last = min(curve), max(curve)
    questions = len(curve[first][TOTAL].problems)
    if FORCED not in curve[first] or FORCED not in curve[last] or first == last or questions < 2:
        return None
    gain = curve[last][TOTAL].accuracy - curve[first][TOTAL].accuracy
    skill = curve[last][FORCED].accuracy - curve[first][FORCED].accuracy
    parts = {"gain": interval(gain), "style": interval(gain - skill), "skill": interval(skill)}
    return {
        "before": first,
        "after": last,
        **{name: [part.estimate, part.low, part.high] for name, part in parts.items()},
    }


# --- the claims ------------------------------------------------------------------------------------------------------


def claims(curves: Mapping[str, Curve], main_is_larger: bool = False) -> list[Claim]:
    main = curves[MAIN]
    first, last = main[min(main)], main[max(main)]
    gain = points(difference(first[TOTAL].accuracy, last[TOTAL].accuracy))
    growth = ratio(first[TOTAL].tokens, last[TOTAL].tokens)
    judged = [
        judge("accuracy-rises", "total accuracy after RL minus before, points", gain, "+21.7 points (57.8 to 79.5 %)"),
        judge("length-rises", "mean tokens after RL over before", growth, "7.4 (1,307 to 9,655 tokens)", 1.0),
        both_rise(main),
        harder_lengthen_more(main),
    ]
    if FORCED in first and FORCED in last:
        skill = points(difference(first[FORCED].accuracy, last[FORCED].accuracy))
        judged.insert(
            1, judge("skill-rises", "accuracy with thinking forced, after minus before, points", skill, "not measured")
        )
    if GRPO in curves:
        text = "mirror descent minus GRPO at the end, points"
        judged.append(judge_ends("beats-grpo", text, curves[GRPO], main, "not measured"))
    if REST in curves:
        judged.append(
            judge_ends(
                "beats-rest",
                "mirror descent minus ReST at the end, points",
                curves[REST],
                main,
                "+7.1 points (mean of the last five checkpoints, 64.3 against 57.2 %)",
            )
        )
    if CURRICULUM in curves:
        judged.append(
            judge_ends(
                "curriculum-beats-uniform",
                "curriculum minus uniform at the end, points",
                main,
                curves[CURRICULUM],
                "+3.7 points at the last common iteration (59.1 against 55.4 %)",
            )
        )
    if OTHER_SIZE in curves:
        small, large = (curves[OTHER_SIZE], main) if main_is_larger else (main, curves[OTHER_SIZE])
        judged.append(fewer_tokens(small, large))
    return judged


def both_rise(curve: Curve) -> Claim:
    """On how many panels accuracy and length both rise. Certain: both intervals above zero. Possible: neither below."""
    first, last = curve[min(curve)], curve[max(curve)]
    certain = seen = possible = 0
    names = families(curve)
    for panel in names:
        rises = [
            difference(first[panel].accuracy, last[panel].accuracy),
            difference(first[panel].tokens, last[panel].tokens),
        ]
        certain += all(rise.low > 0 for rise in rises)
        seen += all(rise.estimate > 0 for rise in rises)
        possible += all(rise.high >= 0 for rise in rises)
    half = len(names) / 2
    verdict: Verdict = "holds" if certain > half else "fails" if possible <= half else "undecided"
    text = f"panels of {len(names)} on which accuracy and tokens both rise (interval: certain, possible)"
    return Claim("both-on-most-panels", text, verdict, seen, (certain, possible), "11 of 11 panels beside the total")


def harder_lengthen_more(curve: Curve) -> Claim:
    """Mean log growth of length on the harder half of the panels minus that on the easier half, by error rate before.

    With panel growth R_p = mean(b_p) / mean(a_p) and weights w_p = ±2/P the contrast is Σ_p w_p log R_p. Its interval
    is that of the mean of the linearised terms w_p (N/n_p) (b/mean(b_p) − a/mean(a_p)) over seeds and all N questions,
    so what a seed does to all panels at once cancels as it should.
    """
    text = "log growth of length on the harder half of the panels minus the easier half"
    published = "AIME 3.8 times within 24 iterations, MATH500 2.1 times"
    first, last = curve[min(curve)], curve[max(curve)]
    names = sorted(families(curve), key=lambda panel: -float(first[panel].accuracy.mean()))  # easiest first
    half = len(names) // 2
    if half == 0:
        return Claim("harder-lengthen-more", text, "undecided", None, None, published)
    weights = dict.fromkeys(names[:half], -1 / half) | dict.fromkeys(names[len(names) - half :], 1 / half)
    total = sum(first[panel].tokens.shape[1] for panel in weights)
    contrast, terms = 0.0, []
    for panel, weight in weights.items():
        a, b = first[panel].tokens, last[panel].tokens
        contrast += weight * math.log(b.mean() / a.mean())
        terms.append(weight * total / a.shape[1] * (b / b.mean() - a / a.mean()))
    around = interval(np.concatenate(terms, axis=1))
    value = Interval(contrast, contrast + around.low, contrast + around.high)
    return judge("harder-lengthen-more", text, value, published)


def fewer_tokens(small: Curve, large: Curve) -> Claim:
    """Whether the larger model reaches the smaller one's final accuracy with fewer tokens.

    Undecided if it never does: it may have had too little training. Which checkpoint reaches it first is read off the
    same answers; the interval does not know that.
    """
    text = "tokens of the larger model where it reaches the smaller one's final accuracy, over the smaller one's"
    id, published = "larger-needs-fewer-tokens", "about one half (OMNI-MATH 0.49 at 2.7-3.1k against 5.5k tokens)"
    wanted = small[max(small)][TOTAL]
    reached = [step for step, panels in large.items() if panels[TOTAL].accuracy.mean() >= wanted.accuracy.mean()]
    if not reached:
        return Claim(id, text, "undecided", None, None, published)
    value = ratio(wanted.tokens, large[min(reached)][TOTAL].tokens)
    verdict: Verdict = "holds" if value.high < 1 else "fails" if value.low > 1 else "undecided"
    return Claim(id, text, verdict, value.estimate, (value.low, value.high), published)
