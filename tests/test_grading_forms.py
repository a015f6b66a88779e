"""One form for all arrangements of an expression: it keeps the value, and no order or sign tells it apart."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasonlab.grading.expression import Node, Parser, tokenise
from reasonlab.grading.forms import canonical, content, irreducible, open_work, plain, size


def tree(text: str) -> Node:
    return Parser(tokenise(text)).parse()


def worth(node: Node, x: float = 1.7) -> complex:
    """The value of a tree, with every name worth x."""
    kind, parts = node[0], [worth(part, x) for part in node[1:] if isinstance(part, tuple)]
    if kind == "num":
        return float(node[1])
    if kind == "sym":
        return x
    if kind == "neg":
        return -parts[0]
    if kind == "div":
        return parts[0] / parts[1]
    if kind == "pow":
        return parts[0] ** parts[1]
    return sum(parts) if kind == "add" else math.prod(parts)


leaves = st.one_of(
    st.integers(-9, 9).map(lambda n: ("num", Fraction(n), 0)),
    st.sampled_from("xyz").map(lambda name: ("sym", name)),
)


def grown(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    several = st.lists(children, min_size=2, max_size=4)
    return st.one_of(
        several.map(lambda parts: ("add", *parts)),
        st.tuples(children, children).map(lambda parts: ("mul", *parts)),
        st.tuples(children, st.integers(1, 9)).map(lambda p: ("div", p[0], ("num", Fraction(p[1]), 0))),
        st.tuples(children, st.integers(1, 3)).map(lambda p: ("pow", p[0], ("num", Fraction(p[1]), 0))),
        children.map(lambda part: ("neg", part)),
    )


trees = st.recursive(leaves, grown, max_leaves=8)


@given(trees)
def test_the_canonical_form_keeps_the_value_and_is_its_own(node: Node) -> None:
    form = canonical(node)
    assert worth(form) == pytest.approx(worth(node), rel=1e-9, abs=1e-9)
    assert canonical(form) == form
    assert size(form) <= size(node) + 1  # 0 · x is a number


@given(trees, st.randoms())
def test_order_ones_and_zeros_do_not_matter(node: Node, random: object) -> None:
    def disguised(inner: Node) -> Node:
        parts = [disguised(part) if isinstance(part, tuple) else part for part in inner[1:]]
        if inner[0] in ("add", "mul"):
            random.shuffle(parts)  # type: ignore[attr-defined]
        return (inner[0], *parts)

    one, nothing = ("num", Fraction(1), 0), ("num", Fraction(0), 2)
    assert canonical(disguised(node)) == canonical(node)
    assert canonical(("mul", one, ("add", nothing, node))) == canonical(node)
    assert canonical(("neg", ("neg", ("div", node, one)))) == canonical(node)


@given(trees)
def test_the_content_is_a_factor(node: Node) -> None:
    form = canonical(node)
    number, rest = content(form)
    factors = [1 / worth(part[1]) if part[0] == "div" and len(part) == 2 else worth(part) for part in rest]
    assert float(number) * math.prod(factors) == pytest.approx(worth(form), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    "text", ["90", "-7", "0.5", "-1/2", "36/27", r"8.7 \times 10^5", "10^{-3}", "6+9i", "-i", "2 1/2"]
)
def test_numbers_as_one_writes_them_are_plain(text: str) -> None:
    assert plain(tree(text))
    assert not open_work(tree(text))


@pytest.mark.parametrize("text", ["3+4", "80/8", "4^2", r"\sqrt{9}", "2*3", r"\frac{6+10i}{2}", "3+0i", "x", r"\pi"])
def test_others_are_not(text: str) -> None:
    assert not plain(tree(text))


@pytest.mark.parametrize(
    ("text", "work"),
    [
        ("3+4", {"sum"}), ("3x+2x", {"sum"}), (r"\sqrt{18}+\sqrt{50}", {"sum"}), ("2x+3y", set()), ("x+2+y-5", {"sum"}),
        (r"36\pi", set()), (r"\frac{108\pi}{3}", {"quotient"}), (r"\frac{135\pi}{180}", set()),
        (r"\frac{4x+8}{4}", {"quotient"}),
        (r"\frac{4\pi}{3} \cdot 27", {"product", "quotient"}), (r"5\frac{\pi^2}{4}", set()),
        (r"\frac{x}{3} \cdot 3", {"quotient"}),
        ("x^2x^3", {"product"}), ("x^2y^3", set()), (r"\sqrt[3]{8}\pi", {"power"}), (r"\sqrt[3]{9}\pi", set()),
        ("2^n", set()),
        (r"\sin 30", {"function"}), (r"\sin x", set()), (r"\log_2 64", {"function"}), (r"\sqrt{12}", set()),
    ],
)  # fmt: skip
def test_the_kinds_of_open_work(text: str, work: set[str]) -> None:
    assert open_work(tree(text)) == work


def test_fractions_in_lowest_terms() -> None:
    assert [irreducible(tree(text)) for text in ("3/4", "6/8", "-7/2", "5", "x", "x+1")] == [
        True,
        False,
        True,
        True,
        True,
        False,
    ]
