"""What an expression is worth: exactly where it is rational, else in floats, confirmed with fifty digits.

Two expressions with names in them are compared at points drawn from the names. Unequal ones differ almost everywhere,
so floats settle nearly all of them; equality is only believed after fifty digits at several points. Sizes are bounded
before a power or a factorial is taken: a tower raises `TooLargeError` instead of filling the memory.
"""

from __future__ import annotations

import cmath
import math
import threading
import zlib
from fractions import Fraction
from importlib import import_module
from typing import Any

from reasonlab.grading.expression import UNEVALUATED, Node, UnreadableError, symbols

MOST_BITS = 60_000  # of an exact number
MOST_MAGNITUDE = 1_000_000  # binary exponent of an inexact one
DIGITS = 50
WIDE = 10  # from this draw on, names stand for larger numbers: floor(n/2) and floor(n/3) agree on small ones


class TooLargeError(UnreadableError):
    """The value is beyond every gold answer, and beyond what we are willing to compute."""


def exact(node: Node) -> Fraction | None:
    """The value as a fraction, or None where it is irrational or has names in it."""
    kind = node[0]
    if kind == "num":
        value: Fraction = node[1]
        return value
    if kind in ("sym", "inf"):
        return None
    if kind == "pow":
        return _exact_power(node)
    if kind == "fn":
        return _exact_function(node)
    parts = [exact(part) for part in node[1:]]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if kind == "add":
        return _bounded(sum(known, Fraction(0)))
    if kind == "neg":
        return -known[0]
    if kind == "mul":
        return _bounded(known[0] * known[1])
    if known[1] == 0:
        raise UnreadableError("division by zero")
    return _bounded(known[0] / known[1])


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MOST_BITS:
        raise TooLargeError
    return value


def _exact_power(node: Node) -> Fraction | None:
    base, exponent = exact(node[1]), exact(node[2])
    if base is None or exponent is None:
        return None
    if exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent.numerator) * size > MOST_BITS and abs(base) != 1:
            raise TooLargeError
        if base == 0 and exponent < 0:
            raise UnreadableError("division by zero")
        if abs(base) == 1:
            return base if exponent.numerator % 2 else abs(base)
        return base**exponent.numerator
    if exponent.denominator == 2 and base >= 0:  # a square root that comes out even
        top, bottom = math.isqrt(base.numerator), math.isqrt(base.denominator)
        if top * top == base.numerator and bottom * bottom == base.denominator:
            return _exact_power(("pow", ("num", Fraction(top, bottom), 0), ("num", Fraction(exponent.numerator), 0)))
    return None


def _exact_function(node: Node) -> Fraction | None:
    values = [exact(part) for part in node[2:]]
    name = node[1]
    first = values[0]
    if first is None:
        return None
    if name == "abs":
        return abs(first)
    if name == "floor":
        return Fraction(math.floor(first))
    if name == "ceil":
        return Fraction(math.ceil(first))
    if first.denominator != 1 or first < 0:
        return None
    if name == "factorial":
        if first > 100_000_000:
            raise TooLargeError
        return _bounded(Fraction(math.factorial(first.numerator))) if first <= 4000 else None
    second = values[1] if len(values) > 1 else None
    if name == "binom" and second is not None and second.denominator == 1 and second >= 0:
        return _bounded(Fraction(math.comb(first.numerator, second.numerator))) if first <= 6000 else None
    if name in ("gcd", "lcm") and second is not None and second.denominator == 1:
        return Fraction(getattr(math, name)(first.numerator, second.numerator))
    return None


def point(name: str, draw: int, signed: bool) -> Fraction:
    """A value for a name: the same for both sides, different for each draw, never a special number."""
    noise = zlib.crc32(f"{draw}/{name}".encode())
    value = Fraction(524_288 + noise % 1_500_007, 1 << (20 if draw < WIDE else 13))  # 0.5 to 1.93, or 64 to 247
    return -value if signed and noise >> 21 & 1 else value


def evaluate_float(node: Node, draw: int) -> complex:
    """Quick and rough. Raises ArithmeticError or ValueError where floats do not reach."""
    kind = node[0]
    if kind == "num":
        return complex(node[1])
    if kind == "sym":
        constant = _FLOAT_CONSTANTS.get(node[1])
        return complex(point(node[1], draw, False)) if constant is None else constant
    if kind == "inf":
        return complex(math.inf)
    if kind == "fn":
        return _float_function(node[1], [evaluate_float(part, draw) for part in node[2:]])
    values = [evaluate_float(part, draw) for part in node[1:]]
    if kind == "add":
        return sum(values)
    if kind == "mul":
        return values[0] * values[1]
    if kind == "div":
        return values[0] / values[1]
    if kind == "neg":
        return -values[0]
    if values[0].real < 0 and values[0].imag == 0 and _odd_root(node[2]):
        raise ArithmeticError("a real root of a negative number")
    return values[0] ** values[1]


def _odd_root(node: Node) -> bool:
    """Whether an exponent is 1/3, 2/5, …: of a negative number the real root is meant."""
    value = exact(node)
    return value is not None and value.denominator > 1 and value.denominator % 2 == 1


_FLOAT_CONSTANTS = {"π": complex(math.pi), "ℯ": complex(math.e), "ⅈ": 1j}
_CMATH = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh,
    "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan, "ln": cmath.log, "exp": cmath.exp,
    "sqrt": cmath.sqrt,
}  # fmt: skip


def _float_function(name: str, values: list[complex]) -> complex:
    if name in _CMATH:
        return _CMATH[name](values[0])
    if name == "log":
        return cmath.log(values[0]) / (cmath.log(values[1]) if len(values) > 1 else 1)
    if name == "abs":
        return complex(abs(values[0]))
    raise ArithmeticError(name)  # the rest is left to fifty digits


_local = threading.local()


def _context() -> Any:
    """mpmath changes the precision of its context as it works, so every thread has its own."""
    if not hasattr(_local, "context"):
        _local.context = import_module("mpmath").MPContext()
        _local.context.dps = DIGITS
    return _local.context


def evaluate(node: Node, draw: int, signed: bool) -> Any:
    """Fifty digits, as an mpmath number."""
    mp = _context()
    kind = node[0]
    if kind == "num":
        return mp.mpf(node[1].numerator) / node[1].denominator
    if kind == "sym":
        if node[1] in ("π", "ℯ", "ⅈ"):
            return {"π": +mp.pi, "ℯ": +mp.e, "ⅈ": mp.j}[node[1]]
        value = point(node[1], draw, signed)
        return mp.mpf(value.numerator) / value.denominator
    if kind == "inf":
        return mp.inf
    values = [evaluate(part, draw, signed) for part in node[1:] if isinstance(part, tuple)]
    if kind == "fn":
        return _checked(_function(mp, node[1], values))
    if kind == "add":
        return mp.fsum(values)
    if kind == "mul":
        return _checked(values[0] * values[1])
    if kind == "div":
        return _checked(values[0] / values[1])
    if kind == "neg":
        return -values[0]
    return _checked(_power(mp, values[0], values[1], node[2]))


def _checked(value: Any) -> Any:
    mp = _context()
    if mp.isfinite(value) and value != 0 and abs(mp.mag(value)) > MOST_MAGNITUDE:
        raise TooLargeError
    return value


def _power(mp: Any, base: Any, exponent: Any, exponent_node: Node) -> Any:
    if base == 0 or not (mp.isfinite(base) and mp.isfinite(exponent)):
        return base**exponent
    if abs(exponent) * abs(mp.log(abs(base))) > MOST_MAGNITUDE * 0.6:
        raise TooLargeError
    if mp.im(base) == 0 and mp.re(base) < 0 and _odd_root(exponent_node):
        value = exact(exponent_node)
        assert value is not None
        root = -((-mp.re(base)) ** (mp.mpf(1) / value.denominator))
        return root**value.numerator
    return base**exponent


def _function(mp: Any, name: str, values: list[Any]) -> Any:
    first = values[0]
    if name in UNEVALUATED:  # linear, with an unknown factor that depends on the limits; a product is no sum
        return values[1] ** first if name == "prod" else first * values[1]
    if not mp.isfinite(first):
        raise UnreadableError(name)
    if name == "factorial":
        if abs(first) > 100_000:
            raise TooLargeError
        return mp.gamma(first + 1)
    if name in ("exp", "sinh", "cosh", "tanh", "coth") and abs(first) > MOST_MAGNITUDE * 0.6:
        raise TooLargeError
    if name in ("sin", "cos", "tan", "cot", "sec", "csc") and abs(mp.mag(first) if first else 0) > 5000:
        raise TooLargeError
    if name == "binom":
        if abs(first) > 100_000 or abs(values[1]) > 100_000:
            raise TooLargeError
        return mp.binomial(first, values[1])
    if name in ("log", "lg"):
        base = values[1] if len(values) > 1 else (10 if name == "lg" else mp.e)
        return mp.log(first) / mp.log(base)
    if name == "cbrt":
        return mp.cbrt(first)
    names = {
        "arcsin": "asin",
        "arccos": "acos",
        "arctan": "atan",
        "arccot": "acot",
        "abs": "fabs",
        "Re": "re",
        "Im": "im",
    }
    usable = ("sin cos tan cot sec csc sinh cosh tanh coth ln exp sqrt floor ceil " + " ".join(names)).split()
    if name not in usable or len(values) > 1:
        raise UnreadableError(name)
    return getattr(mp, names.get(name, name))(first)


def equal(a: Node, b: Node) -> bool:
    """Whether two expressions agree at every point we look. Raises UnreadableError where that is not defined."""
    if a == b:
        return True
    if _unevaluated(a) or _unevaluated(b):
        # equal parts make equal sums; parts that differ may still have the same sum
        if not _agree(a, b, [0, 1], signed=False):
            raise UnreadableError("a sum or an integral")
        return True
    if symbols(a) or symbols(b):
        draws = [0, 1, *range(WIDE, WIDE + 4)] if _steps(a) or _steps(b) else [0, 1]
        return _agree(a, b, draws, signed=True)
    exact_a, exact_b = exact(a), exact(b)
    if exact_a is not None and exact_b is not None:
        return exact_a == exact_b
    return _agree(a, b, [0], signed=False)


def _unevaluated(node: Node) -> bool:
    if node[0] == "fn" and node[1] in UNEVALUATED:
        return True
    return any(_unevaluated(part) for part in node if isinstance(part, tuple))


def _steps(node: Node) -> bool:
    """Whether a tree has a function that is flat between jumps."""
    if node[0] == "fn" and node[1] in ("floor", "ceil"):
        return True
    return any(_steps(part) for part in node if isinstance(part, tuple))


def _agree(a: Node, b: Node, draws: list[int], signed: bool) -> bool:
    for draw in draws:
        try:
            rough = evaluate_float(a, draw), evaluate_float(b, draw)
        except (ArithmeticError, ValueError):
            continue
        size = max(abs(rough[0]), abs(rough[1]))
        if math.isfinite(size) and abs(rough[0] - rough[1]) > 1e-3 * size and size > 1e-9:
            return False
    for draw in draws:
        if not close(*_both(a, b, draw, False)):
            return False
    if signed:  # |x| and x part where x is negative; ln(x^2) and 2 ln x are not asked there
        mp = _context()
        try:
            left, right = _both(a, b, 7, True)
        except UnreadableError:
            return True
        if mp.im(left) == 0 and mp.im(right) == 0 and mp.isfinite(left) and mp.isfinite(right):
            return close(left, right)
    return True


def _both(a: Node, b: Node, draw: int, signed: bool) -> tuple[Any, Any]:
    try:
        return evaluate(a, draw, signed), evaluate(b, draw, signed)
    except (ArithmeticError, ValueError, TypeError, NotImplementedError) as error:
        raise UnreadableError(str(error)) from error


def close(a: Any, b: Any, digits: int = 35) -> bool:
    mp = _context()
    if mp.isnan(a) or mp.isnan(b):
        raise UnreadableError("no number")
    if not (mp.isfinite(a) and mp.isfinite(b)):
        return bool(a == b)
    size = max(abs(a), abs(b))
    if a == 0 or b == 0:  # what is left where digits cancel
        return bool(size < mp.mpf(10) ** -digits)
    return bool(abs(a - b) <= size * mp.mpf(10) ** -digits)


def rounds_to(node: Node, decimal: Fraction, decimals: int) -> bool:
    """Whether a number without names is the decimal, to all the decimals given."""
    value = exact(node)
    if value is not None:
        return bool(abs(value - decimal) * 10**decimals <= Fraction(501, 1000))
    mp = _context()
    result = evaluate(node, 0, False)
    return bool(abs(result - mp.mpf(decimal.numerator) / decimal.denominator) * mp.mpf(10) ** decimals <= 0.501)


def ratio_constant(a: Node, b: Node, draws: int = 4) -> Any:
    """b/a where it is the same at all points, else None. Two equations with such sides say the same."""
    ratio = None
    for draw in range(draws):
        left, right = _both(a, b, draw, False)
        if left == 0 or right == 0:
            raise UnreadableError("zero on one side")
        if ratio is None:
            ratio = right / left
        elif not close(ratio, right / left, 30):
            return None
    return ratio
