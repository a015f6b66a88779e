"""Prints the page about the tiny world: ``python -m reasonlab.problems > docs/tiny-world.md``."""

from __future__ import annotations

from itertools import count
from random import Random
from textwrap import indent

from reasonlab.keys import key
from reasonlab.problems.corpus import retrospect
from reasonlab.problems.families import FAMILIES, HARDER_LEVELS, TRAINING_LEVELS, Family, render
from reasonlab.problems.misconceptions import MISCONCEPTIONS, misled
from reasonlab.problems.reflections import hinted_prompt, retrospective_prompt
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

_REFLECTIONS = """\
## Reflections

Meta-Experience Learning asks a model to look at a wrong and a right response of its own and to write down what went
wrong. In the tiny world such a reflection is one line (`problems/reflections.py`):

    first wrong 2:12*7=94 because 12*7=84;rule * check /

- *Bifurcation point*: the first place where the response leaves the worked solution, and what it says there. Places
  count steps from 1, the answer comes last; a step that was noticed to be wrong and done again is not counted. Terms
  and factors may change places.
- *Critique*: what should stand there, a step or the answer.
- *Heuristic*: a rule without numbers, which follows from the other two parts.

| what stands there | what should | rule |
|---|---|---|
| a step | the same with another result | `* check /` (`+ check -`, `- check +`, `/ check *`, `% check -`) |
| a step | one with another number | `check numbers` |
| a step | one with another operation | `+ not -` (the right one first) |
| the answer, and no step before it | a step | `not Answer first` |
| the answer, after some steps | a step | `more to Answer` |
| a step | the answer | `no more` |
| the answer | another answer | `check Answer` |

A reflection is written after the question, the wrong and the right response (the right one may be missing), and used
as a hint behind the question. The base models' corpus (`problems/corpus.py`) shows both, on wrong responses with one
planted mistake and its consequences; the reflection there is always true, and after a hint comes the right solution,
worked. A hint may also be the rule alone. Only the last line of a text is learnt.
"""

_MISCONCEPTIONS = """\
## Misconceptions

For the study `mel-vs-grpo` two models (`tiny-1m-misled`, which ships, and `tiny-10m-misled`) are pre-trained on text
that is often wrong, and always in the same way: in each family the first or the last step is done with another
operation (`problems/misconceptions.py`), and the rest follows from it. Where that would leave the numbers of the tiny
world, at most two times in ten, there is no wrong way. Direct answers are misled as well.

Half of the reflections in that corpus are on these mistakes. After a hint the solution is right if the hint names the
step in question, and as often misled as any other text if it does not: a hint must be good to help. (A hint that is the
rule alone counts as naming the step if the reflection that it was taken from does.)
"""

_REFLECTED = ("sum", "division", "gcd", "word")


def page() -> str:
    """The page in Markdown."""
    return "\n".join(
        [_INTRODUCTION, *(_section(family) for family in FAMILIES.values()), _reflections(), _misconceptions()]
    )


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


def _reflections() -> str:
    texts = []
    for family in _REFLECTED:
        drawn = draw(family, 3, "train", 0)
        question = drawn.problem.question
        wrong, right, reflection = retrospect(drawn, Random(key("tiny-page", "reflection", drawn.problem.id)))
        texts.append(f"{retrospective_prompt(question, wrong, right)}{reflection}<eos>\n")
        solution = render(drawn.solution, "worked", Random(0))
        texts.append(f"{hinted_prompt(question, reflection)}{solution}<eos>\n")
    return "\n".join([_REFLECTIONS, *(indent(text, "    ") for text in texts)])


def _misconceptions() -> str:
    rows = []
    for family, held in MISCONCEPTIONS.items():
        numbers = (draw(family, 3, "train", number) for number in count())
        drawn, told = next((one, wrong) for one in numbers if (wrong := misled(one)) is not None)
        example = f"`{drawn.problem.question}` `{told.rendered('worked', Random(0))}`"
        rows.append(f"| {family} | {held.place} | {100 * held.temptation:.0f} % | {example} |")
    return "\n".join(
        [_MISCONCEPTIONS, "| family | step | of the texts | for instance |", "|---|---|---|---|", *rows, ""]
    )


if __name__ == "__main__":
    print(page(), end="")
