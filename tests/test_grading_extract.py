"""Extraction: which marks make an answer, and that nothing else does."""

from __future__ import annotations

import pytest

from reasonlab.grading.extract import Policy, extract


def answer(text: str, policy: Policy | str = Policy.EXPLICIT) -> str | None:
    found = extract(text, policy)
    return found.answer if found else None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}"),
        (r"\boxed{1}, no wait: \boxed{2}", "2"),
        (r"\boxed{3} and then \boxed{4", "3"),  # the last box that closes
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed 7 is it", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"$x=\boxed{1}$ and $x=\boxed{2}$", "1, 2"),
        (r"\boxed{1}, \boxed{2} \text{ or } \boxed{3}", "1, 2, 3"),
        (r"\boxed{6}. So \boxed{6}", "6"),
        ("<answer>42</answer>", "42"),
        ("<answer> 1 </answer> no: <answer> 2 </answer>", "2"),
        (r"<answer>the sum is \boxed{9}</answer>", "9"),
        ("#### 10\nNo.\n#### 1,234", "1,234"),
        ("Answer: 42", "42"),
        ("**Answer:** 42", "42"),
        ("The final answer is $x^2$. I hope it is correct.", "x^2"),
        ("ANSWER: x^2", "x^2"),
        ("<think>so \\boxed{1}</think> \\boxed{2}", "2"),
        ("<think>so \\boxed{1}</think> I do not know", None),
        ("<think>so \\boxed{1}", None),  # cut off while thinking
        ("there are 12 of them", None),  # no mark, no answer
        (r"\boxed{12", None),
        ("", None),
    ],
)
def test_rewards_take_marked_answers_only(text: str, expected: str | None) -> None:
    assert answer(text) == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("boxed", "1"), ("tag", "2"), ("hash", "3"), ("marker", "4"), ("explicit", "1")],
)
def test_a_policy_says_which_mark_counts(policy: str, expected: str) -> None:
    text = "\\boxed{1}\n<answer>2</answer>\n#### 3\nAnswer: 4\n"
    assert answer(text, policy) == expected
    others = text.replace({"1": "\\boxed{1}", "2": "<answer>2</answer>", "3": "#### 3", "4": "Answer: 4"}[expected], "")
    assert (answer(others, policy) is None) == (policy != "explicit")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("There are 12 of them.", "12"),
        ("It costs $1,234.50", "1,234.50"),
        ("so $x = 3$ is the one", "x = 3"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("x + 1", "x + 1"),
        ("AZYUK2A", None),  # a digit in a word is no number
    ],
)
def test_only_the_free_policy_guesses(text: str, expected: str | None) -> None:
    assert answer(text, "free") == expected
    if "Answer" not in text:
        assert answer(text) is None


def test_an_unknown_policy_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such"):
        extract("1", "no such")


@pytest.mark.parametrize(
    "text",
    [r"\boxed{" * 100_000, "{" * 1_000_000, "####" * 250_000, "<answer>" * 100_000, "Answer: " * 100_000, "$" * 10**6],
)
@pytest.mark.parametrize("policy", list(Policy))
def test_megabytes_of_marks_are_scanned_in_linear_time(text: str, policy: Policy) -> None:
    extract(text, policy)  # a quadratic scan would run into the suite's timeout
