"""Answers that are worth the gold answer and still have to be computed are not right, where the question is known."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
from benchmark_scripts import load_script
from hypothesis import given
from hypothesis import strategies as st

from reasonlab.evaluate.graders import grader_for
from reasonlab.grading.command import grade_row
from reasonlab.grading.finished import RULE, leaves_work
from reasonlab.grading.grade import Grade
from reasonlab.grading.verifier import grade_answer, grade_quickly
from reasonlab.problems.problem import Problem

DATA = Path(os.environ.get("REASONLAB_DATA") or Path(__file__).parents[2] / "shared" / "bench")

# (answer, gold): all of these pass every comparison by value.
OPEN = [
    ("36 + 54", "90"), ("6+6+4+4", "20"), (r"35 \times 6", "210"), (r"9 \cdot \frac{8}{9}", "8"),
    ("2 \\times 1", "2"), (r"\frac{80}{-8}", "-10"), (r"\frac{4 - (6 - 4)}{2} + 6", "7"), ("4^2", "16"),
    (r"\sqrt{3600}", "60"), (r"\frac{\sqrt{4}}{4}", r"\frac{1}{2}"), ("513^2 - 487^2", "26000"), (r"\log_2 64", "6"),
    (r"\binom{31}{28}", "4495"), ("5!", "120"), (r"|(1 - i)^8|", "16"),
    (r"\arcsin\left(-\frac{1}{2}\right)", r"-\frac{\pi}{6}"), (r"\log_8(4)", "2/3"),
    (r"\sin 20^\circ \sin 40^\circ \sin 60^\circ \sin 80^\circ", r"\frac{3}{16}"), ("(-2 - i)(i - 2)", "5"),
    (r"\tan 100^\circ + 4 \sin 100^\circ", r"-\sqrt{3}"), (r"2 \sqrt{3} + 1 + 2", r"3+2\sqrt{3}"),
    ("(1+2i)6-3i", "6+9i"), ("(u+4)(u-1) - (u-3)(u+6)", "14"), ("15x + 1 - 81", "15x - 80"),
    ("(-k + 4) + (-2 + 3k)", "2k+2"), (r"\frac{(10r^3 s)(4r^6)}{8r^4 s}", "5r^5"),
    (r"\frac{\sec x}{\sin x} - \frac{\sin x}{\cos x}", r"\cot x"),
    (r"0.\overline{7}-0.\overline{4}+0.\overline{2}", r"\frac 59"), (r"\log_8(4)", r"\log_8(4)=\frac{2}{3}"),
    ("x = 2 + 3", "5"), ("(1+1, 3)", "(2,3)"), (r"\frac{21}{2^2 \cdot 5^7}", ".0000672"), (r"1^{470846046}", "1"),
    (r"0.75x^{3/4 - 1}", r"\frac{3}{4} x^{-1/4}"), (r"\frac{\frac{1}{2}}{3}", r"\frac16"), ("2, 1+2", "2, 3"),
    ("3i - 7i", "-4i"), (r"\sqrt{-9}", "3i"), ("3 + 3i - 1", "2+3i"), ("'36 + 54'", "90"), ('36" + 54"', "90"),
    ("x = '36+54'", "90"), (r"\~{36+54}", "90"), ("'513^2 - 487^2'", "26000"),
    (r"3 \begin{pmatrix}2&-4\\1&5\end{pmatrix}", r"\begin{pmatrix}6&-12\\3&15\end{pmatrix}"),
    (r"36+54 \approx 0", "90"), (r"x = 36+54 \approx 1", "90"), (r"\sqrt{7^2-1^2} \approx 6.93", r"4\sqrt3"),
    (r"\sqrt{49-1} \approx 7", r"4\sqrt3"), (r"V = \frac43\pi(3)^3 \approx 113.1", r"36\pi"), ("720:8", "90"),
    ("x = 720:8", "90"), (r"720:8 \text{ dollars}", "90"), ("(720:8, 2)", "(90,2)"), ("36 54/1", "90"),
    (r"35 \cdot (6 \cdot 10^0)", "210"),
    (r"\frac{180+0i}{2}", "90"), (r"\frac{6+10i}{2}", "3+5i"), (r"\text{step 2} 36+54", "90"), ("123+211", "334_5"),
    (r"\begin{vmatrix}7&3\\-1&2\end{vmatrix}", "17"), (r"36\pi+54\pi", r"90\pi"), ("3x+2x", "5x"),
    ("x^7/x^2", "x^5"), (r"\frac{a^2b}{a}", "ab"), (r"\frac{(x+1)^3}{(x+1)^2}", "x+1"),
    (r"\sqrt{18}+\sqrt{50}", r"8\sqrt2"), (r"\frac{108\pi}{3}", r"36\pi"), (r"\frac{4\pi}{3}\cdot 27", r"36\pi"),
    ("x^2x^3", "x^5"), (r"\sqrt[3]{8}\pi", r"2\pi"), (r"(90r-44r)\cdot\frac{2^{70000}}{2^{70000}}", "46r"),
]  # fmt: skip

# Another dress of a worked-out answer stays right.
CLOSED = [
    ("90.0", "90"), (r"\frac{36}{27}", r"\frac{4}{3}"), ("0.75", r"\frac34"), (r"\frac{1}{4}", "0.25"),
    ("-1.5", r"-\frac32"), ("4/3", r"1 \frac{1}{3}"), ("2 1/2", "2.5"), (r"-2\frac34", "-2.75"),
    (r"8.7 \times 10^5", "870000"), ("10^3", "1000"), ("6.02e23", r"6.02\times 10^{23}"), (r"10^{-3}", "0.001"),
    (r"0.\overline{3}", "1/3"), (r"50\%", "0.5"), (r"\$12.00", "12"), (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"\frac{10}{\sqrt5}", r"2\sqrt5"), (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"), ("3^4/4", r"\frac{3^{4}}{4}"),
    ("(3^2)^3", "3^6"), (r"2^{10} - 1", r"2^{10}-1"), (r"\ln 4", r"2\ln 2"), (r"-\log_5 2", r"-\frac{\ln 2}{\ln 5}"),
    ("(p+7)^2", "p^2+14p+49"), ("p^2+14p+49", "(p+7)^2"), ("4 + x", "x+4"), (r"\frac{\sin x}{\cos x}", r"\tan x"),
    ("x = 5", "5"), ("8 + 24 = 32", "32"), ("1 < x < 3", "(1,3)"), (r"x \le 1", r"(-\infty, 1]"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)"), (r"3 \pm \sqrt2", r"3+\sqrt2, 3-\sqrt2"),
    ("6, -6", r"x=-6 \text{ or } x=6"), (r"\frac{\sqrt3}{3} \approx 0.577", r"\frac{\sqrt3}{3}"), ("500 cm", "5 m"),
    ("1,234", "1234"), (r"60^\circ", "60"), ("6:4", "3:2"), (r"\binom{n}{2}", r"\frac{n!}{2!(n-2)!}"),
    ("e^2", r"\exp(2)"), (r"\exp(2)", "e^2"), ("3i", r"\sqrt{-9}"), ("9i + 6", "6+9i"),
    (r"5\frac{\pi^2}{4}", r"\frac{5 \pi^2}{4}"),
    (r"-\frac{1+5i}{13}", r"-\frac{1}{13}-\frac{5}{13}i"), ("-i", r"-1 \cdot i"), (r"\text{Answer: } 5", "5"),
    (r"\text{The total is } 90", "90"), (r"\text{Total cost: } \$90", "90"), (r"\text{Area: } 12\pi", r"12\pi"),
    ("1024 = 2^{10}", "1024"), (r"120 = \binom{10}{3}", "120"), ("90 = 36 + 54", "90"),
    (r"\mathbb{R} \setminus \{3\}", r"(-\infty,3)\cup(3,\infty)"), ("2x-y+1=0", "y=2x+1"), ("y-2x=1", "y=2x+1"),
    ("0x^2+0xy+1y^2-4x-6y+9=0", "y^2 - 4x - 6y + 9 = 0"),
    (r"\frac15\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1/5\\2/5\end{pmatrix}"),
    (r"\frac{\sqrt3}{3} \approx 0.577", "0.577"), (r"\frac{7}{2} \approx 3.5", "3.5"),
    (r"\frac{\sqrt{x}}{x}", r"\frac{1}{\sqrt{x}}"), (r"x\sqrt{x}", "x^{3/2}"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), OPEN)
def test_what_has_to_be_computed_is_right_by_worth_alone(answer: str, gold: str) -> None:
    assert grade_answer(answer, gold).verdict == "correct"
    grade = grade_answer(answer, gold, question="How much is it?")
    assert grade.verdict == "wrong"
    assert grade.rule in (RULE, "unreadable")


@pytest.mark.parametrize(("answer", "gold"), CLOSED)
def test_a_worked_out_answer_in_another_dress_stays_right(answer: str, gold: str) -> None:
    assert grade_answer(answer, gold, question="How much is it?").verdict == "correct"


@pytest.mark.parametrize(
    ("question", "answer", "gold"),
    [
        (r"Find the product: $(7 a+7 b)(7 a-7 b)$", "(7a + 7b)(7a - 7b)", "49 a^{2}-49 b^{2}"),
        (r"Simplify: $\sqrt{72}$.", r"\sqrt{72}", r"6 \sqrt{2}"),
        (r"Write $8.7 \times 10^{5}$ without exponents.", r"8.7 \times 10^5", "870000"),
        (
            r"For positive numbers, $\left(\sqrt[3]{a^{36}}\right)^{\frac12}=$?",
            r"\left(\sqrt[3]{a^{36}}\right)^{\frac{1}{2}}",
            "a^{12}+a^{11}/a^{5}-a^{12}",
        ),
        (r"Expand \begin{align*} &(x+2)(x+3) \\ \end{align*}", "(x+2)(x+3)", "x^2+5x+6"),
        (r"Let $y = (x+2)(x+3)$. Expand.", "(x+2)(x+3)", "x^2+5x+6"),
        (r"Simplify \(\frac{36}{27}\)", r"\frac{36}{27}", r"\frac{4}{3}"),
        (r"Write as one logarithm: $$\log _{5}(x)-3$$", r"\log_5(x) - 3", r"\log _{5}\left(\frac{x}{125}\right)"),
    ],
)
def test_a_formula_of_the_question_is_no_answer_to_it(question: str, answer: str, gold: str) -> None:
    assert grade_answer(answer, gold, question="Something else.").verdict == "correct"
    assert grade_answer(answer, gold, question=question).rule == RULE


@pytest.mark.parametrize(
    "answer",
    [
        "(x+2)(x+3)",
        "(x+3)(x+2)",
        "(2+x)(x+3)",
        r"1 \cdot (x+2)(x+3)",
        "(x+2)(x+3) + 0",
        "((x+2)(x+3))",
        "-(-(x+2)(x+3))",
        r"\frac{(x+2)(x+3)}{1}",
        "(x+2)^1(x+3)",
        "y = (x+2)(x+3)",
        r"(x+2)(x+3) \text{ units}",
        "(x+2.0)(x+3)",
        r"y = (x+2)(x+3) \approx 1",
        r"\frac{1}{\frac{1}{(x+2)(x+3)}}",
        r"\exp(\ln((x+2)(x+3)))",
        r"\frac{x(x+2)(x+3)}{x}",
        r"\frac{x+2}{(x+3)^{-1}}",
        r"\frac{x+2}{\frac{1}{x+3}}",
    ],
)
def test_a_formula_of_the_question_is_known_in_disguise(answer: str) -> None:
    question = "Expand the product ${(x+2)(x+3)}$."
    assert grade_answer(answer, "x^2+5x+6", question=question).rule == RULE
    assert grade_answer("6 + 5x + x^2", "x^2+5x+6", question="Is it $x^2 + 6 + 5x$?").verdict == "correct"


def test_names_in_a_chain_hide_nothing() -> None:
    for answer, gold in ((r"5 \in |36+54+0x|", "90"), (r"1 \le x \le |2+0y|", "[1,2]"), (r"\frac{12.5}{0.4}", "31.25")):
        assert grade_answer(answer, gold).verdict == "correct"
        assert grade_answer(answer, gold, question="").rule == RULE
    assert grade_answer("x^2+2xy+y^2", "(x+y)^2", question="").verdict == "correct"


def test_a_number_of_the_question_may_be_the_answer() -> None:
    question = r"Which is larger, $0.5$ or $0.25$, and which letter is it, $x$ or $y$? Is $x=4$ or \(3/4\)?"
    assert grade_answer("x = 4", "4", question=question).verdict == "correct"
    assert grade_answer("3/4", r"\frac{3}{4}", question=question).verdict == "correct"
    assert grade_answer("0.5", "0.50", question=question).verdict == "correct"
    assert grade_answer("0.5", r"\frac{1}{2}", question="Write $0.5$ as a fraction.").rule == RULE
    assert grade_answer(r"\frac{57}{160}", ".35625", question=r"Write $\frac{57}{160}$ as a decimal.").rule == RULE
    assert grade_answer("x", "x", question=question).verdict == "correct"


def test_the_gold_answer_as_it_is_written_is_right_whatever_it_leaves_open() -> None:
    gold = r"\frac{36}{27} + 5^2"
    assert grade_answer(gold, gold, question=rf"What is ${gold}$?").verdict == "correct"
    assert grade_answer(gold.replace(" ", ""), gold, question=rf"What is ${gold}$?").verdict == "correct"


def test_an_approximation_is_no_second_guess() -> None:
    for answer, gold in (
        (r"(3,4) \approx (4,3)", "(4,3)"),
        (r"x+1 \approx x-1", "x-1"),
        (r"7 = 36+54", "7"),
        ("36 54/1", "90"),
        (r"36\frac{-108}{-2}", "90"),
    ):
        assert grade_answer(answer, gold, question="").verdict == "wrong"
    assert grade_answer(r"(\pi, 1) \approx (3.14, 1)", "(3.14, 1)").verdict == "correct"


def test_what_only_math_verify_can_read_is_not_worked_out() -> None:
    for answer in ("'36 + 54'", "x = '36+54'", r"\~{36+54}"):
        assert grade_answer(answer, "90").rule == "math-verify"
        assert grade_answer(answer, "90", question="").rule == "unreadable"


def test_looping_answers_are_wrong_not_errors() -> None:
    for answer in ("a " * 500, "i " * 500, "90" + "%" * 500, "90" + "!" * 500, "x" + "^1" * 300, "'(x+1)^{9999}'"):
        for gold in ("90", "x", "x^2+1", r"\sqrt{2}"):
            grade = grade_quickly(answer, gold, kind="answer", question="Simplify.")
            assert isinstance(grade, Grade), answer[:20]
            assert grade.verdict == "wrong"


def test_open_integrals_and_sums_are_wrong_without_asking_anybody() -> None:
    """math-verify takes too long for some of them, and a timeout is not trained as wrong."""
    for answer, gold in (
        (r"\int_{-\infty}^{\infty} e^{-x^2} \, dx", r"\sqrt{\pi}"),
        (r"\sum_{n = 1}^\infty \frac{F_{n + 1}}{F_n F_{n + 2}}", "2"),
        (r"\begin{pmatrix}1\\2\end{pmatrix} + \begin{pmatrix}1\\5\end{pmatrix}", r"\begin{pmatrix}2\\7\end{pmatrix}"),
    ):
        grade = grade_quickly(answer, gold, kind="answer", question="Compute it.")
        assert not isinstance(grade, tuple)
        assert (grade.verdict, grade.rule) == ("wrong", RULE)
    assert not leaves_work(r"\sum_{k=0}^{n} b_k a_k", r"\sum_{k=0}^{n} a_k b_k")
    assert leaves_work(r"54 \mod 6", "0")
    assert not leaves_work(r"x \equiv 3 \mod 7", "3")


def test_training_and_evaluation_want_answers_worked_out() -> None:
    problem = Problem("p", "Janet has 36 + 54 eggs. How many?", "90", "gsm8k", 1)
    for extraction in ("boxed", "explicit", "tiny"):
        grader = grader_for(extraction, "mathematics")
        mark = "Answer: {}" if extraction == "tiny" else r"\boxed{{{}}}"
        assert grader(problem, mark.format("36 + 54")).rule == RULE
        assert grader(problem, mark.format("90")).verdict == "correct"


def test_the_grade_command_reads_a_question() -> None:
    row = {"prediction": r"\boxed{36 + 54}", "gold": "90"}
    assert grade_row(row)["verdict"] == "correct"
    assert grade_row({**row, "question": "How many?"})["verdict"] == "wrong"


@given(st.integers(-999, 999), st.integers(1, 99), st.integers(-99, 99).filter(bool))
def test_a_number_is_right_as_a_number_and_not_as_a_sum_or_product(value: int, denominator: int, other: int) -> None:
    gold = str(Fraction(value, denominator))
    fraction = rf"\frac{{{value}}}{{{denominator}}}"
    assert (grade_answer(fraction, gold, question="").verdict == "correct") == (value % denominator != 0)
    assert grade_answer(f"{value - other} + {other}", str(value), question="").rule == RULE
    assert grade_answer(rf"{other} \cdot {value}", str(other * value), question="").rule == RULE


@pytest.mark.parametrize("name", ["math500", "college_math", "olympiadbench", "math_train"])
def test_rewritten_golds_stay_right_with_their_question(name: str) -> None:
    files = sorted(DATA.glob(f"{name}.jsonl*"))
    if not files:
        pytest.skip("no benchmark data: set REASONLAB_DATA")
    seen = 0
    with gzip.open(files[0], "rt") if files[0].suffix == ".gz" else files[0].open() as lines:
        for line in itertools.islice(lines, 500):
            row = json.loads(line)
            for _, rewrite in load_script("grading").rewrites(str(row["answer"])):
                by_worth = grade_quickly(rewrite, str(row["answer"]), kind="answer")
                if isinstance(by_worth, tuple) or by_worth.verdict != "correct":
                    continue  # math-verify's, or a list that looks like a number
                seen += 1
                grade = grade_quickly(rewrite, str(row["answer"]), kind="answer", question=row["problem"])
                assert not isinstance(grade, tuple), rewrite
                assert grade.verdict == "correct", (rewrite, row["answer"], grade.rule)
    assert seen > 2000


def test_the_benchmark_counts_copies_and_rewrites(tmp_path: Path) -> None:
    rows = [
        {"problem": "Expand the product ${(x+2)(x+3)}$.", "answer": "x^2+5x+6"},
        {"problem": "If $x = 4$, what is $x^2 - 12$?", "answer": "4"},
    ]
    with gzip.open(tmp_path / "math_train.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    script = load_script("grading_finished")
    assert script.measure_copies(tmp_path).startswith("copies: of 2 as it is 1, times one 0")
    assert script.measure_rewrites(tmp_path).startswith("rewrites: 0 of")
