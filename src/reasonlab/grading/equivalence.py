"""Whether two answers say the same: True, False, or None where we cannot tell.

The rules are exact. There is no relative tolerance on numbers; a decimal stands for an irrational or recurring number
only if it gives six digits or more and all of them are right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from reasonlab.grading import numeric
from reasonlab.grading.expression import Node, UnreadableError, symbols
from reasonlab.grading.normalise import normalise, plain_words, spelling
from reasonlab.grading.scalars import based, ratios, scalars
from reasonlab.grading.values import (
    Bag,
    Based,
    Chain,
    Joined,
    Matrix,
    Opaque,
    Ratio,
    Row,
    Scalar,
    Value,
    Words,
    is_name,
    readings,
)

Decision = tuple[bool | None, str]

# Rules that have seen the gold answer's own form, not only its worth.
AS_WRITTEN = ("same string", "integer", "normalised string", "choice letter")
BY_VALUE = ("value: ", "math-verify")  # how the other rules begin

_INTEGER = re.compile(r"[+-]?\d{1,400}")
_CHOICE = re.compile(
    r"(?:\(\s*(?P<one>[A-Ja-j])\s*\)|(?P<two>[A-Ja-j])\s*(?:[.:)]|,(?=\s*[a-z]{2}))|(?P<three>[A-Ja-j])$)\s*(?P<text>.*)",
    re.DOTALL,
)
_SEVERAL = re.compile(r"[\s,;()]|\band\b")  # between the letters of several choices
_LETTERS = re.compile(r"[A-F]{2,6}")
_LETTERS_ONLY = re.compile(r"(?:[\s,;()]|and|or)*[A-J](?:[\s,;()A-J]|and|or)*")
_NUMBERS = re.compile(r"\d+(?:\.\d+)?")


def decide(answer: str, gold: str, tolerance: float = 0.0) -> Decision:
    """Compare a bare answer with the gold answer; None means that neither equality nor difference is proved."""
    if answer == gold and answer:
        return True, "same string"
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer):
        if int(gold) == int(answer):
            return True, "integer"
        if not tolerance:
            return False, "integer"
    ours, theirs = normalise(answer), normalise(gold)
    if not ours or not theirs:
        return False, "empty answer"
    if ours == theirs:
        return True, "normalised string"
    if (choice := _choice(ours, theirs)) is not None:
        return choice, "choice letter"
    if spelling(ours) == spelling(theirs) and (spelling(ours).isalpha() or not _differ_in_case(ours, theirs)):
        return True, "normalised string"
    return _by_value(ours, theirs, tolerance)


def _differ_in_case(ours: str, theirs: str) -> bool:
    """Case carries no meaning in words; in formulas it does."""
    formula = re.search(r"[\d^_=+*/\\]", plain_words(ours)) is not None
    return formula and sorted(re.sub(r"[^A-Z]", "", ours)) != sorted(re.sub(r"[^A-Z]", "", theirs))


def _choice(ours: str, theirs: str) -> bool | None:
    """A gold that is one letter A to J (perhaps with its text) asks for that letter."""
    letters = [_SEVERAL.sub("", _bare(text)) for text in (ours, theirs)]
    if all(_LETTERS.fullmatch(text) for text in letters):
        return sorted(letters[0]) == sorted(letters[1])
    gold = _CHOICE.fullmatch(_bare(theirs))
    answer = _CHOICE.fullmatch(_bare(ours)) if gold else None
    if gold is None or answer is None:
        return None
    gold_letter, answer_letter = (m.group("one") or m.group("two") or m.group("three") for m in (gold, answer))
    if not gold_letter.isupper():
        return None
    more = any(_LETTERS_ONLY.fullmatch(match.group("text")) for match in (gold, answer))  # (B)(C) is two choices
    if gold_letter != answer_letter.upper() or more:
        return False
    if gold.group("text") and answer.group("text"):
        return decide(answer.group("text"), gold.group("text"))[0]
    return True


def _bare(text: str) -> str:
    opened = plain_words(text)
    return opened[1:-1].strip() if opened[:1] == "{" and opened[-1:] == "}" else opened


def _by_value(ours: str, theirs: str, tolerance: float) -> Decision:
    undecided = False
    first_rule = ""
    for mine in readings(ours):
        for gold in readings(theirs):
            try:
                verdict = same(mine, gold, tolerance)
            except numeric.TooLargeError:
                return False, "beyond the size limits"
            except UnreadableError:
                verdict = None
            rule = type(gold).__name__.lower()
            first_rule = first_rule or rule
            if verdict:
                return True, f"value: {rule}"
            undecided |= verdict is None
    if not undecided:
        return False, f"value: {first_rule}"
    if _form(ours) == _form(theirs):
        return False, "same form, other numbers"
    return None, "undecided"


def _form(text: str) -> str:
    return _NUMBERS.sub("#", spelling(text))


def same(a: Value, b: Value, tolerance: float = 0.0) -> bool | None:
    """Whether two values are the same, in all their parts."""
    if isinstance(a, Opaque) or isinstance(b, Opaque):
        return None
    if isinstance(a, Words) or isinstance(b, Words):
        if isinstance(a, Words) and isinstance(b, Words):
            return _words(a.text) == _words(b.text) or _forgiving(a.text, b.text)
        return False
    a, b = _as_union(a, b), _as_union(b, a)
    if isinstance(a, Chain) or isinstance(b, Chain):
        return _chains(a, b, tolerance)
    if isinstance(a, Scalar) and isinstance(b, Scalar):
        return scalars(a, b, tolerance)
    if isinstance(a, Based) or isinstance(b, Based):
        return based(a, b)
    if isinstance(a, Ratio) or isinstance(b, Ratio):
        return ratios(a, b)
    if isinstance(a, Matrix) or isinstance(b, Matrix):
        return _matrices(a, b, tolerance)
    if isinstance(a, Joined) and isinstance(b, Joined):
        if a.operation != b.operation:
            return None
        return (
            _unordered(a.items, b.items, tolerance) if a.operation == "cup" else _ordered(a.items, b.items, tolerance)
        )
    if isinstance(a, Joined) or isinstance(b, Joined):
        return False if not any(_has_symbols(x) for x in (a, b)) else None
    return _collections(a, b, tolerance)


def _as_union(value: Value, other: Value) -> Value:
    """`x < 2 or x > 3` beside a union of intervals is one."""
    if isinstance(other, Joined) and isinstance(value, Bag):
        intervals = [_interval(item) if isinstance(item, Chain) else item for item in value.items]
        if all(isinstance(interval, Row) for interval in intervals):
            return Joined("cup", tuple(interval for interval in intervals if interval is not None))
    return value


def _has_symbols(value: Value) -> bool:
    if isinstance(value, Scalar):
        return bool(symbols(value.node))
    return isinstance(value, Row | Bag | Joined | Chain | Ratio) and any(_has_symbols(item) for item in value.items)


def _words(text: str) -> str:
    return " ".join(re.sub(r"[^\w%+\-/ ]", " ", text.lower()).split())


def _forgiving(a: str, b: str) -> bool:
    """Articles carry no meaning: `an odd number` and `odd number`."""
    drop = {"the", "a", "an"}
    return [w for w in _words(a).split() if w not in drop] == [w for w in _words(b).split() if w not in drop]


def _collections(a: Value, b: Value, tolerance: float) -> bool | None:
    if isinstance(a, Row) and isinstance(b, Row):
        if len(a.items) == 2 and (a.opening, a.closing) != (b.opening, b.closing):
            return False
        return _ordered(a.items, b.items, tolerance)
    if isinstance(a, Bag) and isinstance(b, Bag):
        return _bags(a, b, tolerance)
    if (isinstance(b, Bag) and isinstance(a, Row)) or (isinstance(a, Bag) and isinstance(b, Row)):
        bag, row = (a, b) if isinstance(a, Bag) else (b, a)
        assert isinstance(bag, Bag)
        assert isinstance(row, Row)
        interval = len(row.items) == 2 and (row.opening, row.closing) != ("(", ")")
        return False if bag.braces or interval else _ordered(bag.items, row.items, tolerance)
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Bag) and len(one.items) == 1:
            return same(one.items[0], other, tolerance)
    return False


def _bags(a: Bag, b: Bag, tolerance: float) -> bool | None:
    if (_named_apart(a) and _named_apart(b) is None) or (_named_apart(b) and _named_apart(a) is None):
        return _ordered(a.items, b.items, tolerance)  # x = 3, y = 4 puts 3, 4 in order
    verdict = _unordered(_points_once(a.items), _points_once(b.items), tolerance)
    if verdict is False:
        flat_a, flat_b = _flat(a), _flat(b)
        if (len(flat_a), len(flat_b)) != (len(a.items), len(b.items)):
            return _unordered(flat_a, flat_b, tolerance)
    return verdict


def _named_apart(bag: Bag) -> bool | None:
    """Whether every item has a name of its own; None where no item has a name."""
    names = [item.items[0] for item in bag.items if isinstance(item, Chain) and is_name(item.items[0])]
    if not names:
        return None
    return len(names) == len(bag.items) == len(set(names))


def _points_once(items: tuple[Value, ...]) -> tuple[Value, ...]:
    """A list of points is a set; in a list of numbers a repeated root counts."""
    if not all(isinstance(item, Row) for item in items) or len(items) > 60:
        return items
    kept: list[Value] = []
    for item in items:
        if not any(same(item, other) for other in kept):
            kept.append(item)
    return tuple(kept)


def _flat(bag: Bag) -> tuple[Value, ...]:
    return tuple(inner for item in bag.items for inner in (_flat(item) if isinstance(item, Bag) else (item,)))


def _ordered(a: Sequence[Value], b: Sequence[Value], tolerance: float) -> bool | None:
    if len(a) != len(b):
        return False
    return _all(lambda pair: same(pair[0], pair[1], tolerance), list(zip(a, b, strict=True)))


def _all(test: Callable[[tuple[Value, Value]], bool | None], pairs: list[tuple[Value, Value]]) -> bool | None:
    verdict: bool | None = True
    for pair in pairs:
        found = test(pair)
        if found is False:
            return False
        if found is None:
            verdict = None
    return verdict


def _unordered(a: Sequence[Value], b: Sequence[Value], tolerance: float) -> bool | None:
    if len(a) != len(b):
        return False
    if len(a) > 60:
        return _ordered(a, b, tolerance)
    left = list(b)
    unknown = False
    for item in a:
        for place, candidate in enumerate(left):
            verdict = same(item, candidate, tolerance)
            if verdict:
                del left[place]
                break
            unknown |= verdict is None
        else:
            return None if unknown else False
    return True


def _matrices(a: Value, b: Value, tolerance: float) -> bool | None:
    rows_a, rows_b = _rows(a), _rows(b)
    if rows_a is None or rows_b is None or len(rows_a) != len(rows_b):
        return False if rows_a is not None and rows_b is not None else None
    return _all_rows([_ordered(x, y, tolerance) for x, y in zip(rows_a, rows_b, strict=True)])


def _all_rows(verdicts: list[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _rows(value: Value) -> Sequence[Sequence[Value]] | None:
    """A matrix, or what stands for one: a point is a column, a row of rows is a matrix."""
    if isinstance(value, Matrix):
        return value.rows
    if isinstance(value, Row | Bag):
        if all(isinstance(item, Row) for item in value.items):
            return [item.items for item in value.items if isinstance(item, Row)]
        return [(item,) for item in value.items]
    return None


def _chains(a: Value, b: Value, tolerance: float) -> bool | None:
    if isinstance(a, Chain) and isinstance(b, Chain):
        return _both_chains(a, b, tolerance)
    chain, other, chain_first = (a, b, True) if isinstance(a, Chain) else (b, a, False)
    assert isinstance(chain, Chain)
    if set(chain.relations) <= {"=", "≈"}:
        if not chain_first and _sum_is_nothing(chain):
            return False
        verdicts = [
            same(item, other, tolerance) if chain_first else same(other, item, tolerance) for item in meant(chain)
        ]
        return True if True in verdicts else (None if None in verdicts else False)
    if chain.relations == ("∈",):
        return same(chain.items[1], other, tolerance)
    interval = _interval(chain)
    return False if interval is None else same(interval, other, tolerance)


def _sum_is_nothing(chain: Chain) -> bool:
    """x + y + z = 0: as a gold answer it asks for an equation, where m + n = 17 asks for 17."""
    first, last = chain.items[0], chain.items[-1]
    if not (isinstance(first, Scalar) and isinstance(last, Scalar)):
        return False
    return bool(first.node[0] == "add" and last.node[:2] == ("num", 0) and symbols(first.node))


def meant(chain: Chain) -> list[Value]:
    """What a chain of equalities gives as its answer: its end, and its exact form before an approximation."""
    named = is_name(chain.items[0])
    exact_end = next((i for i, relation in enumerate(chain.relations) if relation == "≈"), len(chain.relations))
    ends: list[Value] = []
    if exact_end > 0 and (named or not any(_has_symbols(item) for item in chain.items)):
        ends.append(chain.items[exact_end])
    if exact_end == 0:
        ends.append(chain.items[0] if not named else chain.items[1])
    if exact_end == 0 and not named and _rounded(chain.items[0], chain.items[1]):
        ends.append(chain.items[1])
    return ends


def _rounded(exact: Value, decimal: Value) -> bool:
    """Whether the end of `a ≈ b` is a rounding of its beginning: `5 ≈ 6` is two guesses."""
    if isinstance(exact, Row) and isinstance(decimal, Row) and len(exact.items) == len(decimal.items):
        return all(map(_rounded, exact.items, decimal.items))
    if not (isinstance(exact, Scalar) and isinstance(decimal, Scalar)) or symbols(exact.node):
        return False
    literal = decimal.node[1] if decimal.node[0] == "neg" else decimal.node
    value, whole = numeric.exact(decimal.node), numeric.exact(exact.node)
    if literal[0] != "num" or value is None:
        return False
    if whole is not None and literal[2] < 2:  # 89.6 ≈ 90
        return whole == value
    return numeric.rounds_to(exact.node, value, max(literal[2], 0))


_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}


def _both_chains(a: Chain, b: Chain, tolerance: float) -> bool | None:
    equalities = {"=", "≈"}
    if set(a.relations) <= equalities and set(b.relations) <= equalities:
        return _equations(a, b, tolerance)
    for one, other in ((a, b), (b, a)):
        if one.relations == ("∈",) and other.relations != ("∈",):
            return same(one.items[1], other, tolerance)
    if len(a.items) == len(b.items):
        if a.relations == b.relations and _ordered(a.items, b.items, tolerance):
            return True
        flipped = tuple(_FLIPPED.get(r, r) for r in reversed(a.relations))
        if flipped == b.relations and _ordered(a.items[::-1], b.items, tolerance):
            return True
        if len(a.items) == 2:
            return _inequalities(a, b)
    return False


def _equations(a: Chain, b: Chain, tolerance: float) -> bool | None:
    named = is_name(a.items[0]) and is_name(b.items[0]) and same(a.items[0], b.items[0])
    if named or not (_has_symbols(a) or _has_symbols(b)):
        if _other_rounding(a.items[-1], b.items[-1]):
            return False
        pairs = [same(x, y, tolerance) for x in meant(a) for y in meant(b)]
        return True if True in pairs else (None if None in pairs else False)
    sides = _sides(a), _sides(b)
    if sides[0] is None or sides[1] is None:
        return _ordered(a.items, b.items, tolerance) if len(a.items) == len(b.items) else False
    return numeric.ratio_constant(sides[0], sides[1]) is not None


def _other_rounding(a: Value, b: Value) -> bool:
    """Two decimals that are not roundings of the same number."""
    if not (isinstance(a, Scalar) and isinstance(b, Scalar) and a.node[0] == b.node[0] == "num"):
        return False
    places = min(a.node[2], b.node[2])
    if places < 0 or a.node[1] == b.node[1]:
        return False
    return bool(a.node[2] == b.node[2] or abs(a.node[1] - b.node[1]) * 10**places > Fraction(1, 2))


def _sides(chain: Chain) -> Node | None:
    """Left minus right."""
    left, right = chain.items[0], chain.items[-1]
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        return ("add", left.node, ("neg", right.node))
    return None


def _inequalities(a: Chain, b: Chain) -> bool | None:
    """-x > -1 and x < 1: the same up to a factor, whose sign turns the relation."""
    sides = _sides(a), _sides(b)
    if sides[0] is None or sides[1] is None:
        return False
    ratio = numeric.ratio_constant(sides[0], sides[1])
    if ratio is None or ratio.imag != 0:
        return False
    relation = a.relations[0] if ratio.real > 0 else _FLIPPED.get(a.relations[0], a.relations[0])
    return relation == b.relations[0]


def _interval(chain: Chain) -> Value | None:
    """The interval an inequality in one name stands for."""
    infinity = Scalar(("inf",))
    relations = chain.relations
    if not set(relations) <= set(_FLIPPED):
        return None
    items = list(chain.items)
    if all(r in ">≥" for r in relations):
        items.reverse()
        relations = tuple(_FLIPPED[r] for r in reversed(relations))
    if not all(r in "<≤" for r in relations):
        return None
    if len(items) == 3 and is_name(items[1]):
        return Row("(" if relations[0] == "<" else "[", ")" if relations[1] == "<" else "]", (items[0], items[2]))
    if len(items) != 2:
        return None
    bracket = relations[0] == "<"
    if is_name(items[0]):
        return Row("(", ")" if bracket else "]", (Scalar(("neg", infinity.node)), items[1]))
    if is_name(items[1]):
        return Row("(" if bracket else "[", ")", (items[0], infinity))
    return None
