r"""Questions that a verifier of final answers should not reward: a right answer there says little about the reasoning.

Kimi k1.5 (§2.1) takes multiple choice, true/false and proof questions out of the training prompts. A row that says what
it is (`choices`, `question_type`, …) is believed; else the text decides. Where form and gold answer leave a doubt, the
question stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MULTIPLE_CHOICE, TRUE_FALSE, PROOF = "multiple choice", "true/false", "proof"
NO_GOLD, UNREADABLE_GOLD = "no gold", "unreadable gold"

MOST_WORDS = 8  # words of a gold that may still be an answer: "all integers greater than two that are odd"
LONGEST_GOLD = 400  # characters

_KIND_COLUMNS = ("kind", "question_type", "problem_type", "answer_type", "format", "type")
_KINDS = {
    **dict.fromkeys(["multiple choice", "mcq", "mc", "choice", "single choice", "multi choice"], MULTIPLE_CHOICE),
    **dict.fromkeys(["true false", "truefalse", "boolean", "bool", "yes no", "tf"], TRUE_FALSE),
    **dict.fromkeys(["proof", "proof based", "theorem proving"], PROOF),
}
_CHOICE_COLUMNS = ("choices", "options")

_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_FORMULA = re.compile(r"\$(.+?)\$|\\\((.+?)\\\)", re.DOTALL)
_LETTER_GOLD = re.compile(r"\(?([A-Z])\)?\.?|\(([a-j])\)")
_SEVERAL_LETTERS = re.compile(r"[A-J]{2,6}|\(?[A-J]\)?(?:,\(?[A-J]\)?)+")
# How options are labelled; one style at a time, and the letters must come in their order.
_LABELS = (
    re.compile(r"(?<![^A-Za-z][A-Za-z])\(\s*([A-J])\s*\)"),  # (A), also inside \textbf{…} and **…**, but not f(A)
    re.compile(r"(?<![\w$\\])([A-J])\s*(?:[).:](?=[\s$\\\d(]|[^\x00-\x7f])|[．、])"),  # A) or A. before its text
    re.compile(r"\\(?:textbf|text|mathrm|bf)\s*\{\s*([A-J])[).:]?\s*\}"),
    re.compile(r"^[ \t]*([A-J])[ \t]+(?=\S)", re.MULTILINE),  # A 9, each on a line of its own
    re.compile(r"(?<!\w)\(\s*([a-j])\s*\)"),  # (a): often the parts of a question, so the gold must be a letter
)
_FEWEST_OPTIONS = 3
_MENU, _LONGEST_ENTRY = 4, 80  # so many short entries are a menu, whatever the gold looks like
_LETTER_WANTED = re.compile(
    r"which (?:one )?of the following|(?:correct|right|best) (?:option|choice|alternative)"
    r"|(?:enter|type|give|write|choose|select|state|provide|answer with) (?:only )?(?:the|a|your) (?:\w+ )?letter"
    r"|answer should be a (?:single )?letter|letter of the (?:graph|figure|correct|answer|option|choice)"
    r"|(?:enter|type|write|answer) [\"'`“$(]*[A-Z][\"'`”$)]* (?:for|if)\b",
    re.IGNORECASE,
)

_TRUTH = re.compile(r"true|false|yes|no|correct|incorrect|对|错|正确|错误|是|否", re.IGNORECASE)
_TRUTH_LETTERS = re.compile(r"[TFYN](?:[\s,]*[TFYN])*", re.IGNORECASE)
_TRUTH_WANTED = re.compile(
    r"\btrue or false\b|\btrue/false\b|\byes or no\b|\byes/no\b|\b[TY] (?:for|if) (?:true|yes|it)", re.IGNORECASE
)

_PROOF_WANTED = re.compile(
    # As a request, not as in "the records show that".
    r"(?:^|[.;:!?,)$\]\n]|\b(?:and|then|please|to|or|also|must|you|we))\s*"
    r"(?:(?:prove|disprove)\b|(?:show|demonstrate|verify|justify|establish) (?:that|the following)\b)|求证|证明|试证",
    re.IGNORECASE,
)
_VALUE_WANTED = re.compile(
    r"\b(?:find|determine|compute|calculate|evaluate|solve|simplify|estimate|deduce the value|minimi[sz]e|maximi[sz]e"
    r"|what|whose|who|when will|how|for which|in which|which of|which \w+ (?:is|are|has|have)|express"
    r"|(?:give|provide|state|write(?: down)?|submit|enter|build|construct) (?:the|an?|your|all)"
    r"|conjecture|maximum|minimum|largest possible|smallest possible)\b|[?？]|求(?!证)|多少|几|请给出|请提供|计算|确定",
    re.IGNORECASE,
)

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_DRESS = re.compile(
    r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox|rm|bf|displaystyle|left|right|q?quad)(?![A-Za-z])"
    r"|\\[ ,;:!]|[\s$~*{}]"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_ANNOUNCED = re.compile(r"^\W*(?:final )?answer\s*:?\s*", re.IGNORECASE)


def unfit(question: str, gold: str, row: Mapping[str, Any] | None = None) -> str | None:
    """Why a question is no good for rewards by final answer, or None where it is."""
    if said := _said(row or {}):
        return said
    gold = gold.strip()
    if not gold or not _bare(gold):
        return NO_GOLD
    text = "  " + _DRAWING.sub(" ", question)
    if _is_choice(text, gold):
        return MULTIPLE_CHOICE
    if _is_truth(text, gold):
        return TRUE_FALSE
    if _PROOF_WANTED.search(text) and not _VALUE_WANTED.search(text):
        return PROOF
    return None if _is_readable(gold) else UNREADABLE_GOLD


def _said(row: Mapping[str, Any]) -> str | None:
    """What the row says of its own kind."""
    for column in _KIND_COLUMNS:
        value = row.get(column)
        words = re.sub(r"[\s_/-]+", " ", value).strip().lower() if isinstance(value, str) else ""
        if words.removesuffix(" question") in _KINDS:
            return _KINDS[words.removesuffix(" question")]
    return MULTIPLE_CHOICE if any(row.get(column) for column in _CHOICE_COLUMNS) else None


def _is_choice(text: str, gold: str) -> bool:
    """A letter that stands for an option, or a value that is one of the options: it can be found by elimination."""
    bare = _bare(gold)
    letter = _LETTER_GOLD.fullmatch(bare)
    if letter and _LETTER_WANTED.search(text):
        return True
    wanted = (letter.group(1) or letter.group(2)).upper() if letter else ""
    for label in _LABELS:
        options = _options(text, label)
        if len(options) < _FEWEST_OPTIONS:
            continue
        letters = {name.upper() for name in options}
        if wanted in letters or (_SEVERAL_LETTERS.fullmatch(bare) and set(re.findall("[A-J]", bare)) <= letters):
            return True
        if "A" in options and (_is_menu(options, label) or any(_says(text, gold) for text in options.values())):
            return True
    return False


def _is_menu(options: Mapping[str, str], label: re.Pattern[str]) -> bool:
    short = all(len(text.strip()) <= _LONGEST_ENTRY and "?" not in text for text in options.values())
    return short and len(options) >= _MENU and label in _LABELS[:2]


def _says(option: str, gold: str) -> bool:
    """Whether an option is the gold, perhaps with a unit after its formula."""
    formula = _FORMULA.search(option)
    inside = (formula.group(1) or formula.group(2)) if formula else option
    return _value(gold) in (_value(option), _value(inside))


def _options(text: str, label: re.Pattern[str]) -> dict[str, str]:
    """The last run of labels A, B, C … with the text after each; empty where there is none."""
    found = list(label.finditer(text))
    starts = [i for i, match in enumerate(found) if match.group(1) in "Aa"]
    for start in reversed(starts):
        run = [found[start]]
        for match in found[start + 1 :]:
            if ord(match.group(1)) != ord(run[-1].group(1)) + 1:
                break
            run.append(match)
        if len(run) >= _FEWEST_OPTIONS:
            ends = [match.start() for match in run[1:]] + [len(text)]
            return {match.group(1): text[match.end() : end] for match, end in zip(run, ends, strict=True)}
    return {}


def _is_truth(text: str, gold: str) -> bool:
    bare = _ANNOUNCED.sub("", _bare(gold)).rstrip(".")
    if _TRUTH.fullmatch(bare):
        return True
    return bool(_TRUTH_LETTERS.fullmatch(bare) and _TRUTH_WANTED.search(text))


def _is_readable(gold: str) -> bool:
    """Whether a gold can be an answer at all: neither a solution in prose nor a formula that was cut off."""
    if _BOX.search(gold):  # the grader reads what is in the box
        return True
    if len(gold) > LONGEST_GOLD or len(_WORD.findall(gold)) > MOST_WORDS:
        return "####" in gold
    braces = re.sub(r"\\[{}]", "", gold)
    return braces.count("{") == braces.count("}")


def _bare(gold: str) -> str:
    """A gold without its dress: $\\text{(B)}$ is (B)."""
    return _DRESS.sub("", gold)


def _value(text: str) -> str:
    """One spelling for a value, enough to find a gold among the options it was copied from."""
    plain = _DRESS.sub("", text.replace("dfrac", "frac").replace("tfrac", "frac"))
    return re.sub(r"(?<=\d),(?=\d{3})", "", plain).strip("().,;\\[]*").lower()
