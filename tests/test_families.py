"""The tiny world: its families, their worked solutions, and its splits."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from family_oracles import ORACLES
from hypothesis import given, settings
from hypothesis import strategies as st

from reasonlab.errors import UserError
from reasonlab.keys import key
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.__main__ import page
from reasonlab.problems.families import FAMILIES, Solution, Step, parse, render
from reasonlab.problems.families.steps import ParsedStep, plausible_mistake
from reasonlab.problems.tiny_world import (
    Drawn,
    Split,
    draw,
    family_of,
    levels_of,
    problem_set,
    split_of,
    stream,
    verify,
)

SPLITS: tuple[Split, ...] = ("train", "validation", "test", "harder")
DRAWS = 10_000
LONGEST_WORKED = 66  # tokens at level 5
LONGEST_CHECKED = 150

each_family = pytest.mark.parametrize("family", FAMILIES)


@cache
def sample(family: str) -> list[Drawn]:
    """Many draws of one family, by both ways of drawing, over all splits and levels."""
    cells = [(split, level) for split in SPLITS for level in levels_of(split)]
    drawn = [draw(family, level, split, index) for split, level in cells for index in range(30)]
    for split in SPLITS:
        share = 0.80 if split == "train" else 0.05
        drawn += islice(stream(split, seed=1, families=[family]), int(share * DRAWS))
    assert len(drawn) >= DRAWS
    return drawn


def calculate(expression: str) -> int:
    """The value of ``a``, ``a op b`` or ``a-b*c``, independently of the code under test."""
    parts = re.fullmatch(r"(-?\d+)(?:([-+*/%])(.+))?", expression)
    assert parts is not None
    if parts[2] is None:
        return int(parts[1])
    a, b = int(parts[1]), calculate(parts[3])
    if parts[2] in "/%":
        return a // b if parts[2] == "/" else a % b
    return {"+": a + b, "-": a - b, "*": a * b}[parts[2]]


def balanced(equation: str) -> bool:
    left, right = equation.split("=")
    return calculate(left) == calculate(right)


def repaired(steps: list[ParsedStep]) -> Iterator[ParsedStep]:
    """The steps that count; a step marked wrong must be done again at once."""
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if step.verdict == "no":
            assert following is not None
            assert (following.expression, following.verdict) == (step.expression, "ok")
        else:
            yield step


@each_family
def test_solutions_are_right_in_every_style(family: str) -> None:
    rng = Random(key("test", family))
    mistakes = 0
    for problem, solution in sample(family):
        assert problem.answer == solution.answer
        answer = parse(render(solution, "answer", rng))
        worked = parse(render(solution, "worked", rng))
        checked = parse(render(solution, "checked", rng, mistakes=0.2))
        assert (answer.style, worked.style, checked.style) == ("answer", "worked", "checked")
        assert answer.answer == worked.answer == checked.answer == solution.answer
        assert all(calculate(step.expression) == step.result for step in worked.steps)
        assert all(step.check and balanced(step.check) for step in checked.steps)
        for step in checked.steps:
            assert (calculate(step.expression) == step.result) == (step.verdict == "ok")
        kept = [(step.expression, step.result) for step in repaired(checked.steps)]
        assert kept == [(step.expression, step.result) for step in worked.steps]
        assert len(checked.steps) - len(kept) <= 2
        mistakes += len(checked.steps) - len(kept)
    assert mistakes > DRAWS / 10


@each_family
def test_gold_answers_agree_with_an_independent_solution(family: str) -> None:
    for problem, _ in sample(family)[::4]:
        assert ORACLES[family](problem.question) == problem.answer, problem.question


@each_family
def test_the_verifier_tells_right_from_wrong(family: str) -> None:
    rng = Random(key("perturb", family))
    for problem, _ in sample(family):
        assert verify(problem, problem.answer)
        assert verify(problem, f" 0{problem.answer} ")
        digits = re.split(r"(\D)", problem.answer)
        place = rng.randrange(0, len(digits), 2)
        digits[place] = str(plausible_mistake(int(digits[place]), rng))
        assert not verify(problem, "".join(digits))


@each_family
def test_steps_stay_small(family: str) -> None:
    for _, solution in sample(family):
        assert solution.steps
        for step in solution.steps:
            assert min(step.a, step.b, step.result) >= 0
            assert max(step.a, step.b, step.result) < 10_000
            if step.op == "*":
                assert min(step.a, step.b) > 0
                assert min(len(str(step.a).rstrip("0")), len(str(step.b).rstrip("0"))) == 1


@each_family
def test_texts_fit_the_tokenizer_and_the_length_limits(family: str) -> None:
    tokenizer = TinyTokenizer.load()
    rng = Random(0)
    drawn = sample(family)
    texts = {
        "prompt": [f"<bos>{problem.question}\n" for problem, _ in drawn],
        "worked": [render(solution, "worked", rng) + "<eos>" for _, solution in drawn],
        "checked": [render(solution, "checked", rng) + "<eos>" for _, solution in drawn],
    }
    for kind, limit in (("prompt", 45), ("worked", LONGEST_WORKED), ("checked", LONGEST_CHECKED)):
        encoded = tokenizer.encode_batch(texts[kind])
        for (problem, _), text, ids in zip(drawn, texts[kind], encoded, strict=True):
            assert tokenizer.unknown_id not in ids
            assert tokenizer.decode(ids) == text
            assert problem.level > 5 or len(ids) <= limit


@each_family
def test_every_word_of_a_question_is_one_token(family: str) -> None:
    tokenizer = TinyTokenizer.load()
    for problem, _ in sample(family)[::20]:
        pieces = [tokenizer.decode([i]).strip() for i in tokenizer.encode(problem.question)]
        assert [piece for piece in pieces if piece.isalpha()] == re.findall("[A-Za-z]+", problem.question)


@each_family
def test_draws_belong_to_their_split_and_levels(family: str) -> None:
    for problem, _ in sample(family):
        name, level, split, _ = problem.id.split("/")
        assert (name, int(level)) == (problem.family, problem.level)
        assert split_of(problem.question) == split
        assert problem.level in levels_of(split)
        assert problem.question.endswith("?")


@each_family
def test_equal_questions_have_equal_answers(family: str) -> None:
    answers: dict[str, str] = {}
    for problem, _ in sample(family):
        assert answers.setdefault(problem.question, problem.answer) == problem.answer


@each_family
def test_every_level_has_many_questions(family: str) -> None:
    for level in range(1, 8):
        rng = Random(key("variety", family, level))
        questions = {FAMILIES[family].generate(level, rng)[0] for _ in range(1500)}
        assert len(questions) >= 300


@each_family
def test_higher_levels_take_more_steps(family: str) -> None:
    steps: dict[int, list[int]] = {}
    for problem, solution in sample(family):
        steps.setdefault(problem.level, []).append(len(solution.steps))
    mean = {level: sum(counts) / len(counts) for level, counts in steps.items()}
    assert mean[1] <= 2.5
    assert mean[1] < mean[3] <= mean[5] <= mean[7]


def test_a_draw_can_be_made_again_alone() -> None:
    assert draw("word", 4, "test", 17) == draw("word", 4, "test", 17)
    assert draw("word", 4, "test", 17) != draw("word", 4, "test", 18)
    assert draw("word", 4, "test", 17, seed=1).problem.id == "word/4/test/1-000017"
    assert draw("word", 4, "test", 17).problem.id == "word/4/test/000017"


def test_draws_are_the_same_on_every_machine() -> None:
    assert draw("sum", 3, "train", 0).problem.question == "63+99+74+43=?"


def test_streams_repeat_and_follow_their_weights() -> None:
    first = list(islice(stream("train", 3, ["sum", "gcd"], {1: 3.0, 5: 1.0}), 2000))
    assert first == list(islice(stream("train", 3, ["sum", "gcd"], {1: 3.0, 5: 1.0}), 2000))
    assert first[:20] != list(islice(stream("train", 4, ["sum", "gcd"], {1: 3.0, 5: 1.0}), 20))
    levels = [drawn.problem.level for drawn in first]
    assert set(levels) == {1, 5}
    assert 0.7 < levels.count(1) / len(levels) < 0.8
    assert len({drawn.problem.id for drawn in first}) == 2000


def test_problem_sets_are_balanced_and_distinct() -> None:
    problems = problem_set("test", 240)
    cells = [(problem.family, problem.level) for problem in problems]
    assert {cells.count(cell) for cell in cells} == {4}
    assert len(set(cells)) == 60
    assert len({problem.question for problem in problems}) == len({problem.id for problem in problems}) == 240


def test_a_smaller_problem_set_is_a_prefix() -> None:
    assert problem_set("harder", 31) == problem_set("harder", 70)[:31]
    assert problem_set("harder", 31) != problem_set("harder", 31, seed=1)


def test_a_problem_set_can_be_narrowed() -> None:
    problems = problem_set("validation", 10, families=["gcd"], levels=[2, 3])
    assert {(problem.family, problem.level) for problem in problems} == {("gcd", 2), ("gcd", 3)}
    assert family_of(problems[0]) is FAMILIES["gcd"]


def test_a_scarce_cell_leaves_room_for_the_others() -> None:
    problems = problem_set("test", 150, families=["base", "sum"], levels=[1])
    scarce = sum(problem.family == "base" for problem in problems)
    assert 20 < scarce < 60
    assert len({problem.question for problem in problems}) == 150


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: problem_set("test", 5, families=["sums"]), "no family 'sums'"),
        (lambda: problem_set("test", 5, levels=[6]), "no level 6"),
        (lambda: stream("train", level_weights={9: 1.0}), "no level 9"),
        (lambda: problem_set("test", 1000, families=["base"], levels=[1]), "has only"),
    ],
)
def test_impossible_wishes_are_user_errors(ask, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=message):
        ask()


def test_the_format_is_exactly_the_documented_one() -> None:
    solution = Solution((Step("+", 37, 85), Step("+", 122, 12)), "134")
    rng = Random(0)
    assert render(solution, "answer", rng) == "Answer:134"
    assert render(solution, "worked", rng) == "<think>37+85=122;122+12=134</think>Answer:134"
    assert render(solution, "checked", rng) == (
        "<think>37+85=122 check 122-85=37 ok;122+12=134 check 134-12=122 ok</think>Answer:134"
    )


@pytest.mark.parametrize(
    ("step", "claimed", "expected"),
    [
        (Step("+", 37, 85), 122, ("122-85=37", True)),
        (Step("-", 122, 85), 37, ("37+85=122", True)),
        (Step("*", 23, 7), 161, ("161/7=23", True)),
        (Step("*", 23, 7), 164, ("164%7=3", False)),
        (Step("/", 943, 23), 41, ("41*23=943", True)),
        (Step("/", 947, 23), 41, ("947-41*23=4", True)),
        (Step("/", 947, 23), 40, ("947-40*23=27", False)),
        (Step("%", 84, 36), 12, ("84-12=36*2", True)),
        (Step("%", 84, 36), 13, ("84-13=71", False)),
        (Step("%", 84, 36), 48, ("84-48=36", False)),
    ],
)
def test_checks_reverse_the_step(step: Step, claimed: int, expected: tuple[str, bool]) -> None:
    assert step.check(claimed) == expected


numbers = st.integers(0, 9999)


@settings(deadline=None)
@given(st.sampled_from("+-*/%"), numbers, numbers, st.integers(-100, 100) | st.integers(-(10**8), 10**8))
def test_a_check_confirms_exactly_the_right_result(op: str, a: int, b: int, distance: int) -> None:
    step = Step(op, a, max(b, 1) if op in "/%" else b)
    for claimed in (step.result, step.result + distance, distance):
        check, confirmed = step.check(claimed)
        assert confirmed == (claimed == step.result)
        assert balanced(check)


@settings(deadline=None)
@given(st.integers(0, 9999), st.integers(0))
def test_planted_mistakes_are_wrong_and_not_negative(right: int, seed: int) -> None:
    assert 0 <= plausible_mistake(right, Random(seed)) != right


@settings(deadline=None)
@given(st.sampled_from(list(FAMILIES)), st.text() | st.from_regex(r"\s*[-+]?[0-9]*[r/]?[-+0-9]*\s*"))
def test_garbage_is_wrong_and_never_an_exception(family: str, answer: str) -> None:
    gold = {"division": "41r4", "fraction": "11/12"}.get(family, "134")
    right = FAMILIES[family].verify(answer, gold)
    assert not right or re.search(r"[1-9]", answer)


AWKWARD = ["", "/", "1/0", "0/0", "9" * 5000, "1e3", "\u0661\u0662", "1_1", "0x86", "134;", "1 34"]


@pytest.mark.parametrize("answer", AWKWARD)
@each_family
def test_awkward_answers_are_wrong(family: str, answer: str) -> None:
    gold = {"division": "11r0", "fraction": "11"}.get(family, "134")
    assert FAMILIES[family].verify(answer, gold) is False


def test_equal_values_in_other_clothes_are_right() -> None:
    assert FAMILIES["sum"].verify(" +0134\n", "134")
    assert FAMILIES["fraction"].verify("22/24", "11/12")
    assert FAMILIES["fraction"].verify("6/2", "3")
    assert FAMILIES["fraction"].verify("3/1", "3")
    assert FAMILIES["division"].verify("41", "41r0")
    assert not FAMILIES["division"].verify("41", "41r4")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "134",
        "<think>1+1=2",
        "<think></think>Answer:2",
        "<think>1+1</think>Answer:2",
        "<think>1+1=2;</think>Answer:2",
        "<think>1+1=2 check 2-1=1 ok;2+1=3</think>Answer:3",
        "<think>1+1=2 check 2-1=1 maybe</think>Answer:2",
    ],
)
def test_text_outside_the_format_does_not_parse(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a|some steps"):
        parse(text)


@settings(deadline=None)
@given(st.text())
def test_parse_raises_nothing_but_value_errors(text: str) -> None:
    with contextlib.suppress(ValueError):
        parse(f"<think>{text}</think>Answer:1")


def test_the_page_about_the_tiny_world_is_up_to_date() -> None:
    written = Path(__file__).parents[1] / "docs" / "tiny-world.md"
    assert written.read_text(encoding="utf-8") == page()
