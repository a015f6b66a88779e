"""The prompts of Meta-Experience Learning, for the tiny world and for language models.

Those for language models are files in `prompts/`, in our own words, with the structure of the paper: role, what is
shown, what to look at, four sections of output, and the payload with the wrong attempt first. Whatever stands between
braces in an attempt stays as it is: only the names of a template are replaced.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Protocol

from reasonlab.problems import reflections

_RULES = re.compile(r"\[4\][^\n:]*:?\s*(.+)", re.DOTALL)


class MelPrompts(Protocol):
    def retrospective(self, question: str, wrong: str, right: str | None) -> str:
        """I, x, y⁻ and y⁺; without y⁺ for the ablation."""
        ...

    def hinted(self, question: str, experience: str) -> str:
        """x with M as a hint."""
        ...

    def heuristic(self, experience: str) -> str:
        """The part H of M; empty if it has none."""
        ...


class TinyWorldPrompts:
    """The compact format that the base models have seen in pre-training (`problems/reflections.py`)."""

    def retrospective(self, question: str, wrong: str, right: str | None) -> str:
        return reflections.retrospective_prompt(question, wrong, right)

    def hinted(self, question: str, experience: str) -> str:
        return reflections.hinted_prompt(question, experience)

    def heuristic(self, experience: str) -> str:
        return reflections.heuristic_only(experience) or ""


class LanguageModelPrompts:
    """What a language model is asked; its chat template goes around it."""

    def retrospective(self, question: str, wrong: str, right: str | None) -> str:
        if right is None:
            return _filled("mel_reflect_wrong_only.txt", question=question, wrong=wrong)
        return _filled("mel_reflect.txt", question=question, wrong=wrong, right=right)

    def hinted(self, question: str, experience: str) -> str:
        return _filled("mel_replay.txt", question=question, experience=experience)

    def heuristic(self, experience: str) -> str:
        found = _RULES.search(experience)
        return found[1].strip() if found else ""


@cache
def _template(name: str) -> str:
    return (files("reasonlab.methods") / "prompts" / name).read_text(encoding="utf-8").rstrip("\n")


def _filled(name: str, **values: str) -> str:
    """All names replaced in one pass, so that a name inside a value is left alone."""
    return re.sub(r"\{(" + "|".join(values) + r")\}", lambda match: values[match[1]], _template(name))
