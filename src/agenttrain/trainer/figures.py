"""A step's rollouts, and what was taught of them, become the numbers that every trainer reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agenttrain.records import RolloutResult
from agenttrain.trainer.batches import Lessons


def rollout_figures(results: Sequence[RolloutResult], taught: Sequence[Lessons]) -> dict[str, float]:
    """Numbers of the rollouts of a step; the reward's are left out when none has any.

    Args:
        results: all of the step, the last attempt of each.
        taught: what was kept of them, of one batch or of several.
    """
    rewards = [r.rollout.reward.score for r in results if r.rollout.reward is not None]
    figures: dict[str, float] = {
        "groups": sum(one.n_groups for one in taught),
        "groups_trained": sum(one.n_trained for one in taught),
        "groups_equal": sum(one.n_equal for one in taught),
        "rollouts": len(results),
        "rollouts_trained": sum(len(one.kept) for one in taught),
        "tokens_sampled": sum(result.rollout.n_sampled_ids for result in results),
    }
    if rewards:
        mean = math.fsum(rewards) / len(rewards)
        figures["reward"] = mean
        figures["reward_std"] = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return figures
