"""Prints the page about the tiny world: ``python -m reasonlab.problems > docs/tiny-world.md``."""

from __future__ import annotations

from random import Random

from reasonlab.keys import key
from reasonlab.problems.families import FAMILIES, HARDER_LEVELS, TRAINING_LEVELS, Family, render
from reasonlab.problems.tiny_world import Drawn, draw

_INTRODUCTION = """\
# The tiny world

Twelve families of mathematics with exact answers, small enough for models of a million parameters. Every
problem comes with a worked solution, written in one of three styles: the answer alone, *worked* (the steps
first), or *checked* (each step followed by a reverse calculation; a wrong step is noticed and done again).
Levels 1 to 5 are for training, validation and test; levels 6 and 7 are held out as harder problems. The split
of a question is a hash of its text, so the splits never share a question.

This page is printed by `python -m reasonlab.problems`.

    prompt      <bos>37+85+12=?⏎
    answer      Answer:134<eos>
    worked      <think>37+85=122;122+12=134</think>Answer:134<eos>
    checked     <think>37+85=122 check 122-85=37 ok;122+12=134 check 134-12=122 ok</think>Answer:134<eos>
"""


def page() -> str:
    """The page in Markdown."""
    return "\n".join([_INTRODUCTION, *(_section(family) for family in FAMILIES.values())])


def _section(family: Family) -> str:
    examples = {level: draw(family.name, level, "train", 0) for level in TRAINING_LEVELS}
    examples |= {level: draw(family.name, level, "harder", 0) for level in HARDER_LEVELS}
    problems = [drawn.problem for drawn in examples.values()]
    rows = [f"| {problem.level} | `{problem.question}` | `{problem.answer}` |" for problem in problems]
    table = "\n".join(["| level | question | answer |", "|---|---|---|", *rows])
    return f"## {family.name}\n\nAsks for {family.asks}.\n\n{table}\n\nLevel 3:\n\n{_styles(examples[3])}\n"


def _styles(drawn: Drawn) -> str:
    rng = Random(key("tiny-page", drawn.problem.id))
    texts = [
        render(drawn.solution, "answer", rng),
        render(drawn.solution, "worked", rng),
        render(drawn.solution, "checked", rng, mistakes=0.3),
    ]
    return "\n".join(f"    {text}" for text in texts)


if __name__ == "__main__":
    print(page(), end="")
