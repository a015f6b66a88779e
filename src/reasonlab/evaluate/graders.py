"""Which grader reads a benchmark's answers, and the fingerprint of the code that does it.

Two questions decide: how the answer is marked (`extraction`: a policy of the verifier, or `tiny` for the tiny models'
own `Answer:`), and who compares it (`verifier`: a family of the tiny world with its own rule, or mathematics).
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import Grader
from reasonlab.grading.extract import Policy, extract
from reasonlab.grading.grade import Grade, extract_answer, grade
from reasonlab.grading.verifier import grade_answer, grade_text
from reasonlab.problems.curation import of_tiny_world
from reasonlab.problems.problem import Problem
from reasonlab.problems.tiny_world import verify

TINY = "tiny"
FAMILY, MATHEMATICS = "family", "mathematics"


def policy_named(name: str) -> str:
    """A policy by the registry's name or its own."""
    if name == TINY:
        return TINY
    try:
        return Policy(name).value
    except ValueError:
        raise UserError(f"there is no extraction {name!r}", f"Choose one of {', '.join(Policy)}") from None


def grader_for(extraction: str, verifier: str) -> Grader:
    if extraction == TINY:
        return grade if verifier == FAMILY else _tiny_answer
    policy = Policy(extraction)

    def by_family(problem: Problem, text: str) -> Grade:
        found = extract(text, policy)
        if found is None:
            return Grade("wrong", None, "no answer")
        try:
            right = verify(problem, found.answer)
        except Exception as error:  # a verifier's own failure must be visible, not a wrong answer
            return Grade("error", found.answer, f"{type(error).__name__}: {error}")
        return Grade("correct" if right else "wrong", found.answer, f"exact {problem.family}")

    def by_mathematics(problem: Problem, text: str) -> Grade:
        return grade_text(text, problem.answer, policy, question=problem.question)

    return by_family if verifier == FAMILY else by_mathematics


def _tiny_answer(problem: Problem, text: str) -> Grade:
    """A tiny model's answer to a question from elsewhere."""
    answer = extract_answer(text)
    if answer is None:
        return Grade("wrong", None, "no answer")
    return grade_answer(answer, problem.answer, question=problem.question)


def grade_response(problem: Problem, text: str) -> Grade:
    """A tiny model's response in training: by the family's rule, or by mathematics for a problem from elsewhere."""
    return grade(problem, text) if of_tiny_world(problem) else _tiny_answer(problem, text)


@cache
def grader_version() -> str:
    """Changes with every line of code that can change a verdict."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for file in sorted([*package.glob("grading/*.py"), *package.glob("problems/families/*.py"), Path(__file__)]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{digest.hexdigest()[:16]}, math-verify {metadata.version('math-verify')}"
