"""math-verify in processes that can be killed.

Each worker is a plain child process with its own main thread, memory limit and clock, spoken to over pipes. To start
one does not import the caller's main module and does not depend on how the caller was started, so the pool works from
threads, asyncio (`asyncio.to_thread`), daemonic processes and Ray workers alike. A worker that overruns is killed and
replaced; one that was killed from outside is replaced and its pair is asked again.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Reply = dict[str, object]
Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerLostError(Exception):
    """The process ended without an answer."""


class WorkerLateError(Exception):
    """No answer in time."""


class Worker:
    """One child process."""

    def __init__(self, memory: int, seconds: float) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "reasonlab.grading.worker", str(memory), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Python integers can be interrupted by an alarm, GMP's cannot.
            env={**os.environ, "PYTHONPATH": path, "SYMPY_GROUND_TYPES": "python", "OMP_NUM_THREADS": "1"},
        )
        self.asked = 0
        self.started = False
        self._buffer = b""

    def ready(self, seconds: float) -> bool:
        """Whether it has imported what it needs."""
        if not self.started:
            with contextlib.suppress(WorkerLateError):
                self.started = bool(self._line(seconds))
        return self.started

    def ask(self, answer: str, gold: str, seconds: float) -> Reply:
        self.asked += 1
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"answer": answer, "gold": gold}).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise WorkerLostError from error
        reply: Reply = json.loads(self._line(seconds))
        return reply

    def _line(self, seconds: float) -> bytes:
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if not select.select([self.process.stdout], [], [], max(left, 0))[0]:
                raise WorkerLateError
            part = os.read(self.process.stdout.fileno(), 65536)
            if not part:
                raise WorkerLostError
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def end(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.wait()


class Pool:
    """Up to `size` workers, started when needed, and always one more warm than is at work if the size allows."""

    def __init__(
        self,
        size: int | None = None,
        seconds: float = 1.4,
        memory: int = 2 << 30,
        recycle: int = 500,
        start_seconds: float = 60.0,
    ) -> None:
        self.size = size or max(2, min(8, (os.cpu_count() or 2) // 2))  # the others have work of their own
        self.seconds = seconds  # the worker's own alarm; the pool kills a little later
        self.memory = memory
        self.recycle = recycle
        self.start_seconds = start_seconds
        self._begin()

    def _begin(self) -> None:
        self._free = threading.Condition()
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._owner = os.getpid()

    def ask(self, answer: str, gold: str, attempts: int = 3) -> Reply:
        """math-verify's word on a pair: {"equal": bool}, {"timeout": true} or {"error": text}."""
        for _ in range(attempts):
            worker = self._take()
            healthy = False
            try:
                if not worker.ready(self.start_seconds):
                    return {"error": "the worker did not start"}
                reply = worker.ask(answer, gold, self.seconds + 0.3)
                healthy = worker.asked < self.recycle
                return reply
            except WorkerLateError:
                return {"timeout": True}
            except (WorkerLostError, json.JSONDecodeError):
                continue
            finally:
                self._give_back(worker, healthy)
        return {"error": f"{attempts} workers were lost"}

    def process_ids(self) -> list[int]:
        with self._free:
            return [worker.process.pid for worker in self._all]

    def close(self) -> None:
        """End every worker. The pool starts new ones if it is asked again."""
        with self._free:
            workers, self._all, self._idle = self._all, set(), []
            if os.getpid() == self._owner:
                for worker in workers:
                    worker.end()
            self._free.notify_all()

    def _take(self) -> Worker:
        if os.getpid() != self._owner:  # after a fork the pipes are the parent's
            self._begin()
        with self._free:
            while True:
                if self._idle:
                    warm = next((w for w in self._idle if _is_ready(w)), self._idle[0])
                    self._idle.remove(warm)
                    return warm
                if len(self._all) < self.size:
                    worker = Worker(self.memory, self.seconds)
                    self._all.add(worker)
                    return worker
                self._free.wait()

    def _give_back(self, worker: Worker, healthy: bool) -> None:
        with self._free:
            known = worker in self._all
            if known and healthy:
                self._idle.append(worker)
            else:
                self._all.discard(worker)
                worker.end()
            # A spare warms up while others work, so that a kill costs nobody the time of a start.
            if known and len(self._all) < self.size and not (healthy and len(self._idle) > 1):
                spare = Worker(self.memory, self.seconds)
                self._all.add(spare)
                self._idle.append(spare)
            self._free.notify()


def _is_ready(worker: Worker) -> bool:
    try:
        return worker.ready(0)
    except WorkerLostError:
        return False


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """work(item) for every item, in as many threads as there are workers of the shared pool.

    A thread takes the next item when it is done with one. Most grades take microseconds, less than a future of each.
    """
    left = deque(enumerate(items))
    found: dict[int, Result] = {}

    def share() -> None:
        while True:
            try:
                place, item = left.popleft()
            except IndexError:  # none is left
                return
            found[place] = work(item)

    with ThreadPoolExecutor(shared_pool().size) as threads:
        for done in [threads.submit(share) for _ in range(min(shared_pool().size, len(items)))]:
            done.result()
    return [found[place] for place in range(len(items))]


_shared: Pool | None = None
_lock = threading.Lock()


def shared_pool() -> Pool:
    """The process's own pool. It starts no process before it is asked something, and ends with the process."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = Pool()
            atexit.register(_shared.close)
        return _shared


def _forget_after_fork() -> None:
    """A forked child must not speak through its parent's pipes."""
    global _shared, _lock
    _shared = None
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
