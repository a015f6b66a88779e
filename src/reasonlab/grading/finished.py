"""Whether an answer is worked out, or only says what would have to be computed.

`36 + 54` is worth 90 and `\\sin 30^\\circ` is worth 1/2, so a comparison by value accepts both, and a model that is
rewarded by such a comparison learns to copy the question into the box (docs/lab-notes.md, §17). What the gold answer
has worked out, an answer has to work out as well: sums, products, quotients and powers of numbers, functions of
numbers, integrals and the like are open work unless the gold answer has such a thing itself. Names that the gold
answer does not need, a tree several times as large as its own, and a formula of the question are open work too.

What is a matter of taste stays accepted: fractions that are not in lowest terms, decimals, mixed numbers, scientific
notation, roots that could be simplified, factors that could be multiplied out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator
from functools import lru_cache

from reasonlab.grading import numeric
from reasonlab.grading.expression import UNEVALUATED, Node, UnreadableError, symbols
from reasonlab.grading.normalise import normalise
from reasonlab.grading.values import (
    Bag,
    Chain,
    Joined,
    Matrix,
    Ratio,
    Row,
    Scalar,
    Value,
    is_name,
    readings,
)

RULE = "not worked out"

_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|\\begin\{(?:align|gather|equation)\*?\}(.+?)\\end", re.DOTALL
)
_TO_DO = re.compile(r"\\(?:i*int|sum|prod|lim|det|b?mod)(?![a-zA-Z])|\\frac\{\s*d\s*\}\{\s*d|\\begin")
_CLOSED = frozenset(["exp", "sqrt", "cbrt"])  # functions that are another way to write a power
_UNIT = ("sym", "ⅈ")
_LARGER, _MORE = 1.5, 2  # a tree may be so many times as large as the gold answer's, and so many parts larger


def leaves_work(answer: str, gold: str) -> bool:
    """Whether an answer has more integrals, sums, limits or matrices in it than the gold answer: seen without a parser.

    One matrix is not too many (a column may stand for a point), nor is the remainder of a congruence.
    """
    ours, theirs = (
        Counter(name for name in _TO_DO.findall(text) if "mod" not in name or r"\equiv" not in text)
        for text in (answer, gold)
    )
    theirs[r"\begin"] = max(theirs[r"\begin"], 1)
    return bool(ours - theirs)


def worked_out(answer: str, gold: str, question: str) -> bool:
    """Whether an answer that is worth the gold answer is also as far worked out."""
    ours, theirs = normalise(answer), normalise(gold)
    if leaves_work(ours, theirs):
        return False
    mine, wanted = readings(ours)[0], readings(theirs)[0]
    nodes, gold_nodes = list(_nodes(mine)), list(_nodes(wanted))
    size, gold_size = sum(map(_size, nodes)), sum(map(_size, gold_nodes))
    if _key(mine) == _key(wanted) and size == gold_size:
        return True
    if _key(mine) in _formulas(question) and not _offered(nodes, gold_nodes):
        return False
    if not nodes or not gold_nodes:
        return True
    try:
        if all(map(_plain, gold_nodes)):
            return all(map(_plain, nodes))
        to_do = set().union(*map(_open_work, nodes)) - set().union(*map(_open_work, gold_nodes))
    except UnreadableError:  # larger than anything we compute
        return True
    names = set().union(*map(symbols, nodes)) - set().union(*map(symbols, gold_nodes))
    return not (to_do or names or size > _LARGER * gold_size + _MORE)


@lru_cache(maxsize=4096)
def _formulas(question: str) -> frozenset[Hashable]:
    """What stands as a formula in a question: whole, and the sides of its equations."""
    found: set[Hashable] = set()
    for groups in _FORMULA.findall(question):
        for line in re.split(r"\\\\|&", "".join(groups)):
            value = readings(normalise(line).strip("= "))[0]
            found.add(_key(value))
            if isinstance(value, Chain | Bag):
                found.update(_key(item) for item in value.items if not is_name(item))
    return frozenset(found)


def _key(value: Value) -> Hashable:
    """The same for an expression with its terms in another order, times one or plus nothing."""
    return tuple(map(_canonical, _nodes(value))) or value


def _canonical(node: Node) -> Node:
    kind, parts = node[0], [_canonical(part) if isinstance(part, tuple) else part for part in node[1:]]
    if kind in ("div", "pow") and parts[1][:2] == ("num", 1):
        return tuple(parts[0])
    if kind == "neg" and parts[0][0] == "neg":
        return tuple(parts[0][1])
    if kind not in ("add", "mul"):
        return (kind, *parts)
    negative = kind == "mul" and sum(part[0] == "neg" for part in parts) % 2 == 1
    bare = [part[1] if kind == "mul" and part[0] == "neg" else part for part in parts]
    flat = [inner for part in bare for inner in (part[1:] if part[0] == kind else (part,))]
    neutral = ("num", 0 if kind == "add" else 1)
    rest = sorted((part for part in flat if part[:2] != neutral), key=repr) or [(*neutral, 0)]
    whole = (kind, *rest) if len(rest) > 1 else rest[0]
    return ("neg", whole) if negative else whole


def _nodes(value: Value) -> Iterator[Node]:
    """The trees of an answer: of `x = 2 + 3` its end, of `1 < x < 3` its bounds, of a list all its items."""
    if isinstance(value, Scalar):
        yield value.node
        return
    items: tuple[Value, ...] = ()
    if isinstance(value, Chain):
        equal = set(value.relations) <= {"=", "≈", "∈"}
        named = is_name(value.items[0]) or not any(symbols(node) for item in value.items for node in _nodes(item))
        items = value.items[-1:] if equal and named else tuple(item for item in value.items if not is_name(item))
    elif isinstance(value, Matrix):
        items = tuple(item for row in value.rows for item in row)
    elif isinstance(value, Row | Bag | Joined | Ratio):
        items = value.items
    for item in items:
        yield from _nodes(item)


def _offered(nodes: list[Node], gold_nodes: list[Node]) -> bool:
    """Whether an answer may be one of those that the question offers: names or numbers, of the gold answer's kind."""
    kinds, gold_kinds = ([(node[1] if node[0] == "neg" else node)[0] for node in side] for side in (nodes, gold_nodes))
    return bool(kinds) and kinds == gold_kinds and all(_irreducible(node) for node in nodes)


def _irreducible(node: Node) -> bool:
    inner = node[1] if node[0] == "neg" else node
    if inner[0] == "div" and inner[1][0] == inner[2][0] == "num" and inner[2][1]:
        return bool((inner[1][1] / inner[2][1]).denominator == abs(inner[2][1]))
    return inner[0] in ("num", "sym")


def _plain(node: Node) -> bool:
    """A number as one writes it down: 90, -1/2, 0.5, 8.7 × 10^5, 6 + 9i, (1 + 5i)/13."""
    if node[0] == "neg" or (node[0] == "div" and node[1][0] == "add" and node[2][0] == "num"):
        return _plain(node[1])
    if node[0] == "add" and len(node) == 3:
        real, imaginary = node[1:] if _imaginary(node[2]) else node[:0:-1]
        return _imaginary(imaginary) and not _imaginary(real) and _plain(real)
    return _imaginary(node) or _real(node)


def _imaginary(node: Node) -> bool:
    inner = node[1] if node[0] == "neg" else node
    return inner == _UNIT or bool(inner[0] == "mul" and inner[2] == _UNIT and _real(inner[1]))


def _real(node: Node) -> bool:
    inner = node[1] if node[0] == "neg" else node
    if inner[0] == "div":
        whole = inner[1][0] in ("num", "neg") and inner[2][0] in ("num", "neg")
        return bool(whole and _real(inner[1]) and _real(inner[2]) and _fraction(inner))
    return inner[0] in ("num", "inf") or _scientific(inner)


def _fraction(node: Node) -> bool:
    """Whether a division of numbers is one that a fraction stands for, not 80 / -8."""
    value = numeric.exact(node)
    return value is None or value.denominator != 1


def _size(node: Node) -> int:
    """Numbers, names and functions of a tree."""
    return (node[0] in ("num", "sym", "fn")) + sum(_size(part) for part in node if isinstance(part, tuple))


def _open_work(node: Node) -> set[str]:
    """The kinds of work with numbers that a tree leaves to its reader."""
    if _plain(node):
        return set()
    found: set[str] = set().union(*(_open_work(part) for part in node if isinstance(part, tuple)))
    kind = node[0]
    if kind == "add" and _numbers_among(_flat(node, "add")) > 1:
        found.add("sum")
    elif kind == "mul" and _numbers_among(_flat(node, "mul")) > 1:
        found.add("product")
    elif kind == "div" and not _fraction(node):
        found.add("quotient")
    elif kind == "pow" and node[1][0] != "sym" and numeric.exact(node) is not None:
        found.add("power")
    elif kind == "fn" and node[1] in UNEVALUATED:
        found.add(node[1])
    elif kind == "fn" and node[1] not in _CLOSED and not symbols(node):
        found.add("function")
    return found


def _flat(node: Node, kind: str) -> Iterator[Node]:
    for part in node[1:]:
        inner = part[1] if part[0] == "neg" else part
        if inner[0] == kind:
            yield from _flat(inner, kind)
        else:
            yield inner


def _numbers_among(parts: Iterator[Node]) -> int:
    return sum(numeric.exact(part) is not None for part in parts)


def _scientific(node: Node) -> bool:
    """8.7 × 10^5, or 10^5 alone."""
    if node[0] == "mul" and node[1][0] == "num":
        return _scientific(node[2])
    return bool(node[0] == "pow" and node[1][:2] == ("num", 10) and _real(node[2]))
