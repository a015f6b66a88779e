"""The study `mel-vs-grpo`: does learning from one's own reflections beat GRPO (MEL, arXiv 2602.10224, Figs. 3, 6–9)?

Arms, all from the same base model, with the same problems in the same order:

    grpo           the host method alone
    mel            the same, and the NLL of reflections whose replay was right (methods/mel.py)
    grpo-matched   GRPO with as many generated tokens as MEL: it gets more problems an iteration instead of reflections
    mel-… rft-mix  ablations, one setting each

The validation score is greedy, as in the paper; finished models also answer at temperature 0.6 for Avg@8 and Pass@8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from reasonlab.config import Config, MelConfig, load_recipe
from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import Answer
from reasonlab.evaluate.statistics import Interval, mean_interval, seeds_for_half_width
from reasonlab.figures.panel_grid import TOTAL
from reasonlab.figures.tables import (
    AVG_8,
    EXPERIENCE,
    PANELS,
    PASS_1,
    PASS_8,
    REFLECTIONS,
    SCORES,
    ExperienceRow,
    PanelRow,
    ReflectionRow,
    ScoreRow,
    write_table,
)
from reasonlab.model.ladder import model_name
from reasonlab.runs import RunReader
from reasonlab.studies.answers import answer, answers_file, final, on_shared_questions, read_answers
from reasonlab.studies.curves import Curve, check_evaluations, cost, judge_ends, panel_rows, read_curve
from reasonlab.studies.curves import on_shared_questions as on_shared_points
from reasonlab.studies.plan import Plan, base_pieces
from reasonlab.studies.runner import Piece, train
from reasonlab.studies.scores import Floats, Scores, difference, points
from reasonlab.studies.verdicts import Claim, Outcome, judge

name = "mel-vs-grpo"
GRPO, MEL, MATCHED, BASE = "grpo", "mel", "grpo-matched", "base"
ABLATIONS = (
    *("mel-no-filter", "mel-wrong-only", "mel-heuristic", "mel-mean-length"),
    *("mel-light", "mel-heavy", "mel-pairs", "rft-mix"),
)
arms = (GRPO, MEL, MATCHED, *ABLATIONS)
needed = (GRPO, MEL)
ANSWERS = 8  # of Avg@8 and Pass@8
# A true difference of 3 points, about what the paper gains, is found four times in five with an interval of ± 2.1.
HALF_WIDTH = 0.03 * 1.96 / (1.96 + 0.84)
SHOWN = 3  # reflections kept to read, for each arm, seed and tenth of the training


# --- the work --------------------------------------------------------------------------------------------------------


def pieces(plan: Plan) -> list[Piece]:
    check(plan)
    settings, chosen = plan.recipe.settings, list(plan.recipe.arms)
    base = plan.recipe.arms[GRPO].model.path
    bases = base_pieces([base], plan.device)
    work, after_base = list(bases.values()), tuple(bases)
    for arm in chosen:
        for seed in plan.seeds:
            config, run = plan.config(arm, seed), plan.run(arm, seed)
            if arm == MATCHED:
                peers = (plan.run(GRPO, seed), plan.run(MEL, seed))
                needs = (f"{GRPO} {seed}", f"{MEL} {seed}")
                work.append(Piece(f"{arm} {seed}", train_matched, (config, run, plan.command, *peers), needs))
            else:
                work.append(Piece(f"{arm} {seed}", train, (config, run, plan.command), after_base))
            where = answers_file(plan.run("", seed), arm)
            asked = (str(final(run)), config, settings, where, "")
            work.append(Piece(f"answers of {arm} {seed}", answer, asked, (f"{arm} {seed}",)))
    asked = (base, plan.config(GRPO, plan.seeds[0]), settings, answers_file(plan.out / "runs", BASE), "")
    return [*work, Piece(f"answers of {BASE}", answer, asked, after_base)]


def check(plan: Plan) -> None:
    check_evaluations(plan, GRPO)
    host = plan.recipe.arms[GRPO]
    for arm, config in plan.recipe.arms.items():
        with_mel = config.mel.weight > 0
        if with_mel != (arm not in (GRPO, MATCHED)):
            what = "has no reflections" if not with_mel else "has reflections"
            raise UserError(f"the arm {arm} {what}", f"Set mel.weight {'to 0' if with_mel else 'above 0'} for it")
        if config.model_copy(update={"mel": host.mel}) != host:
            raise UserError(f"the arm {arm} differs from {GRPO} in more than [mel]", "Give both the same host method")
        if arm in ABLATIONS and not changed(config.mel, plan.recipe.arms[MEL].mel):
            raise UserError(f"the arm {arm} is the same as {MEL}", f"Change something in [arms.{arm}.mel]")
    if plan.recipe.settings.samples != ANSWERS:
        raise UserError(f"{plan.recipe.settings.samples} answers do not make avg@8", f"Set study.samples to {ANSWERS}")


def train_matched(config: Config, out: Path, command: Sequence[str], grpo: Path, mel: Path) -> None:
    """GRPO again, with so many problems an iteration that it generates what MEL did."""
    more = generated_tokens(mel) / generated_tokens(grpo)
    rollout = config.rollout.model_copy(update={"prompts": round(config.rollout.prompts * more)})
    train(config.model_copy(update={"rollout": rollout}), out, command)


def generated_tokens(run: Path) -> int:
    return int(json.loads((final(run) / "trainer" / "state.json").read_text())["generated_tokens"])


# --- what was found --------------------------------------------------------------------------------------------------


def found(plan: Plan) -> Outcome:
    runs = {arm: [plan.run(arm, seed) for seed in plan.seeds] for arm in plan.recipe.arms}
    curves = on_shared_points({arm: read_curve(of_arm) for arm, of_arm in runs.items()})
    write_table(plan.out / PANELS, PanelRow, [row for arm, curve in curves.items() for row in panel_rows(arm, curve)])
    write_table(plan.out / EXPERIENCE, ExperienceRow, [row for arm in runs for row in experience_rows(arm, runs[arm])])
    written = [row for arm in runs if arm not in (GRPO, MATCHED) for row in reflection_rows(plan, arm)]
    write_table(plan.out / REFLECTIONS, ReflectionRow, written)
    sampled = {arm: [read_answers(answers_file(plan.run("", s), arm)) for s in plan.seeds] for arm in runs}
    sampled[BASE] = [read_answers(answers_file(plan.out / "runs", BASE))]  # one model, whatever the seed
    averages = on_shared_questions({arm: Scores.of(of_arm) for arm, of_arm in sampled.items()})
    best = on_shared_questions({arm: Scores.of([any_right(one) for one in each]) for arm, each in sampled.items()})
    write_table(plan.out / SCORES, ScoreRow, score_rows(curves, averages, best))
    config, settings = plan.recipe.arms[MEL], plan.recipe.settings
    tokens = {arm: sum(map(generated_tokens, of_arm)) for arm, of_arm in runs.items()}
    protocol = {
        "model": model_name(config.model.path),
        "iterations": config.iterations,
        "prompts": config.rollout.prompts,
        "rollouts_per_prompt": config.rollout.samples,
        "lr": config.learner.lr,
        "mel_weight": config.mel.weight,
        "pairs": config.mel.pairs,
        "temperature": settings.temperature,
        "max_tokens": config.rollout.max_tokens,
        "split": config.evaluate.split,
        "levels": list(config.evaluate.levels),
        "questions": config.evaluate.problems,
        "samples": settings.samples,
        "sampled_questions": settings.questions,
        "token_ratio": round(tokens[MATCHED] / tokens[MEL], 4) if MATCHED in tokens else None,
        "more_tokens_than_grpo": round(tokens[MEL] / tokens[GRPO] - 1, 4),
        "matched_prompts": [load_recipe(run / "config.toml").rollout.prompts for run in runs.get(MATCHED, [])] or None,
        "seeds_to_find_3_points": seeds_needed(curves),
        "ablations": {arm: changed(plan.recipe.arms[arm].mel, config.mel) for arm in runs if arm in ABLATIONS} or None,
    }
    return Outcome(
        claims=claims(curves, averages, best, runs),
        arms=[cost(arm, curve, runs[arm]) for arm, curve in curves.items()],
        protocol={name: value for name, value in protocol.items() if value is not None},
    )


def changed(mel: MelConfig, usual: MelConfig) -> dict[str, object]:
    """What an ablation sets differently."""
    return {name: value for name, value in mel.model_dump().items() if value != getattr(usual, name)}


def any_right(answers: Sequence[Answer]) -> list[Answer]:
    """One answer for each question with graded ones: a right one if there is any. Their accuracy is Pass@k."""
    chosen: dict[str, Answer] = {}
    for one in answers:
        if one.verdict == "correct" or (one.verdict == "wrong" and one.problem not in chosen):
            chosen[one.problem] = replace(one, sample=0)
    return list(chosen.values())


def experience_rows(arm: str, runs: Sequence[Path]) -> list[ExperienceRow]:
    """The course of training: rewards, and what became of the reflections."""
    lines = [{line["step"]: line for line in RunReader(run).metrics() if "train/reward/mean" in line} for run in runs]

    def over_seeds(step: int, metric: str) -> Interval:
        of_reflections = metric in ("mel/retention", "mel/reflection_length")
        there = [one[step] for one in lines if not of_reflections or one[step].get("train/mel/reflections")]
        return _over_few([line[f"train/{metric}"] for line in there if f"train/{metric}" in line])

    rows = []
    for step in sorted(set.intersection(*(set(one) for one in lines))):
        reward, retention = over_seeds(step, "reward/mean"), over_seeds(step, "mel/retention")
        rows.append(
            ExperienceRow(
                arm=arm,
                iteration=step,
                reward=reward.estimate,
                reward_low=reward.low,
                reward_high=reward.high,
                retention=retention.estimate,
                retention_low=retention.low,
                retention_high=retention.high,
                mixed=over_seeds(step, "mel/mixed_frac").estimate,
                reflection_tokens=over_seeds(step, "mel/reflection_length").estimate,
                nll=over_seeds(step, "mel/nll").estimate,
                extra_tokens=over_seeds(step, "mel/extra_tokens").estimate,
                seeds=len(runs),
            )
        )
    return rows


def reflection_rows(plan: Plan, arm: str) -> list[ReflectionRow]:
    """The first few reflections of every tenth of each run."""
    rows = []
    for seed in plan.seeds:
        config, reader = plan.config(arm, seed), RunReader(plan.run(arm, seed))
        for step in range(1, config.iterations + 1, max(1, config.iterations // 10)):
            one_a_problem = {line["problem"]: line for line in reversed(reader.experiences(step))}
            for line in list(one_a_problem.values())[-SHOWN:]:
                rows.append(
                    ReflectionRow(
                        arm=arm,
                        seed=seed,
                        iteration=step,
                        problem=line["problem"],
                        success=line["success"],
                        question=line["question"],
                        wrong=line["wrong"],
                        right=line["right"],
                        reflection=line["reflection"] or "-",
                        replay=line["replay"] or "-",
                        helped="yes" if line["helped"] else "no",
                    )
                )
    return rows


def _over_few(values: Sequence[float]) -> Interval:
    """The mean over seeds; one seed says nothing about others."""
    if len(values) > 1:
        return mean_interval(values)
    return Interval(values[0] if values else math.nan, math.nan, math.nan)


def score_rows(
    curves: Mapping[str, Curve], averages: Mapping[str, Scores], best: Mapping[str, Scores]
) -> list[ScoreRow]:
    greedy = {arm: curve[max(curve)][TOTAL] for arm, curve in curves.items()}
    start = curves[GRPO][min(curves[GRPO])][TOTAL]
    greedy[BASE] = replace(start, accuracy=start.accuracy[:1])
    rows = []
    for metric, scores, samples in ((PASS_1, greedy, 1), (AVG_8, averages, ANSWERS), (PASS_8, best, ANSWERS)):
        for arm, one in scores.items():
            value = one.accuracy_interval()
            rows.append(
                ScoreRow(arm, metric, value.estimate, value.low, value.high, len(one.problems), samples, one.seeds)
            )
    return rows


# --- the claims ------------------------------------------------------------------------------------------------------


def claims(
    curves: Mapping[str, Curve],
    averages: Mapping[str, Scores],
    best: Mapping[str, Scores],
    runs: Mapping[str, Sequence[Path]],
) -> list[Claim]:
    grpo, mel = curves[GRPO], curves[MEL]
    first, last = grpo[min(grpo)][TOTAL], grpo[max(grpo)][TOTAL]
    judged = [
        judge(
            "grpo-learns",
            "greedy accuracy of GRPO after training minus before, points",
            points(difference(first.accuracy, last.accuracy)),
            "+5.2, +7.1 and +15.1 points (4B, 8B, 14B)",
        ),
        judge_ends(
            "mel-beats-grpo",
            "greedy accuracy of MEL minus GRPO at the end, points",
            grpo,
            mel,
            "+3.92, +4.36 and +4.73 points",
        ),
        judge(
            "mel-beats-grpo-avg8",
            "mean accuracy of 8 samples of MEL minus GRPO, points",
            points(difference(averages[GRPO].accuracy, averages[MEL].accuracy)),
            "+1.33, +1.20 and +3.60 points",
        ),
        judge(
            "mel-beats-grpo-pass8",
            "share of problems solved by any of 8 samples, MEL minus GRPO, points",
            points(difference(best[GRPO].accuracy, best[MEL].accuracy)),
            "+2.37, +3.84 and +1.70 points",
        ),
        judge(
            "mel-learns-faster",
            "greedy accuracy averaged over all validations, MEL minus GRPO, points",
            points(difference(over_the_run(grpo), over_the_run(mel))),
            "the curve of MEL lies above from about step 50 on",
        ),
    ]
    if MATCHED in curves:
        judged.append(
            judge_ends(
                "mel-beats-matched",
                "greedy accuracy of MEL minus GRPO with as many generated tokens, points",
                curves[MATCHED],
                mel,
                "not compared",
            )
        )
        judged.append(
            judge(
                "mel-beats-matched-avg8",
                "mean accuracy of 8 samples of MEL minus GRPO with as many generated tokens, points",
                points(difference(averages[MATCHED].accuracy, averages[MEL].accuracy)),
                "not compared",
            )
        )
    judged += [
        judge(
            "reward-higher",
            "training reward averaged over the run, MEL minus GRPO (interval over seeds)",
            _over_few([b - a for a, b in zip(*(rewards(runs[arm]) for arm in (GRPO, MEL)), strict=True)]),
            "higher from the start, at step 120 by about 0.02, 0.05 and 0.06",
        ),
        judge(
            "retention-rises",
            "share of reflections that help their replay, last quarter of training minus first (interval over seeds)",
            _over_few([later - earlier for earlier, later in map(retention_ends, runs[MEL])]),
            "rises: 0.30 to 0.38 (4B), 0.33 to 0.58 (8B), 0.39 to 0.74 (14B)",
        ),
    ]
    for arm in curves:
        if arm in ABLATIONS:
            text = f"greedy accuracy of {arm} minus GRPO at the end, points"
            judged.append(judge_ends(f"{arm}-beats-grpo", text, grpo, curves[arm], "not run"))
    return judged


def over_the_run(curve: Curve) -> Floats:
    """Accuracy [seed, question], averaged over all validations after the first."""
    steps = sorted(curve)[1:]
    mean: Floats = np.mean([curve[step][TOTAL].accuracy for step in steps], axis=0)
    return mean


def rewards(runs: Sequence[Path]) -> list[float]:
    """Mean training reward of each run."""
    return [float(np.mean(RunReader(run).series("train/reward/mean")[1])) for run in runs]


def retention_ends(run: Path) -> tuple[float, float]:
    """Retention in the first and in the last quarter of a run, over all reflections of it."""
    lines = [line for line in RunReader(run).metrics() if "train/mel/retention" in line]
    quarter = max(1, len(lines) // 4)

    def retained(part: Sequence[Mapping[str, float]]) -> float:
        written = [line["train/mel/reflections"] for line in part]
        kept = [line["train/mel/retention"] * line["train/mel/reflections"] for line in part]
        return sum(kept) / sum(written) if sum(written) else math.nan

    return retained(lines[:quarter]), retained(lines[-quarter:])


def seeds_needed(curves: Mapping[str, Curve]) -> int | None:
    """With how many seeds the greedy interval of MEL − GRPO would find a difference of 3 points; None if unknown."""
    grpo, mel = curves[GRPO], curves[MEL]
    apart = mel[max(mel)][TOTAL].accuracy - grpo[max(grpo)][TOTAL].accuracy
    return seeds_for_half_width(apart, HALF_WIDTH) if min(apart.shape) > 1 else None
