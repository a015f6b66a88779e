"""The judges of `rm-scaling`: who writes the candidates, how the judges are trained, and rm@8 at every checkpoint.

Each function is a piece of the study: it leaves its result on disk, whole or absent, and is skipped where it is there.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reasonlab.config import Config
from reasonlab.evaluate.curves import rm_at_k
from reasonlab.evaluate.evaluator import FORCED_STYLE
from reasonlab.judges.bench import PUBLISHED_K, PUBLISHED_SEEDS, by_question, rm_by_draws
from reasonlab.judges.lists import LIST_SIZE
from reasonlab.judges.settings import JudgeConfig, load_judge_recipe
from reasonlab.judges.types import Candidate, read_pool, write_pool, write_scores
from reasonlab.keys import key
from reasonlab.model.ladder import resolve_model
from reasonlab.problems.problem import Problem
from reasonlab.rollout.types import Sampling
from reasonlab.runs.files import write_aside
from reasonlab.studies.answers import asked_problems
from reasonlab.studies.recipe import StudySettings, Writer
from reasonlab.studies.scores import Floats
from reasonlab.terminal import make_observer

TRAIN, TEST = "train", "test"
POOL, SCORES, COST = "pool.jsonl.gz", "scores.jsonl.gz", "cost.json"


def label(policy: Writer) -> str:
    """tiny-1m at 0.7, thinking"""
    return f"{Path(policy.model).name} at {policy.temperature:g}" + ", thinking" * policy.thinking


def candidates_file(pools: Path, part: str, number: int) -> Path:
    return pools / part / f"policy-{number}" / POOL


def judge_config(config: Config, settings: StudySettings, pool: Path) -> JudgeConfig:
    """One epoch over the lists of the pool; the learner's settings are the arm's."""
    learner = config.learner
    return JudgeConfig(
        model=config.model.path,
        kind="outcome",
        loss="list_bt",
        data=str(pool / POOL),
        scores=str(pool / SCORES) if settings.sorter else "",
        list_size=LIST_SIZE,
        batch=settings.list_batch,
        epochs=1,
        checkpoints=settings.judge_checkpoints,
        lr=learner.lr,
        final_lr_ratio=learner.final_lr_ratio,
        weight_decay=learner.weight_decay,
        clip_grad_norm=learner.clip_grad_norm,
        token_budget=learner.token_budget,
        bfloat16=learner.bfloat16,
        seed=config.seed,
        device=config.device,
        threads=config.threads,
    )


def sample(part: str, policy: Writer, config: Config, settings: StudySettings, out: Path) -> None:
    """The candidates of one policy for the training or the test problems."""
    from reasonlab.train.exchange import tiny_exchange
    from reasonlab.train.sample import open_engine, sample_groups

    if out.exists():
        return
    started = time.monotonic()
    problems, each = _problems(part, config, settings)
    engine, tokenizer = open_engine(resolve_model(policy.model), config.device, config.threads, config.rollout.rows)
    sampling = Sampling(
        temperature=policy.temperature,
        max_tokens=config.rollout.max_tokens,
        stop_ids=(tokenizer.eos_id,),
        repetition_window=config.rollout.repetition_window,
    )
    # Keyed by the policy: two temperatures of one model must not meet the same draws.
    seed = key("rm-scaling", part, label(policy))
    with make_observer(1, label(policy)) as observer:
        force = FORCED_STYLE if policy.thinking else ""
        groups = sample_groups(
            engine, tiny_exchange(tokenizer), problems, each, sampling, seed, observer.progress, force
        )
    end = tokenizer.decode([tokenizer.eos_id])
    found = [
        Candidate(
            problem=group.problem.id,
            question=group.problem.question,
            response=tokenizer.decode(rollout.ids).removesuffix(end),
            answer=group.problem.answer,
            correct=grade.verdict == "correct" if grade.verdict in ("correct", "wrong") else None,
            family=group.problem.family,
            level=group.problem.level,
            source=label(policy),
        )
        for group in groups
        for rollout, grade in zip(group.rollouts, group.grades, strict=True)
    ]
    tokens = int(sum(group.lengths.sum() for group in groups))
    cost = {"generated_tokens": tokens, "responses": len(found), "seconds": round(time.monotonic() - started, 1)}
    write_aside(out.with_name(COST), (json.dumps(cost) + "\n").encode())
    write_pool(out, found)  # last: with it this piece is done


def _problems(part: str, config: Config, settings: StudySettings) -> tuple[list[Problem], int]:
    """The problems of a part, and how many candidates each policy writes for each of them."""
    from reasonlab.train.prompts import training_pool

    if part == TEST:
        return asked_problems(config, settings), settings.samples
    drawn = config.model_copy(
        update={"problems": config.problems.model_copy(update={"pool": settings.sampled_problems})}
    )
    return [problem for problem, _ in training_pool(drawn)], settings.list_answers


def join(files: Sequence[Path], out: Path) -> None:
    """One pool of all policies' candidates, a problem's together."""
    if (out / POOL).exists():
        return
    together: dict[str, list[Candidate]] = {}
    for file in files:
        for candidate in read_pool(file):
            together.setdefault(candidate.problem, []).append(candidate)
    write_pool(out / POOL, (candidate for some in together.values() for candidate in some))


def sort(judge: str, pool: Path, config: Config) -> None:
    """What another judge says of the training pool, for score-sorted sampling."""
    from reasonlab.judges.scoring import ModelJudge

    if (pool / SCORES).exists():
        return
    candidates = read_pool(pool / POOL)
    scored = ModelJudge.open(Path(judge).expanduser(), config.device, config.threads).score(candidates)
    write_scores(pool / SCORES, candidates, scored)


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """One checkpoint of one judge on the test pool."""

    progress: float
    lists: int  # that it has learned from
    parameters: int
    rm: Floats  # rm@8 of every question, families one behind the other
    drawn: Floats  # [family, 2]: rm@8 by 100 draws, and its deviation from draw to draw


def measure(run: Path, pool: Path, device: str, workers: int) -> None:
    """Every kept checkpoint on the test pool: the score of every candidate, and rm@8. One file for each."""
    from reasonlab.hardware import prepare
    from reasonlab.judges.formats import windows
    from reasonlab.judges.network import load_judge
    from reasonlab.judges.scoring import read
    from reasonlab.judges.training import checkpoints_of

    missing = [(progress, one) for progress, one in checkpoints_of(run) if not _measured(run, one).exists()]
    if not missing:
        return
    candidates = read_pool(pool / POOL)
    first, form = load_judge(missing[0][1])
    encoded = form.encode_all(candidates)  # once: all checkpoints of a run read the same tokens
    for one, candidate in zip(encoded, candidates, strict=True):
        windows(one, first.positions, candidate.problem)  # refuses what cannot be read whole
    config = load_judge_recipe(run / "config.toml")
    lists = _lists(run)
    with make_observer(len(missing), f"{run.parent.name}/{run.name}") as observer:
        for number, (progress, checkpoint) in enumerate(missing, 1):
            model = load_judge(checkpoint)[0]
            scored = read(model.to(prepare(device)), encoded, workers)
            scores = np.array([one.final for one in scored], np.float64)
            notes = json.loads((checkpoint / "judge.json").read_text())
            content: dict[str, Any] = {
                "progress": np.float64(progress),
                "lists": np.int64(min(lists, notes["step"] * config.batch)),
                "parameters": np.int64(sum(parameter.numel() for parameter in model.parameters())),
                "scores": scores.astype(np.float32),
                **dict(zip(("rm", "drawn"), rm_at_8(candidates, scores), strict=True)),
            }
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **content)
            write_aside(_measured(run, checkpoint), buffer.getvalue())
            observer.progress("checkpoints measured", number, len(missing))


def _measured(run: Path, checkpoint: Path) -> Path:
    return run / "rm8" / f"{checkpoint.name}.npz"


def _lists(run: Path) -> int:
    """How many lists a judge's epoch has; the run noted it before its first step."""
    from reasonlab.runs import RunReader

    return next(int(event["units"]) for event in RunReader(run).events() if event["kind"] == "data")


def rm_at_8(candidates: Sequence[Candidate], scores: Floats) -> tuple[Floats, Floats]:
    """rm@8 of every question, exact; and of every family, by 100 draws: mean and deviation."""
    families = by_question(candidates, scores, lambda _: None).families
    exact = [
        float(rm_at_k(one.scores, one.correct)[PUBLISHED_K - 1]) for questions in families.values() for one in questions
    ]
    drawn = [rm_by_draws(questions, PUBLISHED_K, PUBLISHED_SEEDS) for questions in families.values()]
    return np.array(exact), np.array([(one.mean, one.deviation) for one in drawn])


def read_measured(run: Path) -> list[Measured]:
    """The checkpoints of a judge in order."""
    found = []
    for file in sorted((run / "rm8").glob("step-*.npz")):
        with np.load(file) as content:
            found.append(
                Measured(
                    float(content["progress"]),
                    int(content["lists"]),
                    int(content["parameters"]),
                    content["rm"],
                    content["drawn"],
                )
            )
    return found
