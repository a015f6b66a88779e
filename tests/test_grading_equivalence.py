"""Equivalence: the same answer in another dress, and near misses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasonlab.grading.equivalence import decide
from reasonlab.grading.verifier import grade_quickly

SAME = [
    ("12", "12."), ("-3", "−3"), ("007", "7"), ("1,234", "1234"), ("1{,}234", "1234"), (r"1,\!234", "1234"),
    ("1 234 567", "1234567"), ("12.50", "12.5"), (".5", "1/2"), (r"\frac12", "0.5"), (r"\dfrac{2}{4}", r"\frac 1 2"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"2\frac{1}{2}", "5/2"), ("2 1/2", "2.5"), (r"-2\frac34", "-2.75"),
    ("6.02e23", r"6.02\times 10^{23}"), ("10^{-3}", "0.001"), (r"50\%", "0.5"), ("50%", "50"), (r"\$12.00", "12"),
    (r"5\text{ cm}", "5"), ("500 cm", "5 m"), ("12 cm²", r"12\ \text{square centimeters}"), ("90^\\circ", "90"),
    (r"\sqrt{45}", r"3\sqrt5"), (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"), ("2π/3", r"\frac{2}{3}\pi"),
    (r"\sqrt{5+2\sqrt6}", r"\sqrt2+\sqrt3"), (r"0.\overline{3}", "1/3"), ("1.41421356", r"\sqrt{2}"), ("5!", "120"),
    ("6!=720", "720"),
    (r"\binom52", "10"), (r"\log_2 8", "3"), (r"\sin 30^\circ", "1/2"), (r"e^{i\pi}", "-1"), ("3+4i", "4i + 3"),
    ("(x+1)^2", "x^2+2x+1"), (r"\frac{x^2-1}{x-1}", "x+1"), (r"\sqrt{\frac1n}", r"\frac{1}{\sqrt n}"),
    (r"\frac{n!}{k!(n-k)!}", r"\binom{n}{k}"), ("x = 5", "5"), ("f(x)=x^2", "x^2"), ("(p,q)=(3,2)", "(3,2)"),
    ("y=2x+1", "y-2x=1"), ("-34x-45y+20z-100=0", "34x+45y-20z+100=0"), ("-x > -1", "x < 1"), ("5 \\leq x", "x \\ge 5"),
    (r"\{3,2,1\}", "1, 2, 3"), (r"x=2 \text{ or } x=3", "3, 2"), (r"3 \pm \sqrt2", r"3+\sqrt2, 3-\sqrt2"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"), (r"(3,\infty)\cup(-\infty,2)", r"(-\infty,2)\cup(3,\infty)"),
    (r"x<2 \text{ or } x>3", r"(-\infty,2)\cup(3,\infty)"), ("-1 < x \\le 4", "(-1, 4]"), ("6:4", "3:2"),
    ("1011_2", r"1011_{2}"), (r"204_{\text{five}}", "204_5"), (r"\text{(B)}", "B"), ("b", "B"), ("B. 12", "B"),
    ("A, C", "AC"), ("12 apples", "12"), ("a+b=7", "7"), (r"\text{Evelyn}", "evelyn"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    (r"\mathbf{M}^{-1} = \begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"), ("all real numbers", r"(-\infty,\infty)"), ("½", "0.5"),
    (r"\frac{\sqrt3}{3} \approx 0.577", r"\frac{\sqrt3}{3}"),
    (r"\frac{7}{2} \approx 3.5", "3.5"),
    (r"\sum_{k=0}^{n} a_k b_k", r"\sum_{k=0}^{n} b_k a_k"),
]  # fmt: skip

OTHER = [
    ("27648", "27649"), ("100000001", "100000000"), ("0.33", "1/3"), ("3.14", r"\pi"), ("1.4143", r"\sqrt2"),
    ("(1,2)", "(2,1)"), ("[1,2]", "(1,2)"), ("(1,2]", "[1,2)"), (r"\{1,2\}", "1,2,3"), ("1,1,2", "1,2"),
    ("32, 349", "32349"),
    ("x>3", r"x\ge3"), ("x>3", "x<3"), (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2)\cup(4,\infty)"), ("204_5", "204_6"),
    ("5 cm", "5 m"), ("5 cm^2", "5 cm^3"), ("3 hours", "3 minutes"), ("28", "0.28"), ("2x", "3x"), ("|x|", "x"),
    ("f(y)", "f(x)"), ("11a+c", "7 = 11a+c"), ("x^2+y^2=1", "x^2-y^2=1"), ("1:00", "12:00"), ("3:2", "2:3"), ("B", "C"),
    ("(A) 5", "(A) 6"), ("(B)(C)", "B"),
    ("B, C", "B"), ("12 or more", "12"), ("yes", "no"), (r"\pm 3", "3"), (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    ("2022!-1", "2022!-2"),
    (r"\lfloor n/2 \rfloor", r"\lfloor n/3 \rfloor"), (r"4\sqrt{2}", "4"), ("(a+5)(b+2)", "(a+5)(b+3)"), ("", "0"),
    (r"1+\frac1e", r"1-\frac1e"), (r"\int_0^2 f(x) dx", r"\int_0^3 f(x) dx"), ("9^9^9^9", "7"),
    (r"\ln 2", r"\log_{10} 2"), (r"5 \approx 6", "6"), (r"89.6 \approx 90", "90"), (r"s^2+\omega^2 s", r"s^2+\omega^2"),
    (r"-\frac{\pi}{4}", r"y-\arctan(x+y) = -\frac{\pi}{4}"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), SAME)
def test_another_dress_is_the_same_answer(answer: str, gold: str) -> None:
    assert decide(answer, gold)[0] is True
    assert decide(gold, answer)[0] is True


@pytest.mark.parametrize(("answer", "gold"), OTHER)
def test_a_near_miss_is_wrong_and_needs_nobody_elses_word(answer: str, gold: str) -> None:
    assert decide(answer, gold)[0] is False
    assert decide(gold, answer)[0] is False


def test_a_gold_equation_with_nothing_on_its_right_wants_an_equation() -> None:
    assert decide("0", "x + y + z = 0")[0] is False
    assert decide("z + y = -x", "x + y + z = 0")[0] is True
    assert decide("m - n = 0", "0")[0] is True
    assert decide("17", "m + n = 17")[0] is True


def test_a_relative_tolerance_applies_only_when_asked_for() -> None:
    assert decide("3.14", "3.15")[0] is False
    assert decide("3.14", "3.15", tolerance=0.01)[0] is True
    assert decide("100", "101", tolerance=0.02)[0] is True
    assert decide("3.1", "3.15", tolerance=0.01)[0] is False


@given(st.integers(-(10**40), 10**40), st.integers(1, 10**20), st.integers(-3, 3))
def test_fractions_are_compared_exactly(top: int, bottom: int, shift: int) -> None:
    assert decide(rf"\frac{{{top}}}{{{bottom}}}", f"{top + shift}/{bottom}")[0] is (shift == 0)


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_lists_have_no_order_and_tuples_have_one(numbers: list[int], random: object) -> None:
    shuffled = list(numbers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert decide(", ".join(map(str, shuffled)), ", ".join(map(str, numbers)))[0] is True
    row = "(" + ",".join(map(str, numbers)) + ")"
    assert decide("(" + ", ".join(map(str, shuffled)) + ")", row)[0] is (shuffled == numbers)


_PIECES = (
    r"1 2 10 0.5 .5 1,000 x y n e i \pi \frac \sqrt { } ( ) [ ] \{ \} ^ _ ! + - * / = < > \le , ; : \pm \cup | % "
    r"\deg & \\ \text{and} \text{cm} cm \sin \log \binom \begin{pmatrix} \end{pmatrix} \infty \overline \lfloor \sum "
    r"' \approx . ½ ² √ ① ٣ $ \quad"
)


@given(st.lists(st.sampled_from(_PIECES.split()), min_size=1, max_size=25).map("".join), st.sampled_from(SAME))
def test_any_soup_of_symbols_gets_a_verdict_or_a_pair_to_ask_about(soup: str, pair: tuple[str, str]) -> None:
    for gold in (pair[1], soup):
        quick = grade_quickly(soup, gold, kind="answer")
        assert isinstance(quick, tuple) or quick.verdict in ("correct", "wrong") or quick.rule == "empty gold"
    if soup.strip() and "box" not in soup:
        assert grade_quickly(soup, soup, kind="answer").verdict == "correct"  # type: ignore[union-attr]
