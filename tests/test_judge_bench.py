"""Benchmarks of judges: rm@k exact and by draws, majority and oracle, curves, and the F1 of ProcessBench."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasonlab.errors import UserError
from reasonlab.evaluate.curves import maj_at_k, rm_at_k
from reasonlab.judges.bench import (
    Question,
    answer_given,
    by_question,
    reward_bench,
    rm_by_draws,
    selection_curves,
    weighted_majority,
)
from reasonlab.judges.process_bench import Threshold, blind_f1, choose_threshold, first_below, process_bench
from reasonlab.judges.types import Candidate


def question(name: str, scores: Any, correct: Any, votes: Any = None) -> Question:
    right = np.asarray(correct, dtype=np.float64)
    given_votes = [int(one) for one in right] if votes is None else list(votes)
    return Question(name, np.asarray(scores, dtype=np.float64), right, given_votes)


def questions(count: int, answers: int, skill: float, seed: int = 0, levels: int = 0) -> list[Question]:
    """Answers to questions of all difficulties, scored by a judge with some skill; few levels make many ties."""
    generator = np.random.default_rng(seed)
    made = []
    for i in range(count):
        right = generator.random(answers) < generator.random()
        scores = skill * right + generator.standard_normal(answers)
        made.append(question(f"q{i}", np.round(scores * levels) / levels if levels else scores, right))
    return made


# --- pools -------------------------------------------------------------------------------------------------------


def test_a_pool_is_grouped_by_family_and_question() -> None:
    pool = [
        Candidate("p1", "?", "Answer: 4 ", correct=True, family="f"),
        Candidate("p2", "?", "so \\boxed{7}", correct=False, family="f"),
        Candidate("p1", "?", "<think>unfinished", correct=False, family="f"),
        Candidate("p1", "?", "Answer:5", correct=None, family="f"),
        Candidate("p1", "?", "Answer:5", correct=False, family="g"),
    ]
    found = by_question(pool, [1, 2, 3, 4, 5])
    assert found.ungraded == 1
    assert {family: [one.name for one in its] for family, its in found.families.items()} == {
        "f": ["p1", "p2"],
        "g": ["p1"],
    }
    first = found.families["f"][0]
    assert (first.scores.tolist(), first.correct.tolist(), first.votes) == ([1, 3], [1, 0], ["4", None])
    assert answer_given(pool[1]) == "7"
    with pytest.raises(UserError, match="as many scores"):
        by_question(pool, [1, 2])


# --- rm@k --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [0, 1, 3])
def test_draws_agree_with_the_exact_value(levels: int) -> None:
    """8 of 64 as published, with and without ties: within four standard errors, which are small."""
    made = questions(60, 64, 1.0, levels=levels)
    exact = float(np.mean([rm_at_k(one.scores, one.correct)[7] for one in made]))
    drawn = rm_by_draws(made)
    assert drawn.seeds == 100
    assert 0 < drawn.error < 0.006
    assert abs(drawn.mean - exact) < 4 * drawn.error


def test_the_error_of_draws_shrinks_with_seeds() -> None:
    made = questions(30, 16, 0.5)
    exact = float(np.mean([rm_at_k(one.scores, one.correct)[3] for one in made]))
    few, many = (rm_by_draws(made, k=4, seeds=seeds) for seeds in (50, 5000))
    assert many.error < few.error / 5
    assert abs(many.mean - exact) < 4 * many.error


def test_draws_of_a_question_do_not_depend_on_the_others() -> None:
    made = questions(5, 16, 1.0)
    parts = [rm_by_draws([one], k=4).mean for one in made]
    assert rm_by_draws(made, k=4).mean == pytest.approx(np.mean(parts))
    assert rm_by_draws(made, k=4, seed=1) != rm_by_draws(made, k=4)


def test_a_perfect_a_random_and_a_perverse_judge() -> None:
    made = questions(40, 16, 0.0)
    perfect = [one._replace(scores=one.correct) for one in made]
    perverse = [one._replace(scores=-one.correct) for one in made]
    flat = [one._replace(scores=np.zeros(16)) for one in made]
    best, worst, lot = (reward_bench({"f": judge}, k=4)["f"] for judge in (perfect, perverse, flat))
    assert best.rm.estimate == pytest.approx(best.oracle.estimate)
    assert best.rm_drawn.mean == pytest.approx(best.oracle.estimate, abs=4 * best.rm_drawn.error)
    assert worst.rm.estimate < worst.single.estimate < best.rm.estimate
    assert lot.rm.estimate == pytest.approx(lot.single.estimate)


def test_the_table_has_a_row_for_each_family_and_their_plain_mean() -> None:
    families = {"easy": questions(20, 12, 2.0, 1), "hard": questions(60, 12, 0.5, 2)}
    rows = reward_bench(families, k=4)
    assert list(rows) == ["easy", "hard", "average"]
    for name in ("rm", "majority", "oracle", "single"):
        parts = [getattr(rows[family], name).estimate for family in families]
        assert getattr(rows["average"], name).estimate == pytest.approx(np.mean(parts))
    for row in rows.values():
        assert row.rm.low < row.rm.estimate < row.rm.high
        assert row.rm.estimate <= row.oracle.estimate
        assert abs(row.rm_drawn.mean - row.rm.estimate) < 4 * row.rm_drawn.error
    assert rows["easy"].rm.high - rows["easy"].rm.low > rows["hard"].rm.high - rows["hard"].rm.low
    assert rows["average"].questions == 80


def test_the_interval_of_the_average_is_narrower_than_those_of_its_parts() -> None:
    families = {f"f{i}": questions(50, 8, 1.0, i) for i in range(4)}
    rows = reward_bench(families, k=4)
    widths = [row.rm.high - row.rm.low for row in rows.values()]
    assert widths[-1] == pytest.approx(np.mean(widths[:-1]) / 2, rel=0.25)


def test_questions_with_too_few_answers_are_counted() -> None:
    made = [*questions(5, 8, 1.0), question("short", [1, 2], [0, 1])]
    assert reward_bench({"f": made}, k=4)["f"].short == 1
    with pytest.raises(UserError, match="no question of f has 9 graded answers"):
        reward_bench({"f": made}, k=9)


# --- curves ------------------------------------------------------------------------------------------------------


def brute_force(one: Question, k: int) -> float:
    """Weighted majority over all subsets."""
    found = []
    for subset in combinations(range(len(one.scores)), k):
        sums: dict[Any, float] = {}
        for i in subset:
            vote = "right!" if one.correct[i] else one.votes[i]
            if vote is not None:
                sums[vote] = sums.get(vote, 0.0) + one.scores[i]
        winners = [vote for vote, total in sums.items() if math.isclose(total, max(sums.values()))]
        found.append(winners.count("right!") / len(winners) if winners else 0.0)
    return float(np.mean(found))


ANSWERS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.7]), st.booleans(), st.sampled_from(["a", "b", None])),
    min_size=1,
    max_size=6,
)


@given(ANSWERS)
def test_weighted_majority_of_all_answers_is_exact(answers: list[Any]) -> None:
    scores, correct, votes = zip(*answers, strict=True)
    one = question("q", scores, correct, votes)
    assert weighted_majority(one, len(answers)) == pytest.approx(brute_force(one, len(answers)))


def test_weighted_majority_by_draws_is_near_the_mean_over_subsets() -> None:
    generator = np.random.default_rng(3)
    one = question("q", generator.random(9), generator.random(9) < 0.4, generator.choice(["a", "b", None], 9))
    for k in (1, 3, 6):
        assert abs(weighted_majority(one, k, draws=4000) - brute_force(one, k)) < 0.03


@given(ANSWERS)
def test_equal_weights_are_a_majority(answers: list[Any]) -> None:
    _, correct, votes = zip(*answers, strict=True)
    one = question("q", np.full(len(answers), 0.3), correct, votes)
    n = len(answers)
    assert weighted_majority(one, n) == pytest.approx(float(maj_at_k(list(votes), correct)[n - 1]))


def test_nearly_equal_weights_decide_and_equal_ones_share() -> None:
    one = question("q", [0.95, 1.0], [1, 0], ["r", "a"])
    assert weighted_majority(one, 2) == 0.0
    assert weighted_majority(one._replace(scores=np.ones(2)), 2) == 0.5
    assert weighted_majority(one._replace(votes=["r", None]), 2) == 1.0


def test_raw_scores_need_the_sigmoid() -> None:
    one = question("q", [-3.0, -1.0, -1.0], [1, 0, 0], ["r", "a", "b"])
    with pytest.raises(UserError, match="sigmoid"):
        weighted_majority(one, 3)
    assert weighted_majority(one, 3, "sigmoid") == 0.0
    assert weighted_majority(one._replace(scores=np.array([3.0, -1.0, -1.0])), 3, "sigmoid") == 1.0


def test_curves_start_at_a_random_answer_and_stay_below_the_oracle() -> None:
    made = questions(50, 16, 1.5)
    curves = selection_curves(made, (1, 2, 4, 8, 16), "sigmoid")
    single = float(np.mean([one.correct.mean() for one in made]))
    for name in ("best_of_n", "majority", "oracle"):
        assert getattr(curves, name)[0].estimate == pytest.approx(single)
    assert curves.weighted_majority[0].estimate == pytest.approx(single, abs=0.02)
    for name in ("best_of_n", "majority", "weighted_majority"):
        for point, bound in zip(getattr(curves, name), curves.oracle, strict=True):
            assert point.estimate <= bound.estimate + 0.02
            assert point.low <= point.estimate <= point.high
    assert curves.best_of_n[-1].estimate > single + 0.05
    with pytest.raises(UserError, match="between 1 and 16"):
        selection_curves(made, (32,))


# --- ProcessBench ------------------------------------------------------------------------------------------------


def f1_at(steps: list[list[float]], labels: list[int], threshold: float) -> float:
    hits = [first_below(one, threshold) == label for one, label in zip(steps, labels, strict=True)]
    wrong = np.mean([hit for hit, label in zip(hits, labels, strict=True) if label >= 0])
    right = np.mean([hit for hit, label in zip(hits, labels, strict=True) if label < 0])
    return float(2 * wrong * right / (wrong + right)) if wrong + right else 0.0


def test_a_step_at_the_threshold_is_not_wrong() -> None:
    assert first_below([0.6, 0.5, 0.4], 0.5) == 2
    assert first_below([0.5], 0.5) == -1


def test_f1_by_hand() -> None:
    """Of three wrong samples one is placed right, of two right samples one passes: F1 of 1/3 and 1/2."""
    steps = [[0.9, 0.1, 0.2], [0.9, 0.9, 0.2], [0.9, 0.8], [0.9, 0.8], [0.9, 0.4]]
    found = process_bench(steps, [1, 1, 0, -1, -1], "math", Threshold(0.5))
    assert found.location.estimate == pytest.approx(1 / 3)
    assert found.passed.estimate == pytest.approx(1 / 2)
    assert found.f1.estimate == pytest.approx(0.4)
    assert found.noticed == pytest.approx(2 / 3)
    assert (found.wrong_samples, found.right_samples) == (3, 2)
    assert found.f1.low <= found.f1.estimate <= found.f1.high


def test_guessing_is_worth_what_the_best_guesser_gets() -> None:
    """Against every mixture of "no error" and one place, tried out."""
    counts, labels = [3, 4, 5, 3, 2, 2], [2, 3, 4, 0, -1, -1]  # three of four errors in the last step
    found = blind_f1(counts, labels)
    chances = np.linspace(0, 1, 10001)[1:]
    a, b = (1 - chances) * 3 / 4, chances
    assert found == pytest.approx(float((2 * a * b / (a + b)).max()), abs=1e-6)
    assert blind_f1([9, 8, 7, 5], [1, 1, 2, -1]) == pytest.approx(2 * (2 / 3) / (1 + (2 / 3) ** 0.5) ** 2)
    assert blind_f1([2, 2], [1, 1]) == blind_f1([2, 2], [-1, -1]) == 0


SAMPLES = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 1.0]), min_size=1, max_size=5), min_size=2, max_size=8
)


@given(SAMPLES, st.data())
def test_the_chosen_threshold_is_the_best_there_is(steps: list[list[float]], data: st.DataObject) -> None:
    labels = [data.draw(st.integers(-1, len(one) - 1)) for one in steps]
    labels[0], labels[1] = -1, 0
    chosen = choose_threshold(steps, labels, "gsm8k")
    grid = np.linspace(-0.05, 1.15, 241)
    assert chosen.f1 == pytest.approx(max(f1_at(steps, labels, threshold) for threshold in grid))
    assert f1_at(steps, labels, chosen.value) == pytest.approx(chosen.f1)
    if chosen.f1:
        assert process_bench(steps, labels, "math", chosen).f1.estimate == pytest.approx(chosen.f1)


def test_the_middle_of_the_widest_best_stretch_is_taken() -> None:
    assert choose_threshold([[0.9, 0.1], [0.8]], [1, -1], "s") == Threshold(pytest.approx(0.45), 1.0, "s")


def test_a_threshold_serves_another_split_than_its_own() -> None:
    steps, labels = [[0.9, 0.1], [0.8]], [1, -1]
    chosen = choose_threshold(steps, labels, "gsm8k")
    found = process_bench(steps, labels, "math", chosen)
    assert (found.split, found.threshold) == ("math", chosen)
    with pytest.raises(UserError, match="chosen on gsm8k"):
        process_bench(steps, labels, "gsm8k", chosen)


@pytest.mark.parametrize(
    ("steps", "labels", "said"),
    [
        ([[0.1]], [0, 1], "1 scored samples and 2 labels"),
        ([[0.1], [0.2]], [-1, -1], "wrong samples and right ones"),
        ([[0.1], []], [0, -1], "sample 1"),
        ([[0.1], [0.2]], [1, -1], "sample 0"),
        ([[0.1], [math.nan]], [0, -1], "sample 1"),
    ],
)
def test_mistakes_are_named(steps: Any, labels: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        process_bench(steps, labels, "math", Threshold(0.5))
    with pytest.raises(UserError, match=said):
        choose_threshold(steps, labels, "math")


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """A judge that places 60 % of errors and passes 80 % of right samples has F1 = 0.686."""
    truth, covered = 2 * 0.6 * 0.8 / 1.4, 0
    for seed in range(60):
        generator = np.random.default_rng(seed)
        steps = [[float(generator.random() > 0.6)] for _ in range(80)] + [
            [float(generator.random() < 0.8)] for _ in range(80)
        ]
        found = process_bench(steps, [0] * 80 + [-1] * 80, "x", Threshold(0.5), seed).f1
        covered += found.low <= truth <= found.high
    assert covered >= 52
