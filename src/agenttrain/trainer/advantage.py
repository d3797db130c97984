"""Rewards of one group to advantages: how much better than its siblings a rollout did."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agenttrain.errors import SampleError

EQUAL = 1e-9
"""Rewards closer together than this are equal."""


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether a group teaches nothing, since its rewards don't differ."""
    return max(rewards) - min(rewards) <= EQUAL


def centered_advantages(rewards: Sequence[float]) -> list[float]:
    """Center the rewards of one group on their mean.

    Args:
        rewards: [G], one per rollout of the group, any real number.

    Returns:
        [G], summing to 0; all zeros when the rewards are equal (the group teaches nothing).

    Raises:
        SampleError: the group is empty, or a reward is not finite.

    Source: Dr. GRPO, arXiv:2503.20783 (no division by the standard deviation).

    Example: [1, 0, 0, 1] -> [0.5, -0.5, -0.5, 0.5]
    """
    _check(rewards)
    if all_equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Center the rewards of one group on their mean, in units of their standard deviation.

    Args:
        rewards: [G], one per rollout of the group, any real number.

    Returns:
        [G], summing to 0 with mean square 1; all zeros when the rewards are equal (the group teaches nothing).

    Raises:
        SampleError: the group is empty, or a reward is not finite.

    Source: GRPO, arXiv:2402.03300, section 4.1.2, with the standard deviation of the group itself (divided by G).

    Example: [1, 0, 0, 1] -> [1.0, -1.0, -1.0, 1.0]
    """
    centered = centered_advantages(rewards)
    deviation = math.sqrt(math.fsum(a * a for a in centered) / len(centered))
    return [a / deviation for a in centered] if deviation else centered


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """Compare each reward of a group with the mean of the others.

    Args:
        rewards: [G], one per rollout of the group, any real number.

    Returns:
        [G], summing to 0; all zeros when the rewards are equal, and for a single one.

    Raises:
        SampleError: the group is empty, or a reward is not finite.

    Source: RLOO, arXiv:2402.14740, section 2.2: r_i minus the mean of the other G - 1, which is G / (G - 1) times the
    distance from the mean of all.

    Example: [1, 0, 0] -> [1.0, -0.5, -0.5]
    """
    centered = centered_advantages(rewards)
    n = len(rewards)
    return [a * n / (n - 1) for a in centered] if n > 1 else centered


def own_rewards(rewards: Sequence[float]) -> list[float]:
    """The rewards as they are, of which a critic's values are subtracted later.

    Args:
        rewards: [G], any real number.

    Returns:
        [G]

    Raises:
        SampleError: the group is empty, or a reward is not finite.

    Example: [1, 0] -> [1.0, 0.0]
    """
    _check(rewards)
    return [float(reward) for reward in rewards]


def _check(rewards: Sequence[float]) -> None:
    if not rewards:
        raise SampleError("A group has no rewards. Give at least one; a missing reward is left out, never 0.")
    for i, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise SampleError(f"Reward {i} of a group of {len(rewards)} is {reward}. A verifier must give a number.")
