"""What the loop measures and keeps of an iteration: metrics by name, rows of the record, seconds by phase."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from reasonlab.evaluate.evaluator import Answer, summarise
from reasonlab.grading.equivalence import BY_VALUE
from reasonlab.grading.finished import RULE as NOT_WORKED_OUT
from reasonlab.grading.grade import Grade
from reasonlab.methods.group import Group
from reasonlab.problems.problem import Problem
from reasonlab.train.exchange import Exchange
from reasonlab.train.learner import StepResult

Report = Callable[[str, int, int], None]  # what is being done, how much of it, of how much


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds_by_phase: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds_by_phase[f"time/{phase}_s"] = now - self.last
        self.last = now

    def metrics(self, tokens: int) -> dict[str, float]:
        """`tokens` were generated, or learned from where nothing is."""
        total = sum(self.seconds_by_phase.values())
        return {**self.seconds_by_phase, "perf/step_s": total, "perf/tokens_per_s": tokens / total}


class Counter:
    """Reports how many of the rollouts are done; called from several threads."""

    def __init__(self, report: Report, what: str, total: int) -> None:
        self.report, self.what, self.total, self.done = report, what, total, 0
        self.lock = threading.Lock()

    def __call__(self, more: int) -> None:
        with self.lock:
            self.done += more
            self.report(self.what, self.done, self.total)


def iteration_metrics(groups: Sequence[Group], results: Sequence[StepResult]) -> dict[str, Any]:
    lengths = np.concatenate([group.lengths for group in groups])
    rewards = np.concatenate([group.rewards for group in groups])
    grades = [g.verdict for group in groups for g in group.grades]
    rules = [g.rule for group in groups for g in group.grades]
    finishes = [rollout.finish for group in groups for rollout in group.rollouts]
    last = results[-1] if results else None
    metrics: dict[str, Any] = {
        "train/reward/mean": float(rewards.mean()),
        "train/reward/std": float(rewards.std()),
        "train/ungraded": grades.count("error") + grades.count("timeout"),
        "train/not_worked_out": rules.count(NOT_WORKED_OUT) / len(rules),
        "train/length/mean": float(lengths.mean()),
        "train/length/p50": float(np.median(lengths)),
        "train/length/p90": float(np.quantile(lengths, 0.9)),
        "train/length/max": int(lengths.max()),
        "train/length/clipped_ratio": finishes.count("length") / len(finishes),
        "train/length/repetition_ratio": finishes.count("repetition") / len(finishes),
        "train/stale_frac": _stale(groups),
        "train/groups/zero_std_frac": float(np.mean([group.rewards.std() == 0 for group in groups])),
        "train/updates": len(results),
        "train/nonfinite": sum(result.nonfinite for result in results),
    }
    if right := [g.rule for group in groups for g in group.grades if g.verdict == "correct"]:
        # Answers in other forms than the gold answer's. If it climbs, read them: so a fooled verifier shows first.
        metrics["train/right_by_value"] = sum(rule.startswith(BY_VALUE) for rule in right) / len(right)
    if graded := grades.count("correct") + grades.count("wrong"):  # none are, where demonstrations have no gold
        metrics["train/accuracy"] = grades.count("correct") / graded
    if judged := [group.judged for group in groups if group.judged is not None]:
        metrics["train/judge/mean"] = float(np.concatenate(judged).mean())
    if last is not None:
        metrics |= {
            "train/loss": last.loss,
            "train/grad_norm": float(np.mean([result.grad_norm for result in results])),
            "train/entropy": results[0].entropy,
            "train/lr": last.lr,
        }
        if results[0].mismatch is not None:
            # Of the engine and the learner, before any weight moves: over the examples of the first step.
            metrics["train/logprob_diff/max"] = results[0].mismatch
            metrics["train/logprob_diff/mean"] = results[0].mean_mismatch
        metrics |= {f"train/{name}": value for name, value in last.metrics.items()}
    return metrics


def _stale(groups: Sequence[Group]) -> float:
    """Share of tokens that an older policy sampled than the newest one among these groups: partial rollouts."""
    versions = np.concatenate([rollout.versions for group in groups for rollout in group.rollouts])
    return float((versions < versions.max(initial=-1)).mean()) if len(versions) else 0.0


def evaluation_metrics(suite: str, answers: Sequence[Answer]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    panels = {suite: list(answers)}
    for family in dict.fromkeys(answer.family for answer in answers):
        panels[f"{suite}/{family}"] = [answer for answer in answers if answer.family == family]
    for name, part in panels.items():
        summary = summarise(part)
        values |= {
            f"eval/{name}/avg@{summary.samples}": summary.accuracy.estimate,
            f"eval/{name}/ci_low": summary.accuracy.low,
            f"eval/{name}/ci_high": summary.accuracy.high,
            f"eval/{name}/length/mean": summary.tokens.estimate,
            f"eval/{name}/truncated_frac": summary.truncated,
        }
    return values


def rollout_rows(groups: Sequence[Group], exchange: Exchange) -> Iterator[dict[str, Any]]:
    texts = iter(exchange.texts([rollout for group in groups for rollout in group.rollouts]))
    for group in groups:
        for sample, (rollout, verdict) in enumerate(zip(group.rollouts, group.grades, strict=True)):
            yield {
                "problem": group.problem.id,
                "family": group.problem.family,
                "level": group.problem.level,
                "question": group.problem.question,
                "gold": group.problem.answer,
                "sample": sample,
                "text": next(texts),
                "tokens": len(rollout.ids),
                "finish": rollout.finish,
                "verdict": verdict.verdict,
                "extracted": verdict.extracted,
                "rule": verdict.rule,
                "reward": float(group.rewards[sample]),
                "logprob": float(rollout.logprobs.sum()),
            }


def one_sample(groups: Sequence[Group], exchange: Exchange, number: int) -> tuple[Problem, str, Grade]:
    group = groups[number % len(groups)]
    return group.problem, exchange.text(group.rollouts[0].ids), group.grades[0]
