"""Where the answer stands in a response. A policy says which marks count; only what follows `</think>` is read.

No policy but `free` guesses: a response that marks no answer has none. Guessing the last number rewards a truncated
trace for an intermediate result. All scans are linear, or bounded in the number and the length of what they try.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from reasonlab.grading.normalise import normalise
from reasonlab.grading.values import Opaque, Words, readings

LONGEST_BOX = 10_000  # characters looked at for the closing brace
MOST_BOXES = 64
TAIL = 20_000  # characters at the end in which marks other than boxes are looked for


class Policy(StrEnum):
    """Which marks make an answer."""

    BOXED = "boxed"  # \boxed{…} or \fbox{…}, the last that closes
    TAG = "tag"  # <answer>…</answer>
    HASH = "hash"  # #### …
    MARKER = "marker"  # Answer: …, the final answer is …
    EXPLICIT = "explicit"  # the first of these four that is there; for rewards
    FREE = "free"  # as explicit, else the last formula or number; never for rewards

    @classmethod
    def _missing_(cls, value: object) -> Policy | None:
        """The benchmark registry's words."""
        return {"answer_line": cls.MARKER, "tiny": cls.MARKER, "choice": cls.EXPLICIT}.get(str(value))


@dataclass(frozen=True, slots=True)
class Extracted:
    answer: str
    mark: str


_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\s*([^\s$\\{}]+)")
_GAP_DRESS = re.compile(r"\\(?:text|mbox|textrm|mathrm)\s*|\\q?quad|\\[,;:! \[\]()]|[{}$*\s]+")
_GAP_NAME = re.compile(r"\\?[A-Za-z]+(?:\s*_\s*\w+)?(?:\s*\(\s*\w\s*\))?\s*=\s*$")  # and y_2 = \boxed{…}
_GAP_ENDS = re.compile(r"(?:[,;&]|(?:^|[^a-z])(?:and|or))$")
_MARKER = re.compile(
    r"(?:answer|result|solution)(?:\s+is)?\s*[:=：]|(?:answer|result|solution)\s+is\b|答案\s*(?:是|为|[:：])",
    re.IGNORECASE,
)
_STRICT_MARKER = re.compile(
    r"answer\s*(?:is\s*)?[:：]|(?:final|correct)\s+answer\s+is\b|answer\s+is\b|答案\s*(?:是|为|[:：])", re.IGNORECASE
)
_FINAL = re.compile(r"final answer is\s*:?\s*", re.IGNORECASE)
_FORMULA = re.compile(
    r"\$\$(.{1,1000}?)\$\$|(?<![\\$])\$([^$]{1,1000}?)(?<!\\)\$(?!\d)|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"[(\[]\s*-?[\d./]{1,30}(?:\s*,\s*-?[\d./]{1,30}){1,8}\s*[)\]]|(?<![\d.:])\d{1,9}:\d{1,9}(?![\d:])"
    r"|(?<![A-Za-z_\d.])-?(?:(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)(?:[.,]\d+)?|\.\d+)"
    r"(?:\s*/\s*\d+(?:\.\d+)?|\s?%|[eE][+-]?\d{1,3}\b)?"
    r"|-?\\[dtc]?frac\s*\{\d+\}\s*\{\d+\}"
)
_LIST_GAP = re.compile(r"\s*(?:,\s*and|,\s*or|,|;|and|or)\s*")
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n|<\||\bI hope\b|(?<=\d),? but\b")
_DRESS = " \t*_:\"'`~>"


def extract(text: str, policy: Policy | str = Policy.EXPLICIT) -> Extracted | None:
    """The answer of a response, or None where it marks none (an unfinished thinking part included)."""
    policy = Policy(policy)
    thought = text.rfind("</think>")
    if thought >= 0:
        text = text[thought + len("</think>") :]
    elif "<think>" in text:
        return None
    if policy is Policy.FREE:
        return _final_phrase(text) or _explicit(text, _MARKER, guess=True) or _guess(text)
    if policy is Policy.EXPLICIT:
        return _explicit(text, _STRICT_MARKER)
    if policy is Policy.BOXED:
        return boxed(text)
    if policy is Policy.TAG:
        return _tag(text)
    return _hash(text) if policy is Policy.HASH else _marker(text, _STRICT_MARKER)


def _explicit(text: str, marker: re.Pattern[str], guess: bool = False) -> Extracted | None:
    return boxed(text) or _tag(text) or _hash(text) or _marker(text, marker, guess)


def boxed(text: str) -> Extracted | None:
    """The last box that closes, joined with the boxes it continues: `\\boxed{1} and \\boxed{2}`."""
    end = len(text)
    found: list[str] = []
    start_of_last = end
    for _ in range(MOST_BOXES):
        start = max(text.rfind(r"\boxed", 0, end), text.rfind(r"\fbox", 0, end))
        if start < 0:
            break
        content, close = _content(text, start)
        if content is not None:
            if found and (close > start_of_last or not _continues(text[close:start_of_last])):
                break
            if content.strip() not in found:
                found.append(content.strip())
            start_of_last = start
        elif found:
            break
        end = start
    return Extracted(", ".join(reversed(found)), "boxed") if found else None


def _content(text: str, start: int) -> tuple[str | None, int]:
    """What is in the box at `start` and where it ends; None where the brace never closes."""
    opening = start + (6 if text.startswith(r"\boxed", start) else 5)
    place = opening
    while place < len(text) and text[place].isspace() and place < opening + 8:
        place += 1
    if not text.startswith("{", place):
        bare = _BARE_BOX.match(text, opening, opening + 200)
        return (bare.group(1).rstrip(".,;"), bare.end()) if bare else (None, opening)
    depth = 0
    for match in _BRACES.finditer(text, place, min(len(text), place + LONGEST_BOX)):
        depth += {"{": 1, "}": -1}.get(match.group(0), 0)
        if depth == 0:
            return text[place + 1 : match.start()], match.end()
    return None, opening


def _continues(gap: str) -> bool:
    """Whether what stands between two boxes makes them one answer."""
    if len(gap) > 80 or re.search(r"[.!?]\s", gap) or "\n\n" in gap:
        return False
    words = _GAP_NAME.sub("", _GAP_DRESS.sub(" ", gap)).strip().lower()
    if not words:
        return "\n" not in gap
    return bool(_GAP_ENDS.search(words)) and len(words.split()) <= 5


def _tag(text: str) -> Extracted | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start < 0:
        return None
    inside = text[start + len("<answer>") : end].strip()
    return boxed(inside) or Extracted(inside, "tag")


def _hash(text: str) -> Extracted | None:
    start = text.rfind("####")
    if start < 0:
        return None
    line = text[start + 4 : start + 4 + LONGEST_BOX].strip().partition("\n")[0]
    return Extracted(line.strip(), "hash") if line.strip() else None


def _marker(text: str, marker: re.Pattern[str], guess: bool = False) -> Extracted | None:
    tail = text[-TAIL:]
    last = None
    for match in marker.finditer(tail):
        last = match
    if last is None:
        return None
    phrase = tail[last.end() :].lstrip(_DRESS + "\n")[:LONGEST_BOX]
    answer = _phrase(phrase, guess)
    return Extracted(answer, "marker") if answer else None


def _phrase(phrase: str, guess: bool = False) -> str:
    """The answer at the head of a phrase: its formula, or the words to the end of the sentence."""
    if formula := _FORMULA.match(phrase):
        return _formulas(phrase, formula)
    stop = _SENTENCE_END.search(phrase)
    words = (phrase[: stop.start()] if stop else phrase).strip(_DRESS)
    if _reads(words):
        return words
    for verb in (" is ", " are ", "="):
        said = words.rpartition(verb)[2].strip(_DRESS)
        if said != words and _reads(said):
            return said
    if guess:
        return _last(words) or words
    formula = _FORMULA.search(words)
    return _formulas(words, formula) if formula else words


def _formulas(text: str, first: re.Match[str]) -> str:
    """A formula, with those it is listed with: `$12$ and $13$`."""
    parts, last = [_with_percent(text, first)], first
    while (gap := _LIST_GAP.match(text, last.end())) and (following := _FORMULA.match(text, gap.end())):
        parts.append(_with_percent(text, following))
        last = following
    return ", ".join(parts)


def _with_percent(text: str, formula: re.Match[str]) -> str:
    inside = next(group for group in formula.groups() if group is not None).strip()
    after = text[formula.end() : formula.end() + 12].lstrip()
    return inside + "%" if after.startswith(("%", r"\%", "percent", "pct")) else inside


def _reads(text: str) -> bool:
    return len(text) < 400 and not isinstance(readings(normalise(text))[0], Words | Opaque)


def _final_phrase(text: str) -> Extracted | None:
    """`The final answer is $…$` after the last box overrides it; the Minerva prompt asks for this form."""
    tail = text[-TAIL:]
    last = None
    for match in _FINAL.finditer(tail):
        last = match
    if last is None or max(tail.rfind(r"\boxed"), tail.rfind(r"\fbox")) > last.start():
        return None
    answer = _phrase(tail[last.end() :].lstrip(_DRESS + '\\"')[:LONGEST_BOX])
    return Extracted(answer, "final answer") if answer and _reads(answer) else None


def _guess(text: str) -> Extracted | None:
    """The whole text if it is nothing but an answer, else its last formula or number."""
    whole = text.strip()
    if not whole or r"\boxed{" in whole:  # a box that never closes: cut off
        return None
    if len(whole) < 400 and (_reads(whole) or not re.search(r"\d|\$", whole)):
        return Extracted(whole, "whole text")
    found = _last(whole[-TAIL:])
    return Extracted(found, "last formula or number") if found else None


def _last(text: str) -> str | None:
    """The last formula or number, whichever ends later."""
    formula = number = None
    for formula in _FORMULA.finditer(text):  # noqa: B007
        pass
    for number in _NUMBER.finditer(text):  # noqa: B007
        pass
    if formula and (number is None or number.end() <= formula.end()):
        return _with_percent(text, formula)
    return number.group(0) if number else None
