"""Forms of expressions: what two trees share however they are arranged, and what work with numbers is left undone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from math import gcd

from reasonlab.grading import numeric
from reasonlab.grading.expression import UNEVALUATED, Node, UnreadableError, symbols

_UNIT = ("sym", "ⅈ")
_ANOTHER_WAY_TO_WRITE_A_POWER = frozenset(["exp", "sqrt", "cbrt"])
_LARGEST_RADICAND = 10**9


def size(node: Node) -> int:
    """Numbers, names and functions of a tree."""
    return (node[0] in ("num", "sym", "fn")) + sum(size(part) for part in node if isinstance(part, tuple))


def bare(node: Node) -> Node:
    """The tree without the sign before it."""
    return node[1] if node[0] == "neg" else node


# --- plain numbers --------------------------------------------------------------------------------------------------


def plain(node: Node) -> bool:
    """A number as one writes it down: 90, -1/2, 0.5, 8.7 × 10^5, 6 + 9i, (1 + 5i)/13; infinity, and sets of numbers."""
    inner = bare(node)
    if inner[0] == "sym" and inner[1].startswith("mathbb"):
        return True
    if inner[0] == "div" and inner[1][0] == "add" and inner[2][0] == "num" and inner[2][1]:
        return _complex(inner[1]) and not _divides(inner[2][1], inner[1])
    return _real(inner) or _imaginary(inner) or _complex(inner)


def _real(node: Node) -> bool:
    inner = bare(node)
    if inner[0] == "div":
        return _whole(bare(inner[1])) and _whole(bare(inner[2])) and _fraction(inner)
    return inner[0] in ("num", "inf") or _power_of_ten(inner) or _scientific(inner)


def _whole(node: Node) -> bool:
    return bool(node[0] == "num" and node[1].denominator == 1)


def _scientific(node: Node) -> bool:
    return bool(node[0] == "mul" and node[1][0] == "num" and _power_of_ten(node[2]))


def _power_of_ten(node: Node) -> bool:
    return bool(node[0] == "pow" and node[1][:2] == ("num", 10) and _whole(bare(node[2])))


def _fraction(node: Node) -> bool:
    """Whether a division of numbers is one that a fraction stands for, not 80 / -8."""
    value = exact(node)
    return value is None or value.denominator != 1


def _imaginary(node: Node) -> bool:
    inner = bare(node)
    return inner == _UNIT or bool(inner[0] == "mul" and inner[2] == _UNIT and _real(inner[1]) and exact(inner[1]))


def _complex(node: Node) -> bool:
    if node[0] != "add" or len(node) != 3:
        return False
    real, imaginary = node[1:] if _imaginary(node[2]) else node[:0:-1]
    return _imaginary(imaginary) and _real(real)


def _divides(number: Fraction, complex_number: Node) -> bool:
    parts = [exact(bare(part)[1] if _imaginary(part) and bare(part) != _UNIT else part) for part in complex_number[1:]]
    return all(((1 if part is None else part) / number).denominator == 1 for part in parts)


def irreducible(node: Node) -> bool:
    """A name, a number or a fraction in lowest terms."""
    inner = bare(node)
    if inner[0] == "div" and inner[1][0] == inner[2][0] == "num" and inner[2][1]:
        return bool((inner[1][1] / inner[2][1]).denominator == abs(inner[2][1]))
    return inner[0] in ("num", "sym")


def exact(node: Node) -> Fraction | None:
    """The value, where it is a number we are willing to compute."""
    try:
        return numeric.exact(node)
    except UnreadableError:
        return None


# --- one form for all arrangements -----------------------------------------------------------------------------------


def canonical(node: Node) -> Node:
    """The same for a tree with its terms and factors in another order, times one, plus nothing, with signs moved."""
    kind = node[0]
    if kind == "num":
        value: Fraction = node[1]
        return _negated(("num", -value, 0)) if value < 0 else ("num", value, 0)
    parts = [canonical(part) if isinstance(part, tuple) else part for part in node[1:]]
    if kind == "neg":
        return _negated(parts[0])
    if kind == "add":
        return _joined("add", parts, 0)
    if kind == "pow":
        return _power(parts[0], parts[1], exact(node[2]))
    return _quotient(kind, parts) if kind in ("mul", "div") else (kind, *parts)


def _power(base: Node, exponent: Node, number: Fraction | None) -> Node:
    """(a^2)^3 is a^6, a^-2 is 1/a^2."""
    if number is None:
        return ("pow", base, exponent)
    if base[0] == "pow" and base[2][0] == "num" and number.denominator == base[2][1].denominator == 1:
        base, number = base[1], number * base[2][1]
    if number < 0:
        return ("div", ("num", Fraction(1), 0), _power(base, exponent, -number))
    return base if number == 1 else ("pow", base, ("num", number, 0))


def _quotient(kind: str, parts: list[Node]) -> Node:
    """All factors above one line and all below it, without those in both that are no numbers."""
    negative = sum(part[0] == "neg" for part in parts) % 2 == 1
    above: list[Node] = []
    below: list[Node] = []
    for number, part in enumerate(map(bare, parts)):
        top, bottom = (_factors(part[1]), _factors(part[2])) if part[0] == "div" else (_factors(part), [])
        above += bottom if kind == "div" and number == 1 else top
        below += top if kind == "div" and number == 1 else bottom
    if any(part[:2] == ("num", 0) for part in above):
        return ("num", Fraction(0), 0)
    for part in [part for part in above if part[0] != "num"]:
        if part in below:
            above.remove(part)
            below.remove(part)
    whole, under = _joined("mul", above, 1), _joined("mul", below, 1)
    whole = whole if under[:2] == ("num", 1) else ("div", whole, under)
    return _negated(whole) if negative else whole


def _factors(node: Node) -> list[Node]:
    return list(node[1:]) if node[0] == "mul" else [node]


def _negated(node: Node) -> Node:
    if node[0] == "neg":
        return tuple(node[1])
    return node if node[:2] == ("num", 0) else ("neg", node)


def _joined(kind: str, parts: list[Node], neutral: int) -> Node:
    flat = [inner for part in parts for inner in (part[1:] if part[0] == kind else (part,))]
    rest = sorted((part for part in flat if part[:2] != ("num", neutral)), key=repr)
    if not rest:
        return ("num", Fraction(neutral), 0)
    return (kind, *rest) if len(rest) > 1 else rest[0]


# --- what is left to do ----------------------------------------------------------------------------------------------


def open_work(node: Node) -> set[str]:
    """The kinds of work with numbers that a tree leaves to its reader."""
    return set() if plain(node) else _with_numbers(node) | _with_like_parts(canonical(node))


def _with_numbers(node: Node) -> set[str]:
    if plain(node):
        return set()
    found: set[str] = set().union(*(_with_numbers(part) for part in node if isinstance(part, tuple)))
    kind = node[0]
    if kind in ("add", "mul") and sum(exact(part) is not None for part in _flat(node, kind)) > 1:
        found.add("sum" if kind == "add" else "product")
    elif kind == "div" and not _fraction(node):
        found.add("quotient")
    elif kind == "pow" and node[1][0] != "sym" and exact(node) is not None:
        found.add("power")
    elif kind == "fn" and node[1] in UNEVALUATED:
        found.add(node[1])
    elif kind == "fn" and node[1] not in _ANOTHER_WAY_TO_WRITE_A_POWER and not symbols(node):
        found.add("function")
    return found


def _flat(node: Node, kind: str) -> list[Node]:
    return [
        inner for part in node[1:] for inner in (_flat(bare(part), kind) if bare(part)[0] == kind else [bare(part)])
    ]


def _with_like_parts(tree: Node) -> set[str]:
    """3x + 2x, 108π/3, (4π/3) · 27, x · x^2, x^7/x^2, ∛8 in a canonical tree."""
    found: set[str] = set().union(*(_with_like_parts(part) for part in tree if isinstance(part, tuple)))
    kind, parts = tree[0], tree[1:]
    if kind == "add" and _twice(content(part)[1] for part in parts):
        found.add("sum")
    elif kind == "div":
        number, rest = content(parts[1])
        if (
            not rest
            and abs(number) > 1
            and parts[0][0] != "num"
            and (_content_of_sum(parts[0]) / number).denominator == 1
        ):
            found.add("quotient")
        if set(_bases(_factors(parts[0]))) & set(_bases(_factors(parts[1]))):
            found.add("quotient")
    elif kind == "mul":
        numbers = [content(part)[0] for part in parts if part[0] in ("num", "div")]
        if _multiply(numbers) or _twice(base for base in _bases(parts) if base[0] != "add"):
            found.add("product")
    elif kind == "pow" and parts[0][0] == "num" and parts[1][0] == "num" and _perfect(parts[0][1], parts[1][1]):
        found.add("power")
    return found


def _bases(factors: Iterable[Node]) -> list[Node]:
    """What is raised to a whole power in each factor that is no number: x√x and √x/x are as short as they get."""
    powers = (part[1] if part[0] == "pow" and _whole(part[2]) else part for part in factors)
    return [base for base in powers if base[0] != "num"]


def _multiply(numbers: list[Fraction]) -> bool:
    """Whether factors can be multiplied: (4/3) · 27, (1/3) · 3; but not 5 · (1/4)."""
    above = [abs(number.numerator) for number in numbers if abs(number.numerator) != 1]
    below = [number.denominator for number in numbers if number.denominator != 1]
    return len(above) > 1 or len(below) > 1 or bool(above and below and gcd(above[0], below[0]) > 1)


def _twice(parts: Iterable[object]) -> bool:
    return max(Counter(map(repr, parts)).values(), default=0) > 1


def content(tree: Node) -> tuple[Fraction, tuple[Node, ...]]:
    """The numeric factor of a canonical tree, and its other factors in order."""
    kind = tree[0]
    if kind == "num":
        return tree[1], ()
    if kind == "neg":
        number, rest = content(tree[1])
        return -number, rest
    if kind == "mul":
        found = [content(part) for part in tree[1:]]
        number = Fraction(1)
        for factor, _ in found:
            number *= factor
        return number, tuple(sorted((part for _, rest in found for part in rest), key=repr))
    if kind == "div":
        (top, above), (bottom, below) = content(tree[1]), content(tree[2])
        return (top / bottom if bottom else top), (*above, *(("div", part) for part in below))
    if kind == "pow" and tree[1][0] == "num" and tree[2][:2] == ("num", Fraction(1, 2)):
        return _square_root(tree)
    return Fraction(1), (tree,)


def _square_root(tree: Node) -> tuple[Fraction, tuple[Node, ...]]:
    """√18 is 3 · √2."""
    radicand, outside = tree[1][1], 1
    if radicand.denominator != 1 or not 0 < radicand < _LARGEST_RADICAND:
        return Fraction(1), (tree,)
    inside, factor = int(radicand), 2
    while factor * factor <= inside:
        while inside % (factor * factor) == 0:
            inside, outside = inside // (factor * factor), outside * factor
        factor += 1
    return Fraction(outside), () if inside == 1 else (("pow", ("num", Fraction(inside), 0), tree[2]),)


def _content_of_sum(tree: Node) -> Fraction:
    """The largest whole number in all terms."""
    if tree[0] != "add":
        return content(tree)[0]
    numbers = [content(part)[0] for part in tree[1:]]
    whole = all(number.denominator == 1 for number in numbers)
    return Fraction(gcd(*(int(number) for number in numbers))) if whole else Fraction(1)


def _perfect(base: Fraction, exponent: Fraction) -> bool:
    """Whether a root of a number comes out even."""
    if exponent.denominator == 1 or base.denominator != 1 or not 0 < base < _LARGEST_RADICAND:
        return False
    return bool(round(int(base) ** (1 / exponent.denominator)) ** exponent.denominator == base)
