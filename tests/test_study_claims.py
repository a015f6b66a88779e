"""The claims of the studies on made-up scores: what holds, what fails, what stays undecided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reasonlab.evaluate.frontier import joint
from reasonlab.evaluate.statistics import mean_interval
from reasonlab.figures.panel_grid import FORCED, TOTAL
from reasonlab.figures.published import kimi_k15
from reasonlab.studies import k15_dynamics as dynamics
from reasonlab.studies import long2short as shortening
from reasonlab.studies.scores import Scores, interval
from reasonlab.studies.verdicts import Claim

Array = NDArray[np.float64]
QUESTIONS = 200

# --- made-up scores --------------------------------------------------------------------------------------------------


def made(accuracy: float, tokens: float, seeds: int = 2) -> Scores:
    """Questions from easy to hard, of which the first `accuracy` are solved, and lengths around `tokens`. Seeds differ
    a little. Two of these differ question by question as their accuracies and tokens do."""
    places = (np.arange(QUESTIONS) + 0.5) / QUESTIONS
    seed = 0.004 * (np.arange(seeds) - (seeds - 1) / 2)[:, None]
    right = (places[None] < accuracy + seed).astype(float)
    length = tokens * (0.5 + places[None]) * (1 + seed)
    problems = tuple(f"p{i}" for i in range(QUESTIONS))
    return Scores(problems, right, length, length.ravel(), 1)


Points = Mapping[str, tuple[float, float]]  # panel → accuracy, tokens


def curve(*checkpoints: Points, **more: int) -> dynamics.Curve:
    """Checkpoints 0, 10, 20, …; a total, if not given, is the mean of the panels."""
    whole = [{TOTAL: tuple(np.mean(list(points.values()), axis=0)), **points} for points in checkpoints]
    return {10 * i: {name: made(*one, **more) for name, one in points.items()} for i, points in enumerate(whole)}


def by_id(claims: Sequence[Claim]) -> dict[str, Claim]:
    assert len({claim.id for claim in claims}) == len(claims)
    return {claim.id: claim for claim in claims}


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamics, "RESAMPLES", 400)


RISE = curve({"easy": (0.6, 20.0), "hard": (0.2, 20.0)}, {"easy": (0.8, 30.0), "hard": (0.6, 60.0)})


# --- k15-dynamics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "accuracy", "length"),
    [((0.7, 30.0), "holds", "holds"), ((0.5, 20.0), "undecided", "undecided"), ((0.3, 10.0), "fails", "fails")],
)
@pytest.mark.parametrize("seeds", [1, 3])
def test_what_rises_holds_what_stays_is_undecided_what_falls_fails(
    after: tuple[float, float], accuracy: str, length: str, seeds: int
) -> None:
    claims = by_id(dynamics.claims({dynamics.MAIN: curve({"a": (0.5, 20.0)}, {"a": after}, seeds=seeds)}))
    rises, lengthens = claims["accuracy-rises"], claims["length-rises"]
    assert (rises.verdict, lengthens.verdict) == (accuracy, length)
    assert rises.estimate == pytest.approx(100 * (after[0] - 0.5), abs=0.5)
    assert lengthens.estimate == pytest.approx(after[1] / 20)
    assert rises.interval is not None
    assert rises.interval[0] <= 100 * (after[0] - 0.5) <= rises.interval[1]


def test_arms_that_were_not_run_have_no_claims() -> None:
    always = {"accuracy-rises", "length-rises", "both-on-most-panels", "harder-lengthen-more"}
    assert by_id(dynamics.claims({dynamics.MAIN: RISE})).keys() == always
    forced = {step: {**panels, FORCED: made(0.8, 40.0)} for step, panels in RISE.items()}
    everything = {dynamics.MAIN: forced, dynamics.REST: RISE, dynamics.CURRICULUM: RISE, dynamics.OTHER_SIZE: RISE}
    assert by_id(dynamics.claims(everything)).keys() == always | {
        *("skill-rises", "beats-rest", "curriculum-beats-uniform", "larger-needs-fewer-tokens")
    }


def test_arms_are_compared_at_the_last_iteration_they_share_in_the_right_direction() -> None:
    points: list[Points] = [{"a": (0.3, 20.0)}, {"a": (0.5, 20.0)}, {"a": (0.9, 20.0)}]
    lower: list[Points] = [{"a": (0.3, 20.0)}, {"a": (0.4, 20.0)}]
    claims = by_id(
        dynamics.claims(
            {dynamics.MAIN: curve(*points), dynamics.REST: curve(*lower), dynamics.CURRICULUM: curve(*lower)}
        )
    )
    assert claims["beats-rest"].estimate == pytest.approx(10)
    assert claims["beats-rest"].verdict == "holds"
    assert claims["curriculum-beats-uniform"].estimate == pytest.approx(-10)
    assert claims["curriculum-beats-uniform"].verdict == "fails"


def test_arms_that_share_only_their_beginning_are_not_compared() -> None:
    """As when a time limit stopped one of them between two evaluations."""
    stopped = {0: RISE[0], 7: RISE[10]}
    claim = by_id(dynamics.claims({dynamics.MAIN: stopped, dynamics.GRPO: RISE}))["beats-grpo"]
    assert (claim.verdict, claim.estimate, claim.interval) == ("undecided", None, None)


@pytest.mark.parametrize(
    ("kinds", "verdict", "counts"),
    [
        ("rrrs", "holds", (3, 3, 4)),  # certain, seen, possible
        ("rrss", "undecided", (2, 2, 4)),
        ("rrff", "fails", (2, 2, 2)),
        ("rrrf", "holds", (3, 3, 3)),
        ("ffff", "fails", (0, 0, 0)),
        ("aall", "fails", (0, 0, 0)),
    ],
)
def test_both_rise_counts_panels(kinds: str, verdict: str, counts: tuple[int, int, int]) -> None:
    """r: both rise, f: both fall, s: neither moves, a: accuracy alone rises, l: length alone."""
    after = {"r": (0.7, 30.0), "f": (0.3, 10.0), "s": (0.5, 20.0), "a": (0.7, 10.0), "l": (0.3, 30.0)}
    names = [f"{kind}{i}" for i, kind in enumerate(kinds)]
    noise = np.random.default_rng(0).normal(size=(2, QUESTIONS))
    moved = curve(dict.fromkeys(names, (0.5, 20.0)), {name: after[name[0]] for name in names})
    for name in names:
        if name[0] == "s":  # not the same numbers, but none that rise for certain
            scores = moved[10][name]
            moved[10][name] = Scores(scores.problems, scores.accuracy + noise, scores.tokens + noise, scores.lengths, 1)
    claim = dynamics.both_rise(moved)
    still = {name: moved[10][name].tokens.mean() > moved[0][name].tokens.mean() for name in names if name[0] == "s"}
    certain, seen, possible = counts
    assert claim.verdict == verdict
    assert claim.interval == (certain, possible)
    assert claim.estimate == seen + sum(still.values())


@pytest.mark.parametrize(("sign", "verdict"), [(1, "holds"), (0, "undecided"), (-1, "fails")])
def test_harder_panels_lengthen_more(sign: int, verdict: str) -> None:
    """Growth follows the error rate, or nothing; and every question grows in its own way."""
    rng = np.random.default_rng(1)
    measured = curve({f"p{i}": (0.2 + 0.1 * i, 20.0) for i in range(7)}, {f"p{i}": (0.8, 20.0) for i in range(7)})
    before, after = measured[0], measured[10]
    names = dynamics.families(measured)
    wrong = {name: 1 - before[name].accuracy.mean() for name in names}
    for name, error in wrong.items():
        tokens = before[name].tokens * np.exp(sign * error + 0.3 * rng.normal(size=QUESTIONS))
        after[name] = Scores(after[name].problems, after[name].accuracy, tokens, tokens.ravel(), 1)
    claim = dynamics.harder_lengthen_more(measured)
    growth = {name: math.log(after[name].tokens.mean() / before[name].tokens.mean()) for name in names}
    order = sorted(names, key=lambda name: wrong[name])
    expected = np.mean([growth[name] for name in order[-3:]]) - np.mean([growth[name] for name in order[:3]])
    assert claim.estimate == pytest.approx(expected), "the middle one of seven panels belongs to no half"
    assert claim.verdict == verdict


@pytest.mark.parametrize(("seeds", "seed_noise"), [(1, 0.0), (3, 0.0), (3, 0.2)])
def test_the_interval_of_the_contrast_covers_the_truth(seeds: int, seed_noise: float) -> None:
    """What a seed does to all panels alike cancels; questions and panels scatter."""
    rng = np.random.default_rng(seeds)
    truth, covered, repetitions = 0.3, 0, 200
    for _ in range(repetitions):
        panels: dict[int, dict[str, Scores]] = {0: {}, 10: {}}
        common = seed_noise * rng.normal(size=(seeds, 1))
        for place in range(4):
            right = np.tile(np.arange(40) < 5 + 10 * place, (seeds, 1)).astype(float)
            base = 20 * np.exp(0.4 * rng.normal(size=40))
            a = base * np.exp(0.3 * rng.normal(size=(seeds, 40)))
            b = base * np.exp(0.3 * rng.normal(size=(seeds, 40)) + common + (truth if place < 2 else 0.0) + 0.5)
            ids = tuple(f"{place}-{i}" for i in range(40))
            panels[0][f"p{place}"], panels[10][f"p{place}"] = (Scores(ids, right, x, x.ravel(), 1) for x in (a, b))
        interval = dynamics.harder_lengthen_more(panels).interval
        assert interval is not None
        covered += interval[0] <= truth <= interval[1]
    assert covered / repetitions > 0.9


def test_one_panel_has_no_halves() -> None:
    assert dynamics.harder_lengthen_more(curve({"a": (0.2, 20.0)}, {"a": (0.8, 30.0)})).verdict == "undecided"


def test_slopes_are_least_squares_over_checkpoints() -> None:
    points: list[Points] = [
        {"a": (0.30, 20.0), "b": (0.2, 50.0)},
        {"a": (0.45, 26.0), "b": (0.3, 48.0)},
        {"a": (0.50, 33.0), "b": (0.5, 44.0)},
        {"a": (0.70, 35.0), "b": (0.6, 47.0)},
    ]
    measured = curve(*points)
    rows = {(row.panel, row.against): row for row in dynamics.slope_rows(dynamics.MAIN, measured)}
    assert set(rows) == {(panel, against) for panel in (TOTAL, "a", "b") for against in ("own", "total")}
    for (panel, against), row in rows.items():
        x = [panels[TOTAL if against == "total" else panel].tokens.mean() for panels in measured.values()]
        y = [panels[panel].accuracy.mean() for panels in measured.values()]
        assert row.slope == pytest.approx(np.polyfit(x, y, 1)[0])
        assert row.correlation == pytest.approx(np.corrcoef(x, y)[0, 1])
        assert row.slope_low <= row.slope <= row.slope_high
        assert row.slope_low < row.slope_high
    two = dynamics.slope_rows(dynamics.MAIN, RISE)
    assert all(math.isnan(row.slope_low) and math.isnan(row.slope_high) for row in two)
    flat = dynamics.slope_rows(dynamics.MAIN, curve(*[{"a": (0.5, 20.0)}] * 3))
    assert {(row.slope, row.correlation) for row in flat} == {(0.0, 0.0)}


@pytest.mark.parametrize(
    ("large", "verdict", "estimate"),
    [
        ([(0.4, 10.0), (0.7, 15.0), (0.8, 60.0)], "holds", 0.5),  # at the first checkpoint that reaches it
        ([(0.4, 10.0), (0.7, 45.0), (0.8, 15.0)], "fails", 1.5),
        ([(0.4, 10.0), (0.7, 30.0), (0.8, 15.0)], "undecided", 1.0),
        ([(0.1, 10.0), (0.5, 15.0), (0.6, 15.0)], "undecided", None),  # never reaches it
    ],
)
@pytest.mark.parametrize("main_is_large", [False, True])
def test_larger_needs_fewer_tokens(
    large: list[tuple[float, float]], verdict: str, estimate: float | None, main_is_large: bool
) -> None:
    small = curve({"a": (0.2, 20.0)}, {"a": (0.7, 30.0)})
    other = curve(*({"a": point} for point in large))
    main, second = (other, small) if main_is_large else (small, other)
    curves = {dynamics.MAIN: main, dynamics.OTHER_SIZE: second}
    claim = by_id(dynamics.claims(curves, main_is_large))["larger-needs-fewer-tokens"]
    assert claim.verdict == verdict
    assert claim.estimate == (None if estimate is None else pytest.approx(estimate))
    assert (claim.interval is None) == (estimate is None)


def test_the_gain_is_style_and_skill() -> None:
    free = curve({"a": (0.4, 20.0)}, {"a": (0.8, 30.0)})
    with_control = {step: {**panels, FORCED: made(0.7 + step / 100, 40.0)} for step, panels in free.items()}
    split: Any = dynamics.gain_split(with_control)
    assert (split["before"], split["after"]) == (0, 10)
    assert [split[name][0] for name in ("gain", "style", "skill")] == pytest.approx([0.4, 0.3, 0.1])
    for name in ("gain", "style", "skill"):
        estimate, low, high = split[name]
        assert low <= estimate <= high
    skill = with_control[10][FORCED].accuracy - with_control[0][FORCED].accuracy
    one_seed = {
        step: {name: Scores(s.problems, s.accuracy[:1], s.tokens[:1], s.lengths, 1) for name, s in panels.items()}
        for step, panels in with_control.items()
    }
    alone: Any = dynamics.gain_split(one_seed)
    expected = mean_interval(skill[0])
    assert alone["skill"] == pytest.approx([expected.estimate, expected.low, expected.high])

    assert dynamics.gain_split(free) is None  # no control
    assert dynamics.gain_split({0: with_control[0]}) is None  # no after
    assert dynamics.gain_split({s: {n: p.only(["p0"]) for n, p in c.items()} for s, c in with_control.items()}) is None


def test_a_question_that_was_not_graded_once_is_left_out_everywhere() -> None:
    main, rest = curve({"a": (0.5, 20.0)}, {"a": (0.7, 30.0)}), curve({"a": (0.5, 20.0)}, {"a": (0.6, 30.0)})
    whole = main[10][TOTAL]
    main[10][TOTAL] = whole.only(whole.problems[1:])  # now difference and stack would refuse, or pair shifted ones
    shared = dynamics.on_shared_questions({dynamics.MAIN: main, dynamics.REST: rest})
    every = [scores.problems for arm in shared.values() for panels in arm.values() for scores in panels.values()]
    assert set(every) == {whole.problems[1:]}
    claims = by_id(dynamics.claims(shared))
    assert claims["beats-rest"].estimate == pytest.approx(100 * 20 / 199)


def test_published_numbers_in_the_claims_are_those_of_the_data() -> None:
    everything = dict.fromkeys(dynamics.arms, RISE)
    claims = by_id(dynamics.claims(everything))
    published = kimi_k15()
    total = published["dynamics"]["panels"]["total"]
    (a0, a1), (t0, t1) = ((total[name][0], total[name][-1]) for name in ("accuracy", "tokens"))
    said = f"{100 * (a1 - a0):+.1f} points ({100 * a0:.1f} to {100 * a1:.1f} %)"
    assert claims["accuracy-rises"].published == said
    assert claims["length-rises"].published == f"{t1 / t0:.1f} ({t0:,} to {t1:,} tokens)"
    panels = len(published["dynamics"]["panels"]) - 1
    assert claims["both-on-most-panels"].published == f"{panels} of {panels} panels beside the total"
    ours, rest = (
        np.mean([accuracy for _, accuracy in published["rest"][name][-5:]]) for name in ("mirror descent", "ReST")
    )
    assert f"{100 * (ours - rest):+.1f} points" in claims["beats-rest"].published
    curriculum, uniform = (dict(map(tuple, published["curriculum"][name])) for name in ("curriculum", "uniform"))
    last = max(curriculum.keys() & uniform.keys())
    gap = f"{100 * (curriculum[last] - uniform[last]):+.1f} points"
    assert claims["curriculum-beats-uniform"].published.startswith(gap)

    points = published["long2short"]["panels"]
    short = by_id(shortening.claims({arm: made(0.5, 20.0) for arm in shortening.FINISHED}))
    names = {"rl": "rl", "dpo": "dpo", "merge+rs": "merge + rs", "merge": "merge", "shortest": "shortest"}
    places = {arm: f"k1.5-short w/ {name}" if arm != "shortest" else "k1.5-shortest" for arm, name in names.items()}
    for better, worse in zip(shortening.ORDER, shortening.ORDER[1:], strict=False):
        gaps = [100 * (points[set_][places[better]][1] - points[set_][places[worse]][1]) for set_ in points]
        said = short[f"{better}-above-{worse}"].published
        assert said == ", ".join(f"{gap:+.1f}" for gap in gaps) + f" points ({', '.join(points)})"


# --- long2short ------------------------------------------------------------------------------------------------------


def arms(**changes: tuple[float, float]) -> dict[str, Scores]:
    """In the report's order: accuracy falls from rl to shortest; long is right as often as rl, and longer."""
    points = {
        **{"long": (0.8, 80.0), "rl": (0.8, 40.0), "dpo": (0.7, 60.0), "merge+rs": (0.6, 50.0)},
        **{"merge": (0.5, 55.0), "shortest": (0.4, 45.0)},
        **changes,
    }
    return {arm: made(*point) for arm, point in points.items()}


def test_the_reports_order_holds_fails_or_is_undecided() -> None:
    claims = by_id(shortening.claims(arms(**{"merge+rs": (0.5, 50.0), "shortest": (0.6, 45.0)})))
    verdicts = {id: claim.verdict for id, claim in claims.items() if "-above-" in id}
    assert verdicts == {
        "rl-above-dpo": "holds",
        "dpo-above-merge+rs": "holds",
        "merge+rs-above-merge": "undecided",
        "merge-above-shortest": "fails",
    }
    assert claims["rl-above-dpo"].estimate == pytest.approx(10)
    assert claims["merge-above-shortest"].estimate == pytest.approx(-10)


@pytest.mark.parametrize(
    ("rl", "kept", "shorter"),
    [
        ((0.8, 40.0), "holds", "holds"),
        ((0.785, 80.0), "undecided", "undecided"),  # 0.98 of long's accuracy
        ((0.6, 100.0), "fails", "fails"),
        ((0.9, 100.0), "holds", "fails"),
    ],
)
def test_rl_keeps_accuracy_and_is_shorter(rl: tuple[float, float], kept: str, shorter: str) -> None:
    claims = by_id(shortening.claims(arms(rl=rl)))
    assert (claims["rl-keeps-accuracy"].verdict, claims["rl-is-shorter"].verdict) == (kept, shorter)
    assert claims["rl-keeps-accuracy"].estimate == pytest.approx(rl[0] / 0.8)
    assert claims["rl-is-shorter"].estimate == pytest.approx(rl[1] / 80)


def test_an_accuracy_of_nothing_is_no_division_by_zero() -> None:
    claim = by_id(shortening.claims(arms(long=(0.0, 80.0), rl=(0.0, 40.0))))["rl-keeps-accuracy"]
    assert claim.verdict == "undecided"


def test_rl_is_on_the_front_unless_another_arm_dominates_it() -> None:
    assert shortening.on_the_front(arms()).verdict == "holds"
    assert shortening.on_the_front(arms()).estimate == 0
    dominated = shortening.on_the_front(arms(dpo=(0.9, 30.0)))
    assert (dominated.verdict, dominated.estimate) == ("fails", 1.0)
    assert "(dpo)" in dominated.text
    longer = shortening.on_the_front(arms(dpo=(0.9, 41.0)))
    assert longer.verdict == "holds", "a longer arm does not dominate, however right"
    scores = arms()
    rng = np.random.default_rng(2)
    near = scores["rl"]
    noise = rng.normal(size=near.tokens.shape)
    scores["merge"] = Scores(near.problems, near.accuracy, near.tokens + noise - noise.mean(), near.lengths, 1)
    even = shortening.on_the_front(scores)
    assert even.verdict == "undecided"
    assert even.estimate == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_joint_covariance(seeds: int) -> None:
    """The ellipse is as wide as the intervals, and leans as the means do."""
    rng = np.random.default_rng(seeds)
    accuracy, tokens = rng.random((seeds, 30)), 20 * rng.random((seeds, 30))
    found = shortening.joint_covariance(Scores(tuple(map(str, range(30))), accuracy, tokens, tokens.ravel(), 1))
    for place, values in enumerate((accuracy, tokens)):
        around = interval(values)
        assert 1.959964 * math.sqrt(found[place, place]) == pytest.approx((around.high - around.low) / 2)
    if seeds == 1:
        (aa, at), (_, tt) = joint(accuracy[0], tokens[0]).covariance
        assert found[0, 1] / math.sqrt(found[0, 0] * found[1, 1]) == pytest.approx(at / math.sqrt(aa * tt))
    assert np.linalg.eigvalsh(found).min() > 0
