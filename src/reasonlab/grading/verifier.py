"""Grading of free answers: extract, compare exactly, and only then ask math-verify in a process that can be killed."""

from __future__ import annotations

import asyncio
import re
import time
from functools import lru_cache
from typing import Any, Literal

from reasonlab.grading import finished
from reasonlab.grading.equivalence import AS_WRITTEN, decide
from reasonlab.grading.extract import Policy, boxed, extract
from reasonlab.grading.grade import Grade, Verdict
from reasonlab.grading.normalise import LONGEST, normalise
from reasonlab.grading.pool import Pool, shared_pool

Kind = Literal["text", "answer"]

_TOWER = re.compile(r"\d\s*\^\s*[{(]*\s*\d+\s*\^\s*[{(]*\s*\d")
_LARGE_FACTORIAL = re.compile(r"(?:\d{5,}|\))\s*!|binom\s*\{\d{5,}")
_LONG_NUMBER = re.compile(r"\d{400}")
_DEEP = 40
_ANNOUNCED = re.compile(r"^\s*(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is\b|:)\s*:?\s*)", re.IGNORECASE)
LONGEST_ASKED = 600  # characters of an answer for math-verify, unless the gold is long as well


def grade_text(
    text: str,
    gold: str,
    policy: Policy | str = Policy.EXPLICIT,
    kind: Kind = "text",
    tolerance: float = 0.0,
    pool: Pool | None = None,
    question: str | None = None,
) -> Grade:
    """Grade a model's response, or with `kind="answer"` a bare answer. `tolerance` is relative; 0 compares exactly.

    With the question an answer must also be worked out (`finished.py`); without it, being worth the gold is enough.
    """
    started = time.perf_counter()
    quick = grade_quickly(text, gold, policy, kind, tolerance, question)
    if isinstance(quick, Grade):
        return _timed(quick, started)
    answer, wanted = quick
    return _timed(_finished(_ask(answer, wanted, pool or shared_pool()), wanted, question), started)


def grade_answer(
    answer: str, gold: str, tolerance: float = 0.0, pool: Pool | None = None, question: str | None = None
) -> Grade:
    """Grade a bare answer, perhaps in a box."""
    return grade_text(answer, gold, kind="answer", tolerance=tolerance, pool=pool, question=question)


async def grade_text_async(text: str, gold: str, *arguments: Any, **options: Any) -> Grade:
    """`grade_text`, with all its arguments, without blocking the event loop."""
    return await asyncio.to_thread(grade_text, text, gold, *arguments, **options)


def grade_quickly(
    text: str,
    gold: str,
    policy: Policy | str = Policy.EXPLICIT,
    kind: Kind = "text",
    tolerance: float = 0.0,
    question: str | None = None,
) -> Grade | tuple[str, str]:
    """The grade where exact rules settle it, else the pair to ask math-verify about. Starts no process."""
    wanted = gold_answer(gold)
    if not wanted:
        return Grade("error", None, "empty gold")
    if kind == "answer":
        answer: str | None = bare_answer(text)
    else:
        found = extract(text, policy)
        answer = found.answer if found else None
    if answer is None:
        return Grade("wrong", None, "no answer")
    if len(answer) > LONGEST or len(wanted) > LONGEST:
        same = answer == wanted
        return Grade("correct" if same else "wrong", answer, "same string" if same else "beyond the size limits")
    try:
        equal, rule = decide(answer, wanted, tolerance)
        if equal is not None:
            return _finished(Grade("correct" if equal else "wrong", answer, rule), wanted, question)
        if question is not None and finished.leaves_work(normalise(answer), normalise(wanted)):
            return Grade("wrong", answer, finished.RULE)
        if question is not None and finished.unreadable(answer, wanted):
            return Grade("wrong", answer, "unreadable")
    except RecursionError:
        return Grade("wrong", answer, "beyond the size limits")
    except Exception as error:  # our own failure must be visible, not a wrong answer
        return Grade("error", answer, f"{type(error).__name__}: {error}"[:200])
    if _excessive(answer) or len(answer) > max(LONGEST_ASKED, 2 * len(wanted)):
        return Grade("wrong", answer, "beyond the size limits")
    return answer, wanted


def _finished(grade: Grade, gold: str, question: str | None) -> Grade:
    """The grade, unless the answer is only worth the gold answer and still has to be computed."""
    if question is None or grade.verdict != "correct" or grade.rule in AS_WRITTEN or grade.extracted is None:
        return grade
    try:
        done = finished.worked_out(grade.extracted, gold, question)
    except RecursionError:
        return Grade("wrong", grade.extracted, "beyond the size limits")
    except Exception as error:  # a failure of ours is no wrong answer, and stops nobody's training
        return Grade("error", grade.extracted, f"{type(error).__name__}: {error}"[:200])
    return grade if done else Grade("wrong", grade.extracted, finished.RULE)


def bare_answer(text: str) -> str:
    """A bare answer: what is in its box, or the whole without `Answer:` before it."""
    if "\\boxed" in text or "\\fbox" in text:
        found = boxed(text)
        return found.answer if found else ""  # a box that never closes holds no answer
    announced = _ANNOUNCED.match(text)
    return text[announced.end() if announced else 0 :].strip()


@lru_cache(maxsize=16384)
def gold_answer(gold: str) -> str:
    """The gold answer: what its boxes hold, what follows `####`, or the whole."""
    if "\\boxed" in gold and (found := boxed(gold)):
        return found.answer
    if "####" in gold:
        return gold.rpartition("####")[2].strip()
    return gold.strip()


def _ask(answer: str, gold: str, pool: Pool) -> Grade:
    try:
        reply = pool.ask(normalise(answer), normalise(gold))
    except OSError as error:  # no process could be started
        return Grade("error", answer, f"math-verify: {error}"[:200])
    if "equal" in reply:
        verdict: Verdict = "correct" if reply["equal"] else "wrong"
        return Grade(verdict, answer, "math-verify")
    if "timeout" in reply:
        return Grade("timeout", answer, "math-verify took too long")
    return Grade("error", answer, f"math-verify: {reply.get('error')}")


def _excessive(answer: str) -> bool:
    """What only a machine in a loop writes, and what would keep one busy."""
    nesting = max(answer.count("("), answer.count("{"), answer.count("["))
    return bool(
        nesting > _DEEP or _TOWER.search(answer) or _LARGE_FACTORIAL.search(answer) or _LONG_NUMBER.search(answer)
    )


def _timed(grade: Grade, started: float) -> Grade:
    return Grade(grade.verdict, grade.extracted, grade.rule, time.perf_counter() - started)
