"""One worker of the pool: a process of its own that reads pairs from its input and asks math-verify.

It is started by `pool.py` as `python -m reasonlab.grading.worker MEMORY SECONDS`. math-verify runs on the main thread,
so an alarm can stop it; what an alarm cannot stop, the pool kills.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType
from typing import Any


class _OutOfTime(BaseException):
    """Not an Exception: libraries that swallow those would swallow the alarm."""


def _alarm(_signal: int, _frame: FrameType | None) -> None:
    raise _OutOfTime


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    # It rings again and again: an alarm that fell into a place where exceptions are dropped is not the last.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory(size: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    except (ImportError, ValueError, OSError):  # not every system can; the pool's clock still holds
        pass


def main() -> None:
    memory, seconds = int(sys.argv[1]), float(sys.argv[2])
    # Whatever the libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the parent's to handle
    signal.signal(signal.SIGALRM, _alarm)
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    _limit_memory(memory)

    @lru_cache(maxsize=4096)
    def parse_gold(gold: str) -> list[Any]:
        return list(parse(f"\\boxed{{{gold}}}", parsing_timeout=None))

    parse_gold("\\frac{1}{2}")  # the first call builds the grammar
    verify(parse_gold("\\frac{1}{2}"), parse("\\boxed{0.5}", parsing_timeout=None), timeout_seconds=None)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        pair = json.loads(line)
        reply: dict[str, Any]
        try:
            with _time_limit(seconds):
                gold = parse_gold(pair["gold"])
                answer = parse(f"\\boxed{{{pair['answer']}}}", parsing_timeout=None)
                reply = {"equal": bool(verify(gold, answer, timeout_seconds=None)), "read": bool(gold)}
        except _OutOfTime:
            reply = {"timeout": True}
        except (Exception, MemoryError, RecursionError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(reply), file=answers)


if __name__ == "__main__":
    main()
