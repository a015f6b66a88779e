"""Choosing from a pool: by score, curated, by lot; ties, duplicates, balance, and the report."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasonlab.errors import UserError
from reasonlab.judges.selection import curated, random_subset, repeats_itself, select
from reasonlab.judges.types import Candidate


def candidate(number: int, family: str = "f", **changes: Any) -> Candidate:
    made = Candidate(f"{family}/{number}", f"{family} {number}?", f"response {number}", family=family, source="s")
    return replace(made, **changes)


POOL = [candidate(i, family) for family in ("a", "b", "c") for i in range(20)]
FEW_SCORES = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=60, max_size=60)


def names(pool: list[Candidate], indices: Any) -> list[tuple[str, str]]:
    return [(pool[i].problem, pool[i].response) for i in indices]


# --- by score ----------------------------------------------------------------------------------------------------


@given(FEW_SCORES, st.integers(1, 60))
def test_the_best_are_chosen(scores: list[float], top: int) -> None:
    chosen = select(POOL, scores, top)
    found = [scores[i] for i in chosen.indices]
    assert found == sorted(scores, reverse=True)[:top]
    report = chosen.report
    assert report.threshold == found[-1]
    assert report.tied == scores.count(found[-1])
    assert report.tied_chosen == found.count(found[-1])


@given(FEW_SCORES, st.integers(1, 60), st.randoms(use_true_random=False))
def test_the_order_of_the_file_does_not_matter(scores: list[float], top: int, rng: Random) -> None:
    order = list(range(60))
    rng.shuffle(order)
    shuffled = [POOL[i] for i in order]
    there = select(shuffled, [scores[i] for i in order], top, per_family="even" if top > 3 else None)
    here = select(POOL, scores, top, per_family="even" if top > 3 else None)
    assert names(POOL, here.indices) == names(shuffled, there.indices)


def test_ties_are_broken_by_lot_and_the_seed_matters() -> None:
    first = [select(POOL, np.zeros(60), 20, seed=seed).indices for seed in range(30)]
    assert len(set(first)) == 30
    places = np.bincount(np.concatenate(first), minlength=60)
    assert places.min() > 0, "everyone has a chance"
    assert places.max() < 22, "and nobody a place for sure"


def test_duplicates_count_once_whatever_their_spelling() -> None:
    pool = [
        candidate(1, response="X = 5"),
        candidate(1, response="x  =\n5<eos>", source="other"),
        candidate(1, response="x = -5"),
        candidate(2, response="X = 5"),
        candidate(1, problem="copied", response="X = 5"),
    ]
    chosen = select(pool, [0.1, 0.9, 0.5, 0.4, 0.3], 3)
    assert chosen.indices == (1, 2, 3), "of copies the best-scored; another sign or question is no copy"
    assert chosen.report.duplicates == 2
    assert select(pool, [0.1, 0.9, 0.5, 0.4, 0.3], 5, dedup=False).report.duplicates == 0


def test_one_response_a_problem() -> None:
    pool = [candidate(i // 3, response=str(i)) for i in range(9)]
    chosen = select(pool, range(9), 3, one_per_problem=True)
    assert chosen.indices == (8, 5, 2)
    assert chosen.report.same_problem == 6
    with pytest.raises(UserError, match=r"only 3 of 9 .*6 others of the same problem"):
        select(pool, range(9), 4, one_per_problem=True)


@given(st.integers(1, 40), st.lists(st.integers(0, 20), min_size=3, max_size=3))
def test_even_shares_are_as_even_as_the_pool_allows(top: int, sizes: list[int]) -> None:
    pool = [candidate(i, family) for family, size in zip("abc", sizes, strict=True) for i in range(size)]
    if len(pool) < top:
        return
    scores = [float(one.family == "a") for one in pool]
    counts = Counter(pool[i].family for i in select(pool, scores, top, per_family="even").indices)
    assert counts.total() == top
    for family, size in zip("abc", sizes, strict=True):
        others = [counts[other] for other in "abc" if other != family]
        assert counts[family] == size or counts[family] >= max(others) - 1


def test_a_limit_for_each_family() -> None:
    scores = [float(one.family == "a") for one in POOL]
    chosen = select(POOL, scores, 30, per_family=12)
    counts = Counter(POOL[i].family for i in chosen.indices)
    assert counts["a"] == 12
    assert max(counts.values()) == 12
    assert chosen.report.over_limit >= 8
    with pytest.raises(UserError, match="only 36 of 60"):
        select(POOL, scores, 40, per_family=12)
    with pytest.raises(UserError, match="at least one"):
        select(POOL, scores, 30, per_family=0)


def test_the_report_shows_who_was_chosen() -> None:
    pool = [candidate(i, "ab"[i % 2], source="rs"[i < 20], correct=i % 4 == 0) for i in range(40)]
    report = select(pool, np.arange(40) / 40, 10).report
    assert report.chosen_quantiles[0] == report.threshold == 0.75
    assert report.pool_quantiles[report.quantiles.index(0.5)] == pytest.approx(39 / 80)
    assert (report.right_in_pool, report.right_in_chosen) == (0.25, 0.2)
    h = report.histogram
    assert len(h.edges) == 21
    assert {name: sum(row) for name, row in h.pool_by_source.items()} == {"r": 20, "s": 20}
    assert {name: sum(row) for name, row in h.chosen_by_source.items()} == {"r": 10}
    assert sum(map(sum, h.chosen_by_family.values())) == 10
    assert json.loads(json.dumps(report.to_json()))["histogram"]["pool_by_family"]["a"] == h.pool_by_family["a"]
    assert "10 of 40 chosen, scores from 0.75 to 0.975" in str(report)


def test_reports_of_ungraded_and_flat_pools_have_no_nan() -> None:
    report = select(POOL, np.ones(60), 5).report
    assert math.isnan(report.right_in_chosen)
    assert "NaN" not in json.dumps(report.to_json())
    assert sum(report.histogram.pool_by_source["s"]) == 60
    assert "5 of 60 with the lowest score, by lot" in str(report)


@pytest.mark.parametrize(
    ("scores", "top", "said"),
    [
        (np.zeros(59), 5, "59 scores for 60"),
        (np.full(60, np.nan), 5, "60 scores are not numbers"),
        (np.zeros(60), 61, "61 of 60"),
        (np.zeros(60), 0, "0 of 60"),
    ],
)
def test_mistakes_are_named(scores: Any, top: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        select(POOL, scores, top)


# --- by lot ------------------------------------------------------------------------------------------------------


def test_random_subsets_are_keyed_and_nested() -> None:
    assert random_subset(POOL, 10) == random_subset(POOL, 30)[:10]
    assert random_subset(POOL, 30) != random_subset(POOL, 30, seed=1)
    backwards = POOL[::-1]
    assert names(POOL, random_subset(POOL, 10)) == names(backwards, random_subset(backwards, 10))
    assert len(set(random_subset(POOL * 2, 120))) == 120, "copies are candidates of their own"
    one_each = random_subset([candidate(i // 2, response=str(i)) for i in range(20)], 10, one_per_problem=True)
    assert len({i // 2 for i in one_each}) == 10


def test_random_subsets_are_fair() -> None:
    counts = Counter(POOL[i].family for seed in range(200) for i in random_subset(POOL, 6, seed))
    assert all(abs(count - 400) < 5 * math.sqrt(1200 * 2 / 9) for count in counts.values())


# --- curated -----------------------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopqrst"


def tiny(number: int, family: str, length: int, correct: bool = True, response: str = "") -> Candidate:
    """A response of distinct steps."""
    steps = ";".join(f"{letter}{number}" for letter in LETTERS[:length])
    return candidate(number, family, response=response or f"<think>{steps}</think>Answer:1", correct=correct)


def test_curation_takes_sound_responses_to_problems_that_somebody_fails_at() -> None:
    hard = [tiny(i, "f", 4) for i in range(6)] + [tiny(i, "f", 5, correct=False) for i in range(6)]
    easy = [tiny(i, "f", 15) for i in range(10, 16)]
    broken = [
        tiny(20, "f", 0, response="<think>a;a;a;a</think>Answer:1"),
        tiny(21, "f", 0, response="<think>a;b"),
        tiny(22, "f", 0, response="a;b;no answer"),
        tiny(0, "f", 0, response=hard[0].response.upper().replace("ANSWER", "Answer").replace("THINK", "think")),
    ]
    pool = broken + easy + hard
    chosen, stages = curated(pool, 6)
    assert {pool[i].problem for i in chosen} == {f"f/{i}" for i in range(6)}
    assert stages == {"pool": 22, "right": 16, "sound": 13, "distinct": 12, "hard": 6}
    more, _ = curated(pool, 9)
    assert more[:6] == chosen
    assert all(pool[i] in easy for i in more[6:]), "easy ones only when the hard ones are used up"
    with pytest.raises(UserError, match="only 12 candidates are left after curation"):
        curated(pool, 13)
    with pytest.raises(UserError, match="known to be right"):
        curated([replace(one, correct=None) for one in pool], 3)


def test_where_every_problem_was_tried_once_the_level_says_what_is_hard() -> None:
    pool = [replace(tiny(i, "f", 4 + i % 5), level=1 + i % 4) for i in range(40)]
    chosen, stages = curated(pool, 20)
    assert stages["hard"] == 20
    assert {pool[i].level for i in chosen} == {3, 4}
    assert {pool[i].level for i in curated(pool, 25)[0][20:]} <= {1, 2}


def test_curation_is_even_over_families_and_prefers_length() -> None:
    pool = [tiny(i, family, 1 + i % 20) for family, size in (("a", 200), ("b", 40), ("c", 40)) for i in range(size)]
    pool += [replace(one, correct=False, response="wrong") for one in pool]
    chosen, _ = curated(pool, 30)
    assert Counter(pool[i].family for i in chosen) == {"a": 10, "b": 10, "c": 10}
    length = np.mean([len(pool[i].response) for i in chosen])
    assert length > np.mean([len(one.response) for one in pool if one.correct]) + 20
    assert len({pool[i].problem for i in chosen}) == 30
    assert curated(pool, 30, seed=1)[0] != chosen
    backwards = pool[::-1]
    assert names(backwards, curated(backwards, 30)[0]) == names(pool, chosen)


def test_the_longest_is_drawn_half_the_time_the_next_a_quarter() -> None:
    pool = [tiny(i, "f", 1 + i) for i in range(10)]
    first = Counter(9 - curated(pool, 1, seed=seed)[0][0] for seed in range(400))
    assert abs(first[0] - 200) < 40
    assert abs(first[1] - 100) < 35


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("<think>1*1=1;1*1=1;1*1=1;1*1=1;", True),
        ("<think>1*1=1;1*1=1;1*1=1</think>Answer:1", False),
        ("so " + "we try again. " * 4, True),
        ("so " + "we try again. " * 3, False),
        ("Answer:10000000000", False),
        ("", False),
    ],
)
def test_repetition(text: str, loops: bool) -> None:
    assert repeats_itself(candidate(0, response=text), "tiny") == loops
