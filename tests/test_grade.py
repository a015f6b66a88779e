"""Grades: where the answer stands in a response, and who is to blame when it cannot be judged."""

from __future__ import annotations

import pytest

from reasonlab.grading.grade import extract_answer, grade
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import draw


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer:85<eos>", "85"),
        ("Answer: 85 ", "85"),
        ("<think>37+48=85</think>Answer:85<eos>", "85"),
        ("37+48=85</think>Answer:85<eos>", "85"),  # the prompt opened the thinking part
        ("Answer:1 Answer:2", "2"),
        ("<think>Answer:1</think>Answer:2", "2"),
        ("<think>a</think>Answer:1<think>b</think>Answer:2", "2"),
        ("Answer:<eos>", ""),
        ("<think>Answer:85", None),
        ("<think>Answer:85</think>", None),
        ("85<eos>", None),
        ("", None),
    ],
)
def test_the_answer_is_what_follows_the_last_marker_after_thinking(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("index", range(5))
def test_the_gold_answer_is_correct_and_another_is_wrong(index: int) -> None:
    problem = draw("sum", 2, "train", index).problem
    right = grade(problem, f"<think>...</think>Answer:{problem.answer}<eos>")
    assert (right.verdict, right.extracted, right.rule) == ("correct", problem.answer, "exact sum")
    assert grade(problem, f"Answer:{int(problem.answer) + 1}").verdict == "wrong"
    assert grade(problem, "Answer:no number").verdict == "wrong"


def test_no_answer_is_a_wrong_answer() -> None:
    problem = draw("sum", 2, "train", 0).problem
    silent = grade(problem, "<think>I wonder")
    assert (silent.verdict, silent.extracted, silent.rule) == ("wrong", None, "no answer")


def test_a_verifier_that_fails_is_an_error_and_not_a_wrong_answer() -> None:
    failed = grade(Problem("x", "?", "1", "no such family"), "Answer:1")
    assert failed.verdict == "error"
    assert "no such family" in failed.rule
