"""The four behaviours: found where a response shows them, not where it sounds like it, and who demonstrates them."""

from __future__ import annotations

import time
from random import Random

import numpy as np
import pytest

from reasonlab.grading.grade import Grade
from reasonlab.methods.behaviours import (
    BEHAVIOURS,
    EVALUATION,
    EXPLORATION,
    PLANNING,
    REFLECTION,
    behaviours,
    warmup_demonstrations,
)
from reasonlab.methods.group import Group
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.families.steps import STYLES, render
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import FAMILY_NAMES, draw
from reasonlab.rollout.types import Finish, Rollout

SHOWN = {
    PLANNING: [
        "First, I'll find the slope of the line, and then I will use a point to get the intercept.",
        "<think>First let me list the divisors. Then I'll add the odd ones.",
        "We should first count the boys and then choose a captain for each team.",
        "My plan is to write both numbers in base 7 and compare digits.",
        "Here's a plan. Rewrite everything in terms of sines.",
        "Plan: factor, cancel, substitute.",
        "Let me break the problem down into three parts.",
    ],
    EVALUATION: [
        "So x = 4. Let me check this: 3*4 + 2 = 14, good.",
        "I should double-check the product before going on.",
        "We can verify that 7 * 13 = 91.",
        "Let's quickly check my arithmetic.",
        "Checking: 18 + 24 = 42.",
        "To verify, put 5 for n on both sides.",
        "That gives 3.5 children. Does that make sense?",
        "Both sides are 12, so it checks out.",
        "Sanity check: the area is positive.",
    ],
    REFLECTION: [
        "Wait, the ticket price was given per child.",
        "The sum is 17.\nHmm, wait. I counted the corner twice.",
        "So there are 12 ways. But wait — order matters here.",
        "Actually, the second train starts an hour later.",
        "I made a sign error in the second line.",
        "That gives a negative length, so that can't be right.",
        "This is wrong, because 9 is not prime.",
        "Let me redo the long division.",
        "I forgot to carry the one.",
        "On second thought, the order does not matter.",
    ],
    EXPLORATION: [
        "Alternatively, we could count the complement.",
        "Another way to count them is by the largest element.",
        "A different approach would be to use coordinates.",
        "Let's try n = 3 and see what happens.",
        "What if we look at everything modulo 4?",
        "Let me consider a different case.",
        "Instead, I can use symmetry.",
    ],
}

# What a story, a plain solution or an order to the reader may say without any of the four.
NOT_SHOWN = [
    "",
    "3 + 4 = 7, and 7 * 2 = 14. The answer is 14.",
    "First, 3 + 4 = 7. Then 7 * 2 = 14.",
    "The first bus leaves at noon, then the next one at one.",
    "First we will have 3 * 4 = 12 rows, then 12 * 5 = 60 seats.",
    "The phone plan costs 30 dollars a month.",
    "If the first root is 2, then we can find the second one.",
    "She wrote a check for 50 dollars and cashed it at the bank.",
    "We need to check whether 91 is prime.",
    "The guard will check the tickets of 40 people.",
    "Substituting this back into the first equation, y = 4.",
    "They wait, and the bus comes after 5 minutes.",
    "Wait 10 minutes for the paint to dry.",
    "Tom actually has 5 more marbles than Ann.",
    "Consider a triangle that is not right.",
    "How many of the statements are incorrect?",
    "There is another way to school that is 2 km long.",
    "Each card can alternatively be placed face down.",
    "Let's try to solve the equation.",
    "The coach will try another player.",
]


@pytest.mark.parametrize(("behaviour", "text"), [(name, text) for name, texts in SHOWN.items() for text in texts])
def test_a_sentence_that_shows_a_behaviour_shows_it_and_no_other(behaviour: str, text: str) -> None:
    assert behaviours(text) == {behaviour}
    assert behaviours(text.replace("'", "’")) == {behaviour}


@pytest.mark.parametrize("text", NOT_SHOWN)
def test_sentences_that_only_sound_like_it(text: str) -> None:
    assert behaviours(text) == frozenset()


def test_one_response_may_show_all_four() -> None:
    text = "\n".join(texts[0] for texts in SHOWN.values())
    assert behaviours(text) == set(BEHAVIOURS)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_tiny_language_shows_checks_and_repairs_and_nothing_else(family: str) -> None:
    repaired = 0
    for index in range(8):
        solution = draw(family, 3, "train", index).solution
        for style in STYLES:
            text = render(solution, style, Random(index)) + "<eos>"
            assert behaviours(text) == ({EVALUATION} if style == "checked" else set())
        text = render(solution, "checked", Random(index), mistakes=0.9) + "<eos>"
        assert behaviours(text) == ({EVALUATION, REFLECTION} if " no;" in text else {EVALUATION})
        repaired += " no;" in text
    assert repaired


def test_a_failed_check_without_a_second_try_is_no_reflection() -> None:
    assert behaviours("<think>12+5=18 check 18-5=13 no;18*2=36 check 36/2=18 ok</think>Answer:36") == {EVALUATION}
    assert behaviours("<think>12+5=18 check 18-5=13 no</think>Answer:18") == {EVALUATION}
    assert behaviours("<think>12+5=18 check 18-5=13 no;12+5=17</think>Answer:17") == {EVALUATION, REFLECTION}


def test_long_responses_take_time_in_proportion() -> None:
    for piece in ("First we will go on ", "wait " * 20 + "\n", "x = 1. " * 10, " " * 50, "let me ", "a" * 60):
        text = piece * (100_000 // len(piece))
        started = time.perf_counter()
        behaviours(text)
        assert time.perf_counter() - started < 3.0, piece


# --- demonstrations ------------------------------------------------------------------------------------------------

TOKENIZER = TinyTokenizer.load()
PROBLEM = Problem("sum/2/train/000000", "12+5=?", "17", "sum", 2)
ANSWER = "Answer:17<eos>"
CHECKED = "<think>12+5=17 check 17-5=12 ok</think>Answer:17<eos>"
REPAIRED = "<think>12+5=18 check 18-5=13 no;12+5=17 check 17-5=12 ok</think>Answer:17<eos>"
TWICE = "<think>12+5=17 check 17-5=12 ok;12+5=17 check 17-5=12 ok</think>Answer:17<eos>"


def group(*responses: tuple[str, str, Finish], problem: Problem = PROBLEM) -> Group:
    """A group of (text, verdict, finish)."""
    rollouts = []
    for text, _, finish in responses:
        ids = TOKENIZER.encode(text)
        rollouts.append(Rollout([1], ids, np.zeros(len(ids), np.float32), finish))
    grades = [Grade("correct" if verdict == "correct" else "wrong", None, "") for _, verdict, _ in responses]
    return Group(problem, rollouts, grades)


def chosen(*groups: Group, per_problem: int = 1) -> list[tuple[str, str]]:
    found = warmup_demonstrations(groups, TOKENIZER.decode, per_problem)
    return [(problem.id, TOKENIZER.decode(rollout.ids)) for problem, rollout in found]


def test_the_rollout_with_the_most_behaviours_demonstrates() -> None:
    sampled = group((ANSWER, "correct", "stop"), (TWICE, "correct", "stop"), (REPAIRED, "correct", "stop"))
    assert chosen(sampled) == [(PROBLEM.id, REPAIRED)]


def test_wrong_and_unfinished_rollouts_demonstrate_nothing() -> None:
    sampled = group(
        (REPAIRED, "wrong", "stop"), (REPAIRED, "correct", "length"), (TWICE, "correct", "repetition"),
        (CHECKED, "correct", "stop"),
    )  # fmt: skip
    assert chosen(sampled) == [(PROBLEM.id, CHECKED)]


def test_a_bare_answer_is_no_demonstration() -> None:
    assert chosen(group((ANSWER, "correct", "stop"))) == []


def test_the_longest_among_equals_and_every_response_once() -> None:
    first = group((CHECKED, "correct", "stop"), (TWICE, "correct", "stop"), (CHECKED, "correct", "stop"))
    later = group((TWICE, "correct", "stop"), (REPAIRED, "correct", "stop"))
    assert chosen(first) == [(PROBLEM.id, TWICE)]
    assert chosen(first, later, per_problem=9) == [(PROBLEM.id, text) for text in (REPAIRED, TWICE, CHECKED)]
    assert chosen(first, later, per_problem=2) == [(PROBLEM.id, text) for text in (REPAIRED, TWICE)]


def test_problems_keep_their_order() -> None:
    other = Problem("sum/2/train/000001", "12+5=?", "17", "sum", 2)
    none = Problem("sum/2/train/000002", "12+5=?", "17", "sum", 2)
    sampled = [group((CHECKED, "correct", "stop"), problem=problem) for problem in (other, PROBLEM, other)]
    sampled.insert(1, group((ANSWER, "correct", "stop"), problem=none))
    assert [name for name, _ in chosen(*sampled)] == [other.id, PROBLEM.id]
