"""Drawing tokens: keyed numbers that are uniform, and frequencies that are the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from reasonlab.keys import key
from reasonlab.rollout.sampling import keyed_uniform, sample_tokens
from reasonlab.rollout.types import Sampling

VOCABULARY = 32

# --- keyed randomness -----------------------------------------------------------------------------------------------


def splitmix64(seed: int, n: int) -> int:
    """The n-th output (from 0) of Vigna's generator, in plain integers."""
    wrap = (1 << 64) - 1
    z = (seed + (n + 1) * 0x9E3779B97F4A7C15) & wrap
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
    return z ^ (z >> 31)


def test_the_reference_is_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, n) for n in range(4)] == published


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 100_000)), min_size=1, max_size=30))
def test_keyed_uniform_is_splitmix64(pairs: list[tuple[int, int]]) -> None:
    keys, counters = (torch.tensor(column, dtype=torch.int64) for column in zip(*pairs, strict=True))
    got = keyed_uniform(keys, counters)
    assert got.dtype == torch.float32
    assert got.tolist() == [(splitmix64(k, n) >> 40) / 2**24 for k, n in pairs]


def keyed_numbers(keys: int, counters: int) -> NDArray[np.float32]:
    seeds = torch.tensor([key("uniform", i) for i in range(keys)])
    grid = keyed_uniform(seeds[:, None].expand(keys, counters), torch.arange(counters).expand(keys, counters))
    return grid.numpy()


@pytest.mark.parametrize("shape", [(1, 20_000), (20_000, 1), (200, 100)], ids=["along tokens", "along keys", "both"])
def test_keyed_numbers_are_uniform(shape: tuple[int, int]) -> None:
    numbers = keyed_numbers(*shape).ravel()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3


def test_neighbouring_draws_are_independent() -> None:
    grid = keyed_numbers(300, 200)
    for first, second in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        cells, _, _ = np.histogram2d(first.ravel(), second.ravel(), bins=8, range=((0, 1), (0, 1)))
        assert stats.chisquare(cells.ravel()).pvalue > 1e-3


def test_keys_are_stable_and_tell_their_parts_apart() -> None:
    assert key("rollout", 7, "sum/3/train/000123", 0) == key("rollout", 7, "sum/3/train/000123", 0)
    parts: list[tuple[int | str, ...]] = [(1, 2), (2, 1), ("1", 2), (12,), ("12",), (1, 2, 0), ("a", "b"), ("ab",), ()]
    assert len({key(*p) for p in parts}) == len(parts)
    assert all(0 <= key(*p) < 2**63 for p in parts)
    assert key("a fixed point", 1) == 494903852682505609


# --- the distribution -----------------------------------------------------------------------------------------------


def draws(
    logits: torch.Tensor, sampling: Sampling, count: int = 20_000
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    keys = torch.tensor([key("draw", i) for i in range(count)])
    tokens, logprobs = sample_tokens(logits.expand(count, -1), keys, torch.zeros(count, dtype=torch.int64), sampling)
    return tokens.numpy(), logprobs.numpy()


def chi_square_p(tokens: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    counts = np.bincount(tokens, minlength=len(probabilities))
    seen = probabilities > 0
    assert not counts[~seen].any()
    expected = probabilities[seen] / probabilities[seen].sum() * len(tokens)
    return float(stats.chisquare(counts[seen], expected).pvalue)


def softmax(logits: torch.Tensor, temperature: float = 1.0) -> NDArray[np.float64]:
    return (logits.double() / temperature).softmax(-1).numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5
    tokens, logprobs = draws(logits, Sampling(temperature=temperature))
    assert chi_square_p(tokens, softmax(logits, temperature)) > 1e-3
    np.testing.assert_allclose(logprobs, np.log(softmax(logits, temperature))[tokens], atol=1e-5)


def brute_force_truncation(probabilities: NDArray[np.float64], top_k: int, top_p: float) -> NDArray[np.float64]:
    """Keep the k likeliest, then the shortest list of likeliest ones whose share of the rest reaches p."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept = order[:top_k] if top_k else order
    mass = sum(probabilities[i] for i in kept)
    chosen: list[int] = []
    for i in kept:
        if sum(probabilities[j] for j in chosen) >= top_p * mass:
            break
        chosen.append(i)
    truncated = np.zeros_like(probabilities)
    truncated[chosen] = probabilities[chosen]
    return truncated


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (4, 1.0), (50, 1.0), (0, 0.5), (0, 0.9), (0, 1e-6), (6, 0.8), (3, 0.5)]
)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_top_k_and_top_p_are_the_brute_force_truncation(top_k: int, top_p: float, temperature: float) -> None:
    logits = torch.linspace(1.5, -1.0, 10)[torch.randperm(10, generator=torch.Generator().manual_seed(2))]
    tokens, logprobs = draws(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    full = softmax(logits, temperature)
    kept = brute_force_truncation(full, top_k, top_p)
    assert set(tokens.tolist()) == set(np.flatnonzero(kept).tolist())
    if np.count_nonzero(kept) > 1:
        assert chi_square_p(tokens, kept) > 1e-3
    np.testing.assert_allclose(logprobs, np.log(full)[tokens], atol=1e-5)  # those of the whole distribution


@pytest.mark.parity
@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (8, 0.6)])
def test_truncation_keeps_the_tokens_that_transformers_keeps(top_k: int, top_p: float) -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)) * 0.5
    warped = logits[None]
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    tokens, _ = draws(logits, Sampling(top_k=top_k, top_p=top_p))
    assert set(tokens.tolist()) == set(torch.isfinite(warped[0]).nonzero().ravel().tolist())


def test_temperature_zero_takes_the_likeliest_token_whatever_the_key() -> None:
    logits = torch.tensor([0.1, 2.0, 1.9, -3.0])
    tokens, logprobs = draws(logits, Sampling(temperature=0), count=50)
    assert set(tokens.tolist()) == {1}
    np.testing.assert_allclose(logprobs, logits.log_softmax(-1)[1].item(), atol=1e-6)


def test_tokens_without_probability_are_never_drawn() -> None:
    """A threshold next to nothing, or next to the whole mass, must not leave the vocabulary or its support."""
    logits = torch.tensor([-200.0, 0.0, 0.0, -200.0])
    tokens, _ = draws(logits, Sampling())
    assert set(tokens.tolist()) == {1, 2}
