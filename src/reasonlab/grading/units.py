"""Units after a number: taken off, and compared only where both answers have one we know."""

from __future__ import annotations

import re
from fractions import Fraction

_SIZES: dict[str, dict[str, tuple[int | Fraction, str]]] = {
    "length": {
        "mm": (1, "millimeter millimetre"),
        "cm": (10, "centimeter centimetre cms"),
        "dm": (100, "decimeter"),
        "m": (1000, "meter metre"),
        "km": (1_000_000, "kilometer kilometre kms"),
        "in": (Fraction(254, 10), "inch inches"),
        "ft": (Fraction(3048, 10), "foot feet"),
        "yd": (Fraction(9144, 10), "yard"),
        "mi": (1_609_344, "mile"),
    },
    "time": {
        "ms": (Fraction(1, 1000), "millisecond"),
        "s": (1, "second sec secs"),
        "min": (60, "minute mins"),
        "h": (3600, "hour hr hrs"),
        "day": (86400, ""),
        "week": (604800, ""),
    },
    "months": {"month": (1, ""), "yr": (12, "year yrs")},
    "mass": {"mg": (1, "milligram"), "g": (1000, "gram"), "kg": (1_000_000, "kilogram kgs")},
    "pounds": {"lb": (16, "lbs pound"), "oz": (1, "ounce")},
    "money": {"cent": (1, "¢"), "dollar": (100, "usd bucks")},
    "volume": {"ml": (1, "mL milliliter millilitre"), "l": (1000, "L liter litre")},
    "force": {"N": (1, "newton"), "kN": (1000, "kilonewton")},
    "energy": {"J": (1, "joule"), "kJ": (1000, "kilojoule")},
    "power": {"W": (1, "watt"), "kW": (1000, "kilowatt")},
}
_OTHERS = "unit mph kph rpm mol V volt A amp K Hz Pa kPa atm eV rad radian gal gallon cup ppm dB yuan euro rupee"


def _table() -> dict[str, tuple[str, Fraction]]:
    table: dict[str, tuple[str, Fraction]] = {}
    for dimension, units in _SIZES.items():
        for name, (size, others) in units.items():
            for word in [name, *others.split()]:
                table[word] = (dimension, Fraction(size))
                if len(word) > 2:
                    table[word + "s"] = (dimension, Fraction(size))
    for word in _OTHERS.split():
        table[word] = table[word + "s"] = (word, Fraction(1))
    return table


_UNITS = _table()
_ENDING = re.compile(
    r"\s*(?:\\text\s*\{([^{}]*)\}|(?<![A-Za-z\\])([A-Za-z][A-Za-z. ]*))\s*(?:\^\s*\{?\s*(-?\d)\s*\}?)?\s*$"
)
_POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_SYMBOLS = re.compile(r"[A-Za-z¢]+|\^\s*\{?-?\d\}?|[/*]")
_ENDS_LIKE_A_VALUE = re.compile(r"(?:[\d)}\]!%]|\\deg|\\pi)\s*$")

Unit = tuple[tuple[tuple[str, int], ...], Fraction]  # dimensions with their powers, and the size


def read_unit(text: str) -> Unit | None:
    """`cm^2`, `square meters`, `m/s`, `miles per hour`; None for words that are no unit."""
    powers: dict[str, int] = {}
    size, sign, next_power, last = Fraction(1), 1, 1, ""
    for word in _SYMBOLS.findall(text.replace(" per ", " / ").replace(r"\cdot", "*")):
        if word in ("/", "*"):
            sign = -1 if word == "/" else sign
        elif word[0] == "^":
            if not last:
                return None
            extra = (int(word.strip("^{} ")) - 1) * sign
            powers[_UNITS[last][0]] += extra
            size *= _UNITS[last][1] ** extra
        elif word.lower() in _POWER_WORDS:
            power = _POWER_WORDS[word.lower()]
            if word.lower().endswith("d") and last:
                powers[_UNITS[last][0]] += (power - 1) * sign
                size *= _UNITS[last][1] ** ((power - 1) * sign)
            else:
                next_power = power
        else:
            last = word if word in _UNITS else word.lower()
            if last not in _UNITS:
                return None
            dimension, factor = _UNITS[last]
            powers[dimension] = powers.get(dimension, 0) + sign * next_power
            size *= factor ** (sign * next_power)
            next_power = 1
    if not last:
        return None
    return tuple(sorted((d, p) for d, p in powers.items() if p)), size


def split_unit(text: str) -> tuple[str, Unit | None]:
    """The value and the unit after it. Any `\\text{…}` after a value goes; bare words only if they are units."""
    unit = ""
    rest = text
    while match := _ENDING.search(rest):
        in_text = match.group(1) is not None
        words = match.group(1) if in_text else match.group(2)
        before = rest[: match.start()]
        power = f"^{match.group(3)}" if match.group(3) else ""
        joined = before.rstrip().endswith(("/", r"\cdot", "*"))
        known = read_unit(words + power) is not None or words.strip().lower() in _POWER_WORDS
        apart = len(words.strip()) > 1 or " " in match.group(0) or joined  # 5 m is a length, 5m may be a product
        if not before.strip() or not (known if known or not in_text else _ENDS_LIKE_A_VALUE.search(before)):
            break
        name = words.strip() if not in_text and len(words.strip()) == 1 else ""
        if (not in_text and not apart) or (name and re.search(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])", before)):
            break  # the s of s^2 + ω^2 s is no second
        unit = words + power + unit
        rest = before.rstrip()
        if joined:
            unit = ("/" if rest.endswith("/") else "*") + unit
            rest = rest.removesuffix(r"\cdot").rstrip("/* ")
        elif known:
            break
    if not rest or unit[:1] in ("/", "*"):
        return text, None
    return rest, read_unit(unit)
