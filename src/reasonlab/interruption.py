"""Ctrl-C during training: the first one lets the step finish and saves, a second one stops at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def asks_to_stop(request: Callable[[], None]) -> Iterator[None]:
    """Call `request` at the first Ctrl-C; the second is a KeyboardInterrupt."""
    asked = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        request()

    try:
        previous = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread: whoever owns it handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
