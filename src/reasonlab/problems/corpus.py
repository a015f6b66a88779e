"""The text the base model is pre-trained on: worked solutions of training problems, mostly in the shortest style.

Like a corpus of real text it shows the longer styles rarely and the hard levels rarely, so that a base model trained
on it answers at once most of the time although thinking would pay: reinforcement learning has something to find.

A smaller part can show how experience is written down and used: reflections on a wrong response, and solutions with a
reflection as a hint (`reflections.py`). And part of the text can be misled, always in the same way for a family
(`misconceptions.py`): then a hint helps only if it names that mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Literal, NamedTuple

from reasonlab.keys import key
from reasonlab.problems.families.steps import Style, render
from reasonlab.problems.misconceptions import MISCONCEPTIONS, misled, tempting_step
from reasonlab.problems.reflections import heuristic_only, hinted_prompt, reflect, retrospective_prompt, spoiled
from reasonlab.problems.tiny_world import Drawn, stream

Kind = Literal["plain", "reflection", "hinted"]

KIND_SHARES: dict[Kind, float] = {"plain": 0.84, "reflection": 0.08, "hinted": 0.08}
STYLE_SHARES: dict[Style, float] = {"answer": 0.7, "worked": 0.15, "checked": 0.15}
LEVEL_WEIGHTS: dict[int, float] = {1: 0.3, 2: 0.25, 3: 0.2, 4: 0.15, 5: 0.1}
MISTAKES = 0.06  # chance, per step of a checked solution, of a mistake that is noticed and repaired

# Of the responses that are reflected on, wrong and right: a base model answers at once, a trained one thinks.
PAIR_STYLES: dict[Style, float] = {"answer": 0.4, "worked": 0.35, "checked": 0.25}
WRONG_ONLY = 0.1  # share of reflections written without a right response
RULE_ONLY = 0.1  # share of hints that are the rule alone


def prompt_text(question: str) -> str:
    return f"<bos>{question}\n"


class Sample(NamedTuple):
    """A text to learn from; the prompt is given, the response (with its ``<eos>``) is learnt."""

    drawn: Drawn
    kind: Kind
    prompt: str
    response: str


def corpus(
    seed: int,
    styles: Mapping[Style, float] = STYLE_SHARES,
    levels: Mapping[int, float] = LEVEL_WEIGHTS,
    kinds: Mapping[Kind, float] = KIND_SHARES,
    misconceptions: bool = False,
) -> Iterator[Sample]:
    """Problems of the train split without end, each made into a sample of a kind drawn by share."""
    rng, kinds_rng = Random(key(seed, "corpus")), Random(key(seed, "corpus-kinds"))
    names, shares = list(styles), list(styles.values())
    for drawn in stream("train", seed, level_weights=levels):
        kind = kinds_rng.choices(list(kinds), list(kinds.values()))[0]
        question = drawn.problem.question
        if kind == "plain":
            style = rng.choices(names, shares)[0]
            prompt, response = prompt_text(question), _told(drawn, style, rng, MISTAKES, misconceptions)
        elif kind == "reflection":
            wrong, right, response = retrospect(drawn, rng, misconceptions)
            prompt = retrospective_prompt(question, wrong, None if rng.random() < WRONG_ONLY else right)
        else:
            reflection = retrospect(drawn, rng, misconceptions).reflection
            rule = heuristic_only(reflection) if rng.random() < RULE_ONLY else None
            step = tempting_step(drawn)
            tempted = misconceptions and f"because {step.expression}={step.result}" not in reflection
            prompt, response = hinted_prompt(question, rule or reflection), _told(drawn, "worked", rng, 0.0, tempted)
        yield Sample(drawn, kind, prompt, response + "<eos>")


def _told(drawn: Drawn, style: Style, rng: Random, mistakes: float, tempted: bool) -> str:
    """The solution, in the wrong way of its family as often as that tempts."""
    if tempted and rng.random() < MISCONCEPTIONS[drawn.problem.family].temptation and (wrong := misled(drawn)):
        return wrong.rendered(style, rng, mistakes)
    return render(drawn.solution, style, rng, mistakes)


class Retrospect(NamedTuple):
    """A wrong and a right response to a problem, and the true reflection on the wrong one."""

    wrong: str
    right: str
    reflection: str


def retrospect(drawn: Drawn, rng: Random, misconceptions: bool = False) -> Retrospect:
    """Both responses from the generators, in styles drawn by `PAIR_STYLES`. Where there are misconceptions, half of the
    wrong responses come from them."""
    names, shares = list(PAIR_STYLES), list(PAIR_STYLES.values())
    wrong_style, right_style = rng.choices(names, shares, k=2)
    typical = misled(drawn) if misconceptions and rng.random() < 0.5 else None
    wrong = typical.rendered(wrong_style, rng, MISTAKES) if typical else spoiled(drawn, rng, wrong_style, MISTAKES)
    reflection = reflect(drawn.solution, wrong)
    if reflection is None:
        raise RuntimeError(f"no reflection on {wrong!r}, which is to answer {drawn.problem.question!r}")
    return Retrospect(wrong, render(drawn.solution, right_style, rng, MISTAKES), reflection)
