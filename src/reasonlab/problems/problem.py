"""What a problem is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with a gold answer; `family` is the generator or benchmark it comes from."""

    id: str
    question: str
    answer: str
    family: str
    level: int = 0
