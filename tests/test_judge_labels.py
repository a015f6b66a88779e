"""What steps are worth: exactly in the tiny world, by rollouts, by a language model."""

from __future__ import annotations

import json
import re
from collections import Counter
from random import Random
from typing import Any

import pytest
from chat_server import ChatServer, Reply, completion, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from reasonlab.errors import UserError
from reasonlab.grading.grade import Grade, grade
from reasonlab.judges.exact_labels import ExactJudge, exact_labels
from reasonlab.judges.labels import StepLabels, consensus
from reasonlab.judges.llm_labels import judge_prompt, llm_labels
from reasonlab.judges.monte_carlo import MonteCarlo, monte_carlo
from reasonlab.judges.steps import steps_of
from reasonlab.judges.types import Candidate
from reasonlab.keys import key
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.text_format import TinyFormat
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.families import FAMILIES, STYLES, Solution, Step, render
from reasonlab.problems.problem import Problem
from reasonlab.problems.reflections import MISTAKE_SHARES, parse_reflection, reflect, spoiled
from reasonlab.problems.tiny_world import Drawn, draw, levels_of
from reasonlab.rollout.endpoint import Endpoint
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling

each_family = pytest.mark.parametrize("family", FAMILIES)


def candidate(drawn: Drawn, text: str) -> Candidate:
    p = drawn.problem
    return Candidate(p.id, p.question, text, p.answer, None, p.family, p.level)


def labels_of(family: str, question: str, answer: str, steps: str, thought: str, end: str | None = None) -> list[float]:
    """Labels of a thought and an answer, for a problem that is written out here."""
    solution = Solution(tuple(Step(op, int(a), int(b)) for a, op, b in re.findall(r"(\d+)(\D)(\d+)", steps)), answer)
    text = f"<think>{thought}</think>Answer:{answer if end is None else end}"
    one = Candidate(f"{family}/1/train/0", question, text, answer, None, family, 1)
    return list(exact_labels(one, solution).values)


# --- labels ------------------------------------------------------------------------------------------------------


def test_labels_say_values_and_the_first_wrong_step() -> None:
    assert StepLabels.of([1.0, 0.4, 0.9]) == StepLabels((1.0, 0.4, 0.9), 1)
    assert StepLabels.of([0.5, 1]).all_right
    assert StepLabels.until(1, 3) == StepLabels((1.0, 0.0, 0.0), 1)
    assert StepLabels.until(-1, 2) == StepLabels((1.0, 1.0), -1)
    for values, first in (((1.5,), -1), ((float("nan"),), -1), ((1.0,), 1), ((1.0,), -2)):
        with pytest.raises(ValueError, match="step"):
            StepLabels(values, first)


def test_consensus_keeps_what_both_place_alike() -> None:
    first = [StepLabels.until(place, 4) for place in (-1, 1, 2, -1, 0)] + [None]
    second = [StepLabels.until(place, 4) for place in (-1, 1, 3, 2, -1, -1)]
    found = consensus(first, second)
    assert found.kept == (0, 1)
    assert found.share == pytest.approx(2 / 6)
    assert set(found.disagreements.values()) == {1}
    assert "2 of 6 kept" in str(found)
    with pytest.raises(ValueError, match="steps"):
        consensus([StepLabels.until(-1, 2)], [StepLabels.until(-1, 3)])


# --- exact -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(list(FAMILIES)),
    st.integers(1, 7),
    st.integers(0, 10**6),
    st.sampled_from(STYLES),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_worked_solutions_are_right_throughout(
    family: str, level: int, index: int, style: Any, mistakes: float
) -> None:
    drawn = draw(family, level, "train" if level in levels_of("train") else "harder", index)
    labels = exact_labels(candidate(drawn, render(drawn.solution, style, Random(index), mistakes)))
    assert labels.all_right
    assert set(labels.values) == {1.0}


@each_family
def test_planted_mistakes_are_found_where_they_were_planted(family: str) -> None:
    """A true reflection names the place of the mistake, counted over the steps that were not taken back."""
    for level in levels_of("train"):
        for index in range(40):
            drawn = draw(family, level, "train", index)
            style = STYLES[index % 3]
            text = spoiled(drawn, Random(key("planted", family, level, index)), style, mistakes=0.2)
            one = candidate(drawn, text)
            standing = [i for i, step in enumerate(steps_of(one, "tiny")) if " no" not in step]
            reflection = parse_reflection(reflect(drawn.solution, text) or "")
            assert reflection is not None
            place = int(reflection.bifurcation.partition(":")[0])
            labels = exact_labels(one)
            assert labels.first_wrong == standing[place - 1], (drawn.problem.question, text, labels)
            assert labels.values[-1] == 0.0


def test_every_kind_of_mistake_was_planted() -> None:
    kinds = Counter(
        (parse_reflection(reflect(drawn.solution, spoiled(drawn, Random(i))) or "") or ("", "", ""))[2]
        for i, drawn in enumerate(draw(family, 4, "train", index) for family in FAMILIES for index in range(60))
    )
    assert all(kinds[rule] for rule in ("no more", "check Answer", "check numbers", "more to Answer"))
    assert len(MISTAKE_SHARES) == 6


SUM = ("sum", "10+20+30=?", "60", "10+20;30+30")
FRACTION = ("fraction", "1/4+3/8=?", "5/8", "8/4;1*2;2+3")


def test_another_way_is_right_if_it_leads_to_the_answer() -> None:
    assert labels_of(*SUM, "20+30=50;10+50=60") == [1, 1, 1]
    assert labels_of(*SUM, "30+30=60") == [1, 1], "done in the head"
    assert labels_of(*SUM, "20+10=30;30+30=60") == [1, 1, 1]
    # Over the product of the denominators, reduced by a number that stands nowhere.
    assert labels_of(*FRACTION, "1*8=8;3*4=12;8+12=20;4*8=32;20/2=10;32/2=16;10/2=5;16/2=8") == [1] * 9
    assert labels_of("sequence", "3,15,27,39,?", "51", "39-27;39+12", "27-15=12;39-27=12;12-12=0;12+0=12;39+12=51") == (
        [1] * 6
    )


def test_a_slip_on_another_way_is_blamed_on_the_slip() -> None:
    assert labels_of(*SUM, "20+30=50;10+50=61", "61") == [1, 0, 0]
    assert labels_of(*FRACTION, "1*8=8;3*4=13;8+13=21;4*8=32;21/4=5;32/4=8") == [1, 0, 0, 1, 0, 1, 1]


def test_another_way_that_is_wrong_is_blamed_where_it_leaves_the_solution() -> None:
    assert labels_of(*SUM, "20+30=50;50+20=70", "70") == [0, 0, 0]
    assert labels_of(*SUM, "10+20=30;30*30=900", "900") == [1, 0, 0]
    assert labels_of(*SUM, "10+20=30", "30") == [1, 0]


def test_what_leads_nowhere_is_no_step_of_a_solution() -> None:
    assert labels_of(*SUM, "10+20=30;7*7=49;30+30=60") == [1, 0, 1, 1]


def test_a_step_on_a_wrong_number_is_wrong_even_if_it_ends_well() -> None:
    steps = "342%126;126%90;90%36;36%18"
    found = labels_of("gcd", "gcd(126,342)=?", "18", steps, "342%126=130;126%130=56;130%56=18;56%18=0")
    assert found == [0, 0, 0, 0, 1]


def test_a_number_of_the_question_is_not_spoiled_by_a_wrong_step_that_gives_it_too() -> None:
    assert labels_of(*SUM, "10+30=20;20+30=50;10+50=60") == [0, 1, 1, 1]


def test_later_steps_that_do_not_depend_on_a_mistake_are_right() -> None:
    product = ("product", "12*12=?", "144", "12*10;12*2;120+24")
    assert labels_of(*product, "12*10=110;12*2=24;110+24=134", "134") == [0, 1, 0, 0]
    assert labels_of(*product, "12*10=110;12*10=120;12*2=24;120+24=144") == [0, 1, 1, 1, 1], "mended without a check"


@pytest.mark.parametrize(
    ("step", "right"),
    [
        ("10+20=30 check 30-20=10 ok", True),
        ("10+20=30 check 30-10=20 ok", True),
        ("10+20=30 check 30-20=11 ok", False),
        ("10+20=30 check 30-20=10 no", False),
        ("10+20=30 check 30-20 ok", False),
        ("10+20=30 check 30/0=30 ok", False),
        ("10+20=31 check 31-20=11 no", True),
        ("10+20=31 check 31-20=10 no", False),
        ("10+20=31 check 31-20=11 ok", False),
        ("10+20=", False),
        ("ten and twenty", False),
        ("10+20=30+0", False),
        ("10/0=0", False),
    ],
)
def test_everything_that_a_step_says_must_be_true(step: str, right: bool) -> None:
    labels = labels_of(*SUM, f"{step};10+20=30;30+30=60")
    assert labels[0] == right


def test_checks_may_hold_several_operations() -> None:
    base = ("base", "412 in base 9=?", "507", "412%9;412/9;45%9;45/9")
    steps = "412%9=7 check 412-7=9*45 ok;412/9=45 check 412-45*9=7 ok;45%9=0 check 45-0=9*5 ok;45/9=5 check 5*9=45 ok"
    assert labels_of(*base, steps) == [1] * 5
    assert labels_of(*base, steps.replace("9*45", "9*44"))[0] == 0


def test_unfinished_and_unreadable_responses() -> None:
    drawn = draw("sum", 3, "train", 0)
    first, second = (f"{step.expression}={step.result}" for step in drawn.solution.steps[:2])
    assert exact_labels(candidate(drawn, f"<think>{first};{second[:-2]}")).first_wrong == 1
    assert exact_labels(candidate(drawn, f"<think>{first};")).all_right, "nothing wrong was said"
    assert exact_labels(candidate(drawn, f"Answer:{drawn.problem.answer}<eos>")).values == (1.0,)
    assert exact_labels(candidate(drawn, "")) == StepLabels((), -1)


@settings(deadline=None)
@given(st.text(alphabet="<think>/;=Answer:0123456789+-*% checkokno\n"), st.booleans())
def test_exact_labels_never_fail(text: str, thinks: bool) -> None:
    one = candidate(draw("expression", 3, "train", 1), f"<think>{text}</think>Answer:1" if thinks else text)
    assert len(exact_labels(one).values) == len(steps_of(one, "tiny"))


def test_chains_of_squares_take_no_time() -> None:
    labels = labels_of(*SUM, "9999*9999=8;" + "8*8=8;" * 60 + "8+52=60")
    assert labels == [0] * 62 + [1]


def test_only_problems_whose_solution_is_known_can_be_labelled_exactly() -> None:
    for name, answer, said in (
        ("math500/3", "5", "no problem of the tiny world"),
        ("sum/1/train/stream-0-4", "5", "cannot be drawn again"),
        ("sum/1/train/000004", "no", "another version"),
    ):
        with pytest.raises(UserError, match=said):
            exact_labels(Candidate(name, "?", "Answer:5", answer, family="sum", level=1))


def test_the_judge_that_knows() -> None:
    drawn = draw("word", 3, "train", 5)
    right, wrong = render(drawn.solution, "worked", Random(0)), spoiled(drawn, Random(0))
    done: list[int] = []
    scored = ExactJudge().score([candidate(drawn, right), candidate(drawn, wrong)], done.append)
    assert [one.final for one in scored] == [1.0, 0.0]
    assert scored[0].overall() > scored[1].overall()
    assert sum(done) == 2


# --- Monte Carlo -------------------------------------------------------------------------------------------------

tokenizer = TinyTokenizer.load()
SAMPLING = Sampling(temperature=1.0, max_tokens=96, stop_ids=(tokenizer.eos_id,))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(load_model(resolve_model("tiny-0.3m")), rows=64)


def by_rollouts(engine: Engine, pool: list[Candidate], **options: Any) -> list[MonteCarlo]:
    return monte_carlo(pool, engine, TinyFormat(tokenizer), tokenizer, SAMPLING, **{"completions": 6, **options})


def pairs(count: int = 6) -> list[Candidate]:
    """A right solution and one whose first step is wrong, for easy problems."""
    pool = []
    for index in range(count):
        drawn = draw("sum", 2, "train", index)
        right = f"{render(drawn.solution, 'worked', Random(0))}<eos>"
        first = drawn.solution.steps[0]
        wrong = right.replace(f"{first.expression}={first.result};", f"{first.expression}={first.result + 10};", 1)
        pool += [candidate(drawn, right), candidate(drawn, wrong.replace("Answer:", "Answer:1"))]
    return pool


def test_rollouts_arrive_after_right_steps_and_not_after_wrong_ones(engine: Engine) -> None:
    found = by_rollouts(engine, pairs())
    right, wrong = found[::2], found[1::2]
    assert all(one.right[-1:] == (1,) and one.graded == (6, 6, 1) for one in right)
    assert all(one.right[-1:] == (0,) for one in wrong)
    assert sum(one.right[0] for one in right) > 3 * sum(one.right[0] for one in wrong)


def test_rollouts_depend_on_nothing_but_the_beginning(engine: Engine) -> None:
    drawn = [draw("expression", 5, "train", index) for index in range(4)]  # hard enough to fail now and then
    pool = [candidate(one, render(one.solution, "worked", Random(0))) for one in drawn]
    together = by_rollouts(engine, pool)
    assert by_rollouts(engine, pool[::-1]) == together[::-1]
    assert [by_rollouts(engine, [one])[0] for one in pool] == together
    assert by_rollouts(engine, pool, seed=1) != together


def test_a_shared_beginning_is_gone_on_from_once(engine: Engine) -> None:
    drawn = draw("sum", 2, "train", 0)
    right = render(drawn.solution, "worked", Random(0))
    pool = [candidate(drawn, right), candidate(drawn, right.replace("Answer:", "Answer:9"))]
    sampled: list[int] = []
    found = by_rollouts(engine, pool, progress=sampled.append)
    assert sum(sampled) == 6 * len(drawn.solution.steps)
    assert found[0].right[:-1] == found[1].right[:-1]
    assert (found[0].right[-1], found[1].right[-1]) == (1, 0)


def test_counts_are_those_of_the_engine(engine: Engine) -> None:
    one = pairs(1)[0]
    beginning = steps_of(one, "tiny")[0]
    prompt = tokenizer.encode(f"<bos>{one.question}\n{beginning}")
    keys = [key(0, "monte-carlo", one.problem, beginning, sample) for sample in range(6)]
    texts = [beginning + tokenizer.decode(r.ids) for r in engine.generate([Request(prompt, keys)], SAMPLING)[0]]
    problem = Problem(one.problem, one.question, one.answer, one.family, one.level)
    assert by_rollouts(engine, [one])[0].right[0] == sum(grade(problem, text).verdict == "correct" for text in texts)


def test_hard_and_soft_labels() -> None:
    one = MonteCarlo((8, 3, 0, 1, 0), (8, 8, 8, 8, 1))
    assert one.labels() == StepLabels((1.0, 1.0, 0.0, 1.0, 0.0), 2)
    assert one.labels("soft") == StepLabels((1.0, 0.375, 0.0, 0.125, 0.0), 2), "a rare success is still one"
    assert MonteCarlo((8, 0), (8, 0)).labels() is None


def test_answers_that_cannot_be_graded_are_left_out(engine: Engine) -> None:
    found = by_rollouts(engine, pairs(1)[:1], grader=lambda *_: Grade("timeout", None, ""))[0]
    assert found.graded == (0, 0, 0)
    assert found.labels() is None


def test_too_long_a_response_is_refused_by_name(engine: Engine) -> None:
    drawn = draw("sum", 2, "train", 0)
    long = candidate(drawn, "<think>" + "1+1=2;" * 200 + "</think>Answer:2")
    with pytest.raises(UserError, match=rf"{drawn.problem.id}.* 1,024 at most"):
        by_rollouts(engine, [long])


# --- a language model --------------------------------------------------------------------------------------------

TWO_STEPS = Candidate("p1", "What is {steps}?", "First {question}.\n\nSecond.", "42")


@pytest.fixture
def _straight_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(rule: Any, *candidates: Candidate, **options: Any) -> tuple[list[Any], ChatServer]:
    with serving(ChatServer(rule)) as server:
        endpoint = Endpoint(server.url, "served", first_wait=0.01, timeout=5.0, attempts=1)
        return llm_labels(candidates, endpoint, **options), server


def said(scores: list[Any], first: Any, before: str = "Let me see. ") -> dict[str, Any]:
    return completion(f"{before}{json.dumps({'scores': scores, 'first_wrong': first})}")


def test_the_prompt_shows_numbered_steps_and_leaves_braces_alone() -> None:
    prompt = judge_prompt(TWO_STEPS, "blank_line")
    assert '<step number="0">\nFirst {question}.\n</step>\n<step number="1">\nSecond.\n</step>' in prompt
    assert "What is {steps}?" in prompt
    assert "in 2 steps" in prompt
    assert '{"scores": [' in prompt
    assert "42" not in prompt
    assert "42" in judge_prompt(TWO_STEPS, "blank_line", show_answer=True)


@pytest.mark.usefixtures("_straight_to_the_server")
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (said([1, 0.25], 1), StepLabels((1.0, 0.25), 1)),
        (said([0.5, 1.0], -1), StepLabels((0.5, 1.0), -1)),
        (said([0, 1], 0, "<think>no {brackets}</think>```json\n"), StepLabels((0.0, 1.0), 0)),
        (completion('```json\n{"scores": [1, 1],\n "first_wrong": -1}\n```\n'), StepLabels((1.0, 1.0), -1)),
        (said([1], -1), "1 scores for 2 steps"),
        (said([1, 2], -1), "from 0 to 1"),
        (said([1, True], -1), "from 0 to 1"),
        (said([1, "0"], 1), "from 0 to 1"),
        (said([1, 0.25], -1), "first wrong step is none, but .* is step 1"),
        (said([1, 1], 0), "first wrong step is step 0, but .* is none"),
        (said([1, 1], "none"), "whole number"),
        (completion('{"scores": [1, 1]}'), "whole number"),
        (completion("Both steps are right."), "does not end with"),
        (completion("{scores: 1}"), "not JSON"),
        (completion('{"scores": [1, 1], "first_wrong": -1} Or so.'), "does not end with"),
        (completion('{"scores": [1, 1], "first_wrong": -1}', finish="length"), "cut"),
        ((400, {}, "too long"), "HTTP 400"),
    ],
)
def test_replies_are_read_strictly(reply: Reply, expected: StepLabels | str) -> None:
    (found,), _ = ask(lambda *_: reply, TWO_STEPS, attempts=1)
    if isinstance(expected, StepLabels):
        assert found.labels == expected
        assert not found.failure
    else:
        assert found.labels is None
        assert re.search(expected, found.failure)


@pytest.mark.usefixtures("_straight_to_the_server")
def test_a_reply_that_cannot_be_read_is_asked_for_again_with_another_seed() -> None:
    done: list[int] = []
    empty = Candidate("p2", "?", "  ")
    found, server = ask(
        lambda prompt, attempt, body: said([1, 1], -1) if attempt == 2 else completion("hm"),
        TWO_STEPS,
        empty,
        progress=done.append,
    )
    assert found[0].labels == StepLabels((1.0, 1.0), -1)
    assert (found[1].labels, found[1].failure) == (None, "no steps")
    assert len({body["seed"] for body in server.bodies}) == 2
    assert sum(done) == 1
