"""Advantages within a group."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenttrain.errors import SampleError
from agenttrain.trainer.advantage import (
    centered_advantages,
    group_advantages,
    leave_one_out_advantages,
    own_rewards,
)

rewards_of_a_group = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


def test_two_of_four_succeed() -> None:
    assert group_advantages([1, 0, 0, 1]) == [1.0, -1.0, -1.0, 1.0]
    assert centered_advantages([1, 0, 0, 1]) == [0.5, -0.5, -0.5, 0.5]


def test_one_of_four_succeeds() -> None:
    """Mean 1/4, standard deviation sqrt(3)/4."""
    root = math.sqrt(3)
    assert group_advantages([1, 0, 0, 0]) == pytest.approx([root, -1 / root, -1 / root, -1 / root])


def test_each_against_the_mean_of_the_others() -> None:
    assert leave_one_out_advantages([1, 0, 0]) == pytest.approx([1.0, -0.5, -0.5])
    assert leave_one_out_advantages([0.3]) == [0.0]


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_leaving_one_out_is_what_it_says(rewards: list[float]) -> None:
    expected = [r - sum(rewards[:i] + rewards[i + 1 :]) / (len(rewards) - 1) for i, r in enumerate(rewards)]
    if max(rewards) - min(rewards) > 1e-9:
        assert leave_one_out_advantages(rewards) == pytest.approx(expected, abs=1e-9)


def test_a_critics_estimator_leaves_rewards_as_they_are() -> None:
    assert own_rewards([1, 0.5]) == [1.0, 0.5]


@pytest.mark.parametrize("estimate", [group_advantages, centered_advantages, leave_one_out_advantages])
def test_equal_rewards_teach_nothing(estimate: object) -> None:
    assert callable(estimate)
    assert estimate([0.7] * 3) == [0.0, 0.0, 0.0]
    assert estimate([0.1 + 0.2, 0.3]) == [0.0, 0.0]


@given(rewards_of_a_group)
def test_advantages_sum_to_0_and_keep_the_order(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert abs(sum(advantages)) < 1e-6
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(advantages[a] <= advantages[b] + 1e-9 for a, b in itertools.pairwise(order))


def test_no_reward_and_no_number_are_refused() -> None:
    with pytest.raises(SampleError, match="no rewards"):
        group_advantages([])
    with pytest.raises(SampleError, match="Reward 1 of a group of 2 is nan"):
        centered_advantages([0.0, math.nan])
