"""Whether an answer is worked out, or only says what would have to be computed.

`36 + 54` is worth 90 and `\\sin 30^\\circ` is worth 1/2, so a comparison by value accepts both, and a model that is
rewarded by such a comparison learns to copy the question into the box (docs/lab-notes.md, §17). What the gold answer
has worked out, an answer has to work out as well: sums, products, quotients and powers of numbers, like terms,
functions of numbers, integrals and the like are open work unless the gold answer has such a thing itself. Names that
the gold answer does not need, a tree much larger than its own, and a formula of the question are open work too.

What is a matter of taste stays accepted: fractions that are not in lowest terms, decimals, mixed numbers, scientific
notation, roots that could be simplified, factors that could be multiplied out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator
from functools import lru_cache

from reasonlab.grading.equivalence import meant, same
from reasonlab.grading.expression import Node, UnreadableError, symbols
from reasonlab.grading.forms import bare, canonical, irreducible, open_work, plain, size
from reasonlab.grading.normalise import normalise
from reasonlab.grading.values import Bag, Based, Chain, Joined, Matrix, Ratio, Row, Scalar, Value, is_name, readings

RULE = "not worked out"

FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|\\begin\{(?:align|gather|equation)\*?\}(.+?)\\end", re.DOTALL
)
_TO_DO = re.compile(
    r"\\(?:i*int|sum|prod|lim|det|partial|b?mod)(?![a-zA-Z])|\\frac\{\s*d\s*\}\{\s*d|\\begin(?:\{vmatrix\})?"
)
# A matrix may have a fraction before it.
_MATRIX = re.compile(
    r"-?\s*\\frac\s*\{?-?\d+\}?\s*\{?\d+\}?\s*"
    r"\\begin\{([pbB]?matrix|array)\}(?:(?!\\begin).)*\\end\{\1\}",
    re.DOTALL,
)
_LARGER, _MORE = 1.5, 3  # a tree may be so many times as large as the gold answer's, and so many parts larger


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
    golds = [wanted for value in readings(theirs) for wanted in _wanted(value)]
    pairs = [(mine, wanted) for mine in _said(ours) for wanted in golds if _agree(mine, wanted)]
    if pairs:
        return any(_as_far(mine, wanted, question) for mine, wanted in pairs)
    # Somebody else has found them equal.
    mine, wanted = readings(ours)[0], readings(theirs)[0]
    return not unreadable(answer, gold) and _as_far(mine, wanted, question)


def unreadable(answer: str, gold: str) -> bool:
    """Whether we can read the gold answer and nothing in the answer: somebody else's reading of it is a guess."""
    ours = normalise(answer)
    read, gold_read = (any(any(True for _ in _nodes(v)) for v in readings(t)) for t in (ours, normalise(gold)))
    return gold_read and not read and not _MATRIX.fullmatch(ours)


def _said(text: str) -> Iterator[Value]:
    """What an answer may say: its readings; of `x = 36 + 54 = 90` its end, of `90 = 36 + 54` its beginning too."""
    for value in readings(text):
        if isinstance(value, Chain) and set(value.relations) <= {"=", "≈"} and not _names(value):
            yield value.items[0]
        yield from _wanted(value)


def _wanted(value: Value) -> Iterator[Value]:
    """What a gold answer asks for: of `x = 90` and `9 · 10 = 90` the end, of an equation with names also the whole."""
    if isinstance(value, Chain) and set(value.relations) <= {"=", "≈"}:
        yield from meant(value)
        if "≈" in value.relations or not _names(value):
            return
    yield value


def _agree(mine: Value, wanted: Value) -> bool:
    try:
        return same(mine, wanted) is True
    except UnreadableError:
        return False


def _as_far(mine: Value, wanted: Value, question: str) -> bool:
    nodes, gold_nodes = list(_nodes(mine)), list(_nodes(wanted))
    if isinstance(wanted, Based):
        return not isinstance(mine, Scalar) or mine.node[0] == "num"
    if not nodes or not gold_nodes:
        return True
    parts, gold_parts = (sum(size(canonical(node)) for node in side) for side in (nodes, gold_nodes))
    if _key(mine) == _key(wanted) and sum(map(size, nodes)) == sum(map(size, gold_nodes)):
        return True
    if _key(mine) in _formulas(question) and not _offered(nodes, gold_nodes):
        return False
    if any(_wraps(node, wanted, question) for node in nodes):
        return False
    if all(map(plain, gold_nodes)):
        return all(map(plain, nodes))
    to_do = set().union(*map(open_work, nodes)) - set().union(*map(open_work, gold_nodes))
    names = set().union(*map(symbols, nodes)) - _names(wanted)
    return not (to_do or names or parts > _LARGER * gold_parts + _MORE)


def _wraps(node: Node, wanted: Value, question: str) -> bool:
    """Whether a part of the tree is a formula of the question that is worth the gold answer: |A|, x·A/x, 1/(1/A)."""
    parts = [part for part in node if isinstance(part, tuple)]
    copied = (part for part in parts if size(part) > 1 and (canonical(part),) in _formulas(question))
    return any(_agree(Scalar(part), wanted) for part in copied) or any(_wraps(p, wanted, question) for p in parts)


def _offered(nodes: list[Node], gold_nodes: list[Node]) -> bool:
    """Whether an answer may be one of those that the question offers: names or numbers, of the gold answer's kind."""
    return [bare(n)[0] for n in nodes] == [bare(n)[0] for n in gold_nodes] and all(map(irreducible, nodes))


@lru_cache(maxsize=4096)
def _formulas(question: str) -> frozenset[Hashable]:
    """What stands as a formula in a question: whole, and the sides of its equations."""
    found: set[Hashable] = set()
    for *whole, aligned in FORMULA.findall(question):
        for line in ["".join(whole), *re.split(r"\\\\|&", aligned)]:
            value = readings(normalise(line).strip("= "))[0]
            found.add(_key(value))
            if isinstance(value, Chain | Bag):
                found.update(_key(item) for item in value.items if not is_name(item))
    return frozenset(found)


def _key(value: Value) -> Hashable:
    return tuple(map(canonical, _nodes(value))) or value


def _nodes(value: Value) -> Iterator[Node]:
    """The trees of an answer: of a list all its items, of `1 < x < 3` its bounds, of a ratio the quotient."""
    if isinstance(value, Scalar):
        yield value.node
        return
    items: tuple[Value, ...] = ()
    if isinstance(value, Chain):
        last = value.items[-1:] if value.relations == ("∈",) else value.items
        items = tuple(item for item in last if not _only_names(item)) or last
    elif isinstance(value, Matrix):
        items = tuple(item for row in value.rows for item in row)
    elif isinstance(value, Row | Bag | Joined | Ratio):
        items = value.items
    nodes = [node for item in items for node in _nodes(item)]
    yield from [("div", *nodes)] if isinstance(value, Ratio) and len(nodes) == 2 else nodes


def _names(value: Value) -> set[str]:
    """All names of an answer, also those before its equality signs."""
    sides = value.items if isinstance(value, Chain) else (value,)
    return set().union(*(symbols(node) for side in sides for node in _nodes(side)))


def _only_names(value: Value) -> bool:
    """x, f(x), AB: what stands in the middle of `1 < x < 3`, without numbers and functions."""
    return is_name(value) and all(_product_of_names(node) for node in _nodes(value))


def _product_of_names(node: Node) -> bool:
    return node[0] == "sym" or (node[0] == "mul" and all(map(_product_of_names, node[1:])))
