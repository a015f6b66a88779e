"""The text the base model is pre-trained on: worked solutions of training problems, mostly in the shortest style.

Like a corpus of real text it shows the longer styles rarely and the hard levels rarely, so that a base model trained
on it answers at once most of the time although thinking would pay: reinforcement learning has something to find.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random

from reasonlab.keys import key
from reasonlab.problems.families.steps import Style, render
from reasonlab.problems.tiny_world import Drawn, stream

STYLE_SHARES: dict[Style, float] = {"answer": 0.7, "worked": 0.15, "checked": 0.15}
LEVEL_WEIGHTS: dict[int, float] = {1: 0.3, 2: 0.25, 3: 0.2, 4: 0.15, 5: 0.1}
MISTAKES = 0.06  # chance, per step of a checked solution, of a mistake that is noticed and repaired


def prompt_text(question: str) -> str:
    return f"<bos>{question}\n"


def corpus(
    seed: int, styles: Mapping[Style, float] = STYLE_SHARES, levels: Mapping[int, float] = LEVEL_WEIGHTS
) -> Iterator[tuple[Drawn, Style, str]]:
    """Problems of the train split without end, each with a style drawn by share and its response text."""
    rng = Random(key(seed, "corpus"))
    names, shares = list(styles), list(styles.values())
    for drawn in stream("train", seed, level_weights=levels):
        style = rng.choices(names, shares)[0]
        yield drawn, style, render(drawn.solution, style, rng, MISTAKES) + "<eos>"
