"""Misconceptions: every family's wrong way is wrong and hangs together, and the corpus follows it as often as said."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cache
from hashlib import blake2b
from itertools import islice, pairwise
from random import Random

import pytest

from reasonlab.keys import key
from reasonlab.problems.corpus import (
    LEVEL_WEIGHTS,
    MISTAKES,
    STYLE_SHARES,
    Kind,
    Sample,
    corpus,
    prompt_text,
)
from reasonlab.problems.families.steps import Step, parse, render
from reasonlab.problems.misconceptions import MISCONCEPTIONS, misled, tempting_step
from reasonlab.problems.reflections import Told, reflect
from reasonlab.problems.tiny_world import FAMILY_NAMES, Drawn, draw, stream, verify

LEVELS = (2, 3, 4, 5)
DRAWS = 50  # of each family and level
SAMPLES = 6000  # of each kind of text

each_family = pytest.mark.parametrize("family", FAMILY_NAMES)


@cache
def drawn_of(family: str) -> list[Drawn]:
    return [draw(family, level, "train", index) for level in LEVELS for index in range(DRAWS)]


@cache
def told_of(family: str) -> list[tuple[Drawn, Told]]:
    both = ((drawn, misled(drawn)) for drawn in drawn_of(family))
    return [(drawn, told) for drawn, told in both if told is not None]


@cache
def texts(kind: Kind, misconceptions: bool = True, seed: int = 11) -> list[Sample]:
    return list(islice(corpus(seed, kinds={kind: 1.0}, misconceptions=misconceptions), SAMPLES))


def is_right(sample: Sample) -> bool:
    return verify(sample.drawn.problem, parse(sample.response).answer)


# --- the wrong ways --------------------------------------------------------------------------------------------------


def test_every_family_has_one() -> None:
    assert MISCONCEPTIONS.keys() == set(FAMILY_NAMES)
    for held in MISCONCEPTIONS.values():
        assert held.operations.keys() == set("+-*/%")
        assert all(right != wrong for right, wrong in held.operations.items())
        assert 0.5 <= held.temptation < 1, "the right way has to be among the samples"


@each_family
def test_it_is_always_wrong_and_applies_to_most_problems(family: str) -> None:
    told = told_of(family)
    assert len(told) >= 0.8 * len(drawn_of(family))
    for drawn, wrong in told:
        assert not verify(drawn.problem, wrong.answer)
        assert verify(drawn.problem, drawn.solution.answer)


@each_family
def test_one_operation_is_another_and_the_arithmetic_is_right(family: str) -> None:
    """At the place of the family, with the same numbers; every line says what its step gives, in four digits."""
    held = MISCONCEPTIONS[family]
    for drawn, told in told_of(family):
        assert all(claimed == step.result for step, claimed in told.lines)
        assert all(0 <= number < 10_000 for step, claimed in told.lines for number in (step.a, step.b, claimed))
        right = drawn.solution.steps
        place = 0 if held.place == "first" else len(right) - 1
        assert tempting_step(drawn) == right[place]
        for step, line in zip(right[:place], told.lines, strict=False):
            assert line.step == step
        wrong = told.lines[place].step
        assert wrong == right[place]._replace(op=held.operations[right[place].op])


def euclid(lines: list[Step]) -> str:
    """Each step goes on with the divisor and what was left, until nothing is."""
    for before, after in pairwise(lines):
        assert (after.a, after.b) == (before.b, before.result)
    assert lines[-1].result == 0
    return str(lines[-1].b)


def numeral(lines: list[Step], first: Step) -> str:
    """Remainder and quotient in turn, until the quotient is a digit."""
    digits, number, base = "", first.a, first.b
    for remainder, quotient in zip(lines[::2], lines[1::2], strict=True):
        assert (remainder.a, remainder.b, quotient.a, quotient.b) == (number, base, number, base)
        digits, number = f"{remainder.result}{digits}", quotient.result
    assert number < base
    return f"{number}{digits}"


def allowed(number: int, right: list[int], told: list[int], asked: list[int]) -> set[int]:
    """What may stand where the right solution has a number, after steps that give `right` and are said to give `told`:
    the results of the steps it comes from. A number of the question, or of no step, may also be itself."""
    from_steps = {mine for true, mine in zip(right, told, strict=True) if true == number}
    return from_steps if from_steps and number not in asked else from_steps | {number}


@each_family
def test_what_comes_after_follows_from_it_up_to_the_answer(family: str) -> None:
    followed = 0
    for drawn, told in told_of(family):
        lines, right = [line.step for line in told.lines], drawn.solution.steps
        if family in ("gcd", "base") and right[0].op == "%":  # the number of steps depends on their results
            answer = euclid(lines) if family == "gcd" else numeral(lines, right[0])
            assert told.answer == answer
            followed += 1
            continue
        asked = [int(number) for number in re.findall("[0-9]+", drawn.problem.question)]
        true_results, results = [step.result for step in right], [step.result for step in lines]
        for place, (mine, true) in enumerate(zip(lines, right, strict=True)):
            for here, there in ((mine.a, true.a), (mine.b, true.b)):
                assert here in allowed(there, true_results[:place], results[:place], asked)
                followed += here != there
        numbers, true_numbers = (
            [int(number) for number in re.findall("[0-9]+", text)] for text in (told.answer, drawn.solution.answer)
        )
        for here, there in zip(numbers, true_numbers, strict=True):
            # Of a quotient no step need give the digit, although a remainder may happen to be equal to it.
            spare = {there} if family == "division" else set()
            assert here in allowed(there, true_results, results, []) | spare
            followed += here != there
    assert followed >= len(told_of(family))


@each_family
def test_a_true_reflection_on_it_names_the_step_or_that_there_is_none(family: str) -> None:
    """With steps it points at the tempting one and says which operation belongs there."""
    for drawn, told in told_of(family):
        step = tempting_step(drawn)
        reflection = reflect(drawn.solution, told.rendered("worked", Random(0)))
        assert reflection is not None
        assert f" because {step.expression}={step.result};" in reflection
        assert reflection.endswith(f";rule {step.op} not {MISCONCEPTIONS[family].operations[step.op]}")


# --- the corpus ------------------------------------------------------------------------------------------------------


def deviations(samples: Iterable[Sample]) -> dict[str, float]:
    """By family, how many standard deviations the number of misled texts is from what the temptation makes of it;
    of all samples, which must be misled or right."""
    wrong, expected, variance = (dict.fromkeys(FAMILY_NAMES, 0.0) for _ in range(3))
    for sample in samples:
        family, told = sample.drawn.problem.family, misled(sample.drawn)
        if told is None:
            assert is_right(sample)
            continue
        share = MISCONCEPTIONS[family].temptation
        expected[family] += share
        variance[family] += share * (1 - share)
        if not is_right(sample):
            wrong[family] += 1
            assert parse(sample.response).answer == told.answer, "wrong in the way of the family"
    return {family: (wrong[family] - expected[family]) / math.sqrt(variance[family]) for family in FAMILY_NAMES}


def test_plain_text_is_misled_as_often_as_it_tempts() -> None:
    found = deviations(texts("plain"))
    assert max(map(abs, found.values())) < 4
    assert sum(z**2 for z in found.values()) < 32.9  # χ²(12) at 0.1 %


def test_direct_answers_are_misled_like_worked_ones() -> None:
    for style in ("answer", "worked", "checked"):
        found = deviations(sample for sample in texts("plain") if parse(sample.response).style == style)
        assert max(map(abs, found.values())) < 4


def named(sample: Sample) -> bool:
    """Whether the hint says what the tempting step should be."""
    step = tempting_step(sample.drawn)
    return f" because {step.expression}={step.result};" in sample.prompt


def test_a_hint_helps_if_it_names_the_step_and_only_then() -> None:
    told = [sample for sample in texts("hinted") if " because " in sample.prompt]  # not the rule alone
    helped = [sample for sample in told if named(sample)]
    others = [sample for sample in told if not named(sample)]
    assert min(len(helped), len(others)) > SAMPLES / 5
    assert all(map(is_right, helped))
    found = deviations(others)
    assert max(map(abs, found.values())) < 4


def test_reflections_are_true_and_half_are_on_the_wrong_way() -> None:
    """A reflection written in the corpus is the one the two responses deserve."""
    typical = possible = 0
    for sample in texts("reflection"):
        wrong = re.search(r"\nwrong:(.*)\n", sample.prompt)
        assert wrong is not None
        assert sample.response == f"{reflect(sample.drawn.solution, wrong[1])}<eos>"
        told = misled(sample.drawn)
        if told is not None:
            possible += 1
            typical += parse(wrong[1]).answer == told.answer
    assert typical / possible == pytest.approx(0.5, abs=0.05)  # an accident may give the same answer


# --- without misconceptions ------------------------------------------------------------------------------------------


def test_without_misconceptions_every_text_is_right() -> None:
    assert all(map(is_right, texts("plain", misconceptions=False)))
    assert all(map(is_right, texts("hinted", misconceptions=False)))


@pytest.mark.parametrize("seed", [0, 7])
def test_without_misconceptions_the_corpus_is_plain_rendering(seed: int) -> None:
    """Draw for draw: the chance of being misled is asked of nobody."""
    rng = Random(key(seed, "corpus"))
    styles = list(STYLE_SHARES)
    expected = []
    for drawn in islice(stream("train", seed, level_weights=LEVEL_WEIGHTS), 400):
        style = rng.choices(styles, list(STYLE_SHARES.values()))[0]
        response = render(drawn.solution, style, rng, MISTAKES)
        expected.append(Sample(drawn, "plain", prompt_text(drawn.problem.question), response + "<eos>"))
    assert list(islice(corpus(seed, kinds={"plain": 1.0}), 400)) == expected
    assert list(islice(corpus(seed, kinds={"plain": 1.0}, misconceptions=True), 400)) != expected


@pytest.mark.parametrize(("seed", "digest"), [(0, "261d6c7fee4d4d6c"), (1, "a380cf96e0ee50b3")])
def test_the_mixture_is_what_it_was_before_there_were_misconceptions(seed: int, digest: str) -> None:
    """Of 2,000 samples of all kinds, by the code of that time."""
    found = blake2b(digest_size=8)
    for sample in islice(corpus(seed), 2000):
        found.update(f"{sample.kind}\0{sample.prompt}\0{sample.response}\n".encode())
    assert found.hexdigest() == digest


def test_the_problems_are_the_same_either_way() -> None:
    with_, without = texts("plain"), texts("plain", misconceptions=False)
    assert [sample.prompt for sample in with_] == [sample.prompt for sample in without]
