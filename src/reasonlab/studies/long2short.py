"""The study `long2short`: from a model that thinks long to one that thinks short (Kimi k1.5 §2.4, Fig. 7).

The long model is made as in the report: the base model is warmed up on verified long answers and trained by RL without
a length penalty. Then every way of shortening starts from it:

    shortest   SFT on the shortest correct of n samples of the long model
    merge      the average of the long model's weights and the base model's, which answers short; no training
    merge+rs   shortest rejection sampling on the merged model
    dpo        the shortest correct sample preferred to longer wrong and much longer correct ones
    rl         a second RL phase with the length reward and a reduced token limit

Every model answers the same test problems with the full token limit. Reference points: the base model, and the base
model with thinking forced. The short model of the merge is the base model because that is our short-answering model;
the report's is its short-CoT model.

Language models go the same way. They need no warm-up, thinking is not forced, and a long model that exists already can
take the place of the trained one (`long_model`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from reasonlab.config import Config, DpoConfig, SftConfig
from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import FORCED_STYLE, Answer
from reasonlab.evaluate.frontier import dominance
from reasonlab.figures.tables import ARMS, ArmRow, write_table
from reasonlab.methods.behaviours import warmup_demonstrations
from reasonlab.methods.group import Group
from reasonlab.methods.long2short import preference_pairs, shortest_correct
from reasonlab.methods.merge_command import Settings, Source, merge_checkpoints
from reasonlab.methods.merge_command import check as check_sources
from reasonlab.model.ladder import model_name, resolve_model
from reasonlab.rollout.types import Sampling
from reasonlab.runs.files import write_aside
from reasonlab.studies.answers import (
    STATE,
    answer,
    answers_file,
    asked_problems,
    asks_tiny_world,
    final,
    on_shared_questions,
    open_model,
    read_answers,
)
from reasonlab.studies.plan import Plan, base_pieces
from reasonlab.studies.recipe import StudySettings
from reasonlab.studies.runner import Piece, train
from reasonlab.studies.scores import Floats, Scores, arm_cost, difference, interval, panels_of, points, ratio
from reasonlab.studies.verdicts import ArmCost, Claim, Outcome, Verdict, judge
from reasonlab.terminal import make_observer
from reasonlab.train.exchange import Exchange
from reasonlab.train.held_out import open_held_out
from reasonlab.train.recorded import write_demonstrations, write_pairs
from reasonlab.train.sample import sample_groups
from reasonlab.train.sources import usable_pool

name = "long2short"
WARM_UP, LONG, SHORTEST, MERGE, MERGE_RS, DPO, RL = "warm-up", "long", "shortest", "merge", "merge+rs", "dpo", "rl"
arms = (WARM_UP, LONG, SHORTEST, MERGE_RS, DPO, RL)  # those that are trained; merging needs no recipe
needed = (LONG, SHORTEST, MERGE_RS, DPO, RL)
FINISHED = (LONG, SHORTEST, MERGE, MERGE_RS, DPO, RL)
BASE, BASE_FORCED = "base", "base, thinking forced"
ORDER = (RL, DPO, MERGE_RS, MERGE, SHORTEST)  # the report's, by accuracy
ALL, HARD, TOGETHER = "all levels", "hardest level", "all benchmarks"
COST = "cost.json"
NORMAL = 1.959964  # 97.5 % quantile


# --- the work --------------------------------------------------------------------------------------------------------


def pieces(plan: Plan) -> list[Piece]:
    check(plan)
    settings = plan.recipe.settings
    base, warmed_up, tiny = plan.recipe.arms[LONG].model.path, WARM_UP in plan.recipe.arms, tiny_world(plan)
    bases = base_pieces([base], plan.device)
    work, after_base = list(bases.values()), tuple(bases)
    for seed in plan.seeds:
        root = plan.run("", seed)

        def piece(name: str, function: Any, *arguments: Any, needs: Sequence[str] = (), seed: int = seed) -> None:
            work.append(Piece(f"{name} {seed}", function, arguments, tuple(f"{need} {seed}" for need in needs)))

        def run(arm: str, model: Path, data: str = "", needs: Sequence[str] = (), seed: int = seed) -> None:
            config = starting_from(plan.config(arm, seed), model, plan.run("", seed) / data if data else None)
            piece(arm, train, config, plan.run(arm, seed), plan.command, needs=needs, seed=seed)

        long, merged, config = long_model(plan, seed), root / MERGE, plan.config(LONG, seed)
        trained = [] if settings.long_model else [LONG]
        if trained and warmed_up:
            work.append(Piece(f"warm-up data {seed}", warmup_data, (base, config, settings, root), after_base))
            run(WARM_UP, Path(base), "warm-up.jsonl", needs=["warm-up data"])
            run(LONG, final(root / WARM_UP), needs=[WARM_UP])
        elif trained:
            work.append(Piece(f"{LONG} {seed}", train, (config, plan.run(LONG, seed), plan.command), after_base))
        piece("samples", long_samples, long, config, settings, root, needs=trained)
        run(SHORTEST, long, "shortest.jsonl", needs=["samples"])
        run(DPO, long, "pairs.jsonl", needs=["samples"])
        run(RL, long, needs=trained)
        piece(MERGE, merge, base, long, settings.merge_weight, merged, needs=trained)
        piece("merged samples", merged_samples, merged, config, settings, root, needs=[MERGE])
        run(MERGE_RS, merged, "merge+rs.jsonl", needs=["merged samples"])
        for arm in FINISHED:
            model = {MERGE: merged, LONG: long}.get(arm, final(root / arm))
            needs = trained if arm == LONG else [arm]
            piece(f"answers of {arm}", answer, str(model), config, settings, answers_file(root, arm), "", needs=needs)
    config = plan.config(LONG, plan.seeds[0])
    for arm, force in references(tiny).items():
        where = answers_file(plan.out / "runs", arm)
        work.append(Piece(f"answers of {arm}", answer, (base, config, settings, where, force), after_base))
    return work


def tiny_world(plan: Plan) -> bool:
    return asks_tiny_world(plan.recipe.arms[LONG])


def long_model(plan: Plan, seed: int) -> Path:
    """Where the model to be shortened lies, or will lie."""
    given = plan.recipe.settings.long_model
    return Path(given).expanduser().resolve() if given else final(plan.run(LONG, seed))


def references(tiny: bool) -> dict[str, str]:
    """Models that are not trained, and what begins their answers."""
    return {BASE: "", BASE_FORCED: FORCED_STYLE} if tiny else {BASE: ""}


def check(plan: Plan) -> None:
    """What would otherwise be found after hours."""
    if plan.recipe.settings.long_model and not long_model(plan, 0).is_dir():
        remedy = "Train it first, or leave [study] long_model out: then the study trains the arm long"
        raise UserError(f"there is no long model in {long_model(plan, 0)}", remedy)
    for arm, kind in {WARM_UP: "sft", SHORTEST: "sft", MERGE_RS: "sft", DPO: "dpo"}.items():
        if arm in plan.recipe.arms and (named := plan.recipe.arms[arm].method.type) != kind:
            remedy = f'Give it method = {{ type = "{kind}", data = "{arm}.jsonl" }}'
            raise UserError(f"the arm {arm} must be trained by {kind}, not by {named}", remedy)
    config, settings = plan.recipe.arms[LONG], plan.recipe.settings
    if not tiny_world(plan):
        if WARM_UP in plan.recipe.arms:
            remedy = "Leave the arm warm-up out; a model warmed up by `reasonlab train` can be the recipe's model"
            raise UserError("the warm-up of this study is that of the tiny models", remedy)
        return
    hard = [one for one in asked_problems(config, settings) if one.level == max(config.evaluate.levels)]
    if len(hard) < 2:
        raise UserError(f"{len(hard)} of {settings.questions} test problems are hard", "Raise questions in [study]")


def starting_from(config: Config, model: Path, data: Path | None) -> Config:
    """The recipe with the model that it starts from and the examples that it learns from."""
    changes: dict[str, Any] = {"model": config.model.model_copy(update={"path": str(model)})}
    if data is not None:
        assert isinstance(config.method, SftConfig | DpoConfig)
        changes["method"] = config.method.model_copy(update={"data": str(data)})
    return config.model_copy(update=changes)


def warmup_data(base: str, config: Config, settings: StudySettings, root: Path) -> None:
    """Verified long answers of the base model that show the behaviours: prompted by forcing it to think."""
    out = root / "warm-up.jsonl"
    if out.exists():
        return
    started = time.monotonic()
    groups, exchange = _sampled(base, config, settings.warmup_problems, settings.warmup_samples, FORCED_STYLE)
    _write_cost(root / "warm-up data", groups, started)
    # Last: with it this piece is done.
    write_demonstrations(out, warmup_demonstrations(groups, exchange.text), exchange.fingerprint)


def long_samples(model: Path, config: Config, settings: StudySettings, root: Path) -> None:
    """n samples of the long model: the shortest correct ones, and the preference pairs."""
    if (root / "pairs.jsonl").exists():
        return
    started = time.monotonic()
    groups, exchange = _sampled(str(model), config, settings.sampled_problems, settings.sampled_answers)
    write_demonstrations(root / "shortest.jsonl", shortest_correct(groups), exchange.fingerprint)
    _write_cost(root / "samples", groups, started)
    write_pairs(root / "pairs.jsonl", preference_pairs(groups, settings.pairs), exchange.fingerprint)


def merged_samples(model: Path, config: Config, settings: StudySettings, root: Path) -> None:
    out = root / "merge+rs.jsonl"
    if out.exists():
        return
    started = time.monotonic()
    groups, exchange = _sampled(str(model), config, settings.sampled_problems, settings.sampled_answers)
    _write_cost(root / "merged samples", groups, started)
    write_demonstrations(out, shortest_correct(groups), exchange.fingerprint)


def _sampled(model: str, config: Config, problems: int, samples: int, force: str = "") -> tuple[list[Group], Exchange]:
    """Rollouts of training problems."""
    engine, exchange = open_model(model, config)
    apart = None if exchange.tiny else open_held_out(config, exchange.tiny, print)
    pool = [problem for problem, _ in usable_pool(config, exchange, apart, print)][:problems]
    sampling = Sampling(
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
        stop_ids=exchange.stop_ids,
        repetition_window=config.rollout.repetition_window,
    )
    with make_observer(1, Path(model).name) as observer:
        groups = sample_groups(engine, exchange, pool, samples, sampling, config.seed, observer.progress, force)
    return groups, exchange


def merge(base: str, long: Path, weight: float, out: Path) -> None:
    if (out / COST).exists():
        return
    started = time.monotonic()
    sources = [Source.open(str(long)), Source.open(str(resolve_model(base)))]
    check_sources(sources)
    merge_checkpoints(sources, None, Settings("linear", (weight, 1 - weight)), out)
    _write_cost(out, [], started)


def _write_cost(directory: Path, groups: Sequence[Group], started: float) -> None:
    tokens = int(sum(group.lengths.sum() for group in groups))
    cost = {"generated_tokens": tokens, "seconds": round(time.monotonic() - started, 1)}
    write_aside(directory / COST, (json.dumps(cost) + "\n").encode())


# --- what was found --------------------------------------------------------------------------------------------------


def found(plan: Plan) -> Outcome:
    roots = [plan.run("", seed) for seed in plan.seeds]
    answers = {arm: [read_answers(answers_file(root, arm)) for root in roots] for arm in FINISHED}
    config, settings, tiny = plan.recipe.arms[LONG], plan.recipe.settings, tiny_world(plan)
    for arm in references(tiny):  # one model, whatever the seed
        answers[arm] = [read_answers(answers_file(plan.out / "runs", arm))]
    hardest = max(config.evaluate.levels)

    def part(one: Answer) -> str:
        """The second panel of the tiny world is its hardest level; language models have a panel for each benchmark."""
        return ("" if one.level != hardest else HARD) if tiny else one.family

    scores = on_shared_questions({arm: Scores.of(of_arm) for arm, of_arm in answers.items()})
    parts = {arm: panels_of(of_arm, part) for arm, of_arm in answers.items()}
    panels = {ALL if tiny else TOGETHER: scores}
    for name in next(iter(parts.values())):
        if name:
            panels[name] = {arm: of_arm[name].only(scores[arm].problems) for arm, of_arm in parts.items()}
    if len(panels) == 2 and not tiny:  # of one benchmark
        del panels[TOGETHER]
    rows = [arm_row(panel, arm, one) for panel, table in panels.items() for arm, one in table.items()]
    write_table(plan.out / ARMS, ArmRow, rows)
    asked = {"split": settings.split, "levels": list(config.evaluate.levels), "hardest_level": hardest}
    protocol = {
        "model": model_name(settings.long_model or config.model.path),
        "temperature": settings.temperature,
        "max_tokens": config.rollout.max_tokens,
        "rl_max_tokens": plan.recipe.arms[RL].rollout.max_tokens,
        "rl_length_weight": plan.recipe.arms[RL].reward.length_weight,
        **(asked if tiny else {"suite": config.evaluate.suite, "training_problems": config.problems.path}),
        "questions": len(scores[LONG].problems),
        "samples": settings.samples,
    }
    return Outcome(claims(scores), [cost(arm, one, plan) for arm, one in scores.items()], protocol)


def arm_row(panel: str, arm: str, scores: Scores) -> ArmRow:
    accuracy, tokens = scores.accuracy_interval(), scores.tokens_interval()
    covariance = joint_covariance(scores)
    return ArmRow(
        panel,
        arm,
        arm,
        *(accuracy.estimate, accuracy.low, accuracy.high, tokens.estimate, tokens.low, tokens.high),
        *(float(covariance[0, 0]), float(covariance[1, 1]), float(covariance[0, 1])),
        *(len(scores.problems), scores.samples, scores.seeds),
    )


def joint_covariance(scores: Scores) -> Floats:
    """Of the means of accuracy and tokens, for an ellipse that is as wide as their intervals.

    The correlation is that of Σ_questions / Q + Σ_seeds / S, each from the means over the other. The standard errors
    are the half-widths of the intervals over the normal quantile: these know that few seeds need Student's.
    """
    both = np.stack([scores.accuracy, scores.tokens])  # [2, seed, question]
    covariance: Floats = np.cov(both.mean(axis=1)) / both.shape[2]
    if both.shape[1] > 1:
        covariance = covariance + np.cov(both.mean(axis=2)) / both.shape[1]
    widths = np.array([(i.high - i.low) / 2 / NORMAL for i in (interval(scores.accuracy), interval(scores.tokens))])
    scale = widths / np.sqrt(np.maximum(np.diag(covariance), 1e-300))
    return covariance * np.outer(scale, scale)


def claims(scores: Mapping[str, Scores]) -> list[Claim]:
    long, rl = scores[LONG], scores[RL]
    kept, length = ratio(long.accuracy, rl.accuracy), ratio(long.tokens, rl.tokens)
    shorter: Verdict = "holds" if length.high < 1 else "fails" if length.low > 1 else "undecided"
    judged = [
        judge(
            "rl-keeps-accuracy",
            "accuracy of rl over that of long; the claim is more than 0.97",
            kept,
            "1.005 on MATH500 (94.6 / 94.1 %), 0.96 on AIME 2024 (60.8 / 63.3 %)",
            0.97,
        ),
        Claim(
            "rl-is-shorter",
            "tokens of rl over those of long",
            shorter,
            length.estimate,
            (length.low, length.high),
            "0.91 on MATH500 (1,197 / 1,320), 0.78 on AIME 2024 (3,257 / 4,199)",
        ),
        on_the_front(scores),
    ]
    published = {DPO: "+3.0, +13.7", MERGE_RS: "+1.4, +4.2", MERGE: "+1.0, +3.9", SHORTEST: "+1.0, +13.1"}
    for better, worse in pairwise(ORDER):
        gap = points(difference(scores[worse].accuracy, scores[better].accuracy))
        text = f"accuracy of {better} minus {worse}, points"
        judged.append(judge(f"{better}-above-{worse}", text, gap, f"{published[worse]} points (MATH500, AIME 2024)"))
    return judged


def on_the_front(scores: Mapping[str, Scores]) -> Claim:
    """No other arm is at least as accurate and at most as long as rl."""

    def means(arm: str) -> tuple[Floats, Floats]:
        return scores[arm].accuracy.mean(axis=0), scores[arm].tokens.mean(axis=0)

    rivals = [arm for arm in FINISHED if arm != RL]
    chance = {arm: dominance(*means(RL), *means(arm)).b for arm in rivals}
    worst = max(chance, key=lambda arm: chance[arm])
    verdict: Verdict = "holds" if chance[worst] < 0.05 else "fails" if chance[worst] > 0.95 else "undecided"
    text = f"largest probability over draws of questions that another arm ({worst}) dominates rl"
    return Claim("rl-on-pareto-front", text, verdict, chance[worst], None, "no other k1.5 arm dominates rl in Fig. 7")


_PARTS = {
    SHORTEST: ("samples",),
    DPO: ("samples",),
    MERGE: (MERGE,),
    MERGE_RS: (MERGE, "merged samples"),
}


def cost(arm: str, scores: Scores, plan: Plan) -> ArmCost:
    """What an arm adds to the long model (for `long`: what it took from the base model on)."""
    states: list[Path] = []
    given = bool(plan.recipe.settings.long_model)
    if arm == LONG and given:  # what a model from elsewhere took is known only if a run of ours made it
        states += [state for state in (long_model(plan, 0) / STATE,) if state.exists()]
    for seed in plan.seeds:
        root = plan.run("", seed)
        states += [root / part / COST for part in _PARTS.get(arm, ())]
        if arm == LONG and not given:
            states.append(long_model(plan, seed) / STATE)
            if WARM_UP in plan.recipe.arms:
                states += [root / "warm-up data" / COST, final(root / WARM_UP) / STATE]
        elif arm != LONG and arm not in (BASE, BASE_FORCED, MERGE):
            states.append(final(root / arm) / STATE)
    return arm_cost(arm, scores, states)
