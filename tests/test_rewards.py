"""Shaping the reward: the length reward of Kimi k1.5 and DAPO's overlong punishment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reasonlab.methods.group import length_reward, overlong_penalty


def test_length_reward_by_hand() -> None:
    """Lengths 100, 200, 150, 300, 200: λ = 0.5, 0, 0.25, −0.5, 0; wrong answers lose what is above zero."""
    lengths, correct = np.array([100, 200, 150, 300, 200]), np.array([True, True, False, False, False])
    assert length_reward(lengths, correct).tolist() == [0.5, 0.0, 0.0, -0.5, 0.0]
    assert length_reward(lengths, ~correct).tolist() == [0.0, 0.0, 0.25, -0.5, 0.0]


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5]])
def test_equal_lengths_earn_nothing(lengths: list[int]) -> None:
    assert length_reward(np.array(lengths), np.ones(len(lengths), bool)).tolist() == [0.0] * len(lengths)


GRADED_LENGTHS = st.lists(st.tuples(st.integers(1, 500), st.booleans()), min_size=1, max_size=12)


@given(GRADED_LENGTHS, st.floats(0, 1.999))
def test_a_correct_answer_outranks_every_wrong_one(samples: list[tuple[int, bool]], weight: float) -> None:
    lengths, correct = (np.array(column) for column in zip(*samples, strict=True))
    total = correct + weight * length_reward(lengths, correct)
    assert total[correct].min(initial=np.inf) > total[~correct].max(initial=-np.inf)


@given(GRADED_LENGTHS)
def test_length_reward_is_bounded_and_favours_brevity(samples: list[tuple[int, bool]]) -> None:
    lengths, correct = (np.array(column) for column in zip(*samples, strict=True))
    reward = length_reward(lengths, correct)
    assert np.abs(reward).max() <= 0.5
    assert (reward[~correct] <= 0).all()
    for kind in (correct, ~correct):
        assert (np.diff(reward[kind][np.argsort(lengths[kind])]) <= 0).all()


def test_overlong_penalty_by_hand() -> None:
    """DAPO's own numbers: at most 20480 tokens, the last 4096 of them punished."""
    lengths = np.array([1, 16384, 17408, 18432, 20480, 30000])
    assert overlong_penalty(lengths, 20480, 4096).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


@given(st.integers(1, 300), st.integers(1, 300), st.lists(st.integers(1, 700), min_size=1, max_size=9))
def test_overlong_penalty_falls_from_nothing_to_minus_one(free: int, buffer: int, lengths: list[int]) -> None:
    penalty = overlong_penalty(np.array(sorted(lengths)), free + buffer, buffer)
    assert (np.diff(penalty) <= 0).all()
    for length, value in zip(sorted(lengths), penalty, strict=True):
        assert value == (0 if length <= free else -1 if length >= free + buffer else (free - length) / buffer)
