"""Grades: what the verifier says of a response, and the rule it used.

`error` and `timeout` say that the verifier failed, not the model; they are counted and shown, never trained as wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import verify

Verdict = Literal["correct", "wrong", "error", "timeout"]


@dataclass(frozen=True, slots=True)
class Grade:
    verdict: Verdict
    extracted: str | None
    rule: str
    seconds: float = 0.0


def extract_answer(text: str) -> str | None:
    """What follows the last `Answer:` outside the thinking part; None where there is no answer."""
    if "<think>" in text and "</think>" not in text:
        return None
    _, marker, answer = text.rpartition("</think>")[2].rpartition("Answer:")
    return answer.replace("<eos>", "").strip() if marker else None


def grade(problem: Problem, text: str) -> Grade:
    """Grade a response to a problem of the tiny world by its family's exact verifier."""
    extracted = extract_answer(text)
    if extracted is None:
        return Grade("wrong", None, "no answer")
    try:
        correct = verify(problem, extracted)
    except Exception as error:  # a verifier's own failure must be visible, not a wrong answer
        return Grade("error", extracted, f"{type(error).__name__}: {error}")
    return Grade("correct" if correct else "wrong", extracted, f"exact {problem.family}")
