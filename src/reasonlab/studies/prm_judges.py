"""The pool of traces that `prm-selection` chooses from, and the judges that choose: trained here, on other problems.

Traces of mixed quality come from several policies of the tiny world, each answering freely and with thinking forced, at
several temperatures: right, lucky, with slips, misled. How each judge stands in for a published one:

    trajectory-aware   ReasonFlux-PRM. Learns whole traces: every step towards the fusion of alignment, quality and
                       coherence (`judges/targets.py`; exact labels in place of GPT-4o, and alignment with the worked
                       solution, which the source has not, in place of the response after the trace), the whole towards
                       the share of answers that are right when a policy follows its strategy (`judges/templates.py`).
                       Squared errors, λ = 1. Score: mean of steps + α·whole, α = 1.
    response-only      Qwen2.5-Math-PRM. Learns clean responses: what a trace comes to without its checks and without
                       the steps it takes back, as people and instruct models write solutions. Hard labels,
                       cross-entropy up to the first wrong step, no term for the whole. Score: product of steps, of
                       the whole trace as in the source's comparison; "on responses" scores the clean response.
    skywork-style      Skywork-PRM. Learns a value at the end of every step of a trace: the share of right answers among
                       completions from there (Monte-Carlo, soft labels), squared error. Score: mean of steps.

No judge and no selection by one sees whether a trace of the pool is right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reasonlab.config import Config
from reasonlab.evaluate.evaluator import FORCED_STYLE
from reasonlab.judges.exact_labels import exact_labels
from reasonlab.judges.monte_carlo import monte_carlo
from reasonlab.judges.scoring import ModelJudge
from reasonlab.judges.settings import JudgeConfig
from reasonlab.judges.steps import cut
from reasonlab.judges.targets import tiny_trajectories
from reasonlab.judges.templates import tiny_rewards
from reasonlab.judges.training import checkpoints_of
from reasonlab.judges.types import (
    Candidate,
    Labelled,
    Scored,
    read_pool,
    read_scores,
    write_labels,
    write_pool,
    write_scores,
)
from reasonlab.model.ladder import resolve_model
from reasonlab.model.text_format import TinyFormat
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import FAMILY_NAMES, problem_set
from reasonlab.rollout.types import Sampling
from reasonlab.studies.recipe import StudySettings
from reasonlab.studies.runner import train_judge as train_to_the_end
from reasonlab.terminal import make_observer
from reasonlab.train.exchange import tiny_exchange
from reasonlab.train.sample import open_engine, sample_groups

TRAJECTORY, RESPONSE, VALUE = "trajectory-aware", "response-only", "skywork-style"
ON_RESPONSES = "response-only, on responses"
POOL, LABELLED = "pool", "labelled"
_CHECK = re.compile(r" check [^;<]*? (?:ok|no)\b")
_TAKEN_BACK = re.compile(r" no;?$")


@dataclass(frozen=True, slots=True)
class JudgeName:
    """A kind of judge in a size, and what it is made to read."""

    kind: str
    model: str

    def __str__(self) -> str:
        return f"{self.kind} {self.model}"

    @property
    def trained(self) -> JudgeName:
        """The judge that does the scoring: reading responses alone needs no training of its own."""
        return replace(self, kind=RESPONSE) if self.kind == ON_RESPONSES else self


def judges_of(settings: StudySettings) -> list[JudgeName]:
    """Trajectory-aware and response-only judges in both sizes, and in the larger one the others."""
    small, large = settings.judge_models
    both = [JudgeName(kind, model) for kind in (TRAJECTORY, RESPONSE) for model in (small, large)]
    return [*both, JudgeName(VALUE, large), JudgeName(ON_RESPONSES, large)]


def overall(judge: JudgeName, scored: Scored) -> float:
    """The one number that a judge of this kind is published with. A trace of which it says nothing is worth nothing."""
    if not scored.steps:
        return 0.0
    if judge.kind == TRAJECTORY:
        return scored.overall(alpha=1.0)
    return replace(scored, final=None).overall(steps="mean" if judge.kind == VALUE else "product")


def judge_run(root: Path, judge: JudgeName) -> Path:
    return root / "judges" / str(judge.trained)


def judge_directory(root: Path, judge: JudgeName) -> Path:
    """The finished judge."""
    return checkpoints_of(judge_run(root, judge))[-1][1]


# --- traces ----------------------------------------------------------------------------------------------------------


def traces_file(root: Path, part: str, model: str) -> Path:
    return root / "traces" / f"{part}-{Path(model).name}.jsonl.gz"


def policies_of(settings: StudySettings) -> list[str]:
    """The models that write, each once."""
    return list(dict.fromkeys(writer.model for writer in settings.writers))


def read_traces(root: Path, part: str, settings: StudySettings) -> list[Candidate]:
    """The traces of all policies."""
    return [one for model in policies_of(settings) for one in read_pool(traces_file(root, part, model))]


def problems_of(part: str, config: Config, settings: StudySettings) -> list[list[Problem]]:
    """For each writer its share of the training problems: those of the pool, or others that the judges learn from."""
    families = config.problems.families or FAMILY_NAMES
    count = settings.pool if part == POOL else settings.pool + settings.judge_traces
    drawn = problem_set("train", count, 0, families, config.problems.levels)
    mine = drawn if part == POOL else drawn[settings.pool :]
    return [mine[place :: len(settings.writers)] for place in range(len(settings.writers))]


def sample_traces(part: str, model: str, config: Config, settings: StudySettings, root: Path) -> None:
    """The answers of one policy to its share of the problems."""
    out = traces_file(root, part, model)
    if out.exists():
        return
    engine, tokenizer = open_engine(resolve_model(model), config.device, config.threads, config.rollout.rows)
    found: list[Candidate] = []
    with make_observer(1, f"{part}, {Path(model).name}") as observer:
        for writer, problems in zip(settings.writers, problems_of(part, config, settings), strict=True):
            if writer.model != model:
                continue
            sampling = replace(sampling_of(config, tokenizer.eos_id), temperature=writer.temperature)
            force = FORCED_STYLE if writer.thinking else ""
            source = f"{Path(model).name}{', thinking' * writer.thinking}, {writer.temperature:g}"
            for group in sample_groups(
                engine, tiny_exchange(tokenizer), problems, 1, sampling, 0, observer.progress, force
            ):
                text = tokenizer.decode(group.rollouts[0].ids)
                found.append(candidate(group.problem, text, bool(group.correct[0]), source))
    write_pool(out, found)


def sampling_of(config: Config, eos: int) -> Sampling:
    return Sampling(
        temperature=config.rollout.temperature,
        max_tokens=config.rollout.max_tokens,
        stop_ids=(eos,),
        repetition_window=config.rollout.repetition_window,
    )


def candidate(problem: Problem, text: str, right: bool, source: str) -> Candidate:
    about = (problem.id, problem.question, text, problem.answer, right, problem.family, problem.level)
    return Candidate(*about, source)


def clean_response(trace: Candidate) -> Candidate:
    """The solution that a trace comes to: its steps without checks, without those that it takes back."""
    spans = [trace.response[a:b] for a, b in cut(trace.response, "tiny")]
    last = len(spans) - 1
    kept = []
    for place, step in enumerate(spans):
        end = "</think>" if step.endswith("</think>") else ";" if step.endswith(";") else ""
        if place < last and _TAKEN_BACK.search(step.removesuffix("</think>")):
            continue
        kept.append(_CHECK.sub("", step.removesuffix(end)) + end)
    text = "".join(kept)
    opened = text if text.startswith("<think>") or "</think>" not in text else f"<think>{text}"
    return replace(trace, response=opened)


# --- what the judges learn -------------------------------------------------------------------------------------------


def labels_file(root: Path, kind: str) -> Path:
    return root / "labels" / f"{kind}.jsonl.gz"


def label(kind: str, config: Config, settings: StudySettings, root: Path) -> None:
    """The labelled traces that a kind of judge learns from."""
    out = labels_file(root, kind)
    if out.exists():
        return
    traces = read_traces(root, LABELLED, settings)
    if kind == RESPONSE:
        labelled = [exact_labels(one).labelled(one) for one in map(clean_response, traces)]
    elif kind == TRAJECTORY:
        labelled = _trajectory_targets(traces, config, settings)
    else:
        labelled = _values(traces, config, settings)
    write_labels(out, [one for one in labelled if one.steps])


def _trajectory_targets(traces: Sequence[Candidate], config: Config, settings: StudySettings) -> list[Labelled]:
    engine, tokenizer = open_engine(
        resolve_model(settings.judge_models[0]), config.device, config.threads, config.rollout.rows
    )
    sampling = replace(sampling_of(config, tokenizer.eos_id), max_tokens=64)  # for a step
    return tiny_trajectories(traces, lambda them: tiny_rewards(them, engine, tokenizer, sampling, settings.completions))


def _values(traces: Sequence[Candidate], config: Config, settings: StudySettings) -> list[Labelled]:
    engine, tokenizer = open_engine(
        resolve_model(settings.judge_models[0]), config.device, config.threads, config.rollout.rows
    )
    arguments = (engine, TinyFormat(tokenizer), tokenizer, sampling_of(config, tokenizer.eos_id), settings.completions)
    labels = [found.labels("soft") for found in monte_carlo(traces, *arguments)]
    return [found.labelled(one) for one, found in zip(traces, labels, strict=True) if found is not None]


def train_judge(judge: JudgeName, config: Config, settings: StudySettings, root: Path, command: Sequence[str]) -> None:
    """Train a judge to its end, from where it was left."""
    out = judge_run(root, judge)
    recipe = JudgeConfig(
        model=judge.model,
        kind="process",
        loss="ce" if judge.kind == RESPONSE else "mse",
        data=str(labels_file(root, judge.kind)),
        final_weight=1.0 if judge.kind == TRAJECTORY else 0.0,
        batch=settings.judge_batch,
        epochs=settings.judge_epochs,
        checkpoints=1,
        lr=settings.judge_lr[settings.judge_models.index(judge.model)],
        token_budget=config.learner.token_budget,
        device=config.device,
        threads=config.threads,
    )
    train_to_the_end(recipe, out, command)


# --- what the judges say ---------------------------------------------------------------------------------------------


def scores_file(root: Path, part: str, judge: JudgeName) -> Path:
    return root / "scores" / f"{part}-{judge}.jsonl.gz"


def score(judge: JudgeName, part: str, config: Config, settings: StudySettings, root: Path) -> None:
    """What a judge says of the pool, or of another file of traces."""
    out = scores_file(root, part, judge)
    if out.exists():
        return
    traces = traces_of(root, part, settings)
    read = [clean_response(one) for one in traces] if judge.kind == ON_RESPONSES else traces
    opened = ModelJudge.open(judge_directory(root, judge), config.device, config.threads)
    write_scores(out, traces, opened.score(read))


def traces_of(root: Path, part: str, settings: StudySettings) -> list[Candidate]:
    return read_traces(root, POOL, settings) if part == POOL else read_pool(root / "traces" / f"{part}.jsonl.gz")


def scores_of(root: Path, part: str, judge: JudgeName, traces: Sequence[Candidate]) -> list[float]:
    return [overall(judge, one) for one in read_scores(scores_file(root, part, judge), traces)]
