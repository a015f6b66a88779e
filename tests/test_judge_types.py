"""What judges read: pools, labels and scores in files, steps of responses, lists for training."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasonlab.errors import UserError
from reasonlab.judges.lists import make_lists
from reasonlab.judges.steps import RULES, Rule, cut, steps_of
from reasonlab.judges.types import (
    Candidate,
    Labelled,
    Scored,
    read_labels,
    read_pool,
    read_scores,
    write_labels,
    write_pool,
    write_scores,
)

POOL = [
    Candidate("a", "1+1=?", "Answer:2", "2", True, "sum", 1, "policy"),
    Candidate("a", "1+1=?", "Answer:3", "2", False),
    Candidate("b", "2+2=?\u2028", "<think>\n\n</think>", correct=None, step_ends=(7, 17)),
]


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "expected"), [("mean", 0.5 + 2 * 0.7), ("min", 0.2 + 1.4), ("product", 0.08 + 1.4), ("last", 0.5 + 1.4)]
)
def test_overall_adds_the_weighted_final_score_to_the_steps(how: Any, expected: float) -> None:
    assert Scored((0.8, 0.2, 0.5), 0.7).overall(2.0, how) == pytest.approx(expected)


def test_overall_of_steps_alone_or_of_the_final_score_alone() -> None:
    assert Scored((), -3.5).overall(alpha=9.0) == -3.5
    assert Scored((0.25, 0.75), None).overall(alpha=9.0) == 0.5
    with pytest.raises(ValueError, match="said nothing"):
        Scored((), None).overall()


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pool.jsonl", "pool.jsonl.gz"])
def test_a_pool_comes_back_as_it_was_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert write_pool(path, POOL) == 3
    assert read_pool(path) == POOL
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith("gz")


def test_labels_and_scores_come_back_as_they_were_written(tmp_path: Path) -> None:
    labelled = [Labelled(POOL[0], (1.0, 0.5), 0.25), Labelled(POOL[2], (0.0, 1.0), None)]
    write_labels(tmp_path / "labels.jsonl", labelled)
    assert read_labels(tmp_path / "labels.jsonl") == labelled
    scored = [Scored((0.1,), None), Scored((), -2.5), Scored((), None)]
    write_scores(tmp_path / "scores.jsonl", POOL, scored)
    assert read_scores(tmp_path / "scores.jsonl", POOL) == scored


def test_scores_of_another_pool_are_refused(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores.jsonl", POOL, [Scored((), 1.0)] * 3)
    with pytest.raises(UserError, match=r"scores 'a' where the pool has 'b'"):
        read_scores(tmp_path / "scores.jsonl", [POOL[0], POOL[2], POOL[2]])
    with pytest.raises(UserError, match="the end of the file"):
        read_scores(tmp_path / "scores.jsonl", POOL[:2])
    with pytest.raises(UserError, match="scores 3 of 4"):
        read_scores(tmp_path / "scores.jsonl", [*POOL, POOL[2]])


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"problem":"a","question":"q"}', "'response' is missing"),
        ('{"problem":"a","question":"q","response":"r","corect":true}', "did you mean 'correct'"),
        ('{"problem":1,"question":"q","response":"r"}', "'problem' is 1"),
        ('{"problem":"a","question":"q","response":"r","correct":1}', "'correct' is 1"),
        ('{"problem":"a","question":"q","response":"r","level":true}', "'level' is True"),
        ('{"problem":"a","question":"q","response":"rest","step_ends":[2,3]}', "step_ends"),
        ('{"problem":"a","question":"q","response":"rest","step_ends":[3,2,4]}', "step_ends"),
    ],
)
def test_a_mistake_names_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "pool.jsonl"
    path.write_text('{"problem":"a","question":"q","response":"r"}\n\n' + line + "\n")
    with pytest.raises(UserError, match="line 3: ") as error:
        read_pool(path)
    assert complaint in str(error.value)


def test_labels_out_of_range_a_broken_archive_and_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text('{"problem":"a","question":"q","response":"r","step_labels":[0.5,1.5]}\n')
    with pytest.raises(UserError, match="line 1: step_labels"):
        read_labels(path)
    path.write_bytes(gzip.compress(b'{"problem":"a","question":"q","response":"r"}\n' * 100)[:-20])
    with pytest.raises(UserError, match="broken gzip"):
        read_pool(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_pool(tmp_path / "absent.jsonl")


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "response", "steps"),
    [
        ("tiny", "<think>1+2=3;3*4=12</think>Answer:12", ["<think>1+2=3;", "3*4=12</think>", "Answer:12"]),
        ("tiny", "Answer:12<eos>", ["Answer:12<eos>"]),
        ("blank_line", "\n\na\nb\n \n\nc</think>d\n\n", ["\n\na\nb\n \n\n", "c</think>", "d\n\n"]),
        ("blank_line", "a\n</think>\n\nb", ["a\n</think>\n\n", "b"]),
        ("newline", "a\n\nb\r\nc", ["a\n\n", "b\r\n", "c"]),
        ("newline", "", []),
        ("newline", "\n \n", []),
    ],
)
def test_steps_are_cut_where_the_rule_says(rule: Rule, response: str, steps: list[str]) -> None:
    assert steps_of(Candidate("a", "q", response), rule) == steps


def test_given_ends_win_over_the_rule() -> None:
    assert steps_of(Candidate("a", "q", "one\ntwo;three", step_ends=(8, 13)), "newline") == ["one\ntwo;", "three"]


@given(st.text(st.sampled_from("ab;\n \r\t</think>")), st.sampled_from(RULES))
def test_steps_cover_the_response_and_none_is_blank(response: str, rule: Rule) -> None:
    steps = [response[a:b] for a, b in cut(response, rule)]
    assert "".join(steps) == (response if response.strip() else "")
    assert all(step.strip() for step in steps)


@given(st.text(st.sampled_from("ab;\n </think>")), st.text(st.sampled_from("ab;\n </think>")), st.sampled_from(RULES))
def test_what_follows_a_finished_step_does_not_move_its_end(before: str, after: str, rule: Rule) -> None:
    ends = {end for _, end in cut(before + "a;\n\nb", rule)}
    inner = {end for end in ends if end < len(before)}
    assert inner <= {end for _, end in cut(before + "a;\n\nb" + after, rule)}


# --- lists -----------------------------------------------------------------------------------------------------------


def responses(problem: str, right: int, wrong: int) -> list[Candidate]:
    made = [Candidate(problem, "q", f"right {i}", correct=True) for i in range(right)]
    return made + [Candidate(problem, "q", f"wrong {i}", correct=False) for i in range(wrong)]


@pytest.mark.parametrize(
    ("right", "wrong", "size", "expected"),
    [(9, 9, 6, (3, 3)), (1, 9, 6, (1, 5)), (9, 2, 6, (4, 2)), (2, 2, 6, (2, 2)), (9, 9, 5, (2, 3)), (9, 9, 2, (1, 1))],
)
def test_lists_are_as_balanced_as_the_pool_allows(right: int, wrong: int, size: int, expected: tuple[int, int]) -> None:
    (made,), report = make_lists(responses("p", right, wrong), size)
    assert (len(made.right), len(made.wrong)) == expected
    assert all(c.correct for c in made.right)
    assert not any(c.correct for c in made.wrong)
    assert report.short == (sum(expected) < size)
    assert (report.used_right, report.used_wrong) == expected


def test_what_cannot_be_compared_is_left_out_and_counted() -> None:
    pool = responses("mixed", 2, 3) + responses("right", 3, 0) + responses("wrong", 0, 2)
    pool += [Candidate("unknown", "q", "?"), Candidate("mixed", "q", "right 0", correct=True)]
    lists, report = make_lists(pool)
    assert [one.problem for one in lists] == ["mixed"]
    assert (report.problems, report.all_right, report.all_wrong) == (4, 1, 1)
    assert (report.candidates, report.repeated, report.unlabelled, report.lists) == (12, 1, 1, 1)


def test_score_sorted_sampling_draws_from_the_best_right_and_the_worst_wrong() -> None:
    pool = responses("p", 30, 30)
    scores = [float(c.response.split()[1]) for c in pool]  # both sorts have scores 0 … 29
    seen_right, seen_wrong = set(), set()
    for seed in range(40):
        (made,), _ = make_lists(pool, 6, scores, top=5, seed=seed)
        seen_right |= {int(c.response.split()[1]) for c in made.right}
        seen_wrong |= {int(c.response.split()[1]) for c in made.wrong}
    assert seen_right == set(range(25, 30))
    assert seen_wrong == set(range(5))
    assert make_lists(pool, 6, scores, seed=3) == make_lists(pool, 6, scores, seed=3)


def test_two_questions_under_one_id_and_missing_scores_are_refused() -> None:
    with pytest.raises(UserError, match="different questions"):
        make_lists([Candidate("a", "q", "r"), Candidate("a", "other", "r")])
    with pytest.raises(UserError, match="1 scores for 2"):
        make_lists(responses("p", 1, 1), scores=[0.5])
    with pytest.raises(UserError, match="not finite"):
        make_lists(responses("p", 1, 1), scores=[0.5, float("nan")])
