"""What claims are judged by: scores over seeds and questions, their intervals, the verdicts and their record."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from reasonlab.evaluate.evaluator import Answer
from reasonlab.evaluate.statistics import (
    Interval,
    mean_interval,
    ratio_interval,
    score_interval,
    seed_mean_interval,
    seed_score_interval,
    wilson,
)
from reasonlab.studies.scores import Scores, difference, interval, panels_of, points, ratio
from reasonlab.studies.verdicts import ArmCost, Claim, Outcome, judge, record, table

Array = NDArray[np.float64]


def answer(problem: str, sample: int, verdict: str, tokens: int, family: str = "sum", level: int = 1) -> Answer:
    return Answer(problem, family, level, "1+1", "2", sample, verdict, "2", tokens, "stop", "Answer: 2")


def drawn(rng: np.random.Generator, questions: int, samples: int, families: Sequence[str] = ("sum",)) -> list[Answer]:
    """Answers of one seed in the evaluator's order: question by question."""
    return [
        answer(f"q{i}", k, rng.choice(["correct", "wrong"]), int(rng.integers(5, 50)), families[i % len(families)])
        for i in range(questions)
        for k in range(samples)
    ]


def bounds(value: Interval) -> tuple[float, float, float]:
    return value.estimate, value.low, value.high


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_are_question_means_of_each_seed_whatever_the_order_of_answers() -> None:
    rng = np.random.default_rng(0)
    seeds = [drawn(rng, 7, 3) for _ in range(2)]
    shuffled = [seeds[0], [seeds[1][i] for i in rng.permutation(len(seeds[1]))]]
    scores = Scores.of(shuffled)
    assert (scores.seeds, scores.samples) == (2, 3)
    assert scores.problems == tuple(f"sum: q{i}" for i in range(7))
    for seed, answers in enumerate(seeds):
        for place in range(7):
            group = answers[3 * place : 3 * place + 3]
            assert scores.accuracy[seed, place] == pytest.approx(np.mean([a.verdict == "correct" for a in group]))
            assert scores.tokens[seed, place] == pytest.approx(np.mean([a.tokens for a in group]))
    assert sorted(scores.lengths) == sorted(a.tokens for answers in seeds for a in answers)


def test_ungraded_answers_are_left_out_and_questions_without_a_grade_are_left_out_of_all_seeds() -> None:
    first = [
        *(answer("a", 0, "correct", 10), answer("a", 1, "error", 99)),
        *(answer("b", 0, "wrong", 20), answer("b", 1, "correct", 40)),
        *(answer("c", 0, "correct", 30), answer("c", 1, "correct", 30)),
    ]
    second = [replace(a, verdict="timeout") if a.problem == "c" else a for a in first]
    scores = Scores.of([first, second])
    assert scores.problems == ("sum: a", "sum: b")
    assert scores.accuracy.tolist() == [[1.0, 0.5]] * 2
    assert scores.tokens.tolist() == [[10.0, 30.0]] * 2


def test_only_keeps_the_named_questions_in_order() -> None:
    scores = Scores.of([drawn(np.random.default_rng(1), 6, 1)])
    part = scores.only(["sum: q4", "sum: q1", "elsewhere"])
    assert part.problems == ("sum: q1", "sum: q4")
    assert part.accuracy.tolist() == scores.accuracy[:, [1, 4]].tolist()
    assert part.tokens.tolist() == scores.tokens[:, [1, 4]].tolist()
    assert scores.only(scores.problems) is scores


def test_panels_divide_the_questions() -> None:
    rng = np.random.default_rng(2)
    seeds = [drawn(rng, 30, 2, ("sum", "gcd", "word")) for _ in range(2)]
    panels, whole = panels_of(seeds, lambda a: a.family), Scores.of(seeds)
    assert list(panels) == ["sum", "gcd", "word"]
    assert sorted(p for panel in panels.values() for p in panel.problems) == sorted(whole.problems)
    for name, panel in panels.items():
        assert panel.problems == tuple(dict.fromkeys(f"{name}: {a.problem}" for a in seeds[0] if a.family == name))
    assert np.mean([panel.accuracy.mean() for panel in panels.values()]) == pytest.approx(whole.accuracy.mean())


# --- intervals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 4])
def test_intervals_of_one_seed_are_those_of_its_answers(samples: int) -> None:
    answers = drawn(np.random.default_rng(samples), 40, samples)
    grades = np.array([a.verdict == "correct" for a in answers], float).reshape(40, samples)
    tokens = np.array([a.tokens for a in answers], float).reshape(40, samples)
    scores = Scores.of([answers])
    assert bounds(scores.accuracy_interval()) == pytest.approx(bounds(score_interval(grades)))
    assert bounds(scores.tokens_interval()) == pytest.approx(bounds(mean_interval(tokens.mean(axis=1))))


def test_intervals_of_several_seeds_are_those_over_seeds_and_questions() -> None:
    rng = np.random.default_rng(3)
    scores = Scores.of([drawn(rng, 40, 2) for _ in range(3)])
    assert scores.accuracy_interval() == seed_score_interval(scores.accuracy)
    assert scores.tokens_interval() == seed_mean_interval(scores.tokens)


def test_one_question_of_several_seeds_says_nothing_about_others() -> None:
    rng = np.random.default_rng(4)
    scores = Scores.of([drawn(rng, 1, 1) for _ in range(3)])
    assert bounds(scores.tokens_interval()) == (pytest.approx(scores.tokens.mean()), -math.inf, math.inf)
    assert bounds(scores.accuracy_interval()) == pytest.approx(bounds(wilson(float(scores.accuracy.mean()), 1)))


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_difference_is_paired_by_question_and_seed(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    a = rng.normal(size=(seeds, 50)) + 10 * rng.normal(size=50)  # questions differ far more than the two sides
    b = a + 1 + 0.1 * rng.normal(size=(seeds, 50))
    found = difference(a, b)
    assert found == interval(b - a)
    assert 0.9 < found.low < found.estimate < found.high < 1.1
    assert bounds(difference(b, a)) == pytest.approx((-found.estimate, -found.high, -found.low))
    assert bounds(points(found)) == pytest.approx(tuple(100 * x for x in bounds(found)))


# --- ratio -----------------------------------------------------------------------------------------------------------


def lengths(
    rng: np.random.Generator, seeds: int, questions: int, by_seed: float, by_question: float = 0.4
) -> tuple[Array, Array]:
    """Tokens before, from the one base model of all seeds, and after: 1.5 times as many, times what the question, the
    seed and both together make of it. The ratio of the expectations is 1.5."""

    def factor(spread: float, shape: tuple[int, int]) -> Array:
        return np.exp(spread * rng.normal(size=shape) - spread**2 / 2)

    before = np.exp(3 + 0.6 * rng.normal(size=(1, questions)))
    growth = factor(by_question, (1, questions)) * factor(by_seed, (seeds, 1)) * factor(0.4, (seeds, questions))
    return np.repeat(before, seeds, axis=0), 1.5 * before * growth


@pytest.mark.parametrize(
    ("seeds", "by_seed", "by_question", "least"),
    [
        (1, 0.0, 0.4, 0.93),
        (3, 0.0, 0.4, 0.93),
        (3, 0.03, 0.4, 0.93),
        (3, 0.3, 0.4, 0.92),
        # The hardest case for three seeds: all questions lengthen alike, and the seeds' part is small enough to be
        # overlooked and large enough to matter.
        (3, 0.03, 0.0, 0.89),
    ],
)
def test_ratio_covers(seeds: int, by_seed: float, by_question: float, least: float) -> None:
    rng = np.random.default_rng(10 * seeds)
    found = [ratio(*lengths(rng, seeds, 480, by_seed, by_question)) for _ in range(2000)]
    assert least <= np.mean([value.low <= 1.5 <= value.high for value in found]) <= 0.98


def test_ratio_is_that_of_a_bootstrap_over_questions() -> None:
    before, after = lengths(np.random.default_rng(5), 1, 600, 0.0)
    ours, theirs = ratio(before, after), ratio_interval(before[0], after[0], seed=0, resamples=20_000)
    width = theirs.high - theirs.low
    assert ours.estimate == pytest.approx(theirs.estimate)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.08 * width)


@pytest.mark.parametrize("seeds", [1, 3])
def test_ratio_in_exact_cases(seeds: int) -> None:
    before, after = lengths(np.random.default_rng(6), seeds, 30, 0.2)
    assert bounds(ratio(before, 2 * before)) == pytest.approx((2, 2, 2))
    scaled = bounds(ratio(before / 3, after))
    assert scaled == pytest.approx(tuple(3 * x for x in bounds(ratio(before, after))))


def test_a_ratio_to_nothing_is_unknown_and_so_undecided() -> None:
    zero, one = np.zeros((2, 5)), np.ones((2, 5))
    value = ratio(zero, one)
    assert math.isnan(value.estimate)
    assert (value.low, value.high) == (-math.inf, math.inf)
    assert judge("id", "text", value, "", 0.97).verdict == "undecided"


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "threshold", "verdict"),
    [
        (0.1, 0.3, 0.0, "holds"),
        (-0.3, -0.1, 0.0, "fails"),
        (-0.1, 0.3, 0.0, "undecided"),
        (0.0, 0.3, 0.0, "undecided"),
        (-0.3, 0.0, 0.0, "undecided"),
        (0.98, 1.01, 0.97, "holds"),
        (0.96, 1.01, 0.97, "undecided"),
        (0.90, 0.96, 0.97, "fails"),
    ],
)
def test_a_claim_is_judged_by_its_whole_interval(low: float, high: float, threshold: float, verdict: str) -> None:
    claim = judge("id", "text", Interval((low + high) / 2, low, high), "published", threshold)
    assert claim == Claim("id", "text", verdict, (low + high) / 2, (low, high), "published")  # type: ignore[arg-type]


def test_the_record_says_everything_and_is_strict_json() -> None:
    claims = [
        judge("clear", "rises", Interval(1.5, 1.25, 1.75), "+2"),
        judge("unknown", "ratio to nothing", Interval(math.nan, -math.inf, math.inf), ""),
        judge("half-known", "one question", Interval(0.5, -math.inf, math.inf), ""),
        Claim("without", "never reached", "fails", None, None),
    ]
    found = Outcome(claims, [ArmCost("rl", 0.75, 20.5, 1_234_567, 61.5)], {"model": "tiny"}, None)
    content = record("long2short", "cpu", (3, 4), "reasonlab study long2short", "cpu", found)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads(json.dumps(content), parse_constant=refuse)
    assert {"study", "scale", "seeds", "command", "commit", "hardware", "claims", "arms"} <= content.keys()
    assert content["seeds"] == [3, 4]
    assert "gain_split" not in content
    assert "CPU cores" in content["hardware"]
    keys = {"id", "text", "verdict", "estimate", "interval", "published"}
    assert all(claim.keys() == keys for claim in content["claims"])
    assert [claim["estimate"] for claim in content["claims"]] == [1.5, None, 0.5, None]
    assert [claim["interval"] for claim in content["claims"]] == [[1.25, 1.75], None, None, None]
    assert {"arm", "accuracy", "tokens", "generated_tokens", "seconds"} <= content["arms"][0].keys()

    words = table(content)
    for part in ("holds", "+1.5", "[+1.25, +1.75]", "published: +2", "75.0%", "20.5", "1,234,567"):
        assert part in words
    rows = [line.split()[:2] for line in words.splitlines()]
    assert [row for row in rows if row and row[0] in ("holds", "fails", "undecided")] == [
        [claim.verdict, claim.id] for claim in claims
    ]


def test_the_commit_can_be_told_to_a_copy_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REASONLAB_COMMIT", "abc123+")
    content = record("k15-dynamics", "gpu", [0], "", "cpu", Outcome([], [], {}, {"before": 0}))
    assert content["commit"] == "abc123+"
    assert content["gain_split"] == {"before": 0}
