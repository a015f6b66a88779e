"""The pool: verdicts in time whatever comes, from wherever it is called, and workers that can be killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from reasonlab.grading.pool import Pool, side_by_side
from reasonlab.grading.verifier import grade_answer, grade_text, grade_text_async

HARD = (r"\lim_{x\to 0}\frac{\sin x}{x}", "1")  # only math-verify can say


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(size=2)
    assert made.ask("1/2", "0.5") == {"equal": True, "read": True}
    yield made
    made.close()


def test_math_verify_decides_what_the_exact_rules_cannot(pool: Pool) -> None:
    right = grade_answer(*HARD, pool=pool)
    assert (right.verdict, right.rule) == ("correct", "math-verify")
    assert grade_answer(r"\lim_{x\to 0}\frac{\sin x}{x}", "2", pool=pool).verdict == "wrong"
    assert right.seconds > 0


def test_a_worker_killed_from_outside_is_replaced_and_its_row_graded_again(pool: Pool) -> None:
    for _ in range(2):
        for worker in pool.process_ids():
            os.kill(worker, signal.SIGKILL)
        assert grade_answer(*HARD, pool=pool).verdict == "correct"


def test_a_worker_killed_at_work_costs_nothing_but_time(pool: Pool) -> None:
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(pool.ask, r"\sum_{k=1}^{1000000000} k^{k}", "7")
        time.sleep(0.3)
        for worker in pool.process_ids():
            os.kill(worker, signal.SIGKILL)
        assert slow.result() == {"timeout": True}  # asked again, and stopped by the clock
    assert grade_answer(*HARD, pool=pool).verdict == "correct"


def test_what_takes_too_long_is_a_timeout_and_not_wrong(pool: Pool) -> None:
    grade = grade_answer(r"\sum_{k=1}^{1000000000} k^{k}", "7", pool=pool)
    assert grade.verdict == "timeout"
    assert grade.seconds < 2
    assert grade_answer(*HARD, pool=pool).verdict == "correct"


def test_a_worker_that_ignores_its_alarm_is_killed() -> None:
    short = Pool(size=1, seconds=1000.0)
    short.ask("1", "1")
    short.seconds = 0.2  # the pool's clock; the worker's own stays at 1000
    before = short.process_ids()
    assert short.ask(r"\sum_{k=1}^{1000000000} k^{k}", "7") == {"timeout": True}
    short.seconds = 10.0
    assert short.ask("1/2", "0.5")["equal"] is True
    assert not set(before) & set(short.process_ids())
    short.close()


def test_memory_is_limited() -> None:
    resource = pytest.importorskip("resource")
    small = Pool(size=1, memory=1 << 30)
    assert small.ask("1/2", "0.5")["equal"] is True
    (worker,) = small.process_ids()
    assert resource.prlimit(worker, resource.RLIMIT_AS) == (1 << 30, 1 << 30)
    small.close()


def test_workers_are_recycled() -> None:
    fresh = Pool(size=1, recycle=2)
    seen = set()
    for _ in range(4):
        assert fresh.ask("1/2", "0.5")["equal"] is True
        seen.update(fresh.process_ids())
    assert len(seen) >= 2
    assert len(fresh.process_ids()) == 1
    fresh.close()


def test_threads_share_the_pool(pool: Pool) -> None:
    with ThreadPoolExecutor(6) as threads:
        verdicts = list(threads.map(lambda _: grade_answer(*HARD, pool=pool).verdict, range(18)))
    assert verdicts == ["correct"] * 18


def test_asyncio() -> None:
    async def several() -> list[str]:
        grades = await asyncio.gather(*(grade_text_async(rf"\boxed{{{HARD[0]}}}", HARD[1]) for _ in range(4)))
        return [grade.verdict for grade in grades]

    assert asyncio.run(several()) == ["correct"] * 4


def _verdict(pair: tuple[str, str]) -> str:
    return grade_answer(*pair).verdict


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_daemonic_processes_grade_with_a_pool_of_their_own(method: str) -> None:
    grade_answer(*HARD)  # the parent's pool is up; a forked child must not use it
    with multiprocessing.get_context(method).Pool(1) as processes:
        assert processes.map(_verdict, [HARD, ("1", "2")]) == ["correct", "wrong"]
    assert grade_answer(*HARD).verdict == "correct"


def test_items_that_are_worked_on_side_by_side_come_back_in_order() -> None:
    together = threading.Barrier(2, timeout=10)

    def square(x: int) -> int:
        if x in (0, 1):
            together.wait()  # two at a time, or this breaks
        return x * x

    assert side_by_side(square, range(500)) == [x * x for x in range(500)]
    assert side_by_side(square, []) == []
    assert side_by_side(square, [3]) == [9]


def test_what_goes_wrong_side_by_side_is_not_taken_for_the_end() -> None:
    with pytest.raises(IndexError, match="tuple index"):
        side_by_side(lambda x: (0,)[x], [0, 0, 1, 0])


ADVERSARIAL = {
    "tower": "9^{9^{9^{9}}}",
    "bare tower": "9^9^9^9",
    "tower of names": "x^{x^{x^{99999999}}}",
    "factorial": "1000000000!",
    "factorials": "((((9!)!)!)!)!",
    "binomial": r"\binom{1000000000}{500000000}",
    "product": r"\prod_{k=1}^{1000000} k",
    "expansion": "(x+y+z+1)^{60}",
    "nested": "(" * 1000 + "7" + ")" * 1000,
    "roots": r"\sqrt{" * 200 + "7" + "}" * 200,
    "long set": r"\{" + ",".join(map(str, range(5000))) + r"\}",
    "digits": "7" * 1_000_000,
    "decimals": "0." + "3" * 100_000,
    "letters": "x" * 1_000_000,
    "braces": "{" * 1_000_000,
    "boxes": r"\boxed{" * 100_000,
    "unclosed": r"\boxed{7",
    "spaces": "1 " * 50_000,
    "commas": "1," * 50_000,
    "minus signs": "-" * 1999,
    "bars": "|" * 1999,
    "large sine": r"\sin(10^{100000})",
    "null": "7\x00\ud800",
    "code": "__import__('pathlib').Path('owned').touch()",
    "more code": "().__class__.__bases__[0].__subclasses__()",
    "file": r"\input{/etc/passwd}",
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_every_verdict_comes_within_two_seconds(
    name: str, pool: Pool, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    text = ADVERSARIAL[name]
    for gold in ("7", r"\sqrt{7}+x"):
        for response, kind in ((text, "answer"), (rf"so \boxed{{{text}}}", "text"), (text, "text")):
            grade = grade_text(response, gold, kind=kind, pool=pool)  # type: ignore[arg-type]
            assert grade.verdict in ("wrong", "timeout") or (name in ("nested", "boxes", "unclosed", "roots"))
            assert grade.seconds < 2
    assert not os.listdir(".")  # nothing ran
    assert grade_answer("1/2", "0.5", pool=pool).verdict == "correct"
