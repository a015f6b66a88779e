"""GRPO and its family against closed forms on the table policy of `bandit.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from bandit import (
    MAX_TOKENS,
    METHODS,
    OLD,
    PICKED,
    REFERENCE,
    REWARDS,
    THETA,
    Array,
    grpo,
    loss_and_gradient,
    response_of,
    token_logprobs,
    two_groups,
    weighted_scores,
)
from hypothesis import given
from hypothesis import strategies as st

from reasonlab.config import VARIANTS, MirrorDescentConfig
from reasonlab.methods.grpo import SIGMA_GUARD, Grpo
from reasonlab.methods.mirror_descent import MirrorDescent
from reasonlab.train.batch import Example, Totals, pack


def z_scores(values: Array) -> Array:
    result: Array = (values - values.mean()) / (values.std(ddof=1) + SIGMA_GUARD)
    return result


def expected_advantages(kind: str) -> Array:
    rewards = [np.array(r) for r in REWARDS]
    match kind:
        case "group_std":
            parts = [z_scores(r) for r in rewards]
        case "group_mean":
            parts = [r - r.mean() for r in rewards]
        case "leave_one_out":
            parts = [np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]) for r in rewards]
        case "batch_std":
            parts = [z_scores(np.concatenate(rewards))]
        case _:
            parts = [z_scores(np.concatenate([r - r.mean() for r in rewards]))]
    return np.concatenate(parts)


KINDS = {
    "grpo": "group_std",
    "dr_grpo": "group_mean",
    "dapo": "group_std",
    "gspo": "group_std",
    "cispo": "group_std",
    "rloo": "leave_one_out",
    "reinforce_pp": "batch_std",
    "reinforce_pp_baseline": "group_mean_batch_std",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_advantages(variant: str) -> None:
    got = [e.advantage for e in METHODS[variant].examples(two_groups())]
    assert got == pytest.approx(list(expected_advantages(KINDS[variant])))


def test_advantages_by_hand() -> None:
    rewards = [np.array([1.0, 0.0, 0.0, 0.0])]
    assert grpo("dr_grpo").advantages(rewards)[0] == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert grpo("grpo").advantages(rewards)[0] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-3)
    assert grpo("rloo").advantages(rewards)[0] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=8))
def test_leave_one_out_is_a_stretched_group_mean(rewards: list[float]) -> None:
    r = np.array(rewards)
    expected = len(r) / (len(r) - 1) * (r - r.mean())
    np.testing.assert_allclose(grpo("rloo").advantages([r])[0], expected, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_rewards_and_lone_samples_have_finite_advantages(variant: str) -> None:
    method = grpo(variant)
    same, lone = method.advantages([np.ones(4)])[0], method.advantages([np.array([0.7])])[0]
    np.testing.assert_allclose(same, 0, atol=1e-12)
    np.testing.assert_allclose(lone, 0, atol=1e-12)


def clipped_weight(A: float, r: Array, low: float, high: float) -> Array:
    """d min(rA, clip(r)A) / d log π: r·A, or nothing where the clip holds."""
    held = (r > 1 + high) if A > 0 else (r < 1 - low)
    result: Array = np.where(held, 0.0, A * r)
    return result


def clipped_value(A: float, r: Array, low: float, high: float) -> Array:
    result: Array = np.minimum(r * A, np.clip(r, 1 - low, 1 + high) * A)
    return result


# For a response: (A, token ratios, token logprobs) -> (objective of each token, weight of each token's score),
# before averaging; and the factor of the average for a response of `length` among `n` responses of `tokens` tokens.
Surrogate = Callable[[float, Array, Array], tuple[Array, Array]]
Average = Callable[[int, int, int], float]


def ppo(low: float = 0.2, high: float = 0.2) -> Surrogate:
    return lambda A, r, logp: (clipped_value(A, r, low, high), clipped_weight(A, r, low, high))


def gspo(low: float, high: float) -> Surrogate:
    def surrogate(A: float, r: Array, logp: Array) -> tuple[Array, Array]:
        s = np.full(len(r), np.exp(np.log(r).mean()))
        # ∇ s_i = s_i (1/L_i) Σ_t ∇ log π_t: the 1/L_i is that of the average over tokens, so a token weighs s_i A_i.
        return clipped_value(A, s, low, high), clipped_weight(A, s, low, high)

    return surrogate


def cispo(cap: float) -> Surrogate:
    return lambda A, r, logp: (np.minimum(r, cap) * A * logp, np.minimum(r, cap) * A)


def per_sequence(length: int, n: int, tokens: int) -> float:
    return 1 / (n * length)


def per_token(length: int, n: int, tokens: int) -> float:
    return 1 / tokens


CLOSED_FORMS: dict[str, tuple[Grpo, Surrogate, Average]] = {
    "grpo": (grpo("grpo"), ppo(), per_sequence),
    "grpo, tight": (grpo("grpo", clip_low=0.05, clip_high=0.02), ppo(0.05, 0.02), per_sequence),
    "dr_grpo": (grpo("dr_grpo"), ppo(), lambda length, n, tokens: 1 / (n * MAX_TOKENS)),
    "dapo": (grpo("dapo"), ppo(0.2, 0.28), per_token),
    "gspo": (grpo("gspo"), gspo(3e-4, 4e-4), per_sequence),
    "gspo, wide": (grpo("gspo", clip_low=0.1, clip_high=0.1), gspo(0.1, 0.1), per_sequence),
    "cispo": (grpo("cispo", clip_high=0.1), cispo(1.1), per_token),
    "rloo": (grpo("rloo"), lambda A, r, logp: (A * logp, np.full(len(r), A)), lambda length, n, tokens: 1 / n),
    "reinforce_pp": (grpo("reinforce_pp"), ppo(), per_sequence),
    "reinforce_pp_baseline": (grpo("reinforce_pp_baseline"), ppo(), per_sequence),
}


@pytest.mark.parametrize("kl", [0.0, 0.3], ids=["no KL", "KL"])
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_grpo_family_closed_forms(name: str, kl: float) -> None:
    method, surrogate, average = CLOSED_FORMS[name]
    method = Grpo(method.config.model_copy(update={"kl": kl}), MAX_TOKENS)
    examples = method.examples(two_groups(reference=REFERENCE))
    n, tokens = len(examples), sum(len(e.response) for e in examples)
    value, weights = 0.0, []
    for e, A in zip(examples, expected_advantages(method.config.advantage), strict=True):
        logp = token_logprobs(THETA, response_of(e))
        gap = token_logprobs(REFERENCE, response_of(e)) - logp
        objective, weight = surrogate(float(A), np.exp(logp - e.logprobs), logp)
        factor = average(len(logp), n, tokens)
        value += factor * (objective - kl * (np.exp(gap) - gap - 1)).sum()
        weights.append(factor * (weight + kl * (np.exp(gap) - 1)))
    loss, gradient = loss_and_gradient(method, examples)
    assert loss == pytest.approx(-value, abs=1e-6)
    np.testing.assert_allclose(gradient, -weighted_scores(examples, weights), atol=1e-6)


@pytest.mark.parametrize("variant", ["grpo", "dr_grpo", "dapo", "reinforce_pp"])
def test_clipped_tokens_get_no_gradient_and_the_others_do(variant: str) -> None:
    method = grpo(variant)
    examples = method.examples(two_groups())
    batch = pack(examples, Totals.of(examples), "cpu")
    offsets = torch.tensor([-0.6, -0.1, 0.0, 0.1, 0.6]).repeat(len(batch.old))[: len(batch.old)]
    logprobs = (batch.old + offsets).requires_grad_()
    loss, metrics = method.loss(logprobs, batch)
    loss.backward()
    A = batch.per_token(batch.advantage)
    held = ((A > 0) & (offsets > 0.5)) | ((A < 0) & (offsets < -0.5))
    assert logprobs.grad is not None
    assert 0 < held.sum() < len(held)
    assert (logprobs.grad[held] == 0).all()
    assert (logprobs.grad[~held & (A != 0)] != 0).all()
    assert metrics["clip_ratio"].item() == pytest.approx(held.float().mean().item())
    kl = (offsets.exp() - 1 - offsets).mean().item()
    assert metrics["kl_old"].item() == pytest.approx(kl, rel=1e-5)


def test_masked_tokens_count_nowhere() -> None:
    for name, method in METHODS.items():
        examples = method.examples(two_groups())
        longer = [
            Example(
                e.prompt,
                np.append(e.response, 1),
                np.append(e.logprobs, np.float32(-0.3)),
                np.append(e.mask, False),
                e.advantage,
            )
            for e in examples
        ]
        batches = [pack(part, Totals.of(part), "cpu") for part in (examples, longer)]
        logprobs = [b.old + 0.1 * torch.arange(len(b.old)).remainder(3) * b.mask for b in batches]
        kept = batches[1].mask.bool()
        short = logprobs[1][kept]
        expected, got = method.loss(short, batches[0]), method.loss(logprobs[1], batches[1])
        torch.testing.assert_close(got[0], expected[0], msg=name)
        assert {k: v.item() for k, v in got[1].items()} == pytest.approx({k: v.item() for k, v in expected[1].items()})


def test_truncated_responses_can_be_masked() -> None:
    groups = two_groups()
    groups[0].rollouts[1].finish = "length"
    for mask_truncated in (False, True):
        examples = grpo("dapo", mask_truncated=mask_truncated).examples(groups)
        assert [bool(e.mask.all()) for e in examples] == [True, not mask_truncated] + [True] * 6
        assert [e.advantage for e in examples] == pytest.approx(list(expected_advantages("group_std")))


def test_kl_in_the_reward() -> None:
    beta, method = 0.2, grpo("rloo", kl=0.2, kl_in_reward=True)
    assert method.needs_reference
    groups = two_groups(reference=REFERENCE)
    rewards = [
        np.array(
            [
                reward - beta * (token_logprobs(OLD, r) - token_logprobs(REFERENCE, r)).sum()
                for reward, r in zip(values, responses, strict=True)
            ]
        )
        for values, responses in zip(REWARDS, PICKED, strict=True)
    ]
    expected = np.concatenate(grpo("rloo").advantages(rewards))
    examples = method.examples(groups)
    np.testing.assert_allclose([e.advantage for e in examples], expected, atol=1e-6)
    _, gradient = loss_and_gradient(method, examples)
    weights = [np.full(len(e.response), a / len(examples)) for e, a in zip(examples, expected, strict=True)]
    np.testing.assert_allclose(gradient, -weighted_scores(examples, weights), atol=1e-6)


def test_only_a_kl_term_asks_for_the_reference_model() -> None:
    assert not grpo("grpo").needs_reference
    assert grpo("grpo", kl=0.1).needs_reference
    assert not METHODS["mirror_descent"].needs_reference


def test_only_mirror_descent_resets_the_optimizer() -> None:
    assert {name for name, method in METHODS.items() if method.resets_optimizer} == {
        "mirror_descent",
        "mirror_descent_per_token",
    }
    assert not MirrorDescent(MirrorDescentConfig(reset_optimizer=False)).resets_optimizer


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_advantage_there_is_no_gradient_however_far_the_policy_has_moved(variant: str) -> None:
    """So the loop only counts such examples. Mirror descent pulls them back to where they were sampled."""
    rng = np.random.default_rng(0)
    examples = [
        Example(np.arange(2), np.arange(5), rng.normal(-1, 0.5, 5).astype(np.float32), np.ones(5, bool), advantage)
        for advantage in (0.0, 1.0, 0.0, -2.0)
    ]
    batch = pack(examples, Totals.of(examples), "cpu")
    methods = {"grpo": grpo(variant=variant), "mirror descent": MirrorDescent(MirrorDescentConfig())}
    for name, method in methods.items():
        logprobs = torch.from_numpy(rng.normal(-1, 0.5, 20).astype(np.float32)).requires_grad_()
        (slopes,) = torch.autograd.grad(method.loss(logprobs, batch)[0], logprobs)
        silent = slopes.view(4, 5)[::2].abs().sum() == 0
        assert bool(silent) is method.needs_advantage is (name == "grpo")
