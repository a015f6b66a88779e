"""Every method against closed forms and brute-force enumeration on the table policy of `bandit.py`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from bandit import (
    MAX_TOKENS,
    METHODS,
    PICKED,
    REFERENCE,
    RESPONSES,
    THETA,
    Array,
    flat_logprobs,
    group,
    grpo,
    loss_and_gradient,
    probability,
    response_of,
    scores,
    token_logprobs,
    two_groups,
    weighted_scores,
)

from reasonlab.config import Config, MirrorDescentConfig, RestConfig, validate
from reasonlab.grading.grade import Verdict
from reasonlab.methods import build_method
from reasonlab.methods.group import Method
from reasonlab.methods.grpo import Grpo
from reasonlab.methods.mirror_descent import MirrorDescent
from reasonlab.methods.rest import Rest
from reasonlab.methods.sft import SupervisedFineTuning
from reasonlab.train.batch import Example, Totals, pack

SHORT, LONG = RESPONSES[0], RESPONSES[2]


# --- the table itself -----------------------------------------------------------------------------------------------


def test_the_table_is_a_policy_with_the_gradients_that_autograd_finds() -> None:
    assert len(RESPONSES) == 8
    assert sum(probability(THETA, r) for r in RESPONSES) == pytest.approx(1)
    parameter = torch.tensor(THETA, requires_grad=True)
    examples = SupervisedFineTuning().examples([group(RESPONSES, [1.0] * 8)])
    flat_logprobs(parameter, examples).sum().backward()
    np.testing.assert_allclose(parameter.grad, sum(scores(THETA, r).sum(0) for r in RESPONSES), atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_loss_adds_up_over_any_split_of_the_batch(name: str) -> None:
    method = METHODS[name]
    examples = method.examples(two_groups(reference=REFERENCE))
    totals = Totals.of(examples)
    loss, gradient = loss_and_gradient(method, examples)
    for split in range(1, len(examples)):
        parts = [loss_and_gradient(method, part, totals=totals) for part in (examples[:split], examples[split:])]
        assert sum(part[0] for part in parts) == pytest.approx(loss, abs=1e-6)
        np.testing.assert_allclose(sum(part[1] for part in parts), gradient, atol=1e-6)


@pytest.mark.parametrize("raw", [{"type": "sft"}, {"type": "rest"}, {"type": "mirror_descent"}, {"type": "grpo"}])
def test_a_recipe_names_its_method(raw: dict[str, str]) -> None:
    config: Config = validate({"method": raw, "rollout": {"max_tokens": 77}}, "test")
    kinds = {"sft": SupervisedFineTuning, "rest": Rest, "mirror_descent": MirrorDescent, "grpo": Grpo}
    method = build_method(config)
    assert type(method) is kinds[raw["type"]]
    if isinstance(method, Grpo):
        assert method.max_tokens == 77


# --- supervised -----------------------------------------------------------------------------------------------------


def test_sft_is_the_mean_token_likelihood() -> None:
    method = METHODS["sft"]
    examples = method.examples(two_groups())
    tokens = sum(len(r) for part in PICKED for r in part)
    loss, gradient = loss_and_gradient(method, examples)
    assert loss == pytest.approx(-sum(token_logprobs(THETA, response_of(e)).sum() for e in examples) / tokens)
    expected = -weighted_scores(examples, [np.ones(len(e.response)) / tokens for e in examples])
    np.testing.assert_allclose(gradient, expected, atol=1e-7)


@pytest.mark.parametrize("keep", ["best", "correct"])
def test_rest_fits_what_it_keeps_and_nothing_else(keep: Any) -> None:
    method = Rest(RestConfig(type="rest", keep=keep))
    kept = {
        "best": [PICKED[0][0], PICKED[1][1]],
        "correct": [PICKED[0][0], PICKED[0][2], PICKED[1][1], PICKED[1][2]],
    }[keep]
    examples = method.examples(two_groups())
    assert [response_of(e) for e in examples] == kept
    tokens = sum(map(len, kept))
    _, gradient = loss_and_gradient(method, examples)
    expected = -sum(scores(THETA, r).sum(0) for r in kept) / tokens
    np.testing.assert_allclose(gradient, expected, atol=1e-7)


def test_rest_prefers_reward_and_never_brevity() -> None:
    method = Rest(RestConfig(type="rest"))
    assert [response_of(e) for e in method.examples([group([SHORT, LONG], [0.5, 1.0])])] == [LONG]
    assert [response_of(e) for e in method.examples([group([LONG, SHORT], [1.0, 1.0])])] == [LONG]
    assert [response_of(e) for e in method.examples([group([SHORT, LONG], [1.0, 1.0])])] == [SHORT]
    assert method.examples([group([LONG, SHORT], [0.0, 0.0])]) == []
    lucky = group([LONG, SHORT], [0.2, 0.9], verdicts=["correct", "wrong"])
    assert [response_of(e) for e in method.examples([lucky])] == [LONG]


# --- mirror descent -------------------------------------------------------------------------------------------------


def mirror_terms(examples: Sequence[Example], theta: Array) -> tuple[Array, Array]:
    """A_j and s_j of every response."""
    s = [token_logprobs(theta, response_of(e)).sum() - e.logprobs.astype(float).sum() for e in examples]
    return np.array([e.advantage for e in examples]), np.array(s)


def test_mirror_descent_advantages_are_rewards_less_the_group_mean() -> None:
    examples = METHODS["mirror_descent"].examples(two_groups())
    assert [e.advantage for e in examples] == pytest.approx([0.625, -0.375, 0.125, -0.375, -0.5, 0.5, 0.5, -0.5])


@pytest.mark.parametrize("tau", [0.05, 0.4, 2.0])
def test_mirror_descent_gradient_is_equation_3(tau: float) -> None:
    """(1/k) Σ_j [ A_j ∇ log π_θ(y_j) − (τ/2) ∇ s_j² ] uphill, also where s ≠ 0."""
    method = MirrorDescent(MirrorDescentConfig(tau=tau))
    examples = method.examples(two_groups())
    loss, gradient = loss_and_gradient(method, examples)
    A, s = mirror_terms(examples, THETA)
    assert np.abs(s).max() > 0.3
    uphill = sum(
        a * scores(THETA, response_of(e)).sum(0) - tau / 2 * 2 * s_j * scores(THETA, response_of(e)).sum(0)
        for a, s_j, e in zip(A, s, examples, strict=True)
    ) / len(examples)
    np.testing.assert_allclose(gradient, -uphill, atol=1e-6)
    log_pi = np.array([token_logprobs(THETA, response_of(e)).sum() for e in examples])
    assert loss == pytest.approx(np.mean(-A * log_pi + tau / 2 * s**2), abs=1e-6)


@pytest.mark.parametrize("tau", [0.05, 0.4, 2.0])
def test_mirror_descent_has_the_gradient_of_the_squared_residual(tau: float) -> None:
    method = MirrorDescent(MirrorDescentConfig(tau=tau))
    examples = method.examples(two_groups())
    _, gradient = loss_and_gradient(method, examples)
    parameter = torch.tensor(THETA, requires_grad=True)
    logprobs, batch = flat_logprobs(parameter, examples), pack(examples, Totals.of(examples), "cpu")
    s = batch.sum_by_sequence(logprobs - batch.old)
    ((batch.advantage - tau * s) ** 2 / (2 * tau)).mean().backward()
    np.testing.assert_allclose(gradient, parameter.grad, atol=1e-6)


def test_the_first_step_is_reinforce_whatever_tau_and_the_second_is_not() -> None:
    def inner_steps(tau: float) -> tuple[Array, Array]:
        method = MirrorDescent(MirrorDescentConfig(tau=tau))
        examples = method.examples(two_groups(policy=THETA))
        _, first = loss_and_gradient(method, examples)
        moved = THETA - 2.0 * first
        _, second = loss_and_gradient(method, examples, moved)
        A, s = mirror_terms(examples, moved)
        weights = [np.full(len(e.response), a - tau * s_j) for e, a, s_j in zip(examples, A, s, strict=True)]
        np.testing.assert_allclose(second, -weighted_scores(examples, weights, moved) / len(examples), atol=1e-6)
        return first, second

    (first, second), (other_first, other_second) = inner_steps(0.01), inner_steps(1.5)
    examples = METHODS["mirror_descent"].examples(two_groups())
    reinforce = weighted_scores(examples, [np.full(len(e.response), e.advantage) for e in examples])
    np.testing.assert_allclose(first, -reinforce / len(examples), atol=1e-6)
    np.testing.assert_allclose(other_first, first, atol=1e-6)
    assert np.abs(second - other_second).max() > 0.01


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_a_response_at_its_target_is_let_go(tau: float) -> None:
    """At s_j = A_j / τ the pull and the push cancel."""
    method = MirrorDescent(MirrorDescentConfig(tau=tau))
    examples = method.examples(two_groups(policy=THETA))
    for e in examples:
        e.logprobs = (e.logprobs - e.advantage / tau / len(e.response)).astype(np.float32)
    _, gradient = loss_and_gradient(method, examples)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_per_token_mirror_descent() -> None:
    """−(1/N) Σ_t (A_j − τ Δ_{j,t}) ∇ log π_t, with Δ the log-ratio of the token and N all tokens."""
    tau, method = 0.4, METHODS["mirror_descent_per_token"]
    examples = method.examples(two_groups())
    loss, gradient = loss_and_gradient(method, examples)
    delta = [token_logprobs(THETA, response_of(e)) - e.logprobs for e in examples]
    tokens = sum(map(len, delta))
    expected = -weighted_scores(examples, [e.advantage - tau * d for e, d in zip(examples, delta, strict=True)])
    np.testing.assert_allclose(gradient, expected / tokens, atol=1e-6)
    by_hand = sum(
        (-e.advantage * token_logprobs(THETA, response_of(e)) + tau / 2 * d**2).sum()
        for e, d in zip(examples, delta, strict=True)
    )
    assert loss == pytest.approx(by_hand / tokens, abs=1e-6)


def test_equal_rewards_leave_only_the_pull_back() -> None:
    method = METHODS["mirror_descent"]
    examples = method.examples([group(PICKED[0], [1.0] * 4, policy=THETA)])
    _, gradient = loss_and_gradient(method, examples)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)
    _, pull = loss_and_gradient(method, method.examples([group(PICKED[0], [1.0] * 4)]))
    assert np.abs(pull).max() > 0.01


# --- unbiasedness, by enumeration -----------------------------------------------------------------------------------

REWARD_OF = dict(zip(RESPONSES, [1.0, 0.0, 0.3, 1.0, 0.0, 0.7, 0.0, 0.1], strict=True))


def true_policy_gradient() -> Array:
    """∇ Σ_y π(y) R(y) = Σ_y π(y) R(y) ∇ log π(y)."""
    total = np.zeros_like(THETA)
    for r in RESPONSES:
        total += probability(THETA, r) * REWARD_OF[r] * scores(THETA, r).sum(0)
    return total


def expected_gradient(method: Method, size: int) -> Array:
    """The mean of the method's gradient over every group of `size` independent responses."""
    total = np.zeros_like(THETA)
    for responses in itertools.product(RESPONSES, repeat=size):
        weight = np.prod([probability(THETA, r) for r in responses])
        examples = method.examples([group(responses, [REWARD_OF[r] for r in responses], policy=THETA)])
        total += weight * loss_and_gradient(method, examples)[1]
    return total


@pytest.mark.parametrize(
    ("method", "size", "factor"),
    [
        (grpo("rloo"), 2, 1.0),
        (grpo("rloo"), 3, 1.0),
        (METHODS["mirror_descent"], 2, 1 / 2),  # the group's mean contains the response itself
        (METHODS["mirror_descent"], 3, 2 / 3),
        (grpo("dr_grpo"), 2, 1 / 2 / MAX_TOKENS),
    ],
    ids=["rloo of 2", "rloo of 3", "mirror descent of 2", "mirror descent of 3", "dr_grpo of 2"],
)
def test_the_expected_gradient_is_that_of_the_expected_reward(method: Method, size: int, factor: float) -> None:
    np.testing.assert_allclose(expected_gradient(method, size), -factor * true_policy_gradient(), atol=1e-6)


def test_mirror_descent_with_exact_expectations_is_the_policy_gradient() -> None:
    baseline = sum(probability(THETA, r) * REWARD_OF[r] for r in RESPONSES)
    method = METHODS["mirror_descent"]
    examples = method.examples([group(RESPONSES, [1.0] * 8, policy=THETA)])
    for e in examples:
        r = response_of(e)
        e.advantage = probability(THETA, r) * (REWARD_OF[r] - baseline)
    _, gradient = loss_and_gradient(method, examples, totals=Totals(tokens=1, sequences=1))
    np.testing.assert_allclose(gradient, -true_policy_gradient(), atol=1e-6)


# --- grades ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in METHODS if name != "sft"])
def test_what_could_not_be_graded_is_left_out(name: str) -> None:
    """A failed grader is no wrong answer: the result is as if the rollout had never been made."""
    verdicts: list[Verdict] = ["correct", "error", "wrong", "timeout", "correct"]
    rewards = [1.0, 9.0, 0.0, -9.0, 0.5]
    responses = RESPONSES[:5]
    whole = [group(responses, rewards, verdicts=verdicts, reference=REFERENCE), two_groups()[1]]
    kept = [0, 2, 4]
    clean = group([responses[i] for i in kept], [rewards[i] for i in kept], verdicts=[verdicts[i] for i in kept])
    got, expected = METHODS[name].examples(whole), METHODS[name].examples([clean, two_groups()[1]])
    assert [response_of(e) for e in got] == [response_of(e) for e in expected]
    assert [e.advantage for e in got] == pytest.approx([e.advantage for e in expected])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [name for name in METHODS if name != "sft"])
def test_nothing_graded_is_nothing_to_learn(name: str) -> None:
    failed = group(RESPONSES[:3], [0.0] * 3, verdicts=["error", "timeout", "error"])
    assert METHODS[name].examples([failed]) == []
    assert METHODS[name].examples([]) == []
    assert len(METHODS[name].examples([failed, two_groups()[1]])) == len(METHODS[name].examples([two_groups()[1]]))


def test_a_group_knows_its_correct_and_its_gradable_rollouts() -> None:
    one = group(RESPONSES[:4], [1, 0, 0, 0], verdicts=["correct", "wrong", "error", "timeout"])
    assert one.correct.tolist() == [True, False, False, False]
    assert one.gradable.tolist() == [True, True, False, False]
    assert one.lengths.tolist() == [len(r) for r in RESPONSES[:4]]
