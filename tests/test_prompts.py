"""Which problems are drawn: uniform, curriculum, prioritised; and the state that a resumed run needs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from reasonlab.config import validate
from reasonlab.errors import UserError
from reasonlab.grading.grade import Grade
from reasonlab.methods.group import Group
from reasonlab.problems.problem import Problem
from reasonlab.rollout.types import Rollout
from reasonlab.train.prompts import PRIORITY_FLOOR, Prompts

POOL = {"families": ["sum", "word"], "levels": [1, 2, 3, 4], "pool": 40}


def prompts(**problems: Any) -> Prompts:
    return Prompts(validate({"problems": {**POOL, **problems}}, "test"))


def solved(problem: Problem, correct: int, of: int, errors: int = 0) -> Group:
    verdicts = ["correct"] * correct + ["wrong"] * (of - correct) + ["error"] * errors
    rollouts = [Rollout([1], [2], np.zeros(1, np.float32), "stop") for _ in verdicts]
    return Group(problem, rollouts, [Grade(verdict, None, "") for verdict in verdicts])  # type: ignore[arg-type]


def test_draws_are_distinct_keyed_and_continue_where_they_were() -> None:
    for sampling in ("uniform", "prioritised"):
        source = prompts(sampling=sampling)
        whole = source.draw(3, 12)
        assert len({p.id for p in whole}) == 12
        more = source.draw(3, 7, whole)
        assert not {p.id for p in more} & {p.id for p in whole}
        assert len(source.draw(3, 99, whole)) == 28
        assert source.draw(3, 12) == whole != source.draw(4, 12)
        assert len(source.draw(3, 500)) == 40


def test_curriculum_draws_only_hard_problems_from_its_iteration_on() -> None:
    source = prompts(curriculum_from=5, hard_level=3)
    assert {p.level for p in source.draw(4, 40)} == {1, 2, 3, 4}
    assert source.draw(4, 12) == prompts().draw(4, 12), "before the switch it is the uniform run"
    late = source.draw(5, 40)
    assert {p.level for p in late} == {3, 4}
    assert len(late) == 20


def test_a_curriculum_without_hard_problems_is_refused_at_once() -> None:
    with pytest.raises(UserError, match="no hard problem"):
        prompts(curriculum_from=5, hard_level=5)


def test_success_is_a_running_mean_of_what_could_be_graded() -> None:
    source = prompts(sampling="prioritised")
    problem = source.pool[0]
    assert source.weight(problem) == 1.0, "what was never tried comes first"
    source.learn([solved(problem, 6, 8, errors=2)])
    assert source.success[problem.id] == pytest.approx(0.75)
    source.learn([solved(problem, 2, 8)])
    assert source.success[problem.id] == pytest.approx(0.5)
    source.learn([solved(problem, 0, 0, errors=4)])
    assert source.success[problem.id] == pytest.approx(0.5), "a group that could not be graded says nothing"


def test_refills_never_repeat_a_problem() -> None:
    source = prompts(pool=200)
    drawn: list[Problem] = []
    for _ in range(4):
        drawn += source.draw(1, 48, drawn)
    assert len({p.id for p in drawn}) == 192


def test_prioritised_draws_are_in_proportion_to_the_weights() -> None:
    """One problem of each draw of one: frequencies are w_i / Σ w, with the floor for solved problems."""
    source = prompts(sampling="prioritised", pool=4)
    rates = [0.0, 0.5, 0.8, 1.0]
    for problem, rate in zip(source.pool, rates, strict=True):
        source.success[problem.id] = rate
    weights = np.array([1.0, 0.5, 0.2, PRIORITY_FLOOR])
    draws = 6000
    seen = Counter(source.draw(iteration, 1)[0].id for iteration in range(1, draws + 1))
    counts = np.array([seen[problem.id] for problem in source.pool])
    expected = draws * weights / weights.sum()
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # χ²(3) at 0.1 %


def test_state_survives_json_bit_for_bit() -> None:
    source = prompts(sampling="prioritised")
    source.learn([solved(problem, i % 4, 3) for i, problem in enumerate(source.pool[:17]) if i % 4 < 4])
    other = prompts(sampling="prioritised")
    other.restore(orjson.loads(orjson.dumps(source.state())))
    assert other.success == source.success
    assert [other.draw(i, 8) for i in range(5)] == [source.draw(i, 8) for i in range(5)]


def test_a_curated_set_brings_its_problems_and_pass_rates(tmp_path: Path) -> None:
    pool = prompts().pool[:6]
    rows = [
        {
            "id": p.id,
            "question": p.question,
            "answer": p.answer,
            "family": p.family,
            "level": p.level,
            "pass_rate": rate,
        }
        for p, rate in zip(pool, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], strict=True)
    ]
    path = tmp_path / "curated.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    source = prompts(path=str(path), sampling="prioritised", curriculum_from=2, hard_pass_rate=0.4)
    assert source.pool == pool
    assert source.weight(pool[3]) == pytest.approx(0.4)
    source.learn([solved(pool[3], 8, 8)])
    assert source.weight(pool[3]) == pytest.approx(0.2), "the pass rate is the estimate before the first visit"
    source.success.clear()
    assert {p.id for p in source.draw(2, 6)} == {p.id for p in pool[:3]}
