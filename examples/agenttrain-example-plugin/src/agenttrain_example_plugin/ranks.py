"""Rewards of a group to advantages by their order alone."""

from __future__ import annotations

from collections.abc import Sequence


def rank_advantages(rewards: Sequence[float]) -> list[float]:
    """Place the rewards of one group evenly between -1 and 1; one reward far off moves no other.

    Args:
        rewards: [G], one per rollout of the group, any real number.

    Returns:
        [G], summing to 0. Equal rewards share the middle of their places; all zeros when all are equal.

    Example: [0.1, 100.0, 0.2] -> [-1.0, 1.0, 0.0]
    """
    ordered = sorted(rewards)
    if len(ordered) < 2:
        return [0.0] * len(ordered)
    first = {reward: place for place, reward in reversed(list(enumerate(ordered)))}
    last = {reward: place for place, reward in enumerate(ordered)}
    return [(first[reward] + last[reward]) / (len(ordered) - 1) - 1.0 for reward in rewards]
