"""What steps are worth: exactly in the tiny world, by rollouts, by a language model, in labelled data."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chat_checkpoints import checkpoint as chat_checkpoint
from chat_server import ChatServer, Reply, completion, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from reasonlab import cli
from reasonlab.errors import UserError
from reasonlab.grading.grade import Grade, grade
from reasonlab.judges.exact_labels import ExactJudge, exact_labels
from reasonlab.judges.formats import own_format
from reasonlab.judges.label_data import read_prm800k, read_processbench
from reasonlab.judges.labels import StepLabels, consensus
from reasonlab.judges.llm_labels import judge_prompt, llm_labels
from reasonlab.judges.monte_carlo import MonteCarlo, monte_carlo
from reasonlab.judges.steps import steps_of
from reasonlab.judges.training import JudgeConfig, JudgeTrainer
from reasonlab.judges.types import Candidate, read_labels, write_pool
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

DATA = Path(os.environ.get("REASONLAB_DATA") or Path(__file__).parents[2] / "shared" / "bench")
needs_data = pytest.mark.skipif(
    not (DATA / "processbench_math.jsonl.gz").is_file(), reason="no labelled steps: set REASONLAB_DATA"
)
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


# --- labelled data -----------------------------------------------------------------------------------------------


def write(path: Path, *rows: Any) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def test_processbench_is_read(tmp_path: Path) -> None:
    row = {"id": "m-1", "problem": "Q", "steps": ["a\n\nb", "c", "d"], "label": 1, "final_answer_correct": False}
    right = {**row, "id": "m-2", "label": -1, "final_answer_correct": True, "generator": "G"}
    one, two = read_processbench(write(tmp_path / "processbench_math.jsonl.gz", row, right))
    assert one.labels == StepLabels((1.0, 0.0, 0.0), 1)
    assert steps_of(one.candidate, "blank_line") == ["a\n\nb\n\n", "c\n\n", "d"]
    assert (one.candidate.family, one.candidate.correct) == ("processbench_math", False)
    assert two.labelled.steps == (1.0, 1.0, 1.0)
    assert (two.candidate.correct, two.candidate.source) == (True, "G")


def row(before: list[str], step: str, rating: int | None, problem: str = "Q") -> dict[str, Any]:
    """A step of PRM800K."""
    made = {"id": "x", "problem": problem, "prev_steps": before, "step": step, "rating": rating}
    return made if rating is not None else {name: value for name, value in made.items() if name != "rating"}


def test_prm800k_is_put_together(tmp_path: Path) -> None:
    rows = [row([], "a", 1), row(["a"], "b", -1), row(["a"], "b2", None), row(["a", "b2"], "c", 0), row([], "z", -1)]
    path = write(tmp_path / "steps.jsonl", *rows)
    found = {"".join(steps_of(one.candidate, "blank_line")): one.labels for one in read_prm800k(path)}
    assert found == {
        "a\n\nb": StepLabels((1.0, 0.0), 1),
        "a\n\nb2\n\nc": StepLabels((1.0, 1.0, 1.0), -1),
        "z": StepLabels((0.0,), 0),
    }
    assert StepLabels((1.0, 1.0, 0.5), -1) in [one.labels for one in read_prm800k(path, neutral=0.5)]
    assert len({one.candidate.problem for one in read_prm800k(path)}) == 1
    for ratings in ((1, -1), (-1, 1)):
        twice = write(tmp_path / "twice.jsonl", *(row([], "a", rating) for rating in ratings))
        assert [one.labels.first_wrong for one in read_prm800k(twice)] == [0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"problem": "Q", "steps": ["a"], "label": 1}, "line 1: `label`"),
        ({"problem": "Q", "steps": ["a"], "label": True}, "line 1: `label`"),
        ({"problem": "Q", "steps": [], "label": -1}, "line 1: `problem`"),
        ({"problem": "Q", "steps": ["a", ""], "label": -1}, "line 1: `problem`"),
        ([1], "not an object"),
    ],
)
def test_mistakes_in_processbench_files_name_their_line(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_processbench(write(tmp_path / "bad.jsonl", row))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"rating": 2}, "rating"), ({"rating": True}, "rating"), ({"step": ""}, "step"), ({"prev_steps": "a"}, "texts")],
)
def test_mistakes_in_prm800k_files_name_their_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    row = {"problem": "Q", "prev_steps": [], "step": "a", "rating": 1, **changes}
    with pytest.raises(UserError, match=f"line 1: .*{said}"):
        read_prm800k(write(tmp_path / "bad.jsonl", row))


def test_prm800k_must_rate_what_it_goes_on_from(tmp_path: Path) -> None:
    row = {"problem": "Q", "prev_steps": ["a"], "step": "b", "rating": 1}
    with pytest.raises(UserError, match="does not rate: 'a'"):
        read_prm800k(write(tmp_path / "cut.jsonl", row))
    with pytest.raises(UserError, match="neutral"):
        read_prm800k(write(tmp_path / "cut.jsonl", row), neutral=0.2)


# --- from labelled data to a judge -------------------------------------------------------------------------------


def branching(problem: str) -> list[dict[str, Any]]:
    """Alternatives to each step of one solution: four beginnings that nobody went on from, seven distinct steps."""
    return [
        row([], "Half of 8 is 4.", 1, problem),
        row([], "Half of 8 is 3.", -1, problem),
        row(["Half of 8 is 4."], "4 plus 2 is 6.", None, problem),
        row(["Half of 8 is 4."], "4 plus 2 is 7.", -1, problem),
        row(["Half of 8 is 4.", "4 plus 2 is 6."], "So it is 6.", 1, problem),
        row(["Half of 8 is 4.", "4 plus 2 is 6."], "So it is 5.", -1, problem),
        row(["Half of 8 is 4.", "4 plus 2 is 7."], "So it is 7.", 0, problem),
    ]


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    code = cli.main(list(map(str, words)))
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


@pytest.mark.parametrize("response", ["One.\n\nTwo.", "One.\n\nTwo.\n\n", "One.\n\nTwo. \n"])
def test_every_step_is_read_behind_its_separator(response: str, tmp_path: Path) -> None:
    """In PRM800K wrong steps are last ones. Where a step is read must not tell whether it is."""
    chat_checkpoint(tmp_path)
    form = own_format(tmp_path, "process")
    encoded, alone = (form.encode(Candidate("p", "Why?", text)) for text in (response, "One."))
    prompt = form.tokenizer.chat_text("Why?")
    texts = [form.tokenizer.decode(encoded.ids[: place + 1].tolist()) for place in encoded.steps]
    assert texts == [prompt + "One.\n\n", prompt + "One.\n\nTwo.\n\n"]
    assert alone.ids[:-1].tolist() == encoded.ids[: encoded.steps[0] + 1].tolist()
    assert encoded.final == encoded.steps[-1] + 1 == len(encoded.ids) - 1
    together = form.encode_all([Candidate("p", "Why?", response)] * 2)
    assert all(one.ids.tolist() == encoded.ids.tolist() for one in together)


def test_a_step_that_responses_share_counts_once(tmp_path: Path) -> None:
    chat_checkpoint(tmp_path / "model")
    path = write(tmp_path / "steps.jsonl", *branching("Half of 8, plus 2?"), *branching("Again: half of 8, plus 2?"))
    units = [example.labelled for example in read_prm800k(path)]
    settings: dict[str, Any] = {"model": str(tmp_path / "model"), "kind": "process", "loss": "ce", "batch": len(units)}

    def counted(shared: Any, **more: Any) -> tuple[int, int]:
        trainer = JudgeTrainer(JudgeConfig(**settings | more, shared_steps=shared), units, lambda *_: None)
        examples = trainer._examples(0)
        return sum(int(e.mask.sum()) for e in examples), sum(int((e.mask & (e.steps == 0)).sum()) for e in examples)

    # Of each problem: three distinct right steps and three wrong ones; what follows a wrong one does not enter.
    assert counted("once") == (2 * 6, 2 * 3)
    assert counted("each") == (2 * (1 + 2 + 3 + 3), 2 * 3)
    assert counted("once", loss="mse") == (2 * 7, 2 * 3)


def test_from_rated_steps_to_a_measured_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of recipes/processbench.toml, on a random model with a chat template."""
    model, labels, run = tmp_path / "model", tmp_path / "labels.jsonl.gz", tmp_path / "run"
    chat_checkpoint(model)
    steps = write(tmp_path / "steps.jsonl.gz", *(row for n in range(6) for row in branching(f"{n} and half of 8?")))
    told = printed(capsys, "judge", "label", steps, "--source", "prm800k", "--out", labels)
    assert "24 of 24 candidates with 60 steps, 30.0 % wrong" in told
    assert [one.steps for one in read_labels(labels)[:4]] == [(0,), (1, 1, 1), (1, 1, 0), (1, 0, 1)]
    soft = tmp_path / "soft.jsonl"
    printed(capsys, "judge", "label", steps, "--source", "prm800k", "--neutral", 0.5, "--out", soft)
    assert read_labels(soft)[3].steps == (1, 0, 0.5)

    recipe = Path(__file__).parents[1] / "recipes" / "processbench.toml"
    small = ("--model", model, "--data", labels, "--batch", 8, "--token_budget", 512, "--threads", 1)
    printed(capsys, "judge", "train", recipe, *small, "--out", run)
    data = json.loads(next(run.glob("events.*")).read_text().splitlines()[0])
    assert (data["units"], data["too_long"], data["shared_steps"]) == (24, 0, 6 * (10 - 7))

    # Nobody said what the whole is worth, so the judge does not either: a random number would spoil every ranking.
    pool = tmp_path / "pool.jsonl"
    write_pool(pool, [one.candidate for one in read_labels(labels)])
    printed(capsys, "judge", "score", pool, "--judge", run, "--out", tmp_path / "scores.jsonl")
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [(len(one["steps"]), one["final"]) for one in scores[:4]] == [(n, None) for n in (1, 3, 3, 3)]

    solution = {"problem": "Half of 6?", "steps": ["Half of 6 is 3.", "So it is 4."], "final_answer_correct": False}
    right = {**solution, "label": -1, "final_answer_correct": True}
    bench = write(tmp_path / "processbench_math.jsonl", {**solution, "label": 1}, {**solution, "label": 0}, right)
    told = printed(
        capsys, "judge", "bench", "processbench", labels, bench, "--judge", run, "--choose-on", "labels", "--json"
    )
    found = json.loads(told)
    assert found["threshold"]["split"] == "labels"
    assert (found["splits"]["math"]["wrong_samples"], found["splits"]["math"]["right_samples"]) == (2, 1)
    share = 1 / 2  # of the errors are in either place
    assert found["splits"]["math"]["blind"] == pytest.approx(2 * share / (1 + share**0.5) ** 2)
    printed(capsys, "judge", "label", bench, "--source", "processbench", "--out", tmp_path / "again.jsonl")
    again = read_labels(tmp_path / "again.jsonl")
    assert [(one.steps, one.final) for one in again] == [((1, 0), 0), ((0, 0), 0), ((1, 1), 1)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere.jsonl", "--source", "prm800k"), "there is no file"),
        (("steps.jsonl", "--source", "prm800k", "--rule", "newline"), "where steps end"),
        (("steps.jsonl", "--source", "prm800k", "--neutral", "0.2"), "neutral"),
        (("steps.jsonl", "--source", "processbench"), "line 1: `problem`"),
    ],
)
def test_mistakes_in_labelling_data_leave_nothing_behind(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "steps.jsonl", *branching("Q"))
    assert cli.main(["judge", "label", str(tmp_path / words[0]), *words[1:], "--out", str(tmp_path / "out")]) != 0
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@needs_data
def test_the_published_files_are_read_whole() -> None:
    for name, size, right in (("gsm8k", 400, 193), ("math", 1000, 406), ("omnimath", 1000, 241)):
        examples = read_processbench(DATA / f"processbench_{name}.jsonl.gz")
        assert (len(examples), sum(one.labels.all_right for one in examples)) == (size, right)
        for one in examples:
            assert len(steps_of(one.candidate, "blank_line")) == len(one.labels.values)
            # A right sample has a right answer; the other way round does not hold, which is what the set is about.
            assert one.candidate.correct or not one.labels.all_right
    steps = read_prm800k(DATA / "prm800k_phase1_test_steps.jsonl.gz")
    assert len({one.candidate.problem for one in steps}) == 101
    assert sum(one.labels.first_wrong == len(one.labels.values) - 1 for one in steps) == sum(
        not one.labels.all_right for one in steps
    ), "in the test part nobody went on from a wrong step"
