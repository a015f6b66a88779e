"""The twelve families of the bundled tiny world.

Each family draws questions with exact answers at seven levels and solves them step by step. ``FAMILIES``
maps names to families; ``WORDS`` lists every word that occurs in their texts, for the tokenizer.
"""

from __future__ import annotations

from reasonlab.problems.families.algebra import LINEAR, SEQUENCE
from reasonlab.problems.families.arithmetic import DIVISION, EXPRESSION, FRACTION, PRODUCT, SUM
from reasonlab.problems.families.base import HARDER_LEVELS, TRAINING_LEVELS, Family
from reasonlab.problems.families.number_theory import BASE, COUNTING, GCD, MODPOW
from reasonlab.problems.families.steps import STYLES, Parsed, Solution, Step, Style, parse, render
from reasonlab.problems.families.word import GAINS, LOSSES, NAMES, OTHER_WORDS, PACKS, THINGS, WORD

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        SUM,
        PRODUCT,
        DIVISION,
        EXPRESSION,
        GCD,
        MODPOW,
        LINEAR,
        FRACTION,
        SEQUENCE,
        BASE,
        COUNTING,
        WORD,
    )
}

WORDS: tuple[str, ...] = (
    *("Answer", "check", "ok", "no"),
    *("gcd", "mod", "in", "base", "from", "to", "or", "not", "numbers", "multiples"),
    *(*NAMES, *THINGS, *GAINS, *LOSSES, *PACKS, *OTHER_WORDS),
)

__all__ = [
    "FAMILIES",
    "HARDER_LEVELS",
    "STYLES",
    "TRAINING_LEVELS",
    "WORDS",
    "Family",
    "Parsed",
    "Solution",
    "Step",
    "Style",
    "parse",
    "render",
]
