"""Finds test problems inside training texts: exact copies and near ones.

Two texts are the same *exactly* when their letters and digits are (case, blanks, signs, drawings and spellings of LaTeX
aside). They are *near* when enough of one lies in the other, measured in windows of 60 bytes of that normal form:

* at least 70 % of the problem's windows lie in the training text (a copy with a few words changed, or in a longer one);
* or at least 90 % of the training text's windows lie in the problem (a copy that was cut);
* a problem shorter than 90 bytes must lie in the training text whole, in windows of 30.

The numbers were measured, see docs/benchmarks.md: 21 of the 25 pairs that 70 % finds and 80 % does not have the same
gold, but only 11 of the 44 that 60 % would add. The windows of the problems are hashed into an index once; training
texts stream past it in blocks of a megabyte, so memory does not grow with the pool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

LONG_WINDOW, SHORT_WINDOW = 60, 30  # bytes; a Chinese character has three
SHORT_TEXT = 90  # a problem below this is looked for whole
NEAR_SHARE = 0.7
CUT_SHARE = 0.9
MOST_OWNERS = 64  # a window in more problems than this is an instruction, not a problem
BLOCK_BYTES = 1 << 20
LONGEST_TEXT = 100_000  # characters of a training text that are looked at

Hashes = NDArray[np.uint64]
Indices = NDArray[np.int64]

_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_NOISE = re.compile(r"[\W_]+")
_BLANKS = re.compile(r"[\s${}:;?!]+|[.,](?!\s*\d)")
# Spellings of LaTeX that look the same, or nearly: one set writes \dfrac and \leqslant, another \frac and \le.
_SPELLINGS = (
    (re.compile(r"\\(?:left|right|big+[lr]?|displaystyle|limits|q?quad|operatorname|bbb)(?![a-z])"), ""),
    (re.compile(r"\\(?:math(?:rm|bf|bb)|text(?:rm|bf|it)?)(?![a-z])"), ""),
    (re.compile(r"\\[dt]frac"), "frac"),
    (re.compile(r"\\([lg]e)q(?:slant)?(?![a-z])"), r"\1"),
    (re.compile(r"\\[lc]?dots[bcim]?(?![a-z])"), "dots"),
)
_FILTER_BITS = 24
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
_BYTE_VALUES = np.random.default_rng(60).integers(1, 1 << 63, 256, dtype=np.uint64)


class Item(NamedTuple):
    """A test problem: whose it is, and its text."""

    benchmark: str
    problem: str
    text: str


@dataclass(frozen=True, slots=True)
class Match:
    """A training text (by its number) and a test problem it overlaps with."""

    row: int
    benchmark: str
    problem: str
    kind: Literal["exact", "near"]
    share: float  # of the problem found in the training text


def normal_form(text: str) -> bytes:
    """Letters and digits alone, lower-case. A text too short for that to tell it from others keeps its signs."""
    spelled = text[:LONGEST_TEXT].lower()
    if "\\" in spelled:
        for pattern, spelling in _SPELLINGS:
            spelled = pattern.sub(spelling, spelled)
    form = _NOISE.sub("", _DRAWING.sub("", spelled)).encode(errors="replace")
    return form if len(form) >= SHORT_WINDOW else b"=" + _BLANKS.sub("", spelled).encode(errors="replace")


class OverlapIndex:
    """The problems of some benchmarks, ready to be found in training texts."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._owners: list[list[tuple[str, str]]] = []  # the problems that share a normal form
        self._number: dict[bytes, int] = {}
        for item in items:
            form = normal_form(item.text)
            number = self._number.setdefault(form, len(self._owners))
            if number == len(self._owners):
                self._owners.append([])
            self._owners[number].append((item.benchmark, item.problem))
        forms = list(self._number)
        self._long = _Windows(forms, LONG_WINDOW, lambda size: size >= SHORT_TEXT)
        self._short = _Windows(forms, SHORT_WINDOW, lambda size: SHORT_WINDOW <= size < SHORT_TEXT)

    def matches(self, texts: Iterable[str]) -> Iterator[Match]:
        """Every overlap of every text, in the order of the texts."""
        for first, forms in _blocks(texts):
            yield from self._block(first, forms)

    def _block(self, first: int, forms: list[bytes]) -> Iterator[Match]:
        shares: dict[tuple[int, int], float] = {}
        sizes = np.array([len(form) for form in forms])
        for row, number, count, total in self._long.shared(forms):
            of_row = count / max(1, sizes[row] - LONG_WINDOW + 1)
            if count >= NEAR_SHARE * total or (of_row >= CUT_SHARE and sizes[row] >= SHORT_TEXT):
                shares[row, number] = count / total
        for row, number, count, total in self._short.shared(forms):
            if count == total:
                shares[row, number] = 1.0
        exact = {(row, self._number[form]) for row, form in enumerate(forms) if form in self._number}
        for row, number in sorted(exact | shares.keys()):
            kind: Literal["exact", "near"] = "exact" if (row, number) in exact else "near"
            share = 1.0 if kind == "exact" else shares[row, number]
            for benchmark, problem in self._owners[number]:
                yield Match(first + row, benchmark, problem, kind, share)


class _Windows:
    """A sorted table of window hashes with the texts that own them, and a bit filter before it."""

    def __init__(self, forms: Sequence[bytes], width: int, indexed: Callable[[int], bool]) -> None:
        self.width = width
        chosen = [number for number, form in enumerate(forms) if indexed(len(form))]
        hashes, rows = _windows([forms[number] for number in chosen], width)
        owners = np.array(chosen, dtype=np.int64)[rows] if chosen else rows
        order = np.lexsort((owners, hashes))
        hashes, owners = hashes[order], owners[order]
        if len(hashes):  # a window counts once for its problem, and not at all where it is everybody's
            fresh = np.r_[True, (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])]
            hashes, owners = hashes[fresh], owners[fresh]
            _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
            rare = counts[inverse] <= MOST_OWNERS
            hashes, owners = hashes[rare], owners[rare]
        self.hashes, self.owners = hashes, owners
        self.totals = np.bincount(owners, minlength=len(forms))
        self.filter = np.zeros(1 << _FILTER_BITS, dtype=bool)
        self.filter[hashes >> np.uint64(64 - _FILTER_BITS)] = True

    def shared(self, forms: Sequence[bytes]) -> Iterator[tuple[int, int, int, int]]:
        """For each text and problem with windows in common: both numbers, how many they share, the problem's total."""
        hashes, rows = _windows(forms, self.width)
        passed = self.filter[hashes >> np.uint64(64 - _FILTER_BITS)]  # most windows of most texts end here
        hashes, rows = hashes[passed], rows[passed]
        start = np.searchsorted(self.hashes, hashes, "left")
        count = np.searchsorted(self.hashes, hashes, "right") - start
        found = np.repeat(np.arange(len(hashes)), count)
        place = start[found] + np.arange(len(found)) - np.repeat(np.cumsum(count) - count, count)
        # A text that repeats itself must not count a window twice: distinct (row, place) pairs only.
        pairs = np.unique(rows[found] * max(1, len(self.hashes)) + place)
        row, owner = pairs // max(1, len(self.hashes)), self.owners[pairs % max(1, len(self.hashes))]
        both, shared = np.unique(row * len(self.totals) + owner, return_counts=True)
        for pair, number in zip(both.tolist(), shared.tolist(), strict=True):
            row_number, owner_number = divmod(pair, len(self.totals))
            yield row_number, owner_number, number, int(self.totals[owner_number])


def _blocks(texts: Iterable[str]) -> Iterator[tuple[int, list[bytes]]]:
    """Normal forms in blocks of about a megabyte, each with the number of its first text."""
    first, forms, size = 0, list[bytes](), 0
    for text in texts:
        forms.append(normal_form(text))
        size += len(forms[-1])
        if size >= BLOCK_BYTES:
            yield first, forms
            first, forms, size = first + len(forms), [], 0
    if forms:
        yield first, forms


def _windows(forms: Sequence[bytes], width: int) -> tuple[Hashes, Indices]:
    """The hash of every window of every text, and the text it is in.

    A polynomial hash modulo 2^64: with prefix sums of value x base^place, a window's hash is a difference times an
    inverse power, so that all windows of a block cost a handful of array operations.
    """
    sizes = np.array([len(form) for form in forms], dtype=np.int64)
    letters = np.frombuffer(b"".join(forms), dtype=np.uint8)
    count = len(letters) - width + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    powers, inverses = _powers(_BASE, len(letters)), _powers(pow(_BASE, -1, 1 << 64), count)
    sums = np.zeros(len(letters) + 1, dtype=np.uint64)
    np.cumsum(_BYTE_VALUES[letters] * powers, out=sums[1:])
    hashes = (sums[width:] - sums[:-width]) * inverses
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)  # the filter looks at the high bits: mix the low ones into them
    rows = np.repeat(np.arange(len(forms)), sizes)
    inside = rows[:count] == rows[width - 1 :]
    return hashes[inside], rows[:count][inside]


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, dtype=np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)
