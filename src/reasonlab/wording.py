"""How numbers of things are written in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 question`, `2,766 questions`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
