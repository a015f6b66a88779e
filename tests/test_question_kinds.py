"""Which questions cannot be rewarded by their final answer: by what a row says of itself, else by its text and gold."""

from __future__ import annotations

from typing import Any

import pytest

from reasonlab.problems.question_kinds import MULTIPLE_CHOICE, NO_GOLD, PROOF, TRUE_FALSE, UNREADABLE_GOLD, unfit

LETTERS = "A train needs 3 hours for 240 km. How fast is it?\n(A) 60 km/h (B) 70 km/h (C) 80 km/h (D) 90 km/h"
AMC = (
    r"What is $7^2-1$? $\textbf{(A)}\ 42 \qquad \textbf{(B)}\ 44 \qquad \textbf{(C)}\ 46 \qquad \textbf{(D)}\ 48 "
    r"\qquad \textbf{(E)}\ \dfrac{97}{2}$"
)


@pytest.mark.parametrize(
    ("question", "gold", "kind"),
    [
        (LETTERS, "C", MULTIPLE_CHOICE),
        (LETTERS, r"$\text{(C)}$", MULTIPLE_CHOICE),
        (LETTERS, "80", MULTIPLE_CHOICE),  # four short options are a menu
        (AMC, r"\textbf{(D)}", MULTIPLE_CHOICE),
        (AMC, "48", MULTIPLE_CHOICE),
        ("Which number is prime?\nA. 21\nB. 23\nC. 25", "B", MULTIPLE_CHOICE),
        ("Which number is prime?\nA) $21$ cm\nB) $23$ cm\nC) $25$ cm", "23", MULTIPLE_CHOICE),
        ("How long is the rope?\nA 9\nB 11\nC 12\nD 16", "11", MULTIPLE_CHOICE),
        ("下列哪些数是素数（ ）\nA．21 B．23 C．29 D．33", "BC", MULTIPLE_CHOICE),
        ("Which statements hold? (a) $x>0$ (b) $x<0$ (c) $x=0$", "(b)", MULTIPLE_CHOICE),
        ('Is the curve a circle or an ellipse? Enter "C" for circle, "E" for ellipse.', r"\text{(E)}", MULTIPLE_CHOICE),
        ("Type the letter of the graph that falls everywhere.", "D", MULTIPLE_CHOICE),
        ("Every square is a rectangle. True or false?", "True", TRUE_FALSE),
        ("Are there integers with $m^2 = 2n^2 + 3$?", r"$\text{ No }$", TRUE_FALSE),
        ("Decide whether the lines are parallel.", "yes.", TRUE_FALSE),
        ("True or false: (i) 2 is prime, (ii) 4 is prime.", "T, F", TRUE_FALSE),
        ("1 是素数。判断对错。", "错", TRUE_FALSE),
        ("Prove that the sum of two odd numbers is even.", "2k", PROOF),
        ("Let $n$ be odd. Show that $n^2-1$ is divisible by $8$.", "8", PROOF),
        ("设 $a>b$。求证：$a+1>b+1$。", "a+1>b+1", PROOF),
        ("What is 2+2?", "", NO_GOLD),
        ("What is 2+2?", r" $\text{ }$ ", NO_GOLD),
        ("Find the area.", r"\frac{1}{2", UNREADABLE_GOLD),
        ("Find all $n$.", "We first look at the prime factors of the number and see that two is one.", UNREADABLE_GOLD),
    ],
)
def test_questions_that_cannot_be_rewarded(question: str, gold: str, kind: str) -> None:
    assert unfit(question, gold) == kind


@pytest.mark.parametrize(
    ("question", "gold"),
    [
        ("What is 2+2?", "4"),
        ("What is the 50th letter of the pattern ABCABC...?", "B"),
        ("Express the sum in terms of $R$, the circumradius.", "R"),
        ("Which of the variables $a, b, c$ is the largest?", "c"),
        ("Find numbers with (A) an odd first digit, (B) an even last digit, and (C) exactly three digits.", "5"),
        ("Determine all $f$ with $f(A)+f(B)+f(C)+f(D)=0$ for every square $ABCD$.", "0"),
        ("Events have $P(A) = 0.2$, $P(B) = 0.6$, $P(C) = 0.14$. Find $P(A+B+C)$.", "0.14"),
        ("(a) Find $x$ if $2x = 8$. (b) Find $y$ if $y = x+1$. (c) Find $xy$.", "20"),
        ('[asy]label("(A)",a);label("(B)",b);label("(C)",c);label("(D)",d);[/asy] Find the length.', "12"),
        ("A test has ten true or false questions. How many ways are there to fill it in?", "1024"),
        ("How many girls answer yes?", "11"),
        ("Show that the area does not depend on $r$, and find it.", "8"),
        ("Find the limit or prove that it does not exist.", "11"),
        ("Five dice are rolled. Compute the probability that all show the same number.", "1/1296"),
        ("Records show that the home team won twice as often. It won 12 of its matches; they drew none", "6"),
        ("证明直线过定点，并求此定点。", "(1, 0)"),
        ("Solve $x^2<4$.", "all real numbers between $-2$ and $2$"),
        ("Find the sum.", r"We add them all and get \boxed{12}, which is what the question has asked for."),
        ("Give the set.", r"\{1, 2\}"),
    ],
)
def test_questions_that_can(question: str, gold: str) -> None:
    assert unfit(question, gold) is None


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"choices": ["3", "4"]}, MULTIPLE_CHOICE),
        ({"question_type": "MCQ"}, MULTIPLE_CHOICE),
        ({"kind": "multiple-choice"}, MULTIPLE_CHOICE),
        ({"answer_type": "True/False"}, TRUE_FALSE),
        ({"problem_type": "proof"}, PROOF),
        ({"question_type": "math-word-problem", "type": "Algebra", "choices": []}, None),
    ],
)
def test_a_row_that_says_what_it_is(row: dict[str, Any], kind: str | None) -> None:
    assert unfit("What is 2+2?", "4", row) == kind
