"""The study `prm-selection`: can a trajectory-aware judge choose what to learn from (ReasonFlux-PRM, arXiv 2506.18896)?

One student is fine-tuned on the traces of a pool that each judge likes best, on a set curated by heuristics (quality,
difficulty, diversity, in the spirit of s1), on random subsets and on the whole pool. `prm_judges.py` says where the
pool and the judges come from. Beside this (Fig. 6 of the paper) the judge's two other uses: its score as a reward in RL
(Table 3), and picking the best of N answers (Fig. 5).

Every student gets the same number of updates on batches of the same size, whatever the size of its set: a small set is
seen several times, and the whole pool perhaps less than once. So the comparison is at equal compute, and differences
are those of the data. The source does not give its schedule; with s1's, epochs, a larger set would train longer.

Selection by a judge and random subsets never see whether a trace is right; curation does, as people did for s1k, and so
do random right traces, which tell what being right alone is worth. The
judge's reward in RL is the larger trajectory-aware judge's, and the best of N are answers of the student that it chose
the traces for, as in the source.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from reasonlab.config import Config, SftConfig
from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import FORCED_STYLE
from reasonlab.evaluate.statistics import mean_interval
from reasonlab.figures.tables import (
    BEST_OF,
    JUDGE_RL,
    SELECTION,
    BestOfRow,
    JudgeRewardRow,
    SelectionRow,
    write_table,
)
from reasonlab.judges.exact_labels import exact_labels
from reasonlab.judges.selection import curated, random_subset, select
from reasonlab.judges.types import Candidate
from reasonlab.model.config import ModelConfig
from reasonlab.model.ladder import model_name, resolve_model
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.problem import Problem
from reasonlab.runs.files import write_aside
from reasonlab.studies.answers import STATE, answer, answers_file, final, on_shared_questions, read_answers
from reasonlab.studies.plan import Plan, base_pieces
from reasonlab.studies.prm_best_of import ANY_TEXT, BEST, MAJORITY, best_of, best_of_rows, sample_best_of
from reasonlab.studies.prm_judges import (
    LABELLED,
    ON_RESPONSES,
    POOL,
    RESPONSE,
    TRAJECTORY,
    VALUE,
    JudgeName,
    judge_directory,
    judges_of,
    label,
    policies_of,
    sample_traces,
    score,
    scores_of,
    traces_of,
    train_judge,
)
from reasonlab.studies.recipe import StudyRecipe, StudySettings
from reasonlab.studies.runner import Piece, train
from reasonlab.studies.scores import Floats, Scores, arm_cost, difference, points
from reasonlab.studies.verdicts import ArmCost, Claim, Outcome, judge
from reasonlab.train.recorded import given, write_demonstrations

name = "prm-selection"
STUDENT = "student"
OUTCOME, STEPS_LOW, STEPS_HIGH, SINGLE = "rl-outcome", "rl-steps-0.25", "rl-steps-0.75", "rl-single-0.75"
REWARDS = (OUTCOME, STEPS_LOW, STEPS_HIGH, SINGLE)
arms = (STUDENT, *REWARDS)
needed = (STUDENT,)
RANDOM, RIGHT, CURATED, BASE = "random", "random, right", "curated", "base"
THINKING = "base, thinking forced"  # the student before SFT, made to think: what learning to think alone would give


@dataclass(frozen=True, slots=True)
class Set:
    """Traces that a student learns from: who chose them, and how many (0: all)."""

    by: str
    size: int

    def __str__(self) -> str:
        return f"{self.by} {self.size}" if self.size else self.by


def sets_of(settings: StudySettings) -> dict[Set, JudgeName | None]:
    """The larger trajectory-aware judge and random subsets choose every number, all others the smallest."""
    least = settings.selected[0]
    found: dict[Set, JudgeName | None] = {}
    for one in judges_of(settings):
        for size in settings.selected if one == best_judge(settings) else (least,):
            found[Set(str(one), size)] = one
    found |= {Set(RANDOM, size): None for size in settings.selected}
    return {**found, Set(RIGHT, least): None, Set(CURATED, least): None, Set(POOL, 0): None}


def best_judge(settings: StudySettings) -> JudgeName:
    return JudgeName(TRAJECTORY, settings.judge_models[1])


# --- the work --------------------------------------------------------------------------------------------------------


def pieces(plan: Plan) -> list[Piece]:
    check(plan)
    settings, out, first = plan.recipe.settings, plan.out, plan.seeds[0]
    config = plan.config(STUDENT, first)
    policies = policies_of(settings)
    models = [*policies, *settings.judge_models, *(one.model.path for one in plan.recipe.arms.values())]
    bases = base_pieces(models, plan.device)
    after = tuple(bases)
    work = list(bases.values())
    for part in (POOL, LABELLED):
        for model in policies:
            work.append(Piece(f"{part} of {model}", sample_traces, (part, model, config, settings, out), after))
    pool, labelled = (tuple(f"{part} of {model}" for model in policies) for part in (POOL, LABELLED))
    for kind in (TRAJECTORY, RESPONSE, VALUE):
        work.append(Piece(f"labels for {kind}", label, (kind, config, settings, out), labelled))
    judges = judges_of(settings)
    for one in judges:
        if one.trained == one:
            arguments: tuple[Any, ...] = (one, config, settings, out, plan.command)
            work.append(Piece(str(one), train_judge, arguments, (f"labels for {one.kind}",)))
    for one in judges:
        arguments = (one, POOL, config, settings, out)
        work.append(Piece(f"scores of {one}", score, arguments, (str(one.trained), *pool)))
    for seed in plan.seeds:
        scored = tuple(f"scores of {one}" for one in judges)
        work.append(Piece(f"sets {seed}", choose, (seed, settings, out, plan.run("", seed)), scored))
        for chosen in sets_of(settings):
            run, where = student_run(plan, chosen, seed), set_file(plan.run("", seed), chosen)
            fitted = on_data(plan.config(STUDENT, seed), where)
            work.append(Piece(f"student on {chosen}, {seed}", train, (fitted, run, plan.command), (f"sets {seed}",)))
            asked = (str(final(run)), fitted, settings, answers_file(plan.run("", seed), str(chosen)), "")
            work.append(Piece(f"answers after {chosen}, {seed}", answer, asked, (f"student on {chosen}, {seed}",)))
    for name, force in ((BASE, ""), (THINKING, FORCED_STYLE)):
        asked = (config.model.path, config, settings, answers_file(out / "runs", name), force)
        work.append(Piece(f"answers of {name}", answer, asked, after))
    rewarding, likes = best_judge(settings), Set(str(best_judge(settings)), settings.selected[0])
    for arm in plan.recipe.arms:
        if arm == STUDENT:
            continue
        for seed in plan.seeds[: settings.rl_seeds]:
            run = plan.run(arm, seed)
            arguments = (rewarding, plan.config(arm, seed), out, run, plan.command)
            work.append(Piece(f"{arm} {seed}", train_rewarded, arguments, (str(rewarding),)))
            asked = (str(final(run)), plan.config(arm, seed), settings, answers_file(plan.run("", seed), arm), "")
            work.append(Piece(f"answers of {arm} {seed}", answer, asked, (f"{arm} {seed}",)))
    student = student_run(plan, likes, first)
    arguments = (final(student), config, settings, out)
    work.append(Piece(BEST, sample_best_of, arguments, (f"student on {likes}, {first}",)))
    for one in judges:
        arguments = (one, BEST, config, settings, out)
        work.append(Piece(f"{BEST} by {one}", score, arguments, (BEST, str(one.trained))))
    return work


def check(plan: Plan) -> None:
    """What would otherwise be found after an hour."""
    settings, student = plan.recipe.settings, plan.recipe.arms[STUDENT]
    if student.method.type != "sft":
        remedy = 'Give it method = { type = "sft", data = "selected.jsonl" }'
        raise UserError(f"the arm {STUDENT} must be trained by sft, not by {student.method.type}", remedy)
    for arm, config in plan.recipe.arms.items():
        if (arm in REWARDS and arm != OUTCOME) != (config.reward.judge_weight > 0):
            what = "has a" if config.reward.judge_weight > 0 else "has no"
            raise UserError(f"the arm {arm} {what} judge's reward", "Mend reward.judge_weight")
    if not settings.writers:
        raise UserError("nobody writes the traces", 'Name policies in study.writers, such as { model = "tiny-1m" }')
    if len(set(settings.judge_models)) < 2:
        raise UserError("both judges have the same model", "Name a smaller and a larger one in study.judge_models")
    if list(settings.selected) != sorted(set(settings.selected)):
        raise UserError("study.selected does not rise", "Name the smallest number first")
    if settings.selected[-1] > settings.pool:
        raise UserError(f"{settings.selected[-1]} of {settings.pool} traces cannot be chosen", "Raise study.pool")


def student_run(plan: Plan, chosen: Set, seed: int) -> Path:
    return plan.run(STUDENT, seed) / str(chosen)


def set_file(root: Path, chosen: Set) -> Path:
    return root / "sets" / f"{chosen}.jsonl"


def on_data(config: Config, data: Path) -> Config:
    assert isinstance(config.method, SftConfig)
    return config.model_copy(update={"method": config.method.model_copy(update={"data": str(data)})})


def choose(seed: int, settings: StudySettings, out: Path, root: Path) -> None:
    """Write every set of traces, and last what is in them."""
    done = root / "sets" / "sets.json"
    if done.exists():
        return
    pool, tokenizer = traces_of(out, POOL, settings), TinyTokenizer.load()
    sound = [exact_labels(one).all_right for one in pool]
    about: dict[str, Any] = {}
    for chosen, by in sets_of(settings).items():
        places, stages = _chosen(chosen, by, pool, seed, settings, out)
        demonstrations = [
            (_problem(pool[i]), given(tokenizer.encode(prompt_text(pool[i].question)), tokenizer.encode(text)))
            for i in places
            if (text := pool[i].response)
        ]
        write_demonstrations(set_file(root, chosen), demonstrations)
        about[str(chosen)] = {
            "traces": len(places),
            "right": float(np.mean([bool(pool[i].correct) for i in places])),
            "sound": float(np.mean([sound[i] for i in places])),
            "level": float(np.mean([pool[i].level for i in places])),
            "tokens": float(np.mean([len(rollout.ids) for _, rollout in demonstrations])),
            "problems": len({pool[i].problem for i in places}),
            "thinking": float(np.mean(["think>" in pool[i].response for i in places])),
            "writers": {name: count / len(places) for name, count in sorted(_writers(pool, places).items())},
            **({"stages": stages} if stages else {}),
        }
    write_aside(done, (json.dumps(about, indent=1) + "\n").encode())


def _chosen(
    chosen: Set, by: JudgeName | None, pool: Sequence[Candidate], seed: int, settings: StudySettings, out: Path
) -> tuple[Sequence[int], Mapping[str, int]]:
    """The places of a set's traces, and how many each stage of curation left."""
    if by is not None:
        share: Literal["even"] | None = "even" if settings.per_family == "even" else None
        return select(pool, scores_of(out, POOL, by, pool), chosen.size, per_family=share, seed=seed).indices, {}
    if chosen.by == CURATED:
        return curated(pool, chosen.size, seed=seed)
    if chosen.by == RIGHT:
        right = [i for i, one in enumerate(pool) if one.correct]
        return [right[i] for i in random_subset([pool[i] for i in right], chosen.size, seed)], {}
    return random_subset(pool, chosen.size, seed) if chosen.size else range(len(pool)), {}


def _writers(pool: Sequence[Candidate], places: Sequence[int]) -> Counter[str]:
    """How many traces each model wrote."""
    return Counter(pool[i].source.split(",")[0] for i in places)


def _problem(trace: Candidate) -> Problem:
    return Problem(trace.problem, trace.question, trace.answer, trace.family, trace.level)


def train_rewarded(by: JudgeName, config: Config, out: Path, run: Path, command: Sequence[str]) -> None:
    """RL with a judge's reward; without weight the judge stays out of it."""
    if config.reward.judge_weight > 0:
        reward = config.reward.model_copy(update={"judge": str(judge_directory(out, by))})
        config = config.model_copy(update={"reward": reward})
    train(config, run, command)


# --- what it takes, for `--dry-run` -----------------------------------------------------------------------------------

LEFT_OUT = (
    "Students and judges are counted together, as one row each. Not counted: labels of steps and trajectories, what "
    "judges score (a third of training on as many tokens), the judge beside the policy in RL. Pool and judges are "
    "counted with every seed, and made once."
)


def counted(recipe: StudyRecipe) -> dict[str, Config]:
    """What is trained: the students as one long run, the judges likewise, each by its size; and the arms with RL.

    At the size of the paper the judges it compares with are published; only its own are trained.
    """
    settings, student = recipe.settings, recipe.arms[STUDENT]
    arms = {f"{STUDENT}s": _longer(student, len(sets_of(settings)) * student.iterations)}
    for size, model in zip(("smaller", "larger"), settings.judge_models, strict=True):
        kinds = 1 if recipe.about else sum(one == one.trained and one.model == model for one in judges_of(settings))
        steps = kinds * settings.judge_epochs * -(-settings.judge_traces // settings.judge_batch)
        rollout = student.rollout.model_copy(update={"prompts": settings.judge_batch})
        changes = {"model": student.model.model_copy(update={"path": model}), "rollout": rollout}
        arms[f"{size} judge{'s' * (kinds > 1)}"] = _longer(student.model_copy(update=changes), steps)
    return {**arms, **{arm: config for arm, config in recipe.arms.items() if arm != STUDENT}}


def _longer(config: Config, iterations: int) -> Config:
    return config.model_copy(update={"iterations": iterations})


def sampled(recipe: StudyRecipe) -> dict[str, int]:
    """How many responses are sampled beside RL."""
    settings, models = recipe.settings, len(sets_of(recipe.settings)) + len(recipe.arms)
    traces = {} if recipe.about else {"traces": settings.pool + settings.judge_traces}  # the paper's are published
    answers = {"test answers": models * settings.questions * settings.samples}
    return {**traces, **answers, BEST: settings.best_of * settings.best_of_questions}


# --- what was found --------------------------------------------------------------------------------------------------


def found(plan: Plan) -> Outcome:
    settings, out = plan.recipe.settings, plan.out
    roots = [plan.run("", seed) for seed in plan.seeds]
    answers = {str(one): [read_answers(answers_file(root, str(one))) for root in roots] for one in sets_of(settings)}
    for name in (BASE, THINKING):  # one model, whatever the seed
        answers[name] = [read_answers(answers_file(out / "runs", name))]
    rewarded = [arm for arm in plan.recipe.arms if arm != STUDENT]
    for arm in rewarded:
        answers[arm] = [read_answers(answers_file(root, arm)) for root in roots[: settings.rl_seeds]]
    scores = on_shared_questions({one: Scores.of(each) for one, each in answers.items()})
    inside = [json.loads((root / "sets" / "sets.json").read_text()) for root in roots]
    write_table(out / SELECTION, SelectionRow, selection_rows(settings, scores, inside))
    picks = best_of(settings, out, best_judge(settings))
    write_table(out / BEST_OF, BestOfRow, best_of_rows(picks))
    if rewarded:
        write_table(out / JUDGE_RL, JudgeRewardRow, [reward_row(plan, arm, scores[arm]) for arm in (*rewarded, BASE)])
    student, pool = plan.recipe.arms[STUDENT], inside[0][POOL]
    seen = student.iterations * student.rollout.prompts
    protocol = {
        "model": model_name(student.model.path),
        "judges": [str(one) for one in judges_of(settings)],
        "pool": pool["traces"],
        "pool_right": round(pool["right"], 4),
        "selected": list(settings.selected),
        "per_family": settings.per_family,
        "updates": student.iterations,
        "batch": student.rollout.prompts,
        "passes": {str(one): round(seen / inside[0][str(one)]["traces"], 2) for one in sets_of(settings)},
        "sets": inside[0],
        "temperature": settings.temperature,
        "max_tokens": student.rollout.max_tokens,
        "split": settings.split,
        "levels": list(student.evaluate.levels),
        "questions": settings.questions,
        "samples": settings.samples,
        "best_of": settings.best_of,
        "best_of_questions": settings.best_of_questions,
        "rl_seeds": settings.rl_seeds if rewarded else None,
    }
    costs = [cost(plan, str(one), scores[str(one)]) for one in sets_of(settings)]
    costs += [cost(plan, arm, scores[arm]) for arm in (*rewarded, BASE, THINKING)]
    return Outcome(claims(settings, scores, picks), costs, {k: v for k, v in protocol.items() if v is not None})


def selection_rows(
    settings: StudySettings, scores: Mapping[str, Scores], inside: Sequence[Mapping[str, Any]]
) -> list[SelectionRow]:
    shapes = {model: json.loads((resolve_model(model) / "config.json").read_text()) for model in settings.judge_models}
    sizes = {model: ModelConfig.from_hf(shape).parameter_count() for model, shape in shapes.items()}
    rows = []
    for one, by in [*sets_of(settings).items(), (Set(BASE, 0), None), (Set(THINKING, 0), None)]:
        sets = [of_seed[str(one)] for of_seed in inside] if one.by not in (BASE, THINKING) else []
        value = scores[str(one)]
        accuracy = value.accuracy_interval()
        rows.append(
            SelectionRow(
                data=by.kind if by else one.by,
                judge=Path(by.model).name if by else "none",
                parameters=sizes[by.model] if by else 0,
                selected=sets[0]["traces"] if sets else 0,
                accuracy=accuracy.estimate,
                low=accuracy.low,
                high=accuracy.high,
                tokens=float(value.tokens.mean()),
                right=float(np.mean([each["right"] for each in sets])) if sets else float("nan"),
                sound=float(np.mean([each["sound"] for each in sets])) if sets else float("nan"),
                questions=len(value.problems),
                samples=value.samples,
                seeds=value.seeds,
            )
        )
    return rows


def reward_row(plan: Plan, arm: str, scores: Scores) -> JudgeRewardRow:
    reward = plan.recipe.arms[arm].reward if arm != BASE else None
    accuracy = scores.accuracy_interval()
    return JudgeRewardRow(
        arm=arm,
        weight=reward.judge_weight if reward else float("nan"),
        form=reward.judge_form if reward and reward.judge_weight > 0 else "none",
        accuracy=accuracy.estimate,
        low=accuracy.low,
        high=accuracy.high,
        tokens=float(scores.tokens.mean()),
        questions=len(scores.problems),
        samples=scores.samples,
        seeds=scores.seeds,
    )


def cost(plan: Plan, arm: str, scores: Scores) -> ArmCost:
    """What training a student, or RL, took; pool and judges are shared and not in it."""
    if arm in plan.recipe.arms:
        runs = [plan.run(arm, seed) for seed in plan.seeds[: plan.recipe.settings.rl_seeds]]
    else:
        runs = [] if arm in (BASE, THINKING) else [plan.run(STUDENT, seed) / arm for seed in plan.seeds]
    return arm_cost(arm, scores, [final(run) / STATE for run in runs])


# --- the claims ------------------------------------------------------------------------------------------------------


def claims(
    settings: StudySettings, scores: Mapping[str, Scores], picks: Mapping[str, Mapping[int, Floats]]
) -> list[Claim]:
    small, large = settings.judge_models
    least, most = settings.selected[0], settings.selected[-1]
    chooser = str(Set(str(JudgeName(TRAJECTORY, large)), least))
    smaller = str(Set(str(JudgeName(TRAJECTORY, small)), least))

    def set_by(kind: str, model: str) -> str:
        return str(Set(str(JudgeName(kind, model)), least))

    def compared(id: str, better: str, worse: str, published: str) -> Claim:
        gap = points(difference(scores[worse].accuracy, scores[better].accuracy))
        return judge(id, f"accuracy after {better} minus after {worse}, points", gap, published)

    judged = [
        compared("beats-random", chooser, str(Set(RANDOM, least)), "+16.4 points (Table 2, 84.8 against 68.4)"),
        compared("beats-random-right", chooser, str(Set(RIGHT, least)), "not compared"),
        compared("beats-thinking", chooser, THINKING, "not compared: the student before SFT, made to think"),
        compared("beats-pool", chooser, POOL, "+3.7 points (Fig. 6, 1k against the raw 59k)"),
        compared("beats-curated", chooser, str(Set(CURATED, least)), "+5.6 points (Fig. 6; +6.0 in Table 2)"),
        compared(
            "beats-response-only", chooser, set_by(RESPONSE, large), "+8.7 points (Fig. 6, 7B each; +11.6 in Table 2)"
        ),
        compared(
            "smaller-beats-larger-response-only",
            smaller,
            set_by(RESPONSE, large),
            "+4.7 points (Fig. 6, 7B against 72B); the 1.5B judge is 1.6 points below the 72B one",
        ),
        compared("beats-on-responses", chooser, set_by(ON_RESPONSES, large), "+7.0 points (Table 2, against 72B)"),
        compared("beats-skywork", chooser, set_by(VALUE, large), "+13.8 points (Fig. 6, 7B each)"),
        compared("larger-judge-better", chooser, smaller, "+6.3 points (Fig. 6, 7B against 1.5B)"),
    ]
    if most > least:
        more = str(Set(str(JudgeName(TRAJECTORY, large)), most))
        judged.append(compared("more-data-better", more, chooser, "+8.1 points (Fig. 6, 10k against 1k)"))
        text = "+11.8 points (Fig. 6, 10k against the raw 59k)"
        judged.append(compared("more-data-beats-pool", more, POOL, text))
    for arm, published in {
        STEPS_LOW: "not published",
        STEPS_HIGH: "+3.6 points (Table 3, MATH500, Qwen2.5-7B-Instruct)",
        SINGLE: "the form of the released code; which of the two gave Table 3 is not said",
    }.items():
        if arm in scores and OUTCOME in scores:
            gap = points(difference(scores[OUTCOME].accuracy, scores[arm].accuracy))
            text = f"accuracy after {arm} minus {OUTCOME}, points"
            judged.append(judge(f"{arm}-beats-outcome", text, gap, published))
    last = max(picks[MAJORITY])
    chosen = picks[str(JudgeName(TRAJECTORY, large))][last]
    for rival, published in {
        MAJORITY: "+6.4 points (Fig. 5, MATH500, N = 16)",
        ANY_TEXT: "not compared",
        str(JudgeName(RESPONSE, large)): "+2.4 points (Fig. 5, against the 72B judge)",
    }.items():
        gap = points(mean_interval(chosen - picks[rival][last]))
        text = f"best of {last} by the larger trajectory-aware judge minus {rival}, points"
        judged.append(judge(f"best-of-n-beats-{rival.split()[0]}", text, gap, published))
    return judged
