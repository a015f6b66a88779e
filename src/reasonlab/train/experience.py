"""The generations of Meta-Experience Learning: a reflection on every chosen pair, and a replay with it as a hint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from reasonlab.config import Config
from reasonlab.grading.grade import Grade
from reasonlab.keys import key
from reasonlab.methods.group import Group
from reasonlab.methods.mel import Experience, contrastive_pairs
from reasonlab.methods.mel_prompts import LanguageModelPrompts, MelPrompts, TinyWorldPrompts
from reasonlab.model.tiny_tokenizer import EOS
from reasonlab.problems.problem import Problem
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Rollout, Sampling
from reasonlab.train.exchange import Exchange
from reasonlab.train.measures import Counter, Report
from reasonlab.train.recorded import given

RIGHT = Grade("correct", None, "of the rollout itself")


class _Chosen(NamedTuple):
    """A pair to reflect on, the `place`-th of its problem."""

    problem: Problem
    success: float
    place: int
    right: Rollout
    wrong: Rollout


class Reflections:
    """Turns the mixed groups of an iteration into experiences. Keyed like everything else, so it needs no state."""

    def __init__(self, config: Config, engine: Engine, exchange: Exchange, sampling: Sampling, report: Report) -> None:
        self.config, self.mel, self.engine, self.exchange = config, config.mel, engine, exchange
        self.sampling, self.report = replace(sampling, segment_tokens=0), report
        self.prompts = _prompts(exchange)

    def on(self, number: int, groups: Sequence[Group]) -> list[Experience]:
        """Reflect on every mixed group, replay, and grade."""
        chosen: list[_Chosen] = []
        for group in groups:
            rng = Random(key(self.config.seed, "pairs", number, group.problem.id))
            success = float(group.correct.sum() / max(1, group.gradable.sum()))
            for place, (right, wrong) in enumerate(contrastive_pairs(group, self.mel.pairs, rng)):
                chosen.append(_Chosen(group.problem, success, place, right, wrong))
        if self.mel.learn == "correct":  # nothing to generate: the right rollout is what is imitated
            nothing = given([], [])
            return [
                Experience(c.problem, c.success, c.wrong, c.right, nothing, c.right, "", nothing, RIGHT) for c in chosen
            ]
        contexts = [
            self.prompts.retrospective(
                c.problem.question, self._text(c.wrong), self._text(c.right) if self.mel.contrast else None
            )
            for c in chosen
        ]
        short = replace(self.sampling, max_tokens=self.mel.max_tokens)
        written = self._generate(number, "reflection", chosen, contexts, short)
        reflections = [self._heuristic(one) for one in written] if self.mel.learn == "heuristic" else written
        hints = [self._text(reflection) for reflection in reflections]
        prompts = [self.prompts.hinted(c.problem.question, hint) for c, hint in zip(chosen, hints, strict=True)]
        replays = self._generate(number, "replay", chosen, prompts, self.sampling)
        graded = self.exchange.grades([(c.problem, [replay]) for c, replay in zip(chosen, replays, strict=True)])
        verdicts = [verdict for (verdict,) in graded]
        made = zip(chosen, written, reflections, hints, replays, verdicts, strict=True)
        return [Experience(c.problem, c.success, c.wrong, c.right, *rest) for c, *rest in made]

    def _generate(
        self, number: int, what: str, chosen: Sequence[_Chosen], prompts: Sequence[str], sampling: Sampling
    ) -> list[Rollout]:
        requests = [
            Request(self.exchange.written_prompt(prompt), [key(self.config.seed, what, number, c.problem.id, c.place)])
            for c, prompt in zip(chosen, prompts, strict=True)
        ]
        count = Counter(self.report, f"iteration {number}: {what}s", len(requests))
        return [rollouts[0] for rollouts in self.engine.generate(requests, sampling, count)]

    def _text(self, rollout: Rollout) -> str:
        return self.exchange.text(rollout.ids).removesuffix(EOS)

    def _heuristic(self, reflection: Rollout) -> Rollout:
        """The rule of a reflection as if it had been the whole of it; nothing if there is none."""
        rule = self.prompts.heuristic(self._text(reflection))
        return given(reflection.prompt, self.exchange.format.response_ids(rule) if rule else [])


def longest_reflection(config: Config, exchange: Exchange, prompt: int) -> int:
    """Tokens of the longest reflection with instruction, question and attempts; 0 where none is written.

    `prompt` are those of the longest question as it is asked.
    """
    if config.mel.learn == "correct":
        return 0
    instruction = _prompts(exchange).retrospective("", "", "" if config.mel.contrast else None)
    attempts = (2 if config.mel.contrast else 1) * config.rollout.max_tokens
    return len(exchange.written_prompt(instruction)) + prompt + attempts + config.mel.max_tokens


def _prompts(exchange: Exchange) -> MelPrompts:
    return TinyWorldPrompts() if exchange.tiny else LanguageModelPrompts()


def experience_rows(experiences: Sequence[Experience], exchange: Exchange) -> Iterator[dict[str, Any]]:
    """What is kept of each experience in the record."""
    for one in experiences:
        yield {
            "problem": one.problem.id,
            "family": one.problem.family,
            "question": one.problem.question,
            "gold": one.problem.answer,
            "success": one.success,
            "wrong": exchange.text(one.wrong.ids),
            "right": exchange.text(one.right.ids),
            "reflection": exchange.text(one.written.ids),
            "hint": one.text,
            "replay": exchange.text(one.replay.ids),
            "verdict": one.verdict.verdict,
            "helped": one.helped,
        }
