"""How a response is cut into steps: spans of characters that follow one another and cover the whole response.

A separator belongs to the step it ends, so the spans put together are the response again, and where a step ends
depends on nothing that comes after it but the separator itself. Whatever the rule, `</think>` ends a step: a thought
and the answer after it never share one.

    tiny        a semicolon: 12*7=84; 84+3=87</think> Answer:87 are three steps
    blank_line  one or more blank lines (long traces of real models)
    newline     one or more line ends
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from reasonlab.errors import UserError
from reasonlab.judges.types import Candidate

Rule = Literal["tiny", "blank_line", "newline"]
RULES: tuple[Rule, ...] = get_args(Rule)

_BLANK = r"[ \t\r]*\n"  # the rest of a line with nothing more on it
_SEPARATORS: dict[str, re.Pattern[str]] = {
    "tiny": re.compile(r";|</think>"),
    "blank_line": re.compile(rf"</think>(?:{_BLANK})*|\n(?:{_BLANK})+"),
    "newline": re.compile(rf"</think>(?:{_BLANK})*|\n(?:{_BLANK})*"),
}
_ENDS: dict[str, str] = {"tiny": "", "blank_line": "\n\n", "newline": "\n"}  # what a step ends with, as a rule


class Span(NamedTuple):
    """From `start` up to, not including, `end`."""

    start: int
    end: int


def cut(response: str, rule: Rule) -> list[Span]:
    """The steps of a response. Blanks before the first step belong to it; an empty response has no step."""
    if rule not in _SEPARATORS:
        raise UserError(f"there is no rule {rule!r} for steps", f"The rules are {', '.join(RULES)}")
    ends = [match.end() for match in _SEPARATORS[rule].finditer(response)]
    spans: list[Span] = []
    start = 0
    for end in [*ends, len(response)]:
        if response[start:end].strip():
            spans.append(Span(start, end))
            start = end
    if spans and start < len(response):  # blanks at the end
        spans[-1] = Span(spans[-1].start, len(response))
    return spans


def spans_of(candidate: Candidate, rule: Rule) -> list[Span]:
    """The steps that come with the candidate, or else those of the rule."""
    if not candidate.step_ends:
        return cut(candidate.response, rule)
    return [Span(a, b) for a, b in zip((0, *candidate.step_ends), candidate.step_ends, strict=False)]


def steps_of(candidate: Candidate, rule: Rule) -> list[str]:
    """The text of each step, its separator included."""
    return [candidate.response[span.start : span.end] for span in spans_of(candidate, rule)]


def ended(step: str, rule: Rule) -> str:
    """The last step of a response with the separator that others end with. The tiny world's last step has none."""
    end = _ENDS[rule]
    return step.rstrip() + end if end else step
