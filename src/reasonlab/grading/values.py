"""What an answer is: a number, a tuple, a list, an interval, an equation, a matrix, words … read from its tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from reasonlab.grading.expression import Node, Parser, ProseError, UnreadableError, symbols, tokenise
from reasonlab.grading.normalise import LONGEST, plain_words, spelling
from reasonlab.grading.units import Unit, split_unit


@dataclass(frozen=True, slots=True)
class Scalar:
    node: Node
    percent: bool = False
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Based:
    """A number written in a base: 204_5."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Row:
    """Things in order between brackets: a point, a tuple, an interval."""

    opening: str
    closing: str
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Bag:
    """Things in no order: `{1, 2}`, or `1, 2` without braces."""

    items: tuple[Value, ...]
    braces: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """Sets joined by one operation, `cup` or `setminus`."""

    operation: str
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """`a < b ≤ c`, `x = 5`."""

    items: tuple[Value, ...]
    relations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True, slots=True)
class Words:
    text: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """Mathematics we cannot read."""

    text: str


Value = Scalar | Based | Row | Bag | Joined | Chain | Ratio | Matrix | Words | Opaque

_OPENING = {"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"}
_CLOSING = {")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"}
_MATRIX = re.compile(r"\(?\s*\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}\s*\)?", re.DOTALL)
_NAMED_MATRIX = re.compile(
    r"(?:\\(?:text|vec)\s*(?:\{[A-Za-z]\}|[A-Za-z])|[A-Za-z])\s*(?:\^\s*\{?-?\w\}?|_\s*\{?\w\}?)?\s*=\s*(?=\\begin)"
)
_BASED = re.compile(r"([0-9A-Fa-f]+|\\text\{[0-9A-F]+\})\s*_\s*(?:\{\s*(\d+|\\text\{[a-z]+\})\s*\}|(\d+))")
_BASE_WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_THOUSANDS = re.compile(r"(?<![\d.,_])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_DECIMAL_COMMA = re.compile(r"(-?)(\d+),(\d{2}|\d{4,})")
_ZERO_COMMA = re.compile(r"(-?0),(\d+)")
# 1/2x: x/2, or 1/(2x)
_SLASH_PRODUCT = re.compile(
    r"/\s*(\d+)\s*((?:[a-z]|\\pi ?|\\sqrt\s*\{[^{}]*\})(?:\^\d)?)(?![a-z])"
)  # 1/2x: x/2, or 1/(2x)
_LEADING_TEXT = re.compile(r"\\text\s*\{[^{}]*\}\s*:?\s*(?=[-\d\\({\[])(?!\\(?:le|ge|ne|in|approx|text)\b)")
_LETTER_APART = re.compile(r"\d [A-Za-z]$")  # a unit, or a name
_COUNTED = re.compile(r"(-?[\d./]+) ([A-Za-z]+(?: [A-Za-z]+){0,2})")
_MODIFIERS = frozenset(
    ["or", "and", "more", "less", "fewer", "than", "not", "to", "at", "least", "most", "over", "under", "times", "of"]
)
_CLOCK = re.compile(r"0?\d:\d\d|\d\d:0\d")
_PERCENT = re.compile(r"\s*%\s*$")


_REALS = Row("(", ")", (Scalar(("neg", ("inf",))), Scalar(("inf",))))
_NOTHING = Words("no solution")
_PHRASES: dict[str, Value] = {
    **dict.fromkeys([r"\mathbb{r}", "allrealnumbers", "allreals", "realnumbers", "therealnumbers"], _REALS),
    **dict.fromkeys(["nosolution", "nosolutions", "norealsolution", "norealsolutions", "nosolutionexists"], _NOTHING),
    **dict.fromkeys(["doesnotexist", "dne", "undefined", "notdefined"], Words("undefined")),
    **dict.fromkeys(["infinity", "infinite"], Scalar(("inf",))),
    **dict.fromkeys(["emptyset", "theemptyset", r"\emptyset"], Bag((), True)),
}


@lru_cache(maxsize=8192)
def readings(text: str) -> tuple[Value, ...]:
    """Every value a normalised answer may mean, the likeliest first: 1,234 is a number, or a list of two."""
    joined = _THOUSANDS.sub(lambda m: m.group(0).replace(",", ""), text)
    values = [read(joined)]
    if joined != text:
        values.append(read(text))
    elif match := _DECIMAL_COMMA.fullmatch(text) or _ZERO_COMMA.fullmatch(text):
        values.append(read(match.group(0).replace(",", ".")))
    elif _SLASH_PRODUCT.search(text):
        values.append(read(_SLASH_PRODUCT.sub(r"/(\1\2)", text)))
    elif match := _LEADING_TEXT.match(text):
        values.append(read(text[match.end() :]))
    elif _LETTER_APART.search(text):
        values.append(read(text[:-2] + text[-1]))
    return tuple(values)


def read(text: str) -> Value:
    """One reading of a normalised answer."""
    if not text or len(text) > LONGEST:
        return Opaque(text)
    if (phrase := spelling(text)) in _PHRASES:
        return _PHRASES[phrase]
    if match := _NAMED_MATRIX.match(text):
        text = text[match.end() :]
    if match := _MATRIX.fullmatch(text):
        return _matrix(match.group(2), text)
    if (match := _BASED.fullmatch(text)) and (based := _based(match)) is not None:
        return based
    try:
        return _value(tokenise(text), text)
    except ProseError:
        pass
    except UnreadableError:
        return Opaque(text)
    try:
        bare = split_unit(text)[0]
        if bare != text:
            return _value(tokenise(bare), text)
        if counted := _counted(text):
            return _value(tokenise(counted), counted)
    except UnreadableError:
        pass
    words = plain_words(text)
    return Words(words) if not re.search(r"[\\^_=<>]", words) else Opaque(text)


def _counted(text: str) -> str | None:
    """`12 apples`: the number, unless a word says more about it than what was counted."""
    match = _COUNTED.fullmatch(text)
    return match.group(1) if match and not _MODIFIERS & set(match.group(2).lower().split()) else None


def _based(match: re.Match[str]) -> Based | None:
    digits = match.group(1).removeprefix(r"\text{").rstrip("}").upper()
    word = (match.group(2) or match.group(3)).removeprefix(r"\text{").rstrip("}")
    base = _BASE_WORDS.get(word) or (int(word) if word.isdecimal() and len(word) < 4 else 0)
    return Based(digits.lstrip("0") or "0", base) if base and (digits.isdecimal() or base > 10) else None


def _matrix(body: str, text: str) -> Value:
    rows = [row for row in re.split(r"\\\\|\\cr\b", body.replace(r"\hline", "")) if row.strip()]
    values = tuple(tuple(read(cell.strip()) for cell in row.split("&")) for row in rows)
    unread = any(isinstance(cell, Opaque | Words) for row in values for cell in row)
    return Opaque(text) if unread or not values else Matrix(values)


def _split(tokens: list[str], separators: set[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and token in separators:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _value(tokens: list[str], text: str) -> Value:
    for separators in ({";", "&"}, {","}):
        parts = [part for part in _split(tokens, separators) if part]
        if len(parts) > 1:
            return Bag(tuple(item for part in parts for item in _spread(_value(_tail(part), ""), separators)))
        tokens = parts[0] if parts else tokens
    return _relation(tokens, text)


def _tail(part: list[str]) -> list[str]:
    """`, and 82`: the connective goes with the comma."""
    return part[1:] if len(part) > 1 and part[0] == "&" else part


def _spread(value: Value, separators: set[str]) -> tuple[Value, ...]:
    """`\\pm` inside a list gives two of its items."""
    return value.items if separators == {","} and isinstance(value, Bag) and not value.braces else (value,)


def _relation(tokens: list[str], text: str) -> Value:
    relations: list[str] = []
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and token[:2] == "r:":
            relations.append(token[2:])
            parts.append([])
        else:
            parts[-1].append(token)
    if not relations:
        return _sets(tokens, text)
    if not parts[-1]:
        raise UnreadableError("nothing after the relation")
    if not parts[0]:
        return _relation(parts[-1], text)
    return Chain(tuple(_sets(part, "") for part in parts), tuple(relations))


def _sets(tokens: list[str], text: str) -> Value:
    for operation in (r"\cup", r"\setminus"):
        parts = _split(tokens, {operation})
        if len(parts) > 1:
            return Joined(operation[1:], tuple(_sets(part, "") for part in parts))
    parts = _split(tokens, {":"})
    if len(tokens) == 3 and _CLOCK.fullmatch("".join(tokens)):
        return Words("".join(tokens))  # a time of day, not a ratio
    if len(parts) > 1:
        return Ratio(tuple(_scalar(part, "") for part in parts))
    return _bracketed(tokens) or _scalar(tokens, text)


def _bracketed(tokens: list[str]) -> Value | None:
    if len(tokens) < 2 or tokens[0] not in _OPENING or tokens[-1] not in _CLOSING:
        return None
    depth = 0
    for number, token in enumerate(tokens):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and number < len(tokens) - 1:
            return None
    inside = tokens[1:-1]
    parts = _split(inside, {",", ";"})
    opening, closing = tokens[0], tokens[-1]
    braces = opening == r"\{"  # bare braces only group
    if len(parts) == 1:
        if opening == r"\{":
            return Bag((_relation(inside, ""),), True) if inside else Bag((), True)
        nested = _bracketed(inside)
        if nested is not None and opening in ("(", "{"):
            return nested
        return _relation(inside, "") if opening in ("{", "[") or any(t[:2] == "r:" for t in inside) else None
    items = tuple(item for part in parts for item in _spread(_relation(part, ""), {","}))
    if braces or opening == "{":
        return Bag(items, braces)
    return Row("(" if opening == r"\langle" else opening, ")" if closing == r"\rangle" else closing, items)


def _scalar(tokens: list[str], text: str) -> Value:
    """An expression; a percent sign and a unit after it are noted and taken off."""
    if r"\pm" in tokens or r"\mp" in tokens:
        return Bag(tuple(Scalar(Parser(tokens, sign).parse()) for sign in (1, -1)))
    source = text if text else "".join(_spelt(token) for token in tokens)
    percent = bool(_PERCENT.search(source))
    if percent:
        return Scalar(Parser(tokenise(_PERCENT.sub("", source))).parse(), True)
    unit = None
    if source[-1:].isalpha() or source[-1:] == "}" or (source[-1:].isdecimal() and "^" in source):
        bare, unit = split_unit(source)
        if bare != source:
            if unit is None and (match := _BASED.fullmatch(bare)) and (based := _based(match)) is not None:
                return based
            tokens = tokenise(bare)
    if tokens and tokens[-1] in (".",):
        tokens = tokens[:-1]
    if (match := _BASED.fullmatch(source)) and (based := _based(match)) is not None:
        return based
    return Scalar(Parser(tokens).parse(), False, unit)


def _spelt(token: str) -> str:
    if token[:2] == "s:":
        return rf"\text{{{token[2:]}}}"
    return token + " " if token[0] == "\\" and token[1:].isalpha() else token


def is_name(value: Value) -> bool:
    """Whether `value = …` only names what follows: x, f(x), |AB|, (p, q), A : B."""
    if isinstance(value, Scalar):
        return bool(symbols(value.node)) and _names_only(value.node)
    if isinstance(value, Row | Ratio | Bag):
        return all(is_name(item) for item in value.items)
    return False


def _names_only(node: Node) -> bool:
    if node[0] == "fn":
        return True
    if node[0] == "mul" and node[1][0] == "sym" and node[2][0] in ("num", "sym", "neg"):  # f(2), ab
        return True
    if node[0] in ("add", "neg"):  # m + n, x - y; y - arctan(x + y) belongs to an equation
        return all(_names_only(part) and (part[0] != "fn" or part[1] == "abs") for part in node[1:])
    return node[0] == "sym" or (node[0] in ("mul", "pow") and _names_only(node[1]) and _names_only(node[2]))
